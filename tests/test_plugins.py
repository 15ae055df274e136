"""Plugins: what --plugin adds to a run, and what goes wrong in one without ending, changing or hanging the run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import Run, run_ranks
from helpers.tiny_runs import ROOT, flags, make_inputs, refusal, training_lines

import train_single_gpu
from training.config import ConfigError
from training.distributed import single_world
from training.metric_logger import read_metrics
from training.plugins import Plugins

EXAMPLE = ROOT / "examples" / "plugin.py"
SHORT = {"max_steps": 4, "validate_every": 2, "save_every": 0}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("plugins") / "inputs")


def train(inputs: Path, output: Path, name: str, **options: Any) -> list[dict[str, Any]]:
    """A short run in this process; returns its metrics."""
    assert train_single_gpu.main(flags(inputs, output, name, **(SHORT | options)), single_world) == 0
    return read_metrics(output / name / "metrics.jsonl")


def results(folder: Path) -> list[float]:
    """Losses of a run, by which runs compare."""
    return [line["train/loss"] for line in training_lines(folder)]


def entropies(folder: Path) -> dict[int, float]:
    """The example's evaluation, by step."""
    key = "plugin/next_token_entropy"
    return {line["step"]: line[key] for line in read_metrics(folder / "metrics.jsonl") if key in line}


@pytest.mark.slow
def test_example_adds_metric_evaluation_and_sink_and_changes_nothing_else(inputs, tmp_path, capsys):
    plain = train(inputs, tmp_path, "plain")
    with_plugin = train(inputs, tmp_path, "with_plugin", plugin=EXAMPLE)
    steps = [line for line in with_plugin if "train/loss" in line]
    for line in steps:
        assert line["plugin/rows_per_second"] == line["stats/tokens_per_second"] / line["stats/seq_length"]
    assert entropies(tmp_path / "with_plugin").keys() == {2, 4}
    assert re.search(r"^step      2  plugins: plugin/next_token_entropy \d", capsys.readouterr().out, re.MULTILINE)
    table = (tmp_path / "with_plugin" / "loss.csv").read_text().splitlines()
    assert table == [f"{line['step']},{line['train/loss']:.4f}" for line in steps]
    assert [line for line in plain if "plugin/next_token_entropy" in line] == []
    assert results(tmp_path / "plain") == results(tmp_path / "with_plugin")
    valid = [
        [{k: v for k, v in line.items() if k.startswith("valid/")} for line in run] for run in (plain, with_plugin)
    ]
    assert [line for line in valid[0] if line] == [line for line in valid[1] if line]
    # A resume may come with other plugins.
    assert train_single_gpu.main(flags(inputs, tmp_path, "plain", plugin=EXAMPLE, **SHORT), single_world) == 0
    assert "is complete" in capsys.readouterr().out


BROKEN = """
from training.sinks import Sink

def step_metrics(metrics):
    return {"plugin/inverse": 1 / (metrics["step"] - 2)}

def evaluate(model, context):
    model.eval()
    raise SystemExit("no words")

class Broken(Sink):
    def metrics(self, record):
        raise OSError("no space")

def sinks(run_folder, config):
    return [Broken()]
"""


@pytest.mark.slow
def test_functions_that_fail_are_told_once_and_leave_the_run_as_it_is(inputs, tmp_path, capsys):
    (tmp_path / "broken.py").write_text(BROKEN)
    (tmp_path / "other.py").write_text("def sinks(run_folder, config):\n    return run_folder / None\n")
    both = f"{tmp_path / 'broken.py'},{tmp_path / 'other.py'}"
    train(inputs, tmp_path, "plain")
    found = train(inputs, tmp_path, "broken", plugin=both)
    assert [line["plugin/inverse"] for line in found if "plugin/inverse" in line] == [-1]
    assert results(tmp_path / "plain") == results(tmp_path / "broken")
    out, name = capsys.readouterr().out, f"--plugin {tmp_path / 'broken.py'}"
    for note in (
        f"note: {name}: step_metrics failed (line 5: ZeroDivisionError: division by zero); ",
        f"note: {name}: evaluate failed (line 9: SystemExit: no words); ",
        f"note: Broken of {name} failed (OSError: no space); ",
        f"note: --plugin {tmp_path / 'other.py'}: sinks failed (line 2: TypeError: ",
    ):
        assert out.count(note) == 1, out
    assert out.count("; the run continues without it") == 4


FAILS_ON_RANK_1 = """
def evaluate(model, context):
    if context.rank == 1:
        raise ValueError("bad\\nluck")
    return {"plugin/x": 1}
"""


@pytest.mark.slow
def test_ranks_share_an_evaluation_and_an_error_on_one_hangs_none(inputs, tmp_path):
    (tmp_path / "fails.py").write_text(FAILS_ON_RANK_1)
    (tmp_path / "other.py").write_text(EXAMPLE.read_text() + "# another\n")
    runs = [
        Run(flags(inputs, tmp_path, "shared", plugin=EXAMPLE, **SHORT)),
        Run(flags(inputs, tmp_path, "fails", plugin=tmp_path / "fails.py", **SHORT)),
        Run(flags(inputs, tmp_path, "other", plugin=EXAMPLE, **SHORT), rank_1=[f"--plugin={tmp_path / 'other.py'}"]),
    ]
    shared, fails, other = run_ranks(runs)
    assert [outcome.code for outcome in (*shared, *fails)] == [0] * 4
    train(inputs, tmp_path, "alone", plugin=EXAMPLE)
    assert entropies(tmp_path / "shared") == pytest.approx(entropies(tmp_path / "alone"), rel=1e-3)
    note = "fails.py: evaluate failed on rank 1 (line 4: ValueError: bad luck); the run continues without it"
    assert [outcome.text.count(note) for outcome in fails] == [1, 0]
    assert results(tmp_path / "fails") == results(tmp_path / "shared")
    assert other[0].code == 2
    assert "ranks differ: the content of --plugin is" in other[0].text


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (None, "cannot be read: No such file or directory"),
        ("x = 1\ndef f(:\n", "cannot be imported: line 2: SyntaxError: "),
        ("import os\nx = os.no_such\n", "cannot be imported: line 2: AttributeError: module 'os' has no attribute"),
        ("import sys\n\nsys.exit('enough')\n", "cannot be imported: line 3: SystemExit: enough"),
        ("def metrics(x):\n    return {}\n", "has none of the functions step_metrics, evaluate, sinks"),
    ],
)
def test_plugin_that_cannot_be_imported_is_refused_before_any_work(source, says, inputs, tmp_path, capsys):
    path = tmp_path / "mine.py"
    if source is not None:
        path.write_text(source)
    arguments = flags(inputs, tmp_path / "runs", plugin=path)
    assert f"--plugin '{path}' {says}" in refusal(capsys, train_single_gpu.main, arguments, single_world)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ("None", "it returned None instead of a dict"),
        ("{'train/loss': 1}", "it returned 'train/loss', which is logged already"),
        ("{'x': torch.ones(())}", "it returned tensor(1.) as 'x': keys are text and values numbers of the host"),
        ("{1: 2}", "it returned 2 as 1: keys are text and values numbers of the host"),
        ("{'x': (1, 2)}", "it returned a pair as 'x'; it must be a number"),
    ],
)
def test_step_metrics_must_be_numbers_of_their_own(returned, says, tmp_path):
    path, said = tmp_path / "mine.py", []
    path.write_text(f"import torch\ndef step_metrics(metrics):\n    metrics.clear()\n    return {returned}\n")
    plugins, metrics = Plugins([str(path)]), {"step": 1, "train/loss": 2.0}
    for _ in range(2):
        assert plugins.with_step_metrics(metrics, said.append) == {"step": 1, "train/loss": 2.0}
    assert said == [f"note: --plugin {path}: step_metrics failed (ValueError: {says}); the run continues without it"]


def test_host_numbers_of_any_kind_are_metrics(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import numpy\ndef step_metrics(metrics):\n    return {'a': numpy.float32(0.5), 'b': True, 'c': float('nan')}\n"
    )
    found = Plugins([str(path)]).with_step_metrics({"step": 1}, pytest.fail)
    assert {key: type(value) for key, value in found.items()} == {"step": int, "a": float, "b": float, "c": float}
    assert torch.tensor(list(found.values())).isnan().tolist() == [False, False, False, True]


def test_two_plugins_may_not_give_the_same_key(tmp_path):
    said: list[str] = []
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text("def step_metrics(metrics):\n    return {'x': 1}\n")
    plugins = Plugins([str(tmp_path / "one.py"), str(tmp_path / "two.py")])
    assert plugins.with_step_metrics({"step": 1}, said.append) == {"step": 1, "x": 1}
    assert "two.py: step_metrics failed (ValueError: it returned 'x', which is logged already)" in said[0]


def test_plugin_that_cannot_be_imported_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        Plugins([str(tmp_path / "none.py")])
