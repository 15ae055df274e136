"""Submit training to SLURM through submitit: one run or a sweep, from a login shell or from Python.

    python slurm/launch.py --nodes 2 --gpus_per_node 4 --time 4:00:00 --partition gpu -- <flags of training>
    python slurm/launch.py --time 60 --sweep learning_rate=1e-2,5e-3 --sweep seed=1,2,3 -- <flags of training>
    python slurm/launch.py --finetune --sweep only=cola,rte --sweep seed=0,1 -- <MODEL and flags of finetune.py>
    python slurm/launch.py --status JOB_FOLDER|JOB_ID [--follow]

Flags of training (train_multi_gpu.py --help) stand after `--` and are checked here, before anything waits in a queue.
The job runs a copy of the code, saves and requeues itself when it has to stop, and resumes from its checkpoint.
A sweep is one job array, with a table of what each task runs. --dry_run shows everything and submits nothing; --local
runs the same on this machine, one run after the other. From Python: `submit` below.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from data.cli import Parser
from slurm.grid import FinetuneJob, check_grid, how_to_join, plan_grid
from slurm.job_options import (
    PYTHON,
    JobOptions,
    LaunchError,
    clean_environment,
    flags_file,
    new_folder,
    submitit_parameters,
)
from slurm.job_states import RunOutcome
from slurm.jobs import Job, Task, TaskReport, exit_code, find_job, follow, last_step, reports_table, tasks_table
from slurm.snapshot import SITE_FILE, SnapshotError, take_snapshot
from slurm.sweep import Axis, SweepError, make_axis, parse_axis
from slurm.tasks import base_name, is_list, missing_files, plan_tasks
from training.config import FIELDS, ConfigError
from training.environment import read_environment
from training.errors import DONE
from training.preemption import early_signals
from training.status import FINISHED, REQUEUE_WANTED, REQUEUED, STOPPED, first_failure, read_status

_ROOT = Path(__file__).resolve().parent.parent
_JOBS = ".jobs"  # in OUTPUT_DIR: the folder of job folders
_MANY = 1_000_000  # submitit counts every signal of a job of up to 10 minutes as a time-out


# In the job


class TrainingFailed(RuntimeError):
    """The run in a job failed; the message is the error of the rank that failed first."""


class TrainingJob:
    """The callable that submitit pickles and calls in every task of a job: training as train_multi_gpu.py starts it."""

    def __init__(self, arguments: Sequence[str], run_folder: str):
        self.arguments = list(arguments)
        self.run_folder = run_folder

    def __call__(self) -> str:
        """Train until done or stopped. Raises TrainingFailed, which ends up in submitit's result and log."""
        # From here on a signal does what it does to train_multi_gpu.py: save at the next step and requeue. submitit's
        # own handler, which would otherwise be restored in the end, must not requeue a second time.
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        signals = early_signals()

        from train_multi_gpu import main

        sys.argv = ["train_multi_gpu.py", *self.arguments]  # for the run's records
        code = main(self.arguments, signals)
        if code != DONE:
            error = _failure(Path(self.run_folder), read_environment(os.environ).job_id)
            sys.tracebacklimit = 0  # where in this file it was raised helps nobody
            raise TrainingFailed(error or f"training ended with exit code {code}; see its log")
        status = read_status(Path(self.run_folder))
        # Rank 0 alone writes the status, perhaps only now; the others know that the run has stopped early.
        others = signals.stopped_early and read_environment(os.environ).rank > 0
        if others or (status is not None and status.state in (REQUEUED, REQUEUE_WANTED)):
            raise SystemExit(0)  # no Exception, so submitit leaves no result: the job is not done
        return status.state if status is not None else FINISHED

    def checkpoint(self):
        """For submitit, where a signal comes before __call__ has its handlers: the same again, which resumes."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def _failure(run_folder: Path, job_id: str | None, restart: int = 0, since: float = 0.0) -> str:
    """The error of the rank that failed first, in the last start that recorded one, from `restart` on; "" if none."""
    prefix, restarts = f"{job_id or 'none'}_", {restart}
    for path in (run_folder / "failures").glob(f"{prefix}*.json"):
        number = path.stem.removeprefix(prefix).split("_")[0]
        restarts |= {int(number)} if number.isdigit() else set()
    failure = first_failure(run_folder, job_id, max(restarts))
    if failure is None or failure.time < since:
        return ""
    return f"rank {failure.rank} on {failure.host}: {failure.error}"


def read_run(task: Task) -> RunOutcome:
    """A submitted task by its run folder; files of other jobs that ran there do not count."""
    folder = Path(task.run_folder)
    status = read_status(folder)
    if status is None or status.job_id != task.job_id:
        return RunOutcome(error=_failure(folder, task.job_id))
    return RunOutcome(status.state, status.reason, _failure(folder, task.job_id, status.restart_count))


# Submitting


def _submitit():
    try:
        import submitit
    except ImportError:
        raise LaunchError("submitit is not installed in this environment: pip install 'submitit>=1.5'") from None
    return submitit


def _job_folders(options: JobOptions, tasks: Sequence[Task]) -> Path:
    """The folder of job folders."""
    parent = Path.cwd() / (options.log_folder or Path(tasks[0].run_folder).parent / _JOBS)
    if "%" in str(parent):
        raise LaunchError(f"{parent} has a % in its name, which SLURM would replace; choose another --log_folder")
    return parent


def _with_snapshot(task: Task, code: Path) -> Task:
    """A model configuration of the checkout (configs/base.json) is part of its code: the job reads the copy."""
    arguments = []
    for argument in task.arguments:
        flag, _, value = argument.partition("=")
        if flag == "--config_file" and Path(value).resolve().is_relative_to(_ROOT):
            copy = code / Path(value).resolve().relative_to(_ROOT)
            argument = f"{flag}={copy}" if copy.is_file() else argument
        arguments.append(argument)
    return dataclasses.replace(task, arguments=arguments)


def _plan(arguments: Sequence[str], options: JobOptions, axes: Sequence[Axis], finetune: bool) -> list[Task]:
    if not finetune:
        return plan_tasks(arguments, axes, Path.cwd())
    check_grid(options)
    return plan_grid(arguments, axes, Path.cwd())


def _submit(arguments: Sequence[str], options: JobOptions, axes: Sequence[Axis], finetune: bool = False) -> Job:
    submitit = _submitit()
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    tasks = _plan(arguments, options, axes, finetune)
    if shutil.which("sbatch") is None or shutil.which("srun") is None:
        raise LaunchError("sbatch is not installed on this host: use a login node of the cluster, or --local")
    parent, name = _job_folders(options, tasks), base_name(tasks, axes)
    folder = new_folder(parent, name)
    Path(tasks[0].run_folder).parent.mkdir(parents=True, exist_ok=True)
    try:
        code, copied = _ROOT, {}
        if options.snapshot:
            outputs = {Path(task.run_folder).parent for task in tasks}
            taken = take_snapshot(_ROOT, folder / "code", without=[parent, *outputs])
            code, copied = taken.folder, {"commit": taken.commit, "files": taken.files}
            tasks = [_with_snapshot(task, code) for task in tasks]
        for task in tasks:
            content = "".join(f"{argument}\0" for argument in task.arguments)
            flags_file(folder, task.index).write_text(content, encoding="utf-8")
        executor = submitit.SlurmExecutor(folder=folder, max_num_timeout=_MANY, python=PYTHON)
        has_site_file = (code / SITE_FILE).is_file()
        given = (options, name, folder, code, has_site_file, len(tasks), not finetune)
        executor.update_parameters(**submitit_parameters(*given))
        here = os.getcwd()
        with clean_environment(), executor.batch():
            submitted = [
                executor.submit(
                    FinetuneJob(task.arguments, task.run_folder, here)
                    if finetune
                    else TrainingJob(task.arguments, task.run_folder)
                )
                for task in tasks
            ]
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, FailedJobError | FailedSubmissionError):
            raise LaunchError(f"sbatch refused the job: {' '.join(str(error).split())}") from error
        raise
    tasks = [dataclasses.replace(task, job_id=job.job_id) for task, job in zip(tasks, submitted, strict=True)]
    job = Job(folder, tasks[0].job_id.split("_")[0], tasks, read_run)
    job.save(
        submitted=datetime.now().astimezone().isoformat(timespec="seconds"),
        command=[sys.executable, *sys.argv],
        working_folder=os.getcwd(),
        options=dataclasses.asdict(options),
        code={"folder": str(code), **copied},
    )
    return job


def submit(
    arguments: Sequence[str], options: JobOptions | None = None, sweep: Mapping[str, Sequence[object]] | None = None
) -> Job:
    """Submit training with `arguments` (flags of train_multi_gpu.py), or one run for each combination of `sweep`.

    sweep: values by flag, such as {"learning_rate": ["1e-2", "5e-3"], "seed": [1, 2]}. Relative paths are relative to
    the present folder. Raises ConfigError, SweepError, SnapshotError or LaunchError, each one sentence; exits for an
    unknown flag.

        job = submit(["--recipe", "r.json", "--name", "a"], JobOptions(gpus_per_node=4, time="4:00:00"))
        print(job.job_id, job.table())
        job.wait()
    """
    axes = [make_axis(flag, [str(value) for value in values]) for flag, values in (sweep or {}).items()]
    return _submit(arguments, options or JobOptions(), axes)


def _describe(job: Job, options: JobOptions) -> str:
    """A submitted job, and the commands that concern it."""
    ranks = options.nodes * options.tasks
    each = f"{ranks} rank{'s' if ranks > 1 else ''}"
    array = len(job.tasks) > 1
    what = f"a job array of {len(job.tasks)} runs, each of {each}" if array else f"one run of {each}"
    code = f"{job.folder}/code (a copy)" if options.snapshot else f"{_ROOT} (no copy: changes there change the job)"
    log = job.folder / f"{job.job_id}_TASK_RANK_log.out" if array else job.log(job.tasks[0])
    return "\n".join(
        [
            f"submitted job {job.job_id}: {what}\n\n{tasks_table(job.tasks)}\n",
            f"runs    {Path(job.tasks[0].run_folder).parent}",
            f"code    {code}",
            f"log     {log}",
            f"status  python slurm/launch.py --status {job.folder}",
            f"stop    scancel {job.job_id}",
            *missing_files(job.tasks),
        ]
    )


def _dry_run(arguments: Sequence[str], options: JobOptions, axes: Sequence[Axis], finetune: bool) -> int:
    """Print everything that a submission would use; submit and write nothing."""
    _submitit()
    from submitit.slurm.slurm import _make_sbatch_string  # its executor needs sbatch on the machine

    tasks = _plan(arguments, options, axes, finetune)
    name = base_name(tasks, axes)
    folder = _job_folders(options, tasks) / f"{name}-DATE-TIME"
    code = folder / "code" if options.snapshot else _ROOT
    has_site_file = (_ROOT / SITE_FILE).is_file()
    parameters = submitit_parameters(options, name, folder, code, has_site_file, len(tasks), not finetune)
    count = {"map_count": len(tasks)} if len(tasks) > 1 else {}
    command = f"{PYTHON} -u -m submitit.core._submit {shlex.quote(str(folder))}"
    print(_make_sbatch_string(command=command, folder=folder, **count, **parameters))
    print("# each rank then calls, in that process:")
    for task in tasks:
        print(shlex.join(["evaluation/finetune.py" if finetune else "train_multi_gpu.py", *task.arguments]))
    print(f"\n{tasks_table(tasks)}\n")
    print("\n".join([*missing_files(tasks), "nothing was submitted (--dry_run)"]))
    return 0


# Without a cluster


def _run_locally(
    arguments: Sequence[str], options: JobOptions, axes: Sequence[Axis], finetune: bool, dry_run: bool
) -> int:
    """The same runs on this machine, one after the other. Returns the exit code: 1 where any of them failed."""
    if options.nodes > 1:
        raise LaunchError(f"--local is this machine alone, and --nodes is {options.nodes}")
    tasks = _plan(arguments, options, axes, finetune)
    if dry_run:
        commands = "\n".join(shlex.join(_local_command(task, options, finetune)) for task in tasks)
        print(f"{commands}\n\n{tasks_table(tasks)}\n\nnothing was run (--dry_run)")
        return 0
    Path(tasks[0].run_folder).parent.mkdir(parents=True, exist_ok=True)
    reports: list[TaskReport] = []
    interrupted = False
    for task in tasks:
        if interrupted:
            reports.append(TaskReport(task, "skipped", None, "interrupted before it began"))
            continue
        print(f"[{task.index + 1}/{len(tasks)}] {task.name}", flush=True)
        report, interrupted = _run_one(task, options, finetune)
        reports.append(report)
    print(f"\n{reports_table(reports)}", flush=True)
    return exit_code(reports)


def _local_command(task: Task, options: JobOptions, finetune: bool) -> list[str]:
    if finetune:
        return [sys.executable, str(_ROOT / "evaluation" / "finetune.py"), *task.arguments]
    if options.tasks == 1:
        return [sys.executable, str(_ROOT / "train_single_gpu.py"), *task.arguments]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.tasks}"]
    return [*launcher, str(_ROOT / "train_multi_gpu.py"), *task.arguments]


def _run_one(task: Task, options: JobOptions, finetune: bool) -> tuple[TaskReport, bool]:
    """Run a task to its end; and whether Ctrl-C was pressed, upon which training saves and ends."""
    began, interrupted = datetime.now(timezone.utc).replace(microsecond=0), False
    with clean_environment():
        environment = dict(os.environ)
    if options.tasks > 1:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // options.tasks)))
    process = subprocess.Popen(_local_command(task, options, finetune), env=environment)
    while True:
        try:
            code = process.wait()
            break
        except KeyboardInterrupt:  # the terminal has sent it to the run too
            interrupted = True
    folder = Path(task.run_folder)
    status = read_status(folder)
    if status is not None and datetime.fromisoformat(status.time) < began:
        status = None  # of an earlier run
    state, reason = (status.state, status.reason) if status is not None else (FINISHED, "")
    if code != DONE and (status is None or status.state != STOPPED):  # stopped by SIGTERM, say: nothing failed
        state, reason = "failed", _failure(folder, None, since=began.timestamp()) or reason
        reason = reason or f"exit code {code}; its output says why"
    elif status is None and interrupted:
        state, reason = STOPPED, "interrupted"
    return TaskReport(task, state, last_step(folder), reason), interrupted


# Command line


def _parser() -> Parser:
    parser = Parser(
        usage="launch.py [job options] [--sweep FLAG=VALUE,VALUE] -- <flags of training>",
        description=__doc__,
        see="--help; flags of training stand after --",
        argument_default=argparse.SUPPRESS,
    )
    job = parser.add_argument_group("the job (what is left out is left to SLURM)")
    job.add_argument("--nodes", type=int, metavar="N", help="nodes (default: 1)")
    job.add_argument("--gpus_per_node", type=int, metavar="N", help="GPUs on each node (default: none, for the CPU)")
    job.add_argument("--tasks_per_node", type=int, metavar="N", help="ranks on each node (default: one a GPU, or one)")
    job.add_argument("--cpus_per_task", type=int, metavar="N", help="CPU cores of each rank")
    job.add_argument("--mem", metavar="SIZE", help="memory of each node, such as 64G")
    job.add_argument(
        "--time", metavar="T", help="limit: minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S (4:00 is 4 minutes)"
    )
    for name in ("partition", "account", "qos", "constraint", "exclude", "dependency"):
        job.add_argument(f"--{name}", metavar=name.upper(), help="as for sbatch")
    text = "seconds before the limit at which SLURM signals the ranks, which save and requeue (default: 120)"
    job.add_argument("--signal_delay", type=int, metavar="S", help=text)
    job.add_argument("--job_name", metavar="NAME", help="name in the queue (default: the run's)")
    text = "start again, in the allocation where possible, after hardware or network failed (see slurm/README.md)"
    job.add_argument("--requeue_on_crash", action="store_true", help=text)
    text = "with it: at once without nodes that died, as long as N are left (default: 0, SLURM finds others)"
    job.add_argument("--least_nodes", type=int, metavar="N", help=text)
    text = "any other option of sbatch, such as mail-type=END, exclusive or reservation=R; repeatable"
    job.add_argument("--sbatch", action="append", metavar="KEY[=VALUE]", help=text)
    text = "shell line before the ranks start, such as 'module load cuda'; repeatable, after slurm/site.env"
    job.add_argument("--setup", action="append", metavar="LINE", help=text)
    job.add_argument("--log_folder", metavar="FOLDER", help=f"folder of job folders (default: OUTPUT_DIR/{_JOBS})")
    text = "run from this checkout instead of a copy of it: what changes here changes a queued or requeued job"
    job.add_argument("--no-snapshot", "--no_snapshot", dest="snapshot", action="store_false", help=text)
    sweep = parser.add_argument_group("sweeps")
    text = (
        "one run for each value, and for each combination where it is repeated; names of runs get -FLAG=VALUE. Lists "
        "are joined by colons: length_milestones=0.7:0.9,0.5 are two values"
    )
    sweep.add_argument("--sweep", action="append", metavar="FLAG=V,V", help=text)
    sweep.add_argument("--array_parallelism", type=int, metavar="N", help="runs at the same time (default: all)")
    other = parser.add_argument_group("what to do")
    text = "fine-tune in place of training: MODEL and flags of evaluation/finetune.py after --, --output a folder"
    other.add_argument("--finetune", action="store_true", help=text)
    other.add_argument("--follow", action="store_true", help="show the log until the job ends; exit 0 if all went well")
    other.add_argument("--dry_run", action="store_true", help="print batch file, commands and table; submit nothing")
    other.add_argument("--local", action="store_true", help="run on this machine, without SLURM, one after the other")
    other.add_argument("--status", metavar="JOB", help="the table of a job, by its folder or id; exit 1 if any failed")
    return parser


def _parse(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The launcher's own flags, and training's."""
    parser = _parser()
    split = list(arguments).index("--") if "--" in arguments else len(arguments)
    known, unknown = parser.parse_known_args(arguments[:split])
    if unknown:
        flag = unknown[0].lstrip("-").split("=")[0].removeprefix("no-")
        if flag in FIELDS or flag == "recipe":
            parser.error(f"--{flag} is a flag of training and belongs after --")
        parser.refuse(unknown[0])
    return vars(known), list(arguments[split + 1 :])


def _act(given: dict[str, Any], training: Sequence[str]) -> int:
    if "status" in given:
        folders = Path(given.get("log_folder", Path("runs", _JOBS)))
        job = find_job(given["status"], folders, read_run)
        if "follow" in given:
            return follow(job)
        reports = job.reports()
        print(f"job {job.job_id} in {job.folder}\n{job.table(reports)}")
        return exit_code(reports)
    names = {spec.name for spec in dataclasses.fields(JobOptions)}
    chosen: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items() if k in names}
    options = JobOptions(**chosen)
    finetune = "finetune" in given
    axes = [parse_axis(text, is_list) for text in given.get("sweep", [])]
    if "local" in given:
        return _run_locally(training, options, axes, finetune, "dry_run" in given)
    if "dry_run" in given:
        return _dry_run(training, options, axes, finetune)
    job = _submit(training, options, axes, finetune)
    print("\n".join([_describe(job, options), *([how_to_join(job.tasks)] if finetune else [])]), flush=True)
    return follow(job) if "follow" in given else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    given, training = _parse(sys.argv[1:] if arguments is None else arguments)
    try:
        return _act(given, training)
    except (ConfigError, SweepError, SnapshotError, LaunchError) as error:
        print(f"error: {error}", file=sys.stderr)
    except BrokenPipeError:  # `launch.py ... | head`: what was to be done has been done
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"error: {error.filename or 'the job folder'}: {error.strerror or error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    # By its package's name: what submitit pickles must not belong to `__main__`, which in the job is submitit itself.
    from slurm.launch import main as main_of_the_package

    sys.exit(main_of_the_package())
