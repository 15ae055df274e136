"""Exported folders in fresh environments, far from this repository: what `make test-environments` runs.

    python tests/environments/run.py [NAME ...] [--keep FOLDER]

Each environment gets the newest versions of what it names (torch is that of the lock), then the folders and the
drive scripts alone. Needs a package index and some 6 GB of disk; takes about ten minutes on two cores.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

if __package__ in (None, ""):  # run as a file: make the repository and the tests' helpers importable
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from helpers.tiny_exports import ROOT, environment, make_exported, write_expected

from data.cli import Parser

_MORE = ("accelerate", "peft", "bitsandbytes", "torchao", "optimum-quanto")
ENVIRONMENTS = {
    "transformers": (("transformers",), ("drive.py",)),
    "embeddings": (("sentence-transformers", "mteb", *_MORE), ("drive_embeddings.py", "drive_adapters.py", "drive.py")),
    "transformers-4.57": (("transformers==4.57.*", *_MORE), ("drive_adapters.py", "drive.py")),
}
FORMS = ("gpt-bert", "ltg-bert-rope")


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = Parser("Drive exported folders through the libraries of fresh virtual environments.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"environments to make (default: all of {', '.join(ENVIRONMENTS)})"
    )
    parser.add_argument("--keep", type=Path, help="folder for the environments, where a later call finds them again")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.names) - set(ENVIRONMENTS)):
        parser.error(f"NAME {unknown[0]!r} is none of {', '.join(ENVIRONMENTS)}")
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="environments-")))
        export_models(place / "models")
        parent = (options.keep or place).absolute()
        failed = [name for name in options.names or ENVIRONMENTS if not drive(name, parent / name, place)]
    outcome = f"FAILED: {', '.join(failed)}" if failed else "all passed"
    print(f"{outcome}, in {time.monotonic() - begun:.0f} s")
    return int(bool(failed))


def export_models(folder: Path) -> None:
    """A small model of each form, exported, and what our code computes from it."""
    for form in FORMS:
        # Multiples of 64, the block of bitsandbytes' 4 bits.
        model, exported = make_exported(folder / "made", form, sentences=True, hidden_size=64, intermediate_size=128)
        write_expected(model, exported)
        exported.rename(folder / form)


def drive(name: str, folder: Path, place: Path) -> bool:
    """Make the environment and run its scripts on `place`/models; whether all of them passed."""
    packages, scripts = ENVIRONMENTS[name]
    begun = time.monotonic()
    python = folder / "bin" / "python"
    if not python.exists():
        torch = re.search(r"^torch==\S+", (ROOT / "requirements-training.lock").read_text(), flags=re.MULTILINE)
        assert torch is not None
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
        subprocess.run([*pip, torch[0], *packages], check=True)
    print(f"== {name}: {' '.join(packages)} (installed in {time.monotonic() - begun:.0f} s)", flush=True)
    work = place / f"work-{name}"
    work.mkdir()
    passed = True
    for file in scripts:  # drive.py is among them, and the others import it
        shutil.copy(Path(__file__).with_name(file), work)
    for script in scripts:
        command = [str(python), script, str(place / "models")]
        done = subprocess.run(command, cwd=work, env=environment(work) | {"PYTHONWARNINGS": "ignore"}, check=False)
        passed = passed and done.returncode == 0
    return passed


if __name__ == "__main__":
    sys.exit(main())
