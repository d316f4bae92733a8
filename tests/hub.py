"""A small stand-in for the Hugging Face hub, on this machine: the API's list of files, and the files themselves."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Hub:
    """A hub whose repositories are `models`: by name, the files, by their names, of the one commit.

    `refused` maps a name to the `X-Error-Code` with which the hub answers for it. `sizes` are those of the list of
    files where they are not true. `elsewhere` is where files are redirected to. `asked` has all requests: method, path,
    and Authorization.
    """

    address: str
    models: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, dict[str, int]] = field(default_factory=dict)
    elsewhere: str | None = None
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)

    def add(self, name: str, source: Path | Mapping[str, bytes]) -> None:
        files = source if isinstance(source, Mapping) else {x.name: x.read_bytes() for x in source.iterdir()}
        self.models[name] = dict(files)

    def commit(self, name: str) -> str:
        return hashlib.sha1(json.dumps({k: v.hex() for k, v in sorted(self.models[name].items())}).encode()).hexdigest()

    def fetched(self) -> list[str]:
        got = [path for how, path, _ in self.asked if how == "GET" and "/resolve/" in path]
        return [path.split("/resolve/")[1].partition("/")[2] for path in got]


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append((self.command, path, self.headers["Authorization"]))
        if path.startswith("/api/models/"):
            name, what, revision = re.split("/(revision|tree)/", path.removeprefix("/api/models/"))
            if not self.refuses(name, revision):
                sizes = {k: len(v) for k, v in self.hub.models[name].items()} | self.hub.sizes.get(name, {})
                files = [{"rfilename": file, "size": size} for file, size in sizes.items()]
                listed: Any = {"id": name, "sha": self.hub.commit(name), "siblings": files}
                if what == "tree":
                    listed = [{"type": "file", "path": k, "size": n, "oid": "0" * 40} for k, n in sizes.items()]
                self.answer(200, json.dumps(listed).encode(), {"Content-Type": "application/json"})
            return
        name, _, rest = path[1:].partition("/resolve/")
        revision, _, file = rest.partition("/")
        if self.refuses(name, revision, file):
            return
        data = self.hub.models[name][file]
        head = {"X-Repo-Commit": self.hub.commit(name), "ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
        if self.hub.elsewhere:
            linked = {"X-Linked-Etag": head["ETag"], "X-Linked-Size": str(len(data))}
            self.answer(302, b"", head | linked | {"Location": self.hub.elsewhere + path})
        else:
            self.answer(200, data, head)

    def refuses(self, name: str, revision: str, file: str = "") -> bool:
        """Answer for what is not there, or not allowed, as the hub does."""
        code = self.hub.refused.get(name)
        if code == "GatedRepo" and not file:
            code = None  # the list of files of a gated model is public
        if name not in self.hub.models:
            code = "RepoNotFound"
        elif revision not in ("main", "v1", self.hub.commit(name)):
            code = "RevisionNotFound"
        elif file and file not in self.hub.models[name]:
            code = "EntryNotFound"
        if code is not None:
            status = {"RepoNotFound": 401, "GatedRepo": 403}.get(code, 404)
            self.answer(503 if code == "Down" else status, b"{}", {"X-Error-Code": code})
        return code is not None

    def answer(self, status: int, data: bytes, head: Mapping[str, str]) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **head}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving() -> Iterator[Hub]:
    handler = type("Handler", (_Handler,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub = handler.hub = Hub(f"http://127.0.0.1:{server.server_port}")  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)
