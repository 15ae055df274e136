"""Every optimizer and schedule: the same run on one rank, on two, and on four that resume it."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.ranks import Run, run_ranks
from helpers.tiny_runs import flags, make_inputs, training_lines

import train_single_gpu
from training.checkpoint import open_checkpoint
from training.distributed import single_world
from training.optimizers import OPTIMIZERS
from training.schedules import SCHEDULES

MOVING = "momentum=one_cycle:0.95..0.85; beta2=0:0.9 linear, 5:0.98; weight_decay=linear:0..0.2"
# name: the optimizer, the schedule, further flags
CASES = {
    "lamb": ("lamb", "cosine", {"ema_decay": "0.999,0.3", "tail_average": "4"}),
    "adamw": ("adamw", "linear", {"weight_decay_end": 0.3, "beta2_by_role": "embedding=0.9"}),
    "muon": ("muon", "one_cycle", {"value_schedules": MOVING, "matrix_learning_rate": 2e-2}),
    "normuon": ("normuon", "wsd", {"decay_shape": "sqrt", "cautious_weight_decay": True, "rest_optimizer": "lamb"}),
    "nadam": ("torch.optim.NAdam", "polynomial", {"learning_rate_by_role": "mlp=0.5"}),
    "points": ("lamb", "0:0.1 linear, 2:1, 70%:1 exponential, 100%:0.1", {"warmup_proportion": 0.016}),
    "constant": ("adamw", "constant", {"value_schedules": "beta1=cosine:0.8..0.9; ema_decay=0:0.5, 3:0.9"}),
}


def test_all_optimizers_and_schedules_are_cases():
    optimizers, schedules, _ = zip(*CASES.values(), strict=True)
    assert {*OPTIMIZERS} <= {*optimizers}
    assert {*SCHEDULES} <= {*schedules}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of every case in folders one, two and four; the last resume those of one rank in their middle."""
    folder = tmp_path_factory.mktemp("same_run")
    inputs = make_inputs(folder / "inputs", documents=200)

    def arguments(place: str, name: str, **further) -> list[str]:
        optimizer, schedule, own = CASES[name]
        usual = {"max_steps": 6, "save_every": 3, "validate_every": 0, "valid_path": "", "warmup_proportion": 0.4}
        given = {**usual, "optimizer": optimizer, "schedule": schedule, **own, **further}
        return flags(inputs, folder / place, name, **given)

    for name in CASES:
        assert train_single_gpu.main(arguments("one", name), single_world) == 0
    middle = {name: folder / "one" / name / "checkpoints" / "step_00000003" for name in CASES}
    for place, ranks in (("two", 2), ("four", 4)):
        begun = {name: {"resume": middle[name]} if place == "four" else {} for name in CASES}
        outcomes = run_ranks([Run(arguments(place, name, **begun[name])) for name in CASES], ranks)
        for name, of_ranks in zip(CASES, outcomes, strict=True):
            assert all(outcome.code == 0 for outcome in of_ranks), (place, name, of_ranks)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_same_run_on_any_ranks_and_resumed(folder: Path, name: str):
    whole, two, resumed = (training_lines(folder / place / name) for place in ("one", "two", "four"))
    assert [line["step"] for line in whole] == [1, 2, 3, 4, 5, 6]
    for lines in (two, resumed):
        for line, other in zip(lines, whole[-len(lines) :], strict=True):
            assert line["train/loss"] == pytest.approx(other["train/loss"], rel=1e-5)
            for key in ("learning_rate", "momentum", "beta1", "beta2", "weight_decay"):
                assert line.get(f"stats/{key}") == other.get(f"stats/{key}")
    assert (len(two), len(resumed)) == (6, 3)
    ends = [
        open_checkpoint(folder / place / name / "checkpoints" / "step_00000006") for place in ("one", "two", "four")
    ]
    for part in ("model", "ema", "optimizer"):
        one, *others = (end.tensors(part) for end in ends)
        for other in others:
            assert one.keys() == other.keys()
            for key, value in one.items():
                assert (other[key] - value).double().norm() <= 5e-3 * value.double().norm().clamp(min=1e-6), key
