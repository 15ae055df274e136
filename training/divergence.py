"""Whether all ranks still hold the same weights, average and moments, bit for bit.

Every rank takes the same sums of gradients into the same state, so nothing but a fault of a device, of memory or of the
network makes ranks differ; nothing else would show it, since losses are added up over ranks.
"""

from __future__ import annotations

import socket
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from training.distributed import World
from training.errors import HardwareError
from training.optimizers import named_state
from training.wording import ranks_text

if TYPE_CHECKING:
    from training.step import TrainState

_PARTS = ("weights", "average", "moments")


class DivergenceError(HardwareError):
    """Ranks no longer hold the same state; the message names them and what differs."""

    hint = "go on from there without that host or GPU (sbatch --exclude=HOST)"


@dataclass(frozen=True)
class RankCheck:
    """A comparison that is under way on the device.

    names: of all tensors, by part. own: int64 [tensors], this rank's checksums. digests: int64 [ranks, parts] on the
    host, in memory that the device fills.
    """

    step: int
    names: dict[str, list[str]]
    own: Tensor
    digests: Tensor

    def conclude(self, world: World) -> None:
        """Raises DivergenceError on all ranks where they differ; to be called once `digests` have arrived."""
        if bool((self.digests == self.digests[0]).all()):
            return
        parts = [part for part, column in zip(_PARTS, self.digests.t(), strict=True) if len(column.unique()) > 1]
        odd = _minority([tuple(row) for row in self.digests.tolist()])
        everyone = world.all_gather_objects((socket.gethostname(), self.own.tolist()))
        names = [name for part in _PARTS for name in self.names[part]]
        first = next(
            name for name, *sums in zip(names, *(sums for _, sums in everyone), strict=True) if len(set(sums)) > 1
        )
        places = list(dict.fromkeys(everyone[rank][0] for rank in odd or range(world.size)))
        hosts = ", ".join(places)
        what = f"{' and '.join(parts)}, first in {first}"
        if odd:
            who = f"rank{'s' * (len(odd) > 1)} {ranks_text(odd)} ({hosts}) and most others differ in {what}"
        else:
            who = f"ranks {ranks_text(range(world.size))} ({hosts}) differ in {what}, and there is no majority"
        raise DivergenceError(
            f"step {self.step}: {who}. All should hold the same bits: a device, its memory or the network is faulty",
            host=places[0] if odd and len(places) == 1 else "",
        )


def begin_check(state: TrainState, world: World) -> RankCheck | None:
    """Queue a comparison of all ranks' state; None for one rank. Nothing waits for the device."""
    if world.size == 1:
        return None
    tensors = {
        "weights": dict(state.model.named_parameters()),
        "average": state.ema.state_dict(),
        "moments": named_state(state.optimizer, state.model),
    }
    own = state.bit_sums([tensor for part in _PARTS for tensor in tensors[part].values()])
    order = torch.arange(1, 2 * len(own), 2, device=own.device)  # odd: no flipped bit is lost, nor tensors that swap
    counts = [len(tensors[part]) for part in _PARTS]
    digests = torch.stack([part.sum() for part in (own * order).split(counts)])
    digests = world.table(digests, "the comparison of weights").to("cpu", non_blocking=True)
    return RankCheck(state.step, {part: list(tensors[part]) for part in _PARTS}, own, digests)


def check_ranks(state: TrainState, world: World) -> None:
    """The same at once. Raises DivergenceError on all ranks where they differ."""
    if (check := begin_check(state, world)) is not None:
        if world.device.type == "cuda":
            with world.waiting("the comparison of weights"):
                torch.cuda.current_stream(world.device).synchronize()
        check.conclude(world)


def _minority(values: list[tuple[int, ...]]) -> list[int]:
    """The ranks whose value is not that of more than half of them; none where no value is."""
    value, count = Counter(values).most_common(1)[0]
    return [rank for rank, other in enumerate(values) if other != value] if 2 * count > len(values) else []
