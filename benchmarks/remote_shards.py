"""Shards from an HTTP server on this machine with latency, a limited link and a stall: how much of the link is used.

    python benchmarks/remote_shards.py [--megabytes 800] [--link 100] [--latency 0.05] [--stall 10] [--rounds 3]

The server is a process of its own; its link is shared by all connections. Each round fetches the shards and, for
comparison, reads them through as many connections that check and keep nothing. Then a loader's rows are used at a
fixed part of the link's speed, and the server is silent for so many seconds: `waited` says what a run notices of it.
"""

from __future__ import annotations

import argparse
import http.client
import http.server
import multiprocessing
import os
import re
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np

from benchmarks.timing import write_results
from data.blocks import BlockOrder
from data.cli import Parser
from data.corpus import Corpus
from data.loader import BatchBuilder, Loader
from data.masking import MaskingOptions
from data.plan import DataPlan
from data.remote_shards import FILES, REQUESTS, ShardCache, fetch_all
from data.shard_paths import find_shards
from data.shards import write_manifest, write_shard

_PIECE = 1 << 18
_BUFFERED = 0.1  # seconds: what a sender's buffers hold is on its way while its process waits for a core
_SHARD_MB = 16


class Link:
    """Bytes a second that all connections share, with a silence once."""

    def __init__(self, rate: float) -> None:
        self._rate, self._lock, self._free = rate, threading.Lock(), 0.0
        self.stall, self.after, self.sent = 0.0, 0.0, 0

    def send(self, count: int) -> None:
        with self._lock:
            self._free = max(self._free, time.monotonic() - _BUFFERED)
            if self.stall and self.sent >= self.after:
                self._free, self.stall = time.monotonic() + self.stall, 0.0
            self._free, self.sent = self._free + count / self._rate, self.sent + count
            wait = self._free
        time.sleep(max(0.0, wait - time.monotonic()))


def serve(folder: str, rate: float, latency: float, pipe: Connection) -> None:
    """Serve the files of a folder. The pipe gives the port, then takes (seconds of silence, bytes until then)."""
    link = Link(rate)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            time.sleep(latency)
            with open(Path(folder) / self.path.lstrip("/"), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
                begin, end = (int(asked[1]), int(asked[2]) + 1) if asked else (0, size)
                self.send_response(206 if asked else 200)
                self.send_header("Content-Length", str(end - begin))
                self.end_headers()
                self.wfile.flush()
                for place in range(begin, end, _PIECE):
                    count = min(_PIECE, end - place)
                    link.send(count)
                    while count:
                        sent = os.sendfile(self.connection.fileno(), file.fileno(), place, count)
                        place, count = place + sent, count - sent

    class Server(http.server.ThreadingHTTPServer):
        request_queue_size = 64

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    pipe.send(server.server_address[1])
    while True:
        stall, after = pipe.recv()
        link.stall, link.after, link.sent = stall, after, 0


def read_plainly(port: int, names: list[str]) -> None:
    """Read files through as many connections as `fetch_all` has, and forget them."""
    left = names[::-1]

    def work() -> None:
        connection, buffer = http.client.HTTPConnection("127.0.0.1", port), bytearray(1 << 20)
        while left:
            connection.request("GET", f"/{left.pop()}")
            answer = connection.getresponse()
            while answer.readinto(buffer):
                pass

    threads = [threading.Thread(target=work) for _ in range(min(FILES * REQUESTS, len(names)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure_link(url: str, port: int, cache: ShardCache) -> dict[str, float]:
    """MB a second of fetching and of plain reading, and what fetching costs in CPU time."""
    shards = [each.shard for each in find_shards(url, cache=cache)]
    start, used = time.perf_counter(), time.process_time()
    fetch_all(shards)
    seconds, used = time.perf_counter() - start, time.process_time() - used
    megabytes = sum(shard.path.stat().st_size for shard in shards if shard is not None) / 1e6
    start = time.perf_counter()
    read_plainly(port, [shard.path.name for shard in shards if shard is not None])
    plain = time.perf_counter() - start
    return {
        "fetched_mb_per_second": megabytes / seconds,
        "plain_mb_per_second": megabytes / plain,
        "cpu_seconds_per_gb": used / megabytes * 1e3,
    }


def measure_stall(url: str, cache: ShardCache, pipe: Connection, options: argparse.Namespace) -> dict[str, float]:
    """Rows in an order of blocks, used at a fixed part of the link's speed; the link is silent in the middle.

    A window of blocks lasts half as long again as the silence."""
    tokens = options.megabytes * 500_000
    order = BlockOrder(_SHARD_MB * 501_000, int(0.75e6 * options.use * options.link * options.stall))
    corpus = Corpus(url, tokenizer_hash=None, bos_id=1, eos_id=2, order=order, cache=cache)
    rows = 2048
    steps = int(0.95 * tokens) // (rows * 128)
    plan = DataPlan(steps, 128, rows, 1, hybrid_numerator=0, hybrid_denominator=1, milestones=())
    loader = Loader(
        BatchBuilder(corpus, plan, MaskingOptions(vocab_size=16384)),
        rank=0, world_size=1, split="rows", local_batch_size=rows,
    )  # fmt: skip
    pipe.send((options.stall, options.megabytes * 6e5))
    start, waits, first = time.perf_counter(), [], 0.0
    for step in range(steps):
        loader.peek()
        waits.append(loader.advance())
        first = first or time.perf_counter()
        time.sleep(max(0.0, first + (step + 1) * rows * 256 / (options.use * options.link * 1e6) - time.perf_counter()))
    loader.close()
    later = {"waited_later": sum(waits[1:]), "longest_wait_later": max(waits[1:])}
    return {"seconds_to_first_batch": waits[0], **later, "seconds": time.perf_counter() - start}


def main() -> int:
    """Entry point."""
    parser = Parser((__doc__ or "").split("\n")[0])
    parser.add_argument("--megabytes", type=int, default=800, help="of shards of 16 MB")
    parser.add_argument("--link", type=float, default=100, help="MB a second")
    parser.add_argument("--latency", type=float, default=0.05, help="seconds before each answer")
    parser.add_argument("--stall", type=float, default=10, help="seconds of silence (default: 10; 0: not tried)")
    parser.add_argument("--use", type=float, default=0.1, help="part of the link that the loader's rows need (0.1)")
    parser.add_argument("--rounds", type=int, default=3, help="times all is fetched")
    parser.add_argument("--output", default="", help="JSON file for the results")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "shards"
        folder.mkdir()
        document = np.random.default_rng(0).integers(16, 16384, 8000)
        number = options.megabytes // _SHARD_MB
        files = [write_shard(folder / f"{n}.shard", [document] * 1000, "0" * 64, 16384) for n in range(number)]
        write_manifest(folder, files, "0" * 64, 16384, {})
        arguments = (str(folder), options.link * 1e6, options.latency, other)
        server = context.Process(target=serve, args=arguments, daemon=True)
        server.start()
        port = pipe.recv()
        url, rounds = f"http://127.0.0.1:{port}", []
        for n in range(options.rounds):
            rounds.append(found := measure_link(url, port, ShardCache(Path(temporary) / f"cache_{n}", 100)))
            print({name: round(value, 2) for name, value in found.items()}, os.getloadavg()[0], flush=True)
        stalled = {}
        if options.stall:
            stalled = measure_stall(url, ShardCache(Path(temporary) / "cache_stall", 100), pipe, options)
            print({name: round(value, 2) for name, value in stalled.items()})
        server.kill()
    write_results(options, rounds=rounds, stalled=stalled)
    return 0


if __name__ == "__main__":
    sys.exit(main())
