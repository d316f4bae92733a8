"""The calls in an answer's text, in any of the forms in which models write them; see `lce_serve.forms`.

A mark begins a call anywhere in the text. Without marks, an answer that is a call as a whole is one: JSON, or JSON in a
fence. JSON names a tool and has `arguments` or `parameters`; a list of such objects is several calls.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from typing import Any

from lce_serve.forms import FORMS, Form, Found, Raw, read_json, types_of
from lce_serve.tools import Call, Tools

MOST_UNNAMED = 512  # characters within which an answer that is a call as a whole names its tool
MISTRALS_ID = 9  # characters of a call's id, all letters and digits: Mistral's templates take no others
_WHOLE = re.compile(r"\s*(?:```(?:json|tool_call)?\s*\n(?P<fenced>.*?)\n?\s*```|(?P<plain>[\[{].*))\s*", re.DOTALL)
_MAY_BE_WHOLE = re.compile(r"\s*(?:$|`{1,2}$|```(?:\w*$|(?:json|tool_call)?\s*(?:$|[\[{]))|[\[{])")


class CallReader:
    """A reader of an answer's text that finds calls. `push` gives the text outside calls, and the complete calls.

    Text that may begin a call is held back. At the end, `finish` gives what is held back.
    """

    def __init__(self, tools: Tools) -> None:
        self._schemas = {tool.name: tool.schema for tool in tools.callable}
        self._held, self._begun, self._behind_call = "", False, False

    def push(self, text: str) -> tuple[str, list[Call]]:
        """Add text; return the text that is certainly outside calls, and the calls that are complete."""
        self._held += text.lstrip("\n") if self._behind_call else text
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
        self._behind_call = (bool(calls) or self._behind_call) and not self._held and not outside
        return (outside.strip("\n") if calls else outside), calls

    def finish(self, *, cut: bool = False) -> tuple[str, list[Call]]:
        """Return the text and the calls that are still held back. A call that is `cut` off is no text."""
        rest, self._held = self._held, ""
        form, at = _first(rest)
        whole = _WHOLE.fullmatch(rest) if not self._begun else None
        if whole is not None and (found := self._calls(read_json, whole["fenced"] or whole["plain"] or "", cut)):
            return "", found
        if form is not None:
            inside = rest[at + len(form.opened) :]
            if cut and "<function=" in rest[at:]:  # its reader takes what has no end
                inside = "".join(inside.rpartition("</function>")[:2])
            if found := self._calls(form.read, inside, cut):
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
        return named is not None and named[1] in self._schemas and _MAY_BE_WHOLE.match(text) is not None

    def _calls(self, read: Callable[[str], Found], text: str, cut: bool = False) -> list[Call]:
        """Return the calls that a text is; none if one of them is not of a known tool. The last may be `cut` off."""
        found = list[Call]()
        try:
            for name, given in read(text):
                given = json.loads(given) if isinstance(given, str) else given or {}
                if not isinstance(given, dict):
                    return []
                written = json.dumps(_typed(given, self._schemas[name]), ensure_ascii=False)
                found.append(Call(name, written, secrets.token_hex(5)[:MISTRALS_ID]))
        except KeyError:  # such as an unknown name
            return []
        except (ValueError, TypeError, AttributeError, RecursionError):
            return found if cut else []
        return found


def _typed(given: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of which those that are written as they are become JSON, unless the schema says `string`."""
    properties = schema.get("properties")
    known = properties if isinstance(properties, dict) else {}
    return {key: _value(x, types_of(known.get(key))) if isinstance(x, Raw) else x for key, x in given.items()}


def _value(text: str, kinds: set[str]) -> Any:
    if "string" in kinds and (text != "null" or "null" not in kinds):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _first(text: str) -> tuple[Form | None, int]:
    """Return the form whose mark comes first in a text, and where."""
    found = [(at, form) for form in FORMS if form.opened and (at := text.find(form.opened)) >= 0]
    at, form = min(found, key=lambda pair: pair[0], default=(-1, None))
    return form, at


def _overlap(text: str) -> int:
    """Return the length of the longest end of a text with which a mark begins."""
    ends = range(min(len(text), max(len(form.opened) for form in FORMS) - 1), 0, -1)
    return next((n for n in ends if any(form.opened.startswith(text[-n:]) for form in FORMS)), 0)
