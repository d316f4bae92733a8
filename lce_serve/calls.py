"""The calls in an answer's text, in the forms in which models write them: `FORMS` is the table.

A mark begins a call anywhere in the text. Without marks, an answer that is a call as a whole is one: JSON, or JSON in a
fence. JSON names a tool and has `arguments` or `parameters`; a list of such objects is several calls.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lce_serve.tools import Call, Tools

Found = list[tuple[str, Any]]  # names and arguments

MOST_UNNAMED = 512  # characters within which an answer that is a call as a whole names its tool


@dataclass(frozen=True)
class Form:
    """A form of calls: text between two marks. Without a closing mark, the calls go on to the answer's end."""

    opened: str
    closed: str
    read: Callable[[str], Found]


def _json(text: str) -> Found:
    """Read JSON objects, one after the other or in a list; between them may stand `;` or a comma."""
    found: list[Any] = []
    while text := text.strip(" \n\t;,"):
        value, end = json.JSONDecoder().raw_decode(text)
        found, text = found + (value if isinstance(value, list) else [value]), text[end:]
    inner = [each.get("function", each) if isinstance(each.get("function"), dict) else each for each in found]
    return [(each["name"], each.get("arguments", each.get("parameters", {}))) for each in inner]


def _xml(text: str) -> Found:
    """Read Qwen's `<function=NAME>`, with a `<parameter=NAME>` for each argument: JSON, or else text."""
    functions = re.findall(r"<function=([^>\s]+)>(.*?)(?:</function>|$)", text, re.DOTALL)
    pattern = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
    return [(name, {key: _value(value) for key, value in pattern.findall(inside)}) for name, inside in functions]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _either(text: str) -> Found:
    return _xml(text) if text.lstrip().startswith("<function=") else _json(text)


def _mistral(text: str) -> Found:
    """Read a list of objects, or `NAME[ARGS]{...}`, which `[TOOL_CALLS]` may separate."""
    if "[ARGS]" not in text:
        return _json(text)
    pairs = [each.partition("[ARGS]") for each in text.split("[TOOL_CALLS]")]
    return [(name.strip().partition("[CALL_ID]")[0], json.loads(given)) for name, _, given in pairs]


def _gemma(text: str) -> Found:
    """Read `call:NAME{key:<escape>text<escape>,other:1}`; `<|"|>` quotes as `<escape>` does."""
    name, _, given = text.strip().removeprefix("call:").partition("{")
    pieces = re.split(r'<escape>|<\|"\|>', "{" + given)
    bare = [re.sub(r"([{,]\s*)([\w-]+)\s*:", r'\1"\2":', piece) for piece in pieces[::2]]
    written = [json.dumps(piece) for piece in pieces[1::2]]
    return [(name, json.loads("".join(a + b for a, b in zip(bare, [*written, ""], strict=True))))]


FORMS = (
    Form("<tool_call>", "</tool_call>", _either),
    Form("<function=", "</function>", lambda text: _xml("<function=" + text)),
    Form("[TOOL_CALLS]", "", _mistral),
    Form("<|python_tag|>", "", _json),
    Form("<start_function_call>", "<end_function_call>", _gemma),
    Form("<|tool_call>", "<tool_call|>", _gemma),
)
_WHOLE = re.compile(r"\s*(?:```(?:json|tool_call)?\s*\n(?P<fenced>.*?)\n?\s*```|(?P<plain>[\[{].*))\s*", re.DOTALL)
_MAY_BE_WHOLE = re.compile(r"\s*(?:$|`{1,2}$|```(?:\w*$|(?:json|tool_call)?\s*(?:$|[\[{]))|[\[{])")


class CallReader:
    """A reader of an answer's text that finds calls. `push` gives the text outside calls, and the complete calls.

    Text that may begin a call is held back. At the end, `finish` gives what is held back.
    """

    def __init__(self, tools: Tools) -> None:
        self._names = {tool.name for tool in tools.callable}
        self._held, self._begun = "", False

    def push(self, text: str) -> tuple[str, list[Call]]:
        """Add text; return the text that is certainly outside calls, and the calls that are complete."""
        self._held += text
        outside, calls = "", list[Call]()
        while True:
            if not self._begun and self._may_be_whole():
                return outside, calls
            form, at = _first(self._held)
            if form is None:
                break
            start = at + len(form.opened)
            end = self._held.find(form.closed, start) if form.closed else -1
            if end < 0:
                break
            found = self._calls(form.read, self._held[start:end])
            after = end + len(form.closed)
            outside += self._held[: at if found else after]
            calls += found
            self._held, self._begun = self._held[after:].lstrip("\n") if found else self._held[after:], True
        kept = at if form is not None else len(self._held) - _overlap(self._held)
        kept -= 0 if form is not None else kept - len(self._held[:kept].rstrip("\n"))
        outside, self._held = outside + self._held[:kept], self._held[kept:]
        self._begun = self._begun or bool(outside.strip())
        return (outside.strip("\n") if calls else outside), calls

    def finish(self, *, cut: bool = False) -> tuple[str, list[Call]]:
        """Return the text and the calls that are still held back. A call that is `cut` off is no text."""
        rest, self._held = self._held, ""
        form, at = _first(rest)
        whole = _WHOLE.fullmatch(rest) if not self._begun else None
        if whole is not None and (found := self._calls(_json, whole["fenced"] or whole["plain"] or "")):
            return "", found
        if form is not None:
            if found := self._calls(form.read, rest[at + len(form.opened) :]):
                return rest[:at].rstrip("\n"), found
            return (rest[:at].rstrip("\n") if cut else rest), []
        return ("" if cut and not self._begun and self._names_a_tool(rest) else rest), []

    def _may_be_whole(self) -> bool:
        """Return whether the text so far may be a call as a whole."""
        if _MAY_BE_WHOLE.match(self._held) is None:
            return False
        return len(self._held) < MOST_UNNAMED or self._names_a_tool(self._held)

    def _names_a_tool(self, text: str) -> bool:
        named = re.search(r'"name"\s*:\s*"([^"]*)"', text[:MOST_UNNAMED])
        return named is not None and named[1] in self._names and _MAY_BE_WHOLE.match(text) is not None

    def _calls(self, read: Callable[[str], Found], text: str) -> list[Call]:
        """Return the calls that a text is; none if one of them is not of a known tool."""
        try:
            found = [(name, json.loads(given) if isinstance(given, str) else given or {}) for name, given in read(text)]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return []
        if not all(isinstance(name, str) and name in self._names and isinstance(given, dict) for name, given in found):
            return []
        written = [(name, json.dumps(given, ensure_ascii=False)) for name, given in found]
        return [Call(name, given, f"call_{secrets.token_hex(12)}") for name, given in written]


def _first(text: str) -> tuple[Form | None, int]:
    """Return the form whose mark comes first in a text, and where."""
    found = [(at, form) for form in FORMS if (at := text.find(form.opened)) >= 0]
    at, form = min(found, key=lambda pair: pair[0], default=(-1, None))
    return form, at


def _overlap(text: str) -> int:
    """Return the length of the longest end of a text with which a mark begins."""
    ends = range(min(len(text), max(len(form.opened) for form in FORMS) - 1), 0, -1)
    return next((n for n in ends if any(form.opened.startswith(text[-n:]) for form in FORMS)), 0)
