"""POST /v1/responses: OpenAI's Responses, without memory: a client sends the whole conversation each time."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lce_serve.answering import answer, new_id, openai_options, openai_usage
from lce_serve.choices import Choice, Delta, Ended
from lce_serve.conversation import asked_of
from lce_serve.fields import Fields
from lce_serve.generation import Run
from lce_serve.history import MOST_MESSAGES, History, note_of, read_call, role_of, text_of
from lce_serve.refusals import Refusal
from lce_serve.service import Service
from lce_serve.sse import event
from lce_serve.tools import Call, openai_tools


async def responses(service: Service, request: Request, fields: Fields) -> Response:
    """Answer a conversation of input items."""
    if fields.has("previous_response_id") or fields.has("conversation"):
        line = "this server keeps no responses: send the whole input, without previous_response_id or conversation"
        raise Refusal(400, line, "previous_response_id", "unsupported_parameter")
    if name := next((name for name in ("background", "prompt", "top_logprobs") if fields.body.get(name)), None):
        raise Refusal(400, f"{name} is not supported; leave it out", name, "unsupported_parameter")
    messages, tools, options = _messages(fields), openai_tools(fields), openai_options(fields)
    form, limit = fields.inner("text").inner("format"), fields.limit("max_output_tokens")
    asked = asked_of(service, fields, messages, tools, form, max_tokens=limit, options=options)
    return await answer(service, request, asked, _Form(service, fields))


def _messages(fields: Fields) -> list[dict[str, Any]]:
    """Return the input as messages."""
    history = History()
    if fields.text("instructions"):
        history.say("system", fields, "instructions")
    if isinstance(fields.needed("input", (str, list), "a string or a list of items"), str):
        history.say("user", fields, "input")
    else:
        for item in fields.each("input", MOST_MESSAGES):
            _read(history, item)
    return history.done("input")


def _read(history: History, item: Fields) -> None:
    """Add an item of the input: a message, a thought, a call, a result, or a note in the place of anything else.

    A call that the server of the API would run itself has no `call_id` and, but for `mcp_call`, no result: a note.
    """
    kind, call_id = item.text("type") or "message", item.text("call_id")
    if kind == "message":
        history.say(role_of(item, "user"), item)
    elif kind == "reasoning":
        history.think(text_of(item) or text_of(item, "summary"))
    elif kind.endswith("_call_output"):
        written = item.body.get("output")
        if not isinstance(written, (str, list)):
            written = json.dumps(written, ensure_ascii=False)
        history.say("tool", Fields({"output": written}, item.where), "output", tool_call_id=call_id or "")
    elif kind.endswith("_call") and (call_id is not None or kind in ("function_call", "mcp_call")):
        read_call(history, item, call_id or item.text("id"))
        if item.has("output"):
            history.say("tool", item, "output", tool_call_id=call_id or item.text("id") or "")
    else:
        history.note(note_of(item))


_TEXTS = {"reasoning": "reasoning_text", "message": "output_text"}  # the kinds of items of text, and of their parts
_LOGPROBS: dict[str, dict[str, Any]] = {"reasoning": {}, "message": {"logprobs": []}}


class _Form:
    """The form of responses: an item for the thought and one for the text, if there is any, and one for each call."""

    def __init__(self, service: Service, fields: Fields) -> None:
        self._item_ids = {"reasoning": new_id("rs_"), "message": new_id("msg_")}
        self._number = 0  # of the next event
        self._places, self._n_items = dict[str, int](), 0  # the places of the open items of text, of all items so far
        self._common = {
            "id": new_id("resp_"),
            "object": "response",
            "created_at": int(time.time()),
            "model": service.settings.model,
            "error": None,
            "instructions": fields.text("instructions"),
            "metadata": fields.object("metadata") or {},
            "parallel_tool_calls": fields.flag("parallel_tool_calls", True),
            "previous_response_id": None,
            "temperature": fields.body.get("temperature"),
            "top_p": fields.body.get("top_p"),
            "store": False,
            "tool_choice": fields.body.get("tool_choice") or "auto",
            "tools": fields.body.get("tools") or [],
            "max_output_tokens": fields.body.get("max_output_tokens"),
            "text": fields.object("text") or {},
            "reasoning": {"effort": fields.inner("reasoning").text("effort"), "summary": None},
            "truncation": "disabled",
            "output": [],
            "usage": None,
            "incomplete_details": None,
        }

    def body(self, run: Run) -> dict[str, Any]:
        """Return the object of the whole response. Its text is behind the calls that came before it in a stream."""
        choice = run.choices[0]
        items = [self._item("reasoning", choice.thought)] if choice.thought else []
        text_at = self._places.get("message", len(items))
        items += [_call(call) for call in choice.calls]
        if choice.text or not items:
            items.insert(text_at, self._item("message", choice.text))
        cut = choice.reason == "length"
        return {
            **self._common,
            **choice.seed,
            "status": "incomplete" if cut else "completed",
            "output": items,
            "usage": openai_usage(run, "input", "output"),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        }

    def failed(self, refusal: Refusal) -> bytes:
        error = {"code": refusal.code or "server_error", "message": refusal.message}
        return self._event("response.failed", response={**self._common, "status": "failed", "error": error})

    def begin(self, run: Run) -> Iterator[bytes]:
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response={**self._common, "status": "in_progress"})

    def add(self, run: Run, each: Delta | Ended) -> Iterator[bytes]:
        if isinstance(each, Ended):
            return
        if "reasoning" in self._places and (each.text or each.calls):
            yield from self._done("reasoning", run.choices[0])
            del self._places["reasoning"]
        for kind, text in (("reasoning", each.thought), ("message", each.text)):
            if text and kind not in self._places:
                self._places[kind] = self._n_items
                yield self._added(self._item(kind, None))
                yield self._event("response.content_part.added", **self._part(kind), part=_text(kind, ""))
            if text:
                yield self._event(f"response.{_TEXTS[kind]}.delta", **self._part(kind), **_LOGPROBS[kind], delta=text)
        for call in each.calls:  # which comes whole
            item, where = _call(call), {"output_index": self._n_items, "item_id": f"fc_{call.id}"}
            yield self._added({**item, "arguments": "", "status": "in_progress"})
            yield self._event("response.function_call_arguments.delta", **where, delta=call.arguments)
            written = {"name": call.name, "arguments": call.arguments}
            yield self._event("response.function_call_arguments.done", **where, **written)
            yield self._event("response.output_item.done", output_index=where["output_index"], item=item)

    def end(self, run: Run) -> Iterator[bytes]:
        for kind in self._places:
            yield from self._done(kind, run.choices[0])
        whole = self.body(run)
        yield self._event(f"response.{whole['status']}", response=whole)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)

    def _added(self, item: dict[str, Any]) -> bytes:
        """Return the event that begins the next item."""
        place, self._n_items = self._n_items, self._n_items + 1
        return self._event("response.output_item.added", output_index=place, item=item)

    def _done(self, kind: str, choice: Choice) -> Iterator[bytes]:
        """Yield the events that end an item of text."""
        part, text = self._part(kind), choice.thought if kind == "reasoning" else choice.text
        yield self._event(f"response.{_TEXTS[kind]}.done", **part, **_LOGPROBS[kind], text=text)
        yield self._event("response.content_part.done", **part, part=_text(kind, text))
        place, item = self._places[kind], self._item(kind, text)
        yield self._event("response.output_item.done", output_index=place, item=item)

    def _part(self, kind: str) -> dict[str, Any]:
        return {"item_id": self._item_ids[kind], "output_index": self._places[kind], "content_index": 0}

    def _item(self, kind: str, text: str | None) -> dict[str, Any]:
        status, content = ("in_progress", []) if text is None else ("completed", [_text(kind, text)])
        more: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
        return {"id": self._item_ids[kind], "type": kind, **more, "status": status, "content": content}


def _text(kind: str, text: str) -> dict[str, Any]:
    return {"type": _TEXTS[kind], "text": text, **({"annotations": []} if kind == "message" else {}), **_LOGPROBS[kind]}


def _call(call: Call) -> dict[str, Any]:
    return {
        "id": f"fc_{call.id}",
        "type": "function_call",
        "status": "completed",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
    }
