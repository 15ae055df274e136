"""All suites of all checkpoints of a run, and the report with them: the other commands of this folder, one by one.

    python evaluation/all_suites.py runs/my_first --ema --data evaluation_data --held_out held_out/ --tasks glue/

--data is a folder with any of BabyLM's tasks (folders as its pipeline has them), SyntaxGym's suites (JSON) and LAMBADA
(JSON lines of `text`); of every checkpoint babylm.py, syntax_gym.py and lambada.py measure what is there. --held_out is
for perplexity.py, --ages and --contexts for age_of_acquisition.py, which takes checkpoints called chck_... alone, and
--tasks for finetune.py, of the newest checkpoint. Results go to RUN/evaluation/, where the report and the model card
find them; what is there already is not measured again. In the end report/html_report.py writes RUN/report.html.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from data.cli import Parser
from evaluation import age_of_acquisition, babylm, finetune, lambada, perplexity, syntax_gym
from evaluation.generation import UsageError, add_weights_flags, run
from evaluation.suites import LAMBADA, SYNTAX, find_suites
from export.revisions import find_revisions
from report import html_report
from training.ema import weights_file

Command = Callable[[list[str]], int]


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = Parser(__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    add_weights_flags(parser)
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="zero-shot suites")
    parser.add_argument("--held_out", nargs="+", metavar="PATH", help="texts or shards to measure perplexity on")
    parser.add_argument("--ages", metavar="FILE.csv", help="ages at which children acquire words, with --contexts")
    parser.add_argument("--contexts", metavar="FILE.jsonl", help="texts that these words stand behind")
    parser.add_argument("--tasks", metavar="FOLDER", help="tasks to fine-tune for")
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    return run(measure, parser.parse_args(arguments))


def measure(options: argparse.Namespace) -> None:
    """Run what is missing. Raises UsageError where a command fails, which has said why."""
    if (options.ages is None) != (options.contexts is None):
        raise UsageError("--ages and --contexts go together: give both, or none of them.")
    for script, command, arguments in commands(options):
        print(f"$ python {script} {shlex.join(arguments)}", flush=True)
        if code := command(arguments):
            raise UsageError(f"{script} ended with exit code {code}; its message is above. The same command goes on.")


def commands(options: argparse.Namespace) -> list[tuple[str, Command, list[str]]]:
    """What is to be run: the scripts, their functions and arguments."""
    folder, suffix = options.run / "evaluation", f"-{weights_file(options.ema)}" * bool(options.ema)
    common = ["--device", options.device]
    if options.ema:
        common += ["--average", options.ema] if isinstance(options.ema, str) else ["--ema"]
    checkpoints = [each.checkpoint.parent / name for each in find_revisions(options.run) for name in each.names[:1]]
    files = find_suites(options.data, "--data")[0] if options.data else {}
    found: list[tuple[str, Command, list[str]]] = []
    left = [
        str(each) for each in checkpoints
        if not Path(folder, *babylm.model_name(str(each), options.ema), "zero_shot", "results.json").exists()
    ]  # fmt: skip
    if files.keys() - {LAMBADA, SYNTAX} and left:
        given = [*left, *common, "--data", str(options.data), "--output", str(folder)]
        found.append(("evaluation/babylm.py", babylm.main, given))

    def add(script: str, command: Command, output: Path, arguments: list[str]) -> None:
        if not output.exists():
            given = [*arguments, *common, "--output", str(output)]
            found.append((f"evaluation/{script}.py", command, given))

    for each in checkpoints:
        name, given = f"{each.name}{suffix}.json", [str(each), "--data"]
        if suites := files.get(SYNTAX):
            add("syntax_gym", syntax_gym.main, folder / f"syntaxgym_{name}", [*given, *map(str, suites)])
        for file in files.get(LAMBADA, []):
            add("lambada", lambada.main, folder / f"{file.stem}_{name}", [*given, str(file)])
        if options.held_out:
            add("perplexity", perplexity.main, folder / f"perplexity_{name}", [*given, *options.held_out])
    if options.ages:
        named = [str(each) for each in checkpoints if each.name.startswith("chck_")]
        given = [*named, "--ages", options.ages, "--contexts", options.contexts]
        add("age_of_acquisition", age_of_acquisition.main, folder / f"age_of_acquisition{suffix}.json", given)
    if options.tasks:
        output = folder / f"fine_tuned{suffix}.json"
        given = [str(checkpoints[-1]), "--tasks", options.tasks, "--progress", str(output.with_suffix(""))]
        add("finetune", finetune.main, output, given)
    folder.mkdir(exist_ok=True)
    report = [("report/html_report.py", html_report.main, [str(options.run)])]
    return found + report * (options.run / "metrics.jsonl").exists()


if __name__ == "__main__":
    sys.exit(main())
