"""Loosens JSON schemas: leaves out what cannot be enforced, one keyword after the other, and names each of them.

{"type": "string", "pattern": "^(?!-)a", "maxLength": 9}    the library knows no look-ahead
{"type": "string", "maxLength": 9}                          and the note `pattern (look-around ... not supported)`
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

Fault = Callable[[dict[str, Any]], str | None]

MOST_S = 4.0  # seconds that a schema may take; after them nothing of the schema is enforced
ANNOTATIONS = {"$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated", "x-guidance"}
_FIRST = ("$defs", "definitions", "type")  # what other keywords stand on
_MAPS = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
_SCHEMAS = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")


def loosened(schema: dict[str, Any], fault: Fault) -> tuple[dict[str, Any], list[str]]:
    """Return a schema without what cannot be enforced, and a note for each keyword that was left out.

    `fault` returns why a schema cannot be enforced, or None.
    """
    work = _Loosening(copy.deepcopy(schema), fault)
    try:
        work.visit(work.root, "")
    except TimeoutError:
        return {}, [f"everything (it takes more than {MOST_S:g} s to find what can be enforced)"]
    return work.root, work.notes


def says_anything(schema: dict[str, Any]) -> bool:
    """Return whether a schema asks for more than an object."""
    return any(name not in ANNOTATIONS and (name, value) != ("type", "object") for name, value in schema.items())


class _Loosening:
    """A schema that is changed in place, so that a `$ref` meets what is left of its target."""

    def __init__(self, root: dict[str, Any], fault: Fault) -> None:
        self.root, self.notes = root, list[str]()
        self._fault, self._until = fault, time.monotonic() + MOST_S

    def visit(self, schema: dict[str, Any], where: str) -> None:
        """Loosen the inner schemas of a schema, then its own keywords: those that are at fault behind the others."""
        if self._why(schema) is None:
            return
        given = {name: schema[name] for name in sorted(schema, key=lambda name: (name not in _FIRST, name == "$ref"))}
        for path, inner in _inner(given):
            self.visit(inner, f"{where}{path}.")
        if self._why(schema) is None:
            return
        schema.clear()
        for name, value in given.items():
            if name in _MAPS and isinstance(value, dict):
                schema[name] = {}
                self._add(schema[name], value, schema, f"{where}{name}.")
            else:
                self._add(schema, {name: value}, schema, where)

    def _add(self, part: dict[str, Any], entries: dict[str, Any], schema: dict[str, Any], where: str) -> None:
        """Add entries to a part of a schema, but those with which the schema cannot be enforced."""
        for name, value in entries.items():
            part[name] = value
            if (why := self._why(schema)) is not None:
                del part[name]
                self.notes.append(f"{where}{name} ({why})")

    def _why(self, schema: dict[str, Any]) -> str | None:
        """Return why a part of the root cannot be enforced. References into the root lead into a copy of the root."""
        if time.monotonic() > self._until:
            raise TimeoutError
        if schema is not self.root and '"$ref"' in json.dumps(schema):
            text = json.dumps({**schema, "$defs": {"root": self.root}})
            schema = json.loads(text.replace('"$ref": "#', '"$ref": "#/$defs/root'))
        return self._fault(schema)


def _inner(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the inner schemas of a schema, each with its path."""
    for name, value in schema.items():
        if name in _MAPS and isinstance(value, dict):
            found = {f"{name}.{key}": inner for key, inner in value.items()}
        elif name in _LISTS and isinstance(value, list):
            found = {f"{name}[{i}]": inner for i, inner in enumerate(value)}
        else:
            found = {name: value} if name in _SCHEMAS else {}
        yield from ((path, inner) for path, inner in found.items() if isinstance(inner, dict))
