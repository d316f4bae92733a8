"""The ASGI application in front of replicas: it checks requests, chooses a replica for each, and passes answers on.

A request whose replica ends before the first token is asked again of another one. An answer that streams when its
replica ends gets an error event as its last one: another replica could not go on at the same token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import asdict
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lce_serve import facts
from lce_serve.affinity import SESSION_HEADER, Affinity, affinity_of
from lce_serve.guard import Guard, bytes_of, parsed
from lce_serve.refusals import Refusal
from lce_serve.service import Record, Service
from lce_serve.sse import Gone, event, unless_gone

TRIES = 4  # replicas that are asked one after the other, while each ends before the first token
PAUSE_S = 0.25  # before the second try; it doubles with each
RECORD = "lce.record"  # the type of a replica's last message: fields of `Record`
_HEAD = ("type", "http_version", "method", "path", "raw_path", "query_string", "headers", "scheme", "client", "server")


class ReplicaLost(Exception):
    """The exception that says that a replica ended while it answered."""


class Replicas(Protocol):
    """The replicas behind a door."""

    def ask(self, affinity: Affinity, head: dict[str, Any], body: bytes) -> AsyncGenerator[Message]:
        """Yield a replica's ASGI messages, then one of the type `RECORD`. Raises `ReplicaLost`; closing cancels."""

    async def figures(self) -> Mapping[str, str]:
        """Return the figures of each replica in Prometheus' text form, by the replica's name."""


class DoorService(Service):
    """The state of a door. `batch` has the `Replicas`, or None while they load."""

    def serve(self, batch: Any) -> None:
        self._batch = batch


def door(service: DoorService) -> ASGIApp:
    """Return the application in front of replicas."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        method, path = scope["method"], scope["path"]
        if method in ("GET", "HEAD") and path in ("/health", "/metrics"):
            scope[RECORD].endpoint = path
            if path == "/health":
                response = await facts.health(service, request)
            else:
                response = Response(merged(await service.batch.figures()), media_type="text/plain; version=0.0.4")
            return await response(scope, receive, send)
        if method in ("POST", "DELETE") and path.startswith("/contexts"):
            raise Refusal(501, "replicas have contexts of files alone: lce prefill, then --context NAME=FILE")
        _ = service.batch  # refuses a request while the door is loading or draining, before its body is read
        body = await bytes_of(request, service.settings) if method == "POST" else b""
        found = await parsed(body, service.settings) if body else None
        affinity = await asyncio.to_thread(affinity_of, request.headers.get(SESSION_HEADER), found)
        await unless_gone(request, _Passage(service, scope, send).run(affinity, body))

    return Guard(answer, service)


class _Passage:
    """The passage of one answer from a replica to the client."""

    def __init__(self, service: DoorService, scope: Scope, send: Send) -> None:
        self._service, self._scope, self._client = service, scope, send
        self._record: Record = scope[RECORD]
        self._start: Message | None = None  # the head of an answer, which is held until its body comes
        self._is_stream = False  # then the head and comments go to the client at once
        self._n_sent = 0  # parts of the body, without comments
        self._last: Message | None = None  # the last part, which is held until the record comes

    async def run(self, affinity: Affinity, body: bytes) -> None:
        """Ask replicas until one has answered."""
        try:
            for number in range(TRIES):
                try:
                    await self._ask(affinity, body)
                    break
                except ReplicaLost:
                    if self._last is not None or self._n_sent:
                        break
                    await asyncio.sleep(PAUSE_S * 2**number)
            if self._last is None:
                raise Refusal(503, "the replica ended while it answered; ask again", code="replica_lost")
            await self._send(self._last)
        except Exception as error:
            if not self._is_stream or isinstance(error, Gone):
                raise
            await self._fail(self._scope["lce.failed"](error))

    async def _ask(self, affinity: Affinity, body: bytes) -> None:
        head = {name: self._scope[name] for name in _HEAD if name in self._scope} | {"lce.id": self._record.id}
        async with aclosing(self._service.batch.ask(affinity, head, body)) as messages:
            async for message in messages:
                await self._take(message)

    async def _take(self, message: Message) -> None:
        """Pass on a replica's message, or hold it."""
        if message["type"] == RECORD:
            for name, value in message["fields"].items():
                setattr(self._record, name, value)
        elif message["type"] == "http.response.start":
            is_stream = any(value.startswith(b"text/event-stream") for _, value in message["headers"])
            if self._is_stream and not is_stream:  # a second replica refuses what the first one began to answer
                raise Refusal(503, "the replica ended, and no other one takes the request", code="replica_lost")
            if not self._is_stream:
                self._start, self._is_stream = message, is_stream
        elif message.get("more_body"):
            self._n_sent += not (self._is_stream and message["body"].startswith(b":"))
            await self._send(message)
        else:
            self._last = message

    async def _send(self, message: Message) -> None:
        """Send a part of the body, the first one behind the held head."""
        try:
            async with asyncio.timeout(self._service.settings.send_s):
                if self._start is not None:
                    start, self._start = self._start, None
                    await self._client(start)
                await self._client(message)
        except TimeoutError:  # the client does not read
            raise Gone from None

    async def _fail(self, refusal: Refusal) -> None:
        """End a stream by an error event, in the form of its endpoint."""
        path = self._scope["path"]
        data = event(refusal.body(path), "error" if path.startswith("/v1/messages") else None)
        if path.startswith("/v1/responses"):
            own = {"type": "error", "code": refusal.code, "message": refusal.message, "param": None}
            data = event({**own, "sequence_number": self._n_sent}, "error")
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        await self._send({"type": "http.response.body", "body": b""})


async def answered(app: ASGIApp, head: dict[str, Any], body: bytes, name: str) -> AsyncGenerator[Message]:
    """Yield the messages by which the replica `name` answers: those of its application, then one of type `RECORD`.

    Closing the generator tells the application that the client has gone.
    """
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    left, given = asyncio.Event(), iter([{"type": "http.request", "body": body}])

    async def receive() -> Message:
        if (message := next(given, None)) is None:
            await left.wait()
        return message or {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app(head, receive, messages.put)
        finally:
            messages.put_nowait(None)

    running = asyncio.create_task(run())
    try:
        while (message := await messages.get()) is not None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-lce-replica", name.encode())]}
            yield message
        await running
        fields = {key: value for key, value in asdict(head[RECORD]).items() if key not in ("id", "started", "status")}
        yield {"type": RECORD, "fields": {**fields, "replica": name}}
    finally:
        left.set()
        await asyncio.wait({running})


def merged(texts: Mapping[str, str]) -> bytes:
    """Return the figures of several replicas as one text, each with the label `replica`."""
    families: dict[str, Any] = {}
    for replica, text in texts.items():
        for found in text_string_to_metric_families(text):
            family = families.setdefault(found.name, found)
            labelled = [sample._replace(labels={**sample.labels, "replica": replica}) for sample in found.samples]
            family.samples = (family.samples if family is not found else []) + labelled

    class Found(Collector):
        def collect(self) -> Any:
            return families.values()

    registry = CollectorRegistry()
    registry.register(Found())
    return bytes(generate_latest(registry))
