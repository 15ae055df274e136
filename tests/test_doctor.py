"""slurm/doctor.py: every check on healthy and on broken inputs, exit codes, and that nothing is left behind."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from helpers.tiny_runs import ROOT, environment, flags, make_inputs, run

from data.shards import describe_shard, tokenizer_hash, write_manifest
from slurm.doctor import main
from slurm.doctor_ranks import Doctor, Report
from slurm.doctor_table import FAIL, OK, SKIP, WARN
from training.environment import Environment
from training.errors import OtherRankFailed
from training.watchdog import RankStore

SCRIPT = str(ROOT / "slurm" / "doctor.py")
# A batch of constant size that two ranks and both micro-batches divide: nothing to warn of.
EVEN = {"batch_reduction": 1, "length_milestones": "0.7", "max_steps": 20}


def with_manifest(folder: Path) -> Path:
    """`make_inputs` with the manifests that preprocessing writes."""
    inputs = make_inputs(folder)
    key = tokenizer_hash(inputs / "tokenizer.json")
    words = json.loads((inputs / "model.json").read_text())["vocab_size"]
    for name in ("train", "valid"):
        shards = [describe_shard(path) for path in sorted((inputs / name).glob("*.shard"))]
        write_manifest(inputs / name, shards, key, words, {"script": "test"})
    return inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return with_manifest(tmp_path_factory.mktemp("doctor") / "inputs")


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No launcher, whatever started the tests."""
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") or name.startswith("SLURM_"):
            monkeypatch.delenv(name)


def arguments(inputs: Path, output: Path, **options) -> list[str]:
    paths = {"train_path": inputs / "train", "valid_path": inputs / "valid"}
    return flags(inputs, output, **{**paths, **EVEN, **options})


def examined(capsys, given: list[str], report: Path, *own: str) -> tuple[int, dict[str, dict], str]:
    """Exit code, rows by check, and what was printed, of a doctor in this process."""
    code = main([*given, f"--json={report}", *own])
    content = json.loads(report.read_text())
    assert content["exit_code"] == code
    return code, {row["check"]: row for row in content["rows"]}, capsys.readouterr().out


def tree(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def test_doctor_passes_a_good_setup(inputs, tmp_path, capsys):
    before = tree(inputs)
    given = arguments(inputs, tmp_path / "new" / "runs")
    code, rows, printed = examined(capsys, given, tmp_path / "report.json")
    assert code == 0, printed
    assert {row["result"] for row in rows.values()} == {OK, SKIP}, printed
    assert [name for name, row in rows.items() if row["result"] == SKIP] == [
        "process group",
        "host all_reduce",
        "device all_reduce",
    ]
    assert len(rows) == 24
    lines = printed.splitlines()
    assert lines[0].split() == ["check", "result", "detail"]
    assert lines[-1] == "doctor: 21 OK, 0 WARN, 0 FAIL, 3 SKIP"
    assert max(map(len, lines)) <= 120
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["counts"] == {OK: 21, WARN: 0, FAIL: 0, SKIP: 3}
    assert content["arguments"][: len(given)] == given
    assert rows["disk space"]["numbers"]["checkpoints"] == 2
    assert (rows["kernels"]["result"], rows["kernels"]["detail"]) == (OK, "none, since they need a CUDA device")
    assert rows["duration"]["numbers"]["seconds"] > 0
    assert rows["training step"]["numbers"]["0"]["lengths"].keys() == {"16", "32"}
    losses = rows["training step"]["numbers"]["0"]["losses"]
    assert losses
    assert all(4 < loss < 8 for loss in losses.values())  # the logarithm of the vocabulary is 5.8
    assert rows["batch"]["numbers"]["steps"][0]["rows"] == 64
    assert {path.name for path in tmp_path.iterdir()} == {"report.json"}  # folders made for a probe are gone
    assert tree(inputs) == before


def test_doctor_for_an_assumed_world_size(inputs, tmp_path, capsys):
    given = arguments(inputs, tmp_path)
    code, rows, _ = examined(capsys, given, tmp_path / "report.json", "--assume_world_size=4")
    assert code == 0
    assert rows["batch"]["numbers"]["split"] == "ranks"
    assert rows["batch"]["detail"].startswith("for 4 ranks, split ranks:\nstep      0:     64 x 16   -> 13-17 a rank")
    assert "as if all 4 ranks were like this process" in rows["duration"]["detail"]
    code, rows, _ = examined(capsys, given, tmp_path / "report.json", "--assume_world_size=5")
    assert (code, rows["batch"]["result"]) == (0, OK)
    code, rows, _ = examined(capsys, given, tmp_path / "report.json", "--assume_world_size=40")
    assert (code, rows["batch"]["result"], rows["training step"]["result"]) == (1, FAIL, SKIP)
    assert "too few for 40 ranks" in rows["batch"]["detail"]
    given = arguments(inputs, tmp_path, global_batch_size=70)
    code, rows, _ = examined(capsys, given, tmp_path / "report.json", "--assume_world_size=4")
    assert (code, rows["batch"]["result"]) == (0, WARN)
    assert "the last of 2 micro-batches holds 3 of 16 rows" in rows["batch"]["detail"]
    given = arguments(inputs, tmp_path, global_batch_size=6, hybrid_split="rows", length_milestones="")
    _, rows, _ = examined(capsys, given, tmp_path / "report.json", "--assume_world_size=4")
    assert "ranks with 1 rows wait for those with 2" in rows["batch"]["detail"]


@pytest.mark.slow
def test_damaged_shards(inputs, tmp_path, capsys):
    copy = shutil.copytree(inputs, tmp_path / "inputs")
    shards = sorted((copy / "train").glob("*.shard"))
    shutil.copy(shards[1], copy / "train" / "part_2.shard")
    shards.append(copy / "train" / "part_2.shard")
    described = [describe_shard(path) for path in shards]
    manifest = json.loads((copy / "train" / "manifest.json").read_text())
    write_manifest(copy / "train", described, manifest["tokenizer_hash"], manifest["vocab_size"], {})
    whole = shards[1].read_bytes()

    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[len(content) // 4] ^= 1
        path.write_bytes(content)

    damage(shards[1])
    given = arguments(copy, tmp_path / "runs")
    code, rows, _ = examined(capsys, given, tmp_path / "report.json")
    assert (code, rows["train shards"]["result"]) == (0, OK)  # the first and the last are whole
    code, rows, printed = examined(capsys, given, tmp_path / "report.json", "--checksums=full")
    assert (code, rows["train shards"]["result"], rows["valid shards"]["result"]) == (1, FAIL, OK)
    assert f"{shards[1]}: sha256 is " in rows["train shards"]["detail"]
    assert "make them again with preprocessing/tokenize_corpus.py" in printed

    shards[1].write_bytes(whole)
    damage(shards[2])
    code, rows, _ = examined(capsys, given, tmp_path / "report.json", "--checksums=quick")
    assert (code, rows["train shards"]["result"]) == (1, FAIL)
    assert rows["training step"]["result"] == OK  # what can run does run
    code, rows, _ = examined(capsys, given, tmp_path / "report.json", "--checksums=off")
    assert (code, rows["train shards"]["result"]) == (0, OK)
    assert "not checked" in rows["train shards"]["detail"]

    shards[2].write_bytes(whole[:-8])
    code, rows, _ = examined(capsys, given, tmp_path / "report.json")
    assert (code, rows["inputs"]["result"]) == (1, FAIL)
    assert "part_2.shard" in rows["inputs"]["detail"]
    (copy / "train" / "manifest.json").unlink()
    shards[2].unlink()
    given = arguments(copy, tmp_path / "runs", train_path=copy / "train" / "*.shard", valid_path="")
    code, rows, _ = examined(capsys, given, tmp_path / "report.json")
    assert (code, rows["train shards"]["result"], rows["valid shards"]["result"]) == (0, WARN, SKIP)


def test_machine_checks_run_despite_unusable_inputs(inputs, tmp_path, capsys):
    tokenizer = json.loads((inputs / "tokenizer.json").read_text())
    tokenizer["model"]["merges"].pop()
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    for options, message in (
        ({"tokenizer_path": tmp_path / "tokenizer.json"}, "another tokenizer"),
        ({"train_path": "/nowhere"}, "/nowhere"),
        ({"mask_p_start": 1.5}, "--mask_p_start is 1.5"),
    ):
        code, rows, printed = examined(capsys, arguments(inputs, tmp_path, **options), tmp_path / "report.json")
        assert (code, rows["inputs"]["result"], rows["training step"]["result"]) == (1, FAIL, SKIP)
        assert message in rows["inputs"]["detail"]
        assert rows["devices"]["result"] == rows["versions"]["result"] == OK
        assert "Traceback" not in printed


def test_flags_that_cannot_be_parsed(inputs, tmp_path, capsys):
    for wrong in ("--learning_rat=1", "--learning_rate=fast", "--checksums=some", "--timeout=0"):
        with pytest.raises(SystemExit) as stop:
            main([*arguments(inputs, tmp_path), wrong])
        assert stop.value.code == 2
        captured = capsys.readouterr()
        assert (captured.out, captured.err[:7]) == ("", "error: ")
        assert wrong[2:].split("=")[0] in captured.err
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    assert "--checksums" in capsys.readouterr().out


@pytest.mark.slow
def test_run_to_resume(inputs, tmp_path, capsys):
    given = arguments(inputs, tmp_path / "runs", max_steps=4, save_every=2, validate_every=0)
    run(given)
    before = tree(tmp_path / "runs")
    code, rows, _ = examined(capsys, given, tmp_path / "report.json")
    assert (code, rows["run"]["result"], rows["training step"]["result"]) == (0, WARN, SKIP)
    assert "is complete" in rows["run"]["detail"]
    code, rows, _ = examined(capsys, [*given, "--learning_rate=1e-3"], tmp_path / "report.json")
    assert (code, rows["run"]["result"]) == (1, FAIL)
    assert "--learning_rate was 0.01 and is now 0.001" in rows["run"]["detail"]
    assert tree(tmp_path / "runs") == before

    shutil.rmtree(tmp_path / "runs" / "run" / "checkpoints" / "step_00000004")
    code, rows, _ = examined(capsys, given, tmp_path / "report.json")
    assert (code, rows["run"]["result"]) == (0, OK)
    assert rows["run"]["detail"].startswith("resumes from step 2 of 4: ")
    assert rows["disk space"]["numbers"]["checkpoints"] == 1
    checkpoint = tmp_path / "runs" / "run" / "checkpoints" / "step_00000002"
    size = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    assert rows["disk space"]["numbers"]["checkpoint_bytes"] == pytest.approx(size, rel=0.05)

    (checkpoint.parent / ".tmp_step_00000004").mkdir()
    before = tree(tmp_path / "runs")
    code, rows, _ = examined(capsys, given, tmp_path / "report.json")
    assert (code, rows["run"]["result"]) == (0, WARN)
    assert ".tmp_step_00000004" in rows["run"]["detail"]
    with (tmp_path / "runs" / "run" / ".lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, rows, _ = examined(capsys, given, tmp_path / "report.json")
    assert (code, rows["run"]["result"]) == (1, FAIL)
    assert "another process is training" in rows["run"]["detail"]
    assert tree(tmp_path / "runs") == before


def test_unwritable_run_folder(inputs, tmp_path, capsys):
    code, rows, _ = examined(capsys, arguments(inputs, Path("/proc/nowhere")), tmp_path / "report.json")
    assert (code, rows["run folder"]["result"], rows["disk space"]["result"]) == (1, FAIL, SKIP)
    assert "--output_dir: /proc/nowhere/run cannot be written" in rows["run folder"]["detail"]
    assert rows["training step"]["result"] == OK


def test_signal_leaves_nothing_in_the_run_folder(inputs, tmp_path, capsys, monkeypatch):
    def signalled(*_: object) -> None:
        assert list((tmp_path / "runs" / "run").glob(".doctor_*/token"))
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("slurm.doctor_run.measure_shared", signalled)
    with pytest.raises(SystemExit) as stop:
        main(arguments(inputs, tmp_path / "runs"))
    assert stop.value.code == 128 + signal.SIGTERM
    assert not (tmp_path / "runs").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_full_file_system(inputs, tmp_path, capsys):
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1100k", "tmpfs", str(small)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no mount: {mounted.stderr}")  # a container may forbid it to root
    try:
        given = arguments(inputs, small, save_every=5)
        code, rows, _ = examined(capsys, given, tmp_path / "report.json")
        assert (code, rows["disk space"]["result"]) == (1, FAIL)
        assert "free, but up to 4 checkpoints of 547.2 KiB = 2.1 MiB are to be written" in rows["disk space"]["detail"]
        assert rows["write speed"]["result"] == OK
        code, rows, _ = examined(capsys, [*given, "--save_every=0"], tmp_path / "report.json")
        assert (code, rows["disk space"]["result"]) == (0, OK)
        (small / "filler").write_bytes(bytes(1100 << 10))
        code, rows, _ = examined(capsys, given, tmp_path / "report.json")
        assert code == 1
        assert [path.name for path in small.iterdir()] == ["filler"]
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_failing_step(inputs, tmp_path, capsys, monkeypatch):
    given = arguments(inputs, tmp_path, learning_rate=1e30, warmup_proportion=0, optimizer="adamw")
    code, rows, printed = examined(capsys, given, tmp_path / "report.json")
    assert (code, rows["training step"]["result"]) == (1, FAIL)
    assert "loss is" in rows["training step"]["detail"] or "gradient norm" in rows["training step"]["detail"]
    assert "Traceback" not in printed
    monkeypatch.setattr("slurm.doctor.LONG_STEP", 0.0)
    code, rows, _ = examined(capsys, arguments(inputs, tmp_path), tmp_path / "report.json")
    assert code == 0
    assert rows["training step"]["detail"].startswith("1 x 32 tokens, fp32")
    assert "with one row" in rows["training step"]["detail"]
    # Whatever a check meets is a row; the others go on.
    monkeypatch.setattr("slurm.doctor.assess_batch", lambda *_: 1 / 0)
    code, rows, _ = examined(capsys, arguments(inputs, tmp_path), tmp_path / "report.json")
    assert (code, rows["batch"]["detail"]) == (1, "ZeroDivisionError: division by zero")
    assert rows["training step"]["result"] == OK


# Several ranks


@pytest.mark.slow
def test_two_ranks(inputs, tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", SCRIPT]
    given = [*arguments(inputs, tmp_path / "runs"), "--checksums=full", f"--json={tmp_path / 'report.json'}"]
    done = subprocess.run([*launcher, *given], capture_output=True, text=True, timeout=120, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["check"]: row for row in json.loads((tmp_path / "report.json").read_text())["rows"]}
    results = {name: row["result"] for name, row in rows.items() if row["result"] != OK}
    assert set(results) <= {"processors", "host all_reduce", "loader"}, done.stdout  # a busy machine may be warned of
    assert done.stdout.count("train shards") == 1  # one rank speaks
    assert "gloo: known sums right" in rows["device all_reduce"]["detail"]
    assert rows["device all_reduce"]["numbers"]["rates"].keys() == {str(1 << 20), str(4 << 20)}
    assert "ranks 0-1 on CPU" in rows["ranks"]["detail"]
    assert rows["train shards"]["numbers"]["bytes_read"] == rows["train shards"]["numbers"]["bytes"]
    assert not (tmp_path / "runs").exists()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_missing_rank(inputs, tmp_path, capsys, monkeypatch):
    """As under srun: rank 0 of 2 hosts the store itself and names whom it misses."""
    job = {
        "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0",
        "SLURM_JOB_NODELIST": "localhost", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    ends = []
    monkeypatch.setattr("os._exit", ends.append)  # threads may hang then, so the process does not wait for them
    code, rows, _ = examined(capsys, arguments(inputs, tmp_path / "runs"), tmp_path / "report.json", "--timeout=1")
    assert (code, ends) == (1, [1])
    assert (rows["ranks"]["result"], rows["ranks"]["detail"]) == (FAIL, "rank 1 did not answer within 1 s")
    assert rows["device all_reduce"]["result"] == rows["training step"]["result"] == SKIP
    assert rows["train shards"]["result"] == rows["disk space"]["result"] == rows["batch"]["result"] == OK


def on_two_ranks(function) -> list:
    """function(doctor) on two threads that share a rendezvous store as ranks do."""
    port, results, threads = free_port(), [None, None], []
    for rank in (0, 1):
        own = Environment("slurm", rank, rank, 2, 2, master_port=port)

        def work(rank=rank, own=own):
            results[rank] = function(Doctor(RankStore(own, 10), Report(shown=False), verbose=False))

        threads.append(threading.Thread(target=work))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return results


def test_error_on_one_rank():
    def check(doctor: Doctor):
        def measure() -> int:
            if doctor.store.rank == 1:
                raise KeyError("disk")
            return 5

        failed = doctor.check("first", measure, lambda measured: [])
        after = doctor.check("second", lambda: doctor.store.rank, lambda measured: [])
        found = failed, after, doctor.report.rows
        doctor.store.close()
        return found

    for rank, (failed, after, rows) in enumerate(on_two_ranks(check)):
        assert (failed, after) == (None, {0: 0, 1: 1})
        assert [row.detail for row in rows] == (["ranks 1: KeyError: 'disk'"] if rank == 0 else [])


def test_error_inside_a_collective_frees_the_other_ranks():
    import torch

    def check(doctor: Doctor):
        started = time.monotonic()

        def measure() -> None:
            if doctor.store.rank == 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
            threading.Event().wait(30)

        found = doctor.check("step", measure, lambda measured: [], 20, torch.device("cpu"))
        seconds = time.monotonic() - started
        rows = doctor.report.rows
        doctor.store.close()
        return found, seconds, rows, doctor.store.failed

    for rank, (found, seconds, rows, broken) in enumerate(on_two_ranks(check)):
        assert (found, broken) == (None, True)
        assert seconds < 10
        if rank == 0:
            assert [row.detail for row in rows] == [
                "ranks 1: CUDA out of memory; lower --local_batch_size: it changes speed alone"
            ]
    assert issubclass(OtherRankFailed, RuntimeError)
