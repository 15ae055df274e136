"""Checks of the run folder and the shards for slurm/doctor.py: space, speed, locks, clocks, checksums, epochs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from data.corpus import Corpus
from data.shards import MANIFEST_NAME, read_manifest, sha256_file
from data.wording import count, ranks_text, size_text, time_text
from model_extra import build_model
from slurm.doctor_table import FAIL, OK, WARN, Measurements, Row
from training.checkpoint import checkpoint_bytes, list_checkpoints
from training.environment import Environment
from training.inputs import Inputs
from training.resume import find_resume_point, was_restarted
from training.run_dir import RunView
from training.schedules import due

# Beyond these a row is WARN. Times are in seconds.
_SAVE_SECONDS = 120.0  # a checkpoint has to fit between a signal and the end of the job
_CLOCK_SKEW = 2.0
_EPOCHS = 100.0

_WRITTEN = 64 << 20  # bytes of the file that measures the write speed


# The run folder


def count_parameters(inputs: Inputs) -> int:
    """Parameters of the model, without memory for them."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build_model(inputs.model_config).parameters())


def measure_run(inputs: Inputs, environment: Environment) -> dict[str, Any]:
    """The run that the folder holds and the step from which training would resume. Raises as training would."""
    view = RunView(inputs.config.run_folder)
    view.check_unlocked()
    folders = view.checkpoint_folders
    cut_off = sorted(p.name for kind in ("tmp", "old", "gone") for f in folders for p in f.glob(f".{kind}_step_*"))
    checkpoint, notes = find_resume_point(view, inputs, was_restarted(environment), environment.job_id, cleanup=False)
    return {
        "used": view.used,
        "step": checkpoint.step if checkpoint else 0,
        "checkpoint": str(checkpoint.path) if checkpoint else None,
        "notes": notes,
        "cut_off": cut_off,
        "saved": len(list_checkpoints(*folders)),
    }


def assess_run(run: Mapping[str, Any], inputs: Inputs) -> Row:
    """The effect of --resume."""
    folder, last = inputs.config.run_folder, inputs.config.max_steps
    if run["checkpoint"]:
        detail = f"resumes from step {run['step']} of {last}: {run['checkpoint']}"
    else:
        detail = f"{folder} {'holds a run without checkpoints' if run['used'] else 'is unused'}: starts at step 0"
    lines = [detail, *run["notes"]]
    if run["cut_off"]:
        lines.append(f"a save was cut off here ({', '.join(run['cut_off'])}); the next start cleans up")
    if run["step"] == last:
        return Row(
            "run", WARN, f"{folder} is complete: {last} steps are done", "take another --name, or more steps", run
        )
    return Row("run", WARN if len(lines) > 1 else OK, "\n".join(lines), numbers=run)


class FolderProbe:
    """A hidden folder in the run folder, made by rank 0, used by all ranks and removed at the end of its context."""

    def __init__(self, folder: Path):
        self._made: list[Path] = []
        try:
            for path in reversed([folder, *folder.parents]):
                if not path.exists():
                    path.mkdir()
                    self._made.append(path)
            self.path = Path(tempfile.mkdtemp(prefix=".doctor_", dir=folder))
        except OSError:
            self._remove_made()
            raise
        self.token = self.path.name
        self._lock = None

    def measure(self) -> dict[str, Any]:
        """Free space and write speed; leaves a token and a held lock for the other ranks."""
        usage = os.statvfs(self.path)
        free = usage.f_bavail * usage.f_frsize
        size = min(_WRITTEN, free // 2)
        block = os.urandom(min(size, 4 << 20)) or b"x"
        file = self.path / "speed"
        start = time.perf_counter()
        with file.open("wb", buffering=0) as stream:
            written = 0
            while written < size:
                written += stream.write(block)
            os.fsync(stream.fileno())
        rate = written / (time.perf_counter() - start)
        file.unlink()
        (self.path / "token").write_text(self.token)
        self._lock = (self.path / "lock").open("a+")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locks = ""
        except OSError as error:
            locks = error.strerror or str(error)
        return {"path": str(self.path), "token": self.token, "free": free, "rate": rate, "locks": locks}

    def _remove_made(self) -> None:
        for path in reversed(self._made):
            with contextlib.suppress(OSError):  # somebody else has put something there meanwhile
                path.rmdir()

    def __enter__(self) -> FolderProbe:
        return self

    def __exit__(self, *_exception: object) -> None:
        """Remove all that was made."""
        if self._lock is not None:
            self._lock.close()
        shutil.rmtree(self.path, ignore_errors=True)
        self._remove_made()


def measure_shared(probe: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Whether this rank sees the token and the lock of rank 0's probe, and the file system's clock."""
    folder = Path(probe["path"])
    for _ in range(50):  # a network file system may need a moment to show a new folder
        if (folder / "token").exists():
            break
        time.sleep(0.1)
    else:
        return {"host": socket.gethostname(), "sees": False, "locked_out": False, "skew": 0.0}
    sees = (folder / "token").read_text() == probe["token"]
    with (folder / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked_out = False
        except OSError:
            locked_out = True
    own = folder / f"clock_{rank}"
    own.touch()
    skew = own.stat().st_mtime - time.time()
    return {"host": socket.gethostname(), "sees": sees, "locked_out": locked_out, "skew": skew}


def assess_shared(measured: Measurements, probe: Mapping[str, Any], clocks: Measurements) -> list[Row]:
    """One folder for all hosts, with locks and a common clock."""
    blind = [rank for rank, found in measured.items() if not found["sees"]]
    if blind:
        hosts = sorted({measured[rank]["host"] for rank in blind})
        detail = f"ranks {ranks_text(blind)} ({', '.join(hosts)}) do not see files that rank 0 writes to the run folder"
        return [Row("shared folder", FAIL, detail, "--output_dir must lie on a file system that all nodes share")]
    hosts = {found["host"] for found in measured.values()}
    seen = f"seen by {count(len(measured), 'rank')} on {count(len(hosts), 'host')}"
    rows = [Row("shared folder", OK, f"{probe['path'].rpartition('/')[0]} is {seen}")]
    free = [rank for rank, found in measured.items() if not found["locked_out"]]
    if probe["locks"] or free:
        why = probe["locks"] or f"ranks {ranks_text(free)} got a lock that rank 0 holds"
        remedy = "never give two jobs the same --name (Lustre: mount with -o flock)"
        rows.append(Row("file locks", WARN, f"do not work here: {why}", remedy))
    else:
        rows.append(Row("file locks", OK, "flock keeps a second job out of the run folder"))
    skew = max(abs(found["skew"]) for found in measured.values())
    times = [found["time"] for found in clocks.values()] or [0.0]
    apart = max(times) - min(times)
    detail = f"file system and hosts at most {time_text(skew)} apart"
    if len(hosts) > 1:
        detail += f", hosts among each other {time_text(apart)}"
    wrong = max(skew, apart) > _CLOCK_SKEW
    remedy = "start chrony or ntpd on the hosts: times in logs and locks mislead" if wrong else ""
    rows.append(Row("clocks", WARN if wrong else OK, detail, remedy, {"file_system": skew, "hosts": apart}))
    return rows


def assess_space(probe: Mapping[str, Any], run: Mapping[str, Any], inputs: Inputs) -> list[Row]:
    """Room and speed for the checkpoints that are still to come."""
    config = inputs.config
    size = checkpoint_bytes(count_parameters(inputs))
    later = range(run["step"] + 1, config.max_steps + 1)
    always = {*config.save_steps, *(() if config.save_weights_only else inputs.named_checkpoints)}
    kept = sum(step in always for step in later)
    regular = sum(due(step, config.save_every, config.max_steps) and step not in always for step in later)
    if config.keep_last:  # one more while the oldest is not deleted yet
        room = max(0, config.keep_last + 1 - run["saved"])
        regular = max(1, min(regular, room))
    named = sum(len(inputs.named_checkpoints.get(step, ())) for step in later) * config.save_weights_only
    need, free = (regular + kept) * size + named * size // 2, probe["free"]
    plan = f"{count(regular + kept, 'checkpoint')} of {size_text(size)} = {size_text(need)}"
    numbers = {"checkpoint_bytes": size, "checkpoints": regular + kept, "free": free, "write_rate": probe["rate"]}
    if free < need:
        detail = f"{size_text(free)} free, but up to {plan} are to be written"
        remedy = "free space, change --output_dir, keep fewer (--keep_last 2) or save less often (--save_every)"
        rows = [Row("disk space", FAIL, detail, remedy, numbers)]
    else:
        rows = [Row("disk space", OK, f"{size_text(free)} free for {plan} (without quotas)", numbers=numbers)]
    if not probe["rate"]:
        return rows
    seconds = size / probe["rate"]
    detail = f"{probe['rate'] / 1e6:,.0f} MB/s with fsync: a checkpoint takes about {time_text(seconds)}"
    slow = seconds > _SAVE_SECONDS
    remedy = "a stopped job may be killed while it saves: send the signal earlier (sbatch --signal)" if slow else ""
    rows.append(Row("write speed", WARN if slow else OK, detail, remedy, numbers))
    return rows


# Shards


def measure_shards(corpus: Corpus, checksums: str, rank: int, world_size: int) -> dict[str, Any]:
    """Shards against their manifests: sizes and counts on every rank, SHA-256 divided among the ranks. `checksums`:
    full: of all shards; quick: of the first and the last; off."""
    manifests = {folder: read_manifest(folder) for folder in {s.path.parent for s in corpus.shards} if _listed(folder)}
    problems, unlisted, count = [], 0, len(corpus.shards)
    chosen = {"full": [*range(count)], "quick": sorted({0, count - 1}), "off": []}[checksums]
    mine = set(chosen[rank::world_size])
    read, start = 0, time.perf_counter()
    for number, shard in enumerate(corpus.shards):
        manifest = manifests.get(shard.path.parent)
        if manifest is None:
            unlisted += 1
            continue
        entry = next((entry for entry in manifest["shards"] if entry["file"] == shard.path.name), None)
        if entry is None:
            problems.append(f"{shard.path} is not listed in {MANIFEST_NAME}")
            continue
        size = shard.path.stat().st_size
        actual: dict[str, Any] = {"bytes": size, "documents": shard.num_documents, "tokens": shard.num_tokens}
        if number in mine:
            actual["sha256"] = sha256_file(shard.path)
            read += size
        problems += [
            f"{shard.path}: {name} is {value}, {MANIFEST_NAME} says {entry[name]}"
            for name, value in actual.items()
            if value != entry[name]
        ]
    problems += [
        f"{folder / MANIFEST_NAME} names another tokenizer than its shards"
        for folder, manifest in manifests.items()
        if manifest["tokenizer_hash"] != corpus.shards[0].tokenizer_hash
    ]
    seconds = time.perf_counter() - start
    return {"problems": problems, "unlisted": unlisted, "read": read, "seconds": seconds, "chosen": len(chosen)}


def _listed(folder: Path) -> bool:
    return (folder / MANIFEST_NAME).exists()


def assess_shards(measured: Measurements, name: str, corpus: Corpus) -> Row:
    """Shards are what their manifests say."""
    problems = sorted({problem for found in measured.values() for problem in found["problems"]})
    first, read = measured[0], sum(found["read"] for found in measured.values())
    seconds = max(found["seconds"] for found in measured.values())
    total = sum(shard.path.stat().st_size for shard in corpus.shards)
    detail = f"{count(len(corpus.shards), 'shard')}, {size_text(total)}, {corpus.num_documents:,} documents, "
    detail += f"{corpus.num_tokens:,} tokens"
    numbers = {"shards": len(corpus.shards), "bytes": total, "bytes_read": read, "seconds": seconds}
    if problems:
        more = [f"and {len(problems) - 4} more"] if len(problems) > 4 else []
        remedy = "copy the shards again or make them again with preprocessing/tokenize_corpus.py"
        return Row(name, FAIL, "\n".join([*problems[:4], *more]), remedy, numbers)
    if first["unlisted"]:
        detail += f"; {first['unlisted']} without a {MANIFEST_NAME} beside them: their content cannot be checked"
        return Row(name, WARN, detail, "copy the manifest too, so that damage shows", numbers)
    if first["chosen"]:
        rate = f" at {read / seconds / 1e6:,.0f} MB/s" if read > 1 << 20 else ""
        detail += f"; SHA-256 of {first['chosen']} right{rate}"
    else:
        detail += "; SHA-256 not checked (--checksums off)"
    return Row(name, OK, detail, numbers=numbers)


def assess_epochs(inputs: Inputs) -> Row:
    """How often the plan reads the corpus."""
    tokens = inputs.corpus.tokens_before_epoch(1)
    of = inputs.plan.objectives
    epochs = {each.name: inputs.plan.objective_tokens(number) / tokens for number, each in enumerate(of)}
    detail = ", ".join(f"{number:.2f} {name}" for name, number in epochs.items())
    detail += f", of {tokens:,} tokens with <s> and </s>"
    many = max(epochs.values()) > _EPOCHS
    remedy = "more text, fewer --max_steps or a smaller --global_batch_size" if many else ""
    return Row("epochs", WARN if many else OK, detail, remedy, epochs)
