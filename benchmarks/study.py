"""Train all runs of a study and draw its figure: each setting's held-out losses and minimal pairs, mean over seeds.

    python benchmarks/study.py configs/recipes/study_ratio.json --output studies --train_path shards/train \
        --valid_path shards/validation --tokenizer_path tokenizer.json [--evaluate_data PAIRS] [--seeds 42 43 44]

A study is a recipe whose "_runs" has, by name, the flags of each of its runs; "_title" says what they differ in. They
are trained one after the other by slurm/launch.py --local --sweep; what is complete is not trained again. Further flags
are training's. STUDY.png, STUDY.json and a table are of all runs; losses are those of the averaged weights.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.timing import environment
from data.cli import Parser
from report.groups import Score, mean_and_error, scores_of
from report.metrics import ReportError
from report.plot import RUN_COLOURS, STYLE
from report.runs import read_runs

_ROOT = Path(__file__).resolve().parent.parent
Points = dict[str, tuple[float, float | None]]  # by setting: mean over seeds, and its standard error


def write_recipes(study: dict[str, Any], folder: Path) -> dict[str, Path]:
    """A recipe for each of the study's runs, by the run's name."""
    folder.mkdir(parents=True, exist_ok=True)
    common = {name: value for name, value in study.items() if not name.startswith("_")}
    found = {}
    for name, flags in study["_runs"].items():
        found[name] = folder / f"{re.sub(r'[^A-Za-z0-9.]+', '_', name)}.json"
        found[name].write_text(json.dumps(common | flags, indent=1) + "\n", encoding="utf-8")
    return found


def points_of(score: Score, groups: dict[str, list[int]]) -> Points:
    """A score's mean by setting; groups: the numbers of its runs."""
    factor = 100 if score.percent else 1
    values = {
        name: [factor * score.values[n] for n in numbers if n in score.values] for name, numbers in groups.items()
    }
    return {name: mean_and_error(of) for name, of in values.items() if of}


def draw(title: str, scores: dict[str, Points], path: Path) -> None:
    """A panel for each score: a point for each setting, with its standard error where there are seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(3, len(scores))
    rows = -(-len(scores) // columns)
    with pyplot.rc_context(STYLE):
        figure, grid = pyplot.subplots(
            rows, columns, figsize=(4.2 * columns, 3.2 * rows), layout="constrained", squeeze=False
        )
        for axes, (name, points) in zip(grid.flat, scores.items(), strict=False):
            means, errors = zip(*points.values(), strict=True)
            axes.errorbar(range(len(means)), means, [error or 0 for error in errors], fmt="o-", color=RUN_COLOURS[1])
            axes.set_xticks(
                range(len(means)), list(points), rotation=30 if max(map(len, points)) > 3 else 0, ha="right"
            )
            axes.set_title(name, loc="left")
        for axes in grid.flat[len(scores) :]:
            axes.set_visible(False)
        figure.supxlabel(title)
        figure.savefig(path, dpi=110)
        pyplot.close(figure)


def table(scores: dict[str, Points]) -> str:
    """The same in Markdown, a line for each setting."""
    lines = ["| | " + " | ".join(scores) + " |", "| --- " * (len(scores) + 1) + "|"]
    for setting in dict.fromkeys(name for points in scores.values() for name in points):
        cells = []
        for points in scores.values():
            mean, error = points.get(setting, (None, None))
            cells.append("" if mean is None else f"{mean:.4g}" + (f" ± {error:.2g}" if error is not None else ""))
        lines.append(f"| {setting} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Entry point."""
    parser = Parser(__doc__)
    parser.add_argument("study", type=Path, metavar="STUDY", help="such as configs/recipes/study_ratio.json")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="folder of runs and figures")
    parser.add_argument("--seeds", nargs="+", default=["42"], metavar="SEED", help="of each run (default: 42)")
    parser.add_argument("--dry_run", action="store_true", help="print the commands of the runs; train nothing")
    options, flags = parser.parse_known_args(arguments)
    try:
        study = json.loads(options.study.read_text(encoding="utf-8"))
        recipes = write_recipes(study, options.output / "recipes" / options.study.stem)
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"STUDY {options.study} cannot be read as a study, a recipe with _runs ({error!r})")
    name, home = options.study.stem, options.output
    sweep = [f"--sweep=recipe={','.join(map(str, recipes.values()))}", f"--sweep=seed={','.join(options.seeds)}"]
    act = ["--local", *["--dry_run"] * options.dry_run, *sweep]
    own = [f"--output_dir={home}", f"--name={name}", "--wandb_mode=disabled"]
    code = subprocess.run([sys.executable, str(_ROOT / "slurm" / "launch.py"), *act, "--", *flags, *own]).returncode
    if code or options.dry_run:
        return code
    groups, folders = {}, []
    for setting, recipe in recipes.items():
        groups[setting] = list(range(len(folders), len(folders) + len(options.seeds)))
        folders += [str(home / f"{name}-recipe={recipe.name}-seed={seed}") for seed in options.seeds]
    try:
        found = [score for score in scores_of(read_runs(folders)) if score.set is None]
    except ReportError as error:
        parser.error(str(error))
    scores = {score.name: points_of(score, groups) for score in found}
    (home / f"{name}.json").write_text(json.dumps({"environment": environment(), "scores": scores}, indent=1) + "\n")
    draw(study.get("_title", name), scores, home / f"{name}.png")
    print(f"{table(scores)}\n{home / name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
