"""The learning rate's schedules beside their formulas, their parts in any unit, and WSD runs that go on."""

from __future__ import annotations

import dataclasses
import math
import shutil
from fractions import Fraction

import numpy as np
import pytest
import torch
from helpers.tiny_models import make_model
from helpers.tiny_runs import flags, make_inputs, run, training_lines

from data.batch_schedule import BatchSchedule
from data.plan import DataPlan
from data.positions import Exposure, PositionError, length_in_steps, parse_position
from training.config import ConfigError, TrainingConfig, parse_config
from training.inputs import read_inputs
from training.optimizers import MatrixOptions, make_optimizer, set_rates
from training.schedules import SCHEDULES, decay_factor, learning_rate, rate_at, value_at, values_at

NEEDED = TrainingConfig(train_path="a", config_file="b", tokenizer_path="c", name="d")


def rates(schedule: str, **options) -> list[float]:
    values = {"warmup_proportion": 0.1, "cooldown_proportion": 0.2, "decay_proportion": 0.25} | options
    return [learning_rate(step, 40, 2.0, schedule=schedule, **values) for step in range(41)]


def test_schedules_are_their_formulas():
    x = [(step - 4) / 36 for step in range(4, 40)]
    shapes = {
        "linear": [1 - each for each in x],
        "polynomial": [(1 - each) ** 2 for each in x],
        "constant": [1.0] * 36,
        "wsd": [1.0] * 26 + [1 - k / 10 for k in range(10)],
        "one_cycle": [(1 + math.cos(math.pi * each)) / 2 for each in x],
    }
    assert shapes.keys() | {"cosine"} == SCHEDULES.keys()
    for name, shape in shapes.items():
        found = rates(name)
        rise = [0, 0.25, 0.5, 0.75]
        if name == "one_cycle":
            rise = [0.04 + 0.96 * (1 - math.cos(math.pi * part)) / 2 for part in rise]
        assert found == pytest.approx([*(2 * each for each in [*rise, *shape]), 0]), name
    root = [2 * (1 - math.sqrt(k / 10)) for k in range(10)]
    assert rates("wsd", decay_shape="sqrt")[30:] == pytest.approx([*root, 0])


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_without_warm_up_or_with_nothing_else(name: str):
    assert rates(name, warmup_proportion=0.0)[0] == 2.0
    assert max(rates(name, warmup_proportion=1.0)[:40]) < 2.0
    assert rates(name, warmup_proportion="4", cooldown_proportion="8", decay_proportion="10") == rates(name)


def test_moving_values_reach_the_optimizer():
    """A momentum that has moved is one that was given; betas only where there are some."""
    weights = []
    for given, moved in ((0.95, 0.8), (0.8, None)):
        torch.manual_seed(0)
        model = make_model()
        optimizer = make_optimizer(model, "muon", 0.1, (0.9, 0.98), 1e-8, 0.1, MatrixOptions(momentum=given))
        set_rates(optimizer, 0.1, 1.0, {"momentum": moved, "beta1": 0.5} if moved else {"beta1": 0.5})
        assert {group["betas"] for group in optimizer.param_groups} == {(0.5, 0.98)}
        for parameter in model.parameters():
            parameter.grad = torch.sin(torch.arange(parameter.numel(), dtype=torch.float32)).view_as(parameter)
        for _ in range(2):
            optimizer.step()
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert torch.equal(*weights)


def test_learning_rate_at_the_edges():
    assert [learning_rate(step, 10, 2.0, 0.0, 0.0) for step in (0, 10, 11)] == [2.0, 0.0, 0.0]
    assert learning_rate(9, 10, 2.0, 0.0, 0.0) > 0.2
    assert [learning_rate(step, 4, 1.0, 0.5, 0.5) for step in range(4)] == [0.0, 0.5, 0.1, 0.05]
    assert [learning_rate(step, 2, 3.0, 1.0, 0.0) for step in range(2)] == [0.0, 1.5]
    assert all(0 < learning_rate(step, 100, 1.0, 0.016, 0.016) <= 1 for step in range(1, 100))


def test_points_are_their_formulas():
    course = "0:0 linear, 4:1, 50%:0.5 exponential, 75%:0.125, 90%:0.25 linear, 100%:0"
    found = [value_at(course, step, 20) for step in range(20)]
    rise, fall = [0, 0.25, 0.5, 0.75], [0.5 * 0.25 ** (k / 5) for k in range(5)]
    assert found == pytest.approx([*rise, *[1.0] * 6, *fall, *[0.125] * 3, 0.25, 0.125])
    assert [learning_rate(step, 20, 2.0, 0.016, 0.016, course) for step in range(21)] == [2 * v for v in found] + [0]


@pytest.mark.parametrize("shape", SCHEDULES)
def test_other_values_take_any_shape_of_the_rate(shape: str):
    """Between two values as the learning rate between 0 and its peak; or by points."""
    courses = f"momentum={shape}:0.95..0.85; weight_decay={shape}:0..0.4;beta2=0:0.9, 20:0.98; ema_decay=0:0.5"
    config = dataclasses.replace(NEEDED, max_steps=40, value_schedules=courses, warmup_proportion="4")
    for step in range(40):
        rate = learning_rate(step, 40, 1.0, "4", 0.016, shape, 0.2)
        expected = {"momentum": 0.95 - 0.1 * rate, "weight_decay": 0.4 * rate, "beta2": 0.9 if step < 20 else 0.98}
        assert values_at(config, step) == pytest.approx(expected | {"ema_decay": 0.5})
    assert values_at(config, 25, begun=6)["beta2"] == 0.9  # of a branch whose schedule begins anew


@pytest.mark.parametrize("root", [False, True])
def test_annealed_rates_begin_where_the_planned_ones_were(root: bool):
    config = dataclasses.replace(NEEDED, max_steps=30, planned_steps=100, anneal_steps="10", anneal_from="x")
    config = dataclasses.replace(config, decay_shape="sqrt" if root else "linear")
    planned = dataclasses.replace(NEEDED, max_steps=100)
    assert [rate_at(config, step) for step in range(21)] == [rate_at(planned, step) for step in range(21)]
    falls = [1 - math.sqrt(k / 10) if root else 1 - k / 10 for k in range(11)]
    assert [rate_at(config, 20 + k) for k in range(11)] == pytest.approx(
        [rate_at(planned, 20) * each for each in falls]
    )


def test_weight_decay_moves_linearly():
    assert [0.4 * decay_factor(step, 4, 0.4, 0.1) for step in range(4)] == pytest.approx([0.4, 0.325, 0.25, 0.175])
    assert decay_factor(3, 4, 0.4, -1.0) == 1.0


@pytest.mark.parametrize(
    ("text", "at_end", "steps"),
    [("3", True, 3), ("0.25", True, 3), ("50%", False, 5), ("100t", False, 10), ("101t", False, 11), ("101t", True, 11),
     ("100t", True, 10), ("1w", True, 1), ("0.5e", False, 5)],
)  # fmt: skip
def test_lengths_in_any_unit(text: str, at_end: bool, steps: int):
    schedule = BatchSchedule(10 if text.endswith(("5", "%")) else 40, 5, 2, 1.0, ())  # 10 tokens a step
    exposure = Exposure(100, Fraction(1) if text == "1w" else None)
    assert length_in_steps(parse_position(text), schedule, exposure, at_end) == steps


def test_the_end_of_a_growing_batch_is_counted_from_the_end():
    schedule = BatchSchedule(8, 4, 16, 4.0, ())
    tokens = np.diff(schedule.token_sums)
    assert tokens[-1] > tokens[0]
    amount = parse_position(f"{tokens[-2:].sum()}t")
    assert length_in_steps(amount, schedule, Exposure(100, None), at_end=True) == 2
    assert length_in_steps(amount, schedule, Exposure(100, None), at_end=False) > 2
    with pytest.raises(PositionError, match=r"5kt is more than the run, which has \d+ tokens"):
        length_in_steps(parse_position("5kt"), schedule, Exposure(100, None), at_end=True)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"schedule": "wsd", "warmup_proportion": 0.9}, "--warmup_proportion is 0.9; with --decay_proportion it adds"),
        ({"schedule": "linear", "cooldown_proportion": 0.1}, "--cooldown_proportion is 0.1 but --schedule is 'linear'"),
        ({"decay_shape": "sqrt"}, "--decay_shape is 'sqrt' but --schedule is 'cosine'; it is for wsd alone"),
        ({"warmup_proportion": 1.5}, "--warmup_proportion is 1.5; it must be a fraction between 0 and 1, or steps"),
        ({"weight_decay": 0.0, "weight_decay_end": 0.1}, "--weight_decay_end is 0.1 but --weight_decay is 0"),
        ({"reset": ("step",)}, "--reset is step but no checkpoint is named; give --resume PATH, too"),
        ({"reset": ("position",), "resume": "x"}, "--reset position needs step"),
        ({"reset": ("steps",), "resume": "x"}, "--reset is 'steps'; choose optimizer,schedule,step"),
        ({"schedule": "slow"}, "--schedule is 'slow'; choose cosine, linear, polynomial, constant, wsd, one_cycle, or"),
        ({"schedule": "0:x"}, "--schedule is '0:x'; '0:x' is no point of a course; give POSITION:VALUE, ..."),
        ({"schedule": "1:1"}, "--schedule is '1:1'; a course begins with its value at 0, such as 0:1"),
        ({"schedule": "0:1 linear"}, "--schedule is '0:1 linear'; linear leads from 0 to no other point; add one"),
        ({"schedule": "0:1, 9x:1"}, "--schedule is '0:1, 9x:1'; '9x' is no position in a run"),
        ({"schedule": "0:0 exponential, 5:1"}, "a course that is exponential cannot begin or end at 0"),
        (
            {"schedule": "0:1", "warmup_proportion": 0.1},
            "--warmup_proportion is 0.1 but --schedule has points; add one",
        ),
        (
            {"value_schedules": "lr=0:1"},
            "--value_schedules is 'lr=0:1'; 'lr=0:1' names nothing that moves; give weight_decay, mom",
        ),
        ({"value_schedules": "momentum=slow:0..0.5"}, "'slow' in 'momentum=slow:0..0.5' is no shape; choose cosine"),
        (
            {"value_schedules": "beta2=0:0.9", "beta2_by_role": ("head=0.9",)},
            "--value_schedules moves beta2 of all parameters; leave --beta2_by_role out",
        ),
        ({"beta1_by_role": ("head=1",)}, "give values of at least 0 and below 1 by role, such as embedding=0.8"),
        ({"value_schedules": "beta1=0:1"}, "beta1 of 1 is not at least 0 and below 1"),
        ({"value_schedules": "weight_decay=0:1", "weight_decay": 0.0}, "--value_schedules has weight_decay; leave"),
        ({"anneal_from": "a", "resume": "b"}, "--anneal_from names where to start and keeps all else; leave --resume"),
        ({"planned_steps": 5}, "--planned_steps is 5, less than --max_steps (15625)"),
        ({"matrix_learning_rate": 0.1}, "--matrix_learning_rate is 0.1 but --optimizer is 'lamb'; it is for muon and"),
    ],
)
def test_what_does_not_go_together_is_refused(values: dict, sentence: str):
    with pytest.raises(ConfigError) as refused:
        dataclasses.replace(NEEDED, **values)
    assert sentence in str(refused.value)


def test_parts_of_the_run_in_tokens_become_steps(tmp_path):
    inputs = make_inputs(tmp_path / "inputs")
    sizes = {"schedule": "wsd", "batch_reduction": 1, "length_milestones": "", "max_steps": 30}

    def config(**options) -> TrainingConfig:
        return parse_config(flags(inputs, tmp_path, **{**sizes, **options}), "")

    found = read_inputs(config(warmup_proportion="2048t", decay_proportion="5")).config  # 1,024 tokens a step
    assert (found.warmup_proportion, found.decay_proportion) == ("2", "5")
    for name, value, sentence in (
        ("decay_proportion", "28", "--warmup_proportion is 3 steps and --decay_proportion is 28 steps of a run of 30"),
        ("decay_proportion", "1Mt", "--decay_proportion is 1Mt; 1Mt is more than the run, which has 30,720 tokens"),
        ("warmup_proportion", "31", "--warmup_proportion is 31; 31 lies behind the end of the run"),
        ("decay_proportion", "5w", "--decay_proportion is 5w; words are not known"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            read_inputs(config(**{name: value}))
    with pytest.raises(SystemExit):
        config(warmup_proportion="soon")
    sizes["warmup_proportion"] = 0.016
    found = read_inputs(config(schedule="0:0 linear,2048t:1, 50%:0.5", value_schedules="beta1=0:0.5,1e:0.9")).config
    assert found.schedule == "0:0.0 linear, 2:1.0, 50%:0.5"
    assert found.value_schedules.startswith("beta1=0:0.5, ")
    for name, value, sentence in (
        ("schedule", "0:1, 2048t:0.5, 2:0.1", "--schedule is .*; '2:0.1' is not behind the point before it"),
        ("value_schedules", "beta1=0:0.5, 99:0.9", "--value_schedules is .*; 99 lies behind the end of the run"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            read_inputs(config(**{name: value}, **({} if name == "schedule" else {"schedule": "constant"})))


def test_with_an_open_end_the_order_of_rows_does_not_depend_on_the_length():
    short, long = (DataPlan(steps, 8, 16, 1.0, 1, 2, milestones=(), open_end=True) for steps in (20, 30))
    for objective in (0, 1):
        assert short.spans(objective) == long.spans(objective)
    assert [short.step(step).position for step in range(20)] == [long.step(step).position for step in range(20)]
    assert DataPlan(20, 8, 16).spans(0)[-1][1] == DataPlan(20, 8, 16).objective_tokens(0)
    short, long = (
        DataPlan(n, 8, 16, 1.0, 1, 2, milestones=(), earlier_ends=ends) for n, ends in ((20, ()), (30, (20,)))
    )
    for objective in (0, 1):
        assert long.spans(objective)[:-1] == short.spans(objective)
        assert long.spans(objective)[-1][0] == short.objective_tokens(objective)


def test_run_that_is_extended_twice_reads_each_row_once(tmp_path):
    """By a schedule that has an end, half-way and from its last step; each token of an epoch comes once."""
    inputs = make_inputs(tmp_path / "inputs")
    still = {"batch_reduction": 1, "length_milestones": "", "save_every": 4, "validate_every": 0}
    still |= {"data_fingerprint": True, "mask_p_end": 0.3}

    def prints(name: str, **options) -> tuple[list[str], str]:
        done = run(flags(inputs, tmp_path, name, **still | options))
        return [line["data/fingerprint"] for line in training_lines(tmp_path / name)], done.stdout

    whole, _ = prints("whole", max_steps=12)
    longer, said = prints("longer", max_steps=20, resume=tmp_path / "whole" / "checkpoints" / "step_00000008")
    assert "another order" not in said
    assert "--earlier_ends was [] and is now [12]" in said
    assert longer[:4] == whole[8:]
    named, _ = prints("named", max_steps=20, earlier_ends="12")
    assert named == whole + longer[4:]
    longest, said = prints("longest", max_steps=24, resume=tmp_path / "longer" / "checkpoints" / "step_00000020")
    assert "--earlier_ends was [12] and is now [12, 20]" in said
    assert len({*whole, *longer[4:], *longest}) == 24
    shutil.rmtree(tmp_path / "longer" / "checkpoints" / "step_00000020")
    again, _ = prints("longer", max_steps=20, resume=tmp_path / "whole" / "checkpoints" / "step_00000008")
    assert again == longer
    _, said = prints("shorter", max_steps=10, resume=tmp_path / "whole" / "checkpoints" / "step_00000008")
    assert "rows come in another order from here on" in said


@pytest.mark.slow
def test_a_branch_begins_anew_what_it_resets(tmp_path):
    """Rates over the steps left, or all from step 0; moments kept or not; and resumed it is the same branch."""
    inputs = make_inputs(tmp_path / "inputs")

    def lines(name: str, **options) -> list[dict]:
        run(
            flags(inputs, tmp_path, name, **{"save_every": 4, "validate_every": 0, "data_fingerprint": True, **options})
        )
        return training_lines(tmp_path / name)

    def rate(step: int, steps: int) -> float:
        return learning_rate(step, steps, 1e-2, 0.1, 0.016)

    first = lines("first", max_steps=4)
    checkpoint = tmp_path / "first" / "checkpoints" / "step_00000004"
    options = {"max_steps": 12, "resume": checkpoint}
    restarted = lines("restarted", reset="optimizer,schedule", **options)
    assert [line["step"] for line in restarted] == list(range(5, 13))
    assert [line["stats/learning_rate"] for line in restarted] == [rate(step, 8) for step in range(8)]
    shutil.rmtree(tmp_path / "restarted" / "checkpoints" / "step_00000012")
    again = lines("restarted", reset="optimizer,schedule", **options)
    assert [line["train/loss"] for line in again] == [line["train/loss"] for line in restarted]
    kept, new = (lines(name, reset=name.replace("_", ","), **options) for name in ("step", "step_optimizer"))
    for found in (kept, new):
        assert [line["stats/learning_rate"] for line in found] == [rate(step, 12) for step in range(12)]
        assert found[0]["train/loss"] == kept[0]["train/loss"] < first[0]["train/loss"] - 0.1
    assert kept[2]["train/loss"] != new[2]["train/loss"]
    shutil.rmtree(tmp_path / "step" / "checkpoints" / "step_00000012")
    assert [line["train/loss"] for line in lines("step", reset="step", **options)] == [k["train/loss"] for k in kept]


@pytest.mark.slow
def test_a_wsd_run_goes_on_as_the_longer_one_that_it_was_not(tmp_path):
    """Annealed, and extended from before its decay; the branch says what comes again where the rows' order changes."""
    inputs = make_inputs(tmp_path / "inputs", documents=60)  # several epochs
    still = {"batch_reduction": 1, "length_milestones": "", "mask_p_start": 0.2, "mask_p_end": 0.2}
    still |= {
        "schedule": "wsd",
        "warmup_proportion": "3",
        "save_every": 8,
        "validate_every": 0,
        "data_fingerprint": True,
    }

    def lines(name: str, **options) -> tuple[list[dict], str]:
        done = run(flags(inputs, tmp_path, name, **still | options))
        found = training_lines(tmp_path / name)
        keys = ("step", "data/fingerprint", "train/loss", "stats/learning_rate")
        return [{key: line[key] for key in keys} for line in found], done.stdout

    first, _ = lines("first", max_steps=12, decay_proportion="4")
    long, _ = lines("long", max_steps=20, decay_proportion="4")
    assert first[:8] == long[:8]
    assert [line["data/fingerprint"] for line in first] == [line["data/fingerprint"] for line in long[:12]]
    checkpoint = tmp_path / "first" / "checkpoints" / "step_00000008"
    extended, said = lines("extended", max_steps=20, decay_proportion="4", resume=checkpoint)
    assert extended == long[8:]
    assert "--max_steps was 12 and is now 20" in said
    assert "another order" not in said
    options = {
        "max_steps": 20,
        "anneal_from": checkpoint,
        "anneal_steps": "3",
        "decay_proportion": "4",
        "save_steps": 9,
    }
    annealed, said = lines("annealed", **options)
    assert "--planned_steps was 0 and is now 12" in said
    assert "another order" not in said
    assert "linear from 1 of the peak at step 8 to 0" in said
    assert [line["data/fingerprint"] for line in annealed] == [line["data/fingerprint"] for line in long[8:11]]
    assert [line["stats/learning_rate"] for line in annealed] == pytest.approx([1e-2, 2e-2 / 3, 1e-2 / 3])
    shutil.rmtree(tmp_path / "annealed" / "checkpoints" / "step_00000011")
    checkpoint.rename(tmp_path / "elsewhere")
    again, _ = lines("annealed", **options)
    assert [line["train/loss"] for line in again] == [line["train/loss"] for line in annealed]
    (tmp_path / "elsewhere").rename(checkpoint)
    _, said = lines("other", max_steps=20, decay_proportion="4", resume=checkpoint, batch_reduction=2)
    assert "rows come in another order from here on" in said
