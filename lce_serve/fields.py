"""Reads fields of a JSON body. A field of a wrong type is refused with 400; a field that nobody reads is ignored."""

from __future__ import annotations

from typing import Any

from lce_serve.refusals import Refusal, wrong

MOST_TOKENS = 1 << 24  # the largest limit of tokens; a larger one means this one
MOST_ITEMS = 1024  # of a list


class Fields:
    """The fields of a JSON object. A method `text`, `number` and so on returns a field's value, or the default.

    A missing field and null are the same. `where` is the object's own name in messages, such as `messages[0]`.
    """

    def __init__(self, body: object, where: str = "") -> None:
        if not isinstance(body, dict):
            raise wrong(where or "the body", body, "a JSON object")
        self.body, self.where = body, where

    def name(self, field: str) -> str:
        """Return the name of a field for messages."""
        return f"{self.where}.{field}" if self.where else field

    def has(self, field: str) -> bool:
        """Return whether a field is there and not null."""
        return self.body.get(field) is not None

    def value(self, field: str, kinds: type | tuple[type, ...], expected: str) -> Any:
        """Return a field's value, None if it is missing. Refuses a value that is not of these types."""
        found = self.body.get(field)
        if found is None or (isinstance(found, kinds) and not (isinstance(found, bool) and kinds is not bool)):
            return found
        raise wrong(self.name(field), found, expected)

    def needed(self, field: str, kinds: type | tuple[type, ...], expected: str) -> Any:
        """Return a field's value. Refuses a missing value, and one that is not of these types."""
        if not self.has(field):
            raise wrong(self.name(field), None, expected)
        return self.value(field, kinds, expected)

    def text(self, field: str, default: str | None = None) -> str | None:
        """Return a string."""
        found = self.value(field, str, "a string")
        return default if found is None else found

    def flag(self, field: str, default: bool = False) -> bool:
        """Return a truth value."""
        found = self.value(field, bool, "true or false")
        return default if found is None else found

    def number(self, field: str, least: float, most: float, kind: type[float] = float) -> Any:
        """Return a number from `least` to `most`; with the kind `int`, a whole one, such as 3 or 3.0."""
        expected = f"a {'whole ' if kind is int else ''}number from {least} to {most}"
        found = self.value(field, (int, float), expected)
        if found is not None and not (least <= found <= most and found == kind(found)):
            raise wrong(self.name(field), found, expected)
        return None if found is None else kind(found)

    def whole(self, field: str, least: int, most: int) -> int | None:
        """Return a whole number from `least` to `most`."""
        found: int | None = self.number(field, least, most, int)
        return found

    def limit(self, field: str, least: int = 1) -> int | None:
        """Return a limit of tokens. A limit of -1 is none, as a missing one."""
        if self.body.get(field) == -1:
            return None
        found = self.whole(field, least, 2**63)
        return None if found is None else min(found, MOST_TOKENS)

    def items(self, field: str, most: int = MOST_ITEMS) -> list[Any]:
        """Return a list of at most `most` items, empty if the field is missing."""
        found = self.value(field, list, "a list")
        if found is not None and len(found) > most:
            raise Refusal(400, f"{self.name(field)} has {len(found)} items; expected {most} or fewer", self.name(field))
        return found or []

    def ids(self, field: str, most: int = MOST_ITEMS) -> list[int]:
        """Return a list of at most `most` token ids."""
        found = self.items(field, most)
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in found):
            raise Refusal(400, f"{self.name(field)} must be a list of token ids", self.name(field))
        return found

    def object(self, field: str) -> dict[str, Any] | None:
        """Return a JSON object."""
        found: dict[str, Any] | None = self.value(field, dict, "an object")
        return found

    def inner(self, field: str) -> Fields:
        """Return the fields of an inner object, none if it is missing."""
        return Fields(self.object(field) or {}, self.name(field))

    def each(self, field: str, most: int = MOST_ITEMS) -> list[Fields]:
        """Return the fields of each object in a list."""
        return [Fields(item, f"{self.name(field)}[{i}]") for i, item in enumerate(self.items(field, most))]

    def stops(self, field: str) -> list[str]:
        """Return stop strings: one string, or a list of at most 64. Empty strings are left out."""
        found = self.value(field, (str, list), "a string or a list of strings")
        texts = [found] if isinstance(found, str) else self.items(field, 64) if found else []
        for text in texts:
            if not isinstance(text, str) or len(text) > 1024:
                raise wrong(self.name(field), text, "strings of at most 1024 characters")
        return [text for text in texts if text]
