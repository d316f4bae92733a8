"""Answers of requests that are refused or fail: the HTTP status, and the body in OpenAI's or in Anthropic's form."""

from __future__ import annotations

from typing import Any

from lce.errors import BusyError, CapacityError, DataError, LceError, UsageError

TOO_LONG = "context_length_exceeded"
BUSY_S = 2  # seconds after which a client may try again when the queue is full

_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {**_OPENAI_TYPES, 413: "request_too_large", 503: "overloaded_error"}


class Refusal(Exception):
    """The exception that ends a request with an HTTP status. `param` names the wrong field, if there is one."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers or {}

    def body(self, path: str = "") -> dict[str, Any]:
        """Return the JSON body of the answer, in the form of the API of a path."""
        anthropic = path.startswith("/v1/messages")
        own, other = (_ANTHROPIC_TYPES, "api_error") if anthropic else (_OPENAI_TYPES, "server_error")
        kind = own.get(self.status, "invalid_request_error" if self.status < 500 else other)
        if anthropic:
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def wrong(param: str, value: object, expected: str) -> Refusal:
    """Return the refusal of the value of the field `param`."""
    kind = {type(None): "null", bool: "a truth value", str: "a string", list: "a list", dict: "an object"}
    found = kind.get(type(value), str(value)[:40])
    return Refusal(400, f"{param} is {found}; expected {expected}", param)


def refusal_of(error: BaseException) -> Refusal | None:
    """Return the refusal that an error of lce means; None for an unexpected exception."""
    line = " ".join(str(error).split())
    if isinstance(error, Refusal):
        return error
    if isinstance(error, BusyError):
        return Refusal(429, line, code="queue_full", headers={"Retry-After": str(BUSY_S)})
    if isinstance(error, CapacityError):
        return Refusal(400, line, code=TOO_LONG)
    if isinstance(error, UsageError | DataError):
        return Refusal(400, line)
    return Refusal(500, line) if isinstance(error, LceError) else None
