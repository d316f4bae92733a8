"""Grammars and JSON schemas, as masks of the tokens that may come next. Stands on llguidance.

llguidance compiles a grammar with limits, without Python's lock, and enforces it byte by byte. A token outside the
tokenizer's vocabulary is never allowed.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Mapping
from typing import Any

import llguidance
import numpy as np

from lce.errors import UsageError, shown
from lce.tokenizer.thinking import Thinking

_COMPLETE = ("EndOfSentence", "NoExtension", "NoExtensionBias")
# White space within JSON is bounded, so that no answer is lost in blanks: a line break with an indent, or two blanks.
_BLANKS = {"whitespace_pattern": r"\r?\n[ \t]{0,32}|[ \t]{1,2}"}
_LIMITS = {"initial_lexer_fuel": 500_000, "max_grammar_size": 100_000, "max_lexer_states": 50_000}


class Vocabulary:
    """A tokenizer's vocabulary in llguidance's form, made once, when a request first needs it."""

    thinking: Thinking | None = None  # how an answer may begin with a thought, behind which each grammar begins

    def __init__(self, tokenizer: Any, eos_ids: frozenset[int]) -> None:
        self.tokenizer, self.eos_ids = tokenizer, sorted(eos_ids)
        self._lock = threading.Lock()
        self._made: llguidance.LLTokenizer | None = None

    def get(self) -> llguidance.LLTokenizer:
        """Return the vocabulary. Takes some tenths of a second for the first time."""
        with self._lock:
            if self._made is None:
                tokens = llguidance.TokenizerWrapper(_Tokens(self.tokenizer, self.eos_ids))
                self._made = llguidance.LLTokenizer(tokens, eos_token=self.eos_ids)
            return self._made

    def behind(self, thinking: Thinking | None) -> Vocabulary:
        """Return this vocabulary for answers that may begin with a thought. Blocks as `get` does."""
        self.get()
        (found := copy.copy(self)).thinking = thinking
        return found

    def constraint(self, schema: object, grammar: object) -> GrammarConstraint:
        """Compile a user's JSON schema, or else grammar, for one answer.

        Raises `UsageError` if any of it cannot be enforced, unless the schema has `"x-guidance": {"lenient": true}`.
        """
        if isinstance(schema, Mapping):
            what, found = "schema", of_schema(self, {"x-guidance": {"lenient": False}, **schema})
        elif schema is not None:
            hint = ", such as what model_json_schema() returns" if hasattr(schema, "model_json_schema") else ""
            raise UsageError(f"schema is {shown(schema)}; expected a JSON schema as a dict{hint}")
        elif isinstance(grammar, str):
            what, found = "grammar", compiled(self, grammar)
        else:
            raise UsageError(f"grammar is {shown(grammar)}; expected a text in llguidance's Lark syntax")
        if isinstance(found, str):
            raise UsageError(f"the {what} cannot be enforced: {found}; change it")
        return found


class _Tokens:
    """The bytes of each token, in the form that llguidance's wrapper reads."""

    def __init__(self, tokenizer: Any, eos_ids: list[int]) -> None:
        if not eos_ids:
            raise UsageError("this model has no token that ends a text, so no answer can follow a schema")
        self._encode = tokenizer.encode
        self.eos_token_id, self.bos_token_id = eos_ids[0], tokenizer.bos_id
        spelled = [tokenizer.bytes_of(i) for i in range(tokenizer.vocab_size)]
        self.special_token_ids = [i for i, text in enumerate(spelled) if not text or i in eos_ids]
        special = set(self.special_token_ids)
        self.tokens = [b"<|%d|>" % i if i in special else text for i, text in enumerate(spelled)]

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = self._encode(text, bos=False)
        return ids


class GrammarConstraint:
    """A grammar at work on one answer: `apply` masks logits before sampling, `accept` follows the drawn token."""

    def __init__(self, matcher: llguidance.LLMatcher, eos_ids: list[int]) -> None:
        self._matcher, self._eos_ids = matcher, eos_ids
        self.notes: list[str] = []  # name what of the request's schemas is not enforced

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
            raise UsageError(f"the schema cannot be followed: {_line(self._matcher.get_error())}")

    def copy(self) -> GrammarConstraint:
        """Return a constraint by the same grammar for another answer that begins as this one."""
        return GrammarConstraint(self._matcher.deep_copy(), self._eos_ids)


def guided(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that says how it is enforced. What its own `x-guidance` says of white space holds."""
    own = schema.get("x-guidance") or {}
    if not isinstance(own, dict):
        return schema
    blanks = {} if any(name.startswith("whitespace") for name in own) else _BLANKS
    return {**schema, "x-guidance": {"lenient": True, **blanks, **own}}


def of_schema(vocabulary: Vocabulary, schema: dict[str, Any]) -> GrammarConstraint | str:
    """Compile the grammar of a text that a schema allows, or return in a line why this cannot be done."""
    try:
        return compiled(vocabulary, llguidance.LLMatcher.grammar_from_json_schema(guided(schema)))
    except ValueError as error:  # a number beyond 64 bits, or half a surrogate pair
        return _line(str(error))


def compiled(vocabulary: Vocabulary, grammar: str) -> GrammarConstraint | str:
    """Compile a grammar, or return in a line why it is invalid or too complex."""
    limits = llguidance.LLParserLimits(**_LIMITS, verbose_errors=False)  # type: ignore[arg-type]
    grammar = grammar if vocabulary.thinking is None else _behind(vocabulary.thinking, grammar)
    matcher = llguidance.LLMatcher(vocabulary.get(), grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # finds schemas that no text fits, such as {"$ref": "#"}
    if matcher.is_error():
        return _line(matcher.get_error())
    return GrammarConstraint(matcher, vocabulary.eos_ids)


def _behind(thinking: Thinking, grammar: str) -> str:
    """Return a grammar whose text comes behind a thought, if the answer begins with one. The thought is free."""
    closed, opened = json.dumps(thinking.closed), json.dumps(thinking.opened)
    begin, instead = ("", "") if thinking.is_open else (opened, "| @answer")
    outer = f"start: thought BLANK? @answer {instead}\nBLANK: /\\n{{1,2}}/\nthought[lazy]: {begin} /(.|\\n)*/ {closed}"
    inner = json.loads(grammar) if grammar.startswith("{") else {"grammars": [{"lark_grammar": grammar}]}
    inner["grammars"][0]["name"] = "answer"
    return json.dumps({"grammars": [{"lark_grammar": outer}, *inner["grammars"]]})


def _line(why: str) -> str:
    """Return a line about a fault, without the grammar's own text."""
    line = why.encode("utf-8", "replace").decode().partition("\n   1 |")[0].removesuffix("<non-verbose/>")
    found = line.rpartition("failed to compile JSON schema: ")[2].rpartition("\nerror: ")[2]
    return " ".join(found.split())[:240] or "no text fits"
