"""Answers a generation: at once as a JSON body, or as a stream of events, in the form of its endpoint."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import lce
from lce_serve.choices import Delta, Ended
from lce_serve.fields import Fields
from lce_serve.generation import Asked, Run, begin
from lce_serve.refusals import Refusal
from lce_serve.service import Record, Service
from lce_serve.sse import EventStream, event, unless_gone

MOST_CHOICES = 8
MOST_SAID = 4096  # characters of the header that names what is not enforced
# Fields of other servers that would change an answer, with what to do instead. A value that is false or empty asks for
# nothing, and neither does a usual one.
_UNDONE: dict[str, str] = {
    **dict.fromkeys(
        "suffix use_beam_search bad_words allowed_token_ids logits_processors prompt_logprobs truncate_prompt_tokens "
        "include_stop_str_in_output best_of skip_special_tokens modalities mirostat typical_p".split(),
        "leave it out",
    ),
    **dict.fromkeys(
        "guided_json guided_json_object guided_choice guided_regex guided_grammar structured_outputs "
        "grammar json_schema regex ebnf format".split(),
        "give response_format with a JSON schema",
    ),
    **dict.fromkeys(("functions", "function_call"), "give tools and tool_choice"),
    **dict.fromkeys(("options", "num_predict", "n_predict"), "give max_tokens, temperature and others by themselves"),
}
_USUAL = {"skip_special_tokens": True, "modalities": ["text"], "typical_p": 1, "best_of": 1, "function_call": "none"}

NUMBERS: dict[str, tuple[float, float, type[float]]] = {  # of sampling: the least, the most and the kind
    "temperature": (0, 2, float),
    "top_p": (0, 1, float),
    "top_k": (-1, 1 << 31, int),
    "min_p": (0, 1, float),
    "seed": (-(1 << 63), (1 << 63) - 1, int),
    "presence_penalty": (-2, 2, float),
    "frequency_penalty": (-2, 2, float),
    "repetition_penalty": (0.01, 100, float),
}
ANTHROPICS = ("temperature", "top_p", "top_k")  # the numbers that Messages has


class Json(JSONResponse):
    """A JSON response. Half a surrogate pair, which UTF-8 cannot have, becomes a question mark."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


class Form(Protocol):
    """The form of an endpoint's answers."""

    def body(self, run: Run) -> dict[str, Any]:
        """Return the whole answer of a run that is complete."""

    def begin(self, run: Run) -> Iterable[bytes]:
        """Return the encoded events with which a stream begins."""

    def add(self, run: Run, each: Delta | Ended) -> Iterable[bytes]:
        """Return the encoded events of what is new."""

    def end(self, run: Run) -> Iterable[bytes]:
        """Return the encoded events with which a stream ends."""

    def failed(self, refusal: Refusal) -> bytes:
        """Return the event that ends a stream which failed."""


class OpenAIForm:
    """The base of the forms of chat and completions. `chunk` names the kind of the objects in a stream."""

    def __init__(self, service: Service, fields: Fields, prefix: str, chunk: str) -> None:
        engine, self._include_usage = service.engine, fields.inner("stream_options").flag("include_usage")
        self._tokenizer = engine.tokenizer
        self._common = {
            "id": new_id(prefix),
            "object": chunk,
            "created": int(time.time()),
            "model": service.settings.model,
            "system_fingerprint": f"lce-{lce.__version__}-{str(engine.setup.fingerprint)[:12]}",
        }

    def failed(self, refusal: Refusal) -> bytes:
        return event(refusal.body())

    def _event(self, choice: dict[str, Any]) -> bytes:
        """Return an event about one choice."""
        return event({**self._common, "choices": [choice], **({"usage": None} if self._include_usage else {})})

    def end(self, run: Run) -> Iterator[bytes]:
        if self._include_usage:
            yield event({**self._common, "choices": [], "usage": openai_usage(run)})
        yield event("[DONE]")


async def answer(service: Service, request: Request, asked: Asked, form: Form) -> Response:
    """Generate an answer to the request, and send it. The generation ends when the client goes away."""
    record: Record = request.scope["lce.record"]
    record.stream = asked.stream
    run = await unless_gone(request, begin(service, record, asked))
    said = "; ".join(run.notes).encode("ascii", "replace").decode()[:MOST_SAID]
    headers = {"x-lce-warning": " ".join(said.split())} if said else {}
    if not asked.stream:
        try:
            await unless_gone(request, run.finish())
        finally:
            run.close()
        return Json(form.body(run), headers=headers)

    async def events() -> AsyncGenerator[bytes]:
        inner = run.events()
        try:
            for data in form.begin(run):
                yield data
            async for each in inner:
                for data in form.add(run, each):
                    yield data
            for data in form.end(run):
                yield data
        except Exception as error:
            yield form.failed(request.scope["lce.failed"](error))
        finally:
            await inner.aclose()

    settings = service.settings
    stream = EventStream(events(), lambda: run.progress, run.close, settings.ping_s, settings.send_s)
    stream.headers.update(headers)
    return stream


def sampling(fields: Fields, names: Iterable[str] = NUMBERS, stop: str = "stop") -> dict[str, Any]:
    """Return options of sampling as `Batch.stream` takes them: some of `NUMBERS`, and what stops an answer."""
    found: dict[str, Any] = {name: fields.number(name, *NUMBERS[name]) for name in names}
    found |= {"stop": fields.stops(stop), "stop_token_ids": fields.ids("stop_token_ids")}
    off = {"top_k": -1, "top_p": 0}  # vLLM's -1 and a client's 0
    return {name: value for name, value in found.items() if value not in (None, [], off.get(name))}


def openai_options(fields: Fields) -> dict[str, Any]:
    """Return the options of sampling that OpenAI's APIs share."""
    found, given = sampling(fields), fields.object("logit_bias") or {}
    if "seed" in found:
        found["seed"] %= 2**63
    if len(given) > 1024 or not all(name.isascii() and name.isdigit() and len(name) < 12 for name in given):
        raise Refusal(400, "logit_bias must map up to 1024 token ids to numbers from -100 to 100", "logit_bias")
    inner = Fields(given, "logit_bias")
    bias = {int(name): inner.number(name, -100, 100) or 0.0 for name in given}
    return found | ({"logit_bias": bias} if bias else {})


def common(service: Service, fields: Fields) -> dict[str, Any]:
    """Return those fields of `Asked` that all endpoints read alike. Refuses what is not obeyed."""
    for name, instead in _UNDONE.items():
        given = fields.body.get(name)
        nothing: tuple[Any, ...] = (None, "", [], {}, -1, _USUAL.get(name, False))
        if given not in nothing and (name, given) != ("best_of", fields.body.get("n")):
            raise Refusal(400, f"{name} is not supported; {instead}", name)
    model, context = fields.text("model"), fields.text("context")
    return {
        "context": service.context_of(model, context),
        "method": fields.text("method") or None,
        "method_options": fields.object("method_options"),
        "stream": fields.flag("stream"),
    }


def choices_of(fields: Fields) -> int:
    """Return the number of answers to each prompt, the field `n`."""
    return fields.whole("n", 1, MOST_CHOICES) or 1


def new_id(kind: str) -> str:
    """Return a new id such as `chatcmpl-0f3a...`."""
    return f"{kind}{secrets.token_hex(12)}"


def openai_usage(run: Run, read: str = "prompt", written: str = "completion") -> dict[str, Any]:
    """Return the object `usage`, in which an API calls tokens `read` and `written`."""
    prompt, cached, generated = run.usage()
    return {
        f"{read}_tokens": prompt,
        f"{read}_tokens_details": {"cached_tokens": cached},
        f"{written}_tokens": generated,
        f"{written}_tokens_details": {"reasoning_tokens": run.thought_tokens()},
        "total_tokens": prompt + generated,
    }


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can write: minus infinity becomes -9999."""
    return max(logprob, -9999.0)
