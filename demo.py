"""The whole suite in two minutes: from text to small models that fill gaps, write, and know grammar they never read.

    make demo                      (or: python demo.py)

Three runs begin from the same weights and read the same stories: masked, causal and hybrid. A page shows what each has
learned. Every step is a command that is printed before it runs, as you would type it. Everything goes into
demo_output/. Run it again, also after Ctrl-C or a crash: what is complete is kept, and training goes on where it
stopped.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent
STEPS = {"stories": 700, "docstrings": 300}
SOURCES = {  # title, script and model of each corpus
    "stories": (
        "Stories of a small grammar, and minimal pairs of word combinations that they lack",
        "preprocessing/make_story_corpus.py", "configs/demo.json",
    ),
    "docstrings": (
        "A corpus: the documentation inside the installed Python packages",
        "preprocessing/make_demo_corpus.py", "configs/tiny.json",
    ),
}  # fmt: skip
MASKED_ROWS = {"hybrid": 1, "masked": 4, "causal": 0}  # of four, by run
# Of stories, each has a combination of two words that no sentence of the corpus has (tests/test_demo.py).
GAPS = {
    "stories": (
        "The women that the mouse follows <mask>.",
        "There are two big <mask> near the river.",
        "The girl behind the boys sees <mask>.",
        "Lucy finds the keys. She likes <mask>.",
    ),
    "docstrings": ("Return the <mask> of the object.", "If the file does not <mask>, an error is raised."),
}
PROMPTS = {
    "stories": ("Yesterday Anna", "There are three small", "The dog near the boys"),
    "docstrings": ("Return the", "This function is", "The value of the"),
}
# The lines of a training that the demo passes on: scores of minimal pairs, without them held-out losses.
NEWS = {True: re.compile(r"step +\d+  zero-shot"), False: re.compile(r"step +\d+  validation loss")}


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
    folder = options.output_dir
    folder = Path(os.path.relpath(folder)) if folder.is_relative_to(ROOT) else folder
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
            todo = steps(folder, options)
            prepare(todo, folder)
            show(folder, options)
    except (DemoError, OSError) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped. `make demo` goes on from here.", file=sys.stderr)
        return 130
    print_next_lines(folder, options, time.monotonic() - started)
    return 0


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    defaults = ", ".join(f"{number} of {corpus}" for corpus, number in STEPS.items())
    parser = argparse.ArgumentParser(description="From text to small hybrid, masked and causal models, in two minutes.")
    parser.add_argument(
        "--corpus", choices=tuple(STEPS), default="stories",
        help="stories: of a small grammar of English, compared by minimal pairs; docstrings: the documentation inside "
        "the installed Python packages, compared by their losses (default: stories)",
    )  # fmt: skip
    parser.add_argument(
        "--output_dir", type=lambda text: Path(text).resolve(), default=ROOT / "demo_output", metavar="FOLDER",
        help="folder for everything (default: demo_output in this repository)",
    )  # fmt: skip
    parser.add_argument("--max_steps", type=int, metavar="N", help=f"training steps of a run (default: {defaults})")
    parser.add_argument("--seed", type=int, default=42, metavar="N", help="of weights, data and masks (default: 42)")
    parser.add_argument(
        "--device",
        choices=("auto", "cuda", "cpu"),
        default="auto",
        help="auto: CUDA where there is a GPU (default: auto)",
    )
    options = parser.parse_args(arguments)
    options.max_steps = options.max_steps or STEPS[options.corpus]
    return options


# What it does


def steps(folder: Path, options: argparse.Namespace) -> list[tuple[Step, ...]]:
    """Return the steps whose results are kept, in order; those of one tuple run side by side."""
    corpus, tokenizer, shards = (folder / name for name in ("corpus.jsonl", "tokenizer.json", "shards"))
    pairs = (folder / "pairs",) if options.corpus == "stories" else ()
    title, script, config = SOURCES[options.corpus]
    made = (script, "--output", str(corpus), *(str(part) for path in pairs for part in ("--pairs", path)))
    trained = (
        "preprocessing/train_tokenizer.py", "--input", str(corpus), "--output", str(tokenizer),
        "--vocab_size", str(json.loads((ROOT / config).read_text())["vocab_size"]),
    )  # fmt: skip
    tokenized = (
        "preprocessing/tokenize_corpus.py", "--input", str(corpus), "--output", str(shards),
        "--tokenizer_path", str(tokenizer), "--validation_fraction", "0.02", "--workers", "2",
    )  # fmt: skip
    return [
        (Step("corpus", title, made, (corpus, *pairs), corpus),),
        (Step("tokenizer", "A tokenizer: byte-level BPE", trained, (tokenizer,), tokenizer),),
        (
            Step(
                "shards", "Token shards, 2 % of the documents held out", tokenized,
                (shards,), shards / "validation" / "manifest.json",
            ),
        ),
        tuple(training(folder, options, name) for name in MASKED_ROWS),
    ]  # fmt: skip


def training(folder: Path, options: argparse.Namespace, name: str) -> Step:
    """One of the runs, which differ in how many of four rows are masked."""
    quarter = -(-options.max_steps // 4)
    flags: dict[str, object] = {
        "name": name,
        "hybrid_numerator": MASKED_ROWS[name],
        "hybrid_denominator": 4,
        "train_path": folder / "shards" / "train",
        "valid_path": folder / "shards" / "validation",
        "config_file": SOURCES[options.corpus][2],
        "tokenizer_path": folder / "tokenizer.json",
        "output_dir": folder / "runs",
        "seq_length": 64,
        "length_milestones": "",
        "global_batch_size": 8,
        "local_batch_size": 8,
        "batch_reduction": 1,
        "mask_span_length": 1,
        "mask_p_start": 0.4,
        "mask_p_end": 0.2,
        "max_steps": options.max_steps,
        "optimizer": "normuon",
        "learning_rate": 0.01,
        "matrix_learning_rate": 0.03,
        "warmup_proportion": 0.05,
        "ema_decay": 0.98,
        "validate_every": quarter,
        "validation_samples": 0,
        "save_every": 2 * quarter,
        "save_steps": 1,
        "wandb_mode": "disabled",
        "device": options.device,
        "seed": options.seed,
    }
    if options.corpus == "stories":
        flags |= {"evaluate_data": folder / "pairs", "evaluate_every": quarter}
    run = folder / "runs" / name
    return Step(
        name, "Three runs from the same weights on the same text, side by side",
        ("train_single_gpu.py", *(str(part) for key, value in flags.items() for part in (f"--{key}", value))),
        (run,), run / "checkpoints" / f"step_{options.max_steps:08d}" / "checkpoint.json",
    )  # fmt: skip


def prepare(todo: Sequence[Sequence[Step]], folder: Path) -> None:
    """Run every step that is not complete yet; those that stand together at the same time.

    A step's identity is its command and those before it. Unfinished work of the same identity is left for the command
    to go on from; what another identity left behind is deleted.
    """
    before = ""
    for number, group in enumerate(todo, start=1):
        print(f"\n[{number}/{len(todo)}] {group[0].title}", flush=True)
        identities = [hashlib.sha256(json.dumps([before, step.arguments]).encode()).hexdigest() for step in group]
        before = "".join(identities)
        waiting = [pair for pair in zip(group, identities, strict=True) if not is_complete(*pair, folder)]
        for step in group:
            if step not in [each for each, _ in waiting]:
                print(f"      {step.outputs[0]} is there already", flush=True)
        started = time.monotonic()
        if not waiting:
            continue
        call([step.arguments for step, _ in waiting], [folder / f"{step.name}.log" for step, _ in waiting])
        for step, identity in waiting:
            if not step.complete.exists():  # a training that was asked to stop saves and ends well, but not at the end
                raise DemoError(f"{step.arguments[0]} stopped before the end. Run the demo again to go on.")
            (folder / f".{step.name}.finished").write_text(identity)
        print(f"      {time.monotonic() - started:.0f} s", flush=True)


def is_complete(step: Step, identity: str, folder: Path) -> bool:
    """Whether a step's result is there; where another identity has begun it, its files are deleted."""
    begun, finished = folder / f".{step.name}.begun", folder / f".{step.name}.finished"
    if read(begun) == identity:
        return read(finished) == identity and step.complete.exists()
    for path in (finished, *step.outputs):
        remove(path)
    begun.write_text(identity)
    return False


def show(folder: Path, options: argparse.Namespace) -> None:
    """Score the weights that the runs began with, let all of them fill gaps and write, and make the page."""
    runs = [str(folder / "runs" / name) for name in MASKED_ROWS]
    first = str(folder / "runs" / "hybrid" / "checkpoints" / "step_00000001")
    page = ["report/demo_page.py", *runs, "-o", str(folder / "index.html")]
    device = ("--device", options.device)
    if options.corpus == "stories":
        before = folder / "before"
        before.mkdir(exist_ok=True)
        print("\nThe minimal pairs before training", flush=True)
        scores = ("--data", str(folder / "pairs"), "--output", str(before / "scores.json"))
        call([("evaluation/minimal_pairs.py", first, *scores, *device)], [before / "scores.log"])
        page += ["--pairs", str(folder / "pairs"), "--before", str(before)]
    print("\nFilling gaps, which reads in both directions, and continuing texts, which reads from left to right")
    texts = [part for text in GAPS[options.corpus] for part in ("--gap", text)]
    texts += [part for text in PROMPTS[options.corpus] for part in ("--prompt", text)]
    call([("evaluation/samples.py", first, *runs, *texts, *device)], [folder / "samples.log"])
    print("\nWhat came of it", flush=True)
    call([tuple(page)])


def call(commands: Sequence[tuple[str, ...]], logs: Sequence[Path] = ()) -> None:
    """Print commands, run them side by side and wait for them, however they are asked to stop: training saves first.

    logs: a file for the output of each, from which NEWS is passed on; without, it goes to the terminal. Ctrl-C reaches
    commands by itself; a SIGTERM is passed on to them. Raises KeyboardInterrupt after either, and DemoError where a
    command failed.
    """
    print(f"    $ {as_typed((python(), *commands[0]))}\n", flush=True)
    for other in commands[1:]:
        changed = [n for n, (part, first) in enumerate(zip(other, commands[0], strict=True)) if part != first]
        print(
            f"      and the same with {shlex.join(part for n in changed for part in other[n - 1 : n + 1])}", flush=True
        )
    asked_to_stop = False
    processes: list[subprocess.Popen[bytes]] = []

    def stop(number: int, _frame: object) -> None:
        nonlocal asked_to_stop
        asked_to_stop = True
        for process in processes:
            if number == signal.SIGTERM:
                process.send_signal(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for command, log in zip(commands, logs or [None] * len(commands), strict=True):
            processes.append(start(command, log, len(commands)))
        listen(processes, logs, NEWS["--evaluate_data" in commands[0]])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if asked_to_stop:
        raise KeyboardInterrupt
    for number, process in enumerate(processes):
        if process.returncode:
            said = f"{logs[number]} says" if logs else "its message is above"
            raise DemoError(
                f"{commands[number][0]} ended with exit code {process.returncode}; {said}. Run the demo again to go on."
            )


def start(command: tuple[str, ...], log: Path | None, beside: int) -> subprocess.Popen[bytes]:
    """Start a command, one of so many side by side: they share the cores, and one alone takes all."""
    # Threads that wait for each other shall sleep: spinning is many times slower where other programs run too.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    if beside > 1:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // beside)))
    if log is None:
        return subprocess.Popen([sys.executable, *command], env=environment)
    with log.open("wb") as file:
        return subprocess.Popen([sys.executable, *command], env=environment, stdout=file, stderr=subprocess.STDOUT)


def listen(processes: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path], news: re.Pattern[str]) -> None:
    """Wait for commands, and pass on new lines of their logs that are news."""
    if not logs:
        for process in processes:
            process.wait()
        return
    seen = [0] * len(logs)
    running = True
    while running:
        running = any(process.poll() is None for process in processes)
        for number, log in enumerate(logs):
            lines = log.read_text(errors="replace").splitlines()
            for line in lines[seen[number] :]:
                if news.match(line):
                    print(f"      {log.stem:<7} {line}", flush=True)
            seen[number] = len(lines)
        time.sleep(0.2 * running)


def print_next_lines(folder: Path, options: argparse.Namespace, seconds: float) -> None:
    """What to look at, and what to type next."""
    run, interpreter = folder / "runs" / "hybrid", python()
    other = "docstrings" if options.corpus == "stories" else "stories"
    commands = {
        "Your own texts": [
            (interpreter, "evaluation/generate.py", str(run), "--prompt", PROMPTS[options.corpus][0]),
            (interpreter, "evaluation/fill_mask.py", str(run), "--text", GAPS[options.corpus][0]),
        ],
        "The runs in every detail": [
            (
                interpreter, "report/html_report.py", *(str(folder / "runs" / name) for name in MASKED_ROWS),
                "-o", str(folder / "report.html"),
            )
        ],
        "What the models read": [(interpreter, "preprocessing/inspect_shards.py", str(folder / "shards" / "train"))],
        "The model for Hugging Face transformers": [
            (interpreter, "export/to_huggingface.py", str(run), str(folder / "exported"))
        ],
        "The other corpus": [(interpreter, "demo.py", "--corpus", other, "--output_dir", str(folder / other))],
        "Every flag, for your own corpus (see training/README.md)": [(interpreter, "train_single_gpu.py", "--help")],
    }  # fmt: skip
    print(f"\nDone in {seconds:.0f} s. Open {folder / 'index.html'} in a browser.\n\nWhat to type next:")
    for title, lines in commands.items():
        print(f"  {title}")
        for line in lines:
            print(f"    $ {as_typed(line)}")


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
