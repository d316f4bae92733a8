"""Serves the page with an engine on loopback: `lce inspect --live`.

Only this machine can reach the server, and only with the address, which contains a random token. Other web pages have
no access: the Host header is checked (DNS rebinding), POST needs our own Origin, and no header lets another origin read
an answer. Requests are bounded in size and time, connections in number. An invalid request is answered by 4xx and one
line of JSON, `{"error": "…"}`.

    GET  /TOKEN/                    the page
    GET  /TOKEN/about               the model, the methods and their knobs, the limits
    GET  /TOKEN/state?known=ID      progress; the finished recording, unless known
    GET  /TOKEN/data/KEY/R-S.js     segment S of run R
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
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import urlsplit

from lce.errors import LceError, UsageError
from lce.files import JsonError, parse_json
from lce.lab.study.live import Busy, Live
from lce.lab.study.web_page import page

HOST = "127.0.0.1"
TOKEN_BYTES = 24
MOST_BODY = 4 << 20
MOST_VALUES = 1 << 20
MOST_CONNECTIONS = 32
HEAD_S, BODY_S, ANSWER_S = 10.0, 15.0, 60.0  # to receive a request's head and body, and to send an answer
DRAIN_S = 1.0  # to read what is sent after an answer

_SEGMENT = re.compile(r"data/([0-9a-f]{1,64})/(\d{1,4})-(\d{1,7})\.js")
_KNOWN = re.compile(r"known=(\d{1,15})")


class LiveServer(ThreadingHTTPServer):
    """A server of a `Live`'s page on loopback; `address` is for the browser. `close` ends the server."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, live: Live, port: int = 0, prompt: str = "", *, head_s: float = HEAD_S, body_s: float = BODY_S):
        self.live, self.prompt, self.head_s, self.body_s = live, prompt, head_s, body_s
        self.token = secrets.token_urlsafe(TOKEN_BYTES)
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"port {port} cannot be used: {reason}; give another --port, or 0 for any") from None

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.port}/{self.token}/"

    @property
    def names(self) -> tuple[str, ...]:
        """The valid Host headers."""
        return f"{HOST}:{self.port}", f"localhost:{self.port}"

    def server_bind(self) -> None:
        """Bind without a DNS query for our own name."""
        super(ThreadingHTTPServer, self).server_bind()
        self.server_name, self.server_port = HOST, self.port

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore broken connections."""

    def close(self) -> None:
        """End the current run and free the port."""
        self.live.close()
        self.server_close()


class _Refused(Exception):
    """Ends a request with a status and one line of text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    """One request; the connection closes behind it."""

    server: LiveServer
    timeout = HEAD_S
    server_version, sys_version = "lce", ""
    nonce = ""

    def setup(self) -> None:
        super().setup()
        self.watchdog = threading.Timer(self.server.head_s, self._hang_up)  # a head that comes byte by byte
        self.watchdog.daemon = True
        self.watchdog.start()

    def finish(self) -> None:
        self.watchdog.cancel()
        with suppress(OSError):
            super().finish()
            self._drain()

    def _drain(self) -> None:
        """Read for a moment what the client still sends; closing earlier would discard our answer (RST)."""
        self.connection.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + DRAIN_S
        while (left := deadline - time.monotonic()) > 0:
            self.connection.settimeout(left)
            if not self.connection.recv(1 << 16):
                break

    def _hang_up(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RD)

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _answer(self, act: Callable[[str, str], None]) -> None:
        """Check the request, then call `act` with the rest of the path and the query."""
        self.watchdog.cancel()
        self.connection.settimeout(ANSWER_S)
        try:
            act(*self._checked_path())
        except _Refused as refused:
            self._send_json(refused.status, {"error": str(refused)})
        except Busy as error:
            self._send_json(409, {"error": str(error)})
        except LceError as error:
            self._send_json(400, {"error": " ".join(str(error).split())})
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    def _checked_path(self) -> tuple[str, str]:
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or hosts[0].strip().lower() not in self.server.names:
            raise _Refused(403, f"the Host header must be {self.server.names[0]}")
        try:
            parts = urlsplit(self.path)
        except ValueError:
            raise _Refused(400, "the address cannot be read") from None
        empty, _, rest = parts.path.partition("/")
        token, slash, rest = rest.partition("/")
        right = hmac.compare_digest(token.encode("utf-8", "replace"), self.server.token.encode())
        if empty or parts.scheme or parts.netloc or not slash or not right:
            raise _Refused(403, "wrong address; open the one that lce inspect --live printed")
        return rest, parts.query

    def _get(self, path: str, query: str) -> None:
        live = self.server.live
        if path == "":
            self.nonce = secrets.token_urlsafe(16)
            known = {"base": f"/{self.server.token}/", "prompt": self.server.prompt}
            self._send(200, "text/html; charset=utf-8", page("null", nonce=self.nonce, live=known).encode())
        elif path == "state":
            known_id = _KNOWN.fullmatch(query)
            self._send_json(200, live.state(int(known_id[1]) if known_id else None))
        elif path == "about":
            self._send_json(200, live.about())
        elif found := _SEGMENT.fullmatch(path):
            text = live.script(found[1], int(found[2]), int(found[3]))
            if text is None:
                raise _Refused(404, "there is no such segment; ask for the state again")
            self._send(200, "text/javascript; charset=utf-8", text.encode("ascii"))
        elif path in ("run", "cancel"):
            raise _Refused(405, "expected POST")
        else:
            raise _Refused(404, "there is nothing here")

    def _post(self, path: str, query: str) -> None:
        if path not in ("run", "cancel"):
            raise _Refused(405 if path in ("", "state", "about") else 404, "nothing is posted here")
        origins = self.headers.get_all("Origin") or []
        if len(origins) != 1 or origins[0] not in [f"http://{name}" for name in self.server.names]:
            raise _Refused(403, "the Origin header must be that of the page")
        kind = (self.headers.get("Content-Type") or "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise _Refused(415, "expected Content-Type: application/json")
        try:
            body = parse_json(self._body(), MOST_VALUES, unique=True)
        except JsonError as error:
            raise _Refused(400, str(error)) from None
        number = self.server.live.start(body) if path == "run" else self.server.live.cancel()
        self._send_json(202, {"id": number})

    def _body(self) -> bytes:
        """Read the body within some seconds; its length must be announced and bounded."""
        lengths = self.headers.get_all("Content-Length") or []
        if "Transfer-Encoding" in self.headers or len(lengths) != 1 or not re.fullmatch(r"[0-9]{1,18}", lengths[0]):
            raise _Refused(411, "expected one Content-Length and no Transfer-Encoding")
        left = int(lengths[0])
        if left > MOST_BODY:
            raise _Refused(413, f"the body has {left:,} bytes; expected {MOST_BODY:,} or fewer")
        deadline, parts = time.monotonic() + self.server.body_s, []
        while left:
            try:
                self.connection.settimeout(max(0.01, deadline - time.monotonic()))
                part = self.rfile.read1(min(left, 1 << 16))
            except TimeoutError:
                raise _Refused(408, f"the body did not come within {self.server.body_s:g} seconds") from None
            if not part:
                raise _Refused(400, "the body is shorter than its Content-Length")
            parts.append(part)
            left -= len(part)
        self.connection.settimeout(ANSWER_S)
        return b"".join(parts)

    def _send_json(self, status: int, value: Any) -> None:
        self._send(status, "application/json", json.dumps(value, separators=(",", ":")).encode("ascii") + b"\n")

    _HEADERS: ClassVar = {
        "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store", "Referrer-Policy": "no-referrer",
        "X-Frame-Options": "DENY", "Cross-Origin-Resource-Policy": "same-origin",
        "Cross-Origin-Opener-Policy": "same-origin",
    }  # fmt: skip

    def _send(self, status: int, kind: str, data: bytes) -> None:
        own = f"'nonce-{self.nonce}' " if self.nonce else ""
        policy = (
            f"default-src 'none'; script-src {own}'self'; style-src {own}'self'; img-src 'self' data:; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        self.close_connection = True
        self.connection.settimeout(ANSWER_S)
        self.request_version = "HTTP/1.0"  # http.server sends no head to older versions
        self.send_response(status)
        for name, value in {**self._HEADERS, "Content-Security-Policy": policy, "Content-Type": kind}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer requests that http.server refuses: a broken or too long request line or header, another method."""
        status = {501: 405, 505: 400}.get(int(code), int(code))
        try:
            self._send_json(status, {"error": message or "the request cannot be read"})
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    def version_string(self) -> str:
        return "lce"

    def log_message(self, format: str, *args: Any) -> None:
        pass
