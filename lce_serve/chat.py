"""POST /v1/chat/completions: OpenAI's chat."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lce_serve.answering import (
    OpenAIForm,
    answer,
    choices_of,
    common,
    finite,
    openai_options,
    openai_usage,
)
from lce_serve.choices import Delta, Ended
from lce_serve.conversation import rendering
from lce_serve.fields import Fields
from lce_serve.generation import Asked, Run
from lce_serve.grammar import grammar_for
from lce_serve.history import openai_messages
from lce_serve.service import Service
from lce_serve.tools import Call, openai_tools


async def chat(service: Service, request: Request, fields: Fields) -> Response:
    """Answer a conversation."""
    messages, tools, how = openai_messages(fields), openai_tools(fields), common(service, fields)
    options, given = openai_options(fields), fields.limit("max_completion_tokens")
    n_likeliest = fields.whole("top_logprobs", 0, 20) or 0
    if fields.flag("logprobs") or n_likeliest:
        options["logprobs"] = n_likeliest
    asked = Asked(
        prompts=[rendering(service.engine.tokenizer, messages, tools, fields, how["context"] is not None)],
        max_tokens=fields.limit("max_tokens") if given is None else given,
        options=options,
        n=choices_of(fields),
        tools=tools,
        grammar=grammar_for(fields, fields.inner("response_format"), tools),
        **how,
    )
    include = fields.inner("stream_options").flag("include_usage")
    return await answer(service, request, asked, _Form(service, "chatcmpl-", "chat.completion.chunk", include))


class _Form(OpenAIForm):
    """The form of chat completions."""

    def body(self, run: Run) -> dict[str, Any]:
        choices = []
        for choice in run.choices:
            message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
            if choice.thought:
                message["reasoning_content"] = choice.thought
            if choice.calls:
                message |= {"content": choice.text or None, "tool_calls": [_call(call) for call in choice.calls]}
            logprobs = (
                None if choice.logprobs is None else {"content": self._logprobs(choice.logprobs), "refusal": None}
            )
            choices.append(
                {"index": choice.index, "message": message, "logprobs": logprobs, "finish_reason": choice.reason}
                | choice.seed
            )
        return {**self._common, "object": "chat.completion", "choices": choices, "usage": openai_usage(run)}

    async def events(self, run: Run, events: AsyncIterator[Delta | Ended]) -> AsyncGenerator[bytes]:
        n_calls = dict.fromkeys(range(len(run.choices)), 0)
        for choice in run.choices:
            yield self._chunk(choice.index, {"role": "assistant", "content": ""})
        async for each in events:
            if isinstance(each, Ended):
                yield self._chunk(each.index, {}, finish_reason=each.reason, **run.choices[each.index].seed)
                continue
            delta = {"reasoning_content": each.thought} if each.thought else {}
            if each.text or (each.logprobs and not delta):
                delta["content"] = each.text
            if delta:
                yield self._chunk(each.index, delta, each.logprobs)
            for call in each.calls:
                written = {"index": n_calls[each.index], **_call(call)}
                n_calls[each.index] += 1
                yield self._chunk(each.index, {"tool_calls": [written]})
        for last in self._ends(run):
            yield last

    def _chunk(self, index: int, delta: dict[str, Any], logprobs: Any = None, **more: Any) -> bytes:
        found = {"content": self._logprobs(logprobs), "refusal": None} if logprobs else None
        return self._event({"index": index, "delta": delta, "logprobs": found, "finish_reason": None, **more})

    def _logprobs(self, found: list[Any]) -> list[dict[str, Any]]:
        return [
            {**self._token(each.token_id, each.logprob), "top_logprobs": [self._token(*top) for top in each.top]}
            for each in found
        ]

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, raw = self._tokenizer.decode([token_id], skip_special=False), self._tokenizer.bytes_of(token_id)
        return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode() if raw is None else raw)}


def _call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
