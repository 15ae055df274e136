"""slurm/train.sbatch on a real SLURM: layouts, preemption, time limits, requeues, failures; the run stays the same run.

Slow jobs run in the background (fixture `background`) while the other tests do their work, and are looked at last.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from cluster import Cluster
from runs import ROOT, flags, make_inputs, run, training_lines

from training.checkpoint import find_newest
from training.checkpoint_names import newest_step
from training.metrics import read_metrics
from training.status import read_status

pytestmark = pytest.mark.slurm
SCRIPT = ROOT / "slurm" / "train.sbatch"
STEPS = 30
COMMON = {"data_fingerprint": True, "save_every": 0, "validate_every": STEPS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Inputs, and the run of one process that every job has to repeat."""
    folder = tmp_path_factory.mktemp("slurm")
    make_inputs(folder / "inputs")
    run(flags(folder / "inputs", folder / "runs", "alone", **COMMON))
    return folder


class Jobs:
    """Submits training jobs with the flags of the reference run."""

    def __init__(self, cluster: Cluster, folder: Path):
        self.cluster, self.folder, self.runs = cluster, folder, folder / "runs"

    def submit(self, name: str, *options: str, script: tuple[str, ...] = (), env: dict | None = None, **flag) -> str:
        """Job id of train.sbatch with sbatch's `options`, its own `script` options, variables and further flags."""
        settings = {**COMMON, "time_limit_margin": 10, **flag}
        arguments = flags(self.folder / "inputs", flag.get("output_dir", self.runs), name, **settings)
        variables = {"PYTHON": ROOT / "tests" / "slurm_python.py", "OMP_NUM_THREADS": "1", **(env or {})}
        variables["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        job_options = ["--cpus-per-task=1", "--time=10", *options]
        return self.cluster.sbatch(SCRIPT, *script, *arguments, options=job_options, env=variables)

    def wait_for_step(self, job_id: str, name: str, step: int, timeout: float = 300) -> None:
        """Until a run has done `step` steps."""

        def done() -> bool:
            lines = training_lines(self.runs / name)
            return bool(lines) and lines[-1]["step"] >= step

        self.cluster.wait_for(done, timeout, f"step {step} of {name}", job_id)

    def check(self, name: str, job_id: str, launches: int | None = None) -> str:
        """The job has completed, and its run is the reference's: every step once, same batches, same losses."""
        self.cluster.wait(job_id, "COMPLETED", timeout=600)
        expected, found = training_lines(self.runs / "alone"), training_lines(self.runs / name)
        output = self.cluster.output(job_id)
        assert [line["step"] for line in found] == list(range(1, STEPS + 1)), output
        for a, b in zip(expected, found, strict=True):
            assert a["data/fingerprint"] == b["data/fingerprint"]
            for key in ("train/loss", "train/masked_loss", "train/causal_loss"):
                assert b[key] == pytest.approx(a[key], rel=1e-5), (a["step"], key)
        last = read_metrics(self.runs / name / "metrics.jsonl")[-1]
        assert last["valid/masked_loss"] == pytest.approx(
            read_metrics(self.runs / "alone" / "metrics.jsonl")[-1]["valid/masked_loss"], rel=1e-4
        )
        status = read_status(self.runs / name)
        assert (status.state, status.step) == ("finished", STEPS)
        if launches is not None:
            assert len(self.launches(name)) == launches, output
        return output

    def launches(self, name: str) -> list[dict]:
        """What config.json says about each start."""
        return json.loads((self.runs / name / "config.json").read_text())["launches"]


@pytest.fixture
def small_disk(cluster) -> Iterator[Path]:
    """An empty folder on a file system of a few MiB, which nodes see as well."""
    yield cluster.small_disk
    for entry in cluster.small_disk.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


@pytest.fixture
def jobs(cluster, folder) -> Jobs:
    return Jobs(cluster, folder)


@pytest.fixture(scope="module")
def background(cluster, folder) -> dict[str, str]:
    """Jobs that mostly wait, by name of the run."""
    jobs, output = Jobs(cluster, folder), cluster.folder
    cluster.folder = folder
    slow = {"TEST_STEP_SECONDS": "2.5"}
    silent = jobs.submit("silent_node", env=slow, save_every=5)
    node = cluster.wait(silent, "RUNNING")["NodeList"]
    assert node == "node1", "the first job gets the first node: the tests keep away from it"
    submitted = {
        "silent_node": silent,
        # SLURM sends it up to a minute early: 40 to 100 s after the start; a job of one minute may get it at once.
        "limit_signal": jobs.submit(
            "limit_signal", "--time=2", "--signal=USR1@20", "-wnode2", env={"TEST_STEP_SECONDS": "3.5"}
        ),
        "limit_silent": jobs.submit("limit_silent", "--time=1", "--signal=CONT@10", "-wnode2", env=slow),
        "crash_loop": jobs.submit(
            "crash_loop", "-wnode2", script=("--requeue_on_crash",), env={"TEST_KILL": "0:4"}, save_every=2
        ),
    }
    jobs.wait_for_step(silent, "silent_node", 2)
    cluster.kill_node(node)
    cluster.folder = output
    cluster.kept |= set(submitted.values())
    return submitted


def test_layouts_and_two_jobs_on_one_node(jobs, background, folder):
    layouts = {}
    for name, options in {
        "own_gpu": ("--nodes=1", "--ntasks=4", "--gpus-per-task=1", "-wnode3"),
        "all_gpus": ("--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2", "-wnode3,node4"),
    }.items():
        place = folder / f"layout_{name}"
        place.mkdir()
        layouts[name] = (jobs.submit(name, *options, env={"TEST_LAYOUT": str(place)}), place)
    ports = set()
    for name, (job_id, place) in layouts.items():
        jobs.check(name, job_id, launches=1)
        ranks = [json.loads((place / f"{rank}.json").read_text()) for rank in range(4)]
        assert [rank["rank"] for rank in ranks] == [0, 1, 2, 3]
        assert {rank["world_size"] for rank in ranks} == {4}
        assert {(rank["master_addr"], rank["job_id"]) for rank in ranks} == {("node3", job_id)}
        assert {rank["master_port"] for rank in ranks} == {20000 + int(job_id) % 12000}
        assert len({rank["end_time"] for rank in ranks}) == 1
        assert ranks[0]["end_time"] is not None
        ports.add(ranks[0]["master_port"])
        per_node = 4 if name == "own_gpu" else 2
        assert [rank["local_rank"] for rank in ranks] == [0, 1, 2, 3] if per_node == 4 else [0, 1, 0, 1]
        assert {(rank["local_world_size"], rank["gpus_on_node"]) for rank in ranks} == {(per_node, per_node)}
        assert {len(rank["visible"].split(",")) for rank in ranks} == ({1} if name == "own_gpu" else {2})
    assert len(ports) == 2  # both were on node3 at a time


def test_preempted_signalled_and_requeued_by_hand(jobs, background, cluster):
    """Three jobs at a time: preempted by a higher partition; signalled on rank 1 alone; requeued by hand."""
    slow = {"TEST_STEP_SECONDS": "0.5"}
    names = ("preempted", "signalled", "by_hand")
    preempted = jobs.submit("preempted", "-wnode4", "--signal=USR1@60", env=slow)
    signalled = jobs.submit("signalled", "--ntasks=2", "-wnode3", env=slow)
    by_hand = jobs.submit("by_hand", "-wnode3", env=slow)
    jobs.wait_for_step(preempted, "preempted", 5)
    high = cluster.sbatch("#!/bin/sh\nsleep 1\n", options=("--partition=high", "-wnode4", "--exclusive"))
    jobs.wait_for_step(by_hand, "by_hand", 5)
    cluster.scontrol("requeue", by_hand)
    jobs.wait_for_step(signalled, "signalled", 5)
    os.kill(cluster.pids(signalled)[1], signal.SIGUSR2)
    cluster.wait(high, "COMPLETED")
    outputs = {}
    for name, job_id in zip(names, (preempted, signalled, by_hand), strict=True):
        outputs[name] = jobs.check(name, job_id, launches=2)
        assert jobs.launches(name)[1]["start_step"] >= 5
        assert cluster.job(job_id)["Restarts"] == "1"  # exactly one requeue
    assert "stopped by SIGUSR1" in outputs["preempted"]
    assert "stopped by SIGUSR2" in outputs["signalled"]
    assert outputs["signalled"].count("SLURM starts job") == 1


def test_failures_of_a_rank(jobs, background, cluster):
    """A rank is killed, a rank raises: the job fails at once, the log ends with the first error, checkpoints stay."""
    slow = {"TEST_STEP_SECONDS": "0.3"}
    killed = jobs.submit("killed", "--ntasks=2", "-wnode3", env=slow, save_every=5)
    raised = jobs.submit("raised", "--ntasks=2", "-wnode3", env={**slow, "TEST_RAISE": "1:8"}, save_every=5)
    jobs.wait_for_step(killed, "killed", 7)
    os.kill(cluster.pids(killed)[1], signal.SIGKILL)
    cluster.wait(killed, "FAILED", timeout=15)
    cluster.wait(raised, "FAILED")
    last = cluster.output(killed).splitlines()[-1]
    assert last == f"job {killed} failed: a rank was killed by SIGKILL; srun's lines above say which"
    assert "task 1: Killed" in cluster.output(killed)
    output = cluster.output(raised)
    expected = f"job {raised} failed: rank 1 on node3 failed first: ZeroDivisionError: an error of rank 1's own"
    assert output.splitlines()[-1] == expected
    assert "1: [rank 1 on node3]   File " in output  # every line of the traceback says whose it is
    for name, reason in (("killed", "SIGKILL"), ("raised", "ZeroDivisionError")):
        status = read_status(jobs.runs / name)
        assert (status.state, status.step) == ("failed", 5)
        assert reason in status.reason
        assert newest_step(jobs.runs / name / "checkpoints") == 5


def test_a_node_goes_down(jobs, background, cluster):
    job_id = jobs.submit("down", "--nodes=2", "--ntasks-per-node=1", env={"TEST_STEP_SECONDS": "0.4"}, save_every=4)
    jobs.wait_for_step(job_id, "down", 6)
    before = cluster.hosts(job_id)
    doomed = next(host for host in before if host != "node2")  # where the background jobs are
    cluster.down(doomed)
    jobs.check("down", job_id, launches=2)
    after = cluster.hosts(job_id)
    assert len(after) == 2
    assert doomed not in after


def test_other_numbers_of_ranks(jobs, background, cluster):
    """4 ranks, then 2, then 4 again, each ended by SIGINT: saved, not requeued."""
    for ranks, until in ((4, 3), (2, 9)):
        job_id = jobs.submit("resized", f"--ntasks={ranks}", "-wnode3", env={"TEST_STEP_SECONDS": "0.2"})
        jobs.wait_for_step(job_id, "resized", until)
        cluster.scancel("--signal=INT", job_id)
        cluster.wait(job_id, "COMPLETED")
        assert "stopped by SIGINT" in cluster.output(job_id)
        assert read_status(jobs.runs / "resized").state == "stopped"
    jobs.check("resized", jobs.submit("resized", "--ntasks=4", "-wnode3"), launches=3)
    assert [launch["world_size"] for launch in jobs.launches("resized")] == [4, 2, 4]


def test_cancelled_is_not_requeued(jobs, background, cluster):
    job_id = jobs.submit("cancelled", "-wnode3", env={"TEST_STEP_SECONDS": "0.4"})
    jobs.wait_for_step(job_id, "cancelled", 3)
    cluster.scancel(job_id)
    cluster.wait(job_id, "CANCELLED")
    cluster.wait_for(lambda: read_status(jobs.runs / "cancelled").state == "stopped", 10, "its status", job_id)
    assert newest_step(jobs.runs / "cancelled" / "checkpoints") >= 3  # it was given the time to save
    assert cluster.job(job_id)["Restarts"] == "0"


def test_full_disk_at_a_save(jobs, background, cluster, small_disk):
    job_id = jobs.submit("full", "-wnode3", env={"TEST_STEP_SECONDS": "0.3"}, output_dir=small_disk, save_every=5)
    run_folder = small_disk / "full"
    cluster.wait_for(lambda: newest_step(run_folder / "checkpoints") >= 5, 60, "a checkpoint", job_id)
    with (small_disk / "filling").open("wb", buffering=0) as filling, suppress(OSError):
        while True:
            filling.write(bytes(4096))
    cluster.wait(job_id, "FAILED")
    output = cluster.output(job_id)
    assert "the disk is full" in output
    assert "step_00000005 is intact" in output
    assert output.splitlines()[-1].startswith(f"job {job_id} failed: ")
    assert find_newest(run_folder / "checkpoints")[0].step == 5
    assert [path.name for path in (run_folder / "checkpoints").iterdir()] == ["step_00000005"]


def test_doctor_comes_first(jobs, background, cluster):
    job_id = jobs.submit("ill", "--ntasks=2", "-wnode3", script=("--doctor",), tokenizer_path=ROOT / "README.md")
    cluster.wait(job_id, "FAILED")
    output = cluster.output(job_id)
    assert "FAIL" in output
    assert "README.md" in output
    assert not (jobs.runs / "ill").exists()
    assert cluster.job(job_id)["Restarts"] == "0"  # ranks that are ended with a failed one count as no preemption


def test_time_limits(jobs, background, cluster):
    for name in ("limit_signal", "limit_silent"):
        output = jobs.check(name, background[name])
        restarts = int(cluster.job(background[name])["Restarts"])
        launches = jobs.launches(name)
        assert restarts >= 1
        assert len(launches) == restarts + 1
        assert launches[1]["start_step"] > 0
        assert ("stopped by SIGUSR1" if name == "limit_signal" else "stopped by the job's time limit") in output


def test_crash_loop_ends_by_itself(jobs, background, cluster):
    job_id = background["crash_loop"]
    cluster.wait(job_id, "FAILED")
    output = cluster.output(job_id)
    # Its first start saved step 2; the second and third, from there, were killed at step 4 like it; the fourth refuses.
    assert "its last 2 starts left no new checkpoint behind (the newest is of step 2)" in output
    assert cluster.job(job_id)["Restarts"] == "3"
    assert read_status(jobs.runs / "crash_loop").state == "failed"


def test_a_node_falls_silent(jobs, background, cluster):
    """slurmd is killed and its ranks go on: the restart waits until they have noticed, and nothing is done twice."""
    job_id = background["silent_node"]
    jobs.check("silent_node", job_id, launches=2)
    cluster.kept.clear()
    assert jobs.launches("silent_node")[1]["start_step"] > 5
