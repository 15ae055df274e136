"""The pages, every .md file in git: the paths, links, flags, commands, imports and variables that they name exist."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from urllib.parse import urlparse

import pytest
from helpers.tiny_runs import ROOT
from test_architecture import SCRIPTS, repository_files

FILES = {str(path) for path in repository_files()}
FOLDERS = {str(parent) for path in repository_files() for parent in path.parents if str(parent) != "."}
PAGES = sorted(path for path in repository_files() if path.suffix == ".md")
WIDTH = 120
README_LINES = 200
# Flags of other programs in commands that begin with these; only what follows a script of ours is looked up.
FOREIGN_COMMANDS = {
    "accelerate", "apt", "apt-get", "cd", "cp", "curl", "export", "git", "issues", "lm_eval", "nvidia-smi", "pip",
    "scancel", "scontrol", "squeue", "time", "transformers", "wandb",
}  # fmt: skip
# Flags of programs that are not ours which the text speaks of by themselves.
FOREIGN_FLAGS = {
    "--account", "--array", "--causal", "--cpus-per-task", "--exclude", "--gpus-per-node", "--gpus-per-task", "--mem",
    "--no-requeue", "--nodes", "--nproc_per_node", "--ntasks-per-node", "--open-mode", "--partition", "--signal",
    "--time", "--wait",
}  # fmt: skip
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9_-]*")
# Beside their own.
TAKE_TRAINING_FLAGS = {
    "slurm/launch.py", "slurm/doctor.py", "benchmarks/all_reduce.py", "benchmarks/step_breakdown.py",
    "benchmarks/lr_range.py", "benchmarks/study.py",
}  # fmt: skip
# Job scripts are shell: they take the flags that their own text names, and pass on those of a script.
SHELL_SCRIPTS = {
    "slurm/train.sbatch": "train_multi_gpu.py",
    "slurm/preprocess.sbatch": "preprocessing/tokenize_corpus.py",
}
# What looks like a path here and is none: a metric's key, a file that the reader makes.
NO_PATHS = {"data/fingerprint", "data/SOURCE_tokens", "data/SOURCE_epochs", "slurm/site.env", "model_plain.py"}
PLACEHOLDER = re.compile(r"[A-Z]+(_cuda)?\.\w+")  # X.py, NAME.py
# Speaks of what is gone, too.
HISTORY = {"CHANGELOG.md"}


def parts(text: str) -> tuple[list[str], str]:
    """Fenced blocks of a page, with their language in the first line, and the text without them."""
    blocks = re.findall(r"^```(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return blocks, re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def page_text(page: Path) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def code_spans(text: str) -> list[str]:
    """What stands between backquotes, line breaks as spaces."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]


# Prints, as JSON, the usage and listed flags of each script in its arguments, and of its subcommands.
HELP = """
import contextlib, io, json, runpy, sys
found = {}
for script in sys.argv[1:]:
    found[script] = ""
    for words in ([], ["data"], ["checkpoint"]) if script.endswith("import_gpt_bert.py") else ([],):
        sys.argv, text = [script, *words, "--help"], io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            runpy.run_path(script, run_name="__main__")
        usage, _, rest = text.getvalue().partition("\\n\\n")
        listed = [line.strip().split("  ")[0] for line in rest.splitlines() if line.startswith("  -")]
        found[script] += "\\n".join([usage, *listed])
print(json.dumps(found))
"""


@cache
def usages() -> dict[str, str]:
    """The usage of every command of ours: one process, which imports torch once."""
    command = [sys.executable, "-c", HELP, *map(str, SCRIPTS)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=300)
    return json.loads(done.stdout)


@cache
def options(script: str) -> frozenset[str]:
    """Every flag of a script, as its parser has them."""
    if script in SHELL_SCRIPTS:
        return frozenset(re.findall(FLAG, (ROOT / script).read_text())) | options(SHELL_SCRIPTS[script])
    found = frozenset(re.findall(FLAG, usages()[script])) | {"--help"}
    return found | options("train_multi_gpu.py") if script in TAKE_TRAINING_FLAGS else found


def known_flags() -> set[str]:
    """Flags of all our commands, and of other programs that the text speaks of."""
    return FOREIGN_FLAGS.union(*(options(str(script)) for script in [*SCRIPTS, *SHELL_SCRIPTS]))


def commands(block: str) -> list[list[str]]:
    """The commands of a shell block as lists of words, continued lines joined and comments left out."""
    text = re.sub(r"\\\n\s*", " ", block.split("\n", 1)[1])
    found = []
    for line in text.splitlines():
        try:
            words = shlex.split(line.replace("<the same flags>", ""), comments=True)
        except ValueError:  # a string that spans lines
            continue
        if words:
            found.append(words)
    return found


def own_script(words: list[str]) -> tuple[str, list[str]] | None:
    """The script of ours that a command runs, and the words after it; None where it runs none."""
    for number, word in enumerate(words):
        if word in FILES and (word.endswith((".py", ".sbatch"))):
            return word, words[number + 1 :]
        if word == "-m" and number + 1 < len(words) and words[number + 1].replace(".", "/") + ".py" in FILES:
            return words[number + 1].replace(".", "/") + ".py", words[number + 2 :]
    return None


def shell_blocks(page: Path) -> list[list[str]]:
    blocks, _ = parts(page_text(page))
    return [words for block in blocks if block.startswith(("bash\n", "\n", "sh\n")) for words in commands(block)]


def flags_in(words: list[str]) -> set[str]:
    return {flag for word in words if (flag := word.split("=")[0]).startswith("--") and len(flag) > 2}


def anchors(page: Path) -> set[str]:
    """The names by which links reach the headings of a page, as GitHub makes them."""
    _, text = parts(page_text(page))
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.replace("`", "").lower()).strip().replace(" ", "-") for title in titles}


def test_pages_are_there():
    named = {"README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"}
    rooms = ("preprocessing", "training", "evaluation", "export", "report", "slurm", "configs", "ops", "benchmarks")
    assert named | {f"{room}/README.md" for room in rooms} <= {str(page) for page in PAGES}


def test_readme_is_short():
    assert len(page_text(Path("README.md")).splitlines()) <= README_LINES


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_lines_are_not_too_wide(page):
    """But for tables, and lines of blocks, where a break would change what they are."""
    _, text = parts(page_text(page))
    wide = [line for line in text.splitlines() if len(line) > WIDTH and not line.startswith(("|", "!["))]
    assert not wide


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page):
    _, text = parts(page_text(page))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if urlparse(target).scheme:
            assert target.startswith("https://"), target
            continue
        path, _, anchor = target.partition("#")
        found = (ROOT / page.parent / path).resolve() if path else ROOT / page
        assert found.exists(), target
        if anchor:
            assert anchor in anchors(found.relative_to(ROOT)), target


@pytest.mark.parametrize("page", [page for page in PAGES if str(page) not in HISTORY], ids=str)
def test_paths_exist(page):
    """What looks like a path of ours: it begins with one of our folders, or ends like a source and has no folder."""
    blocks, text = parts(page_text(page))
    tops = {folder for folder in FOLDERS if "/" not in folder}
    for span in code_spans(text) + [word for block in blocks for word in block.split()]:
        for word in span.split():
            word = re.split(r"::|=", word.rstrip(".,;:)"))[0]
            if not re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?", word) or word in NO_PATHS:
                continue
            if PLACEHOLDER.fullmatch(Path(word).name):
                continue
            if "/" not in word:
                if re.search(r"\.(py|sbatch)$", word):
                    assert any(Path(file).name == word for file in FILES), word
                continue
            if word.split("/")[0] in tops:
                here = str(page.parent / word.rstrip("/"))
                assert {word.rstrip("/"), here} & (FILES | FOLDERS), word


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if str(page) not in HISTORY], ids=str)
def test_flags_exist(page):
    """Of a command, those of the script that it runs; of the text, those of any command."""
    for words in shell_blocks(page):
        if words[0] in FOREIGN_COMMANDS:
            continue
        if (own := own_script(words)) is not None:
            script, rest = own
            handed = rest[rest.index("--") + 1 :] if "--finetune" in rest else []  # launch.py gives them to another
            for flag in flags_in(rest[: len(rest) - len(handed)]):
                assert flag in options(script), f"{script} has no {flag}"
            for flag in flags_in(handed):
                assert flag in options("evaluation/finetune.py"), f"evaluation/finetune.py has no {flag}"
    _, text = parts(page_text(page))
    for span in code_spans(text):
        for flag in re.findall(r"(?<![\w-])--(?:\[no-\])?[a-z][a-z0-9_-]*", span):
            assert flag.replace("[no-]", "") in known_flags(), flag
            assert "[no-]" not in flag or flag.replace("[no-]", "no-") in known_flags(), flag


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_commands_exist(page):
    """Python runs a script or module of ours, make a target of the Makefile."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    _, text = parts(page_text(page))
    written = [span.split() for span in code_spans(text) if span.startswith(("make ", "python ", "torchrun "))]
    for words in shell_blocks(page) + written:
        if words[0] == "make":
            assert {word for word in words[1:] if re.fullmatch(r"[a-z-]+", word)} <= targets, words
        if words[0] in ("python", "torchrun") and "-c" not in words and "-m pytest" not in " ".join(words):
            named = own_script(words) is not None or any(PLACEHOLDER.fullmatch(Path(word).name) for word in words)
            assert named or words[1:] == ["..."], words


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_imports_exist(page):
    """Of our modules, in blocks of Python."""
    blocks, _ = parts(page_text(page))
    for block in blocks:
        if not block.startswith("python\n"):
            continue
        for node in ast.walk(ast.parse(block.split("\n", 1)[1])):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.replace(".", "/") + ".py" in FILES:
                module = importlib.import_module(node.module)
                assert all(hasattr(module, name.name) for name in node.names), ast.unparse(node)


@pytest.mark.parametrize("page", [page for page in PAGES if str(page) not in HISTORY], ids=str)
def test_environment_variables_exist(page):
    sources = "".join((ROOT / path).read_text() for path in FILES if path.endswith((".py", ".sbatch", ".example")))
    for name in set(re.findall(r"HYBRID_[A-Z_]*[A-Z](?!_)\b", page_text(page))):
        assert re.search(rf"\b{name}\b", sources), name


@pytest.mark.slow
def test_training_page_lists_every_flag():
    """The table of training/README.md has all flags of training, and no other."""
    table = page_text(Path("training/README.md")).split("\n| group | flags |\n")[1].split("\n\n")[0]
    listed = set(re.findall(r"--(?:\[no-\])?([a-z_0-9]+)", table))
    real = {flag[2:].removeprefix("no-") for flag in options("train_single_gpu.py")} - {"help"}
    assert listed == real
