"""A real model behind the server: a schema and a call that make sense. Skipped where its package is missing."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import lce
from lce_serve.app import application
from lce_serve.service import Service, Settings
from tests.lce_serve.conftest import URL


@pytest.fixture(scope="module")
def client(smollm2: Path) -> Iterator[TestClient]:
    with lce.load(smollm2, threads=1).batch() as batch:
        yield TestClient(application(Service(Settings("smollm2"), batch)), base_url=URL)


def ask(client: TestClient, text: str, **how: Any) -> Any:
    answer = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": text}], **how})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def test_a_schema_is_filled_in(client: TestClient) -> None:
    schema = {
        "type": "object",
        "required": ["city", "country"],
        "additionalProperties": False,
        "properties": {"city": {"type": "string", "maxLength": 20}, "country": {"enum": ["France", "Norway"]}},
    }
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema}}
    found = ask(client, "Where is the Eiffel Tower? Answer in JSON.", response_format=form, max_tokens=60)
    assert json.loads(found["message"]["content"])["country"] == "France"


def test_a_tool_is_called_by_a_template_that_knows_none(client: TestClient) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": schema}}
    how: dict[str, Any] = {"tools": [tool], "tool_choice": "required", "max_tokens": 60, "parallel_tool_calls": False}
    found = ask(client, "What is the weather in Oslo?", **how)
    assert found["finish_reason"] == "tool_calls"
    (call,) = found["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}
