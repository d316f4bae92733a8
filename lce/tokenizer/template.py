"""Renders one untrusted Jinja template, in a process of its own that `chat.py` starts.

The process imports Jinja and the standard library, reads a request from stdin, gives itself hard limits of time and
memory, and writes the text or the failure to stdout, both as JSON. Under `python -I -S` it sees no environment, no
working folder and no site packages but the folders that its command names.

Inside, the template runs in Jinja's immutable sandbox, which keeps it away from Python, and without a loader, which
keeps it away from files. Steps (rounds of loops and calls), numbers, and the length of every text that an operator, a
call or a filter returns are bounded: the usual bombs end in an error that says what was too much. The hard limits end
whatever is left, such as a filter of Jinja that takes all memory in one step.

The globals and filters are those that transformers gives its templates: `raise_exception`, `strftime_now`, a `tojson`
that does not escape HTML, `break` and `continue`, and `{% generation %}` blocks, which only mark text.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Iterable, Mapping, Sized
from datetime import datetime
from typing import Any, cast

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import MAX_RANGE, ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_BITS = 4096  # of a whole number
MAX_TEMPLATE = 1 << 20  # characters
MAX_MESSAGE = 400  # characters of an error


def main() -> None:
    """Answer one request: `{"text": ...}`, `{"refused": message}` or `{"failed": message}`."""
    request = json.loads(sys.stdin.buffer.read().decode("utf-8", "surrogatepass"))
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_CPU, request["seconds"])
    if sys.platform != "darwin":  # which refuses this limit
        _limit(resource.RLIMIT_AS, request["bytes"])
    try:
        answer = render(request["template"], request["variables"], request["steps"], request["chars"])
        raw = json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except MemoryError:
        raw = b'{"failed": "it takes too much memory"}'
    sys.stdout.buffer.write(raw)


def _limit(kind: int, most: int) -> None:
    """Limit this process for good."""
    hard = resource.getrlimit(kind)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


def render(template: str, variables: Mapping[str, Any], steps: int, chars: int) -> dict[str, str]:
    """Return the answer of `main`. Raises MemoryError."""
    try:
        return {"text": _Environment(steps, chars).render(template, variables)}
    except _RefusedMessages as error:
        return {"refused": str(error)[:MAX_MESSAGE]}
    except MemoryError:
        raise
    except Exception as error:  # whatever Python raises inside a template is the template's fault
        kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
        return {"failed": f"{kind}{error}"[:MAX_MESSAGE]}


class _RefusedMessages(TemplateError):
    """The error that a template's `raise_exception` raises."""


class _GenerationBlocks(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the model wrote, for training; the text is the same."""

    tags = {"generation"}  # noqa: RUF012  Jinja's own interface

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Bounds(NodeTransformer):
    """A sandbox that checks every loop's items, every joined text, and every filter's arguments and results."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        if node.recursive:
            raise SecurityError("recursive loops are not allowed")
        self.generic_visit(node)
        node.iter = _through("lce_counted", cast(nodes.Expr, node.iter))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return _through("lce_fits", node)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Expr:
        self.generic_visit(node)
        node.args = [_through("lce_bounded", argument) for argument in node.args]
        for keyword in node.kwargs:
            keyword.value = _through("lce_bounded", keyword.value)
        return node if node.node is None else _through("lce_fits", node)  # None: the text of a filter block


def _through(name: str, node: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _PlainNamespace(Namespace):
    """`namespace()` of a template, without names like `__call__` that Jinja itself would look up and trust."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if not isinstance(name, str) or name.startswith("_"):
            raise SecurityError(f"the name {name!r} is not allowed in a namespace")
        super().__setitem__(name, value)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox of one rendering; it counts the steps that are left."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, steps: int, chars: int) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, "jinja2.ext.loopcontrols"]
        )
        self._max_steps = self._steps_left = steps
        self._max_chars = chars
        self.filters |= {"tojson": _to_json, "lce_counted": self._counted}
        self.filters |= {"lce_bounded": self._bounded, "lce_fits": self._fits}
        self.globals |= {"raise_exception": _raise_exception, "namespace": _PlainNamespace}
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        del self.globals["lipsum"]

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        if len(template) > MAX_TEMPLATE:
            raise SecurityError(f"it has {len(template)} characters, expected at most {MAX_TEMPLATE}")
        tree = _Bounds().visit(self.parse(template))
        pieces, length = [], 0
        for piece in self.from_string(tree).generate(variables):
            length += len(piece)
            self._allow_length(length)
            pieces.append(piece)
        return "".join(pieces)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._spend(1)
        for argument in (*args, *kwargs.values()):
            self._bounded(argument)
        return self._fits(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        match operator, left, right:
            case "+", Sized(), Sized():
                self._allow_length(len(left) + len(right))
            case "*", Sized(), int():
                self._allow_length(len(left) * right)
            case "*", int(), Sized():
                self._allow_length(left * len(right))
            case "*", int(), int():
                self._allow_bits(left.bit_length() + right.bit_length())
            case "**", int(), int():
                self._allow_bits(left.bit_length() * right)
        return self._fits(super().call_binop(context, operator, left, right))

    def _counted(self, items: Iterable[Any]) -> Iterable[Any]:
        """Return the items to loop over, counted before the loop. A text is not cut into a list of its characters."""
        items = items if isinstance(items, Sized) else list(items)
        self._spend(len(items))
        return items

    def _bounded(self, value: Any) -> Any:
        """Return the checked arguments of a call or a filter."""
        if isinstance(value, int) and abs(value) > MAX_RANGE:
            raise SecurityError(f"the number {value} is too large here, expected at most {MAX_RANGE}")
        return self._fits(value)

    def _fits(self, value: Any) -> Any:
        """Return the checked result of an operator, a call or a filter."""
        if isinstance(value, Sized):
            self._allow_length(len(value))
        return value

    def _spend(self, steps: int) -> None:
        self._steps_left -= steps
        if self._steps_left < 0:
            raise SecurityError(f"it takes too many steps for these messages, expected at most {self._max_steps}")

    def _allow_length(self, length: int) -> None:
        if length > self._max_chars:
            raise SecurityError(f"it makes a text of {length} characters, expected at most {self._max_chars}")

    def _allow_bits(self, bits: int) -> None:
        if bits > MAX_BITS:
            raise SecurityError(f"it makes a number of {bits} bits, expected at most {MAX_BITS}")


def _raise_exception(message: str) -> None:
    raise _RefusedMessages(str(message))


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:  # fmt: skip
    """Write JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


if __name__ == "__main__":
    main()
