"""Batch schedule: rows and row lengths of every step, of all objectives together; pure functions of a few flags.

Schedules follow the published GPT-BERT training (arXiv 2410.24159; tests/golden/schedule.npz pins them), with
x = step / max_steps:
  row length   seq_length * f with f = 1, 2, 4: doubled where (step + 1) / max_steps reaches a milestone (0.7, 0.9)
  rows         int(g / reduction * (1 - x) + g * x + 0.5) with g = global_batch_size / f
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class BatchSchedule:
    """How many rows of how many tokens each step of a run has. Units: rows, tokens, optimizer steps. global_batch_size:
    rows of `seq_length` tokens at the end. milestones: fractions of max_steps."""

    max_steps: int
    seq_length: int
    global_batch_size: int
    batch_reduction: float = 4.0
    milestones: tuple[float, ...] = (0.7, 0.9)

    @cached_property
    def factors(self) -> np.ndarray:
        """By how much the rows of each step are longer than seq_length, int64 [max_steps]."""
        reached = np.arange(1, self.max_steps + 1) / self.max_steps
        return 2 ** sum((reached >= each for each in self.milestones), np.zeros(self.max_steps, np.int64))

    @cached_property
    def rows(self) -> np.ndarray:
        """Rows of each step, int64 [max_steps]."""
        x, size = np.arange(self.max_steps) / self.max_steps, self.global_batch_size / self.factors
        return (size / self.batch_reduction * (1 - x) + size * x + 0.5).astype(np.int64)

    @cached_property
    def token_sums(self) -> np.ndarray:
        """Tokens of all steps before each, int64 [max_steps + 1]."""
        return np.concatenate([[0], np.cumsum(self.rows * self.factors * self.seq_length)])

    def tokens_before(self, step: int) -> int:
        """Tokens in all global batches before `step` (0 .. max_steps), all objectives together."""
        return int(self.token_sums[step])
