"""Streams of server-sent events that stay alive, and requests that end when their client goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Gone(Exception):
    """The exception that ends a request whose client went away."""


def event(data: object, name: str | None = None) -> bytes:
    """Return one event. `data` is a JSON value, or a text that is sent as it is."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return ((f"event: {name}\n" if name else "") + f"data: {text}\n\n").encode("utf-8", "replace")


async def gone(receive: Receive) -> None:
    """Wait until the client goes away. The request's body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. Cancels `work` and raises `Gone` when the client goes away."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(gone(request.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Gone
        return working.result()
    finally:
        await _ended(working, leaving)


class EventStream(Response):
    """A response that sends headers at once, then events, and after each silence a comment that tells the progress.

    `events` yields encoded events. `progress` returns tokens done and the total. `close` is called in every case.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        progress: Callable[[], tuple[int, int]],
        close: Callable[[], None],
        ping_s: float,
        send_s: float,
    ) -> None:
        super().__init__(media_type="text/event-stream", headers=_HEADERS)
        del self.headers["content-length"]
        self._events, self._progress, self._close = events, progress, close
        self._ping_s, self._send_s = ping_s, send_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def put(data: bytes, more: bool = True) -> None:
            async with asyncio.timeout(self._send_s):
                await send({"type": "http.response.body", "body": data, "more_body": more})

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        leaving = asyncio.create_task(gone(receive))
        next_one: asyncio.Task[bytes | None] | None = None
        try:
            await put(b": lce\n\n")
            while True:
                next_one = next_one or asyncio.ensure_future(anext(self._events, None))
                done, _ = await asyncio.wait(
                    (next_one, leaving), timeout=self._ping_s, return_when=asyncio.FIRST_COMPLETED
                )
                if leaving in done:
                    raise Gone
                if not done:
                    await put(b": prefill %d/%d\n\n" % self._progress())
                    continue
                finished, next_one = next_one, None
                if (data := finished.result()) is None:
                    break
                await put(data)
            await put(b"", more=False)
        except TimeoutError:  # the client does not read
            raise Gone from None
        finally:
            await _ended(*(task for task in (next_one, leaving) if task is not None))
            await self._events.aclose()
            self._close()


async def _ended(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks, and wait for their ends."""
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError, Exception):
            await task
