"""What all ranks have in common at the start of a run: flags, data, tokenizer, model, code, versions and switches.

Ranks that differ in one of them train something that nobody asked for, or wait for each other for ever. This is the
first thing that ranks exchange: 32 bytes each, and details only where these differ.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ops.reference import VARIABLE, reference_parts
from training.config import ConfigError
from training.distributed import World
from training.setup import Inputs, git_commit, versions
from training.wording import ranks_text

_ROOT = Path(__file__).resolve().parent.parent
# What a training run imports.
_CODE = ("model*.py", "data/*.py", "ops/*.py", "ops/cuda/*", "slurm/*.py", "training/*.py")
# Flags and variables that name places, which may differ from host to host: what is read there is compared instead.
# Only rank 0 looks for a checkpoint and writes the run folder, and all ranks start from its weights.
_PLACES = {
    "train_path",
    "valid_path",
    "config_file",
    "tokenizer_path",
    "evaluate_data",
    "initial_weights",
    "output_dir",
    "spare_checkpoint_dir",
    "resume",
    "checkpoint_filename",
    "HYBRID_KERNEL_CACHE",
}


def check_same_run(inputs: Inputs, world: World) -> None:
    """Raises ConfigError on all ranks, with the first difference, unless all ranks are about to train the same run."""
    if world.size == 1:
        return
    flags = {f"--{name}": value for name, value in inputs.config.to_dict().items() if name not in _PLACES}
    facts = {
        **flags,
        "the data of --train_path": inputs.data_identity[:12],
        "the data of --valid_path": inputs.held_out_identity[:12] or None,
        "the data of --evaluate_data": inputs.pairs and _digest(repr(inputs.pairs.sets).encode()),
        "the file of --tokenizer_path": _digest(inputs.tokenizer_text.encode()),
        **{f"{key} in --config_file": value for key, value in inputs.model_config.to_dict().items()},
        "the code": _code(),
        **{f"the version of {name}": version for name, version in versions().items()},
        **_switches(),
    }
    remedy = "start all ranks with the same flags, files, code, packages and HYBRID_ variables"
    require_same(facts, world, remedy, {"the code": lambda digest: f"{digest} (commit {git_commit() or 'unknown'})"})


def _switches() -> dict[str, str]:
    """HYBRID_ variables that change what runs; the parts of HYBRID_REFERENCE in one order, however they are given."""
    names = {name for name in os.environ if name.startswith("HYBRID_")} - _PLACES - {VARIABLE}
    parts = {VARIABLE: ",".join(reference_parts())} if reference_parts() else {}
    return {**{name: os.environ[name] for name in sorted(names)}, **parts}


def check_same_model(model: nn.Module, world: World) -> None:
    """Raises ConfigError on all ranks unless all have tensors of the same names and shapes."""
    facts = {f"the shape of {name}": list(tensor.shape) for name, tensor in model.state_dict().items()}
    require_same(facts, world, "--config_file and the code must be the same on all hosts")


def require_same(
    facts: Mapping[str, Any],
    world: World,
    remedy: str,
    explain: Mapping[str, Callable[[Any], str]] | None = None,
) -> None:
    """Raises ConfigError on all ranks where one has other `facts` than rank 0: values for JSON, by name.

    The message names the ranks and the first difference with both values. explain: functions that say more of a value,
    called where ranks differ.
    """
    if world.size == 1:
        return
    digest = torch.tensor(list(hashlib.sha256(json.dumps(facts).encode()).digest()))
    digests = world.table(digest, "the comparison of what ranks run")
    if bool((digests == digests[0]).all()):
        return
    told = {name: (explain or {}).get(name, _shown)(value) for name, value in facts.items()}
    everyone = world.all_gather_objects((socket.gethostname(), told))
    first_host, first = everyone[0]
    names = list(dict.fromkeys(name for _, found in everyone for name in found))
    different = [name for name in names if any(found.get(name) != first.get(name) for _, found in everyone)]
    name = different[0]
    host, value = next((host, found.get(name)) for host, found in everyone if found.get(name) != first.get(name))
    ranks = [rank for rank, (_, found) in enumerate(everyone) if found.get(name) == value]
    others = f" (different, too: {', '.join(different[1:6])}{', ...' * (len(different) > 6)})" * (len(different) > 1)
    raise ConfigError(
        f"ranks differ: {name} is {first.get(name, 'not set')} on rank 0 ({first_host}) but {value or 'not set'} on "
        f"rank{'s' * (len(ranks) > 1)} {ranks_text(ranks)} ({host}){others}; {remedy}"
    )


def _shown(value: Any) -> str:
    """A value in a sentence."""
    return "none" if value is None else repr(value)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def _code() -> str:
    """A hash of the sources: unlike the commit it needs no git, and tells apart what was edited since."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in _CODE for path in _ROOT.glob(pattern)):
        digest.update(path.relative_to(_ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
