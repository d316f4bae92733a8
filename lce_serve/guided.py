"""Fields of neighbouring servers that say what an answer must be. Each is obeyed or refused by its name, never ignored.

{"guided_regex": "[a-z]+"}                   vLLM's; also `structured_outputs`, `min_tokens` and `ignore_eos`
{"grammar": "root ::= \\"yes\\" | \\"no\\""}     llama.cpp's, in GBNF or Lark; also `json_schema`
"""

from __future__ import annotations

import json
from contextlib import suppress

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from lce.engine.grammar import GrammarConstraint, Vocabulary, compiled
from lce_serve.fields import MOST_TOKENS, Fields
from lce_serve.grammar import Grammar, Lasting, grammar_of, schema_constraint
from lce_serve.refusals import Refusal, wrong
from lce_serve.tools import Tools

MOST_GUIDE = 1 << 17  # characters of a grammar, and choices
# Fields that would change an answer and that nothing here does; a value that is false or empty asks for nothing.
_UNDONE = (
    *("suffix", "use_beam_search", "bad_words", "allowed_token_ids", "logits_processors", "prompt_logprobs"),
    *("truncate_prompt_tokens", "include_stop_str_in_output", "guided_whitespace_pattern", "whitespace_pattern"),
    *("structural_tag", "best_of", "skip_special_tokens", "modalities"),
)
_INNER = "structured_outputs."
_GUIDES = {  # the kinds of grammars, each with the fields that have one
    "json": ("guided_json", "json_schema", f"{_INNER}json"),
    "object": ("guided_json_object", f"{_INNER}json_object"),
    "choice": ("guided_choice", f"{_INNER}choice"),
    "regex": ("guided_regex", "regex", f"{_INNER}regex"),
    "grammar": ("guided_grammar", "grammar", "ebnf", f"{_INNER}grammar"),
}


def refuse_undone(fields: Fields) -> None:
    """Refuse a field that would change the answer and that this server does not obey."""
    usual = {"best_of": (1, fields.body.get("n")), "skip_special_tokens": (True,), "modalities": (["text"],)}
    for part in (fields, fields.inner("structured_outputs")):
        for name in _UNDONE:
            if part.has(name) and part.body[name] not in usual.get(name, (False, "", [], -1)):
                raise Refusal(400, f"{part.name(name)} is not supported; leave it out", part.name(name))


def grammar_for(fields: Fields, form: Fields, tools: Tools) -> Grammar | None:
    """Return a function that compiles an answer's grammar: of `form`, its `response_format`, or of any such field.

    Refuses two grammars that exclude each other, and a least length of an answer that a grammar ends.
    """
    own, inner = grammar_of(form, tools), fields.inner("structured_outputs")
    known = [(kind, name) for kind, names in _GUIDES.items() for name in names]
    parts = [(inner if _INNER in name else fields, name.removeprefix(_INNER), kind) for kind, name in known]
    guides = [(part, name, kind) for part, name, kind in parts if part.body.get(name) not in (None, False, "")]
    least, stops = fields.whole("min_tokens", 0, MOST_TOKENS) or 0, fields.items("stop_token_ids", 1024)
    if fields.flag("ignore_eos"):
        least, stops = MOST_TOKENS, []
    names = [part.name(name) for part, name, _ in guides]
    if tools.forced or (form.text("type") or "text") != "text":
        names.append("tool_choice" if tools.forced else form.where)
    if least:
        names.append("ignore_eos" if least == MOST_TOKENS else "min_tokens")
    if len(names) > 1:
        raise Refusal(400, f"{names[0]} and {names[1]} exclude each other; leave one of them out", names[0])
    if guides:
        return _guide(*guides[0])
    if not least:
        return own
    return lambda vocabulary: Lasting(least, [*vocabulary.eos_ids, *stops], own(vocabulary) if own else None)


def _guide(fields: Fields, field: str, kind: str) -> Grammar:
    """Return a function that compiles the grammar of a field."""
    where = fields.name(field)
    if kind in ("json", "object"):
        schema = fields.body[field] if kind == "json" else {"type": "object"}
        if isinstance(schema, str):
            with suppress(ValueError, RecursionError):
                schema = json.loads(schema)
        if not isinstance(schema, dict):
            raise wrong(where, schema, "a JSON schema")
        return lambda vocabulary: schema_constraint(vocabulary, schema, where)
    if kind == "choice":
        choices = fields.items(field, MOST_GUIDE)
        if not choices or not all(isinstance(each, str) and each for each in choices):
            raise wrong(where, choices, "a list of texts, none of them empty")
        text = f"start: {' | '.join(json.dumps(each) for each in choices)}"
    else:
        text = fields.text(field) or ""
    if len(text) > MOST_GUIDE:
        raise Refusal(400, f"{where} has {len(text)} characters; expected {MOST_GUIDE} or fewer", where)

    def compile_it(vocabulary: Vocabulary) -> GrammarConstraint:
        try:
            changed = {"regex": llguidance.LLMatcher.grammar_from_regex, "grammar": any_to_lark}.get(kind, str)(text)
            found: GrammarConstraint | str = compiled(vocabulary, changed)
        except Exception as error:  # the converter of GBNF raises any
            found = f"{error}"
        if isinstance(found, str):
            raise Refusal(400, f"{where} cannot be followed: {' '.join(found.split())[:240]}", where)
        return found

    return compile_it
