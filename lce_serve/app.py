"""The ASGI application: which endpoint answers which path."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from lce_serve import facts
from lce_serve.answering import Json
from lce_serve.chat import chat
from lce_serve.completions import completions
from lce_serve.fields import Fields
from lce_serve.guard import Guard, body_of
from lce_serve.inspecting import inspect
from lce_serve.messages import count_tokens, messages
from lce_serve.openapi import document
from lce_serve.pages import page, picture
from lce_serve.refusals import Refusal
from lce_serve.responses import responses
from lce_serve.service import Service

Reader = Callable[[Service, Request], Awaitable[Response]]
Writer = Callable[[Service, Request, Fields], Awaitable[Response]]

WITHOUT_BODY: dict[tuple[str, str], Reader] = {
    ("GET", "/"): page,
    ("GET", "/inspect"): picture,
    ("GET", "/health"): facts.health,
    ("GET", "/metrics"): facts.metrics,
    ("GET", "/props"): facts.props,
    ("GET", "/v1/models"): facts.models,
    ("GET", "/v1/models/{model:path}"): facts.model,
    ("GET", "/contexts"): facts.contexts,
    ("DELETE", "/contexts/{name}"): facts.drop_context,
}
WITH_BODY: dict[tuple[str, str], Writer] = {
    ("POST", "/v1/chat/completions"): chat,
    ("POST", "/v1/completions"): completions,
    ("POST", "/v1/responses"): responses,
    ("POST", "/v1/messages"): messages,
    ("POST", "/v1/messages/count_tokens"): count_tokens,
    ("POST", "/tokenize"): facts.tokenize,
    ("POST", "/detokenize"): facts.detokenize,
    ("POST", "/contexts"): facts.make_context,
    ("POST", "/inspect"): inspect,
}


def application(service: Service) -> ASGIApp:
    """Return the application of a server."""

    async def describe(service: Service, request: Request) -> Response:
        return Json(document())

    readers = {**WITHOUT_BODY, ("GET", "/openapi.json"): describe}
    routes = [
        *(Route(path, _reading(service, path, each), methods=[verb]) for (verb, path), each in readers.items()),
        *(Route(path, _writing(service, path, each), methods=[verb]) for (verb, path), each in WITH_BODY.items()),
    ]
    return Guard(_Paths(routes), service)


class _Paths(Router):
    """The routes. Other paths and verbs are refused in the same form as everything else."""

    def __init__(self, routes: list[Route]) -> None:
        super().__init__(routes, redirect_slashes=False)

    async def not_found(self, scope: Any, receive: Any, send: Any) -> None:
        raise Refusal(404, "there is nothing at this path; /openapi.json lists the paths")

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        verbs = {verb for (verb, path) in _VERBS if path == scope["path"]}
        verbs |= {"HEAD"} if "GET" in verbs else set()
        if verbs and scope["method"] not in verbs:
            allow = ", ".join(sorted(verbs))
            raise Refusal(405, f"expected {allow}", headers={"Allow": allow})
        await super().app(scope, receive, send)


_VERBS = [*WITHOUT_BODY, *WITH_BODY, ("GET", "/openapi.json")]


def _reading(service: Service, path: str, reader: Reader) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        request.scope["lce.record"].endpoint = path
        return await reader(service, request)

    return endpoint


def _writing(service: Service, path: str, writer: Writer) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        request.scope["lce.record"].endpoint = path
        _ = service.batch  # refuses a request while the server is loading or draining, before its body is read
        return await writer(service, request, Fields(await body_of(request, service.settings)))

    return endpoint
