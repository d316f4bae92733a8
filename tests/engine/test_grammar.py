"""Schemas and grammars from Python: every way to ask follows them, and what cannot be enforced is refused."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lce
from tests.checkpoints import save_chat

pytest.importorskip("llguidance", reason="lce[serve] is not installed")

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2]}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
MESSAGES = [{"role": "user", "content": "Is it so?"}]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> lce.Engine:
    return lce.load(save_chat(tmp_path_factory.mktemp("chat"), TEMPLATE, max_position_embeddings=512), threads=1)


def in_batch(engine: lce.Engine, **how: Any) -> lce.Generation:
    with engine.batch() as batch:
        return batch.chat(MESSAGES, **how).finish()


WAYS: dict[str, Callable[..., lce.Generation]] = {
    "generate": lambda engine, **how: engine.generate("Is it so?", **how),
    "list": lambda engine, **how: engine.generate(["So?", "Is it so?"], **how)[1],
    "stream": lambda engine, **how: engine.stream("Is it so?", **how).finish(),
    "chat": lambda engine, **how: engine.chat(MESSAGES, **how),
    "batch": in_batch,
}


@pytest.mark.parametrize("way", WAYS)
def test_an_answer_follows_a_schema(engine: lce.Engine, way: str) -> None:
    found = WAYS[way](engine, schema=SCHEMA, max_tokens=60, temperature=1.0, seed=3)
    assert (found.finish_reason, set(json.loads(found.text))) == ("stop", {"ok", "n"})


@pytest.mark.parametrize("way", ["generate", "list", "chat", "batch"])
def test_a_schema_begins_behind_the_thought(tmp_path: Path, way: str) -> None:
    thinks = TEMPLATE + "{% if add_generation_prompt %}<think>\n{% else %}</think>{% endif %}"
    engine = lce.load(save_chat(tmp_path, thinks, max_position_embeddings=512), threads=1)
    text = engine.tokenizer.render_chat(MESSAGES)
    asks = WAYS | {
        "generate": lambda engine, **how: engine.generate(text, **how),
        "list": lambda engine, **how: engine.generate([text, text], **how)[1],
    }
    how = {"max_tokens": 3, "temperature": 0}
    assert asks[way](engine, schema=SCHEMA, **how).token_ids == asks[way](engine, **how).token_ids


def test_an_answer_follows_a_grammar(engine: lce.Engine) -> None:
    assert engine.generate("Is it so?", grammar='start: "yes" | "no"').text in ("yes", "no")


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"schema": {"type": "string", "pattern": "^(?!a)b"}}, "the schema cannot be enforced: look-around"),
        ({"schema": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"schema": "object"}, "schema is 'object'; expected a JSON schema as a dict"),
        ({"grammar": "start: ["}, "the grammar cannot be enforced: "),
        ({"grammar": 7}, "grammar is 7; expected a text"),
        ({"grammar": 'start: "a"', "schema": SCHEMA}, "schema and grammar are given; expected one of them"),
    ],
)
def test_what_cannot_be_enforced_is_refused(engine: lce.Engine, given: dict[str, Any], line: str) -> None:
    with pytest.raises(lce.UsageError, match=line):
        engine.generate("Is it so?", **given)


def test_a_missing_library_is_named(engine: lce.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "lce.engine.grammar", raising=False)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(lce.UsageError, match="pip install llguidance"):
        lce.Engine(engine.setup.using("full")).generate("Is it so?", schema=SCHEMA)
