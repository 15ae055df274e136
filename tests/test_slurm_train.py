"""slurm/train.sbatch on a real SLURM: a rank fails, the disk is full, the doctor comes first, the user cancels."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from helpers.slurm_jobs import Jobs
from helpers.tiny_runs import ROOT

from training.checkpoint import find_newest
from training.status import newest_step, read_status

pytestmark = pytest.mark.slurm


@pytest.fixture
def small_disk(cluster) -> Iterator[Path]:
    """An empty folder on a file system of a few MiB, which nodes see as well."""
    yield cluster.small_disk
    for entry in cluster.small_disk.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


@pytest.fixture
def jobs(cluster, tmp_path, reference) -> Jobs:
    return Jobs(cluster, tmp_path, reference)


def test_failures_of_a_rank(jobs, cluster):
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


def test_ranks_start_again_in_their_allocation(jobs, cluster):
    """A rank is killed at step 8: SLURM does not hear of it, and the run goes on from step 5 as the same run."""
    retry, once = ("--requeue_on_crash",), {"TEST_CRASH": "1:8"}
    job_id = jobs.submit("again", "--ntasks=2", "-wnode3", script=retry, env=once, save_every=5)
    output = jobs.check("again", job_id, launches=2)
    assert f"a rank was killed by SIGKILL; srun's lines above say which; job {job_id} starts again in its" in output
    assert [launch["start_step"] for launch in jobs.launches("again")] == [0, 5]
    assert [launch["restart_count"] for launch in jobs.launches("again")] == [0, 1]
    assert cluster.job(job_id)["Restarts"] == "0"


def test_cancelled_is_not_requeued(jobs, cluster):
    """Cancelled, and asked by SIGINT to end: both save, neither starts again; wandb's service is hit by the signals."""
    options = {"cancelled": (), "interrupted": ("--signal=INT",)}
    slow = {"TEST_STEP_SECONDS": "0.4"}
    ids = {name: jobs.submit(name, "--ntasks=2", "-wnode3", env=slow, save_every=50) for name in options}
    for name, job_id in ids.items():
        jobs.wait_for_step(job_id, name, 3)
        cluster.scancel(*options[name], job_id)
    for name, job_id in ids.items():
        cluster.wait(job_id, "CANCELLED" if name == "cancelled" else "COMPLETED")
        cluster.wait_for(lambda name=name: read_status(jobs.runs / name).state == "stopped", 10, "its status", job_id)
        assert newest_step(jobs.runs / name / "checkpoints") >= 3  # it was given the time to save
        assert cluster.job(job_id)["Restarts"] == "0"


def test_full_disk_at_a_save(jobs, cluster, small_disk):
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


def test_doctor_runs_before_training(jobs, cluster):
    job_id = jobs.submit("ill", "--ntasks=2", "-wnode3", script=("--doctor",), tokenizer_path=ROOT / "README.md")
    cluster.wait(job_id, "FAILED")
    output = cluster.output(job_id)
    assert "FAIL" in output
    assert "README.md" in output
    assert not (jobs.runs / "ill").exists()
    assert cluster.job(job_id)["Restarts"] == "0"  # ranks that are ended with a failed one count as no preemption
