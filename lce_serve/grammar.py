"""The grammars of requests: a response format, and calls of tools. What cannot be enforced loosens itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from lce.engine.grammar import GrammarConstraint, Vocabulary, compiled, of_schema
from lce_serve.fields import MOST_TOKENS, Fields
from lce_serve.forms import enforced_form
from lce_serve.loosening import loosened, says_anything
from lce_serve.refusals import Refusal
from lce_serve.tools import Tools

_ANY = "%llguidance {}\nstart: /(.|\\n)*/\n"


class Lasting:
    """A constraint that lets no token of `ends` come before the token number `least`. `inner` says what else may not.

    It is for an answer that `inner` does not end.
    """

    def __init__(self, least: int, ends: list[int], inner: GrammarConstraint | Lasting | None) -> None:
        self._left, self._ends, self._inner = least, ends, inner
        self.notes: list[str] = [] if inner is None else inner.notes

    def apply(self, logits: Any) -> Any:
        """Return logits `[vocab]` with minus infinity for the tokens that may not come next."""
        allowed = logits if self._inner is None else self._inner.apply(logits)
        if self._left > 0 and self._ends:
            allowed[self._ends] = float("-inf")
        return allowed

    def accept(self, token_id: int) -> None:
        """Note the token that was drawn."""
        self._left -= 1
        if self._inner is not None:
            self._inner.accept(token_id)

    def copy(self) -> Lasting:
        """Return such a constraint for another answer that begins as this one."""
        return Lasting(self._left, self._ends, None if self._inner is None else self._inner.copy())


Grammar = Callable[[Vocabulary], GrammarConstraint | Lasting | None]


def grammar_for(fields: Fields, form: Fields, tools: Tools) -> Grammar | None:
    """Return a function that compiles an answer's grammar: of `form`, its `response_format`, or of calls of its tools.

    The function blocks: call it in a thread. `min_tokens` or `ignore_eos` lengthen an answer that no grammar ends.
    """
    own = _grammar_of(form, tools)
    least, stops = fields.whole("min_tokens", 0, MOST_TOKENS) or 0, fields.ids("stop_token_ids")
    name = "min_tokens"
    if fields.flag("ignore_eos"):
        name, least, stops = "ignore_eos", MOST_TOKENS, []
    if not least:
        return own
    if tools.forced or (form.text("type") or "text") != "text":
        other = "tool_choice" if tools.forced else form.where
        raise Refusal(400, f"{name} and {other} exclude each other; leave one of them out", name)
    return lambda vocabulary: Lasting(least, [*vocabulary.eos_ids, *stops], own(vocabulary) if own else None)


def _grammar_of(form: Fields, tools: Tools) -> Grammar | None:
    kind = form.text("type") or "text"
    if kind not in ("text", "json_object", "json_schema"):
        raise Refusal(400, f"{form.name('type')} must be text, json_object or json_schema", form.name("type"))
    schema = form.inner("json_schema").object("schema") or form.object("schema")
    if kind == "json_schema" and schema is None:
        raise Refusal(400, f"{form.where} has no schema", form.where)
    if kind == "json_object" and not schema:
        schema = {"type": "object"}
    if kind != "text" and schema is not None and not tools.forced:
        return lambda vocabulary: schema_constraint(vocabulary, schema)
    return (lambda vocabulary: tools_constraint(vocabulary, tools)) if tools.callable else None


def schema_constraint(vocabulary: Vocabulary, schema: dict[str, Any]) -> GrammarConstraint:
    """Compile the grammar of a text that a JSON schema allows. Refuses a schema of which nothing can be enforced."""
    if isinstance(found := of_schema(vocabulary, schema), GrammarConstraint):
        return found
    left, notes = loosened(schema, lambda part: _fault(vocabulary, part))
    if isinstance(again := of_schema(vocabulary, left), GrammarConstraint) and says_anything(left):
        again.notes = [f"not enforced: {note}" for note in notes]
        return again
    raise Refusal(400, f"the schema cannot be followed: {found}", "response_format")


def tools_constraint(vocabulary: Vocabulary, tools: Tools) -> GrammarConstraint:
    """Compile the grammar of a text in which each call has the model's form and fits its tool's schema.

    What cannot be enforced is left out: keywords, then whole schemas, the largest first, then the grammar. Refuses a
    call that must be made, and a tool that is `strict`, if nothing is left of the schema.
    """
    form, schemas = enforced_form(vocabulary.tokenizer), {tool.name: tool.schema for tool in tools.callable}
    thinking = vocabulary.thinking
    opened = "" if thinking is None or thinking.is_open else thinking.opened

    def compile_them() -> GrammarConstraint | str:
        return compiled(vocabulary, form.grammar(tools, schemas, opened))

    if isinstance(found := compile_them(), GrammarConstraint):
        found.notes = [*form.notes]
        return found
    notes: dict[str, list[str]] = {}
    for name, schema in schemas.items():
        left, said = loosened(schema, lambda part: _fault(vocabulary, part))
        if said:
            schemas[name], notes[name] = {**left, "type": "object"}, said
    largest = sorted(schemas, key=lambda name: len(json.dumps(schemas[name])))
    n_freed = 1
    while not isinstance(found := compile_them(), GrammarConstraint) and largest:
        for name in largest[-n_freed:]:
            schemas[name], notes[name] = {"type": "object"}, [f"everything ({found})"]
        largest, n_freed = largest[:-n_freed], 2 * n_freed
    empty = [name for name in notes if not says_anything(schemas[name])]
    strict = [tool.name for tool in tools.callable if tool.strict and tool.name in empty]
    if strict or (tools.forced and len(empty) == len(schemas)):
        name = (strict or empty)[0]
        line = f"nothing of the schema of the tool {name} can be enforced: {notes[name][0]}; give a simpler schema"
        raise Refusal(400, line, "tools")
    if isinstance(found, str):
        if tools.forced:
            raise Refusal(400, f"calls of these tools cannot be enforced: {found}", "tools")
        notes, found = {"tools": [f"everything ({found})"]}, compiled(vocabulary, _ANY)
    assert isinstance(found, GrammarConstraint)
    found.notes = [*form.notes, *(f"not enforced: {name}: {note}" for name, said in notes.items() for note in said)]
    return found


def _fault(vocabulary: Vocabulary, schema: dict[str, Any]) -> str | None:
    """Return why a schema cannot be enforced; None if it can."""
    found = of_schema(vocabulary, schema)
    return None if isinstance(found, GrammarConstraint) else found
