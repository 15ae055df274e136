"""Checks of the machines for slurm/doctor.py: environment, ranks, devices, versions, processors, all_reduce."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import socket
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch.cuda.nccl import version as nccl_version

from data.wording import count, ranks_text, size_text, time_text
from model import ModelConfig
from slurm.doctor_table import FAIL, OK, WARN, Measurements, Row, by_value, spread
from training import summary
from training.config import TrainingConfig
from training.distributed import World
from training.environment import Environment
from training.preemption import query_job
from training.run_dir import git_commit, versions

# Beyond these a row is WARN. Speeds are in bytes a second, times in seconds.
_FOREIGN_MEMORY = 0.05  # fraction of a GPU's memory in use before this run takes any; a CUDA context is below 3 %
_NODE_BANDWIDTH = 5e9  # NCCL within a node: PCIe reaches it; less means that data goes through the network
_NETWORK_BANDWIDTH = 1e9  # NCCL between nodes: less means Ethernet where there may be InfiniBand
_HOST_LATENCY = 0.02  # an all_reduce over gloo happens in every step

_REDUCED = {"cuda": (4 << 20, 64 << 20, 256 << 20), "cpu": (1 << 20, 4 << 20)}  # bytes of an all_reduce

HOST_ALL_REDUCE, DEVICE_ALL_REDUCE = "host all_reduce", "device all_reduce"


# Ranks, devices, versions, processors


def assess_environment(environment: Environment) -> Row:
    """The launcher and the job."""
    if environment.launcher == "none":
        return Row("environment", OK, "one process: no srun or torchrun variables")
    where = f"{environment.master_addr}:{environment.master_port}"
    ranks, nodes = count(environment.world_size, "rank"), count(environment.nodes, "node")
    lines = [f"{environment.launcher}, {ranks} on {nodes}, rank 0 at {where}"]
    left = seconds_left(environment)
    if environment.job_id is not None:
        ends = f", ends in {time_text(left)}" if left is not None else ", end unknown"
        lines.append(f"SLURM job {environment.job_id}, start {environment.restart_count + 1}{ends}")
    numbers = {"launcher": environment.launcher, "world_size": environment.world_size, "seconds_left": left}
    return Row("environment", OK, "\n".join(lines), numbers=numbers)


def seconds_left(environment: Environment) -> float | None:
    """Until the job's end; None where that is not known."""
    if environment.end_time is not None:
        return max(0.0, environment.end_time - time.time())
    job = query_job(environment.job_id) if environment.job_id else None
    return job.seconds_left if job else None


def measure_rank(environment: Environment, device: torch.device) -> dict[str, Any]:
    """The host, cores and device of this rank."""
    found: dict[str, Any] = {
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
        found["gpu"] = {
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
        found["unused_gpu"] = Path("/dev/nvidia0").exists() or Path("/dev/kfd").exists()
    return found


def _driver_version() -> str:
    """Of the GPU's kernel module; "" where it cannot be read."""
    for path in ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version"):
        with contextlib.suppress(OSError):
            found = re.search(r"\b\d+\.\d+(\.\d+)*\b", Path(path).read_text())
            return found[0] if found else ""
    return ""


def assess_ranks(measured: Measurements, environment: Environment) -> Row:
    """Ranks by host, each on a device of its own."""
    hosts = by_value(measured, "host")
    lines = []
    for host, ranks in hosts.items():
        gpus = [measured[rank]["gpu"] for rank in ranks]
        on = measured[ranks[0]]["type"].upper()
        if all(gpus):
            on = f"GPU{'s' * (len(gpus) > 1)} {', '.join(gpu['pci'] for gpu in gpus)}"
        lines.append(f"{host}: rank{'s' * (len(ranks) > 1)} {ranks_text(ranks)} on {on}")
    hidden = len(lines) - 8
    lines[8:] = [f"and {hidden} more hosts"] if hidden > 0 else []
    owners: dict[tuple[str, str], list[int]] = {}
    for rank, own in measured.items():
        if own["gpu"]:
            owners.setdefault((own["host"], own["gpu"]["uuid"]), []).append(rank)
    shared = [f"ranks {ranks_text(r)} share one GPU of {host}" for (host, _), r in owners.items() if len(r) > 1]
    kinds = by_value(measured, "type")
    numbers = {"hosts": hosts}
    if shared:
        remedy = "start one task per GPU that is visible to the job: --ntasks-per-node=N with --gpus-per-node=N"
        return Row("ranks", FAIL, "\n".join([*lines, *shared]), remedy, numbers)
    if len(kinds) > 1:
        remedy = "look at nvidia-smi on the hosts without CUDA, or leave them out (sbatch --exclude)"
        return Row("ranks", FAIL, spread(kinds), remedy, numbers)
    if len({len(ranks) for ranks in hosts.values()}) > 1:
        lines.append("the hosts have different numbers of ranks: the run is the same, at the pace of the fullest")
        return Row("ranks", WARN, "\n".join(lines), "--ntasks-per-node makes them equal", numbers)
    if environment.launcher != "none" and len(hosts) != environment.nodes:
        lines.append(f"the launcher gives {environment.nodes} nodes, but the ranks run on {len(hosts)} hosts")
        return Row("ranks", WARN, "\n".join(lines), "give --nodes and --ntasks-per-node to srun", numbers)
    return Row("ranks", OK, "\n".join(lines), numbers=numbers)


def assess_devices(measured: Measurements, device: str, mixed_precision: bool | None) -> Row:
    """GPUs of one model, with their memory free and bf16; or CPUs on purpose."""
    gpus = {rank: own["gpu"] for rank, own in measured.items() if own["gpu"]}
    if not gpus:
        idle = [rank for rank, own in measured.items() if own["unused_gpu"]]
        if idle and device != "cpu":
            detail = (
                f"the hosts of ranks {ranks_text(idle)} have a GPU, but PyTorch sees none: training would use the CPU"
            )
            return Row("devices", WARN, detail, "check nvidia-smi and torch.version.cuda, or give --device cpu")
        return Row("devices", OK, f"{len(measured)} x CPU ({platform.machine()})")
    first = next(iter(gpus.values()))
    least, lines, result, remedy = min(gpu["free"] for gpu in gpus.values()), [], OK, []
    lines.append(
        f"{len(gpus)} x {first['name']}, {size_text(first['total'])} (at least {size_text(least)} free), driver "
        f"{first['driver'] or 'unknown'}, bf16 {'native' if first['bf16'] else 'emulated'}"
    )
    for key, what in (("name", "models"), ("driver", "drivers")):
        found = by_value(gpus, key)
        if len(found) > 1:
            lines.append(f"different {what}: {spread(found)}")
            result, remedy = WARN, [*remedy, "the slowest GPU sets the pace: --constraint asks for one kind"]
    taken = [rank for rank, gpu in gpus.items() if 1 - gpu["free"] / gpu["total"] > _FOREIGN_MEMORY]
    if taken:
        lines.append(f"other processes hold more than {_FOREIGN_MEMORY:.0%} of the memory of ranks {ranks_text(taken)}")
        result, remedy = WARN, [*remedy, "nvidia-smi names them; take another node, or ask for GPUs exclusively"]
    if mixed_precision is not False and not all(gpu["bf16"] for gpu in gpus.values()):
        result, remedy = WARN, [*remedy, "--no-mixed_precision: these GPUs only emulate bf16"]
    return Row("devices", result, "\n".join(lines), "; ".join(remedy), {"gpus": gpus})


def measure_versions() -> dict[str, str]:
    """Versions of packages and of this code."""
    found = {**versions(), "code": git_commit() or "not in git"}
    if torch.cuda.is_available():
        found["rccl" if torch.version.hip else "nccl"] = ".".join(map(str, nccl_version()))
    if torch.version.hip:
        found["hip"] = torch.version.hip
    return found


def assess_versions(measured: Measurements) -> Row:
    """The same program on all ranks."""
    names = list(dict.fromkeys(name for found in measured.values() for name in found))
    table = {rank: {name: found.get(name, "none") for name in names} for rank, found in measured.items()}
    different = {name: found for name in names if len(found := by_value(table, name)) > 1}
    if different:
        detail = "\n".join(f"{name}: {spread(found)}" for name, found in different.items())
        return Row("versions", FAIL, detail, "start every rank from one environment and one checkout", measured[0])
    shown = {**table[0], "code": table[0]["code"][:10] + "+" * table[0]["code"].endswith("+")}
    detail = ", ".join(f"{name} {value}" for name, value in shown.items())
    return Row("versions", OK, f"{detail}{' on all ranks' if len(measured) > 1 else ''}", numbers=measured[0])


def assess_processors(measured: Measurements) -> Row:
    """Enough cores for the threads of each host's ranks."""
    hosts = by_value(measured, "host")
    crowded, narrow, numbers = [], [], {}
    for host, ranks in hosts.items():
        cores = {core for rank in ranks for core in measured[rank]["cores"]}
        threads = sum(measured[rank]["threads"] for rank in ranks)
        numbers[host] = {"cores": len(cores), "threads": threads}
        if threads > len(cores):
            crowded.append(
                f"{host}: {len(ranks)} ranks x {measured[ranks[0]]['threads']} threads on {len(cores)} cores"
            )
        if measured[ranks[0]]["type"] == "cuda" and len(cores) < 2 * len(ranks):
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
    return Row("processors", OK, detail, numbers=numbers)


# all_reduce


def measure_host_reduce(world: World) -> dict[str, Any]:
    """The all_reduce of every step over gloo: whether its result is right and how long it takes."""
    expected = [world.size * (world.size + 1) // 2, world.size]
    right, times = True, []
    for turn in range(35):
        numbers = torch.tensor([world.rank + 1, 1])
        start = time.perf_counter()
        world.all_reduce(numbers, "test numbers")
        if turn >= 5:
            times.append(time.perf_counter() - start)
        right &= numbers.tolist() == expected
    return {"right": right, "seconds": statistics.median(times)}


def assess_host_reduce(measured: Measurements) -> Row:
    """Correct, and fast enough for every step."""
    wrong = [rank for rank, found in measured.items() if not found["right"]]
    seconds = max(found["seconds"] for found in measured.values())
    detail = f"gloo: known sums {'right' if not wrong else f'WRONG on ranks {ranks_text(wrong)}'}, {time_text(seconds)}"
    if wrong:
        return Row(HOST_ALL_REDUCE, FAIL, detail, "another network interface: export GLOO_SOCKET_IFNAME=...")
    slow = seconds > _HOST_LATENCY
    remedy = "each step waits for one: busy cores, or the wrong interface (GLOO_SOCKET_IFNAME)" if slow else ""
    return Row(HOST_ALL_REDUCE, WARN if slow else OK, detail, remedy, {"seconds": seconds})


def measure_device_reduce(world: World) -> dict[str, Any]:
    """all_reduce of large tensors: whether results are right, and bytes a second on the bus by size."""
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
            world.all_reduce(numbers, "test numbers")
            wait()
            if turn:
                times.append(time.perf_counter() - start)
            right &= bool((numbers == n * (n + 1) / 2).all())
        # Bytes that each link carries in a ring: independent of the number of ranks, unlike bytes / time.
        rates[str(size)] = 2 * (n - 1) / n * size / statistics.median(times)
    return {"right": right, "rates": rates}


def assess_device_reduce(measured: Measurements, ranks: Measurements) -> Row:
    """Correct, and as fast as the links should be."""
    hosts = {own["host"] for own in ranks.values()}
    kind = "NCCL" if ranks[0]["type"] == "cuda" else "gloo"
    wrong = [rank for rank, found in measured.items() if not found["right"]]
    rates = {size: min(found["rates"][size] for found in measured.values()) for size in measured[0]["rates"]}
    shown = ", ".join(f"{size_text(int(size))} at {rate / 1e9:.2f} GB/s" for size, rate in rates.items())
    if wrong:
        detail = f"{kind}: known sums are WRONG on ranks {ranks_text(wrong)}"
        return Row(
            DEVICE_ALL_REDUCE, FAIL, detail, "test the GPUs and links of these hosts (nccl-tests), or exclude them"
        )
    detail = f"{kind}: known sums right; bus bandwidth {shown}"
    wanted = _NODE_BANDWIDTH if len(hosts) == 1 else _NETWORK_BANDWIDTH
    if kind == "NCCL" and max(rates.values()) < wanted:
        remedy = "export NCCL_DEBUG=INFO shows the transport; NCCL_SOCKET_IFNAME and NCCL_IB_DISABLE=0 choose another"
        return Row(DEVICE_ALL_REDUCE, WARN, f"{detail}, below {wanted / 1e9:g} GB/s", remedy, {"rates": rates})
    return Row(DEVICE_ALL_REDUCE, OK, detail, numbers={"rates": rates})


def measure_kernels(config: TrainingConfig, model: ModelConfig, device: torch.device) -> dict[str, Any]:
    """The kernels of this rank, and those whose slower reference implementation runs instead."""
    found = summary.missing_kernels(config, model, device)
    slower = sorted(name for name, reason in found.items() if reason and device.type == "cuda")
    return {"line": summary.kernels_line(found), "slower": slower}


def assess_kernels(measured: Measurements) -> Row:
    """A warning where a GPU does without a kernel."""
    lines = by_value(measured, "line")
    detail = next(iter(lines)) if len(lines) == 1 else spread(lines)
    slower = any(rank["slower"] for rank in measured.values())
    remedy = "it trains the same run, more slowly: other sizes in --config_file, or another device" if slower else ""
    return Row("kernels", WARN if slower or len(lines) > 1 else OK, detail, remedy, measured[min(measured)])
