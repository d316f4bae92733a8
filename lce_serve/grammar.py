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
from lce_serve.refusals import Refusal
from lce_serve.tools import CLOSE, OPEN, Tools

MOST_SCHEMA = 64 << 10  # bytes of all schemas of a request, as JSON
_COMPLETE = ("EndOfSentence", "NoExtension", "NoExtensionBias")
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
    """A grammar at work on one answer: `apply` masks logits before sampling, `accept` follows the drawn token."""

    def __init__(self, matcher: llguidance.LLMatcher, eos_ids: list[int]) -> None:
        self._matcher, self._eos_ids = matcher, eos_ids

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
            raise _unfit(self._matcher.get_error())

    def copy(self) -> Constraint:
        """Return a constraint by the same grammar for another answer that begins as this one."""
        return Constraint(self._matcher.deep_copy(), self._eos_ids)


def grammar_of(form: Fields, tools: Tools) -> Callable[[], str | None] | None:
    """Return a function that returns an answer's grammar: that of its `response_format`, or of calls of its tools."""
    kind = form.text("type") or "text"
    if kind not in ("text", "json_object", "json_schema"):
        raise Refusal(400, f"{form.name('type')} must be text, json_object or json_schema", form.name("type"))
    schema: dict[str, Any] | None = {"type": "object"} if kind == "json_object" else None
    if kind == "json_schema":
        schema = form.inner("json_schema").object("schema") or form.object("schema")
        if schema is None:
            raise Refusal(400, f"{form.where} has no schema", form.where)
    if schema is not None and not tools.forced:
        return lambda: schema_grammar(schema)
    return (lambda: tools_grammar(tools)) if tools.callable else None


def schema_grammar(schema: dict[str, Any]) -> str:
    """Return the grammar of a text that a JSON schema allows."""
    if len(json.dumps(schema)) > MOST_SCHEMA:
        raise Refusal(400, f"the schema has more than {MOST_SCHEMA} bytes", "response_format")
    try:
        return str(llguidance.LLMatcher.grammar_from_json_schema(schema, overrides={"lenient": True}))
    except ValueError as error:  # a number beyond 64 bits, or half a surrogate pair
        raise _unfit(str(error)) from None


def tools_grammar(tools: Tools) -> str | None:
    """Return the grammar of a text in which each call fits its tool's schema; None if nothing can be called.

    With `auto` the text is free until a call begins. With a forced choice it begins with a call.
    """
    if not tools.callable:
        return None
    if sum(len(json.dumps(tool.parameters)) for tool in tools.callable) > MOST_SCHEMA:
        raise Refusal(400, f"the tools' schemas have more than {MOST_SCHEMA} bytes", "tools")
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
        schema = {**tool.parameters, "x-guidance": {"lenient": True}}
        lines.append(f'{name}: {opened} %json {json.dumps(schema)} "}}"')
    return "\n".join(lines) + "\n"


def constraint(vocabulary: Vocabulary, grammar: str) -> Constraint:
    """Compile a grammar. Refuses a grammar that is invalid or too complex. Blocks: call this in a thread."""
    limits = llguidance.LLParserLimits(**_LIMITS, verbose_errors=False)  # type: ignore[arg-type]
    matcher = llguidance.LLMatcher(vocabulary.get(), grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # finds schemas that no text fits, such as {"$ref": "#"}
    if matcher.is_error():
        raise _unfit(matcher.get_error())
    return Constraint(matcher, vocabulary.eos_ids)


def _unfit(why: str) -> Refusal:
    line = " ".join(why.encode("utf-8", "replace").decode().split())[:240]
    return Refusal(400, f"the schema cannot be followed: {line}", "response_format")
