"""All ranks train the same run: what differs between them is found at the start, and named."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass

import pytest
import torch
from helpers.ranks import Outcome, Run, run_ranks
from helpers.tiny_runs import flags, make_inputs

from training import rank_checks
from training.config import FIELDS
from training.distributed import World
from training.environment import Environment
from training.errors import HARDWARE
from training.rank_checks import DivergenceError, RankCheck

SHORT = {"max_steps": 12, "validate_every": 0, "save_every": 4, "collective_timeout": 0.5}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    """Runs of two ranks, of which the second is given something else."""
    folder = tmp_path_factory.mktemp("agreement")
    inputs = make_inputs(folder / "inputs")
    model = json.loads((inputs / "model.json").read_text())
    (folder / "model.json").write_text(json.dumps({**model, "hidden_dropout_prob": 0.2}))
    shutil.copytree(inputs / "train", folder / "copy")

    def run(name: str, *rank_1: str, fault: str = "", every: int = 0, saves: int = 3, **variables: str) -> Run:
        options = {**SHORT, "check_ranks_every": every, "max_failed_saves": saves}
        return Run(flags(inputs, folder / "runs", name, **options), rank_1, variables, fault)

    runs = {
        "max_steps": run("max_steps", "--max_steps=6", "--seed=7"),
        "global_batch_size": run("global_batch_size", "--global_batch_size=1000"),
        "train_path": run("train_path", f"--train_path={inputs / 'train' / 'part_0.shard'}"),
        "valid_path": run("valid_path", "--valid_path="),
        "config_file": run("config_file", f"--config_file={folder / 'model.json'}"),
        "switch": run("switch", HYBRID_REFERENCE="loss"),
        "bad_norm": run("bad_norm", fault="bad_norm"),
        "between saves": run("weight", fault="flipped_weight", every=3),
        "before a save": run("average", fault="flipped_average"),
        "lost disk": run("disk", fault="lost_disk", saves=1),
        # Places of its own, and what only names them.
        "places": run(
            "places", f"--train_path={folder / 'copy'}/*.shard", "--output_dir=/nowhere", HYBRID_KERNEL_CACHE="/tmp"
        ),
    }
    return dict(zip(runs, run_ranks(list(runs.values())), strict=True))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("max_steps", r"--max_steps is 12 on rank 0 \(\S+\) but 6 on rank 1 \(\S+\) \(different, too: --seed\); start"),
        ("global_batch_size", "--global_batch_size is 64 on rank 0 .* but 1000 on rank 1"),
        ("train_path", "the data of --train_path is '[0-9a-f]+' on rank 0 .* but '[0-9a-f]+' on rank 1"),
        ("valid_path", "the data of --valid_path is '[0-9a-f]+' on rank 0 .* but none on rank 1"),
        ("config_file", r"hidden_dropout_prob in --config_file is 0.1 on rank 0 .* but 0.2 on rank 1"),
        ("switch", "HYBRID_REFERENCE is not set on rank 0 .* but 'loss' on rank 1"),
    ],
)
def test_differing_runs_are_refused_on_all_ranks(outcomes: dict[str, list[Outcome]], name: str, words: str):
    for outcome in outcomes[name]:
        assert outcome.code == 2, outcome.text
        errors = [line for line in outcome.text.splitlines() if "error: " in line]
        assert len(errors) == 1
        assert re.search(rf"error: ranks differ: {words}", errors[0]), errors
    assert "plan" not in outcomes[name][0].text


def test_paths_may_differ(outcomes: dict[str, list[Outcome]]):
    assert [outcome.code for outcome in outcomes["places"]] == [0, 0], outcomes["places"]


def test_bad_norm_on_one_rank_ends_all(outcomes: dict[str, list[Outcome]]):
    """Within a step, and not after the time-out of the others."""
    main, other = outcomes["bad_norm"]
    assert "step 6: all losses are finite but the gradient norm is inf on rank 1 alone" in main.text
    assert "step_00000004" in main.text
    assert "timed out" not in main.text + other.text
    assert (main.code, other.code) == (HARDWARE.code, 1)


def test_save_that_fails_in_the_background_ends_all_ranks(outcomes: dict[str, list[Outcome]]):
    main, other = outcomes["lost disk"]
    assert "step_00000004 could not be written: Stale file handle" in main.text
    assert "timed out" not in main.text + other.text
    assert (main.code, other.code) == (HARDWARE.code, 1)


@pytest.mark.parametrize(
    ("name", "step", "words"),
    [
        ("between saves", 6, "weights and average, first in transformer.mlp_layers.0."),
        ("before a save", 8, "average, first in embedding.word_embedding.weight"),
    ],
)
def test_flipped_bit_ends_the_run(outcomes: dict[str, list[Outcome]], name: str, step: int, words: str):
    main, other = outcomes[name]
    assert f"error: step {step}: ranks 0-1 (" in main.text
    assert f"differ in {words}" in main.text
    assert "and there is no majority" in main.text
    assert re.search(r"the last good checkpoint is \S+step_00000004", main.text)
    assert "step_00000008" not in main.text
    assert (main.code, other.code) == (HARDWARE.code, 1)


def test_rank_in_the_minority_is_named():
    @dataclass(frozen=True)
    class ThreeRanks(World):
        def all_gather_objects(self, value, what):
            return [("a", [1, 2, 3]), ("b", [1, 4, 9]), ("a", [1, 2, 3])]

    names = {"weights": ["one", "two"], "average": ["two"], "moments": []}
    check = RankCheck(7, names, torch.tensor([1, 2, 3]), torch.tensor([[5, 6, 0], [9, 8, 0], [5, 6, 0]]))
    with pytest.raises(
        DivergenceError, match=r"^step 7: rank 1 \(b\) .* differ in weights and average, first in two\."
    ):
        check.verify(ThreeRanks(0, 3, torch.device("cpu"), Environment("none")))


def test_path_flags_are_not_compared():
    places = {name for name in FIELDS if name.endswith(("_path", "_dir", "_file", "_data", "_filename", "_weights"))}
    assert places <= rank_checks._PATHS
