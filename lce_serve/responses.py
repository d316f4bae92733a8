"""POST /v1/responses: OpenAI's Responses, without memory: a client sends the whole conversation each time."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lce_serve.answering import answer, common, new_id, openai_options
from lce_serve.choices import Delta, Ended
from lce_serve.conversation import rendering
from lce_serve.fields import Fields
from lce_serve.generation import Asked, Run
from lce_serve.grammar import grammar_for
from lce_serve.history import MOST_MESSAGES, History, note_of, read_call, role_of, text_of
from lce_serve.refusals import Refusal, wrong
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
    messages, tools, how = _messages(fields), openai_tools(fields), common(service, fields)
    asked = Asked(
        prompts=[rendering(service.engine.tokenizer, messages, tools, fields, how["context"] is not None)],
        max_tokens=fields.limit("max_output_tokens"),
        options=openai_options(fields),
        tools=tools,
        grammar=grammar_for(fields, fields.inner("text").inner("format"), tools),
        **how,
    )
    return await answer(service, request, asked, _Form(service, fields))


def _messages(fields: Fields) -> list[dict[str, Any]]:
    """Return the input as messages."""
    history = History()
    if fields.text("instructions"):
        history.say("system", fields, "instructions")
    given = fields.value("input", (str, list), "a string or a list of items")
    if given is None:
        raise wrong("input", None, "a string or a list of items")
    if isinstance(given, str):
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
        self._id, self._item_ids = new_id("resp_"), {"reasoning": new_id("rs_"), "message": new_id("msg_")}
        self._number = 0
        self._common = {
            "id": self._id,
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
        }

    def body(self, run: Run) -> dict[str, Any]:
        return self._response(self._items(run), run)

    def failed(self, refusal: Refusal) -> bytes:
        error = {"code": refusal.code or "server_error", "message": refusal.message}
        response = {**self._common, "status": "failed", "error": error, "output": [], "incomplete_details": None}
        return self._event("response.failed", response=response)

    async def events(self, run: Run, events: AsyncIterator[Delta | Ended]) -> AsyncGenerator[bytes]:
        begun = self._response([], None)
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)
        places, n_items, choice = dict[str, int](), 0, run.choices[0]  # the places of the open items of text
        async for each in events:
            if isinstance(each, Ended):
                break
            if "reasoning" in places and (each.text or each.calls):
                for data in self._done("reasoning", places.pop("reasoning"), choice.thought):
                    yield data
            for kind, text in (("reasoning", each.thought), ("message", each.text)):
                if text and kind not in places:
                    places[kind], n_items = n_items, n_items + 1
                    part, item = self._part(kind, places[kind]), self._item(kind, None)
                    yield self._event("response.output_item.added", output_index=places[kind], item=item)
                    yield self._event("response.content_part.added", **part, part=_text(kind, ""))
                if text:
                    part = self._part(kind, places[kind]) | _LOGPROBS[kind]
                    yield self._event(f"response.{_TEXTS[kind]}.delta", **part, delta=text)
            for call in each.calls:
                for data in self._call_events(call, n_items):
                    yield data
                n_items += 1
        for kind, index in places.items():
            for data in self._done(kind, index, choice.thought if kind == "reasoning" else choice.text):
                yield data
        whole = self._response(self._items(run, places.get("message")), run)
        yield self._event(f"response.{whole['status']}", response=whole)

    def _done(self, kind: str, index: int, text: str) -> list[bytes]:
        """Return the events that end an item of text."""
        part = self._part(kind, index)
        return [
            self._event(f"response.{_TEXTS[kind]}.done", **part, **_LOGPROBS[kind], text=text),
            self._event("response.content_part.done", **part, part=_text(kind, text)),
            self._event("response.output_item.done", output_index=index, item=self._item(kind, text)),
        ]

    def _call_events(self, call: Call, index: int) -> list[bytes]:
        """Return the events of a call, which comes whole."""
        item, where = _call(call), {"output_index": index, "item_id": f"fc_{call.id}"}
        return [
            self._event(
                "response.output_item.added",
                output_index=index,
                item={**item, "arguments": "", "status": "in_progress"},
            ),
            self._event("response.function_call_arguments.delta", **where, delta=call.arguments),
            self._event("response.function_call_arguments.done", **where, name=call.name, arguments=call.arguments),
            self._event("response.output_item.done", output_index=index, item=item),
        ]

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)

    def _part(self, kind: str, index: int) -> dict[str, Any]:
        return {"item_id": self._item_ids[kind], "output_index": index, "content_index": 0}

    def _item(self, kind: str, text: str | None) -> dict[str, Any]:
        status, content = ("in_progress", []) if text is None else ("completed", [_text(kind, text)])
        more: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
        return {"id": self._item_ids[kind], "type": kind, **more, "status": status, "content": content}

    def _items(self, run: Run, text_at: int | None = None) -> list[dict[str, Any]]:
        """Return the items of the output. `text_at` is the place of the text among them, None for before all calls."""
        choice = run.choices[0]
        items = [self._item("reasoning", choice.thought)] if choice.thought else []
        text_at = len(items) if text_at is None else text_at
        items += [_call(call) for call in choice.calls]
        if choice.text or not items:
            items.insert(text_at, self._item("message", choice.text))
        return items

    def _response(self, items: list[dict[str, Any]], run: Run | None) -> dict[str, Any]:
        """Return the object of a response; `run` is None while it is in progress."""
        if run is None:
            return {**self._common, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        cut = run.choices[0].reason == "length"
        prompt, cached, generated = run.usage()
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": generated,
            "output_tokens_details": {"reasoning_tokens": run.thought_tokens()},
            "total_tokens": prompt + generated,
        }
        return {
            **self._common,
            **run.choices[0].seed,
            "status": "incomplete" if cut else "completed",
            "output": items,
            "usage": usage,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        }


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
