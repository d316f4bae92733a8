"""OpenAI's chat: fields, forms, streams and errors."""

import json
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from starlette.testclient import TestClient

import lce
from lce.engine import grammar
from lce_serve import generation
from lce_serve.service import Service
from tests.lce_serve.conftest import events

HI = [{"role": "user", "content": "the quick fox"}]
PATH = "/v1/chat/completions"


def ask(client: TestClient, **body: Any) -> Any:
    content = json.dumps({"messages": HI, "max_tokens": 6, **body})  # half a surrogate pair too
    return client.post(PATH, content=content, headers={"Content-Type": "application/json"})


def test_an_answer_is_what_the_engine_says(client: TestClient, engine: Any) -> None:
    answer = ask(client)
    assert answer.status_code == 200, answer.text
    found, own = answer.json(), engine.chat(HI, max_tokens=6)
    (choice,), usage = found["choices"], found["usage"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (own.text, own.finish_reason)
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (own.stats.prompt_tokens, len(own.token_ids))
    assert found["model"] == "tiny"
    assert found["system_fingerprint"].startswith("lce-")


def test_the_second_request_finds_the_prompt_in_the_cache(client: TestClient) -> None:
    ask(client)
    assert ask(client).json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_stream_says_the_same(client: TestClient) -> None:
    whole = ask(client).json()
    answer = ask(client, stream=True, stream_options={"include_usage": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = events(answer.text)
    assert found[-1] == "[DONE]"
    chunks = [json.loads(data) for data in found[:-1]]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1])
    assert text == whole["choices"][0]["message"]["content"]
    assert chunks[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_several_choices_with_a_seed_differ_and_repeat(client: TestClient) -> None:
    how: dict[str, Any] = {"n": 3, "temperature": 2, "seed": 7, "max_tokens": 12}
    one, two = ask(client, **how).json(), ask(client, **how).json()
    texts = [choice["message"]["content"] for choice in one["choices"]]
    assert texts == [choice["message"]["content"] for choice in two["choices"]]
    assert len(set(texts)) > 1


def test_logprobs_have_an_entry_for_each_token(client: TestClient) -> None:
    found = ask(client, logprobs=True, top_logprobs=2).json()
    entries = found["choices"][0]["logprobs"]["content"]
    assert len(entries) == found["usage"]["completion_tokens"]
    best = [[entry["top_logprobs"][0]["logprob"], len(entry["top_logprobs"])] for entry in entries]
    assert best == [[entry["logprob"], 2] for entry in entries]


def test_a_bias_forces_a_token(client: TestClient) -> None:
    found = ask(client, logit_bias={"77": 100}, logprobs=True, max_tokens=3).json()
    assert len({entry["token"] for entry in found["choices"][0]["logprobs"]["content"]}) == 1


def test_parts_tools_and_calls_are_accepted(client: TestClient) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
    ]
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    answer = ask(client, messages=messages, tools=[tool], tool_choice="none")
    assert answer.status_code == 200, answer.text


def schema_of(**properties: Any) -> dict[str, Any]:
    """A schema of exactly these properties, written without any space."""
    tight = {"required": [*properties], "additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}
    return {"type": "object", "properties": properties, **tight}


def form_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def test_a_schema_is_compiled_once_and_followed_by_each_answer(client: TestClient, monkeypatch: Any) -> None:
    compiled, compile_one = list[Any](), grammar.compiled
    monkeypatch.setattr(grammar, "compiled", lambda *how: compiled.append(how) or compile_one(*how))
    form = form_of(schema_of(ok={"type": "boolean"}, n={"enum": [1, 2]}))
    for found in ask(client, response_format=form, max_tokens=60, n=3, temperature=1, seed=1).json()["choices"]:
        assert (found["finish_reason"], set(json.loads(found["message"]["content"]))) == ("stop", {"ok", "n"})
    assert len(compiled) == 1


def test_waiting_for_the_compiler_is_bounded(address: str, monkeypatch: Any) -> None:
    held, done, form = threading.Event(), threading.Event(), form_of({"type": "integer"})
    monkeypatch.setattr(generation, "COMPILE_S", 0.2)
    monkeypatch.setattr(grammar, "compiled", lambda *_: held.wait(30) and done.set())
    for _ in range(2):  # the second one waits for the compiler of the first
        answer = httpx2.post(address + PATH, json={"messages": HI, "response_format": form})
        assert "takes too long" in answer.json()["error"]["message"]
    held.set()
    assert done.wait(10)


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_call_is_made(client: TestClient, stream: bool) -> None:
    tool = {"type": "function", "function": {"name": "vote", "parameters": schema_of(yes={"type": "boolean"})}}
    how: dict[str, Any] = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 90}
    answer = ask(client, stream=stream, **how)
    if stream:
        chunks = [json.loads(data)["choices"][0] for data in events(answer.text)[:-1]]
        calls = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", [])]
        reason = chunks[-1]["finish_reason"]
    else:
        (choice,) = answer.json()["choices"]
        calls, reason = choice["message"]["tool_calls"], choice["finish_reason"]
    assert reason == "tool_calls"
    (call,) = calls
    assert (call["function"]["name"], set(json.loads(call["function"]["arguments"]))) == ("vote", {"yes"})


WRONG: list[tuple[dict[str, Any], str]] = [
    *(({"messages": None}, "messages"), ({"messages": []}, "messages")),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    *(({"temperature": "hot"}, "temperature"), ({"temperature": True}, "temperature"), ({"n": 9}, "n")),
    *(({"max_tokens": 0}, "max_tokens"), ({"stream": "yes"}, "stream"), ({"logit_bias": {"x": 1}}, "logit_bias")),
    *(({"response_format": {"type": "xml"}}, "response_format.type"), ({"tool_choice": "required"}, "tool_choice")),
    *(({"response_format": form_of({"const": value})}, "response_format") for value in (2**64, -(2**80), "\ud800")),
    ({"method": "nonsense"}, "method"),
    ({"method": "esa", "method_options": {"maps": "/etc/passwd"}}, "method_options"),
]


@pytest.mark.parametrize(("change", "param"), WRONG, ids=[str(x[0])[:40] for x in WRONG])
def test_a_wrong_field_is_named(client: TestClient, change: dict[str, Any], param: str) -> None:
    answer = ask(client, **change)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["type"]) == (param, "invalid_request_error")


@pytest.mark.parametrize("limit", [None, 3000])
def test_an_answer_is_as_long_as_memory_allows(client: Any, service: Service, monkeypatch: Any, limit: Any) -> None:
    asked, stream = [], service.batch.stream

    def small(*args: Any, **how: Any) -> Any:
        asked.append(how["max_tokens"])
        return Full() if how["max_tokens"] > 100 else stream(*args, **how)

    class Full:
        prompt_ids: tuple[int, ...] = ()
        result = SimpleNamespace(logprobs=None, token_ids=[], stats=SimpleNamespace(read_before=0))
        cancel = staticmethod(lambda: None)

        async def __aiter__(self) -> AsyncIterator[Any]:
            raise lce.CapacityError("too long for memory")
            yield

    monkeypatch.setattr(service.batch, "stream", small)
    assert ask(client, max_tokens=limit, stop=["e"]).status_code == 200
    assert asked == [asked[0] // 2**i for i in range(len(asked))]
    assert asked[-1] <= 100 < asked[-2]
    stream = lambda *_, **__: Full()  # noqa: E731
    assert ask(client, max_tokens=50).json()["error"]["code"] == "context_length_exceeded"


def test_unknown_models_and_contexts_are_404(client: TestClient) -> None:
    assert ask(client, model="gpt-9").json()["error"]["code"] == "model_not_found"
    assert ask(client, model="tiny@nothing").status_code == 404
    assert ask(client, context="nothing").json()["error"]["code"] == "context_not_found"
    assert ask(client, model="tiny").status_code == 200


def test_another_method_can_be_asked(client: TestClient) -> None:
    assert ask(client, method="streaming", method_options={"sinks": 2}).status_code == 200
