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
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_MESSAGE = 400  # The most characters of an error message.


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
        answer = render(request["template"], request["variables"], request["chars"])
        raw = json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except MemoryError:
        raw = b'{"failed": "it takes too much memory"}'
    sys.stdout.buffer.write(raw)


def render(template: str, variables: Mapping[str, Any], chars: int) -> dict[str, str]:
    """Return what `main` answers: a text of at most `chars` characters, or a failure. MemoryError is not caught."""
    pieces, length = [], 0
    try:
        for piece in _sandbox().from_string(template).generate(variables):
            length += len(piece)
            if length > chars:
                return {"failed": f"it makes a text of more than {chars} characters"}
            pieces.append(piece)
    except _RefusedMessages as error:
        return {"refused": str(error)[:MAX_MESSAGE]}
    except MemoryError:
        raise
    except Exception as error:  # any exception inside a template is the template's fault
        kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
        return {"failed": f"{kind}{error}"[:MAX_MESSAGE]}
    return {"text": "".join(pieces)}


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
