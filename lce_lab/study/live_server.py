"""Serves the page of `lce inspect --live`, with an engine behind it, on loopback.

Only this machine can reach the server, and only with the address, which contains a random token. Other web pages have
no access: the Host header is checked (DNS rebinding), POST needs the page's Origin, and no header lets another origin
read an answer. Requests are bounded in size, connections in number, and a silent connection is closed. An invalid
request is answered by 4xx and one line of JSON, `{"error": "…"}`.

    GET  /TOKEN/                    the page
    GET  /TOKEN/about               the model, the methods and their knobs, the largest number of new tokens
    GET  /TOKEN/state?known=ID      the run's progress; after its end, the recording, unless ID is the run's number
    GET  /TOKEN/data/KEY/R-S.js     segment S of the data of run R
    POST /TOKEN/run, /TOKEN/cancel
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
import socket
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any

from lce.errors import LceError, UsageError
from lce.files import JsonError, parse_json
from lce_lab.study.live import Busy, Live
from lce_lab.study.web_page import page

HOST = "127.0.0.1"
TOKEN_BYTES = 24
MOST_BODY = 4 << 20  # The largest number of bytes of a request's body.
MOST_VALUES = 1 << 20  # The largest number of JSON values in a body.
MOST_CONNECTIONS = 32  # The most connections that are open at once; more are closed unanswered.
SILENT_S = 10.0  # Seconds of silence after which a connection is closed.
ANSWER_S = 60.0  # Seconds that a client may take to receive an answer.
DRAIN_S = 1.0  # After an answer, bytes from the client are read for so many seconds more.

HEADERS = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}
HEADERS |= dict.fromkeys(("Cross-Origin-Resource-Policy", "Cross-Origin-Opener-Policy"), "same-origin")
HEADERS |= {"X-Frame-Options": "DENY"}
_SEGMENT = re.compile(r"data/([0-9a-f]{1,64})/(\d{1,4})-(\d{1,7})\.js")
_KNOWN = re.compile(r"known=(\d{1,15})")


class LiveServer(ThreadingTCPServer):
    """An HTTP server, on loopback, for a page that sends prompts to a `Live`. `address` is the page's URL."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, live: Live, port: int = 0, prompt: str = "") -> None:
        self.live, self.prompt, self.token = live, prompt, secrets.token_urlsafe(TOKEN_BYTES)
        # Not a BoundedSemaphore: Ctrl-C while a thread starts has both threads release, and ends the server.
        self._free = threading.Semaphore(MOST_CONNECTIONS)
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"port {port} cannot be used: {reason}; give another --port, or 0 for any") from None
        self.port = int(self.server_address[1])
        self.names = f"{HOST}:{self.port}", f"localhost:{self.port}"  # the valid values of the Host header
        self.address = f"http://{HOST}:{self.port}/{self.token}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread of its own; close the connection at once if too many are open."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            super().shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection that `process_request` admitted, and admit another one."""
        super().shutdown_request(request)
        self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore broken connections."""

    def close(self) -> None:
        """End the current run and the server, and free the port."""
        self.live.close()
        self.server_close()


class _Refused(Exception):
    """The exception for a refused request. Its two arguments are the HTTP status and the error message."""


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    timeout = SILENT_S
    server_version, sys_version = "lce", ""
    nonce = ""

    def finish(self) -> None:
        """Read what the client still sends, for up to `DRAIN_S` seconds: closing at once would send a reset (RST)."""
        with suppress(OSError):
            super().finish()
            self.connection.shutdown(socket.SHUT_WR)
            deadline = time.monotonic() + DRAIN_S
            while (left := deadline - time.monotonic()) > 0:
                self.connection.settimeout(left)
                if not self.connection.recv(1 << 16):
                    break

    def do_GET(self) -> None:
        """Check a GET or POST request, then answer it."""
        try:
            self._answer(*self._checked_path())
        except _Refused as refused:
            self._send_json(refused.args[0], {"error": refused.args[1]})
        except LceError as error:
            self._send_json(409 if isinstance(error, Busy) else 400, {"error": " ".join(str(error).split())})
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    do_POST = do_GET

    def _header(self, name: str) -> str:
        values = self.headers.get_all(name) or []
        return values[0].strip() if len(values) == 1 else ""

    def _checked_path(self) -> tuple[str, str]:
        """Return the URL's path after the token, and its query. Refuse a wrong token or Host header."""
        if self._header("Host").lower() not in self.server.names:
            raise _Refused(403, f"the Host header must be {self.server.names[0]}")
        path, _, query = self.requestline.split()[1].partition("?")  # http.server makes // at the beginning of `path` /
        own = f"/{self.server.token}/"
        if not hmac.compare_digest(path[: len(own)].encode("utf-8", "replace"), own.encode()):
            raise _Refused(403, "wrong address; open the one that lce inspect --live printed")
        return path.removeprefix(own), query

    def _answer(self, path: str, query: str) -> None:
        live, segment = self.server.live, _SEGMENT.fullmatch(path)
        if not segment and path not in ("", "state", "about", "run", "cancel"):
            raise _Refused(404, "there is nothing here")
        expected = "POST" if path in ("run", "cancel") else "GET"
        if self.command != expected:
            raise _Refused(405, f"expected {expected}")
        if segment:
            text = live.script(segment[1], int(segment[2]), int(segment[3]))
            if text is None:
                raise _Refused(404, "there is no such segment; ask for the state again")
            self._send(200, "text/javascript; charset=utf-8", text.encode("ascii"))
        elif path == "":
            self.nonce = secrets.token_urlsafe(16)
            known = {"base": f"/{self.server.token}/", "prompt": self.server.prompt}
            self._send(200, "text/html; charset=utf-8", page("null", nonce=self.nonce, live=known).encode())
        elif path == "state":
            known_id = _KNOWN.fullmatch(query)
            self._send_json(200, live.state(int(known_id[1]) if known_id else None))
        elif path == "about":
            self._send_json(200, live.about())
        else:
            body = self._body()
            self._send_json(202, {"id": live.start(body) if path == "run" else live.cancel()})

    def _body(self) -> Any:
        """Return the JSON body of a POST. Refuse origins other than the page, and bodies of unknown or large size."""
        if self._header("Origin") not in [f"http://{name}" for name in self.server.names]:
            raise _Refused(403, "the Origin header must be that of the page")
        if self._header("Content-Type").partition(";")[0].strip().lower() != "application/json":
            raise _Refused(415, "expected Content-Type: application/json")
        length = self._header("Content-Length")
        if "Transfer-Encoding" in self.headers or not re.fullmatch(r"[0-9]{1,18}", length):
            raise _Refused(411, "expected one Content-Length and no Transfer-Encoding")
        if int(length) > MOST_BODY:
            raise _Refused(413, f"the body has {int(length):,} bytes; expected {MOST_BODY:,} or fewer")
        try:
            body = self.rfile.read(int(length))
        except TimeoutError:
            raise _Refused(408, f"nothing of the body came within {SILENT_S:g} seconds") from None
        if len(body) < int(length):
            raise _Refused(400, "the body is shorter than its Content-Length")
        try:
            return parse_json(body, MOST_VALUES, unique=True)
        except JsonError as error:
            raise _Refused(400, str(error)) from None

    def _send_json(self, status: int, value: Any) -> None:
        self._send(status, "application/json", json.dumps(value, separators=(",", ":")).encode("ascii") + b"\n")

    def _send(self, status: int, kind: str, data: bytes) -> None:
        own = f"'nonce-{self.nonce}' " if self.nonce else ""
        policy = (
            f"default-src 'none'; script-src {own}'self'; style-src {own}'self'; img-src 'self' data:; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        self.close_connection = True
        self.connection.settimeout(ANSWER_S)
        self.request_version = "HTTP/1.0"  # for HTTP/0.9, http.server would send no status and no headers
        self.send_response(status)
        own_headers = {"Content-Security-Policy": policy, "Content-Type": kind, "Content-Length": str(len(data))}
        for name, value in {**HEADERS, **own_headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer requests that http.server refuses: a broken or too long request line or header, an unknown method."""
        with suppress(ConnectionError, TimeoutError):
            status = {501: 405, 505: 400}.get(int(code), int(code))
            self._send_json(status, {"error": message or "the request cannot be read"})

    def log_message(self, format: str, *args: Any) -> None:
        pass
