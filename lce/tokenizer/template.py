"""Renders one untrusted Jinja template, in a process of its own that `chat.py` starts.

The process reads a request from stdin, limits its own time and memory, and writes the text or the failure to stdout,
both as JSON. It sees no environment, no working folder, and only Jinja's site packages (`python -I -S`). Jinja's
immutable sandbox keeps the template away from Python's objects, and without a loader the template can read no files.

Templates have the globals and filters that transformers gives them: `raise_exception`, `strftime_now`, a `tojson` that
does not escape HTML, `break` and `continue`, and `{% generation %}` blocks, which only mark text.
"""

import json
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_MESSAGE = 400  # The most characters of an error message.
Write = Callable[[Mapping[str, Any]], Iterator[str]]  # yields a template's text, given the variables


def main() -> None:
    """Answer one request with `{"text": ...}`, `{"refused": message}` or `{"failed": message}`."""
    request = json.loads(sys.stdin.buffer.read().decode("utf-8", "surrogatepass"))
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CPU: request["seconds"]}
    if sys.platform != "darwin":  # macOS refuses this limit
        limits[resource.RLIMIT_AS] = request["bytes"]
    for kind, most in limits.items():
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    try:
        answer = render(request["template"], request["variables"], request["chars"], request["before"])
        raw = json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except MemoryError:
        raw = b'{"failed": "it takes too much memory"}'
    sys.stdout.buffer.write(raw)


def render(template: str, variables: Mapping[str, Any], chars: int, n_before: int = 0) -> dict[str, str]:
    """Return what `main` answers: a text of at most `chars` characters, or a failure. MemoryError is not caught.

    The messages are rendered as they are. If the template refuses them, or leaves a system message out, they are
    changed step by step (see `_forms`) until it takes them. The first `n_before` messages stay as they are. A template
    that writes no texts, but lists of parts, is given such lists.
    """
    try:
        write, answer = _taking_texts(_sandbox().from_string(template), variables), dict[str, str]()
        for form in _forms(variables.get("messages", []), n_before):
            given = {**variables, "messages": form}
            found = _written(write, given, chars)
            if "text" in found and _has_system(write, given):
                return found
            answer = answer or found
    except Exception as error:
        return _failed(error)
    return answer


def _taking_texts(template: Template, variables: Mapping[str, Any]) -> Write:
    """Return what writes the template, given lists of parts if it writes only these. One user's message shows it."""

    def in_parts(given: Mapping[str, Any]) -> Iterator[str]:
        messages = [{**x, "content": [{"type": "text", "text": x["content"]}]} for x in given["messages"]]
        return template.generate({**given, "messages": messages})

    probe, ways = {**variables, "messages": [{"role": "user", "content": "\ufdefmark"}]}, (template.generate, in_parts)
    return next((way for way in ways if "\ufdefmark" in _written(way, probe, 1 << 20).get("text", "")), ways[0])


def _written(write: Write, variables: Mapping[str, Any], chars: int) -> dict[str, str]:
    pieces, length = [], 0
    try:
        for piece in write(variables):
            length += len(piece)
            if length > chars:
                return {"failed": f"it makes a text of more than {chars} characters"}
            pieces.append(piece)
    except _RefusedMessages as error:
        return {"refused": str(error)[:MAX_MESSAGE]}
    except Exception as error:  # any exception inside a template is the template's fault
        return _failed(error)
    return {"text": "".join(pieces)}


def _failed(error: Exception) -> dict[str, str]:
    if isinstance(error, MemoryError):
        raise error
    kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
    return {"failed": f"{kind}{error}"[:MAX_MESSAGE]}


def _forms(messages: list[dict[str, Any]], n_before: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the messages, then forms of them with the same texts that more and more templates take.

    All system texts in front; then neighbours of one role joined; then the system texts in the first user's message;
    at last an empty message of the user in front of an answer that stands first.
    """
    before, rest = messages[:n_before], messages[n_before:]
    others = [message for message in rest if message["role"] != "system"]
    texts = [message["content"] for message in rest if message["role"] == "system"]
    told = "\n\n".join(texts)
    front = [{"role": "system", "content": told}, *others] if texts else others
    at = next((i for i, message in enumerate(others) if message["role"] == "user"), len(others))
    asked = [{"role": "user", "content": told}, *others[at : at + 1]]
    users = [*others[:at], *_joined(asked), *others[at + 1 :]] if texts else others
    begun = users if users and users[0]["role"] == "user" else [{"role": "user", "content": ""}, *users]
    forms = [rest, *([] if n_before else [front, _joined(front)]), users, _joined(users), _joined(begun)]
    for number, form in enumerate(forms):
        if form not in forms[:number]:
            yield [*before, *form]


def _joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in which neighbours of one role, but for results of calls, are one."""
    found: list[dict[str, Any]] = []
    for message in messages:
        if not found or message["role"] == "tool" or message["role"] != found[-1]["role"]:
            found.append(message)
            continue
        last = found[-1]
        texts: dict[str, Any] = {
            name: "\n\n".join(filter(None, (last.get(name), message.get(name))))
            for name in ("content", "reasoning_content")
            if name in last or name in message
        }
        calls = [*last.get("tool_calls", []), *message.get("tool_calls", [])]
        found[-1] = {**last, **texts, **({"tool_calls": calls} if calls else {})}
    return found


def _has_system(write: Write, variables: Mapping[str, Any]) -> bool:
    """Return whether the template writes each system message. Its texts are replaced, and others are cut short."""
    marks, messages = list[str](), list[dict[str, Any]]()
    for message in variables.get("messages", []):
        text = (message["content"] or "")[:64]
        if message["role"] == "system":
            marks.append(text := f"{len(marks)}\ufdefmark")
        messages.append({**message, "content": text})
    found = _written(write, {**variables, "messages": messages}, 1 << 20).get("text", "") if marks else ""
    return all(mark in found for mark in marks)


class _RefusedMessages(TemplateError):
    """The error that a template's `raise_exception` raises."""


class _GenerationBlocks(Extension):
    """The Jinja block `{% generation %}...{% endgeneration %}`, which marks text for training and changes no text."""

    tags = {"generation"}  # noqa: RUF012  Jinja's own interface

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PlainNamespace(Namespace):
    """A template's `namespace()` that refuses names beginning with `_`: Jinja would trust a value named `__call__`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if not isinstance(name, str) or name.startswith("_"):
            raise SecurityError(f"the name {name!r} is not allowed in a namespace")
        super().__setitem__(name, value)


def _sandbox() -> ImmutableSandboxedEnvironment:
    extensions = [_GenerationBlocks, "jinja2.ext.loopcontrols"]
    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    sandbox.filters["tojson"] = lambda value, ensure_ascii=False, indent=None, separators=None, sort_keys=False: (
        json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    )
    sandbox.globals |= {"raise_exception": _raise_exception, "namespace": _PlainNamespace}
    sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    del sandbox.globals["lipsum"]
    return sandbox


def _raise_exception(message: str) -> None:
    raise _RefusedMessages(str(message))


if __name__ == "__main__":
    main()
