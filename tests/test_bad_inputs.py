"""Bad input: one clear sentence that names flag or file, value and remedy; exit code not 0; nothing lost."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.tiny_runs import ROOT, flags, make_inputs, run, train_on, training_lines

import train_single_gpu
from data.corpus import Corpus
from data.objectives import MASKED
from data.positions import Exposure
from data.shards import tokenizer_hash, write_shard
from data.stop_event import IndexStopped, stop_event
from data.stream import TokenStream
from model_config import ModelConfig
from train_single_gpu import main
from training.checkpoint import CheckpointError, locate, write_checkpoint
from training.config import ConfigError, TrainingConfig, parse_config
from training.distributed import World, single_world, start_world
from training.environment import Environment
from training.inputs import make_plan, read_inputs
from training.status import list_checkpoints, read_status
from training.summary import describe


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("bad") / "inputs")


def attempt(arguments: list[str], capsys, world=single_world) -> tuple[int, str]:
    """Exit code and what went to stderr, in this process."""
    try:
        code = main(arguments, world)
    except SystemExit as stop:
        code = int(stop.code or 0)
    return code, capsys.readouterr().err


def refused(arguments: list[str], capsys, *says: str, world=single_world) -> str:
    code, error = attempt(arguments, capsys, world)
    assert code == 2, error
    assert error.startswith("error: ")
    assert error.count("\n") == 1, f"not one sentence: {error}"
    for text in says:
        assert text in error
    return error


def test_single_gpu_script_prints_errors_whatever_its_task_number(inputs, tmp_path, capsys, monkeypatch):
    """`srun -n 8 python train_single_gpu.py`, one run a task; ranks of one run leave it to rank 0."""
    for name in ("RANK", "SLURM_PROCID"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "3")
            assert "unknown flag" in refused([*flags(inputs, tmp_path), "--bogus", "1"], capsys)
            assert attempt([*flags(inputs, tmp_path), "--bogus", "1"], capsys, start_world) == (2, "")


def test_single_gpu_script_under_torchrun_names_the_multi_gpu_script(inputs, tmp_path, capsys, monkeypatch):
    for name, value in (("TORCHELASTIC_RUN_ID", "none"), ("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    refused(flags(inputs, tmp_path), capsys, "torchrun has started 2 processes", "train_multi_gpu.py")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"train_path": "/nowhere/at/all"}, ["/nowhere/at/all"]),
        ({"train_path": ""}, ["--train_path", "required"]),
        ({"valid_path": "/nowhere/at/all"}, ["/nowhere/at/all"]),
        ({"config_file": "/nowhere.json"}, ["--config_file", "/nowhere.json"]),
        ({"tokenizer_path": "/nowhere.json"}, ["--tokenizer_path", "/nowhere.json"]),
        ({"hybrid_numerator": 5, "hybrid_denominator": 4}, ["--hybrid_numerator", "5", "between 0 and"]),
        ({"hybrid_denominator": 0}, ["--hybrid_denominator", "0"]),
        ({"mask_p_start": 1.5}, ["--mask_p_start", "1.5", "between 0 and 1"]),
        ({"mask_random_p": 0.7, "mask_keep_p": 0.6}, ["--mask_random_p", "above 1"]),
        ({"learning_rate": -1}, ["--learning_rate", "-1"]),
        ({"learning_rate": "fast"}, ["--learning_rate", "fast"]),
        ({"global_batch_size": 1, "batch_reduction": 4}, ["--global_batch_size", "1", "--batch_reduction 1"]),
        (
            {"global_batch_size": 1, "batch_reduction": 1},
            ["--global_batch_size", "1"],
        ),  # no row once rows are 4x longer
        ({"length_milestones": "0.9,0.7"}, ["--length_milestones"]),
        ({"optimizer": "sgd"}, ["--optimizer", "sgd", "lamb"]),
        ({"max_steps": 0}, ["--max_steps", "0"]),
        ({"name": "a/b"}, ["--name", "a/b"]),
        ({"output_dir": "/proc/nowhere"}, ["--output_dir", "/proc/nowhere"]),
        ({"device": "cuda"}, ["--device", "cuda", "--device cpu"]),
        ({"resume": "/nowhere"}, ["/nowhere"]),
        ({"hybrid_split": "ranks"}, ["--hybrid_split ranks", "rows"]),
        ({"n_special_tokens": 4}, ["--n_special_tokens", "4"]),
        ({"wandb_mode": "loud"}, ["--wandb_mode", "loud"]),
        ({"unknown_thing": 1}, ["--unknown_thing"]),
        ({"learning_rat": 1}, ["--learning_rat", "did you mean --learning_rate"]),
        ({"lr": 1}, ["--lr", "use --learning_rate"]),
        ({"dtype": "bf16"}, ["--dtype", "use --mixed_precision"]),
        ({"recipe": "/nowhere.json"}, ["--recipe", "/nowhere.json"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_flag_values_that_cannot_work_are_refused(inputs, tmp_path, capsys, options, says):
    if options.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")  # asking for it is then no mistake
    output = options.get("output_dir", tmp_path)
    rest = {key: value for key, value in options.items() if key != "output_dir"}
    refused(flags(inputs, output, **rest), capsys, *says)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_vocabulary_mismatch(inputs, tmp_path, capsys):
    config = json.loads((inputs / "model.json").read_text())
    for size in (config["vocab_size"] - 1, config["vocab_size"] + 4096):
        (tmp_path / "model.json").write_text(json.dumps({**config, "vocab_size": size}))
        refused(flags(inputs, tmp_path, config_file=tmp_path / "model.json"), capsys, "vocab_size", str(size), "tokens")


@pytest.mark.parametrize(("content", "says"), [("{", "JSON"), ('{"hidden_sizes": 3}', "hidden_size"), ("[]", "object")])
def test_unreadable_model_config(inputs, tmp_path, capsys, content, says):
    (tmp_path / "model.json").write_text(content)
    refused(flags(inputs, tmp_path, config_file=tmp_path / "model.json"), capsys, "model.json", says)


def test_summary_names_rows_longer_than_the_positions(inputs, tmp_path):
    config = json.loads((inputs / "model.json").read_text())
    for positions, told in ((16, "max_position_embeddings is 16 and rows grow to"), (512, "")):
        (tmp_path / "model.json").write_text(json.dumps({**config, "max_position_embeddings": positions}))
        given = read_inputs(parse_config(flags(inputs, tmp_path, config_file=tmp_path / "model.json"), "a run"))
        block = describe(given, World(0, 1, torch.device("cpu"), Environment("none")), "rows", 1, 0)
        assert told in block
        assert bool(told) == ("max_position_embeddings" in block)


def test_wrong_tokenizer(inputs, tmp_path, capsys):
    tokenizer = json.loads((inputs / "tokenizer.json").read_text())
    tokenizer["model"]["merges"].pop()
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    # Also one of another size: setting vocab_size to it would not help.
    (tmp_path / "other.json").write_text(train_on("other words of another language " * 9, 280).to_str())
    for name in ("tokenizer.json", "other.json"):
        said = refused(flags(inputs, tmp_path, tokenizer_path=tmp_path / name), capsys, "another tokenizer", ".shard")
        assert "vocab_size" not in said
    (tmp_path / "tokenizer.json").write_text("not JSON")
    refused(flags(inputs, tmp_path, tokenizer_path=tmp_path / "tokenizer.json"), capsys, "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text((inputs / "tokenizer.json").read_text().replace("<mask>", "<gap>"))
    arguments = flags(inputs, tmp_path, tokenizer_path=tmp_path / "tokenizer.json")
    refused(arguments, capsys, "has no token for mask (hides a word)", "--special_tokens mask=TOKEN")


def test_truncated_and_foreign_shards(inputs, tmp_path, capsys):
    shard = inputs / "train" / "part_0.shard"
    for content in (shard.read_bytes()[:-100], b"x" * 10000, b""):
        bad = tmp_path / "bad.shard"
        bad.write_bytes(content)
        refused(flags(inputs, tmp_path, train_path=bad), capsys, "bad.shard")


def test_a_shard_without_documents(inputs, tmp_path, capsys):
    key = tokenizer_hash(inputs / "tokenizer.json")
    write_shard(tmp_path / "empty.shard", [], tokenizer_hash=key, vocab_size=300)
    refused(flags(inputs, tmp_path, train_path=tmp_path / "empty.shard"), capsys, "empty.shard", "no documents")


def test_published_file_as_checkpoint(inputs, tmp_path, capsys):
    (tmp_path / "model.bin").write_bytes(b"x")
    refused(flags(inputs, tmp_path, resume=tmp_path / "model.bin"), capsys, "import_gpt_bert.py")


def test_multi_gpu_script_without_launcher_says_how_to_launch(inputs, tmp_path, capsys, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    refused(flags(inputs, tmp_path), capsys, "srun", "torchrun", "train_single_gpu.py", world=start_world)
    monkeypatch.setenv("RANK", "0")
    refused(flags(inputs, tmp_path), capsys, "WORLD_SIZE", "LOCAL_RANK", world=start_world)


@pytest.mark.slow
def test_too_few_rows_for_the_ranks(inputs, tmp_path):
    arguments = flags(inputs, tmp_path, global_batch_size=4, batch_reduction=1)
    done = run(arguments, ranks=2, check=False)
    assert done.returncode != 0
    assert "smallest batch has 1 rows, too few for 2 ranks" in done.stderr


def test_resuming_with_other_data_is_refused(inputs, tmp_path, capsys):
    arguments = flags(inputs, tmp_path, max_steps=4, valid_path="")
    assert attempt(arguments, capsys)[0] == 0
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000004", ignore_errors=True)
    other = flags(inputs, tmp_path, max_steps=4, valid_path="", train_path=inputs / "valid" / "part_0.shard")
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    assert attempt(other, capsys)[0] == 0  # nothing was left to resume
    refused(arguments, capsys, "--train_path")


def test_training_on_what_is_held_out_is_refused(inputs, tmp_path, capsys):
    shutil.copy(inputs / "valid" / "part_1.shard", tmp_path / "copy.shard")
    for path in (inputs / "*" / "part_1.shard", tmp_path / "*.shard"):
        refused(flags(inputs, tmp_path, train_path=path), capsys, "--valid_path", "--train_path", "part_1.shard")


@pytest.fixture
def short_run(inputs, tmp_path, capsys) -> tuple[dict, Path]:
    """The flags and the one checkpoint of a run that was stopped after 2 of 4 steps."""
    options = {"max_steps": 4, "save_every": 2, "validate_every": 0, "validation_steps": 1}
    assert attempt(flags(inputs, tmp_path, **options), capsys)[0] == 0
    checkpoints = tmp_path / "run" / "checkpoints"
    shutil.rmtree(checkpoints / "step_00000004")
    return options, checkpoints / "step_00000002"


def test_resuming_with_another_held_out_set_is_refused(inputs, tmp_path, capsys, short_run):
    held_out = inputs / "valid" / "part_0.shard"
    error = refused(flags(inputs, tmp_path, **short_run[0], valid_path=held_out), capsys, "--valid_path", str(held_out))
    assert "--train_path" not in error
    assert attempt(flags(inputs, tmp_path, **short_run[0], valid_path=""), capsys)[0] == 0


def test_run_of_the_first_version_resumes_with_its_own_data_only(inputs, tmp_path, capsys, short_run):
    options, checkpoint = short_run
    record = json.loads((checkpoint / "checkpoint.json").read_text())
    del record["held_out"]
    corpus = Corpus(str(inputs / "train" / "*.shard"), tokenizer_hash=None, bos_id=1, eos_id=2)
    for identity in ("ab" * 32, corpus.first_identity()):
        (checkpoint / "checkpoint.json").write_text(json.dumps({**record, "data": identity}))
        if identity != corpus.first_identity():
            refused(flags(inputs, tmp_path, **options), capsys, "--train_path", "is not the data that")
    assert attempt(flags(inputs, tmp_path, **options), capsys)[0] == 0
    assert locate(tmp_path / "run").record["data"] == corpus.identity()


def test_run_of_the_first_version_with_fractions_cannot_resume_and_says_why(inputs, tmp_path, capsys):
    mix, arguments = tmp_path / "mix.json", {"max_steps": 2, "valid_path": "", "save_every": 1}
    mix.write_text(json.dumps({"sources": [{"path": str(inputs / "train" / "*.shard"), "repeat": 0.5}]}))
    assert attempt(flags(inputs, tmp_path, **arguments, train_path=mix), capsys)[0] == 0
    for place in list_checkpoints(tmp_path / "run" / "checkpoints"):
        record = json.loads((place / "checkpoint.json").read_text())
        del record["held_out"]
        (place / "checkpoint.json").write_text(json.dumps(record))
    refused(flags(inputs, tmp_path, **arguments, train_path=mix), capsys, "--train_path", "fractions", "keyed sample")


def test_shard_that_shrinks_in_mid_run_is_named(inputs, tmp_path, capsys, monkeypatch):
    shard = tmp_path / "copy" / "part_1.shard"
    shutil.copytree(inputs / "train", shard.parent)
    step = train_single_gpu.train_step

    def shrinking(state, *arguments):
        if state.step == 3:
            os.truncate(shard, 2000)
        return step(state, *arguments)

    monkeypatch.setattr(train_single_gpu, "train_step", shrinking)
    refused(flags(inputs, tmp_path, train_path=shard.parent / "*.shard"), capsys, str(shard), "has shrunk from")
    status = read_status(tmp_path / "run")
    assert status is not None
    assert status.state == "failed"
    assert str(shard) in status.reason


def test_stop_signal_interrupts_index_building(inputs, tmp_path, capsys, monkeypatch):
    build = TokenStream._build_index

    def endless(self, epoch):
        if epoch == 0:
            return build(self, epoch)
        stop = stop_event.get()
        assert stop is not None
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(60)
        raise IndexStopped

    monkeypatch.setattr(TokenStream, "_build_index", endless)
    arguments = flags(inputs, tmp_path, global_batch_size=256, validate_every=0, save_every=0)
    assert attempt(arguments, capsys)[0] == 128 + signal.SIGTERM
    (checkpoint,) = list_checkpoints(tmp_path / "run" / "checkpoints")
    assert locate(checkpoint).step == training_lines(tmp_path / "run")[-1]["step"] > 0


@pytest.mark.parametrize("recipe", sorted((ROOT / "configs" / "recipes").glob("*.json")), ids=lambda path: path.stem)
def test_shipped_recipes_are_read(recipe, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = parse_config([f"--recipe={recipe}", "--train_path=x", "--tokenizer_path=y", "--name=z"], "test")
    ModelConfig.from_json(Path(config.config_file))
    plan = make_plan(config, Exposure(16_000_000, None))
    masked = plan.objective_tokens(MASKED) / plan.tokens_before(config.max_steps)
    shares = {"h200_8_minutes": 15 / 16, "h200_8_minutes_masked": 1, "h200_8_minutes_causal": 0, "ratio_auto": 1 / 8}
    shares |= {"phases_causal_then_masked": 3 / 4, "phases_antlm": 2 / 3, "paper_base": 15 / 16, "paper_small": 15 / 16}
    shares |= {"study_biphasic": 15 / 16, "study_antlm": 15 / 16}  # the default, which each of their runs changes
    assert masked == pytest.approx(shares.get(recipe.stem, 1 / 2), abs=0.02)


def test_recipe_and_command_line(inputs, tmp_path):
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps({"_comment": "x", "learning_rate": 0.5, "max_steps": 7, "length_milestones": []}))
    base = [argument for argument in flags(inputs, tmp_path) if "learning_rate" not in argument]
    config = parse_config([*base, f"--recipe={recipe}"], "test")
    assert (config.learning_rate, config.max_steps, config.length_milestones) == (0.5, 30, ())
    recipe.write_text(json.dumps({"learning_rat": 0.5}))
    with pytest.raises(ConfigError, match="learning_rate"):
        parse_config([*base, f"--recipe={recipe}"], "test")
    recipe.write_text(json.dumps({"learning_rate": "high"}))
    with pytest.raises(ConfigError, match="'high'"):
        parse_config([*base, f"--recipe={recipe}"], "test")


def test_defaults_are_the_papers():
    config = TrainingConfig(train_path="x", config_file="x", tokenizer_path="x", name="x")
    expected = {
        "hybrid_numerator": 15, "hybrid_denominator": 16, "seq_length": 128, "global_batch_size": 32768,
        "batch_reduction": 4, "learning_rate": 1e-2, "max_steps": 15625, "optimizer": "lamb", "weight_decay": 0.1,
        "warmup_proportion": 0.016, "cooldown_proportion": 0.016, "mask_p_start": 0.3, "mask_p_end": 0.15,
        "mask_random_p": 0.1, "mask_keep_p": 0.1, "ema_decay": 0.999, "optimizer_beta1": 0.9, "optimizer_beta2": 0.98,
        "optimizer_eps": 1e-8, "max_gradient": 2.0, "z_loss_weight": 1e-4, "seed": 42,
    }  # fmt: skip
    assert {name: getattr(config, name) for name in expected} == expected


def test_non_finite_loss_stops_and_names_the_last_good_checkpoint(inputs, tmp_path, capsys):
    arguments = flags(inputs, tmp_path, learning_rate=1e30, warmup_proportion=0.2, optimizer="adamw", save_every=1)
    code, error = attempt(arguments, capsys)
    assert code == 3
    assert error.startswith("error: step ")
    assert "the last good checkpoint is" in error
    assert "--learning_rate" in error
    for path in list_checkpoints(tmp_path / "run" / "checkpoints"):
        for name, tensor in locate(path).tensors("model").items():
            assert np.isfinite(tensor.numpy()).all(), (path, name)


@pytest.mark.slow
def test_non_finite_loss_names_rank_and_objective(inputs, tmp_path):
    arguments = flags(
        inputs, tmp_path, learning_rate=1e30, warmup_proportion=0, optimizer="adamw", hybrid_split="ranks"
    )
    done = run(arguments, ranks=4, check=False)
    assert done.returncode != 0
    assert "error: step " in done.stderr
    assert "rank 3, causal objective" in done.stderr or "gradient norm" in done.stderr
    assert 'Traceback (most recent call last):\n  File "/work' not in done.stderr.split("torch/distributed")[0]


def test_full_disk_by_error_code(tmp_path, monkeypatch):
    parent = tmp_path / "checkpoints"
    arguments = {"tensors": {"model": {"w": torch.ones(4)}}, "record": {}, "files": {}}
    write_checkpoint(parent, 1, **arguments)

    def no_space(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", no_space)
    with pytest.raises(CheckpointError, match=r"step_00000002 could not be written: the disk is full"):
        write_checkpoint(parent, 2, **arguments)
    assert [path.name for path in parent.iterdir()] == ["step_00000001"]
    assert locate(parent / "step_00000001").step == 1


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_full_disk_for_real(inputs, tmp_path):
    """A file system that holds one checkpoint and not two."""
    small = tmp_path / "small"
    small.mkdir()
    probe = flags(inputs, tmp_path / "probe", max_steps=2, save_every=0)
    run(probe)
    size = sum(f.stat().st_size for f in locate(tmp_path / "probe" / "run").path.iterdir())
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={int(size * 1.6)}", "tmpfs", str(small)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no mount: {mounted.stderr}")  # a container may forbid it to root
    try:
        done = run(flags(inputs, small, save_every=5, max_failed_saves=1), check=False)
        assert done.returncode == 75
        assert "the disk is full" in done.stderr
        assert "step_00000005 is intact" in done.stderr
        assert locate(small / "run").step == 5
        assert training_lines(small / "run")[-1]["step"] >= 10  # it hears of a failed save a little later
        assert not list((small / "run" / "checkpoints").glob(".tmp*"))
    finally:
        subprocess.run(["umount", str(small)], check=True)
