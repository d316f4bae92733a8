"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lce_serve.answering import ANTHROPICS, Json, answer, common, new_id, sampling
from lce_serve.choices import Choice, Delta, Ended
from lce_serve.conversation import asked_of, rendering
from lce_serve.fields import Fields
from lce_serve.generation import Run
from lce_serve.history import MOST_MESSAGES, History, content_of, note_of, role_of
from lce_serve.refusals import Refusal
from lce_serve.service import Service
from lce_serve.sse import event, unless_gone
from lce_serve.tools import Call, Tools, checked, tool_of

_CALLS, _RESULTS = ("tool_use", "mcp_tool_use"), ("tool_result", "mcp_tool_result")
_THOUGHTS = ("thinking", "redacted_thinking")
_EMPTY = {"thinking": {"type": "thinking", "thinking": "", "signature": ""}, "text": {"type": "text", "text": ""}}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


async def messages(service: Service, request: Request, fields: Fields) -> Response:
    """Answer a conversation."""
    said, tools, options = _messages(fields), _tools(fields), sampling(fields, ANTHROPICS, "stop_sequences")
    form, limit = fields.inner("output_config").inner("format"), fields.limit("max_tokens")
    if fields.has("output_format"):
        form = fields.inner("output_format")
    asked = asked_of(service, fields, said, tools, form, begun=True, max_tokens=limit, options=options)
    return await answer(service, request, asked, _Form(service))


async def count_tokens(service: Service, request: Request, fields: Fields) -> Response:
    """Count the tokens of a conversation."""
    tokenizer, context = service.engine.tokenizer, common(service, fields)["context"]
    render = rendering(tokenizer, _messages(fields), _tools(fields), fields, context is not None, True)
    n_before = 0 if context is None else len(service.named.get(context)[1])
    ids = await unless_gone(request, asyncio.to_thread(lambda: tokenizer.encode_parts(render())))
    return Json({"input_tokens": n_before + len(ids)})


def _messages(fields: Fields) -> list[dict[str, Any]]:
    """Return the system text and the messages in the form that chat templates take."""
    history = History()
    if content_of(fields, "system")[0]:
        history.say("system", fields, "system")
    for message in fields.each("messages", MOST_MESSAGES):
        role, expected = role_of(message), "a string or a list of blocks"
        if isinstance(message.needed("content", (str, list), expected), str):
            history.say(role, message)
        else:
            _read(history, role, message)
    return history.done("messages")


def _read(history: History, role: str, message: Fields) -> None:
    """Add the messages that a list of content blocks stands for. Results of calls come before the text."""
    blocks = [(block.text("type"), block) for block in message.each("content")]
    for kind, block in blocks:
        if kind in _RESULTS:
            history.say("tool", block, tool_call_id=block.text("tool_use_id") or "")
    if any(kind not in _RESULTS for kind, _ in blocks) or not blocks:
        history.say(role, message, skip=(*_RESULTS, *_CALLS, *_THOUGHTS))
    for kind, block in blocks:
        if kind in _THOUGHTS:
            history.think(block.text("thinking") or note_of(block))
        elif kind in _CALLS:
            history.call(block.text("name") or "", block.object("input"), block.text("id"))


def _tools(fields: Fields) -> Tools:
    """Return the tools. Those that Anthropic itself would run have no schema, and are ignored."""
    tools = [tool_of(tool, "input_schema") for tool in fields.each("tools") if tool.has("input_schema")]
    given = fields.inner("tool_choice")
    kind = given.text("type") or "auto"
    choice = (given.text("name") or "") if kind == "tool" else _CHOICES.get(kind, "")
    return checked(tools, choice, not given.flag("disable_parallel_tool_use"))


class _Form:
    """The form of messages: a block for the thought and one for the text, if there is any, and one for each call."""

    def __init__(self, service: Service) -> None:
        self._id, self._model = new_id("msg_"), service.settings.model
        self._n_blocks, self._opened = 0, ""  # the blocks that are complete, and the kind of the open one

    def body(self, run: Run) -> dict[str, Any]:
        choice = run.choices[0]
        said = {"thinking": choice.thought, "text": choice.text}
        blocks = [{**_EMPTY[kind], kind: text} for kind, text in said.items() if text]
        blocks += [{**_block(call), "input": json.loads(call.arguments)} for call in choice.calls]
        return {**self._message(run), "content": blocks, **self._stop(choice)}

    def failed(self, refusal: Refusal) -> bytes:
        return event(refusal.body("/v1/messages"), "error")

    def begin(self, run: Run) -> Iterator[bytes]:
        begun = {**self._message(run), "content": [], "stop_reason": None, "stop_sequence": None}
        yield _event("message_start", message=begun)

    def add(self, run: Run, each: Delta | Ended) -> Iterator[bytes]:
        if isinstance(each, Ended):
            return
        for kind, text in (("thinking", each.thought), ("text", each.text)):
            if text and self._opened != kind:
                yield from self._open(kind, _EMPTY[kind])
            if text:
                yield self._part({"type": f"{kind}_delta", kind: text})
        for call in each.calls:
            yield from self._open("tool_use", {**_block(call), "input": {}})
            yield self._part({"type": "input_json_delta", "partial_json": call.arguments})
            yield from self._close()

    def end(self, run: Run) -> Iterator[bytes]:
        yield from self._close()
        yield _event("message_delta", delta=self._stop(run.choices[0]), usage=self._message(run)["usage"])
        yield _event("message_stop")

    def _open(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        yield from self._close()
        self._opened = kind
        yield _event("content_block_start", index=self._n_blocks, content_block=block)

    def _part(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._n_blocks, delta=delta)

    def _close(self) -> Iterator[bytes]:
        """End the open block, if there is one."""
        if self._opened:
            yield _event("content_block_stop", index=self._n_blocks)
            self._n_blocks, self._opened = self._n_blocks + 1, ""

    def _message(self, run: Run) -> dict[str, Any]:
        prompt, cached, generated = run.usage()
        usage = {
            "input_tokens": prompt - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": generated,
        }
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "usage": usage,
            **run.choices[0].seed,
        }

    def _stop(self, choice: Choice) -> dict[str, Any]:
        """Return why the answer ended, and the stop string that ended it."""
        reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
        if choice.reason == "stop" and (found := choice.stream.result.stop) is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": found}
        return {"stop_reason": reasons.get(choice.reason, "end_turn"), "stop_sequence": None}


def _block(call: Call) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id.replace("call_", "toolu_"), "name": call.name}


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)
