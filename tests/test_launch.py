"""slurm/launch.py without a cluster: sweeps, times, snapshots, paths, states from fake SLURM commands, local runs."""

from __future__ import annotations

import json
import os
import pickle
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from runs import ROOT, environment, flags, make_inputs

import slurm.launch
from slurm.environment import Environment
from slurm.job_options import JobOptions, LaunchError, outside_any_job, parse_minutes
from slurm.job_states import Evidence, QueueEntry, SlurmUnreachable, judge, read_queue
from slurm.jobs import Job, Task, exit_code, last_step, reports_table
from slurm.launch import TrainingFailed, TrainingJob, main, plan_tasks, read_run, submit, to_arguments
from slurm.snapshot import SnapshotError, code_files, take_snapshot
from slurm.sweep import SweepError, combinations, format_table, make_axis, parse_axis
from training.config import TrainingConfig, parse_config
from training.status import record_failure, write_status

NEEDED = ["--train_path=shards/*.shard", "--config_file=model.json", "--tokenizer_path=t.json", "--name=run"]


def holds_list(flag: str) -> bool:
    return flag == "length_milestones"


# Sweeps


def test_a_sweep_is_the_product_of_its_values():
    axes = [parse_axis("learning_rate=1e-2,5e-3", holds_list), parse_axis("--seed=1,2,3", holds_list)]
    found = combinations(axes)
    assert [values for values, _ in found[:4]] == [
        {"learning_rate": "1e-2", "seed": "1"},
        {"learning_rate": "1e-2", "seed": "2"},
        {"learning_rate": "1e-2", "seed": "3"},
        {"learning_rate": "5e-3", "seed": "1"},
    ]
    assert found[5][1] == "-learning_rate=5e-3-seed=3"
    assert combinations([]) == [({}, "")]


@pytest.mark.parametrize(
    ("text", "values", "labels"),
    [
        ("length_milestones=0.7:0.9,0.5,:", ("0.7,0.9", "0.5", ""), ("0.7+0.9", "0.5", "none")),
        ("config-file=configs/a.json,configs/b.json", ("configs/a.json", "configs/b.json"), ("a.json", "b.json")),
        ("train_path=x/train,y/train", ("x/train", "y/train"), ("x_train", "y_train")),
        ("wandb_project=a b,c:d", ("a b", "c:d"), ("a_b", "c_d")),
    ],
)
def test_values_and_what_names_make_of_them(text, values, labels):
    axis = parse_axis(text, holds_list)
    assert (axis.values, axis.labels) == (values, labels)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rate", "is not FLAG=VALUE"),
        ("seed=", "empty value"),
        ("seed=1,,2", "empty value"),
        ("seed=1,1", "give each value once"),
    ],
)
def test_bad_sweeps_are_refused(text, message):
    with pytest.raises(SweepError, match=message):
        parse_axis(text, holds_list)


def test_a_flag_is_swept_once():
    with pytest.raises(SweepError, match="given twice"):
        combinations([make_axis("seed", ["1"]), make_axis("seed", ["2"])])


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("90", 90), ("4:00", 4), ("4:01", 5), ("4:00:00", 240), ("1-2", 1560), ("1-2:30", 1590), ("2-00:00:01", 2881)],
)
def test_times_are_read_as_slurm_reads_them(text, minutes):
    assert parse_minutes(text) == minutes


def test_no_time_limit_and_no_time():
    assert parse_minutes("UNLIMITED") == 0
    for text in ("4h", "1-", "1:2:3:4", "", "-5"):
        with pytest.raises(LaunchError, match="none of SLURM's forms"):
            parse_minutes(text)


def test_tables_leave_out_empty_columns():
    assert format_table(["a", "bb", "c"], [[1, "", "x"], [22, "", ""]]) == "a   c\n1   x\n22"


# Runs


def test_paths_mean_what_they_meant_where_the_launcher_was_called(tmp_path):
    (task,) = plan_tasks([*NEEDED, "--resume=../old", "--valid_path=/abs/v"], [], tmp_path)
    assert f"--train_path={tmp_path}/shards/*.shard" in task.arguments
    assert f"--config_file={tmp_path}/model.json" in task.arguments
    assert f"--resume={tmp_path}/../old" in task.arguments
    assert "--valid_path=/abs/v" in task.arguments
    assert task.run_folder == f"{tmp_path}/runs/run"
    (task,) = plan_tasks([*NEEDED, "--resume=never", "--checkpoint_filename="], [], tmp_path)
    assert "--resume=never" in task.arguments
    assert not any(argument.startswith("--checkpoint_filename") for argument in task.arguments)


def test_arguments_give_the_same_configuration_again(tmp_path, monkeypatch):
    """Also what came from a recipe, which may change while the job waits."""
    monkeypatch.chdir(tmp_path)
    recipe = {"length_milestones": [], "compile": False, "mixed_precision": True, "document_end": False, "seed": 7}
    Path("r.json").write_text(json.dumps({**recipe, "save_steps": [10, 20], "learning_rate": 1e-3}))
    given = [*NEEDED, "--recipe=r.json", "--token_weighted_loss", "--learning_rate=3e-05", "--name=-odd name"]
    config = parse_config(given, "")
    again = to_arguments(config)
    assert not any("recipe" in argument for argument in again)
    assert parse_config(again, "") == config
    assert (config.length_milestones, config.compile, config.save_steps) == ((), False, (10, 20))


def test_runs_of_a_sweep_have_names_and_values_of_their_own(tmp_path):
    axes = [make_axis("length_milestones", ["0.5,0.8", ""]), make_axis("document_end", ["true", "false"])]
    tasks = plan_tasks(NEEDED, axes, tmp_path)
    assert [task.index for task in tasks] == [0, 1, 2, 3]
    assert tasks[0].name == "run-length_milestones=0.5+0.8-document_end=true"
    assert len({task.run_folder for task in tasks}) == 4
    configs = [parse_config(task.arguments, "") for task in tasks]
    assert [config.length_milestones for config in configs] == [(0.5, 0.8), (0.5, 0.8), (), ()]
    assert [config.document_end for config in configs] == [True, False, True, False]
    assert [config.name for config in configs] == [task.name for task in tasks]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--", "--train_path=x"], "--config_file is ''; it is required"),
        (["--", *NEEDED, "--lerning_rate=1"], "did you mean --learning_rate"),
        (["--sweep", "learning_rate=1,abc", "--", *NEEDED], "--learning_rate"),
        (["--sweep", "learning_rate=1,-1", "--", *NEEDED], "--learning_rate is -1.0; it must be above 0"),
        (["--sweep", "rate=1", "--", *NEEDED], "training has no such flag"),
        (["--sweep", "name=a,b", "--", *NEEDED], "names of runs are made from"),
        (["--sweep", "compile=1", "--", *NEEDED], "true and false"),
        (["--learning_rate", "1", "--", *NEEDED], "--learning_rate is a flag of training and belongs after --"),
        (["--gpus", "4", "--", *NEEDED], "unknown flag or value '--gpus'"),
        (["--time", "4h", "--", *NEEDED], "--time '4h' is none of SLURM's forms"),
        (["--nodes", "0", "--", *NEEDED], "--nodes is 0; it must be at least 1"),
        (["--sbatch", "array=1-3", "--", *NEEDED], "--sbatch array is set by the launcher"),
        (["--sbatch", "=3", "--", *NEEDED], "is not KEY=VALUE"),
        (["--local", "--nodes", "2", "--", *NEEDED], "--local is this machine alone"),
        (["--log_folder", "x%j", "--dry_run", "--", *NEEDED], "has a % in its name"),
        (["--status", "nowhere"], "neither a job folder"),
        (["--", *NEEDED, f"--name={'n' * 250}"], "too long for a folder"),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_is_submitted(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        code = main(arguments)
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr()
    assert code == 2
    assert message in said.err
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_without_submitit_or_slurm(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["--", *NEEDED]) == 2
    assert "there is no sbatch here" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "submitit", None)
    assert main(["--", *NEEDED]) == 2
    assert "pip install 'submitit>=1.5'" in capsys.readouterr().err


def test_help_is_fast_and_imports_little():
    code = "import sys; import slurm.launch; assert not {'torch', 'submitit', 'tokenizers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# Snapshots


def make_checkout(folder: Path) -> Path:
    for name, content in {
        "train.py": "1",
        "pack/mod.py": "2",
        "configs/tiny.json": "{}",
        "README.md": "text",
        "data.json": "x" * 2_000_000,
        "runs/a/config.json": "{}",
        "own_runs/a/job.py": "3",
        ".venv/lib.py": "4",
        "slurm/site.env": "A=1",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@t", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_a_snapshot_holds_the_code_and_the_sites_file(tmp_path):
    checkout = make_checkout(tmp_path / "checkout")
    wanted = {"train.py", "pack/mod.py", "configs/tiny.json", "slurm/site.env"}
    assert {str(path) for path in code_files(checkout, [checkout / "own_runs"])} == wanted
    (checkout / ".gitignore").write_text("/.venv\nruns/\nsite.env\n")
    git(checkout, "init", "-q")
    git(checkout, "add", "train.py", ".gitignore")
    git(checkout, "commit", "-q", "-m", "first")
    (checkout / "train.py").write_text("changed")
    taken = take_snapshot(checkout, tmp_path / "job" / "code", [checkout / "own_runs", tmp_path])
    found = {str(path.relative_to(taken.folder)) for path in taken.folder.rglob("*") if path.is_file()}
    assert found == {*wanted, "GIT_COMMIT"}
    assert taken.commit == git(checkout, "rev-parse", "HEAD") + "+"
    assert (taken.folder / "GIT_COMMIT").read_text().strip() == taken.commit
    assert (taken.folder / "train.py").read_text() == "changed"
    assert "+changed" in (tmp_path / "job" / "code.diff").read_text()


def test_a_folder_full_of_data_is_no_code(tmp_path, monkeypatch):
    monkeypatch.setattr("slurm.snapshot._MOST_FILES", 2)
    with pytest.raises(SnapshotError, match="--no-snapshot"):
        take_snapshot(make_checkout(tmp_path / "checkout"), tmp_path / "code")


# States


@pytest.fixture
def fake_slurm(tmp_path, monkeypatch):
    """Commands of SLURM that print what a test says; sbatch also keeps its script and its environment."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def command(name: str, output: str = "", error: str = "", code: int = 0) -> None:
        lines = ["#!/bin/sh", f"printf %s {shlex.quote(output)}", f"printf %s {shlex.quote(error)} >&2"]
        if name == "sbatch":
            lines.append(f'cp "$1" {folder}/script; env > {folder}/environment')
        (folder / name).write_text("\n".join([*lines, f"exit {code}\n"]))
        (folder / name).chmod(0o755)

    for name in ("squeue", "scontrol"):
        command(name, error="slurm_load_jobs error: Invalid job id specified\n", code=1)
    command("srun")
    command.folder = folder
    return command


def test_what_slurm_knows(fake_slurm):
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


def test_a_silent_controller_is_no_ended_job(fake_slurm, tmp_path, monkeypatch):
    fake_slurm("squeue", error="slurm_load_jobs error: Unable to contact slurm controller\n", code=1)
    with pytest.raises(SlurmUnreachable, match="squeue: slurm_load_jobs error: Unable to contact"):
        read_queue("7")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmUnreachable, match="there is no squeue here"):
        read_queue("7")


@pytest.mark.parametrize(
    ("entry", "run", "state", "reason"),
    [
        (("PENDING", "Priority"), Evidence(), "pending", "Priority"),
        (("PENDING", "BeginTime"), Evidence("requeued", "SIGUSR2"), "requeued", "SIGUSR2; BeginTime"),
        (("RUNNING", ""), Evidence(), "running", "starting"),
        (("RUNNING", ""), Evidence("running"), "running", ""),
        (("RUNNING", ""), Evidence("finished"), "running", ""),  # its other ranks may still be at work
        (("COMPLETING", ""), Evidence("running"), "running", ""),
        (("COMPLETING", ""), Evidence("requeued", "SIGTERM"), "requeued", "SIGTERM"),
        (("COMPLETING", ""), Evidence("failed", "nan", "rank 1: nan"), "failed", "rank 1: nan"),
        (("COMPLETED", ""), Evidence("finished"), "finished", ""),
        (("COMPLETED", ""), Evidence(done=True), "finished", ""),  # there was nothing to do
        (("COMPLETED", ""), Evidence("stopped", "SIGINT"), "stopped", "SIGINT"),
        (("COMPLETED", ""), Evidence("running"), "failed", "it ended with exit code"),
        (("COMPLETED", ""), Evidence("requeue_wanted", "SIGTERM"), "stopped", "submit it again"),
        (("FAILED", "NonZeroExitCode", "7:0"), Evidence(), "failed", "exit code 7:0"),
        (("FAILED", "", "1:0"), Evidence("running", error="rank 2 on n: boom"), "failed", "rank 2 on n: boom"),
        (("CANCELLED", ""), Evidence("running"), "cancelled", "scancel"),
        (("CANCELLED", ""), Evidence("failed", "a rank was killed by SIGTERM"), "cancelled", "scancel"),
        (("CANCELLED", ""), Evidence("stopped", "job 1 was cancelled"), "cancelled", "job 1 was cancelled"),
        (("CANCELLED", ""), Evidence("finished"), "finished", ""),
        (("TIMEOUT", "TimeLimit"), Evidence("running"), "timeout", "--signal_delay"),
        (("NODE_FAIL", ""), Evidence("failed", "x", "rank 1: lost touch"), "node_fail", "a node failed"),
        (("OUT_OF_MEMORY", ""), Evidence("running"), "out_of_memory", "--mem"),
        (None, Evidence("running"), "lost", "killed"),
        (None, Evidence(), "lost", "had not begun"),
        (None, Evidence("requeued", "SIGTERM"), "lost", "submit it again"),
        (None, Evidence("finished"), "finished", ""),
        (None, Evidence("failed", "nan"), "failed", "nan"),
        (None, Evidence(error="ImportError: torch"), "failed", "ImportError"),
        (None, Evidence(done=True), "finished", ""),
    ],
)
def test_judgement(entry, run, state, reason):
    found = judge(QueueEntry(*entry) if entry else None, run)
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
    folder, place = Path(task.run_folder), Environment("slurm", job_id=job_id or task.job_id, restart_count=restart)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text('{"step": 11}\n{"step": 12}\n{"st')
    write_status(folder, place, state, reason, 10, 50)
    return place


def test_the_table_of_a_job_that_slurm_has_forgotten(fake_slurm, tmp_path, capsys, monkeypatch):
    """One run is lost, one failed on a rank, and one folder holds the status of another job."""
    job = make_job(tmp_path)
    make_run(job.tasks[0], "running")
    place = make_run(job.tasks[1], "failed", "words of rank 0", restart=1)
    record_failure(Path(job.tasks[1].run_folder), place, "the disk is full")
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


def test_nobody_is_lost_while_slurm_cannot_be_asked(fake_slurm, tmp_path):
    job = make_job(tmp_path, 2)
    make_run(job.tasks[0], "running")
    make_run(job.tasks[1], "finished")
    fake_slurm("squeue", error="Unable to contact slurm controller", code=1)
    reports = job.reports()
    assert [report.state for report in reports] == ["unknown", "finished"]
    assert "Unable to contact" in reports[0].reason
    assert exit_code(reports) == 0
    assert not reports[0].over


def test_following_a_job_shows_its_log_and_its_end(fake_slurm, tmp_path, capsys):
    job = make_job(tmp_path, 1)
    make_run(job.tasks[0], "finished")
    job.log(job.tasks[0]).write_text("step 12\n")
    assert main(["--status", str(job.folder), "--follow"]) == 0
    shown = capsys.readouterr().out
    assert "[7_0] r0: finished\nstep 12\n" in shown
    assert reports_table(job.reports()) in shown


def test_ctrl_c_stops_following_and_not_the_job(fake_slurm, tmp_path):
    job = make_job(tmp_path, 1)
    fake_slurm("squeue", "7_0|RUNNING|None\n")
    command = [sys.executable, str(ROOT / "slurm" / "launch.py"), "--status", str(job.folder), "--follow"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "[7_0] r0: running (starting)\n"
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert process.returncode == 130
    assert "the job goes on" in rest
    assert "scancel 7" in rest


def test_the_last_step_of_a_long_file(tmp_path):
    assert last_step(tmp_path) is None
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "x": "{"." * 90}"}}\n' for n in range(2000)))
    assert last_step(tmp_path) == 1999


# Submitting


def test_a_dry_run_shows_everything_and_writes_nothing(tmp_path, monkeypatch, capsys):
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
    assert "--kill-on-bad-exit=1 --wait=60 --cpus-per-task=8 " in shown
    assert "/slurm/finish.py --exit_code $code -- " in shown
    assert "wckey" not in shown
    assert f"note: --config_file {tmp_path}/model.json cannot be seen from here" in shown
    assert not list(tmp_path.iterdir())
    assert main(["--dry_run", "--", *NEEDED]) == 0
    shown = capsys.readouterr().out
    assert not re.search(r"--(time|array|gpus-per-node|partition)=", shown)


def test_submitting_from_python(fake_slurm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fake_slurm("sbatch", "Submitted batch job 77\n")
    for name, value in {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "9", "RANK": "3", "SLURM_CONF": "/c", "MINE": "1"}.items():
        monkeypatch.setenv(name, value)
    Path("model.json").write_text("{}")
    own = [argument for argument in NEEDED if "config_file" not in argument]
    job = submit([*own, f"--config_file={ROOT}/configs/tiny.json"], JobOptions(tasks_per_node=2), {"seed": [1, 2]})
    assert (job.job_id, [task.job_id for task in job.tasks]) == ("77", ["77_0", "77_1"])
    assert job.folder.parent == tmp_path / "runs" / ".jobs"
    assert (job.folder / "code" / "training" / "loop.py").read_bytes() == (ROOT / "training" / "loop.py").read_bytes()
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


def test_a_refused_submission_leaves_nothing_behind(fake_slurm, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    fake_slurm("sbatch", error="sbatch: error: invalid partition specified: x\n", code=1)
    assert main(["--partition", "x", "--", *NEEDED]) == 2
    assert "error: sbatch refused the job: sbatch: error: invalid partition specified: x\n" in capsys.readouterr().err
    assert not list((tmp_path / "runs" / ".jobs").iterdir())


def test_another_launchers_variables_do_not_reach_the_job(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("SLURM_SITE_DEFAULT", "1")  # in a login shell, it is there for a reason
    monkeypatch.setenv("MASTER_PORT", "1")
    with outside_any_job():
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
    place = Environment("slurm", job_id="5", restart_count=2)
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURM_PROCID", "0")
    for name, value in {"NTASKS": "1", "LOCALID": "0", "JOB_NODELIST": "localhost", "STEP_ID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)

    def call(code: int, state: str, error: str = "") -> str:
        def loop(given, _description, _make_world, signals):
            assert given == ["--name=run"]
            assert sys.argv == ["train_multi_gpu.py", "--name=run"]
            os.kill(os.getpid(), signal.SIGUSR2)
            assert signals.received == "SIGUSR2"
            write_status(tmp_path / "run", place, state, "", 3, 10)
            if error:
                record_failure(tmp_path / "run", place, error)
            with signals:
                return code

        monkeypatch.setattr("training.loop.main", loop)
        return job()

    yield call
    signal.signal(signal.SIGUSR2, handler)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    sys.argv = arguments
    if hasattr(sys, "tracebacklimit"):
        del sys.tracebacklimit


def test_the_outcome_of_a_job(trained):
    assert trained(0, "finished") == "finished"
    with pytest.raises(SystemExit) as ended:
        trained(0, "requeued")
    assert ended.value.code == 0
    with pytest.raises(TrainingFailed, match=r"^rank 0 on \S+: the loss is nan$"):
        trained(1, "failed", "the loss is nan")


def test_submitit_may_send_the_job_again():
    job = TrainingJob(["--name=run"], "runs/run")
    again = pickle.loads(pickle.dumps(job)).checkpoint()
    assert again.function.arguments == ["--name=run"]
    assert TrainingJob.__module__ == slurm.launch.__name__ == "slurm.launch"


# Without a cluster


def test_local_runs_go_on_after_one_that_failed(tmp_path):
    inputs = make_inputs(tmp_path / "inputs")
    options = {"max_steps": 3, "validate_every": 0, "save_every": 0, "global_batch_size": 16}
    training = flags(inputs, tmp_path / "runs", **options)
    command = [sys.executable, str(ROOT / "slurm" / "launch.py"), "--local", "--sweep", "learning_rate=1e30,1e-2", "--"]
    done = subprocess.run([*command, *training], capture_output=True, text=True, timeout=200, env=environment())
    assert done.returncode == 1, done.stderr
    assert re.search(r"^0 +run-learning_rate=1e30 +1e30 +failed +\d/3 +step \d: .* is nan", done.stdout, re.M)
    assert re.search(r"^1 +run-learning_rate=1e-2 +1e-2 +finished +3/3$", done.stdout, re.M)
    assert not (tmp_path / "runs" / ".jobs").exists()


def test_local_ranks_are_started_by_torchrun(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["--local", "--tasks_per_node", "2", "--sweep", "seed=1,2", "--dry_run", "--", *NEEDED]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert " -m torch.distributed.run --standalone --nproc_per_node=2 " in first
    assert f"{ROOT}/train_multi_gpu.py" in second
    assert "--seed=2" in second
    assert not list(tmp_path.iterdir())


def test_defaults_are_training_s():
    """to_arguments leaves out what is default; it relies on the parser having the same ones."""
    assert parse_config(NEEDED, "") == TrainingConfig("shards/*.shard", "", "model.json", "t.json", name="run")
