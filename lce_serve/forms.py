"""The forms in which models write calls of tools: `FORMS` says how each is read, and the grammar that enforces it.

A chat template that has the marks of a form is of a model that writes it. For a template that knows no tools, the model
is told to write Hermes' form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from lce.engine.grammar import guided
from lce_serve.tools import Tools

Found = Iterator[tuple[str, Any]]  # names and arguments; an error of Python where a text goes on otherwise
Schema = dict[str, Any]

TEXT = "/(.|\\n)*/"


class Raw(str):
    """An argument as it is written: text, or JSON if the tool's schema does not say that it is text."""

    __slots__ = ()


@dataclass(frozen=True)
class Form:
    """A form of calls: text between two marks. Without a closing mark, the calls go on to the answer's end.

    `marks` are what a template of the form has; empty if no template asks for it. `rules` gives the rules of a grammar
    for one call, of the tool's name and schema. `before` and `after` stand around the calls and are grammar as well,
    `between` is the text between two calls of one block.
    """

    opened: str
    closed: str
    read: Callable[[str], Found]
    marks: tuple[str, ...] = ()
    rules: Callable[[str, str, Schema], list[str]] = lambda rule, name, schema: []
    before: str = ""
    after: str = ""
    between: str = ""
    notes: tuple[str, ...] = ()  # what is not enforced

    def grammar(self, tools: Tools, schemas: dict[str, Schema], thought: str = "") -> str:
        """Return the grammar of a text in which each call fits its tool's schema, one of `schemas`.

        With `auto` the text is free until a call begins, but does not begin with `thought`, the mark of one. With a
        forced choice it begins with a call.
        """
        calls = {f"call_{i}": tool.name for i, tool in enumerate(tools.callable)}
        one = f"({' | '.join(calls)})"
        several = f"{one} ({json.dumps(self.between)} {one})*" if tools.parallel and self.between else one
        begin = "" if not self.opened else json.dumps(self.opened) if tools.forced else "begin"
        start = f"block{'*' if tools.parallel else '?'} TEXT" if self.closed else "block | TEXT"
        if tools.forced:
            start = 'block ("\\n" block)*' if tools.parallel and self.closed else "block"
        lines = ["%llguidance {}", f"start: {start}", f"block: {begin} {self.before} {several} {self.after}"]
        lines += [f"TEXT: {TEXT}" + (f" & ~/{re.escape(thought)}(.|\\n)*/" if thought else "")]
        lines += [f"begin[lazy]: TEXT {json.dumps(self.opened)}"] if begin == "begin" else []
        lines += [
            f'value[lazy]: {TEXT} "\\n</parameter>\\n"',
            f"closing[lazy]: {TEXT} {json.dumps(self.closed or '}')}",
        ]
        for rule, name in calls.items():
            lines += self.rules(rule, name, schemas[name])
        return "\n".join(lines) + "\n"


def json_rule(schema: Schema) -> str:
    """Return what stands in a grammar for JSON of a schema."""
    return f"%json {json.dumps(guided(schema))}"


def _object(rule: str, name: str, schema: Schema) -> list[str]:
    return [f'{rule}: {json.dumps(_begun(name, "arguments"))} {json_rule(schema)} "}}"']


def _at_start(rule: str, name: str, schema: Schema) -> list[str]:
    """Return rules of an object that no mark announces: a text is free that does not begin as a call of a tool."""
    begun = json.dumps(_begun(name, "parameters"))
    return [f'{rule}: {rule}_begun {json_rule(schema)} "}}"', f"{rule}_begun[lazy]: {begun}"]


def _begun(name: str, key: str) -> str:
    return f'{{"name": {json.dumps(name)}, "{key}": '


def _behind_name(rule: str, name: str, schema: Schema) -> list[str]:
    return [f'{rule}: {json.dumps(name)} ("[CALL_ID]" /[a-zA-Z0-9]{{9}}/)? "[ARGS]" {json_rule(schema)}']


def _name_alone(rule: str, name: str, schema: Schema) -> list[str]:
    return [f"{rule}: {json.dumps(f'call:{name}{{')} closing"]


def _parameters(rule: str, name: str, schema: Schema) -> list[str]:
    """Return rules of Qwen's XML: parameters in the schema's order. Those that may be texts are free."""
    found, parts = list[str](), list[str]()
    shared: Schema = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    given, wanted = schema.get("properties"), schema.get("required")
    for i, (key, inner) in enumerate(given.items() if isinstance(given, dict) else ()):
        kinds = types_of(inner)
        is_json = kinds and "string" not in kinds
        value = f'{json_rule({**inner, **shared})} "\\n</parameter>\\n"' if is_json else "value"
        found.append(f"{rule}_{i}: {json.dumps(f'<parameter={key}>' + chr(10))} {value}")
        parts.append(f"{rule}_{i}{'' if isinstance(wanted, list) and key in wanted else '?'}")
    return [f'{rule}: {json.dumps(f"<function={name}>" + chr(10))} {" ".join(parts)} "</function>"', *found]


def types_of(schema: Any) -> set[str]:
    """Return the types that a schema names, in its choices too; empty if it does not say."""
    if not isinstance(schema, dict):
        return set()
    own, choices = schema.get("type"), [schema.get("anyOf"), schema.get("oneOf")]
    inner = [types_of(each) for some in choices if isinstance(some, list) for each in some]
    return set().union(own if isinstance(own, list) else [own] if isinstance(own, str) else [], *inner)


def read_json(text: str) -> Found:
    """Read JSON objects, one after the other or in a list; between them may stand `;` or a comma."""
    while text := text.strip(" \n\t;,[]"):
        value, end = json.JSONDecoder().raw_decode(text)
        text, inner = text[end:], value.get("function")
        call = inner if isinstance(inner, dict) else value
        yield call["name"], call.get("arguments", call.get("parameters", {}))


def _xml(text: str) -> Found:
    """Read Qwen's `<function=NAME>`, with a `<parameter=NAME>` for each argument."""
    pattern = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
    for name, inside in re.findall(r"<function=([^>\s]+)>(.*?)(?:</function>|$)", text, re.DOTALL):
        yield name, {key: Raw(value) for key, value in pattern.findall(inside)}


def _either(text: str) -> Found:
    return _xml(text) if text.lstrip().startswith("<function=") else read_json(text)


def _mistral(text: str) -> Found:
    """Read a list of objects, or `NAME[CALL_ID]ID[ARGS]{...}`, without some of the marks, separated by another one."""
    for each in text.split("[TOOL_CALLS]"):
        name, brace, given = each.partition("{")
        if name.strip(" \n["):
            yield name.partition("[")[0].strip(), json.loads(brace + given)
        else:
            yield from read_json(each)


def _gemma(text: str) -> Found:
    """Read `call:NAME{key:<escape>text<escape>,other:1}`; `<|"|>` quotes as `<escape>` does."""
    name, _, given = text.strip().removeprefix("call:").partition("{")
    pieces = re.split(r'<escape>|<\|"\|>', "{" + given)
    bare = [re.sub(r"([{,]\s*)([\w-]+)\s*:", r'\1"\2":', piece) for piece in pieces[::2]]
    written = [json.dumps(piece) for piece in pieces[1::2]]
    yield name, json.loads("".join(a + b for a, b in zip(bare, [*written, ""], strict=True)))


_NAMES = ("not enforced: arguments (in this model's form of calls only names are)",)
_END = '"\\n</tool_call>"'
FORMS = (  # of two forms that a template has the marks of, the first is enforced
    Form("<tool_call>", "</tool_call>", _either, ("<tool_call>", "<function="), _parameters, '"\\n"', _END),
    Form("<tool_call>", "</tool_call>", _either, ("<tool_call>",), _object, '"\\n"', _END),
    Form("<function=", "</function>", lambda text: _xml("<function=" + text)),
    Form("[TOOL_CALLS]", "", _mistral, ("[TOOL_CALLS]", "[ARGS]"), _behind_name, between="[TOOL_CALLS]"),
    Form("[TOOL_CALLS]", "", _mistral, ("[TOOL_CALLS]",), _object, '" "? "["', '"]"', ", "),
    Form("<|python_tag|>", "", read_json),
    Form("<start_function_call>", "<end_function_call>", _gemma, ("<start_function_call>",), _name_alone, notes=_NAMES),
    Form("<|tool_call>", "<tool_call|>", _gemma, ("<|tool_call>",), _name_alone, notes=_NAMES),
    Form("", "", read_json, ('{"name": ', '"parameters": '), _at_start, between="; "),
)
HERMES = FORMS[1]


def form_of(template: str | None) -> Form | None:
    """Return the form in which a chat template writes calls; None for a template that writes no tools."""
    if template is None or "tools" not in template:
        return None
    return next((form for form in FORMS if form.marks and all(mark in template for mark in form.marks)), None)


def enforced_form(tokenizer: Any) -> Form:
    """Return the form in which a model is held to write calls."""
    return form_of(tokenizer.tool_template or tokenizer.chat_template) or HERMES
