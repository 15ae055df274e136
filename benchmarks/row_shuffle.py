"""Documents in a batch: how many its masked rows come from, with shuffled rows and in stream order.

    python benchmarks/row_shuffle.py SHARDS [--global_batch_size 512] [--seq_length 128] [--steps 300]

Looks at every tenth of the first steps of a run with hybrid 15/16 (data/row_shuffle.py).
On the CPU; nothing is trained.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np

from data.cli import Parser
from data.corpus import Corpus
from data.documents import OCCURRENCE_SHIFT
from data.objectives import MASKED
from data.plan import DataPlan
from data.row_shuffle import RowShuffle
from data.stream import TokenStream


def documents_of(corpus: Corpus, origins: np.ndarray) -> np.ndarray:
    """How many tokens each document gives to a batch; int64, one number a document that gives any."""
    positions = origins[origins > 0] & ((1 << OCCURRENCE_SHIFT) - 1)
    ends = np.concatenate([shard.offsets[1:].astype(np.int64) + start for shard, start in _with_starts(corpus)])
    return np.unique(np.searchsorted(ends, positions, side="right"), return_counts=True)[1]


def _with_starts(corpus: Corpus):
    start = 0
    for shard in corpus.shards:
        yield shard, start
        start += shard.num_tokens


def main() -> int:
    """Entry point."""
    parser = Parser((__doc__ or "").split("\n")[0])
    parser.add_argument("shards", help="shard folder, file or glob")
    parser.add_argument("--global_batch_size", type=int, default=512, help="rows (default: 512)")
    parser.add_argument("--seq_length", type=int, default=128, help="tokens per row (default: 128)")
    parser.add_argument("--steps", type=int, default=300, help="first steps of the run to look at (default: 300)")
    options = parser.parse_args()
    corpus = Corpus(options.shards, tokenizer_hash=None, bos_id=1, eos_id=2)
    plan = DataPlan(7000, options.seq_length, options.global_batch_size, batch_reduction=1)
    stream = TokenStream(corpus, plan.stream_key(MASKED))
    order = RowShuffle(corpus, plan.stream_key(MASKED), plan.spans(MASKED))
    for name in ("shuffled rows", "stream order"):
        counts, largest = [], []
        for step in range(0, options.steps, 10):
            batch = plan.step(step)
            first, rows = batch.position[MASKED], batch.objective_rows[MASKED]
            in_order = first + np.arange(rows) * options.seq_length
            positions = order.positions(first, rows) if name == "shuffled rows" else in_order
            _, origins = stream.read_rows(positions, options.seq_length, origins=True)
            assert origins is not None
            documents = documents_of(corpus, origins)
            counts.append(len(documents))
            largest.append(documents.max() / documents.sum())
        print(
            f"{name}: documents a batch {np.median(counts):.0f} (median), {min(counts)} (least); tokens of the "
            f"largest {np.median(largest):.1%} (median), {max(largest):.1%} (most)"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
