"""Records of a run: metrics.jsonl, config.json, the console, and real wandb files."""

from __future__ import annotations

import dataclasses
import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_runs import ROOT, flags, make_inputs, run, training_lines

from data.atomic_io import json_objects
from report.metrics import load_metrics
from training.checkpoint import locate
from training.config import ConfigError, TrainingConfig
from training.environment import Environment
from training.metric_logger import keep_until, read_metrics
from training.sinks import wandb_mode
from training.status import begin_attempt

README = ROOT / "training" / "README.md"
# What the run of these tests has not.
ELSEWHERE = ("of a mix", "of named sets", "where shards have words", "of several ranks", "with `--spike_policy`")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("metrics") / "inputs")


@pytest.fixture(scope="module")
def wandb_run(inputs, tmp_path_factory) -> Path:
    """A run that was stopped half-way and resumed, logging to wandb offline."""
    output = tmp_path_factory.mktemp("wandb")
    options = {"wandb_mode": "offline", "wandb_project": "test", "log_stats_every": 10, "save_every": 5}
    options |= {"data_fingerprint": True, "evaluate_data": make_pairs(output / "pairs"), "evaluate_every": 10}
    run(flags(inputs, output, max_steps=20, validation_samples=3, **options))
    # As if it had been killed after step 10: the newest checkpoints are gone.
    for name in ("step_00000015", "step_00000020"):
        path = output / "run" / "checkpoints" / name
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    run(flags(inputs, output, max_steps=20, validation_samples=3, **options))
    return output / "run"


def make_pairs(folder: Path) -> Path:
    """A set of minimal pairs of two phenomena."""
    folder.mkdir()
    for term in ("agreement", "order"):
        pair = {"sentence_good": "the cat sees a dog", "sentence_bad": "cat the sees dog a", "linguistics_term": term}
        (folder / f"{term}.jsonl").write_text(json.dumps(pair) + "\n")
    return folder


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


@dataclass
class WandbFile:
    """What an offline wandb file holds: history rows, the run's id, metric definitions by name, and media by path."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    run_id: str = ""
    metrics: dict[str, Any] = field(default_factory=dict)
    files: set[str] = field(default_factory=set)


def read_wandb(path: Path) -> WandbFile:
    """Read an offline wandb file."""
    from wandb.proto import wandb_internal_pb2

    found = WandbFile()
    for data in log_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found.run_id = record.run.run_id
        elif kind == "history":
            items = record.history.item
            found.rows.append({(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in items})
        elif kind == "metric":
            found.metrics[record.metric.name or record.metric.glob_name] = record.metric
        elif kind == "files":
            found.files.update(file.path for file in record.files.files)
    return found


def wandb_files(run_folder: Path) -> list[WandbFile]:
    """The wandb files of a run's starts."""
    return [read_wandb(file) for file in sorted(run_folder.glob("wandb/offline-run-*/run-*.wandb"))]


# What README says of keys


@dataclass(frozen=True)
class Documented:
    """A key of README's table and when it is recorded."""

    key: str
    when: str

    @property
    def pattern(self) -> re.Pattern[str]:
        """What keys it stands for."""
        text = re.escape(self.key).replace("OBJECTIVE", "(masked|causal)").replace("MODE", "(masked|causal|fused)")
        text = text.replace("LENGTH", "[0-9]+").replace("ROLE", "(embedding|attention|mlp|dwa|head)")
        return re.compile(re.sub("SUITE|PART|SET", "[^/]+", text))


def documented_keys() -> list[Documented]:
    """The rows of the table in README's section on metrics."""
    section = README.read_text().split("\n## Metrics\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    assert all(len(row) == 4 for row in rows), "the table has the columns key, unit, when, what"
    return [Documented(key, row[2].strip()) for row in rows for key in re.findall(r"`([^`]+)`", row[0])]


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
    expected = {"valid/causal_loss", "valid/ema_masked_loss", "valid/masked_accuracy", "stats/tokens"}
    assert expected <= validation[-1].keys()
    longer = {"valid/causal_loss_64", "valid/ema_masked_loss_64", "valid/masked_accuracy_64"}
    assert longer <= validation[-1].keys()
    assert not longer & validation[0].keys()  # rows had not grown so far


def test_readme_lists_every_key_that_is_recorded(wandb_run):
    documented = documented_keys()
    for key in {key for line in read_metrics(wandb_run / "metrics.jsonl") for key in line}:
        assert any(each.pattern.fullmatch(key) for each in documented), f"README's table lacks {key}"


def test_wandb_file_has_every_key_that_readme_lists(wandb_run):
    found = {key for file in wandb_files(wandb_run) for row in file.rows for key in row}
    media = {key.removesuffix("/_type") for key in found if key.endswith("/_type")}
    for each in documented_keys():
        elsewhere = "CUDA" in each.when or "GPU" in each.when or each.when.endswith(ELSEWHERE)
        if elsewhere or each.key == "data/fingerprint":
            continue
        assert any(each.pattern.fullmatch(key) for key in found | media), f"wandb's file lacks {each.key}"
    unknown = {key for key in found if not key.startswith("_") and not any(key.startswith(f"{m}/") for m in media)}
    for key in unknown:
        assert any(each.pattern.fullmatch(key) for each in documented_keys()), key


def test_wandb_gets_report_figures_and_samples(wandb_run):
    last = wandb_files(wandb_run)[-1]
    (row,) = (row for row in last.rows if "report/_type" in row)
    assert row["_step"] == 20
    kinds = {"report": "html-file", "figures/metrics": "image-file", "samples/causal": "table-file"}
    folder = next(iter(sorted(wandb_run.glob("wandb/offline-run-*"))[-1:])) / "files"
    for key, kind in kinds.items():
        assert row[f"{key}/_type"] == kind
        assert row[f"{key}/path"] in last.files
        assert (folder / row[f"{key}/path"]).stat().st_size > 0
    page = (folder / row["report/path"]).read_text()
    assert "Training report" in page
    table = json.loads((folder / row["samples/causal/path"]).read_text())
    assert table["columns"] == ["step", "prompt", "continuation", "truth"]
    assert [line[0] for line in table["data"]] == [20, 20, 20]
    steps = [row["_step"] for file in wandb_files(wandb_run) for row in file.rows if "samples/masked/_type" in row]
    assert steps == [15, 20, 15, 20]  # the run was cut off after step 20 and went on from 10


def test_wandb_knows_axes_and_best_values(wandb_run):
    for file in wandb_files(wandb_run):
        defined = file.metrics
        for key, axis, low, high in (
            ("train/masked_loss", "stats/tokens", True, False),
            ("valid/ema_causal_perplexity", "stats/tokens", True, False),
            ("valid/masked_accuracy", "stats/tokens", False, True),
            ("eval/*", "stats/tokens", False, True),
            ("stats/peak_memory_gib", "step", False, True),
            ("*", "step", False, False),
        ):
            assert defined[key].step_metric == axis, key
            assert (defined[key].summary.min, defined[key].summary.max) == (low, high), key


def test_samples_of_a_resumed_run_are_not_doubled(wandb_run):
    steps = [json.loads(line)["step"] for line in (wandb_run / "samples.jsonl").read_text().splitlines()]
    assert steps == [15] * 6 + [20] * 6


def test_wandb_files_hold_the_same_numbers_under_one_run(wandb_run):
    parts = wandb_files(wandb_run)
    assert len(parts) == 2  # one per start; `wandb sync` merges them into one run
    config = json.loads((wandb_run / "config.json").read_text())
    assert {part.run_id for part in parts} == {config["wandb_id"]}
    rows: dict[int, dict] = {}
    for part in parts:
        for row in part.rows:
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
    assert {launch["kernels"] for launch in config["launches"]} == {"none, since they need a CUDA device"}
    assert [launch["reference"] for launch in config["launches"]] == [[], []]
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


def line(step: int, **values: Any) -> bytes:
    return json.dumps({"step": step, **values}, ensure_ascii=False).encode() + b"\n"


GOOD = [line(1, x=1), line(2, text="a\u2028b\u2029c\u0085d", x=2), line(3, text="naïve 東京", x=3)]
TORN = [
    b'{"step": 4, "text": "\xe6\x9d\n',
    b"\xff\xfe\n",
    b"[1,2]\n",
    b'"step"\n',
    b"[" * 100_000 + b"\n",
    b'{"x": 1}\n',
]


def test_torn_bytes_and_odd_lines_neither_stop_a_start_nor_take_good_lines_with_them(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(GOOD[:1] + TORN + GOOD[1:]) + GOOD[2][:-6])
    assert [record["x"] for record in read_metrics(path)] == [1, 2, 3]
    assert len(json_objects(path)) == 4
    run = load_metrics(path)
    assert (run.series["x"], run.skipped_lines) == ({1: 1, 2: 2, 3: 3}, 6)
    assert keep_until(path, 2) == 7
    assert path.read_bytes() == b"".join(GOOD[:2])
    assert keep_until(path, 2) == 0
    assert json_objects(tmp_path / "none") == read_metrics(tmp_path / "none") == []


def test_a_damaged_register_of_starts_counts_what_is_whole(tmp_path):
    environment = Environment("slurm", job_id="7")
    begin_attempt(tmp_path, environment, 5)
    with (tmp_path / "attempts.jsonl").open("ab") as file:
        file.write(b"".join(TORN))
    again = begin_attempt(tmp_path, dataclasses.replace(environment, restart_count=1), 5)
    assert (again.without_progress, again.superseded()) == (1, False)
    rolled_back = begin_attempt(tmp_path, dataclasses.replace(environment, restart_count=2), 3)
    assert rolled_back.without_progress == 0  # then it went on to a checkpoint of its own


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
