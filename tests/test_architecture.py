"""Rules of the whole repository: who may import whom, what training needs, names, scripts, the lock, the Makefile."""

import ast
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
# From the top of the house to its foundation: a file imports only from names below its own, and from its own folder.
_FLOORS = (
    ("slurm", "benchmarks", "examples"),
    ("train_multi_gpu",),
    ("train_single_gpu",),
    ("evaluation",),
    ("report", "export"),
    ("training",),
    ("model_extra",),
    ("model",),
    ("model_layers",),
    ("model_protocol",),
    ("model_config",),
    ("ops", "data"),
)
BELOW = {
    name: {lower for floor in _FLOORS[number + 1 :] for lower in floor}
    for number, floor in enumerate(_FLOORS)
    for name in floor
}
BELOW |= {"preprocessing": {"data"}, "demo": set()}
# The importer of published checkpoints needs the models, and only when it is run.
BELOW_INSIDE_FUNCTIONS = {"preprocessing": {"model", "model_extra"}}
AT_IMPORT_TIME = {"torch", "numpy", "tokenizers", "tqdm"}
# Copied into exported folders, where transformers imports them; nothing here does.
ALSO_IMPORTED = {path.relative_to(ROOT): {"transformers"} for path in (ROOT / "export").glob("*_gpt_bert.py")}
# Imported where there is Triton alone, whose kernels are functions of a module that has imported it.
ALSO_IMPORTED[Path("ops/muon_cuda.py")] = {"triton"}
LAZY = {
    "wandb",
    "tensorboard",
    "submitit",
    "transformers",
    "matplotlib",
    "flash_attn",
    "zstandard",
    "pyarrow",
    "safetensors",
    "triton",
}
FOREIGN = {"tokenizers", "datasets", "kernels", "logging", "profile", "tokenize", "transformers", "evaluate"}
OUTSIDE = {"demo_output", "bench_output", "runs", "wandb", "build", "dist", "__pycache__"}
LARGEST_FILE = 1_000_000


def repository_files() -> list[Path]:
    """Every file that is in git or could be added, relative to the root; without git, all but what OUTSIDE names."""
    if (ROOT / ".git").exists():
        git = ["git", "-c", "safe.directory=*", "-C", str(ROOT)]  # whoever owns the checkout
        command = [*git, "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
        return [Path(name) for name in names if name and (ROOT / name).is_file()]
    found = []
    for folder, subfolders, names in os.walk(ROOT):
        subfolders[:] = [
            s for s in subfolders if s not in OUTSIDE and (not s.startswith(".") or s in (".ci", ".github"))
        ]
        found += [(Path(folder) / name).relative_to(ROOT) for name in names]
    return found


SOURCES = sorted(path for path in repository_files() if path.suffix == ".py")
MODULES = [path for path in SOURCES if path.parts[0] != "tests"]


def layer(path: Path) -> str:
    """The package or top-level module that a file belongs to."""
    return path.parts[0] if len(path.parts) > 1 else path.stem


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), filename=str(path))


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports(path: Path) -> set[tuple[str, bool]]:
    """The top-level names that a file imports, each with whether that happens when the file itself is imported."""
    found: set[tuple[str, bool]] = set()

    def visit(node: ast.AST, at_import: bool) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            at_import = False
        if isinstance(node, ast.stmt) and is_type_checking(node):
            return
        if isinstance(node, ast.Import):
            found.update((alias.name.split(".")[0], at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add((layer(path) if node.level else (node.module or "").split(".")[0], at_import))
        for child in ast.iter_child_nodes(node):
            visit(child, at_import)

    visit(tree(path), True)
    return found


def is_script(path: Path) -> bool:
    """Whether a file does something when it is run: it has `if __name__ == "__main__"`."""
    return any(
        isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'" for node in tree(path).body
    )


SCRIPTS = [path for path in MODULES if is_script(path)]


def test_there_is_something_to_look_at():
    names = {str(path) for path in SCRIPTS}
    assert {"train_single_gpu.py", "train_multi_gpu.py", "report/plot.py", "evaluation/generate.py"} <= names
    assert {"model", "model_extra", "ops", "data", "training", "preprocessing"} <= {layer(path) for path in MODULES}


def test_every_module_has_its_place():
    assert {layer(path) for path in MODULES} <= set(BELOW)


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_imports_run_one_way(path):
    own = layer(path)
    ours = set(BELOW) | {"tests"}
    for name, at_import in imports(path):
        if name in ours and name != own:
            allowed = BELOW[own] | (set() if at_import else BELOW_INSIDE_FUNCTIONS.get(own, set()))
            assert name in allowed, f"{path} imports {name}, and {own} may import {sorted(allowed)}"


def modules_imported(path: Path) -> set[str]:
    """Our modules that a file imports, also inside functions, but for types alone."""
    ours = {".".join(module.with_suffix("").parts) for module in MODULES}
    for_types = {id(inner) for node in tree(path).body if is_type_checking(node) for inner in ast.walk(node)}
    found: set[str] = set()
    for node in ast.walk(tree(path)):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & ours - {".".join(path.with_suffix("").parts)}


def test_imports_have_no_circles():
    below = {".".join(path.with_suffix("").parts): modules_imported(path) for path in MODULES}
    while leaves := {name for name, imported in below.items() if not imported}:
        below = {name: imported - leaves for name, imported in below.items() if name not in leaves}
    assert not below, f"these import each other, or what does: {sorted(below)}"


def test_files_and_functions_are_short():
    long = {str(path): len((ROOT / path).read_text().splitlines()) for path in SOURCES}
    assert not {name: lines for name, lines in long.items() if lines > 450}
    functions = {
        f"{path}: {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in SOURCES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert not {name: lines for name, lines in functions.items() if lines > 60}


def test_training_is_a_story_of_few_parts():
    """The scripts tell the run, training/ holds the parts of its loop."""
    lines = {
        name: len((ROOT / name).read_text().splitlines()) for name in ("train_single_gpu.py", "train_multi_gpu.py")
    }
    assert lines["train_single_gpu.py"] <= 170
    assert lines["train_multi_gpu.py"] <= 40
    parts = [path for path in MODULES if path.parts[0] == "training" and path.name != "__init__.py"]
    assert len(parts) <= 27, f"{len(parts)} files; which two are one subject?"


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_import_time_needs_four_packages_only(path):
    foreign = {name for name, at_import in imports(path) if at_import} - set(sys.stdlib_module_names) - set(BELOW)
    assert foreign <= AT_IMPORT_TIME | ALSO_IMPORTED.get(path, set())


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train_single_gpu", "train_multi_gpu"])
def test_training_loads_no_optional_package(script):
    """What is loaded after importing a training script, beyond what torch and tokenizers load by themselves."""
    code = "import json, sys; import torch, numpy, tokenizers, tqdm; before = set(sys.modules); import {}; "
    code += "print(json.dumps([sorted(before), sorted(sys.modules)]))"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code.format(script)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    before, after = (set(names) for names in json.loads(done.stdout))
    assert f"{script}" in after
    assert "torch._dynamo" not in after, "half of all import time, for what compiles alone"
    assert not {name for name in after - before if name.split(".")[0] in LAZY}


def test_report_loads_no_torch():
    """Run folders are looked at on machines without it, and the page must be there at once."""
    code = "import sys, report.html_report, report.plot; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert {"report.html_report", "report.plot", "report.page", "numpy"} <= loaded
    assert "torch" not in loaded


# Each script in a process of its own, forked with the packages of others loaded and none of ours: prints what became.
HELP = """
import json, os, pathlib, runpy, sys, tempfile
import numpy, safetensors.torch, tokenizers, torch, torch.distributed, tqdm
root, *scripts = sys.argv[1:]
found = {}
for script in scripts:
    for as_module in {False, script.endswith(("inspect_shards.py", "average.py", "doctor.py"))}:
        file = tempfile.TemporaryFile("w+")
        if os.fork() == 0:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            sys.argv = [script, "--help"]
            if as_module:
                os.chdir(root)
                sys.path[0] = root
                runpy.run_module(script.removesuffix(".py").replace("/", "."), run_name="__main__", alter_sys=True)
            else:
                sys.path[0] = str(pathlib.Path(root, script).parent)
                runpy.run_path(os.path.join(root, script), run_name="__main__")
            sys.exit("it did not end")
        code = os.waitstatus_to_exitcode(os.wait()[1])
        file.seek(0)
        found[script + " as a module" * as_module] = (code, file.read())
print(json.dumps(found))
"""


@pytest.mark.slow
def test_help_works_from_another_folder(tmp_path):
    """Some also as `python -m` from the repository root, of which the lines that they begin with take care, too."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-c", HELP, str(ROOT), *map(str, SCRIPTS)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert len(found) == len(SCRIPTS) + 3
    assert {name: (code, text) for name, (code, text) in found.items() if code or not text.startswith("usage:")} == {}


def test_scripts_in_folders_replace_their_own_folder_on_the_path():
    """Otherwise evaluation/ or data/ itself would be searched first, and a file there could hide a package."""
    for path in SCRIPTS:
        if len(path.parts) > 1:
            source = (ROOT / path).read_text()
            assert 'if __package__ in (None, "")' in source, path
            assert "sys.path[0] = " in source, path


def test_no_module_of_ours_hides_a_package():
    installed = {name for name in importlib.metadata.packages_distributions() if not name.startswith("_")}
    ours = {layer(path) for path in MODULES}
    assert not ours & (installed | set(sys.stdlib_module_names) | FOREIGN)
    inside = {path.stem for path in MODULES if len(path.parts) > 1}
    assert not inside & FOREIGN


def test_files_are_small():
    large = {str(path): (ROOT / path).stat().st_size for path in repository_files()}
    assert not {name: size for name, size in large.items() if size > LARGEST_FILE}


def test_license_is_apache_2_in_full():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License\n                           Version 2.0, January 2004" in text
    for number in range(1, 10):
        assert re.search(rf"^   {number}\. [A-Z]", text, re.MULTILINE), number
    assert "END OF TERMS AND CONDITIONS" in text
    assert project()["license"] == "Apache-2.0"


@cache
def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@cache
def pins() -> dict[str, str]:
    """The versions that requirements.lock, with what it includes, gives this interpreter, by canonical name."""
    assert "--requirement requirements-training.lock" in (ROOT / "requirements.lock").read_text()
    return pins_in("requirements-training.lock", "requirements.lock")


def pins_in(*locks: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in [line for lock in locks for line in (ROOT / lock).read_text().splitlines()]:
        if not line or line.startswith(("#", "--requirement")):
            continue
        requirement = Requirement(line)
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", line
        if requirement.marker is None or requirement.marker.evaluate():
            name = canonicalize_name(requirement.name)
            assert name not in found, f"{name} is pinned twice for this Python"
            found[name] = specifier.version
    return found


def test_lock_satisfies_pyproject():
    extras = project()["optional-dependencies"]
    assert set(extras) == {"wandb", "tensorboard", "slurm", "hf", "plot", "flash", "data", "dev"}
    locked = [
        *project()["dependencies"],
        *(r for e in ("wandb", "tensorboard", "slurm", "hf", "plot", "data", "dev") for r in extras[e]),
    ]
    for text in locked:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)], prereleases=True), text
    assert pins()["torch"] == "2.13.0"


def test_lock_pins_everything_that_it_pulls_in():
    """Follows the requirements of what is pinned and installed; torch's CUDA packages are pinned by torch itself."""
    by_torch = re.compile(r"nvidia-|cuda-|triton")
    extras = {"pyright": {"nodejs"}, "transformers": {"serving"}}
    missing = set()
    for name in pins():
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # a GPU machine tests with the packages that it has
        for text in distribution.requires or []:
            requirement = Requirement(text)
            wanted = {"", *extras.get(name, ())}
            if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in wanted):
                continue
            needed = canonicalize_name(requirement.name)
            if needed not in pins() and not by_torch.match(needed):
                missing.add(f"{needed} (for {name})")
    assert not missing


def test_the_lock_of_the_demo_is_what_training_needs():
    """Its packages are the dependencies of pyproject.toml and what those pull in: nothing is missing, nothing else."""
    needed: set[str] = set()
    todo = [canonicalize_name(Requirement(text).name) for text in project()["dependencies"]]
    while todo:
        name = todo.pop()
        if name in needed or name not in pins():  # torch's CUDA packages are pinned by torch itself
            continue
        needed.add(name)
        requirements = map(Requirement, importlib.metadata.distribution(name).requires or [])
        todo += [canonicalize_name(r.name) for r in requirements if not r.marker or r.marker.evaluate({"extra": ""})]
    assert set(pins_in("requirements-training.lock")) == needed


def test_make_has_its_targets_and_explains_them():
    done = subprocess.run(["make", "-C", str(ROOT)], capture_output=True, text=True, check=True)
    for target in ("setup", "demo", "check", "test", "test-gpu", "lint", "bench", "clean", "help"):
        assert re.search(rf"^  {target}  +\S", done.stdout, re.MULTILINE), target


def test_make_without_an_environment_uses_the_given_python():
    """On GPU machines, which bring their own torch and have no network: nothing is installed."""
    for target, last in (("test-gpu", "some-python -m pytest -m gpu"), ("demo", "some-python demo.py")):
        command = ["make", "-C", str(ROOT), "--no-print-directory", "-n", target, "VENV=", "PYTHON=some-python"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.strip().splitlines()[-1].startswith(last)
        assert "pip" not in done.stdout


def test_ci_and_the_workflow_run_make_test():
    ci = ROOT / ".ci" / "run"
    assert os.access(ci, os.X_OK)
    assert ci.read_text().rstrip().endswith("make test")
    assert "run: .ci/run" in (ROOT / ".github" / "workflows" / "test.yml").read_text()
