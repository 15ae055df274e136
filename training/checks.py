"""What slurm/doctor.py looks at before a run: the machines, the network, the run folder, the shards, a real step.

Most checks come in two parts: `measure_...` runs on every rank and returns facts that JSON can hold, and `judge_...`
turns all ranks' facts, by rank, into rows of the table. Limits behind a WARN are the constants below. Nothing prints.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import re
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.cuda.nccl import version as nccl_version

from data.corpus import Corpus
from data.plan import CAUSAL, MASKED, OBJECTIVES
from data.shards import MANIFEST_NAME, read_manifest, sha256_file
from model_extra import build_model
from slurm.environment import Environment
from slurm.preemption import job_facts
from training.checkpoint import find_newest, list_checkpoints
from training.config import ConfigError
from training.distributed import World
from training.loop import due
from training.setup import Inputs, RunFolder, _git_commit, find_start, versions

OK, WARN, FAIL, SKIP = "OK", "WARN", "FAIL", "SKIP"

# Beyond these a row is WARN. Speeds are in bytes a second, times in seconds.
_FOREIGN_MEMORY = 0.05  # share of a GPU's memory in use before this run takes any; a CUDA context is below 3 %
_NODE_BANDWIDTH = 5e9  # NCCL within a node: PCIe reaches it; less means that data takes a way through the network
_NETWORK_BANDWIDTH = 1e9  # NCCL between nodes: less means Ethernet where there may be InfiniBand
_HOST_LATENCY = 0.02  # an all-reduce of the hosts happens in every step
_SAVE_SECONDS = 120.0  # a checkpoint has to fit between a signal and the end of the job
_CLOCK_SKEW = 2.0
_EPOCHS = 100.0

_WRITTEN = 64 << 20  # bytes of the file that measures the write speed
_REDUCED = {"cuda": (4 << 20, 64 << 20, 256 << 20), "cpu": (1 << 20, 4 << 20)}  # bytes of an all-reduce


@dataclass(frozen=True)
class Row:
    """One line of the table. detail: may have several lines. remedy: what to do. facts: numbers for --json."""

    check: str
    result: str
    detail: str
    remedy: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


Facts = Mapping[int, dict[str, Any]]  # by rank


# Words


def size_text(count: float) -> str:
    """A number of bytes for people."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count / 2**10:.1f} KiB"


def time_text(seconds: float) -> str:
    """A duration for people."""
    minutes, hours = seconds / 60, seconds / 3600
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if minutes < 2:
        return f"{seconds:.3g} s"
    if hours < 2:
        return f"{minutes:.0f} min"
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} days"


def count(number: int, word: str) -> str:
    """`1 rank`, `2 ranks`, `3 micro-batches`."""
    return f"{number:,} {word}" + ("" if number == 1 else "es" if word.endswith("ch") else "s")


def ranks_text(ranks: Iterable[int]) -> str:
    """`0-3, 6` for 0, 1, 2, 3, 6."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _by_value(facts: Facts, key: str) -> dict[Any, list[int]]:
    """The values of a fact with the ranks that have them."""
    found: dict[Any, list[int]] = {}
    for rank, values in facts.items():
        found.setdefault(values[key], []).append(rank)
    return found


def _spread(found: Mapping[Any, list[int]]) -> str:
    return "; ".join(f"{value} on ranks {ranks_text(ranks)}" for value, ranks in found.items())


# Ranks, devices, versions, processors


def judge_environment(environment: Environment) -> Row:
    """The launcher and what is known of the job."""
    if environment.launcher == "none":
        return Row("environment", OK, "one process: no srun or torchrun variables")
    where = f"{environment.master_addr}:{environment.master_port}"
    ranks, nodes = count(environment.world_size, "rank"), count(environment.nodes, "node")
    lines = [f"{environment.launcher}, {ranks} on {nodes}, rank 0 at {where}"]
    left = seconds_left(environment)
    if environment.job_id is not None:
        ends = f", ends in {time_text(left)}" if left is not None else ", end unknown"
        lines.append(f"SLURM job {environment.job_id}, start {environment.restart_count + 1}{ends}")
    facts = {"launcher": environment.launcher, "world_size": environment.world_size, "seconds_left": left}
    return Row("environment", OK, "\n".join(lines), facts=facts)


def seconds_left(environment: Environment) -> float | None:
    """Until the job's end; None where that is not known."""
    if environment.end_time is not None:
        return max(0.0, environment.end_time - time.time())
    facts = job_facts(environment.job_id) if environment.job_id else None
    return facts.seconds_left if facts else None


def measure_place(environment: Environment, device: torch.device) -> dict[str, Any]:
    """Where this rank runs, and on what."""
    facts: dict[str, Any] = {
        "host": socket.gethostname(),
        "local_rank": environment.local_rank,
        "type": device.type,
        "cores": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)],
        "threads": torch.get_num_threads(),
        "gpu": None,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        slot = f"{getattr(properties, 'pci_bus_id', 0):02x}:{getattr(properties, 'pci_device_id', 0):02x}"
        facts["gpu"] = {
            "index": device.index,
            "uuid": str(getattr(properties, "uuid", f"{slot} {device.index}")),
            "pci": slot,
            "name": properties.name,
            "free": free,
            "total": total,
            "bf16": torch.cuda.is_bf16_supported(including_emulation=False),
            "driver": _driver_version(),
        }
    else:
        facts["unused_gpu"] = Path("/dev/nvidia0").exists() or Path("/dev/kfd").exists()
    return facts


def _driver_version() -> str:
    """Of the GPU's kernel module; "" where it cannot be read."""
    for path in ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version"):
        with contextlib.suppress(OSError):
            found = re.search(r"\b\d+\.\d+(\.\d+)*\b", Path(path).read_text())
            return found[0] if found else ""
    return ""


def judge_ranks(facts: Facts, environment: Environment) -> Row:
    """Ranks by host, each on a device of its own."""
    hosts = _by_value(facts, "host")
    lines = []
    for host, ranks in hosts.items():
        gpus = [facts[rank]["gpu"] for rank in ranks]
        on = facts[ranks[0]]["type"].upper()
        if all(gpus):
            on = f"GPU{'s' * (len(gpus) > 1)} {', '.join(gpu['pci'] for gpu in gpus)}"
        lines.append(f"{host}: rank{'s' * (len(ranks) > 1)} {ranks_text(ranks)} on {on}")
    hidden = len(lines) - 8
    lines[8:] = [f"and {hidden} more hosts"] if hidden > 0 else []
    owners: dict[tuple[str, str], list[int]] = {}
    for rank, place in facts.items():
        if place["gpu"]:
            owners.setdefault((place["host"], place["gpu"]["uuid"]), []).append(rank)
    shared = [f"ranks {ranks_text(r)} share one GPU of {host}" for (host, _), r in owners.items() if len(r) > 1]
    kinds = _by_value(facts, "type")
    numbers = {"hosts": hosts}
    if shared:
        remedy = "start one task per GPU that is visible to the job: --ntasks-per-node=N with --gpus-per-node=N"
        return Row("ranks", FAIL, "\n".join([*lines, *shared]), remedy, numbers)
    if len(kinds) > 1:
        remedy = "look at nvidia-smi on the hosts without CUDA, or leave them out (sbatch --exclude)"
        return Row("ranks", FAIL, _spread(kinds), remedy, numbers)
    if len({len(ranks) for ranks in hosts.values()}) > 1:
        lines.append("the hosts have different numbers of ranks: the run is the same, at the pace of the fullest")
        return Row("ranks", WARN, "\n".join(lines), "--ntasks-per-node makes them equal", numbers)
    if environment.launcher != "none" and len(hosts) != environment.nodes:
        lines.append(f"the launcher speaks of {environment.nodes} nodes, the ranks run on {len(hosts)} hosts")
        return Row("ranks", WARN, "\n".join(lines), "give --nodes and --ntasks-per-node to srun", numbers)
    return Row("ranks", OK, "\n".join(lines), facts=numbers)


def judge_devices(facts: Facts, wish: str, mixed_precision: bool | None) -> Row:
    """GPUs of one model, with their memory free and bf16; or CPUs on purpose."""
    gpus = {rank: place["gpu"] for rank, place in facts.items() if place["gpu"]}
    if not gpus:
        idle = [rank for rank, place in facts.items() if place["unused_gpu"]]
        if idle and wish != "cpu":
            detail = (
                f"the hosts of ranks {ranks_text(idle)} have a GPU, but PyTorch sees none: training would use the CPU"
            )
            return Row("devices", WARN, detail, "check nvidia-smi and torch.version.cuda, or say --device cpu")
        return Row("devices", OK, f"{len(facts)} x CPU ({platform.machine()})")
    first = next(iter(gpus.values()))
    least, lines, result, remedy = min(gpu["free"] for gpu in gpus.values()), [], OK, []
    lines.append(
        f"{len(gpus)} x {first['name']}, {size_text(first['total'])} (at least {size_text(least)} free), driver "
        f"{first['driver'] or 'unknown'}, bf16 {'native' if first['bf16'] else 'emulated'}"
    )
    for key, what in (("name", "models"), ("driver", "drivers")):
        found = _by_value(gpus, key)
        if len(found) > 1:
            lines.append(f"different {what}: {_spread(found)}")
            result, remedy = WARN, [*remedy, "the slowest GPU sets the pace: --constraint asks for one kind"]
    taken = [rank for rank, gpu in gpus.items() if 1 - gpu["free"] / gpu["total"] > _FOREIGN_MEMORY]
    if taken:
        lines.append(f"other processes hold more than {_FOREIGN_MEMORY:.0%} of the memory of ranks {ranks_text(taken)}")
        result, remedy = WARN, [*remedy, "nvidia-smi names them; take another node, or ask for GPUs exclusively"]
    if mixed_precision is not False and not all(gpu["bf16"] for gpu in gpus.values()):
        result, remedy = WARN, [*remedy, "--no-mixed_precision: these GPUs only emulate bf16"]
    return Row("devices", result, "\n".join(lines), "; ".join(remedy), {"gpus": gpus})


def measure_versions() -> dict[str, str]:
    """Versions of what computes and of this code."""
    found = {**versions(), "code": _git_commit() or "not in git"}
    if torch.cuda.is_available():
        found["rccl" if torch.version.hip else "nccl"] = ".".join(map(str, nccl_version()))
    if torch.version.hip:
        found["hip"] = torch.version.hip
    return found


def judge_versions(facts: Facts) -> Row:
    """The same program on all ranks."""
    names = list(dict.fromkeys(name for found in facts.values() for name in found))
    table = {rank: {name: found.get(name, "none") for name in names} for rank, found in facts.items()}
    different = {name: found for name in names if len(found := _by_value(table, name)) > 1}
    if different:
        detail = "\n".join(f"{name}: {_spread(found)}" for name, found in different.items())
        return Row("versions", FAIL, detail, "start every rank from one environment and one checkout", facts[0])
    shown = {**table[0], "code": table[0]["code"][:10] + "+" * table[0]["code"].endswith("+")}
    detail = ", ".join(f"{name} {value}" for name, value in shown.items())
    return Row("versions", OK, f"{detail}{' on all ranks' if len(facts) > 1 else ''}", facts=facts[0])


def judge_processors(facts: Facts) -> Row:
    """Enough cores for the threads of each host's ranks."""
    hosts = _by_value(facts, "host")
    crowded, narrow, numbers = [], [], {}
    for host, ranks in hosts.items():
        cores = {core for rank in ranks for core in facts[rank]["cores"]}
        threads = sum(facts[rank]["threads"] for rank in ranks)
        numbers[host] = {"cores": len(cores), "threads": threads}
        if threads > len(cores):
            crowded.append(f"{host}: {len(ranks)} ranks x {facts[ranks[0]]['threads']} threads on {len(cores)} cores")
        if facts[ranks[0]]["type"] == "cuda" and len(cores) < 2 * len(ranks):
            narrow.append(
                f"{host}: {len(cores)} cores for {len(ranks)} ranks, each of which loads data beside training"
            )
    host, ranks = next(iter(hosts.items()))
    setting = os.environ.get("OMP_NUM_THREADS")
    parts = (numbers[host]["cores"], "core"), (len(ranks), "rank"), (numbers[host]["threads"], "thread")
    detail = (
        f"{', '.join(count(number, word) for number, word in parts)} a host (OMP_NUM_THREADS {setting or 'not set'})"
    )
    if crowded:
        fitting = max(1, numbers[host]["cores"] // len(ranks))
        return Row("processors", WARN, "\n".join(crowded[:4]), f"export OMP_NUM_THREADS={fitting}", numbers)
    if narrow:
        return Row("processors", WARN, "\n".join(narrow[:4]), "ask for more: --cpus-per-task=4, also for srun", numbers)
    return Row("processors", OK, detail, facts=numbers)


# All-reduce


def measure_host_reduce(world: World) -> dict[str, Any]:
    """The sum that the hosts form in every step: whether it is right and how long it takes."""
    expected = [world.size * (world.size + 1) // 2, world.size]
    right, times = True, []
    for turn in range(35):
        numbers = torch.tensor([world.rank + 1, 1])
        start = time.perf_counter()
        world.sum(numbers)
        if turn >= 5:
            times.append(time.perf_counter() - start)
        right &= numbers.tolist() == expected
    return {"right": right, "seconds": statistics.median(times)}


def judge_host_reduce(facts: Facts) -> Row:
    """Correct, and fast enough for every step."""
    wrong = [rank for rank, found in facts.items() if not found["right"]]
    seconds = max(found["seconds"] for found in facts.values())
    detail = f"gloo: known sums {'right' if not wrong else f'WRONG on ranks {ranks_text(wrong)}'}, {time_text(seconds)}"
    if wrong:
        return Row("host sums", FAIL, detail, "another network interface: export GLOO_SOCKET_IFNAME=...")
    slow = seconds > _HOST_LATENCY
    remedy = "each step waits for one: busy cores, or the wrong interface (GLOO_SOCKET_IFNAME)" if slow else ""
    return Row("host sums", WARN if slow else OK, detail, remedy, {"seconds": seconds})


def measure_device_reduce(world: World) -> dict[str, Any]:
    """Sums of large tensors: whether they are right, and bytes a second on the bus by size."""
    right, rates, n = True, {}, world.size

    def wait() -> None:
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)

    for size in _REDUCED[world.device.type]:
        numbers, times = torch.empty(size // 4, device=world.device), []
        for turn in range(6):
            numbers.fill_(world.rank + 1)
            wait()
            start = time.perf_counter()
            world.sum(numbers)
            wait()
            if turn:
                times.append(time.perf_counter() - start)
            right &= bool((numbers == n * (n + 1) / 2).all())
        # What each link carries in a ring: independent of the number of ranks, unlike bytes / time.
        rates[str(size)] = 2 * (n - 1) / n * size / statistics.median(times)
    return {"right": right, "rates": rates}


def judge_device_reduce(facts: Facts, places: Facts) -> Row:
    """Correct, and as fast as the links should be."""
    hosts = {place["host"] for place in places.values()}
    kind = "NCCL" if places[0]["type"] == "cuda" else "gloo"
    wrong = [rank for rank, found in facts.items() if not found["right"]]
    rates = {size: min(found["rates"][size] for found in facts.values()) for size in facts[0]["rates"]}
    shown = ", ".join(f"{size_text(int(size))} at {rate / 1e9:.2f} GB/s" for size, rate in rates.items())
    if wrong:
        detail = f"{kind}: known sums are WRONG on ranks {ranks_text(wrong)}"
        return Row("all-reduce", FAIL, detail, "test the GPUs and links of these hosts (nccl-tests), or exclude them")
    detail = f"{kind}: known sums right; bus bandwidth {shown}"
    wanted = _NODE_BANDWIDTH if len(hosts) == 1 else _NETWORK_BANDWIDTH
    if kind == "NCCL" and max(rates.values()) < wanted:
        remedy = "export NCCL_DEBUG=INFO tells the way taken; NCCL_SOCKET_IFNAME and NCCL_IB_DISABLE=0 choose another"
        return Row("all-reduce", WARN, f"{detail}, below {wanted / 1e9:g} GB/s", remedy, {"rates": rates})
    return Row("all-reduce", OK, detail, facts={"rates": rates})


# The run folder


class _ViewedFolder(RunFolder):
    """The run folder as training would find it, without making or locking anything."""

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self._config = path / "config.json"


def count_parameters(inputs: Inputs) -> int:
    """Parameters of the model, without memory for them."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build_model(inputs.model_config).parameters())


def measure_run(inputs: Inputs, environment: Environment) -> dict[str, Any]:
    """The run that the folder holds and the step from which training would go on. Raises what training would raise."""
    view = _ViewedFolder(inputs.config.run_folder)
    lock = view.path / ".lock"
    if lock.exists():
        with lock.open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"--name: another process is training in {view.path}; wait for it or take another name"
                ) from None
            except OSError:
                pass  # a row of its own
    cut_off = sorted(path.name for p in (".tmp", ".old", ".gone") for path in view.checkpoints.glob(f"{p}_step_*"))
    if cut_off:  # find_start would mend this, and a doctor changes nothing
        checkpoint, notes = find_newest(view.checkpoints)
    else:
        checkpoint, notes = find_start(view, inputs, environment.restart_count > 0)
    return {
        "used": view.used,
        "step": checkpoint.step if checkpoint else 0,
        "checkpoint": str(checkpoint.path) if checkpoint else None,
        "notes": notes,
        "cut_off": cut_off,
        "saved": len(list_checkpoints(view.checkpoints)),
    }


def judge_run(run: Mapping[str, Any], inputs: Inputs) -> Row:
    """What --resume would do."""
    folder, last = inputs.config.run_folder, inputs.config.max_steps
    if run["checkpoint"]:
        detail = f"goes on from step {run['step']} of {last}: {run['checkpoint']}"
    else:
        detail = f"{folder} {'holds a run without checkpoints' if run['used'] else 'is unused'}: starts at step 0"
    lines = [detail, *run["notes"]]
    if run["cut_off"]:
        lines.append(f"a save was cut off here ({', '.join(run['cut_off'])}); the next start mends that")
    if run["step"] == last:
        return Row(
            "run", WARN, f"{folder} is complete: {last} steps are done", "take another --name, or more steps", run
        )
    return Row("run", WARN if len(lines) > 1 else OK, "\n".join(lines), facts=run)


class FolderProbe:
    """A hidden folder in the run folder, made by rank 0, used by all and removed at the end with all that it needed."""

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

    def remove(self) -> None:
        """Leave no trace."""
        if self._lock is not None:
            self._lock.close()
        shutil.rmtree(self.path, ignore_errors=True)
        self._remove_made()


def measure_shared(probe: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """What this rank sees of rank 0's probe: the token, the lock, and the file system's clock."""
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


def judge_shared(facts: Facts, probe: Mapping[str, Any], clocks: Facts) -> list[Row]:
    """One folder for all hosts, with locks and a common clock."""
    blind = [rank for rank, found in facts.items() if not found["sees"]]
    if blind:
        hosts = sorted({facts[rank]["host"] for rank in blind})
        detail = f"ranks {ranks_text(blind)} ({', '.join(hosts)}) do not see what rank 0 writes to the run folder"
        return [Row("shared folder", FAIL, detail, "--output_dir must lie on a file system that all nodes share")]
    hosts = {found["host"] for found in facts.values()}
    seen = f"seen by {count(len(facts), 'rank')} on {count(len(hosts), 'host')}"
    rows = [Row("shared folder", OK, f"{probe['path'].rpartition('/')[0]} is {seen}")]
    free = [rank for rank, found in facts.items() if not found["locked_out"]]
    if probe["locks"] or free:
        why = probe["locks"] or f"ranks {ranks_text(free)} got a lock that rank 0 holds"
        remedy = "see to it yourself that no two jobs have the same --name (Lustre: mount with -o flock)"
        rows.append(Row("file locks", WARN, f"do not work here: {why}", remedy))
    else:
        rows.append(Row("file locks", OK, "flock keeps a second job out of the run folder"))
    skew = max(abs(found["skew"]) for found in facts.values())
    times = [found["time"] for found in clocks.values()] or [0.0]
    apart = max(times) - min(times)
    detail = f"file system and hosts at most {time_text(skew)} apart"
    if len(hosts) > 1:
        detail += f", hosts among each other {time_text(apart)}"
    wrong = max(skew, apart) > _CLOCK_SKEW
    remedy = "start chrony or ntpd on the hosts: times in logs and locks mislead" if wrong else ""
    rows.append(Row("clocks", WARN if wrong else OK, detail, remedy, {"file_system": skew, "hosts": apart}))
    return rows


def judge_space(probe: Mapping[str, Any], run: Mapping[str, Any], inputs: Inputs) -> list[Row]:
    """Room and speed for the checkpoints that are still to come."""
    config = inputs.config
    size = 16 * count_parameters(inputs)  # fp32 weights, their average and two moments
    later = range(run["step"] + 1, config.max_steps + 1)
    kept = sum(step in config.save_steps for step in later)
    regular = sum(due(step, config.save_every, config.max_steps) and step not in config.save_steps for step in later)
    if config.keep_last:  # one more while the oldest is not deleted yet
        room = max(0, config.keep_last + 1 - run["saved"])
        regular = max(1, min(regular, room))
    need, free = (regular + kept) * size, probe["free"]
    plan = f"{count(regular + kept, 'checkpoint')} of {size_text(size)} = {size_text(need)}"
    numbers = {"checkpoint_bytes": size, "checkpoints": regular + kept, "free": free, "write_rate": probe["rate"]}
    if free < need:
        detail = f"{size_text(free)} free, but up to {plan} are to be written"
        remedy = "free space, change --output_dir, keep fewer (--keep_last 2) or save less often (--save_every)"
        rows = [Row("disk space", FAIL, detail, remedy, numbers)]
    else:
        rows = [Row("disk space", OK, f"{size_text(free)} free for {plan} (quotas not looked at)", facts=numbers)]
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
    """Shards against their manifests: sizes and counts on every rank, SHA-256 sums shared out over the ranks.

    `checksums`: full: of all shards; quick: of the first and the last; off.
    """
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
        facts: list[tuple[Any, str]] = [
            (size, "bytes"),
            (shard.num_documents, "documents"),
            (shard.num_tokens, "tokens"),
        ]
        if number in mine:
            facts.append((sha256_file(shard.path), "sha256"))
            read += size
        problems += [
            f"{shard.path}: {name} is {found}, {MANIFEST_NAME} says {entry[name]}"
            for found, name in facts
            if found != entry[name]
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


def judge_shards(facts: Facts, name: str, corpus: Corpus) -> Row:
    """Shards are what their manifests say."""
    problems = sorted({problem for found in facts.values() for problem in found["problems"]})
    first, read = facts[0], sum(found["read"] for found in facts.values())
    seconds = max(found["seconds"] for found in facts.values())
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
        detail += "; SHA-256 not looked at (--checksums off)"
    return Row(name, OK, detail, facts=numbers)


def judge_epochs(inputs: Inputs) -> Row:
    """How often the plan reads the corpus."""
    tokens = inputs.corpus.tokens_before_epoch(1)
    epochs = {name: inputs.plan.objective_tokens(number) / tokens for number, name in enumerate(OBJECTIVES)}
    detail = f"{epochs[OBJECTIVES[MASKED]]:.2f} masked, {epochs[OBJECTIVES[CAUSAL]]:.2f} causal, "
    detail += f"of {tokens:,} tokens with <s> and </s>"
    many = max(epochs.values()) > _EPOCHS
    remedy = "more text, fewer --max_steps or a smaller --global_batch_size" if many else ""
    return Row("epochs", WARN if many else OK, detail, remedy, epochs)
