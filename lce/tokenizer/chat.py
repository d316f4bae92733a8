"""Chat templates: a checkpoint's own Jinja text that writes a conversation in the format the model was trained on.

A template comes with the checkpoint and is not trusted. It runs in Jinja's immutable sandbox, which keeps it away from
Python, and without a loader, which keeps it away from files. Steps (rounds of loops and calls), numbers, and the length
of every joined text are bounded, so that the usual bombs, nested loops, recursion, `'a' * 10**9`, doubling, end in an
error within seconds. What is not bounded is memory inside one filter or method of Jinja itself.

The globals and filters are those that transformers gives its templates: `raise_exception`, `strftime_now`, a `tojson`
that does not escape HTML, `break` and `continue`, and `{% generation %}` blocks, which only mark text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence, Sized
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

from lce.errors import DataError, ModelError

MAX_STEPS = 300_000  # on top of four times the length of the messages: Llama 3.2 loops over their characters
MAX_CHARS = 1 << 20  # on top of eight times the length of the messages
MAX_BITS = 4096  # of a whole number


def render_chat(
    template: str, messages: Sequence[Mapping[str, str]], *, bos_token: str, eos_token: str,
    add_generation_prompt: bool = True,
) -> str:  # fmt: skip
    """The text of `messages` as `template` writes it, BOS included.

    Raises DataError for messages that are not a list of {"role": str, "content": str} or that the template refuses with
    `raise_exception`, and ModelError for a template that is broken or exceeds its bounds.
    """
    conversation = _checked(messages)
    length = sum(len(text) for message in conversation for text in message.values())
    environment = _Environment(MAX_STEPS + 4 * length, MAX_CHARS + 8 * length)
    special = {"bos_token": bos_token, "eos_token": eos_token, "add_generation_prompt": add_generation_prompt}
    try:
        return environment.render(template, {"messages": conversation, **special, "tools": None, "documents": None})
    except _RefusedMessages as error:
        raise DataError(f"the chat template refuses these messages: {_one_line(error)}; change the messages") from error
    except Exception as error:  # whatever Python raises inside a template is the template's fault
        kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
        raise ModelError(
            f"the chat template failed: {kind}{_one_line(error)}; use the template that came with this checkpoint"
        ) from error


def choose_template(value: object) -> str | None:
    """The default template of a config's `chat_template`: a string, or a list of {"name": ..., "template": ...}."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        chosen = {entry.get("name"): entry.get("template") for entry in value}.get("default")
        if chosen is None or isinstance(chosen, str):
            return chosen
    raise ModelError(
        f"the chat_template is a {type(value).__name__} that cannot be read; expected a string, or a list of "
        '{"name": a string, "template": a string}; use the tokenizer files that came with this checkpoint'
    )


def _checked(messages: object) -> list[dict[str, str]]:
    """Plain copies of the messages: a template must not see objects with methods of their own."""
    expected = 'expected a list of {"role": a string, "content": a string}'
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise DataError(f"the messages are {repr(messages)[:80]}; {expected}")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise DataError(f"message {number} is a {type(message).__name__}; {expected}")
        for key in ("role", "content"):
            if key not in message:
                raise DataError(f"message {number} has no {key}; {expected}")
        wrong = [key for key, text in message.items() if not isinstance(key, str) or not isinstance(text, str)]
        if wrong:
            raise DataError(f"{wrong[0]!r} of message {number} is not a string; {expected}")
    return [{str(key): str(text) for key, text in message.items()} for message in messages]


class _RefusedMessages(TemplateError):
    """What `raise_exception` of a template raises."""


class _GenerationBlocks(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the model wrote, for training; the text is the same."""

    tags = {"generation"}  # noqa: RUF012  Jinja's own interface

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Bounds(NodeTransformer):
    """Checks every loop's items, every joined text and every argument of a filter against the environment's bounds."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        if node.recursive:
            raise SecurityError("recursive loops are not allowed")
        self.generic_visit(node)
        node.iter = _through("lce_counted", cast(nodes.Expr, node.iter))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return _through("lce_bounded", node)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Filter:
        self.generic_visit(node)
        node.args = [_through("lce_bounded", argument) for argument in node.args]
        for keyword in node.kwargs:
            keyword.value = _through("lce_bounded", keyword.value)
        return node


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

    intercepted_binops = frozenset({"*", "**", "+"})

    def __init__(self, steps: int, chars: int) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, "jinja2.ext.loopcontrols"]
        )
        self._steps_left = steps
        self._max_chars = chars
        self.filters |= {"tojson": _to_json, "lce_counted": self._counted, "lce_bounded": self._bounded}
        self.globals |= {"raise_exception": _raise_exception, "namespace": _PlainNamespace}
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        del self.globals["lipsum"]

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        if len(template) > MAX_CHARS:
            raise SecurityError(f"it has {len(template)} characters, expected at most {MAX_CHARS}")
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
        return super().call(context, obj, *args, **kwargs)

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
        return super().call_binop(context, operator, left, right)

    def _counted(self, items: Iterable[Any]) -> list[Any]:
        items = list(items)
        self._spend(len(items))
        return items

    def _bounded(self, value: Any) -> Any:
        if isinstance(value, int) and abs(value) > MAX_RANGE:
            raise SecurityError(f"the number {value} is too large here, expected at most {MAX_RANGE}")
        if isinstance(value, Sized):
            self._allow_length(len(value))
        return value

    def _spend(self, steps: int) -> None:
        self._steps_left -= steps
        if self._steps_left < 0:
            raise SecurityError(f"it takes too many steps for these messages, expected about {MAX_STEPS} at most")

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
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
