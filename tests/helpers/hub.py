"""A server on this machine that answers huggingface_hub as the Hugging Face Hub does, as far as uploading needs it.

Formats are those that the library's own code sends and reads (its _commit_api.py, lfs.py and hf_api.py).
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest import mock

import pytest

WRITER, READER = "hf_writer", "hf_reader"  # tokens


class Hub(ThreadingHTTPServer):
    """Repositories as branches of commits, each commit the files of it (content by path).

    lost_at: the connection is lost at the request of this number that holds `lost_word` in its line, and at all later
    ones, as a network that is gone; 0 for never. requests: lines of all requests.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.branches: dict[str, dict[str, str]] = {}
        self.commits: dict[str, dict[str, bytes]] = {"": {}}
        self.large: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.lost_at, self.lost_word = 0, ""
        self.lock = threading.Lock()

    def lose(self, word: str, at: int) -> None:
        """Lose the network at the request of this number, from now on, with `word` in it."""
        self.requests.clear()
        self.lost_word, self.lost_at = word, at

    def files(self, repository: str, revision: str = "main") -> dict[str, bytes]:
        """What a revision holds."""
        return self.commits[self.branches[repository][revision]]

    def commit(self, repository: str, revision: str, files: dict[str, bytes]) -> str:
        """A commit with these files more."""
        with self.lock:
            found = hashlib.sha1(f"{len(self.commits)}".encode()).hexdigest()
            self.commits[found] = {**self.commits[self.branches[repository][revision]], **files}
            self.branches[repository][revision] = found
        return found

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that is gone is none of the test's business."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, content: Any = None, status: int = 200, message: str = "") -> None:
        body = json.dumps({"error": message} if message else content).encode()
        self.send_response(status)
        if message:
            self.send_header("X-Error-Message", message)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        found = b""
        while size := int(self.rfile.readline(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def _lost(self) -> bool:
        hub = self.server
        with hub.lock:
            hub.requests.append(f"{self.command} {self.path}")
            matching = sum(hub.lost_word in line for line in hub.requests)
        if not hub.lost_at or matching < hub.lost_at:
            return False
        self.close_connection = True
        return True

    def do_PUT(self) -> None:
        body = self._body()
        if not self._lost():
            self.server.large[self.path.rsplit("/", 1)[-1]] = body
            self._answer({})

    def do_GET(self) -> None:
        if self._lost():
            return
        match self.path.split("?")[0].split("/")[1:]:
            case ["api", "models", user, name, "refs"]:
                branches = self.server.branches[f"{user}/{name}"].items()
                found = [{"name": b, "ref": f"refs/heads/{b}", "targetCommit": commit} for b, commit in branches]
                self._answer({"branches": found, "tags": [], "converts": []})
            case ["api", "models", user, name, "revision", revision]:
                self._answer({"id": f"{user}/{name}", "sha": self.server.branches[f"{user}/{name}"][revision]})
            case _:
                self._answer(status=404, message="not found")

    def do_POST(self) -> None:
        body = self._body()
        if self._lost():
            return
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in (WRITER, READER):
            self._answer(status=401, message="Invalid credentials in Authorization header")
            return
        if token == READER and "validate" not in self.path:
            self._answer(status=403, message="You don't have the rights to create a model under this namespace")
            return
        self._post(self.path.split("?")[0].split("/")[1:], body)

    def _post(self, parts: list[str], body: bytes) -> None:
        hub, content = self.server, body if parts[-2:-1] == ["commit"] else json.loads(body or b"{}")
        match parts:
            case ["api", "repos", "create"]:
                name = f"{content.get('organization') or 'me'}/{content['name']}"
                if name in hub.branches:
                    self._answer({"url": f"{hub.url}/{name}", "error": "exists"}, status=409)
                    return
                hub.branches[name] = {"main": ""}
                hub.commit(name, "main", {".gitattributes": b""})
                self._answer({"url": f"{hub.url}/{name}", "private": content.get("private")})
            case ["api", "validate-yaml"]:
                self._answer({"warnings": [], "errors": []})
            case ["api", "models", user, name, "preupload", revision]:
                there = hub.files(f"{user}/{name}", revision)
                self._answer({"files": [_mode(file["path"], there) for file in content["files"]]})
            case [_, _, "info", "lfs", "objects", "batch"]:
                objects = [_transfer(each, hub) for each in content["objects"]]
                self._answer({"transfer": "basic", "objects": objects})
            case ["api", "models", user, name, "commit", revision]:
                files = _committed(body, hub.large)
                oid = hub.commit(f"{user}/{name}", revision, files)
                self._answer({"success": True, "commitOid": oid, "commitUrl": f"{hub.url}/{user}/{name}/commit/{oid}"})
            case ["api", "models", user, name, "branch", branch]:
                hub.branches[f"{user}/{name}"][branch] = content["startingPoint"]
                self._answer({})
            case _:
                self._answer(status=404, message="not found")


def _mode(path: str, there: dict[str, bytes]) -> dict[str, Any]:
    """Whether a file goes to large storage, and the hash of the one that is there."""
    large, old = path.endswith(".safetensors"), there.get(path)
    oid = None
    if old is not None:
        oid = hashlib.sha256(old).hexdigest() if large else hashlib.sha1(b"blob %d\0" % len(old) + old).hexdigest()
    return {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, "oid": oid}


def _transfer(wanted: dict[str, Any], hub: Hub) -> dict[str, Any]:
    upload = {"actions": {"upload": {"href": f"{hub.url}/large/{wanted['oid']}"}}}
    return {"oid": wanted["oid"], "size": wanted["size"], **({} if wanted["oid"] in hub.large else upload)}


def _committed(body: bytes, large: dict[str, bytes]) -> dict[str, bytes]:
    """The files of a commit's lines; a large one must have been sent before."""
    found = {}
    for line in map(json.loads, body.splitlines()):
        value = line["value"]
        if line["key"] == "file":
            found[value["path"]] = base64.b64decode(value["content"])
        elif line["key"] == "lfsFile":
            found[value["path"]] = large[value["oid"]]
    return found


@contextmanager
def served_hub(monkeypatch: pytest.MonkeyPatch, token: str = WRITER) -> Iterator[Hub]:
    """A Hub that huggingface_hub talks to in this process with this token, and does not wait for when it is gone."""
    constants = pytest.importorskip("huggingface_hub.constants", reason="needs huggingface_hub (requirements.lock)")
    import huggingface_hub.utils._http as transport

    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(transport, "time", mock.Mock(wraps=time, sleep=lambda _: None))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
        monkeypatch.setenv("HF_TOKEN", token)
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
