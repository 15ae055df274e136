"""slurm/launch.py without a cluster: submitting, what runs in the job, local runs."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.tiny_runs import ROOT, environment, flags, make_inputs

import slurm.launch
from slurm.job_options import JobOptions, clean_environment
from slurm.jobs import Job
from slurm.launch import TrainingFailed, TrainingJob, main, read_run, submit
from training.config import TrainingConfig, parse_config
from training.environment import Environment
from training.status import StatusFile, record_failure

NEEDED = ["--train_path=shards/*.shard", "--config_file=model.json", "--tokenizer_path=t.json", "--name=run"]


def holds_list(flag: str) -> bool:
    return flag == "length_milestones"


# Submitting


def test_dry_run_prints_all_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))  # no SLURM, no git
    options = ["--nodes", "2", "--gpus_per_node", "4", "--cpus_per_task", "8", "--time", "4:00:00", "--account", "a"]
    more = [
        "--sbatch",
        "mail-type=END",
        "--sbatch",
        "exclusive",
        "--setup",
        "module load x",
        "--array_parallelism",
        "2",
    ]
    assert main([*options, *more, "--sweep", "seed=1,2,3", "--dry_run", "--", *NEEDED]) == 0
    shown = capsys.readouterr().out
    for line in (
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=4",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --cpus-per-task=8",
        "#SBATCH --time=240",
        "#SBATCH --account=a",
        "#SBATCH --signal=USR2@120",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --array=0-2%2",
        "#SBATCH --mail-type=END",
        "#SBATCH --exclusive",
        "#SBATCH --job-name=run",
        "module load x",
        'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"',
        "2     run-seed=3  3",
        "nothing was submitted (--dry_run)",
    ):
        assert f"\n{line}\n" in shown
    assert "--kill-on-bad-exit=1 --wait=0 --open-mode=append --cpus-per-task=8 " in shown
    assert '\n. "$SUITE/slurm/ranks.sh"\n' in shown
    assert "wckey" not in shown
    assert f"note: --config_file {tmp_path}/model.json cannot be seen from here" in shown
    assert not list(tmp_path.iterdir())
    assert main(["--dry_run", "--", *NEEDED]) == 0
    shown = capsys.readouterr().out
    assert not re.search(r"--(time|array|gpus-per-node|partition)=", shown)


def test_submit_from_python(fake_slurm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fake_slurm("sbatch", "Submitted batch job 77\n")
    for name, value in {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "9", "RANK": "3", "SLURM_CONF": "/c", "MINE": "1"}.items():
        monkeypatch.setenv(name, value)
    Path("model.json").write_text("{}")
    own = [argument for argument in NEEDED if "config_file" not in argument]
    job = submit([*own, f"--config_file={ROOT}/configs/tiny.json"], JobOptions(tasks_per_node=2), {"seed": [1, 2]})
    assert (job.job_id, [task.job_id for task in job.tasks]) == ("77", ["77_0", "77_1"])
    assert job.folder.parent == tmp_path / "runs" / ".jobs"
    assert (job.folder / "code" / "training" / "step.py").read_bytes() == (ROOT / "training" / "step.py").read_bytes()
    assert not (job.folder / "code" / "runs").exists()
    script = (fake_slurm.folder / "script").read_text()
    assert f"\ncd {job.folder}/code  #" in script
    assert "#SBATCH --array=0-1%2\n" in script
    lines = [line for line in script.splitlines() if "mapfile" in line]
    shown = subprocess.run(
        ["bash", "-c", f"SLURM_ARRAY_TASK_ID=1; {lines[0]}; printf '%s\\n' \"${{flags[@]}}\""],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.splitlines() == job.tasks[1].arguments
    passed = (fake_slurm.folder / "environment").read_text()
    assert "MINE=1\n" in passed
    assert "SLURM_CONF=/c\n" in passed
    assert not re.search(r"^(RANK|SLURM_NTASKS|SLURM_JOB_ID)=", passed, re.M)
    assert os.environ["RANK"] == "3"
    delayed = pickle.loads((job.folder / "77_1_submitted.pkl").read_bytes())
    assert type(delayed.function) is TrainingJob
    assert delayed.function.arguments == job.tasks[1].arguments
    assert "--seed=2" in job.tasks[1].arguments
    # a model configuration of the checkout is code; the job reads its copy
    assert f"--config_file={job.folder}/code/configs/tiny.json" in job.tasks[1].arguments
    record = json.loads((job.folder / "job.json").read_text())
    assert record["code"]["folder"] == str(job.folder / "code")
    assert Job.load(job.folder, read_run) == job
    assert [report.state for report in job.reports()] == ["lost", "lost"]

    (single,) = submit(NEEDED, JobOptions(snapshot=False, job_name="other")).tasks
    assert single.job_id == "77"
    script = (fake_slurm.folder / "script").read_text()
    assert f"\ncd {ROOT}  #" in script
    assert "#SBATCH --job-name=other\n" in script


def test_refused_submission_leaves_no_folder(fake_slurm, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    fake_slurm("sbatch", error="sbatch: error: invalid partition specified: x\n", code=1)
    assert main(["--partition", "x", "--", *NEEDED]) == 2
    assert "error: sbatch refused the job: sbatch: error: invalid partition specified: x\n" in capsys.readouterr().err
    assert not list((tmp_path / "runs" / ".jobs").iterdir())


def test_launcher_variables_do_not_reach_the_job(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("SLURM_SITE_DEFAULT", "1")  # in a login shell, it is there for a reason
    monkeypatch.setenv("MASTER_PORT", "1")
    with clean_environment():
        assert "MASTER_PORT" not in os.environ
        assert os.environ["SLURM_SITE_DEFAULT"] == "1"
    assert os.environ["MASTER_PORT"] == "1"


# In the job


@pytest.fixture
def trained(monkeypatch, tmp_path):
    """TrainingJob with a training loop that does what a test says; handlers and limits are put back afterwards."""
    handler, arguments = signal.getsignal(signal.SIGUSR2), sys.argv
    job = TrainingJob(["--name=run"], str(tmp_path / "run"))
    (tmp_path / "run").mkdir()
    environment = Environment("slurm", job_id="5", restart_count=2)
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURM_PROCID", "0")
    for name, value in {"NTASKS": "1", "LOCALID": "0", "JOB_NODELIST": "localhost", "STEP_ID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)

    def call(code: int, state: str, error: str = "") -> str:
        def main(given, signals):
            assert given == ["--name=run"]
            assert sys.argv == ["train_multi_gpu.py", "--name=run"]
            os.kill(os.getpid(), signal.SIGUSR2)
            assert signals.received == "SIGUSR2"
            StatusFile(tmp_path / "run", environment, 10).write(state, "", 3)
            if error:
                record_failure(tmp_path / "run", environment, error)
            with signals:
                return code

        monkeypatch.setattr("train_multi_gpu.main", main)
        return job()

    yield call
    signal.signal(signal.SIGUSR2, handler)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    sys.argv = arguments
    if hasattr(sys, "tracebacklimit"):
        del sys.tracebacklimit


def test_job_outcome(trained):
    assert trained(0, "finished") == "finished"
    with pytest.raises(SystemExit) as ended:
        trained(0, "requeued")
    assert ended.value.code == 0
    with pytest.raises(TrainingFailed, match=r"^rank 0 on \S+: the loss is nan$"):
        trained(1, "failed", "the loss is nan")


def test_submitit_checkpoint_resubmits_the_job():
    job = TrainingJob(["--name=run"], "runs/run")
    again = pickle.loads(pickle.dumps(job)).checkpoint()
    assert again.function.arguments == ["--name=run"]
    assert TrainingJob.__module__ == slurm.launch.__name__ == "slurm.launch"


# Without a cluster


@pytest.mark.slow
def test_local_sweep_continues_after_a_failed_run(tmp_path):
    inputs = make_inputs(tmp_path / "inputs")
    options = {"max_steps": 3, "validate_every": 0, "save_every": 0, "global_batch_size": 16}
    training = flags(inputs, tmp_path / "runs", **options)
    command = [sys.executable, str(ROOT / "slurm" / "launch.py"), "--local", "--sweep", "learning_rate=1e30,1e-2", "--"]
    done = subprocess.run([*command, *training], capture_output=True, text=True, timeout=200, env=environment())
    assert done.returncode == 1, done.stderr
    assert re.search(
        r"^0 +run-learning_rate=1e30 +1e30 +failed +\d/3 +([\d.]+ % +)?step \d: .* is nan", done.stdout, re.M
    )
    # Of a run within a second the files' times tell no useful time.
    assert re.search(r"^1 +run-learning_rate=1e-2 +1e-2 +finished +3/3( +[\d.]+ %)?$", done.stdout, re.M)
    assert not (tmp_path / "runs" / ".jobs").exists()


def test_local_ranks_start_by_torchrun(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["--local", "--tasks_per_node", "2", "--sweep", "seed=1,2", "--dry_run", "--", *NEEDED]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert " -m torch.distributed.run --standalone --nproc_per_node=2 " in first
    assert f"{ROOT}/train_multi_gpu.py" in second
    assert "--seed=2" in second
    assert not list(tmp_path.iterdir())


def test_defaults_are_those_of_training():
    """to_arguments leaves out what is default; it relies on the parser having the same ones."""
    assert parse_config(NEEDED, "") == TrainingConfig("shards/*.shard", "", "model.json", "t.json", name="run")
