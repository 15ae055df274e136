"""Records of a run: metrics.jsonl, config.json, the console, and real wandb files."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import ROOT, flags, make_inputs, run, training_lines

from training.checkpoint import locate
from training.config import ConfigError, TrainingConfig
from training.metrics import keep_until, read_metrics, wandb_mode


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("metrics") / "inputs")


@pytest.fixture(scope="module")
def wandb_run(inputs, tmp_path_factory) -> Path:
    """A run that was stopped half-way and resumed, logging to wandb offline."""
    output = tmp_path_factory.mktemp("wandb")
    options = {"wandb_mode": "offline", "wandb_project": "test", "log_stats_every": 10, "save_every": 5}
    run(flags(inputs, output, max_steps=20, **options))
    # As if it had been killed after step 10: the newest checkpoints are gone.
    for name in ("step_00000015", "step_00000020"):
        path = output / "run" / "checkpoints" / name
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    run(flags(inputs, output, max_steps=20, **options))
    return output / "run"


def log_records(content: bytes) -> Iterator[bytes]:
    """Records of a wandb file: LevelDB's log format in blocks of 32 KiB, after a header of 7 bytes."""
    position, parts = 7, b""
    while position + 7 <= len(content):
        left = 32768 - position % 32768
        if left < 7:  # the rest of a block that no record header fits into
            position += left
            continue
        _checksum, length, kind = struct.unpack("<IHB", content[position : position + 7])
        if kind == 0:
            return
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield parts
            parts = b""


def wandb_records(path: Path) -> tuple[list[dict], str]:
    """History rows and run id of an offline wandb file."""
    from wandb.proto import wandb_internal_pb2

    rows, run_id = [], ""
    for data in log_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("run"):
            run_id = record.run.run_id
        if record.HasField("history"):
            items = record.history.item
            rows.append({(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in items})
    return rows, run_id


def test_every_step_has_the_documented_keys(wandb_run):
    lines = training_lines(wandb_run)
    assert [line["step"] for line in lines] == list(range(1, 21))
    expected = {
        "train/loss", "train/masked_loss", "train/causal_loss", "train/accuracy", "train/perplexity", "train/z_loss",
        "stats/learning_rate", "stats/grad_norm", "stats/global_batch_size", "stats/seq_length", "stats/mask_p",
        "stats/tokens", "stats/tokens_per_second",
    }  # fmt: skip
    assert all(expected <= line.keys() for line in lines)
    assert {"stats/parameter_norm/embedding", "stats/grad_norm/attention"} <= lines[9].keys()
    validation = [line for line in read_metrics(wandb_run / "metrics.jsonl") if "valid/masked_loss" in line]
    assert {"valid/causal_loss", "valid/ema_masked_loss", "valid/masked_accuracy", "stats/tokens"} <= validation[
        -1
    ].keys()
    readme = (ROOT / "README.md").read_text()
    for key in {key for line in lines + validation for key in line}:
        documented = key.replace("ema_", "").replace("causal", "masked").rsplit("norm/", 1)[0]
        assert documented in readme, f"README does not mention {key}"


def test_wandb_files_hold_the_same_numbers_under_one_run(wandb_run):
    files = sorted(wandb_run.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2  # one per start; `wandb sync` merges them into one run
    parts = [wandb_records(file) for file in files]
    config = json.loads((wandb_run / "config.json").read_text())
    assert {run_id for _, run_id in parts} == {config["wandb_id"]}
    rows: dict[int, dict] = {}
    for part, _ in parts:
        for row in part:
            rows.setdefault(int(row["_step"]), {}).update(row)
    for line in training_lines(wandb_run):
        row = rows[line["step"]]
        for key in ("train/loss", "train/masked_loss", "stats/learning_rate", "stats/tokens", "step"):
            assert row[key] == pytest.approx(line[key], rel=1e-6), key
    assert "valid/ema_causal_loss" in rows[20]


def test_config_repeats_the_run(wandb_run, inputs):
    config = json.loads((wandb_run / "config.json").read_text())
    assert config["flags"]["hybrid_numerator"] == 3
    assert config["model"]["hidden_size"] == 32
    assert config["versions"].keys() >= {"python", "torch", "numpy"}
    assert [launch["start_step"] for launch in config["launches"]] == [0, 10]
    assert config["data"]["identity"] == locate(wandb_run).record["data"]
    again = TrainingConfig(
        **{k: tuple(v) if isinstance(v, list) else v for k, v in config["flags"].items()}
    )  # a recipe of it works
    assert again.to_dict() == config["flags"]


def test_metrics_are_cut_at_the_resumed_step_and_at_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "x": step}) + "\n" for step in (1, 2, 3, 4)) + '{"step": 5, "x"')
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3, 4]
    keep_until(path, 3)
    assert path.read_text().splitlines() == [json.dumps({"step": step, "x": step}) for step in (1, 2, 3)]


def make_config(mode: str) -> TrainingConfig:
    return TrainingConfig(train_path="x", config_file="x", tokenizer_path="x", name="x", wandb_mode=mode)


def test_wandb_mode_without_login_is_offline(monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    assert wandb_mode(make_config("auto")) == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert wandb_mode(make_config("auto")) == "online"
    assert wandb_mode(make_config("disabled")) == "disabled"


def test_missing_wandb_is_one_sentence_or_nothing(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert wandb_mode(make_config("auto")) == "disabled"
    with pytest.raises(ConfigError, match="pip install wandb"):
        wandb_mode(make_config("offline"))
