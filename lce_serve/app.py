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
from lce_serve.guard import Guard, bytes_of, parsed
from lce_serve.inspecting import inspect
from lce_serve.messages import count_tokens, messages
from lce_serve.openapi import document
from lce_serve.pages import page, picture
from lce_serve.refusals import Refusal
from lce_serve.responses import responses
from lce_serve.service import Service

Reader = Callable[[Service, Request], Awaitable[Response]]
Writer = Callable[[Service, Request, Fields], Awaitable[Response]]


async def _describe(service: Service, request: Request) -> Response:
    return Json(document())


WITHOUT_BODY: dict[tuple[str, str], Reader] = {
    ("GET", "/"): page,
    ("GET", "/inspect"): picture,
    ("GET", "/openapi.json"): _describe,
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
_VERBS = [*WITHOUT_BODY, *WITH_BODY]


def application(service: Service) -> ASGIApp:
    """Return the application of a server."""

    def route(verb: str, path: str, answer: Callable[..., Awaitable[Response]], has_body: bool) -> Route:
        async def endpoint(request: Request) -> Response:
            request.scope["lce.record"].endpoint = path
            if not has_body:
                return await answer(service, request)
            service.check_ready()  # before the body is read
            body = await parsed(await bytes_of(request, service.settings), service.settings)
            return await answer(service, request, Fields(body))

        return Route(path, endpoint, methods=[verb])

    routes = [route(*key, answer, False) for key, answer in WITHOUT_BODY.items()]
    routes += [route(*key, answer, True) for key, answer in WITH_BODY.items()]
    return Guard(_Paths(routes, redirect_slashes=False), service)


class _Paths(Router):
    """The routes. Other paths and verbs are refused in the same form as everything else."""

    async def not_found(self, scope: Any, receive: Any, send: Any) -> None:
        raise Refusal(404, "there is nothing at this path; /openapi.json lists the paths")

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        verbs = {verb for (verb, path) in _VERBS if path == scope["path"]}
        verbs |= {"HEAD"} if "GET" in verbs else set()
        if verbs and scope["method"] not in verbs:
            allow = ", ".join(sorted(verbs))
            raise Refusal(405, f"expected {allow}", headers={"Allow": allow})
        await super().app(scope, receive, send)
