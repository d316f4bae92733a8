"""Sampling that a request leaves out: what the model's makers recommend, seeds that are said, equal prompts."""

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("starlette", reason="lce[serve] is not installed")

from starlette.testclient import TestClient

import lce
from lce_serve.app import application
from lce_serve.service import Service, Settings
from tests.lce_serve.conftest import URL, events

ASKED: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": "haiku"}]},
    "completions": {"prompt": "haiku"},
    "messages": {"messages": [{"role": "user", "content": "haiku"}]},
    "responses": {"input": "haiku"},
}
OWN = {"do_sample": True, "temperature": 0.9, "top_k": 20}


@pytest.fixture(params=[OWN, {}], ids=["recommended", "none"])
def asking(request: pytest.FixtureRequest, chat_model: Path, tmp_path: Path) -> Any:
    """A client of a model with these recommendations."""
    shutil.copytree(chat_model, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 301], **request.param}))
    with lce.load(tmp_path, threads=1).batch(max_lanes=4) as batch:
        batch.stream = Mock(wraps=batch.stream)
        client = TestClient(application(Service(Settings("tiny"), batch)), base_url=URL)
        yield client, batch.stream, request.param


def post(client: TestClient, path: str, **more: Any) -> Any:
    limit = "max_output_tokens" if path == "responses" else "max_tokens"
    answer = client.post(f"/v1/{path}", json={limit: 12, **ASKED[path], **more})
    assert answer.status_code == 200, answer.text
    return answer


def said(path: str, found: dict[str, Any]) -> tuple[str, int | None]:
    """The text of an answer, and its seed."""
    if path == "messages":
        return found["content"][0]["text"], found.get("seed")
    if path == "responses":
        return found["output"][0]["content"][0]["text"], found.get("seed")
    choice = found["choices"][0]
    return choice["message"]["content"] if "message" in choice else choice["text"], choice.get("seed")


def own(stream: Mock) -> dict[str, Any]:
    knobs = ("temperature", "top_k", "frequency_penalty")
    return {name: value for name, value in stream.call_args.kwargs.items() if name in knobs}


@pytest.mark.parametrize("path", ASKED)
def test_what_a_request_leaves_out_is_recommended(asking: Any, path: str) -> None:
    client, stream, recommended = asking
    default = {k: x for k, x in recommended.items() if k != "do_sample"} or {"frequency_penalty": 0.5}
    text, seed = said(path, post(client, path).json())
    assert own(stream) == default
    assert (seed is None) == (not recommended)
    if recommended:
        again = post(client, path, seed=seed) if path != "messages" else None
        assert again is None or said(path, again.json()) == (text, seed), "the seed draws it again"
        assert post(client, path, top_k=3, stream=True).text.count('"seed"') >= 1
        assert own(stream) == default | {"top_k": 3}
    assert said(path, post(client, path, temperature=0).json())[1] is None
    assert own(stream) == {"temperature": 0.0}


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_equal_prompts_differ_when_drawn_and_are_computed_once_when_greedy(asking: Any, path: str) -> None:
    client, stream, recommended = asking
    drawn = post(client, path, n=3).json()["choices"]
    assert len({json.dumps(each.get("message", each.get("text"))) for each in drawn}) == 3
    assert len({each["seed"] for each in drawn}) == 3
    assert own(stream).get("temperature") == recommended.get("temperature", 0.7)
    seeds = [each["seed"] for each in post(client, path, n=3, seed=5, temperature=1).json()["choices"]]
    assert seeds == [5, 6, 7]
    stream.reset_mock()
    alone = said(path, post(client, path, temperature=0).json())[0]
    whole = post(client, path, n=3, temperature=0).json()
    assert stream.call_count == 2
    assert [said(path, {"choices": [each]})[0] for each in whole["choices"]] == [alone] * 3
    assert [each["index"] for each in whole["choices"]] == [0, 1, 2]
    texts, ends = {0: "", 1: "", 2: ""}, set()
    for data in events(post(client, path, n=3, temperature=0, stream=True).text)[:-1]:
        (choice,) = json.loads(data)["choices"]
        texts[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
        ends |= {choice["index"]} if choice["finish_reason"] else set()
    assert (list(texts.values()), ends) == ([alone] * 3, {0, 1, 2})


def test_a_list_of_equal_prompts_is_drawn_once_each(asking: Any) -> None:
    client, stream, _ = asking
    found = post(client, "completions", prompt=["haiku", "haiku", "verse"], temperature=0).json()["choices"]
    assert stream.call_count == 2
    assert found[0]["text"] == found[1]["text"]
    drawn = post(client, "completions", prompt=["haiku", "haiku"], temperature=1, seed=3).json()["choices"]
    assert [each["seed"] for each in drawn] == [3, 4]


def test_models_and_props_say_what_is_recommended(asking: Any) -> None:
    client, _, recommended = asking
    default = {k: x for k, x in recommended.items() if k != "do_sample"} or {"frequency_penalty": 0.5}
    assert client.get("/v1/models").json()["data"][0]["sampling"] == default
    assert client.get("/props").json()["default_generation_settings"]["params"] == default
