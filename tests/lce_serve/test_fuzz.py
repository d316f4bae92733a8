"""No request makes the server fail: random values in every field and path that /openapi.json describes."""

import json
import random
import re
from itertools import product
from typing import Any
from urllib.parse import quote

import pytest
from starlette.testclient import TestClient

from lce_serve.openapi import document

NUMBERS = [None, True, False, 0, 1, -1, 3.5, 1e308, -0.0, 2**70]
TEXTS = ["", "x", "\x00", "auto", "tiny", "user", "text", "é\u2028", "streaming", "esa", "required"]
TEXTS += ["\ud800", "a\ufdd0b", "<|end|>", "😀" * 50]
LISTS: list[Any] = [[], [1], [[1]], [[]], ["x"], [None], [{"role": "user", "content": "x"}]]
LISTS += [[{"type": "function_call"}]]
OBJECTS: list[Any] = [{}, {"a": {"b": [1]}}, {"include_usage": True}, {"5": 3}, {"10000000": 3}]
TYPES: list[Any] = [{"type": "text", "text": "x"}, {"type": "any"}, {"type": "tool", "name": "f"}]
FORMS: list[Any] = [
    {"type": "json_object"},
    {"format": {"type": "json_object"}},
    {"type": "json_schema", "schema": {"type": 5}},
    {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},
]
TOOLS: list[Any] = [
    [{"name": "f", "input_schema": {}}],
    [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
]
ODD = [*NUMBERS, *TEXTS, *LISTS, *OBJECTS, *TYPES, *FORMS, *TOOLS]
SHORT = dict.fromkeys(("max_tokens", "max_output_tokens", "max_completion_tokens"), 3)


def body_of(properties: dict[str, Any], required: list[str], chance: random.Random) -> dict[str, Any]:
    text = chance.choice(TEXTS)
    good = {"messages": [{"role": "user", "content": text}], "prompt": text, "input": text, "name": "a", **SHORT}
    body: dict[str, Any] = {name: value for name, value in good.items() if name in properties}
    for name in chance.sample(sorted(properties), min(len(properties), chance.randint(1, 3))):
        body[name] = chance.choice(ODD)
    if chance.random() < 0.1 and required:
        body.pop(chance.choice(required), None)
    return body


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_no_body_is_an_internal_error(client: TestClient, seed: int) -> None:
    chance, statuses = random.Random(seed), set()
    for path, verbs in document()["paths"].items():
        for verb, text in product({"get", "delete"} & {*verbs}, TEXTS):
            answer = client.request(verb, re.sub(r"{\w+}", quote(text, safe="", errors="surrogatepass"), path))
            assert answer.status_code < 500, (verb, path, text, answer.text)
        if "post" not in verbs:
            continue
        schema = verbs["post"]["requestBody"]["content"]["application/json"]["schema"]
        for _ in range(15 if seed == 0 else 400):
            body = body_of(schema["properties"], schema["required"], chance)
            if body.get("max_tokens") is None and "max_tokens" in body:
                body["max_tokens"] = 3
            answer = client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
            statuses.add(answer.status_code)
            assert answer.status_code < 500, (path, body, answer.text)
    assert statuses <= {200, 400, 404}
