"""Shards from an HTTP server on this machine with latency, a limited link and a stall: how much of the link is used.

    python benchmarks/remote_shards.py [--megabytes 400] [--link 100] [--latency 0.05] [--stall 10]

The link is shared by all connections. A reader asks for rows of an epoch in an order of blocks, as fast as they come;
in the middle of it the server is silent for so many seconds.
"""

from __future__ import annotations

import http.server
import re
import sys
import tempfile
import threading
import time
from pathlib import Path

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np

from data.cli import Parser
from data.remote_shards import ShardCache, fetch_all
from data.shard_paths import find_shards
from data.shards import write_manifest, write_shard

_PIECE = 1 << 18


class Link:
    """Bytes a second that all connections share, with a silence once."""

    def __init__(self, rate: float, stall: float, after: float) -> None:
        self._rate, self._stall, self._after = rate, stall, after
        self._lock, self._free, self.sent = threading.Lock(), 0.0, 0

    def send(self, count: int) -> None:
        with self._lock:
            now = max(time.monotonic(), self._free)
            if self.sent >= self._after and self._stall:
                now, self._stall = now + self._stall, 0.0
            self._free, self.sent = now + count / self._rate, self.sent + count
            wait = self._free
        time.sleep(max(0.0, wait - time.monotonic()))


def serve(folder: Path, link: Link, latency: float) -> http.server.ThreadingHTTPServer:
    """A server of the files in a folder, started."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            time.sleep(latency)
            content = (folder / self.path.lstrip("/")).read_bytes()
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            part = memoryview(content)[int(asked[1]) : int(asked[2]) + 1] if asked else memoryview(content)
            self.send_response(206 if asked else 200)
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            for begin in range(0, len(part), _PIECE):
                link.send(len(part[begin : begin + _PIECE]))
                self.wfile.write(part[begin : begin + _PIECE])

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def main() -> int:
    """Entry point."""
    parser = Parser((__doc__ or "").split("\n")[0])
    parser.add_argument("--megabytes", type=int, default=400, help="of shards of 16 MB (default: 400)")
    parser.add_argument("--link", type=float, default=100, help="MB a second (default: 100)")
    parser.add_argument("--latency", type=float, default=0.05, help="seconds before each answer (default: 0.05)")
    parser.add_argument("--stall", type=float, default=10, help="seconds of silence in the middle (default: 10)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "shards"
        folder.mkdir()
        document = np.random.default_rng(0).integers(16, 16384, 8000)
        number = options.megabytes // 16
        files = [write_shard(folder / f"{n}.shard", [document] * 1000, "0" * 64, 16384) for n in range(number)]
        write_manifest(folder, files, "0" * 64, 16384, {})
        for stall in (0.0, options.stall):
            link = Link(options.link * 1e6, stall, options.megabytes * 5e5)
            server = serve(folder, link, options.latency)
            cache = ShardCache(Path(temporary) / f"cache_{stall:g}", 100)
            shards = [each.shard for each in find_shards(f"http://127.0.0.1:{server.server_address[1]}", cache=cache)]
            start = time.perf_counter()
            fetch_all(shards)
            seconds = time.perf_counter() - start
            whole = sum(shard.path.stat().st_size for shard in shards if shard is not None)
            rate = whole / (seconds - stall) / 1e6
            print(f"stall of {stall:g} s: {whole / 1e6:,.0f} MB at {rate:.1f} MB/s without it, {seconds:.1f} s in all")
            server.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
