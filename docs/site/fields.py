"""What the API reference makes of fields: an extension of Griffe, named in mkdocs.yml."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from typing import Any

import griffe

COMMENT = re.compile(r"  # (?!noqa|type:|fmt:)(.*)$")


class Fields(griffe.Extension):
    """Gives an attribute without a docstring the comment at the end of its line: `decode_s: float  # after ...`.

    A field that is annotated as a bare `ClassVar` is no parameter of its dataclass. The default of an `option(...)` is
    its first argument. A function that `takes` a record of options has the record's fields as parameters, and a
    docstring with what they mean.
    """

    def on_attribute_instance(self, *, attr: griffe.Attribute, agent: Any, **kwargs: Any) -> None:
        if str(attr.annotation) == "ClassVar":
            attr.labels.discard("instance-attribute")
        if isinstance(attr.value, griffe.ExprCall) and str(attr.value.function) == "option":
            first = attr.value.arguments[0]
            attr.value = "{}" if isinstance(first, griffe.ExprKeyword) else first
        if attr.docstring or attr.lineno is None:
            return
        lines = attr.source.splitlines()
        found = COMMENT.search(lines[-1]) if lines else None
        if found:
            text = found[1][0].upper() + found[1][1:]
            attr.docstring = griffe.Docstring(f"{text}." if text[-1] not in ".;:" else text, parent=attr)

    def on_function_instance(self, *, func: griffe.Function, agent: Any, **kwargs: Any) -> None:
        if not any(str(decorator.value).startswith("takes(") for decorator in func.decorators):
            return
        function = getattr(import_module(func.module.path), func.name)
        func.docstring = griffe.Docstring(inspect.getdoc(function) or "", parent=func)
        func.parameters = griffe.Parameters(
            *(
                griffe.Parameter(
                    each.name,
                    annotation=str(each.annotation),
                    kind=griffe.ParameterKind(each.kind.description),
                    default=None if each.default is each.empty else repr(each.default),
                )
                for each in inspect.signature(function).parameters.values()
            )
        )
