"""Loader throughput on one core, and the memory that a rank needs for a large corpus.

    python benchmarks/loader.py [--tokens 1000000000] [--output loader.json]

Writes a synthetic corpus of `--tokens` tokens (documents of about 500) to a temporary folder, builds causal and masked
rows at several lengths on one thread, masks and labels included, and prints the memory beyond the process's base.

    python benchmarks/loader.py --tokens 60000000 --mean_length 60 --shards 1 100 1000 10000

writes it as so many shards, one number after the other, and prints what an epoch's index costs a document and a step's
rows cost in CPU time, and what rows cost whose tokens are not in memory.

    python benchmarks/loader.py --sparse 10000

times starts with so many shards of 100 M tokens and 100,000 documents each (0.8 MB each on the disk, as their tokens
are holes), in both orders, with the memory that they take.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
import torch

from benchmarks.timing import write_results
from data.blocks import BlockOrder
from data.cli import Parser
from data.corpus import Corpus
from data.loader import BatchBuilder
from data.masking import MaskingOptions
from data.objectives import CAUSAL, MASKED
from data.offsets_table import TABLE_NAME, write_table
from data.plan import DataPlan, RowRange
from data.shards import write_manifest, write_shard
from data.stream import TokenStream

_MICRO_BATCH_TOKENS = 32768
_MOST_STEPS = 20


def resident_bytes() -> int:
    """Resident memory of this process, mapped files included."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmRSS in /proc/self/status")


def write_corpus(folder: Path, tokens: int, mean_length: int, tokens_per_shard: int = 100_000_000) -> None:
    """Random documents with exponentially distributed lengths."""
    generator = np.random.default_rng(0)
    pool, files = generator.integers(16, 16384, 1 << 20).astype(np.uint16), []
    for number, start in enumerate(range(0, tokens, tokens_per_shard)):
        size = min(tokens_per_shard, tokens - start)
        lengths = 1 + generator.exponential(mean_length - 1, size=size // mean_length + 1).astype(int)
        lengths = np.minimum(lengths, len(pool))
        documents = (pool[:length] for length in lengths)
        files.append(write_shard(folder / f"part_{number:04d}.shard", documents, "0" * 64, vocab_size=16384))
    write_table(folder, files)
    write_manifest(folder, files, "0" * 64, 16384, {})


def build_rows(builder: BatchBuilder, objective: int, tokens: int) -> None:
    """Rows, masks and labels of about `tokens` tokens in micro-batches."""
    plan = builder.plan.step(0)
    rows = _MICRO_BATCH_TOKENS // plan.seq_length
    for first in range(0, tokens // plan.seq_length, rows):
        builder.rows(plan, RowRange(objective, first, first + rows)).inputs(builder.options)


def measure(corpus: Corpus, length: int, objective: int, tokens: int, repeats: int = 5) -> float:
    """Median tokens per second over `repeats`."""
    plan = DataPlan(
        1, length, 1 << 20, 1, hybrid_numerator=int(objective == MASKED), hybrid_denominator=1, milestones=()
    )
    builder = BatchBuilder(corpus, plan, MaskingOptions(vocab_size=16384))
    build_rows(builder, objective, _MICRO_BATCH_TOKENS)  # builds the epoch's index
    rates = []
    for _ in range(repeats):
        start = time.perf_counter()
        build_rows(builder, objective, tokens)
        rates.append(tokens / (time.perf_counter() - start))
    return sorted(rates)[len(rates) // 2]


def evict(corpus: Corpus) -> None:
    """Drop the shards' files from the page cache, but for pages that are mapped."""
    corpus.drop_cache()
    for shard in corpus.shards:
        with shard.path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def bytes_from_disk() -> int:
    """Bytes that the system has read from disks for this process so far."""
    return int(Path("/proc/self/io").read_text().split("read_bytes:")[1].split()[0])


def measure_shards(corpus: Corpus, rows: int = 2048, length: int = 128, repeats: int = 5) -> dict[str, Any]:
    """CPU time of an epoch's index and of a step's rows; time and bytes of a step's rows that are not in memory."""
    stream, generator = TokenStream(corpus, 7), np.random.default_rng(1)
    start = time.process_time()
    stream._index(0)
    index = time.process_time() - start
    positions = generator.integers(0, corpus.tokens_before_epoch(1) - length - 1, (repeats + 1, rows))
    stream.read_rows(positions[0], length + 1)
    for shard in corpus.shards:  # all files are mapped
        shard.tokens[:1].sum()
    times = []
    for some in positions[1:]:
        start = time.process_time()
        stream.read_rows(some, length + 1)
        times.append(time.process_time() - start)
    cold, read = [], bytes_from_disk()
    for some in positions[1:]:
        evict(corpus)
        corpus._in_memory, start = False, time.perf_counter()
        stream.read_rows(some, length + 1)
        cold.append(time.perf_counter() - start)
    read = bytes_from_disk() - read
    return {
        "shards": len(corpus.shards),
        "index_ns_per_document": index / corpus.num_documents * 1e9,
        "tokens_per_cpu_second": rows * length / sorted(times)[repeats // 2],
        "cold_ms_per_row": sorted(cold)[repeats // 2] / rows * 1e3,
        "cold_tokens_per_second": [rows * length / seconds for seconds in sorted(cold)],
        "cold_kib_per_row": read / (rows * repeats) / 1024,
    }


def measure_blocks(path: str, order: BlockOrder, length: int = 128, rows: int = 8192) -> dict[str, float]:
    """An epoch in an order of blocks that begins with nothing in memory: time to the first batch, and tokens a second
    of wall-clock and of CPU time, then of CPU time once more with all in memory."""
    results: dict[str, float] = {}
    for name in ("cold", "warm"):
        start, used = time.perf_counter(), time.process_time()
        corpus = Corpus(path, tokenizer_hash=None, bos_id=1, eos_id=2, order=order)
        steps = min(_MOST_STEPS, corpus.tokens_before_epoch(1) // (rows * length))
        plan = DataPlan(steps, length, rows, 1, hybrid_numerator=0, hybrid_denominator=1, milestones=())
        builder = BatchBuilder(corpus, plan, MaskingOptions(vocab_size=16384))
        if name == "cold":
            evict(corpus)
        for step in range(steps):
            builder.step(step, 0, 1, "rows", rows)
            if step == 0:
                results[f"{name}_seconds_to_first_batch"] = time.perf_counter() - start
        tokens = steps * rows * length
        results[f"{name}_tokens_per_second"] = tokens / (time.perf_counter() - start)
        results[f"{name}_tokens_per_cpu_second"] = tokens / (time.process_time() - used)
    return {**results, "resident_bytes": resident_bytes(), "shards": len(corpus.shards)}


def write_sparse(folder: Path, number: int, documents: int = 100_000, mean_length: int = 1000) -> None:
    """Shards of 100,000 documents of random lengths whose tokens, all 0, take no room on the disk, and a manifest."""
    tokens, generator, files = documents * mean_length, np.random.default_rng(0), []
    zeros = np.zeros(mean_length, np.uint16)
    lengths = np.diff(np.sort(generator.integers(0, tokens, documents - 1)), prepend=0, append=tokens)
    template = write_shard(folder / "template", itertools.repeat(zeros, documents), "0" * 64, 16384)
    with (folder / "template").open("rb") as file:
        header = file.read(256)
    (folder / "template").unlink()
    for shard in range(number):
        path = folder / f"shard_{shard:05d}.shard"
        with path.open("wb") as file:
            file.write(header)
            file.seek(template.bytes - 8 * (documents + 1))
            file.write(bytes(8) + np.cumsum(np.roll(lengths, shard)).tobytes())
        files.append(replace(template, file=path.name, sha256=f"{shard:064x}"))
    write_table(folder, files)
    write_manifest(folder, files, "0" * 64, 16384, {})


def measure_start(folder: Path, order: BlockOrder | None) -> dict[str, float]:
    """Rank 0 of 8, hybrid 15/16, up to its first batch: seconds, of which CPU time, and the GB of memory beyond those
    that the process had: its own, and all, with what it maps of files. To be called in a process of its own."""

    def memory() -> np.ndarray:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
        found = {line.split()[0]: int(line.split()[1]) / 1e6 for line in lines}
        return np.array([found["Anonymous:"], found["Rss:"]])

    torch.set_num_threads(1)
    before, start, used = memory(), time.perf_counter(), time.process_time()
    corpus = Corpus(folder, tokenizer_hash=None, bos_id=1, eos_id=2, order=order)
    corpus.identity()
    opened = time.perf_counter() - start
    plan = DataPlan(1000, 128, 32768, 1, hybrid_numerator=15, hybrid_denominator=16, milestones=())
    builder = BatchBuilder(corpus, plan, MaskingOptions(vocab_size=16384))
    builder.step(0, 0, 8, "rows", 256)
    own, resident = (memory() - before).tolist()
    return {
        "documents": corpus.num_documents,
        "seconds": time.perf_counter() - start,
        "of_which_opening": opened,
        "cpu_seconds": time.process_time() - used,
        "own_gb": own,
        "resident_gb": resident,
    }


def measure_starts(options: argparse.Namespace) -> list[dict[str, Any]]:
    """`measure_start` in both orders, in that of documents also without a table of offsets."""
    results = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        write_sparse(Path(folder), options.sparse)
        for name in ("blocks", "documents", "documents without offsets.bin"):
            if name.endswith("bin"):
                (Path(folder) / TABLE_NAME).unlink()
            order = BlockOrder(1 << 20, 1 << 29) if name == "blocks" else None
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                found = pool.submit(measure_start, Path(folder), order).result()
            print(f"{name}:", {name: round(value, 2) for name, value in found.items()}, flush=True)
            results.append({"order": name, **found})
    return results


def mix_of(folder: Path) -> Path:
    """A mix file in which each shard is a source that an epoch uses 0.5 or 1.5 times."""
    sources = [{"path": path.name, "repeat": 0.5 + n % 2} for n, path in enumerate(sorted(folder.glob("*.shard")))]
    (folder / "mix.json").write_text(json.dumps({"sources": sources}))
    return folder / "mix.json"


def scale_shards(options: argparse.Namespace) -> list[dict[str, Any]]:
    """`measure_shards` for every number of shards asked for."""
    results = []
    for number in options.shards:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            write_corpus(Path(folder), options.tokens, options.mean_length, -(-options.tokens // number))
            if options.blocks:
                found = measure_blocks(f"{folder}/*.shard", BlockOrder(options.blocks, options.window))
                print({name: round(value, 2) for name, value in found.items()}, flush=True)
                results.append(found)
                continue
            path = mix_of(Path(folder)) if options.mix else f"{folder}/*.shard"
            corpus = Corpus(path, tokenizer_hash=None, bos_id=1, eos_id=2)
            results.append(found := measure_shards(corpus))
        fastest, slowest = (found["cold_tokens_per_second"][at] / 1e6 for at in (0, -1))
        print(
            f"{found['shards']:6} shards: index {found['index_ns_per_document']:6.0f} ns CPU a document, rows "
            f"{found['tokens_per_cpu_second'] / 1e6:6.2f} M tokens a second of CPU, cold rows "
            f"{found['cold_ms_per_row']:.3f} ms and {found['cold_kib_per_row']:,.1f} KiB from the disk, "
            f"{slowest:.2f} to {fastest:.2f} M tokens/s",
            flush=True,
        )
    return results


def main() -> int:
    """Entry point."""
    parser = Parser((__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, default=1_000_000_000, help="size of the corpus in tokens (default: 1e9)")
    parser.add_argument("--mean_length", type=int, default=500, help="mean document length in tokens")
    parser.add_argument(
        "--shards", type=int, nargs="*", default=[], help="numbers of shards to compare (default: none)"
    )
    parser.add_argument("--mix", action="store_true", help="with --shards: each shard is a source of a mix")
    parser.add_argument("--blocks", type=int, default=0, help="with --shards: tokens of a block (default: documents)")
    parser.add_argument("--sparse", type=int, default=0, help="time and memory of starts with so many sparse shards")
    parser.add_argument("--window", type=int, default=1 << 26, help="tokens within which rows are shuffled (2^26)")
    parser.add_argument("--folder", default=None, help="where to write the corpus (default: a temporary folder)")
    parser.add_argument("--output", default="", help="JSON file for the results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.sparse:
        write_results(options, results=measure_starts(options))
        return 0
    if options.shards:
        write_results(options, results=scale_shards(options))
        return 0
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        write_corpus(Path(folder), options.tokens, options.mean_length)
        base = resident_bytes()
        corpus = Corpus(f"{folder}/*.shard", tokenizer_hash=None, bos_id=1, eos_id=2)
        results, peak = [], 0
        for length in (128, 256, 512):
            for name, objective in (("causal", CAUSAL), ("masked", MASKED)):
                rate = measure(corpus, length, objective, 32 * _MICRO_BATCH_TOKENS)
                peak = max(peak, resident_bytes() - base)
                results.append({"objective": name, "row_length": length, "tokens_per_second": rate})
                print(f"{name:>7} rows, T={length:<4} {rate / 1e6:8.2f} M tokens/s", flush=True)
        print(
            f"{corpus.num_tokens:,} tokens, {corpus.num_documents:,} documents: {peak / 2**20:.0f} MiB above the base"
        )
    write_results(options, memory_bytes=peak, results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
