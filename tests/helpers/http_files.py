"""An HTTP server of a folder on this machine, which loses connections and changes files as a test asks."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class FileServer(ThreadingHTTPServer):
    """url: of the folder. ranges: whether parts of a file can be asked for. losses: how many of the next answers to GET
    break off in the middle. status: what to answer instead, if not 0. requests: what was asked, in order."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.ranges, self.losses, self.status = folder, True, 0, 0
        self.requests: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FileServer

    def translate_path(self, path: str) -> str:
        return str(self.server.folder / super().translate_path(path).removeprefix(str(Path.cwd())).lstrip("/"))

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        if self.server.status:
            self.send_error(self.server.status)
            return
        path = Path(self.translate_path(self.path))
        if path.is_dir():
            super().do_GET() if body else super().do_HEAD()
            return
        if not path.exists():
            self.send_error(404)
            return
        content = path.read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")) if self.server.ranges else None
        part = content[int(asked[1]) : int(asked[2]) + 1] if asked else content
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {asked[1]}-{int(asked[1]) + len(part) - 1}/{len(content)}")
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        if body and self.server.losses:
            self.server.losses -= 1
            self.wfile.write(part[: len(part) // 2])
            self.close_connection = True
        elif body:
            self.wfile.write(part)


@contextmanager
def served(folder: Path) -> Iterator[FileServer]:
    with FileServer(folder) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
