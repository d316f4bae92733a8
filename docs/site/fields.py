"""What the API reference makes of fields: an extension of Griffe, named in mkdocs.yml."""

from __future__ import annotations

import re
from typing import Any

import griffe

COMMENT = re.compile(r"  # (?!noqa|type:|fmt:)(.*)$")


class Fields(griffe.Extension):
    """Gives an attribute without a docstring the comment at the end of its line: `decode_s: float  # after ...`.

    And a field that is annotated as a bare `ClassVar` is no parameter of its dataclass.
    """

    def on_attribute_instance(self, *, attr: griffe.Attribute, agent: Any, **kwargs: Any) -> None:
        if str(attr.annotation) == "ClassVar":
            attr.labels.discard("instance-attribute")
        if attr.docstring or attr.lineno is None:
            return
        lines = attr.source.splitlines()
        found = COMMENT.search(lines[-1]) if lines else None
        if found:
            text = found[1][0].upper() + found[1][1:]
            attr.docstring = griffe.Docstring(f"{text}." if text[-1] not in ".;:" else text, parent=attr)
