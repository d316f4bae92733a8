"""The small endpoints: models, health, figures, tokens and named contexts."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import lce
from lce_serve.answering import Json, common
from lce_serve.contexts import as_object
from lce_serve.conversation import prompt_or_messages, rendered
from lce_serve.fields import MOST_TOKENS, Fields
from lce_serve.generation import engine_for, room
from lce_serve.refusals import wrong
from lce_serve.service import Service
from lce_serve.sse import unless_gone

LISTED = 1 << 16  # token ids that are written at once: longer lists would hold up other threads


async def health(service: Service, request: Request) -> Response:
    """Say whether the server takes requests. Needs no key."""
    return Json({"status": service.status}, status_code=200 if service.status == "ok" else 503)


async def metrics(service: Service, request: Request) -> Response:
    """Return the figures for Prometheus."""
    text = await asyncio.to_thread(service.metrics.text)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def _model(service: Service, name: str) -> dict[str, Any]:
    engine = service.engine
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": service.started,
        "owned_by": "lce",
        "max_model_len": engine.setup.readable,
        "meta": {"n_vocab": engine.setup.model.config.vocab_size, "window": engine.window},
        "sampling": engine.setup.sampling_for({}),
    }


async def models(service: Service, request: Request) -> Response:
    """List the model, and the model with each named context."""
    own = service.settings.model
    names = [own, *(f"{own}@{each['name']}" for each in service.named.described())]
    ends = {"first_id": names[0], "last_id": names[-1], "has_more": False}  # Anthropic's fields
    return Json({"object": "list", "data": [_model(service, name) for name in names], **ends})


async def model(service: Service, request: Request) -> Response:
    """Describe one model."""
    name = request.path_params["model"]
    service.context_of(name, None)
    return Json(_model(service, name))


async def props(service: Service, request: Request) -> Response:
    """Describe what is served, as llama-server's clients ask for it."""
    batch, engine = service.batch, service.engine
    return Json(
        {
            "model_alias": service.settings.model,
            "total_slots": batch.max_lanes,
            "n_ctx": engine.setup.readable,
            "chat_template": engine.tokenizer.chat_template or "",
            "method": repr(engine.method),
            "window": engine.window,
            "methods": lce.methods.available(),
            "default_generation_settings": {"n_ctx": engine.setup.readable, "params": engine.setup.sampling_for({})},
            "modalities": {"vision": False, "audio": False},
        }
    )


async def tokenize(service: Service, request: Request, fields: Fields) -> Response:
    """Return the token ids of a text."""
    tokenizer = service.engine.tokenizer
    text = fields.text("content") if fields.has("content") else fields.text("prompt")
    if text is None:
        raise wrong("content", None, "a string")
    bos = None if fields.flag("add_special", True) else False

    def written() -> str:
        ids = tokenizer.encode(text, bos=bos)
        parts = (json.dumps(ids[i : i + LISTED])[1:-1] for i in range(0, len(ids), LISTED))
        return f'{{"tokens":[{", ".join(parts)}],"count":{len(ids)}}}'

    found = await unless_gone(request, asyncio.to_thread(written))
    return Response(found, media_type="application/json")


async def detokenize(service: Service, request: Request, fields: Fields) -> Response:
    """Return the text of token ids."""
    tokenizer, ids = service.engine.tokenizer, fields.ids("tokens", MOST_TOKENS)
    text = await unless_gone(request, asyncio.to_thread(lambda: tokenizer.decode(ids, skip_special=False)))
    return Json({"content": text, "prompt": text})


async def contexts(service: Service, request: Request) -> Response:
    """List the named contexts."""
    service.check_ready()
    return Json({"object": "list", "data": service.named.described()})


async def make_context(service: Service, request: Request, fields: Fields) -> Response:
    """Read a text or a conversation, and keep its context under a name. The answer is sent when all is read."""
    batch, name = service.batch, fields.text("name")
    if not name:
        raise wrong("name", None, "a name")
    service.named.check(name)
    how = common(service, Fields({**fields.body, "context": None, "model": None}))
    method = {key: how[key] for key in ("method", "method_options")}
    prompt, said = prompt_or_messages(fields)

    def begin() -> Any:
        engine = engine_for(batch, how["method"], how["method_options"])
        made = rendered(engine.tokenizer, said, answer=False) if prompt is None else prompt
        n = len(engine.tokenizer.encode(made) if isinstance(made, str) else engine.tokenizer.encode_parts(made))
        room(engine, n, 1)
        return batch.read(made, keep_context=True, **method)

    stream = await asyncio.to_thread(begin)
    try:
        await unless_gone(request, stream.afinish())
    finally:
        stream.cancel()
    service.named.add(name, stream.setup, stream.context)
    return Json(as_object(name, stream.context))


async def drop_context(service: Service, request: Request) -> Response:
    """Give up a named context."""
    name = request.path_params["name"]
    service.check_ready()
    service.named.drop(name)
    return Json({"name": name, "object": "context", "deleted": True})
