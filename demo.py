"""The whole suite in a few minutes: from text on this machine to a small hybrid model that fills gaps and writes.

    make demo                      (or: python demo.py)

Every step is a command that is printed before it runs, as you would type it. Everything goes into demo_output/. Run it
again, also after Ctrl-C or a crash: what is complete is kept, and the training goes on where it stopped.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VOCABULARY = 4096  # that of configs/tiny.json
GAPS = (
    "Return the <mask> of the object.",
    "If the file does not <mask>, an error is raised.",
    "The <mask> is a list of <mask>.",
)
PROMPTS = ("Return the", "This function is", "The value of the")


class DemoError(Exception):
    """The demo cannot go on; the message is one sentence."""


@dataclass(frozen=True)
class Step:
    """One command of the demo whose result is kept.

    arguments: the command after "python". outputs: what is there once it is complete, and deleted where the step must
    begin anew. complete: the file that only the finished step leaves.
    """

    name: str
    title: str
    arguments: tuple[str, ...]
    outputs: tuple[Path, ...]
    complete: Path


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    options = parse_arguments(arguments)
    os.chdir(ROOT)
    folder = (
        Path(os.path.relpath(options.output_dir)) if options.output_dir.is_relative_to(ROOT) else options.output_dir
    )
    started = time.monotonic()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / ".lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DemoError(
                    f"another demo is running in {folder}: wait for it, or give another --output_dir."
                ) from None
            todo = steps(folder, options.max_steps, options.device)
            prepare(todo, folder)
            show(folder, options.device)
    except (DemoError, OSError) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped. `make demo` goes on from here.", file=sys.stderr)
        return 130
    print_next_lines(todo, folder, time.monotonic() - started)
    return 0


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="From text on this machine to a small hybrid model, in a few minutes.")
    parser.add_argument(
        "--output_dir", type=lambda text: Path(text).resolve(), default=ROOT / "demo_output", metavar="FOLDER",
        help="folder for everything (default: demo_output in this repository)",
    )  # fmt: skip
    parser.add_argument("--max_steps", type=int, default=300, metavar="N", help="training steps (default: 300)")
    parser.add_argument(
        "--device",
        choices=("auto", "cuda", "cpu"),
        default="auto",
        help="auto: CUDA where there is a GPU (default: auto)",
    )
    return parser.parse_args(arguments)


def steps(folder: Path, max_steps: int, device: str) -> list[Step]:
    """Return the steps whose results are kept, in order."""
    corpus, tokenizer, shards, run = (
        folder / name for name in ("corpus.jsonl", "tokenizer.json", "shards", "runs/demo")
    )
    every = str(max(1, max_steps // 3))
    training = {
        "train_path": shards / "train",
        "valid_path": shards / "validation",
        "config_file": "configs/tiny.json",
        "tokenizer_path": tokenizer,
        "output_dir": run.parent,
        "name": run.name,
        "hybrid_numerator": 3,
        "hybrid_denominator": 4,
        "seq_length": 64,
        "local_batch_size": 32,
        "global_batch_size": 32,
        "batch_reduction": 4,
        "max_steps": max_steps,
        "learning_rate": 2e-2,
        "warmup_proportion": 0.1,
        "ema_decay": 0.98,
        "validate_every": every,
        "validation_steps": 8,
        "save_every": every,
        "wandb_mode": "disabled",
        "device": device,
        "resume": "auto",
    }
    flags = tuple(str(part) for name, value in training.items() for part in (f"--{name}", value))
    return [
        Step(
            "corpus", "A corpus: the documentation inside the installed Python packages",
            ("preprocessing/make_demo_corpus.py", "--output", str(corpus)), (corpus,), corpus,
        ),
        Step(
            "tokenizer", "A tokenizer: byte-level BPE",
            (
                "preprocessing/train_tokenizer.py", "--input", str(corpus), "--output", str(tokenizer),
                "--vocab_size", str(VOCABULARY),
            ),
            (tokenizer,), tokenizer,
        ),
        Step(
            "shards", "Token shards, 2 % of the documents held out",
            (
                "preprocessing/tokenize_corpus.py", "--input", str(corpus), "--output", str(shards),
                "--tokenizer_path", str(tokenizer), "--validation_fraction", "0.02", "--workers", "2",
            ),
            (shards,), shards / "validation" / "manifest.json",
        ),
        Step(
            "training", "Training: three rows in four are masked, the fourth is causal; rows and batch grow",
            ("train_single_gpu.py", *flags), (run,), run / "checkpoints" / f"step_{max_steps:08d}" / "checkpoint.json",
        ),
    ]  # fmt: skip


def prepare(todo: list[Step], folder: Path) -> None:
    """Run every step that is not complete yet.

    A step's identity is its command and those before it. Unfinished work of the same identity is left for the command
    to go on from; what another identity left behind is deleted.
    """
    identity = ""
    for number, step in enumerate(todo, start=1):
        identity = hashlib.sha256(json.dumps([identity, step.arguments]).encode()).hexdigest()
        print(f"\n[{number}/{len(todo)}] {step.title}", flush=True)
        begun, finished = folder / f".{step.name}.begun", folder / f".{step.name}.finished"
        if read(begun) == identity:
            if read(finished) == identity and step.complete.exists():
                print(f"      {step.outputs[0]} is there already", flush=True)
                continue
        else:
            for path in (finished, *step.outputs):
                remove(path)
            begun.write_text(identity)
        started = time.monotonic()
        call(step.arguments)
        if not step.complete.exists():  # a training that was asked to stop saves and ends well, but not at the end
            raise DemoError(f"{step.arguments[0]} stopped before the end. Run the demo again to go on.")
        finished.write_text(identity)
        print(f"      {time.monotonic() - started:.0f} s", flush=True)


def show(folder: Path, device: str) -> None:
    """Draw the run, and let the model fill gaps and continue texts."""
    run = str(folder / "runs" / "demo")
    gaps = [part for text in GAPS for part in ("--text", text)]
    prompts = [part for text in PROMPTS for part in ("--prompt", text)]
    print("\nIts picture: losses, schedules and speed", flush=True)
    call(("report/plot.py", run, "-o", str(folder / "metrics.png")))
    print("\nFilling gaps, which reads in both directions", flush=True)
    call(("evaluation/fill_mask.py", run, "--ema", "--device", device, "--top_k", "4", *gaps))
    print("Continuing texts, which reads from left to right", flush=True)
    call(("evaluation/generate.py", run, "--ema", "--device", device, "--max_new_tokens", "40", *prompts))


def call(arguments: tuple[str, ...]) -> None:
    """Print a command, run it and wait for it, however it is asked to stop: the training saves before it ends.

    Ctrl-C reaches the command by itself; a SIGTERM is passed on to it. Raises KeyboardInterrupt after either, and
    DemoError where the command failed.
    """
    print(f"    $ {as_typed((python(), *arguments))}\n", flush=True)
    asked_to_stop = False
    process: subprocess.Popen[bytes] | None = None

    def stop(number: int, _frame: object) -> None:
        nonlocal asked_to_stop
        asked_to_stop = True
        if number == signal.SIGTERM and process is not None:
            process.send_signal(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        # Threads that wait for each other shall sleep: spinning is many times slower where other programs run too.
        process = subprocess.Popen([sys.executable, *arguments], env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ})
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if asked_to_stop:
        raise KeyboardInterrupt
    if status:
        raise DemoError(
            f"{arguments[0]} ended with exit code {status}; its message is above. Run the demo again to go on."
        )


def print_next_lines(todo: list[Step], folder: Path, seconds: float) -> None:
    """What came out of it, and what to type next."""
    run, interpreter = folder / "runs" / "demo", python()
    first, last = loss_change(run / "metrics.jsonl")
    for kind, loss in last.items():
        print(f"{kind.capitalize()} loss: {first[kind]:.2f} in the first step, {loss:.2f} now on held-out text")
    training = list(todo[-1].arguments)
    training[training.index("--name") + 1] = "causal"
    training[training.index("--hybrid_numerator") + 1] = "0"
    commands = {
        "Your own texts": [
            (interpreter, "evaluation/generate.py", str(run), "--prompt", "Raise an error if", "--num_samples", "3"),
            (interpreter, "evaluation/fill_mask.py", str(run), "--text", "Open the <mask>."),
        ],
        "What the model read": [(interpreter, "preprocessing/inspect_shards.py", str(folder / "shards" / "train"))],
        "The same run with the causal objective alone, and both in one picture": [
            (interpreter, *training),
            (interpreter, "report/plot.py", str(run), str(run.parent / "causal"), "-o", str(folder / "both.png")),
        ],
        "The model for Hugging Face transformers": [
            (interpreter, "export/to_huggingface.py", str(run), str(folder / "exported"))
        ],
        "Every flag, for your own corpus (see training/README.md)": [(interpreter, "train_single_gpu.py", "--help")],
    }
    print(f"\nDone in {seconds:.0f} s. Look at {folder / 'metrics.png'} and, in a browser, {run / 'report.html'}.")
    print("What to type next:")
    for title, lines in commands.items():
        print(f"\n{title}")
        for line in lines:
            print(f"    $ {as_typed(line)}")


def loss_change(metrics: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Return the first training loss and the last validation loss of each objective, as far as the file holds them."""
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for line in metrics.read_text().splitlines():
        record = json.loads(line)
        for objective in ("masked", "causal"):
            if (loss := record.get(f"train/{objective}_loss")) is not None:
                first.setdefault(objective, loss)
            if (loss := record.get(f"valid/{objective}_loss")) is not None:
                last[objective] = loss
    return first, last


def python() -> str:
    """The interpreter as one would type it here."""
    path = Path(sys.executable)
    if path.is_relative_to(ROOT):
        return str(path.relative_to(ROOT))
    return path.name if shutil.which(path.name) == sys.executable else str(path)


def as_typed(command: tuple[str, ...], width: int = 108) -> str:
    """Return a command line, broken before flags so that lines have at most `width` characters where possible."""
    groups: list[str] = []  # the program and its first arguments, then each flag with its values
    for part in command:
        if groups and not part.startswith("--"):
            groups[-1] += " " + shlex.quote(part)
        else:
            groups.append(shlex.quote(part))
    lines = [groups[0]]
    for group in groups[1:]:
        if len(lines[-1]) + 1 + len(group) <= width:
            lines[-1] += " " + group
        else:
            lines.append("    " + group)
    return " \\\n    ".join(lines)


def read(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
