"""Everything a run needs before its first step, checked: tokenizer, model configuration, corpora, plan, run folder."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import platform
import secrets
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from tokenizers import Tokenizer

from data.atomic_io import write_atomically
from data.corpus import Corpus
from data.loader import BatchBuilder, ValidationSet
from data.masking import MaskingOptions
from data.plan import DataPlan, resolve_split
from data.shards import tokenizer_hash
from evaluation.pair_accuracy import PairScorer, read_pair_sets
from evaluation.token_log_probs import SpecialIds
from model import ModelConfig, ModelConfigError
from ops.reference import reference_parts
from report.runs import SAMPLES
from training import kernel_report
from training.checkpoint import SaveError, training_flags
from training.config import LATER_FLAGS, ConfigError, TrainingConfig, later_flag
from training.distributed import World
from training.status import checkpoint_folders, copied_from, list_checkpoints
from training.watchdog import FolderOwner

_ROOT = Path(__file__).resolve().parent.parent
_VOCABULARY_PADDING = 128  # a vocabulary rounded up to a multiple of this is no mistake


@dataclass(frozen=True)
class Inputs:
    """What the files named on the command line hold."""

    config: TrainingConfig
    model_config: ModelConfig
    tokenizer_text: str
    corpus: Corpus
    held_out: ValidationSet | None
    plan: DataPlan
    builder: BatchBuilder
    data_identity: str
    held_out_identity: str  # "" without --valid_path
    pairs: PairScorer | None = None

    @cached_property
    def held_out_longest(self) -> ValidationSet | None:
        """The held-out set in rows of the run's final length; None where rows do not grow."""
        longest = self.plan.longest_row
        if self.held_out is None or longest == self.held_out.seq_length:
            return None
        return self.held_out.in_rows_of(longest)


def _special_id(tokenizer: Tokenizer, token: str, config: TrainingConfig) -> int:
    number = tokenizer.token_to_id(token)
    if number is None:
        raise ConfigError(
            f"--tokenizer_path {config.tokenizer_path!r} has no token {token}; "
            "preprocessing/train_tokenizer.py makes one that fits"
        )
    if number >= config.n_special_tokens:
        raise ConfigError(
            f"--n_special_tokens is {config.n_special_tokens} but {token} has id {number} in {config.tokenizer_path}; "
            f"give at least {number + 1}"
        )
    return number


def _read_tokenizer(path: str) -> tuple[Tokenizer, str]:
    try:
        text = Path(path).read_text(encoding="utf-8")
        return Tokenizer.from_str(text), text
    except OSError as error:
        raise ConfigError(f"--tokenizer_path {path!r} cannot be read: {error.strerror}") from error
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ConfigError(f"--tokenizer_path {path!r} is not a tokenizer.json: {error}") from error


def make_plan(config: TrainingConfig) -> DataPlan:
    """The data schedule that a configuration asks for."""
    return DataPlan(
        max_steps=config.max_steps,
        seq_length=config.seq_length,
        global_batch_size=config.global_batch_size,
        batch_reduction=config.batch_reduction,
        hybrid_numerator=config.hybrid_numerator,
        hybrid_denominator=config.hybrid_denominator,
        hybrid_numerator_end=config.numerator_end,
        mask_p_start=config.mask_p_start,
        mask_p_end=config.mask_p_end,
        milestones=config.length_milestones,
        seed=config.seed,
    )


def _with_later_flags(config: TrainingConfig) -> TrainingConfig:
    """`config` with LATER_FLAGS filled in where they were not given: as the run to go on from has them."""
    left = [name for name in LATER_FLAGS if getattr(config, name) is None]
    folder = RunView(config.run_folder)
    start = folder.path if folder.used else Path(config.checkpoint_filename or config.resume)
    flags = training_flags(start) if left else {}
    return dataclasses.replace(config, **{name: later_flag(flags, name) for name in left})


def read_inputs(config: TrainingConfig) -> Inputs:
    """Open and check all files. Raises ValueError (ConfigError, CorpusError, ShardError), each one sentence."""
    config = _with_later_flags(config)
    tokenizer, text = _read_tokenizer(config.tokenizer_path)
    try:
        model_config = ModelConfig.from_json(config.config_file)
    except ModelConfigError as error:
        raise ConfigError(f"--config_file: {error}") from error
    words = tokenizer.get_vocab_size()
    options = MaskingOptions(
        vocab_size=words,
        mask_id=_special_id(tokenizer, "<mask>", config),
        bos_id=_special_id(tokenizer, "<s>", config),
        pad_id=_special_id(tokenizer, "<pad>", config),
        n_special_tokens=config.n_special_tokens,
        random_p=config.mask_random_p,
        keep_p=config.mask_keep_p,
        even=config.masking == "even",
        row_start=bool(config.row_start),
        seed=config.seed,
    )
    eos = _special_id(tokenizer, "</s>", config) if config.document_end else None
    identity = tokenizer_hash(config.tokenizer_path)
    corpus = Corpus(config.train_path, tokenizer_hash=identity, bos_id=options.bos_id, eos_id=eos, seed=config.seed)
    if not words <= model_config.vocab_size < words + _VOCABULARY_PADDING:
        raise ConfigError(
            f"--config_file {config.config_file!r} has vocab_size {model_config.vocab_size} but --tokenizer_path "
            f"{config.tokenizer_path!r} has {words} tokens; set vocab_size to {words} (or to the next multiple of 64)"
        )
    held_out = None
    if config.valid_path:
        rows = config.validation_steps * config.local_batch_size or None
        valid = Corpus(config.valid_path, tokenizer_hash=identity, bos_id=options.bos_id, eos_id=eos)
        held_out = ValidationSet(valid, dataclasses.replace(options, even=False), config.seq_length, rows=rows)
        _refuse_shared(config, corpus, valid)
    plan = make_plan(config)
    if plan.smallest_batch < 1:
        raise ConfigError(
            f"--global_batch_size is {config.global_batch_size}, which leaves a step without rows once "
            f"--batch_reduction ({config.batch_reduction:g}) and longer rows have divided it; raise it or lower those"
        )
    pairs = None
    if config.evaluate_data:
        tokenizer.encode_special_tokens = True  # "</s>" in a text is text
        special = SpecialIds(options.bos_id, None, options.pad_id, options.mask_id)  # a sentence is no whole document
        pairs = PairScorer(read_pair_sets([config.evaluate_data], "--evaluate_data"), tokenizer, special)
    builder = BatchBuilder(corpus, plan, options)
    held_out_identity = held_out.corpus.identity() if held_out is not None else ""
    return Inputs(
        config, model_config, text, corpus, held_out, plan, builder, corpus.identity(), held_out_identity, pairs
    )


def _refuse_shared(config: TrainingConfig, corpus: Corpus, valid: Corpus) -> None:
    """Refuse shards that are trained on and held out. Raises ConfigError."""
    known = {shard.content_hash: shard for shard in corpus.shards}
    shared = next((shard for shard in valid.shards if shard.content_hash in known), None)
    if shared is not None:
        raise ConfigError(
            f"--valid_path {config.valid_path!r} holds {shared.path}, but --train_path {config.train_path!r} holds it, "
            f"too, as {known[shared.content_hash].path}; give shards that are held out (tokenize_corpus.py "
            "--validation_fraction makes them)"
        )


def check_world(inputs: Inputs, world_size: int) -> str:
    """The resolved --hybrid_split for `world_size` ranks. Raises ConfigError where the batch cannot be shared out."""
    config, plan = inputs.config, inputs.plan
    try:
        split = resolve_split(
            config.hybrid_split,
            world_size,
            config.hybrid_numerator,
            config.hybrid_denominator,
            constant=config.numerator_end in (None, config.hybrid_numerator),
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    # With `ranks`, every rank needs a row of its objective; their numbers differ by at most one from rows / ranks.
    if plan.smallest_batch < world_size:
        raise ConfigError(
            f"--global_batch_size is {config.global_batch_size}: the run's smallest batch has {plan.smallest_batch} "
            f"rows, too few for {world_size} ranks; raise it, lower --batch_reduction or use fewer ranks"
        )
    return split


# The run folder


def git_commit() -> str | None:
    """Commit of this checkout, with a + where files differ from it; None outside git.

    In the copy of the code that slurm/launch.py makes for a job, what that has noted.
    """
    noted = _ROOT / "GIT_COMMIT"
    if noted.is_file():
        return noted.read_text(encoding="utf-8").strip() or None

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(_ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def versions() -> dict[str, str]:
    """Versions on which numbers may depend."""
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "tokenizers": tokenizers.__version__,
    }
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


class RunView:
    """OUTPUT_DIR/NAME, to be read; it need not exist."""

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.samples = path / SAMPLES
        self.config = path / "config.json"

    @property
    def checkpoint_folders(self) -> list[Path]:
        """Where its checkpoints may be, its own folder first."""
        return checkpoint_folders(self.path)

    @property
    def used(self) -> bool:
        """Whether a run has left checkpoints or metrics here."""
        return bool(list_checkpoints(*self.checkpoint_folders)) or (
            self.metrics.exists() and self.metrics.stat().st_size > 0
        )

    def read_config(self) -> dict[str, Any] | None:
        """The config.json of an earlier start; None where there is none. Raises ConfigError where it is damaged."""
        if not self.config.exists():
            return None
        try:
            return json.loads(self.config.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{self.config} cannot be read ({error}); restore it, or take another --name") from error


class RunFolder(RunView):
    """The folder of a run at work. Only rank 0 has one; it is locked while it is open."""

    def __init__(self, path: Path, patience: float = 0.0):
        """Open and lock the folder; `patience`: seconds to wait for a process that has it. Raises ConfigError."""
        super().__init__(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
            self._lock = (path / ".lock").open("a+")
        except OSError as error:
            raise ConfigError(f"--output_dir: {path} cannot be written: {error.strerror}") from error
        self._owner = FolderOwner(path)  # where there are no locks
        if holder := self._acquire(patience):
            self._lock.close()
            raise ConfigError(f"--name: {holder} is training in {path}; wait for it or take another name")
        self._held = {place: os.open(place, os.O_RDONLY) for place in (path, self.checkpoints)}

    def _acquire(self, patience: float) -> str:
        """Take the folder, by its lock or as its owner; who has it, where that stays another process."""
        end = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return ""
            except BlockingIOError:
                holder = "another process"
            except OSError:
                holder = self._owner.claim()
                if not holder:
                    print(f"note: {self.path} is on a file system without locks: owner.json guards it", flush=True)
                    return ""
                holder = f"another process ({holder})"
            if time.monotonic() >= end:
                return holder
            time.sleep(0.5)

    def write_config(self, inputs: Inputs, launch: dict[str, Any]) -> str:
        """Write or extend config.json; returns the run's wandb id."""
        old = self.read_config() or {}
        if original := copied_from(self.path, old):
            print(f"note: {self.path} is a copy of {original}: it gets a wandb run of its own", flush=True)
            old = {**old, "wandb_id": None, "spare_checkpoints": []}
        wandb_id = old.get("wandb_id") or secrets.token_hex(4)
        spare = self._spare(inputs.config, wandb_id, old.get("spare_checkpoints", []))
        corpus = inputs.corpus
        content = {
            "flags": inputs.config.to_dict(),
            "model": inputs.model_config.to_dict(),
            "data": {
                "identity": inputs.data_identity,
                "held_out_identity": inputs.held_out_identity,
                "documents": corpus.num_documents,
                "tokens": corpus.tokens_before_epoch(1),
                "sources": [dataclasses.asdict(source) for source in corpus.sources],
            },
            "versions": versions(),
            "git_commit": git_commit(),
            "folder": str(self.path.resolve()),
            "wandb_id": wandb_id,
            "spare_checkpoints": spare,
            "launches": [*old.get("launches", []), launch],
        }
        write_atomically(self.config, json.dumps(content, indent=1).encode())
        write_atomically(self.path / "tokenizer.json", inputs.tokenizer_text.encode())
        return wandb_id

    def _spare(self, config: TrainingConfig, run_id: str, known: list[str]) -> list[str]:
        """Every folder that --spare_checkpoint_dir has meant for this run, the present one last. Raises ConfigError."""
        if not config.spare_checkpoint_dir:
            return known
        spare = Path(config.spare_checkpoint_dir).resolve() / f"{config.name}_{run_id}" / "checkpoints"
        try:
            spare.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"--spare_checkpoint_dir: {spare} cannot be written: {error.strerror}"
            if not known:
                raise ConfigError(problem) from error
            print(f"note: {problem}", flush=True)  # it was fit when the run began; the run can do without for now
        return [*(path for path in known if path != str(spare)), str(spare)]

    def check(self) -> None:
        """Raise SaveError where the folder is not the one that was opened: what is written there now would be lost."""
        for place, descriptor in self._held.items():
            try:
                same, reason = (
                    os.path.samestat(os.fstat(descriptor), place.stat()),
                    "it was unmounted, moved or replaced",
                )
            except OSError as error:
                same, reason = False, error.strerror
            if not same:
                raise SaveError(f"{place} is not the folder that the run has opened: {reason}")

    def close(self) -> None:
        """Release the folder."""
        self._owner.release()
        self._lock.close()
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held = {}


def origin(config: TrainingConfig) -> str | None:
    """The full path that --resume or --checkpoint_filename names, None where it names none."""
    wish = config.checkpoint_filename or config.resume
    return None if wish in ("auto", "never") else str(Path(wish).resolve())


def describe_launch(inputs: Inputs, world: World, start_step: int) -> dict[str, Any]:
    """What config.json records about one start of the run."""
    device = world.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "command": sys.argv,
        "world_size": world.size,
        "nodes": world.environment.nodes,
        "job_id": world.environment.job_id,
        "restart_count": world.environment.restart_count,
        "device": name,
        "reference": reference_parts(),
        "kernels": kernel_report.line(kernel_report.missing(inputs.config, inputs.model_config, device)),
        "start_step": start_step,
        "resumed_from": origin(inputs.config),
    }
