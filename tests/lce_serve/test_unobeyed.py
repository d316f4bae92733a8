"""Fields of neighbouring servers: each is obeyed or refused by its name, in every API, never ignored."""

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.lce_serve.conftest import events

HI = [{"role": "user", "content": "the quick fox"}]
PATHS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": HI}),
    "text": ("/v1/completions", {"prompt": "the quick fox"}),
    "messages": ("/v1/messages", {"messages": HI}),
    "responses": ("/v1/responses", {"input": "the quick fox"}),
}
VOTE = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
UNDONE: list[dict[str, Any]] = [
    {"suffix": "\n\nprint(1)"},
    {"best_of": 4},
    {"use_beam_search": True},
    {"bad_words": ["no"]},
    {"skip_special_tokens": False},
    {"modalities": ["text", "audio"]},
    {"structured_outputs": {"choice": ["a"]}},
    {"guided_regex": "a+"},
    {"functions": [{"name": "now"}]},
    {"options": {"temperature": 1}},
    {"json_schema": {"type": "object"}},
    {"grammar": 'root ::= "a"'},
]
NOTHING: dict[str, Any] = {"suffix": "", "best_of": 1, "use_beam_search": False, "min_tokens": 0, "ignore_eos": False}


@pytest.mark.parametrize("api", PATHS)
def test_what_is_not_obeyed_is_refused_by_name(client: TestClient, api: str) -> None:
    path, body = PATHS[api]
    for field in UNDONE:
        answer = client.post(path, json={**body, **field})
        assert (answer.status_code, next(iter(field)) in answer.json()["error"]["message"]) == (400, True)


@pytest.mark.parametrize("api", PATHS)
def test_values_that_ask_for_nothing_are_taken(client: TestClient, api: str) -> None:
    path, body = PATHS[api]
    limit = "max_output_tokens" if api == "responses" else "max_tokens"
    for given in (NOTHING, dict.fromkeys([*NOTHING, "grammar", "guided_json", "structured_outputs"])):
        assert client.post(path, json={**body, limit: 2, **given}).status_code == 200


def said(client: TestClient, api: str, *, stream: bool, **more: Any) -> tuple[str, str]:
    """The text of an answer in chat or completions, and why it ended."""
    path, body = PATHS[api]
    answer = client.post(path, json={**body, "max_tokens": 60, "stream": stream, **more})
    assert answer.status_code == 200, answer.text
    if stream:
        found = [json.loads(data)["choices"][0] for data in events(answer.text)[:-1]]
    else:
        found = answer.json()["choices"]
    texts = (each.get("delta", each.get("message", each)) for each in found)
    return "".join(each.get("content", each.get("text")) or "" for each in texts), found[-1]["finish_reason"]


TIGHT = {**VOTE, "x-guidance": {"whitespace_flexible": False}}


@pytest.mark.parametrize(("api", "stream"), [("chat", False), ("text", True)])
def test_a_json_object_may_have_a_schema(client: TestClient, api: str, stream: bool) -> None:
    text, reason = said(client, api, stream=stream, response_format={"type": "json_object", "schema": TIGHT})
    assert (text, reason) in [('{"a":1}', "stop"), ('{"a":2}', "stop")]


WRONG: list[dict[str, Any]] = [
    {"min_tokens": 4, "response_format": {"type": "json_object"}},
    {"ignore_eos": True, "response_format": {"type": "json_object"}},
    {"min_tokens": -1},
    {"ignore_eos": "yes"},
]


def test_lengths_that_a_grammar_excludes_are_refused_by_name(client: TestClient) -> None:
    path, body = PATHS["chat"]
    for given in WRONG:
        content = json.dumps({**body, "max_tokens": 4, **given})
        answer = client.post(path, content=content, headers={"Content-Type": "application/json"})
        assert (answer.status_code, next(iter(given)) in answer.text) == (400, True), answer.text


@pytest.mark.parametrize(
    ("stream", "more"), [(False, {}), (True, {"stop_token_ids": [9]}), (False, {"temperature": 1, "seed": 1})]
)
def test_an_answer_has_at_least_the_tokens_that_are_asked_for(client: Any, stream: bool, more: Any) -> None:
    end = {"logit_bias": {"301": 100, "1": 100, "9": 100 if more.get("stop_token_ids") else 0}, **more}
    for api in ("chat", "text"):
        path, body = PATHS[api]
        for given, expected in (({}, 0), ({"min_tokens": 5}, 5), ({"ignore_eos": True}, 12)):
            more = {"stream_options": {"include_usage": True}} if stream else {}
            answer = client.post(path, json={**body, "max_tokens": 12, "stream": stream, **more, **end, **given})
            usage = json.loads(events(answer.text)[-2])["usage"] if stream else answer.json()["usage"]
            if not (given == {"ignore_eos": True} and "stop_token_ids" in end):  # a stop of the client's ends it
                assert usage["completion_tokens"] == expected
