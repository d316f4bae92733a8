"""Runs the server: uvicorn, with limits for slow and for many clients, and with an end that lets streams end."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import time
from contextlib import suppress
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from lce.errors import UsageError
from lce.progress import notice
from lce_serve.answering import Json
from lce_serve.app import application
from lce_serve.refusals import Refusal
from lce_serve.service import Service

MOST_HEAD = 64 << 10  # bytes of a request's line and headers
IDLE_S = 30  # seconds for which a connection without a request stays open after an answer
LAST_S = 5  # seconds for open connections after the last stream
MOST_FILES = 65_536  # descriptors that a server takes, where the system allows so many
SPARE_FILES = 64  # descriptors for everything but connections, beside those that are open at the start
CROWD, CROWD_S = 16, 1.0  # connections above the limit that get an answer, and the seconds that they may stay silent


class Server(uvicorn.Server):
    """A server that finishes its requests after the first signal (`signal`), and ends at once after the second."""

    def __init__(self, service: Service, app: ASGIApp | None = None) -> None:
        """Make a server of an application, by default of the one that answers by the service's batch."""
        settings = service.settings
        config = uvicorn.Config(
            app or application(service),
            http=_protocol(settings.head_s, most_connections(settings.most_connections)),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=IDLE_S,
            h11_max_incomplete_event_size=MOST_HEAD,
            timeout_graceful_shutdown=LAST_S,
        )
        super().__init__(config)
        self.signal: int | None = None
        self._service = service
        self._until = 0.0
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # requests that are not HTTP are no news

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; at the second signal, stop."""
        if self.signal is not None:
            self.should_exit = self.force_exit = True
        self.signal = self.signal or sig
        self.drain()

    def drain(self) -> None:
        """Take no more requests, and stop when those that run have ended, or after `drain_s` seconds."""
        self._until = self._until or time.monotonic() + self._service.settings.drain_s
        self._service.draining = True

    async def on_tick(self, counter: int) -> bool:
        """Return whether it is time to stop. uvicorn asks ten times a second."""
        if self._until and (not self._service.active or time.monotonic() > self._until):
            self.should_exit = True
        return await super().on_tick(counter)

    def listen(self, sock: socket.socket) -> None:
        """Serve on a socket until the server stops. Raises KeyboardInterrupt after Ctrl-C."""
        self.run(sockets=[sock])
        if self.signal == signal.SIGINT:
            raise KeyboardInterrupt


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(f"--host {host}: {error.strerror or error}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(128)
    except (OSError, OverflowError) as error:
        sock.close()
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"port {port} of {host} cannot be used: {reason}; give another --port") from None
    return sock


def most_connections(wanted: int) -> int:
    """Return the number of connections for which there are descriptors, up to `wanted`. Says so if it is less.

    The process' limit of open files is raised first, as far as the system allows.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    n_open = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else SPARE_FILES
    free = wanted if soft == resource.RLIM_INFINITY else soft - n_open - SPARE_FILES - CROWD
    if free < wanted:
        notice(f"the limit of {soft:,} open files leaves {max(free, 1):,} connections; raise it by ulimit -n")
    return max(1, min(free, wanted))


def _crowded(app: ASGIApp) -> ASGIApp:
    """Return the application for connections above the limit: it answers /health alone, and closes the connection."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def put(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        if scope["path"] == "/health":
            await app(scope, receive, put)
        else:
            refusal = Refusal(503, "the server has all the connections that it takes; try again later", code="crowded")
            await Json(refusal.body(scope["path"]), refusal.status, refusal.headers)(scope, receive, put)

    return answer


def _protocol(head_s: float, most: int) -> type[H11Protocol]:
    """Return uvicorn's protocol, with a time limit for a request's head, and a limit of connections."""

    class Protocol(H11Protocol):
        _head: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            is_crowd = len(self.connections) > most
            if is_crowd:
                self.app = _crowded(self.app)
            if len(self.connections) > most + CROWD:
                transport.abort()
            self._head = self.loop.call_later(min(head_s, CROWD_S) if is_crowd else head_s, self._late)

        def data_received(self, data: bytes) -> None:
            before, idle = self.cycle, self.cycle is None or self.cycle.response_complete
            super().data_received(data)
            if self.cycle is not before:
                self._stop()
            elif idle and self._head is None:
                self._head = self.loop.call_later(head_s, self._late)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def _stop(self) -> None:
            if self._head is not None:
                self._head.cancel()
                self._head = None

        def _late(self) -> None:
            self._head = None
            self.transport.close()

    return Protocol


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a host."""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def address(sock: socket.socket) -> str:
    """Return the URL of a listening socket."""
    host, port, *_ = sock.getsockname()
    found: Any = f"[{host}]" if ":" in host else host
    return f"http://{found}:{port}"
