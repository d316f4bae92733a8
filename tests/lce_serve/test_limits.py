"""Where an answer ends: limits of tokens, stop strings and ids, the ends of turns, and the ends of JSON."""

import json
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import lce
from lce_serve.app import application
from lce_serve.service import Service, Settings
from tests.checkpoints import save_chat
from tests.lce_serve.conftest import TEMPLATE, URL, events

HI = [{"role": "user", "content": "the quick fox"}]
WINDOW = 64  # of the model whose window is soon full
FORMS = {  # the path, the prompt and the limit's name of each API
    "chat": ("/v1/chat/completions", {"messages": HI}, "max_tokens"),
    "newer": ("/v1/chat/completions", {"messages": HI}, "max_completion_tokens"),
    "text": ("/v1/completions", {"prompt": "the quick fox"}, "max_tokens"),
    "messages": ("/v1/messages", {"messages": HI}, "max_tokens"),
    "responses": ("/v1/responses", {"input": "the quick fox"}, "max_output_tokens"),
}
NO_END = {"logit_bias": {"1": -100, "301": -100}}
END = 301  # `<|end|>`


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A client of a server whose model has a window of 64."""
    folder = save_chat(tmp_path_factory.mktemp("small"), TEMPLATE, max_position_embeddings=WINDOW)
    with lce.load(folder, method="full", threads=1).batch(max_lanes=2) as batch:
        yield TestClient(application(Service(Settings("tiny"), batch)), base_url=URL)


def ended(form: str, found: dict[str, Any]) -> tuple[str, int, int]:
    """Why an answer ended, the tokens of its prompt, and its own."""
    usage = found["usage"]
    if form == "messages":
        return found["stop_reason"], usage["input_tokens"] + usage["cache_read_input_tokens"], usage["output_tokens"]
    if form == "responses":
        return found["incomplete_details"]["reason"], usage["input_tokens"], usage["output_tokens"]
    return found["choices"][0]["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("limit", [WINDOW, 2**31 - 1, -1, None])
@pytest.mark.covering
def test_a_limit_larger_than_what_is_left_is_lowered(
    small: TestClient, monkeypatch: Any, form: str, limit: int | None
) -> None:
    monkeypatch.setattr("lce.engine.answer.likeliest_of", lambda logits: 77)  # never an end
    path, prompt, name = FORMS[form]
    answer = small.post(path, json={**prompt, name: limit})
    assert answer.status_code == 200, answer.text
    reason, n_prompt, n_said = ended(form, answer.json())
    assert reason in ("length", "max_tokens", "max_output_tokens")
    assert n_prompt + n_said == WINDOW
    if limit == WINDOW:
        streamed = small.post(path, json={**prompt, name: limit, "stream": True})
        assert (streamed.status_code, "error" in streamed.text.replace('"error":null', "")) == (200, False)


def test_a_prompt_that_fills_the_window_gets_a_token_and_a_longer_one_its_own_count(small: TestClient) -> None:
    answer = small.post("/v1/completions", json={"prompt": [5] * WINDOW, "max_tokens": 9, **NO_END})
    assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 1)
    error = small.post("/v1/completions", json={"prompt": [5] * (WINDOW + 3), "max_tokens": 32000}).json()["error"]
    assert (error["code"], error["message"].partition(" are more")[0]) == ("context_length_exceeded", "67 tokens")


@pytest.mark.parametrize("limit", [-2, 0, 1.5, "many", True])
def test_other_limits_are_refused(client: TestClient, limit: Any) -> None:
    for path, prompt, name in FORMS.values():
        if limit == 0 and path == "/v1/completions":
            continue
        answer = client.post(path, json={**prompt, name: limit})
        assert (answer.status_code, name in answer.text) == (400, True), answer.text


def say(monkeypatch: Any, ids: list[int]) -> None:
    """Have the model say these tokens, one after the other."""
    left = iter(ids)
    monkeypatch.setattr("lce.engine.answer.likeliest_of", lambda logits: next(left))


def test_sixty_four_stop_strings_are_taken(client: TestClient) -> None:
    body: dict[str, Any] = {"messages": HI, "max_tokens": 2}
    assert client.post(FORMS["chat"][0], json={**body, "stop": [f"stop {i}" for i in range(64)]}).status_code == 200
    assert client.post(FORMS["chat"][0], json={**body, "stop": [f"stop {i}" for i in range(65)]}).status_code == 400


@pytest.mark.parametrize("stop", [{"stop": ["no", "<|turn|>"]}, {"stop_token_ids": [7, 300]}])
@pytest.mark.parametrize("path", [FORMS["chat"], FORMS["text"]], ids=["chat", "text"])
def test_special_tokens_and_ids_stop_an_answer(client: TestClient, monkeypatch: Any, path: Any, stop: Any) -> None:
    bias = {"logit_bias": {"300": 100}}
    found = client.post(path[0], json={**path[1], "max_tokens": 9, **bias, **stop}).json()
    assert ended("chat", found)[::2] == ("stop", 0)
    found = client.post(path[0], json={**path[1], "max_tokens": 9, **bias}).json()
    assert ended("chat", found)[::2] == ("length", 9)


@pytest.mark.parametrize("form", FORMS)
def test_half_a_surrogate_pair_stops_nothing(client: TestClient, form: str) -> None:
    path, prompt, name = FORMS[form]
    field = "stop_sequences" if form == "messages" else "stop"
    content = json.dumps({**prompt, name: 3, field: ["\ud800"]})
    answer = client.post(path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200


def test_stop_ids_are_checked(client: TestClient) -> None:
    for form in ("chat", "messages"):
        for wrong in ([9999], [-1], ["x"], [True], "x"):
            answer = client.post(FORMS[form][0], json={"messages": HI, "stop_token_ids": wrong, "min_tokens": 2})
            assert (answer.status_code, "stop_token_ids" in answer.text) == (400, True)


@pytest.mark.parametrize("stream", [False, True])
def test_messages_name_the_special_token_that_stopped_them(client: Any, monkeypatch: Any, stream: bool) -> None:
    monkeypatch.setattr("lce.engine.answer.likeliest_of", lambda logits: 300)
    body = {"messages": HI, "max_tokens": 9, "stop_sequences": ["<|turn|>"], "stream": stream}
    answer = client.post("/v1/messages", json=body)
    found = (
        next(json.loads(x) for x in events(answer.text) if "message_delta" in x)["delta"] if stream else answer.json()
    )
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "<|turn|>")


def test_a_folder_ends_a_turn_at_tokens_that_are_known_to_end_turns(tmp_path: Path) -> None:
    folder = save_chat(tmp_path, TEMPLATE)
    (folder / "generation_config.json").unlink()  # config.json names 1, the end of a text
    engine = lce.load(folder, threads=1)
    assert engine.setup.eos_ids == {1, END}
    assert engine.tokenizer.eos_ids == (1, END)
    assert engine.generate("the fox", logit_bias={END: 100}, max_tokens=5).finish_reason == "stop"


@pytest.mark.parametrize("kind", ["schema", "object", "tool"])
def test_white_space_within_json_is_bounded(client: TestClient, kind: str) -> None:
    array = {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}
    schema = {"type": "object", "properties": {"a": array}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"schema": schema}} if kind == "schema" else {"type": "json_object"}
    body: dict[str, Any] = {"response_format": form}
    if kind == "tool":
        function = {"name": "f", "parameters": schema}
        body = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    blanks = {
        str(i): 100 for i in client.post("/tokenize", json={"content": " \n\t", "add_special": False}).json()["tokens"]
    }
    found = client.post(FORMS["chat"][0], json={"messages": HI, "max_tokens": 900, "logit_bias": blanks, **body}).json()
    message = found["choices"][0]["message"]
    text = message["tool_calls"][0]["function"]["arguments"] if kind == "tool" else message["content"]
    assert len(text) - len("".join(text.split())) < 600
    assert "{" in text


@pytest.mark.parametrize("stream", [False, True])
def test_the_token_behind_a_complete_value_is_the_end(client: TestClient, stream: bool) -> None:
    yes = {"type": "object", "properties": {"a": {"const": True}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"schema": yes}}
    body = {"messages": HI, "max_tokens": 900, "response_format": form, "stream": stream, **NO_END}
    answer = client.post(FORMS["chat"][0], json=body)
    if stream:
        choices = [json.loads(data)["choices"][0] for data in events(answer.text)[:-1]]
        text, reason = "".join(x["delta"].get("content", "") for x in choices), choices[-1]["finish_reason"]
    else:
        (choice,) = answer.json()["choices"]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    assert (json.loads(text), reason, text[0], text[-1]) == ({"a": True}, "stop", "{", "}")


@pytest.mark.parametrize("own", [{"whitespace_flexible": False}, {"whitespace_pattern": "[ ]"}])
def test_what_a_schema_says_of_white_space_holds(client: TestClient, own: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"a": {"const": True}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"schema": {**schema, "x-guidance": own}}}
    line_breaks = client.post("/tokenize", json={"content": "\n\t", "add_special": False}).json()["tokens"]
    bias = {"logit_bias": {str(token_id): 100 for token_id in line_breaks}}
    found = client.post(FORMS["chat"][0], json={"messages": HI, "max_tokens": 99, "response_format": form, **bias})
    assert not {"\n", "\t"} & {*found.json()["choices"][0]["message"]["content"]}
