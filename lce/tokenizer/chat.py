"""Chat templates: a checkpoint's own Jinja text that writes a conversation in the format the model was trained on.

A template is not trusted. `template.py` renders it in Jinja's sandbox, in a process of its own under hard limits of
time and memory; starting the process takes some 50 ms.

The text of a control token in a message, such as `<|eot_id|>`, must not end the turn. So the text is cut inside the
token's text, and the parts are encoded one after the other: no part has the whole token.

    content     end it with <|eot_id|> now
    parts       ...end it with <     |eot_id|> now...
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate, pairwise
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from typing import Any

from lce.errors import DataError, LceError, ModelError, shown
from lce.sizes import size_text

MAX_CHARS = 1 << 20  # characters of the rendered text, besides eight for each character of the messages
MAX_SECONDS = 2  # processor seconds, besides one for each 500,000 characters of the messages
MAX_BYTES = 384 << 20  # memory of the process, besides 96 bytes for each character of the messages
MOST_WAITED = 60  # seconds, after which a process that got no processor is given up
_KEPT_VARIABLES = (
    "TZ",
    "LD_LIBRARY_PATH",
    "DYLD_LIBRARY_PATH",
)  # of the environment: for the time of day, and for Python to start
_CUTS = "".join(map(chr, range(0xFDD0, 0xFDF0)))  # characters that the Unicode standard keeps out of texts
_REMEDY = "use the template that came with this checkpoint"
_START = "import sys; sys.path += sys.argv[2:]; exec(compile(open(sys.argv[1], 'rb').read(), sys.argv[1], 'exec'))"


@dataclass(frozen=True)
class ChatText:
    """A conversation as a template writes it. At each of `cuts`, encoding begins anew."""

    text: str
    cuts: tuple[int, ...] = ()

    def parts(self, start: int = 0) -> list[str]:
        """Return the text from character `start` on, cut."""
        ends = [start, *(cut for cut in self.cuts if cut > start), len(self.text)]
        return [self.text[i:j] for i, j in pairwise(ends)]


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, str]],
    special: Mapping[str, str | bool],
    controls: Iterable[str] = (),
) -> ChatText:
    """Render `messages` by `template`, BOS included; the text is cut wherever a message has one of `controls`.

    `special` has `bos_token`, `eos_token`, `add_generation_prompt`. Raises DataError for messages that are not a list
    of {"role": str, "content": str} or that the template refuses with `raise_exception`, and ModelError for a template
    that is broken or exceeds its bounds.
    """
    conversation = _checked(messages)
    texts = [text for message in conversation for text in message.values()]
    cut = next((char for char in _CUTS if not any(char in text for text in (template, *texts))), None)
    if cut is None:
        raise DataError("the messages hold all of U+FDD0 to U+FDEF, which are no characters; expected Unicode text")
    conversation = [{key: _split(text, controls, cut) for key, text in message.items()} for message in conversation]
    given = {"messages": conversation, **special, "tools": None, "documents": None}
    parts = _rendered(template, given, sum(map(len, texts))).split(cut)
    return ChatText("".join(parts), tuple(accumulate(map(len, parts[:-1]))))


def _checked(messages: object) -> list[dict[str, str]]:
    """Return plain copies of the messages. Raises DataError if they are no messages."""
    expected = 'expected a list of {"role": a string, "content": a string}'
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise DataError(f"the messages are {shown(messages)}; {expected}")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise DataError(f"message {number} is a {type(message).__name__}; {expected}")
        if missing := [key for key in ("role", "content") if key not in message]:
            raise DataError(f"message {number} has no {missing[0]}; {expected}")
        wrong = [key for key, text in message.items() if not isinstance(key, str) or not isinstance(text, str)]
        if wrong:
            raise DataError(f"{shown(wrong[0])} of message {number} is not a string; {expected}")
    return [{str(key): str(text) for key, text in message.items()} for message in messages]


def _split(text: str, controls: Iterable[str], cut: str) -> str:
    """Insert `cut` behind the first character of every control token in `text`."""
    found = sorted({name for name in controls if len(name) > 1 and name in text}, key=len, reverse=True)
    if not found:
        return text
    split = re.sub("|".join(map(re.escape, found)), lambda match: match[0][0] + cut + match[0][1:], text)
    return _split(split, found, cut)  # another token may overlap the first


def _rendered(template: str, variables: Mapping[str, Any], length: int) -> str:
    """Return the text of a template. `length` counts the characters of the messages."""
    seconds, memory = MAX_SECONDS + length // 500_000, MAX_BYTES + 96 * length
    limits = {"chars": MAX_CHARS + 8 * length, "seconds": seconds, "bytes": memory}
    raw = _answer(json.dumps({"template": template, "variables": variables, **limits}, ensure_ascii=False))
    try:
        ((kind, text),) = json.loads(raw.decode("utf-8", "surrogatepass")).items()
    except ValueError:  # the process was ended while it rendered
        raise ModelError(
            f"the chat template failed: it takes more than {seconds} s or {size_text(memory)} of memory; {_REMEDY}"
        ) from None
    if kind == "text":
        return str(text)
    message = shown(" ".join(str(text).split()), 200)
    if kind == "refused":
        raise DataError(f"the chat template refuses these messages: {message}; change the messages")
    raise ModelError(f"the chat template failed: {message}; {_REMEDY}")


def _answer(request: str) -> bytes:
    """Run `template.py`; return what it writes for a request.

    The process bounds its own time of a processor. On a busy machine it gets little of one, so the wait is much longer.
    """
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    try:  # in a group of its own: Ctrl-C reaches this process alone, which ends the other
        process = Popen(_command(), stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=kept, process_group=0)
    except OSError as error:
        raise ModelError(_cannot_start(error.strerror or type(error).__name__)) from None
    with process:
        try:
            raw = request.encode("utf-8", "surrogatepass")
            answer: bytes = process.communicate(raw, timeout=MOST_WAITED)[0]
        except TimeoutExpired:
            late = f"the chat template was not rendered within {MOST_WAITED} s: the machine is too busy; try again"
            raise LceError(late) from None
        finally:
            process.kill()
            process.wait()
    if process.returncode == 1:
        raise ModelError(_cannot_start("Python or Jinja does not start there"))
    return answer


def _command() -> list[str]:
    """Return how to start `template.py`: without environment, working folder and site packages, but with Jinja."""
    script = Path(__file__).with_name("template.py")
    if getattr(sys, "frozen", False) or not sys.executable or not script.is_file():
        raise ModelError(_cannot_start("this program has no Python interpreter of its own"))
    origins = [spec.origin for name in ("jinja2", "markupsafe") if (spec := find_spec(name)) and spec.origin]
    folders = dict.fromkeys(str(Path(origin).parent.parent) for origin in origins)
    return [sys.executable, "-I", "-S", "-c", _START, str(script), *folders]


def _cannot_start(reason: str) -> str:
    return (
        f"cannot start a process that renders the chat template: {shown(reason)}; "
        "write the prompt in the model's format yourself, and use generate"
    )
