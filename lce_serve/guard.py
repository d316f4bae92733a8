"""What every request passes: checks of its head, the key, origins, errors as JSON, and a line in the log.

On loopback without a key, the Host header must be a name of this machine, so that no web page reaches the server
through a name of its own (DNS rebinding); and a request with an Origin is refused unless the origin was named, or is
the server's own page.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import sys
import time
import traceback
from dataclasses import asdict
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lce.files import JsonError, parse_json
from lce_serve.answering import Json
from lce_serve.refusals import Refusal, refusal_of
from lce_serve.service import Record, Service, Settings
from lce_serve.sse import Gone

_OPEN = ("/", "/inspect", "/health")  # need no key where they are read: they have no data
_FORM = "application/x-www-form-urlencoded"  # what `curl -d` calls JSON if nobody says otherwise
_ALLOWED = {
    "Access-Control-Allow-Methods": "GET, POST, DELETE",
    "Access-Control-Allow-Headers": (
        "Authorization, Content-Type, X-Api-Key, X-Session-Id, Anthropic-Version, Anthropic-Beta"
    ),
    "Access-Control-Max-Age": "600",
}


class Guard:
    """The outermost ASGI application. `scope` gets `lce.record`, and `lce.failed`, which notes an error.

    `lce.id` of a scope is the request's id, if a door in front of this server has given it one.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        scope["path"] = scope["path"].rstrip("/") or "/"
        service, record = self._service, Record(scope.get("lce.id") or f"req_{secrets.token_hex(8)}")
        allowed = self._allowed(scope)

        async def put(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                more = {"X-Request-Id": record.id, "X-Content-Type-Options": "nosniff", **allowed}
                pairs = {name.lower().encode(): value.encode() for name, value in more.items()}
                given = [pair for pair in message["headers"] if pair[0] not in pairs]  # a replica's answer has them too
                message = {**message, "headers": [*given, *pairs.items()]}
            await send(message)

        def failed(error: BaseException) -> Refusal:
            refusal = refusal_of(error) or Refusal(500, f"internal error; the server's log has it under {record.id}")
            if refusal.status < 500:  # the message may quote what the client sent
                record.error = refusal.code or refusal.param or "refused"
            else:
                record.error = f"{type(error).__name__}: {error}"
            if refusal.message.startswith("internal error"):
                log({"id": record.id, "traceback": "".join(traceback.format_exception(error))})
            return refusal

        scope["lce.record"], scope["lce.failed"] = record, failed
        service.active += 1
        try:
            try:
                self._check(scope)
                if scope["method"] == "OPTIONS" and allowed:
                    await Response(status_code=204, headers=_ALLOWED)(scope, receive, put)
                else:
                    await self._app(scope, receive, put)
            except Gone:
                record.finish = "client gone"
            except Exception as error:
                refusal = failed(error)
                if not record.status:
                    await Json(refusal.body(scope["path"]), refusal.status, refusal.headers)(scope, receive, put)
        finally:
            service.active -= 1
            self._note(scope, record)

    def _allowed(self, scope: Scope) -> dict[str, str]:
        """Return the headers that let a named origin read the answer."""
        origin = Headers(scope=scope).get("origin")
        if origin is None or not {origin, "*"} & set(self._service.settings.origins):
            return {}
        return {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}

    def _check(self, scope: Scope) -> None:
        """Refuse a request by its head."""
        headers, settings = Headers(scope=scope), self._service.settings
        if len(headers) > settings.most_headers:
            raise Refusal(431, f"the request has {len(headers)} headers; expected {settings.most_headers} or fewer")
        preflight = scope["method"] == "OPTIONS" and bool(self._allowed(scope))
        if settings.key is None:
            host = headers.get("host", "").lower()
            if host.rpartition(":")[0] not in settings.hosts and host not in settings.hosts:
                raise Refusal(403, f"the Host header must name this machine: {', '.join(settings.hosts)}")
            origin = headers.get("origin")
            if origin not in (None, f"http://{host}") and not self._allowed(scope):
                raise Refusal(403, "this origin may not ask; start lce serve with --cors ORIGIN")
        elif not preflight and not _is_open(scope, settings) and not _has_key(headers, settings.key):
            raise Refusal(401, "the API key is missing or wrong", code="invalid_api_key")

    def _note(self, scope: Scope, record: Record) -> None:
        """Write a request's line to the log, and count it."""
        service, endpoint = self._service, record.endpoint or "other"
        took = time.monotonic() - record.started
        if record.prompt_tokens:
            service.metrics.whole.observe(took)
        service.metrics.answered(endpoint, record.status)
        if endpoint in ("/health", "/metrics") and record.status == 200:
            return
        line = asdict(record) | {"endpoint": endpoint, "method": scope["method"], "total_s": took, "started": None}
        log({name: round(x, 4) if isinstance(x, float) else x for name, x in line.items() if x is not None})


def log(line: dict[str, Any]) -> None:
    """Write one line of JSON to stderr."""
    print(json.dumps({"time": round(time.time(), 3), **line}), file=sys.stderr, flush=True)


def _is_open(scope: Scope, settings: Settings) -> bool:
    """Return whether a request needs no key."""
    is_open = scope["method"] in ("GET", "HEAD") and scope["path"] in _OPEN
    return is_open or (settings.open_metrics and scope["path"] == "/metrics")


def _has_key(headers: Headers, key: str) -> bool:
    """Return whether a request has the key. Takes the same time for every wrong key of a length."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    given = given.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    return hmac.compare_digest(given.encode("utf-8", "replace"), key.encode())


async def bytes_of(request: Request, settings: Settings) -> bytes:
    """Return the bytes of a request's body. Refuses a body of another type than JSON, a too large and a too slow one.

    A web page may send a body without a type, or as a form, without asking first; its Origin is checked all the same.
    """
    kind = request.headers.get("content-type", _FORM).partition(";")[0].strip().lower()
    if kind not in ("application/json", _FORM):
        raise Refusal(415, "expected Content-Type: application/json")
    length = request.headers.get("content-length", "0")
    too_large = Refusal(413, f"the body has more than {settings.most_body} bytes")
    if not length.isdecimal() or int(length[:20]) > settings.most_body:
        raise too_large
    data = bytearray()
    try:
        async with asyncio.timeout(settings.body_s):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise Gone
                data += message.get("body", b"")
                if len(data) > settings.most_body:
                    raise too_large
                if not message.get("more_body"):
                    break
    except TimeoutError:
        raise Refusal(408, f"the body did not come within {settings.body_s:g} seconds") from None
    return bytes(data)


async def parsed(data: bytes, settings: Settings) -> Any:
    """Return the JSON value of a body. Refuses a body that is wrong or too deep."""
    return _parsed(data, settings) if len(data) < 1 << 16 else await asyncio.to_thread(_parsed, data, settings)


def _parsed(data: bytes, settings: Settings) -> Any:
    """Parse a body, and refuse one that is nested too deeply."""
    try:
        found = parse_json(data, settings.most_values)
    except JsonError as error:
        raise Refusal(400, str(error)) from None
    level: list[Any] = [found]
    for _ in range(settings.most_depth):
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
        if not level:
            return found
    raise Refusal(400, f"the body is nested more than {settings.most_depth} levels deep")
