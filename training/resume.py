"""Resume: the run folder, and the checkpoint that a run starts from, if it fits."""

from __future__ import annotations

import os
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.objectives import added_objectives
from model import ModelConfig
from training.checkpoint import Checkpoint, CheckpointError, clean, find_newest, locate, set_aside
from training.config import LATER_FLAGS, ConfigError, TrainingConfig, differences
from training.distributed import World, on_main
from training.environment import Environment
from training.inputs import Inputs
from training.metric_logger import read_metrics
from training.optimizers import takes_over
from training.preemption import register_attempt
from training.run_dir import RunFolder, RunView, keeps_row_order, origin
from training.status import ABANDONED, FINISHED, Attempt, checkpoint_folders, list_checkpoints, newest_step, read_status

_WITHOUT_WEIGHTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")  # of a model: a branch may change them


_LOCK_SECONDS = 180.0  # for the processes of a job's last start to notice that there is a newer one


@dataclass(frozen=True)
class Start:
    """Where a run starts: on all ranks its checkpoint (None: step 0), on rank 0 alone its folder and attempt.

    metrics: on all ranks, what metrics.jsonl has of the checkpoint's step, where the run is not finished.
    hours: on rank 0, those that the run has taken up to its checkpoint in all of its starts.
    """

    checkpoint: Checkpoint | None
    metrics: list[dict[str, Any]]
    folder: RunFolder | None
    attempt: Attempt | None
    hours: float | None


def open_run(inputs: Inputs, world: World, stack: ExitStack) -> Start:
    """Open and lock the run folder and find the checkpoint to resume from; rank 0 does, and all ranks learn of it.
    stack: closes the folder. Raises on all ranks where rank 0 refuses to start."""
    config, environment = inputs.config, world.environment
    opened: list[RunFolder] = []
    attempts: list[Attempt] = []

    def open_folder() -> tuple[Checkpoint | None, list[str], list[dict[str, Any]]]:
        restarted, home = was_restarted(environment), config.run_folder
        if environment.restart_count > 0 and not home.exists():
            print(f"note: this job has run before, but there is no {home}: is its disk mounted here?", flush=True)
        if environment.job_id is not None:
            attempts.append(register_attempt(config, environment, newest_step(*checkpoint_folders(home))))
        opened.append(stack.enter_context(closing(RunFolder(home, _LOCK_SECONDS if restarted else 0.0))))
        checkpoint, notes = find_resume_point(opened[0], inputs, restarted, environment.job_id)
        step = checkpoint.step if checkpoint is not None else 0
        status = read_status(home)
        lines = [] if status is not None and status.state == FINISHED else read_metrics(opened[0].metrics)
        return checkpoint, notes, [line for line in lines if line["step"] == step]

    checkpoint, notes, metrics = on_main(world, open_folder)
    if world.is_main:
        for note in notes:
            print(f"note: {note}", flush=True)
    folder = opened[0] if opened else None
    own = checkpoint is not None and checkpoint.path.parent in checkpoint_folders(inputs.config.run_folder)
    hours = None if folder is None else float(checkpoint.record.get("hours", 0)) if checkpoint and own else 0.0
    return Start(checkpoint, metrics, folder, attempts[0] if attempts else None, hours)


def was_restarted(environment: Environment) -> bool:
    """Whether SLURM or torchrun has started this very command before."""
    return environment.restart_count > 0 or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def find_resume_point(
    folder: RunView, inputs: Inputs, restarted: bool = False, job_id: str | None = None, cleanup: bool = True
) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint to resume from (None: start anew) and notes for the user.

    Newer checkpoints of the run are set aside. cleanup: False changes nothing on the disk.
    restarted: this very command has been started before, in SLURM's job `job_id` or by torchrun.
    Raises ConfigError or CheckpointError where the request and what is there do not fit together.
    """
    config, parents = inputs.config, folder.checkpoint_folders
    if cleanup:
        for parent in parents:
            clean(parent)
    lost = [parent for parent in parents[1:] if not parent.is_dir()]
    notes = [f"{parent}, where --spare_checkpoint_dir let the run save, is not there" for parent in lost]
    source = config.checkpoint_filename or config.resume
    earlier = folder.read_config() if folder.used else None
    began, again = _granted(config, earlier, job_id if restarted else "")
    if restarted and source == "never":
        source = "auto"
    elif (began or again) and list_checkpoints(*parents):
        notes.append(f"{folder.path} has begun from --resume {source!r}: it resumes from its own newest checkpoint")
        source = "auto"
    if source == "never":
        if folder.used:
            raise ConfigError(
                f"--resume never: {folder.path} holds a run already; take another --name or --resume auto"
            )
        return None, []
    if source == "auto":
        same_run, (checkpoint, problems) = True, find_newest(*parents)
        if checkpoint is None and problems:
            raise ConfigError(f"--resume auto: no checkpoint in {folder.path} is whole: {'; '.join(problems)}")
        notes += problems
    else:
        checkpoint, same_run = _named(source, folder, notes)
        if folder.used and not same_run and not began:
            raise ConfigError(f"--resume {source!r}: {folder.path} holds another run already; take another --name")
    flags = earlier["flags"] if earlier and same_run else checkpoint.record["flags"] if checkpoint else None
    changed = differences(flags, config) if flags is not None else []
    if changed and same_run:
        raise ConfigError(
            f"{folder.path} holds a run with other settings ({'; '.join(changed)}); repeat them, take another "
            "--name, or branch off with --resume CHECKPOINT --name NEW"
        )
    if flags is not None:
        lacked = {name: later for name, later in LATER_FLAGS.items() if name not in flags}
        notes += [later.note for name, later in lacked.items() if later.note and getattr(config, name) == later.before]
    if checkpoint is not None:
        changed += _check_fit(checkpoint, inputs, same_run)
        for parent in parents:
            notes += set_aside(parent, checkpoint.step, (folder.metrics, folder.samples), rename=cleanup)
    return checkpoint, notes + [f"branching off with a change: {change}" for change in changed]


def _granted(config: TrainingConfig, earlier: dict[str, Any] | None, job_id: str | None) -> tuple[bool, bool]:
    """Whether the run began, and whether job `job_id` last resumed, where --resume PATH says. The same command, given
    again after a kill, then resumes what became of it. job_id: "" for a first start."""
    path, launches = origin(config), (earlier or {}).get("launches") or [{}]
    began, last = (launches[n].get("resumed_from") == path is not None for n in (0, -1))
    return began, last and launches[-1].get("job_id") == job_id


def _named(path: str, folder: RunView, notes: list[str]) -> tuple[Checkpoint, bool]:
    """The checkpoint that --resume names, and whether it is of the run in `folder`. Adds to `notes`."""
    if Path(path).is_file():
        raise ConfigError(
            f"--resume {path!r} is a file, not a checkpoint folder; "
            "preprocessing/import_gpt_bert.py turns a published checkpoint into model weights"
        )
    try:
        checkpoint = locate(path, notes.append)
    except CheckpointError as error:
        raise ConfigError(f"--resume: {error}") from error
    if not checkpoint.holds("optimizer"):
        raise ConfigError(f"--resume {path!r} holds weights alone; --initial_weights starts from them")
    place = checkpoint.path.resolve()
    homes = [home.resolve() for home in (folder.path, *folder.checkpoint_folders)]  # links to another disk among them
    same_run = any(place.is_relative_to(home) for home in homes)
    if same_run and place.name.startswith(ABANDONED):
        raise ConfigError(
            f"--resume {path!r}: the run has left this checkpoint; branch off from it with --name NEW, or rename it"
        )
    return checkpoint, same_run


def _check_fit(checkpoint: Checkpoint, inputs: Inputs, same_run: bool) -> list[str]:
    """What a branch changes besides its flags. Refuses a checkpoint of another model or length, or, within a run, of
    other data. Raises ConfigError."""
    old = ModelConfig.from_json(checkpoint.path / "config.json").to_dict()
    new = inputs.model_config.to_dict()
    keys = [key for key in new if old.get(key) != new[key]]
    changed = [f"{key} was {old[key]!r} and is now {new[key]!r}" for key in keys]
    if keys and (same_run or not set(keys) <= set(_WITHOUT_WEIGHTS)):
        raise ConfigError(f"--config_file does not fit checkpoint {checkpoint.path}: {', '.join(changed)}")
    if same_run:
        _check_data(checkpoint, inputs)
    if checkpoint.step > inputs.config.max_steps and (same_run or "step" not in inputs.config.reset):
        raise ConfigError(
            f"--max_steps is {inputs.config.max_steps} but {checkpoint.path} has done {checkpoint.step} steps already"
        )
    if checkpoint.record.get("objectives", []) != added_objectives():
        changed.append("data/objectives.py holds other objectives")
        if same_run:
            raise ConfigError(
                f"data/objectives.py holds other objectives than checkpoint {checkpoint.path} was trained with; "
                "restore them, or branch off with --resume CHECKPOINT --name NEW"
            )
    if same_run:
        return []
    flags = checkpoint.record["flags"]
    if _saved_data(checkpoint, inputs) != checkpoint.record["data"]:
        changed.append(
            f"--train_path {inputs.config.train_path!r} holds other data or another mix, whose epochs are in another "
            "order: documents of this epoch may come again"
        )
    elif "step" not in inputs.config.reset and (
        not keeps_row_order(flags, inputs.config.to_dict())
        or (
            inputs.builder.mix.moves_with_length
            and (flags.get("planned_steps") or flags["max_steps"]) != inputs.config.planned_length
        )
    ):
        changed.append("rows come in another order from here on, and some of this epoch's may come again")
    new = inputs.config.optimizer
    if (old := flags.get("optimizer", new)) != new:
        kept = "from the moments of the old one, which it scales otherwise" if takes_over(new, old) else "without state"
        changed.append(f"the new optimizer starts {kept}")
    return changed


def _saved_data(checkpoint: Checkpoint, inputs: Inputs) -> str:
    """The identity of today's training data, as the version that wrote the checkpoint would have computed it."""
    early = "held_out" not in checkpoint.record  # of a version that hashed only the ends of the shards
    return inputs.corpus.first_identity() if early else inputs.data_identity


def _check_data(checkpoint: Checkpoint, inputs: Inputs) -> None:
    """Refuse to resume with other shards, or with another held-out set under the same names. Raises ConfigError."""
    record, config = checkpoint.record, inputs.config
    remedy = "restore it, or branch off with --resume CHECKPOINT --name NEW"
    if "held_out" not in record and inputs.corpus.sampled:
        raise ConfigError(
            f"--train_path {config.train_path!r} has fractions, for which {checkpoint.path} took documents in stored "
            "order, where a keyed sample is taken now; branch off with --resume CHECKPOINT --name NEW"
        )
    if record["data"] != _saved_data(checkpoint, inputs):
        raise ConfigError(
            f"--train_path {config.train_path!r} is not the data that {checkpoint.path} was trained on; {remedy}"
        )
    if record.get("held_out") and inputs.held_out_identity not in ("", record["held_out"]):
        raise ConfigError(
            f"--valid_path {config.valid_path!r} is not the data that the run of {checkpoint.path} was validated on; "
            + remedy
        )
