"""Chat templates: a checkpoint's own Jinja text that writes a conversation in the format the model was trained on.

A template comes with the checkpoint and is not trusted. It is rendered by `template.py` in a process of its own, under
hard limits of time and memory, in Jinja's sandbox; a process takes some 50 ms. What the process writes is read up to a
bound, and is data: a text or a message. Nothing is left behind, whatever ends the rendering.

A message may contain the text of a control token, such as `<|eot_id|>`. It must not end the turn. So the text is cut
inside of it, and the parts are encoded one after the other: no part has the whole token.

    content     end it with <|eot_id|> now
    parts       ...end it with <     |eot_id|> now...
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from lce.errors import DataError, LceError, ModelError, shown
from lce.sizes import size_text

MAX_STEPS = 300_000  # on top of four times the length of the messages: Llama 3.2 loops over their characters
MAX_CHARS = 1 << 20  # on top of eight times the length of the messages
MAX_SECONDS = 2  # of a processor, on top of one for 500,000 characters of messages
MOST_WAITED = 60  # seconds for the process, which gets them only where others keep the processor from it
MAX_BYTES = 384 << 20  # of the process, on top of 96 times the length of the messages
_KEPT_VARIABLES = ("TZ", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")  # the time of day, and what Python may need to start
_CUTS = "".join(map(chr, range(0xFDD0, 0xFDF0)))  # never characters of any text, by the Unicode standard
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
    template: str, messages: Sequence[Mapping[str, str]], *, bos_token: str, eos_token: str,
    add_generation_prompt: bool = True, controls: Iterable[str] = (),
) -> ChatText:  # fmt: skip
    """Render `messages` by `template`, BOS included; the text is cut wherever a message has one of `controls`.

    Raises DataError for messages that are not a list of {"role": str, "content": str} or that the template refuses with
    `raise_exception`, and ModelError for a template that is broken or exceeds its bounds.
    """
    conversation = _checked(messages)
    cut = next((char for char in _CUTS if not any(char in text for text in (template, *_texts(conversation)))), None)
    if cut is None:
        raise DataError("the messages hold all of U+FDD0 to U+FDEF, which are no characters; expected Unicode text")
    length = sum(map(len, _texts(conversation)))
    conversation = [{key: _split(text, controls, cut) for key, text in message.items()} for message in conversation]
    special = {"bos_token": bos_token, "eos_token": eos_token, "add_generation_prompt": add_generation_prompt}
    variables = {"messages": conversation, **special, "tools": None, "documents": None}
    first, *rest = _rendered(template, variables, length).split(cut)
    text = ChatText(first)
    for part in rest:
        text = ChatText(text.text + part, (*text.cuts, len(text.text)))
    return text


def choose_template(value: object) -> str | None:
    """Return the default template of a config's `chat_template`: a string, or a list of names and templates."""
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
    """Return plain copies of the messages: a template must not see objects with methods of their own."""
    expected = 'expected a list of {"role": a string, "content": a string}'
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise DataError(f"the messages are {shown(messages)}; {expected}")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise DataError(f"message {number} is a {type(message).__name__}; {expected}")
        for key in ("role", "content"):
            if key not in message:
                raise DataError(f"message {number} has no {key}; {expected}")
        wrong = [key for key, text in message.items() if not isinstance(key, str) or not isinstance(text, str)]
        if wrong:
            raise DataError(f"{shown(wrong[0])} of message {number} is not a string; {expected}")
    return [{str(key): str(text) for key, text in message.items()} for message in messages]


def _texts(conversation: Iterable[Mapping[str, str]]) -> list[str]:
    return [text for message in conversation for text in message.values()]


def _split(text: str, controls: Iterable[str], cut: str) -> str:
    """Insert `cut` behind the first character of every control token in `text`."""
    found = sorted({name for name in controls if len(name) > 1 and name in text}, key=len, reverse=True)
    if not found:
        return text
    split = re.sub("|".join(map(re.escape, found)), lambda match: match[0][0] + cut + match[0][1:], text)
    return _split(split, found, cut)  # another one may overlap the first


def _rendered(template: str, variables: Mapping[str, Any], length: int) -> str:
    """Run `template.py`; return its answer. `length` is the messages' length."""
    seconds, chars = MAX_SECONDS + length // 500_000, MAX_CHARS + 8 * length
    memory = MAX_BYTES + 96 * length
    request = {
        "template": template, "variables": variables, "steps": MAX_STEPS + 4 * length, "chars": chars,
        "seconds": seconds, "bytes": memory,
    }  # fmt: skip
    raw = _answer(json.dumps(request, ensure_ascii=False), 6 * chars + 4096)  # a character is at most 6 bytes of JSON
    try:
        ((kind, text),) = json.loads(raw.decode("utf-8", "surrogatepass")).items()
    except (ValueError, AttributeError, RecursionError):  # the process was ended while it rendered
        raise ModelError(
            f"the chat template failed: it takes more than {seconds} s or {size_text(memory)} of memory; {_REMEDY}"
        ) from None
    if kind == "text":
        return str(text)
    message = shown(" ".join(str(text).split()), 200)
    if kind == "refused":
        raise DataError(f"the chat template refuses these messages: {message}; change the messages")
    raise ModelError(f"the chat template failed: {message}; {_REMEDY}")


def _answer(request: str, most: int) -> bytes:
    """Return up to `most` bytes that a process with `template.py` writes for `request`.

    The process bounds its own time of a processor. A busy machine may give it little of one, so it is waited for much
    longer than that; a template cannot sleep.
    """
    late = threading.Event()

    def end() -> None:
        late.set()
        process.kill()

    try:
        process = subprocess.Popen(
            _command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
            process_group=0,  # Ctrl-C reaches this process alone, which ends the other
        )  # fmt: skip
    except OSError as error:
        raise ModelError(_cannot_start(error.strerror or type(error).__name__)) from None
    with process:
        timer = threading.Timer(MOST_WAITED, end)
        timer.daemon = True
        try:
            timer.start()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(request.encode("utf-8", "surrogatepass"))
                process.stdin.close()
            except BrokenPipeError:
                pass  # the process has ended; its output says why
            raw = process.stdout.read(most)
            failed = len(raw) < most and process.wait() == 1
        finally:
            process.kill()
            process.wait()
            timer.cancel()
    if late.is_set():
        raise LceError(f"the chat template was not rendered within {MOST_WAITED} s: the machine is too busy; try again")
    if failed:
        raise ModelError(_cannot_start("Python or Jinja does not start there"))
    return raw


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
