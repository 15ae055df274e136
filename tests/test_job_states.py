"""States of jobs from fake SLURM commands and run folders; tables and following."""

from __future__ import annotations

import pickle
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.tiny_runs import ROOT

from slurm.job_states import RunOutcome, resolve_state
from slurm.jobs import Job, Task, exit_code, last_step, reports_table
from slurm.launch import main, read_run
from training.environment import Environment
from training.preemption import QueueEntry, SlurmUnreachable, read_queue
from training.status import StatusFile, record_failure


def test_queue_from_squeue_and_scontrol(fake_slurm):
    assert read_queue("7") == {}
    fake_slurm("squeue", "7_3|PENDING|Priority\n7_0|RUNNING|None\n")
    assert read_queue("7") == {
        "7_3": QueueEntry("PENDING", "Priority"),
        "7_0": QueueEntry("RUNNING", ""),
    }
    old = "JobId=8 ArrayJobId=7 ArrayTaskId=1 JobName=a UserId=u(1) JobState=FAILED Reason=NonZeroExitCode ExitCode=3:0"
    waiting = "JobId=7 ArrayJobId=7 ArrayTaskId=2-3,5%2 JobState=CANCELLED Reason=None ExitCode=0:0"
    fake_slurm("scontrol", f"{old}\n{waiting}\n")
    found = read_queue("7")
    assert found["7_1"] == QueueEntry("FAILED", "NonZeroExitCode", "3:0")
    assert found["7_3"].state == "PENDING"  # squeue's word counts
    assert found["7_2"].state == found["7_5"].state == "CANCELLED"
    assert set(found) == {f"7_{index}" for index in (0, 1, 2, 3, 5)}


def test_unreachable_controller_is_no_ended_job(fake_slurm, tmp_path, monkeypatch):
    fake_slurm("squeue", error="slurm_load_jobs error: Unable to contact slurm controller\n", code=1)
    with pytest.raises(SlurmUnreachable, match="squeue: slurm_load_jobs error: Unable to contact"):
        read_queue("7")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmUnreachable, match="squeue is not installed on this host"):
        read_queue("7")


@pytest.mark.parametrize(
    ("entry", "run", "state", "reason"),
    [
        (("PENDING", "Priority"), RunOutcome(), "pending", "Priority"),
        (("PENDING", "BeginTime"), RunOutcome("requeued", "SIGUSR2"), "requeued", "SIGUSR2; BeginTime"),
        (("RUNNING", ""), RunOutcome(), "running", "starting"),
        (("RUNNING", ""), RunOutcome("running"), "running", ""),
        (("RUNNING", ""), RunOutcome("finished"), "running", ""),  # its other ranks may still be at work
        (("COMPLETING", ""), RunOutcome("running"), "running", ""),
        (("COMPLETING", ""), RunOutcome("requeued", "SIGTERM"), "requeued", "SIGTERM"),
        (("COMPLETING", ""), RunOutcome("stopped", "SIGTERM"), "running", "SIGTERM"),  # perhaps cancelled
        (("COMPLETING", ""), RunOutcome("failed", "nan", "rank 1: nan"), "failed", "rank 1: nan"),
        (("COMPLETED", ""), RunOutcome("finished"), "finished", ""),
        (("COMPLETED", ""), RunOutcome(done=True), "finished", ""),  # there was nothing to do
        (("COMPLETED", ""), RunOutcome("stopped", "SIGINT"), "stopped", "SIGINT"),
        (("COMPLETED", ""), RunOutcome("running"), "failed", "it ended with exit code"),
        (("COMPLETED", ""), RunOutcome("requeue_wanted", "SIGTERM"), "stopped", "submit it again"),
        (("FAILED", "NonZeroExitCode", "7:0"), RunOutcome(), "failed", "exit code 7:0"),
        (("FAILED", "", "1:0"), RunOutcome("running", error="rank 2 on n: boom"), "failed", "rank 2 on n: boom"),
        (("CANCELLED", ""), RunOutcome("running"), "cancelled", "scancel"),
        (("CANCELLED", ""), RunOutcome("failed", "a rank was killed by SIGTERM"), "cancelled", "scancel"),
        (("CANCELLED", ""), RunOutcome("stopped", "job 1 was cancelled"), "cancelled", "job 1 was cancelled"),
        (("CANCELLED", ""), RunOutcome("finished"), "finished", ""),
        (("TIMEOUT", "TimeLimit"), RunOutcome("running"), "timeout", "--signal_delay"),
        (("NODE_FAIL", ""), RunOutcome("failed", "x", "rank 1: lost touch"), "node_fail", "a node failed"),
        (("OUT_OF_MEMORY", ""), RunOutcome("running"), "out_of_memory", "--mem"),
        (None, RunOutcome("running"), "lost", "killed"),
        (None, RunOutcome(), "lost", "had not begun"),
        (None, RunOutcome("requeued", "SIGTERM"), "lost", "submit it again"),
        (None, RunOutcome("finished"), "finished", ""),
        (None, RunOutcome("failed", "nan"), "failed", "nan"),
        (None, RunOutcome(error="ImportError: torch"), "failed", "ImportError"),
        (None, RunOutcome(done=True), "finished", ""),
    ],
)
def test_state_of_a_task(entry, run, state, reason):
    found = resolve_state(QueueEntry(*entry) if entry else None, run)
    assert found[0] == state
    assert reason in found[1]


def make_job(folder: Path, count: int = 3) -> Job:
    job_folder = folder / "runs" / ".jobs" / "j"
    job_folder.mkdir(parents=True)
    tasks = [Task(i, f"r{i}", str(folder / "runs" / f"r{i}"), 50, {"seed": str(i)}, [], f"7_{i}") for i in range(count)]
    job = Job(job_folder, "7", tasks, read_run)
    job.save()
    return job


def make_run(task: Task, state: str, reason: str = "", job_id: str = "", restart: int = 0) -> Environment:
    environment = Environment("slurm", job_id=job_id or task.job_id, restart_count=restart)
    folder = Path(task.run_folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text('{"step": 11}\n{"step": 12}\n{"st')
    StatusFile(folder, environment, 50).write(state, reason, 10)
    return environment


def test_status_table_of_a_forgotten_job(fake_slurm, tmp_path, capsys, monkeypatch):
    """One run is lost, one failed on a rank, and one folder holds the status of another job."""
    job = make_job(tmp_path)
    make_run(job.tasks[0], "running")
    environment = make_run(job.tasks[1], "failed", "words of rank 0", restart=1)
    record_failure(Path(job.tasks[1].run_folder), environment, "the disk is full")
    make_run(job.tasks[2], "running", job_id="6_2")
    (job.folder / "7_2_0_result.pkl").write_bytes(
        pickle.dumps(("error", "Traceback ...\nModuleNotFoundError: No module named 'torch'\n"))
    )
    monkeypatch.chdir(tmp_path)
    assert main(["--status", "7"]) == 1  # found by its number in runs/.jobs
    table = capsys.readouterr().out
    assert re.search(r"^0 +r0 +0 +lost +12/50 +killed", table, re.M)
    assert re.search(r"^1 +r1 +1 +failed +12/50 +rank 0 on \S+: the disk is full$", table, re.M)
    assert re.search(r"^2 +r2 +2 +failed +ModuleNotFoundError: No module named 'torch'$", table, re.M)
    assert main(["--status", "8"]) == 2
    assert "no folder in runs/.jobs has that id" in capsys.readouterr().err


def test_state_is_unknown_while_slurm_is_unreachable(fake_slurm, tmp_path):
    job = make_job(tmp_path, 2)
    make_run(job.tasks[0], "running")
    make_run(job.tasks[1], "finished")
    fake_slurm("squeue", error="Unable to contact slurm controller", code=1)
    reports = job.reports()
    assert [report.state for report in reports] == ["unknown", "finished"]
    assert "Unable to contact" in reports[0].reason
    assert exit_code(reports) == 0
    assert not reports[0].over


def test_follow_prints_log_and_final_state(fake_slurm, tmp_path, capsys):
    job = make_job(tmp_path, 1)
    make_run(job.tasks[0], "finished")
    job.log(job.tasks[0]).write_text("step 12\n")
    assert main(["--status", str(job.folder), "--follow"]) == 0
    shown = capsys.readouterr().out
    assert "[7_0] r0: finished\nstep 12\n" in shown
    assert reports_table(job.reports()) in shown


def test_ctrl_c_ends_follow_and_not_the_job(fake_slurm, tmp_path):
    job = make_job(tmp_path, 1)
    fake_slurm("squeue", "7_0|RUNNING|None\n")
    command = [sys.executable, str(ROOT / "slurm" / "launch.py"), "--status", str(job.folder), "--follow"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "[7_0] r0: running (starting)\n"
        process.send_signal(signal.SIGINT)
        try:
            rest, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "the job continues" in rest
    assert "scancel 7" in rest


def test_last_step_of_a_long_metrics_file(tmp_path):
    assert last_step(tmp_path) is None
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "x": "{"." * 90}"}}\n' for n in range(2000)))
    assert last_step(tmp_path) == 1999
