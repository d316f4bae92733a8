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
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 60, **how}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


def schema(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": [*properties], "additionalProperties": False, "properties": properties}


def test_a_schema_is_filled_in(client: TestClient) -> None:
    place = schema(city={"type": "string", "maxLength": 20}, country={"enum": ["France", "Norway"]})
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": place}}
    found = ask(client, "Where is the Eiffel Tower? Answer in JSON.", response_format=form)
    assert json.loads(found["content"])["country"] == "France"


def test_a_tool_is_called_by_a_template_that_knows_none(client: TestClient) -> None:
    tool = {"name": "weather", "description": "The weather", "parameters": schema(city={"enum": ["Paris", "Oslo"]})}
    how: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
    found = ask(client, "What is the weather in Oslo?", tools=[{"type": "function", "function": tool}], **how)
    (call,) = found["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}
