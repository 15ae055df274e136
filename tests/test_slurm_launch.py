"""slurm/launch.py on a real SLURM: a sweep of which some runs fail, and a requeued job whose code was edited."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.slurm_cluster_fixture import Cluster
from helpers.slurm_reference import STEPS, Reference
from helpers.tiny_exports import make_checkpoint, random_model
from helpers.tiny_runs import ROOT, flags, make_inputs, make_texts, training_lines

from evaluation import finetune_grid
from slurm.jobs import Job
from slurm.launch import read_run
from slurm.snapshot import take_snapshot

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
LONG = 20_000  # steps: more than any test waits for


def launch(
    cluster: Cluster, *arguments: object, script: Path = ROOT / "slurm" / "launch.py"
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script), *map(str, arguments)]
    return cluster.command(
        *command, check=False, cwd=cluster.folder, env={**cluster.environment, "OMP_NUM_THREADS": "1"}
    )


def states(text: str) -> dict[str, str]:
    """The last table in what the launcher printed: its lines by task number."""
    table = text[text.rindex("task  run") :].splitlines()[1:]
    return {line.split()[0]: line for line in table if line and line[0].isdigit()}


def test_sweep_reports_the_failed_run_and_its_reason(cluster, monkeypatch):
    """One array of four: one run ends, one is cancelled while it trains, and two meet a loss that is not finite."""
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    inputs = make_inputs(cluster.folder / "inputs")
    monkeypatch.chdir(cluster.folder)
    training = flags(inputs.relative_to(cluster.folder), Path("runs"), "sweep", validate_every=0, save_every=0)
    values = ["--sweep", f"max_steps=5,{LONG}", "--sweep", "learning_rate=1e-2,1e30"]
    done = launch(cluster, "--time", "0-0:20", "--cpus_per_task", 1, *values, "--", *training)
    assert done.returncode == 0, done.stderr
    number = re.search(r"submitted job (\d+): a job array of 4 runs, each of 1 rank\n", done.stdout)[1]
    records = cluster.tasks(number)
    assert {record["ArrayJobId"] for record in records} == {number}  # one array
    folder = Path(re.search(r"--status (\S+)", done.stdout)[1])
    assert folder.parent == cluster.folder / "runs" / ".jobs"
    job = Job.load(folder, read_run)
    assert [task.job_id for task in job.tasks] == [f"{number}_{index}" for index in range(4)]

    endless = Path(job.tasks[2].run_folder)
    assert endless == cluster.folder / "runs" / f"sweep-max_steps={LONG}-learning_rate=1e-2"
    cluster.wait_for(
        lambda: (endless / "metrics.jsonl").exists() and training_lines(endless), 120, "the long run's steps"
    )
    assert job.reports()[2].state == "running"
    assert job.reports()[2].step >= 1
    cluster.scancel(f"{number}_2")
    followed = launch(cluster, "--status", folder, "--follow")
    assert followed.returncode == 1, followed.stderr

    for text in (followed.stdout, launch(cluster, "--status", number).stdout):
        table = states(text)
        assert re.search(r"sweep-max_steps=5-learning_rate=1e-2 +5 +1e-2 +finished +5/5", table["0"])
        for failed in ("1", "3"):
            reason = r"rank 0 on node\d: step \d+: .*masked.* is nan"
            assert re.search(rf"1e30 +failed +\d+/\d+ +([\d.]+ % +)?{reason}", table[failed])
        assert re.search(r" cancelled +\d+/20000 +\S+", table["2"]), table["2"]


def check_same(alone: Path, other: Path) -> None:
    """Two runs have the same losses at every step."""
    expected, found = training_lines(alone), training_lines(other)
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    for a, b in zip(expected, found, strict=True):
        for key in ("train/loss", "train/masked_loss", "train/causal_loss"):
            assert b[key] == pytest.approx(a[key], rel=1e-5), (a["step"], key)


def test_four_ranks_on_one_node_start_again_in_place(cluster, monkeypatch, reference: Reference):
    """One is killed: SLURM does not hear of it, and the job is followed to its end as the same run."""
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    runs = cluster.folder / "runs"
    training = flags(reference.inputs, runs, "four", max_steps=STEPS, validate_every=0, save_every=0)
    options = ["--tasks_per_node", 4, "--cpus_per_task", 1, "--time", 20, "--no-snapshot", "--requeue_on_crash"]
    done = launch(cluster, *options, "--", *training)
    assert done.returncode == 0, done.stderr
    number = re.search(r"submitted job (\d+): one run of 4 ranks\n", done.stdout)[1]
    metrics = runs / "four" / "metrics.jsonl"
    cluster.wait_for(lambda: metrics.exists() and training_lines(runs / "four"), 120, "the first steps")
    os.kill(cluster.pids(number)[1], signal.SIGKILL)
    done = launch(cluster, "--status", re.search(r"--status (\S+)", done.stdout)[1], "--follow")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"; job {number} starts again in its allocation\n" in done.stdout
    assert cluster.job(number)["Restarts"] == "0"
    check_same(reference.run, runs / "four")


def test_requeued_job_on_two_nodes_is_the_run_of_one_process(cluster, monkeypatch, reference: Reference):
    """Its checkout is edited while it waits in the queue, and it is signalled on its way: neither changes anything."""
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    checkout = cluster.folder / "checkout"
    take_snapshot(ROOT, checkout)
    runs = cluster.folder / "runs"
    training = flags(
        reference.inputs, runs, "four", max_steps=STEPS, validate_every=0, save_every=10, wandb_mode="offline"
    )
    options = ["--nodes", 2, "--tasks_per_node", 2, "--cpus_per_task", 1, "--time", 20, "--sbatch", "hold"]
    done = launch(cluster, *options, "--", *training, script=checkout / "slurm" / "launch.py")
    assert done.returncode == 0, done.stderr
    number = re.search(r"submitted job (\d+): one run of 4 ranks\n", done.stdout)[1]  # 2 x 2
    job = Job.load(Path(re.search(r"--status (\S+)", done.stdout)[1]), read_run)
    assert [(report.state, report.reason) for report in job.reports()] == [("pending", "JobHeldUser")]
    for path in (checkout / "training").glob("*.py"):
        path.write_text("raise SystemExit('this is the edited checkout')")
    cluster.scontrol("release", number)

    folder = Path(job.tasks[0].run_folder)
    cluster.wait_for(lambda: (folder / "metrics.jsonl").exists() and training_lines(folder), 120, "the first steps")
    cluster.scancel("--signal=USR2", number)
    restarted = cluster.wait_for(
        lambda: cluster.job(number).get("Restarts") == "1" and job.reports()[0], 60, "a requeue"
    )
    assert (restarted.state, restarted.over) == ("requeued", False)
    assert f"SLURM starts job {number} again" in restarted.reason
    assert not list(job.folder.glob("*_result.pkl"))  # for submitit, too, the job is not done
    cluster.wait(number, "RUNNING")
    cluster.scancel("--signal=USR2", number)  # before there is a rank to handle it: nothing is lost, and nobody dies
    (report,) = job.wait(seconds=1)
    log = job.log(job.tasks[0]).read_text()
    assert (report.state, report.step) == ("finished", STEPS), log
    assert "stopped by SIGUSR2 after step" in log

    check_same(reference.run, folder)
    config = json.loads((folder / "config.json").read_text())
    assert {start["world_size"] for start in config["launches"]} == {4}
    assert len(config["launches"]) >= 2
    assert str(checkout) not in log


def test_a_grid_of_fine_tuning_runs_and_is_joined(cluster, monkeypatch):
    """Two rates of one task, a job each, by paths relative to where they were submitted."""
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    folder = cluster.folder / "grid"
    make_checkpoint(folder / "run", random_model("gpt-bert"))
    task = folder / "tasks" / "length"
    task.mkdir(parents=True)
    for name, seed in (("train", 1), ("valid", 2)):
        lines = [{"sentence": text[:60], "label": int(len(text) > 100)} for text in make_texts(24, seed)]
        (task / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = ["run", "--tasks", "tasks", "--output", "out", "--epochs", "1", "--num_seeds", "1", "--device", "cpu"]
    options = ["--finetune", "--time", 20, "--cpus_per_task", 1, "--follow", "--sweep", "learning_rates=1e-3,1e-4"]
    command = [sys.executable, str(ROOT / "slurm" / "launch.py"), *map(str, options), "--", *given]
    done = cluster.command(*command, check=False, cwd=folder, env={**cluster.environment, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert len([line for line in states(done.stdout).values() if " finished" in line]) == 2
    files = sorted(map(str, (folder / "out").glob("finetune*.json")))
    assert finetune_grid.main([*files, "--output", str(folder / "out.json")]) == 0
    joined = json.loads((folder / "out.json").read_text())["tasks"]["length"]
    assert joined["held_out_by_rate"].keys() == {"0.001", "0.0001"}
