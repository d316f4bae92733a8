"""POST /v1/chat/completions: OpenAI's chat."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lce_serve.answering import OpenAIForm, answer, choices_of, finite, openai_options, openai_usage
from lce_serve.choices import Delta, Ended
from lce_serve.conversation import asked_of
from lce_serve.fields import Fields
from lce_serve.generation import Run
from lce_serve.history import openai_messages
from lce_serve.service import Service
from lce_serve.tools import Call, openai_tools


async def chat(service: Service, request: Request, fields: Fields) -> Response:
    """Answer a conversation."""
    messages, tools, options = openai_messages(fields), openai_tools(fields), openai_options(fields)
    n_likeliest = fields.whole("top_logprobs", 0, 20) or 0
    if fields.flag("logprobs") or n_likeliest:
        options["logprobs"] = n_likeliest
    form, limit = fields.inner("response_format"), fields.limit("max_completion_tokens")
    if limit is None:
        limit = fields.limit("max_tokens")
    asked = asked_of(service, fields, messages, tools, form, max_tokens=limit, options=options, n=choices_of(fields))
    return await answer(service, request, asked, _Form(service, fields))


class _Form(OpenAIForm):
    """The form of chat completions."""

    def __init__(self, service: Service, fields: Fields) -> None:
        super().__init__(service, fields, "chatcmpl-", "chat.completion.chunk")
        self._n_calls = Counter[int]()  # of each choice

    def body(self, run: Run) -> dict[str, Any]:
        choices = []
        for index, choice in enumerate(run.choices):
            message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
            if choice.thought:
                message["reasoning_content"] = choice.thought
            if choice.calls:
                message |= {"content": choice.text or None, "tool_calls": [_call(call) for call in choice.calls]}
            end = {"logprobs": self._logprobs(choice.logprobs), "finish_reason": choice.reason, **choice.seed}
            choices.append({"index": index, "message": message, **end})
        return {**self._common, "object": "chat.completion", "choices": choices, "usage": openai_usage(run)}

    def begin(self, run: Run) -> Iterator[bytes]:
        for index in range(len(run.choices)):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def add(self, run: Run, each: Delta | Ended) -> Iterator[bytes]:
        if isinstance(each, Ended):
            yield self._chunk(each.index, {}, finish_reason=each.reason, **run.choices[each.index].seed)
            return
        delta = {"reasoning_content": each.thought} if each.thought else {}
        if each.text or (each.logprobs and not delta):
            delta["content"] = each.text
        if delta:
            yield self._chunk(each.index, delta, each.logprobs or None)
        for call in each.calls:
            yield self._chunk(each.index, {"tool_calls": [{"index": self._n_calls[each.index], **_call(call)}]})
            self._n_calls[each.index] += 1

    def _chunk(self, index: int, delta: dict[str, Any], logprobs: Any = None, **more: Any) -> bytes:
        end = {"logprobs": self._logprobs(logprobs), "finish_reason": None, **more}
        return self._event({"index": index, "delta": delta, **end})

    def _logprobs(self, found: list[Any] | None) -> dict[str, Any] | None:
        if found is None:
            return None
        pairs = [(self._token(each.token_id, each.logprob), each.top) for each in found]
        content = [{**token, "top_logprobs": [self._token(*each) for each in top]} for token, top in pairs]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, raw = self._tokenizer.decode([token_id], skip_special=False), self._tokenizer.bytes_of(token_id)
        return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode() if raw is None else raw)}


def _call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
