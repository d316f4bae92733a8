"""Grammars: JSON, JSON schemas and calls of tools, as masks of the tokens that may come next. Stands on llguidance.

llguidance compiles a grammar with limits, without Python's lock, and enforces it byte by byte. A token outside the
tokenizer's vocabulary is never allowed.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import llguidance
import numpy as np

from lce_serve.fields import Fields
from lce_serve.loosening import loosened, says_anything
from lce_serve.refusals import Refusal
from lce_serve.tools import CLOSE, OPEN, Tools

_COMPLETE = ("EndOfSentence", "NoExtension", "NoExtensionBias")
_ANY = "%llguidance {}\nstart: /(.|\\n)*/\n"
# White space within JSON is bounded, so that no answer is lost in blanks: a line break with an indent, or two blanks.
_BLANKS = {"whitespace_pattern": r"\r?\n[ \t]{0,32}|[ \t]{1,2}"}
_LIMITS = {"initial_lexer_fuel": 500_000, "max_grammar_size": 100_000, "max_lexer_states": 50_000}


class Vocabulary:
    """A tokenizer's vocabulary in llguidance's form, made once, when a request first needs it."""

    def __init__(self, tokenizer: Any, eos_ids: frozenset[int]) -> None:
        self._tokenizer, self.eos_ids = tokenizer, sorted(eos_ids)
        self._lock = threading.Lock()
        self._made: llguidance.LLTokenizer | None = None

    def get(self) -> llguidance.LLTokenizer:
        """Return the vocabulary. Takes some tenths of a second for the first time."""
        with self._lock:
            if self._made is None:
                self._made = llguidance.LLTokenizer(
                    llguidance.TokenizerWrapper(_Tokens(self._tokenizer, self.eos_ids)), eos_token=self.eos_ids
                )
            return self._made


class _Tokens:
    """The bytes of each token, in the form that llguidance's wrapper reads."""

    def __init__(self, tokenizer: Any, eos_ids: list[int]) -> None:
        if not eos_ids:
            raise Refusal(400, "this model has no token that ends a text, so no answer can follow a schema")
        self._encode = tokenizer.encode
        self.eos_token_id, self.bos_token_id = eos_ids[0], tokenizer.bos_id
        spelled = [tokenizer.bytes_of(i) for i in range(tokenizer.vocab_size)]
        self.special_token_ids = [i for i, text in enumerate(spelled) if not text or i in eos_ids]
        special = set(self.special_token_ids)
        self.tokens = [b"<|%d|>" % i if i in special else text for i, text in enumerate(spelled)]

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = self._encode(text, bos=False)
        return ids


class Constraint:
    """A grammar at work on one answer: `apply` masks logits before sampling, `accept` follows the drawn token.

    `notes` name what of the request's schemas is not enforced.
    """

    def __init__(self, matcher: llguidance.LLMatcher, eos_ids: list[int]) -> None:
        self._matcher, self._eos_ids = matcher, eos_ids
        self.notes: list[str] = []

    def apply(self, logits: Any) -> Any:
        """Return logits `[vocab]` with minus infinity for the tokens that may not come next."""
        allowed = np.zeros(logits.shape[-1], dtype=bool)
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._complete:
            allowed[self._eos_ids] = True
        else:
            self._check()
            found = np.unpackbits(bits, bitorder="little")[: len(allowed)]
            allowed[: len(found)] = found
        mask = logits.new_tensor(allowed).bool()
        return logits.masked_fill(~mask, float("-inf"))

    def accept(self, token_id: int) -> None:
        """Note the token that was drawn."""
        if not self._complete:
            self._matcher.consume_token(token_id)
            if not self._complete:
                self._check()

    @property
    def _complete(self) -> bool:
        """Whether the text is complete, so that only its end may come."""
        return self._matcher.stop_reason() in _COMPLETE

    def _check(self) -> None:
        if self._matcher.is_error():
            line = f"the schema cannot be followed: {_line(self._matcher.get_error())}"
            raise Refusal(400, line, "response_format")

    def copy(self) -> Constraint:
        """Return a constraint by the same grammar for another answer that begins as this one."""
        return Constraint(self._matcher.deep_copy(), self._eos_ids)


Grammar = Callable[[Vocabulary], Constraint | None]


def grammar_of(form: Fields, tools: Tools) -> Grammar | None:
    """Return a function that compiles an answer's grammar: that of its `response_format`, or of calls of its tools.

    The function blocks: call it in a thread.
    """
    kind = form.text("type") or "text"
    if kind not in ("text", "json_object", "json_schema"):
        raise Refusal(400, f"{form.name('type')} must be text, json_object or json_schema", form.name("type"))
    schema: dict[str, Any] | None = {"type": "object"} if kind == "json_object" else None
    if kind == "json_schema":
        schema = form.inner("json_schema").object("schema") or form.object("schema")
        if schema is None:
            raise Refusal(400, f"{form.where} has no schema", form.where)
    if schema is not None and not tools.forced:
        return lambda vocabulary: schema_constraint(vocabulary, schema)
    return (lambda vocabulary: tools_constraint(vocabulary, tools)) if tools.callable else None


def schema_constraint(vocabulary: Vocabulary, schema: dict[str, Any]) -> Constraint:
    """Compile the grammar of a text that a JSON schema allows. Refuses a schema of which nothing can be enforced."""
    if isinstance(found := _of_schema(vocabulary, schema), Constraint):
        return found
    left, notes = loosened(schema, lambda part: _fault(vocabulary, part))
    if isinstance(again := _of_schema(vocabulary, left), Constraint) and says_anything(left):
        again.notes = [f"not enforced: {note}" for note in notes]
        return again
    raise Refusal(400, f"the schema cannot be followed: {found}", "response_format")


def tools_constraint(vocabulary: Vocabulary, tools: Tools) -> Constraint:
    """Compile the grammar of a text in which each call fits its tool's schema.

    What cannot be enforced is left out: keywords, then whole schemas, the largest first, then the grammar. Refuses a
    call that must be made, and a tool that is `strict`, if nothing is left of the schema.
    """
    schemas = {tool.name: tool.schema for tool in tools.callable}
    if isinstance(found := compiled(vocabulary, tools_grammar(tools, schemas)), Constraint):
        return found
    notes: dict[str, list[str]] = {}
    for name, schema in schemas.items():
        left, said = loosened(schema, lambda part: _fault(vocabulary, part))
        if said:
            schemas[name], notes[name] = {**left, "type": "object"}, said
    largest = sorted(schemas, key=lambda name: len(json.dumps(schemas[name])))
    n_freed = 1
    while not isinstance(found := compiled(vocabulary, tools_grammar(tools, schemas)), Constraint) and largest:
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
    assert isinstance(found, Constraint)
    found.notes = [f"not enforced: {name}: {note}" for name, said in notes.items() for note in said]
    return found


def tools_grammar(tools: Tools, schemas: dict[str, dict[str, Any]]) -> str:
    """Return the grammar of a text in which each call fits its tool's schema, one of `schemas`.

    With `auto` the text is free until a call begins. With a forced choice it begins with a call.
    """
    calls = [f"call_{i}" for i in range(len(tools.callable))]
    begin = f'TEXT "{OPEN}"' if not tools.forced else f'"{OPEN}"'
    lines = ["%llguidance {}"]
    if tools.forced:
        lines += ["start: call" + (' ("\\n" call)*' if tools.parallel else ""), f"call: {begin} body"]
    else:
        lines += [f"start: call{'*' if tools.parallel else '?'} rest", "call: begin body", "rest: TEXT"]
        lines += [f"begin[lazy]: {begin}", "TEXT: /(.|\\n)*/"]
    lines += [f'body: "\\n" ({" | ".join(calls)}) "\\n{CLOSE}"']
    for name, tool in zip(calls, tools.callable, strict=True):
        opened = json.dumps(f'{{"name": {json.dumps(tool.name)}, "arguments": ')
        lines.append(f'{name}: {opened} {_json(schemas[tool.name])} "}}"')
    return "\n".join(lines) + "\n"


def _json(schema: dict[str, Any]) -> str:
    return f"%json {json.dumps(_guided(schema))}"


def _guided(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that says how it is enforced. What its own `x-guidance` says of white space holds."""
    own = schema.get("x-guidance") or {}
    if not isinstance(own, dict):
        return schema
    blanks = {} if any(name.startswith("whitespace") for name in own) else _BLANKS
    return {**schema, "x-guidance": {"lenient": True, **blanks, **own}}


def _fault(vocabulary: Vocabulary, schema: dict[str, Any]) -> str | None:
    """Return why a schema cannot be enforced; None if it can."""
    found = _of_schema(vocabulary, schema)
    return None if isinstance(found, Constraint) else found


def _of_schema(vocabulary: Vocabulary, schema: dict[str, Any]) -> Constraint | str:
    """Compile the grammar of a text that a schema allows, or return in a line why this cannot be done."""
    try:
        return compiled(vocabulary, llguidance.LLMatcher.grammar_from_json_schema(_guided(schema)))
    except ValueError as error:  # a number beyond 64 bits, or half a surrogate pair
        return _line(str(error))


def compiled(vocabulary: Vocabulary, grammar: str) -> Constraint | str:
    """Compile a grammar, or return in a line why it is invalid or too complex."""
    limits = llguidance.LLParserLimits(**_LIMITS, verbose_errors=False)  # type: ignore[arg-type]
    matcher = llguidance.LLMatcher(vocabulary.get(), grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # finds schemas that no text fits, such as {"$ref": "#"}
    if matcher.is_error():
        return _line(matcher.get_error())
    return Constraint(matcher, vocabulary.eos_ids)


def _line(why: str) -> str:
    """Return a line about a fault, without the grammar's own text."""
    line = why.encode("utf-8", "replace").decode().partition("\n   1 |")[0].removesuffix("<non-verbose/>")
    found = line.rpartition("failed to compile JSON schema: ")[2].rpartition("\nerror: ")[2]
    return " ".join(found.split())[:240] or "no text fits"
