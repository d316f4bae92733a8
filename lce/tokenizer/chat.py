"""Chat templates: a checkpoint's own Jinja text, which writes a conversation in the format the model was trained on.

A template is not trusted. `template.py` renders it in Jinja's sandbox, in a process of its own with hard limits of
time and memory. Starting the process takes some 50 ms.

If a message has the text of a control token, such as `<|eot_id|>`, this text must not end the turn. So the rendered
text is cut within the control token's text, and the parts are encoded separately: no part has the whole token.

    content     end it with <|eot_id|> now
    parts       ...end it with <     |eot_id|> now...
"""

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate, pairwise
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from typing import Any

from lce.errors import DataError, LceError, ModelError, shown
from lce.sizes import size_text
from lce.tokenizer.thinking import Thinking, thinking_of, with_thoughts

MAX_CHARS = 1 << 20  # A rendered text may have this many characters, plus eight per character of the messages.
MAX_SECONDS = 2  # A rendering may take this much processor time, plus 1 s per 150,000 characters of the messages.
MAX_BYTES = 384 << 20  # The rendering process may take this much memory, plus 96 bytes per character of the messages.
MOST_WAITED = 60  # The most seconds that lce waits for the rendering process, even on a busy machine.

# The rendering process gets only these environment variables: TZ for the time of day, the others for Python to start.
_KEPT_VARIABLES = ("TZ", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
_CUTS = "".join(map(chr, range(0xFDD0, 0xFDF0)))  # noncharacters, which Unicode keeps out of texts, mark the cuts
_REMEDY = "use the template that came with this checkpoint"
_START = "import sys; sys.path += sys.argv[2:]; exec(compile(open(sys.argv[1], 'rb').read(), sys.argv[1], 'exec'))"


@dataclass(frozen=True)
class ChatText:
    """A conversation as rendered by a chat template. The text is encoded in parts, which end at the offsets `cuts`."""

    text: str
    cuts: tuple[int, ...] = ()
    thinking: Thinking | None = None  # how the answer may begin with a thought, if it may

    def parts(self, start: int = 0) -> list[str]:
        """Return the parts of the text from character `start` on."""
        ends = [start, *(cut for cut in self.cuts if cut > start), len(self.text)]
        return [self.text[i:j] for i, j in pairwise(ends)]


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special: Mapping[str, str | bool],
    controls: Iterable[str] = (),
    variables: Mapping[str, Any] | None = None,
    n_before: int = 0,
    *,
    continues: bool = False,
) -> ChatText:
    """Render `messages` with `template`. A token of `controls` in a message is split, to be encoded as plain text.

    With `continues`, the last message is an answer that has begun: the text ends where its content does. Messages that
    the template does not take are joined, except the first `n_before`; see `template.py`.

    `special` has `bos_token`, `eos_token`, `add_generation_prompt`, and overrides `variables`, which have what else the
    template may read, as JSON values. A message may have `tool_calls`, a JSON value; its `content` may then be None.
    Raises DataError for other messages than {"role": str, "content": str} and those that the template refuses, and
    ModelError for a template that is broken or exceeds its limits.
    """
    given = {"tools": None, "documents": None, **(variables or {})}
    conversation = with_thoughts(template, _checked(messages))
    texts: list[str] = []

    def collect(text: str) -> str:
        texts.append(text)
        return text

    _mapped([conversation, given], collect, names=True)
    free = (char for char in _CUTS if not any(char in text for text in (template, *texts)))
    cut, end = next(free, None), next(free, "") if continues else ""
    if cut is None or (continues and not end):
        raise DataError("the messages hold all of U+FDD0 to U+FDEF, which are no characters; expected Unicode text")
    rests = _rests(texts, controls)

    def split(text: str) -> str:
        return (cut if text.startswith(rests) else "") + _split(text, controls, cut)

    written = {**_mapped(given, split), "messages": _mapped(conversation, split), **special}
    if continues:
        written |= {"messages": _begun(written["messages"], end), "add_generation_prompt": False}
    text = _rendered(template, written, sum(map(len, texts)), n_before)
    if continues and end not in text:
        fault = "the chat template does not write the last answer, so it cannot be continued"
        raise DataError(f"{fault}; ask a user's turn")
    parts = (text.rpartition(end)[0] if continues else text).split(cut)
    text, begun = "".join(parts), (conversation[-1]["content"] or "") if continues else ""
    return ChatText(text, tuple(accumulate(map(len, parts[:-1]))), thinking_of(template, text, begun))


def _checked(messages: object) -> list[dict[str, Any]]:
    expected = 'expected a list of {"role": a string, "content": a string or a list of text parts}'
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise DataError(f"the messages are {shown(messages)}; {expected}")
    found = [dict(message) if isinstance(message, Mapping) else {} for message in messages]
    for number, (message, said) in enumerate(zip(messages, found, strict=True)):
        parts = said.get("content")
        if isinstance(parts, list) and all(isinstance(x, dict) and isinstance(x.get("text"), str) for x in parts):
            said["content"] = "\n".join(x["text"] for x in parts)
        fields = dict(said)
        calls = fields.pop("tool_calls", [])
        if calls and fields.get("content") is None:
            fields["content"] = ""
        texts = {name for name, text in fields.items() if isinstance(name, str) and isinstance(text, str)}
        if len(texts) < len(fields) or not {"role", "content"} <= texts or not _is_json(calls):
            raise DataError(f"message {number} is {shown(message)}; {expected}")
    return found


def ends_with_answer(messages: object) -> bool:
    """Return whether the last of some messages is one of the assistant without tool calls, which can be continued."""
    last = messages[-1] if isinstance(messages, Sequence) and messages else None
    return isinstance(last, Mapping) and last.get("role") == "assistant" and not last.get("tool_calls")


def _begun(messages: list[dict[str, Any]], end: str) -> list[dict[str, Any]]:
    last = messages[-1]
    if not ends_with_answer(messages):
        raise DataError("the last message cannot be continued; expected a message of the assistant without tool calls")
    return [*messages[:-1], {**last, "content": (last["content"] or "") + end}]


def _is_json(value: object) -> bool:
    """Return whether a value is made of what JSON has: texts, numbers, truth values, None, lists and objects."""
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(_is_json, value.values()))
    return all(map(_is_json, value)) if isinstance(value, list) else isinstance(value, str | int | float | None)


def _mapped(value: Any, change: Callable[[str], str], *, names: bool = False) -> Any:
    """Return a JSON value with all its texts changed, except names in outer objects, which the template looks up."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_mapped(inner, change, names=names) for inner in value]
    if isinstance(value, dict):
        return {(change(key) if names else key): _mapped(inner, change, names=True) for key, inner in value.items()}
    return value


def _rests(texts: Iterable[str], controls: Iterable[str]) -> tuple[str, ...]:
    """Return the rests of control tokens with whose first characters a text ends: a template may join two texts."""
    names = [name for name in controls if len(name) > 1]
    longest = max(map(len, names), default=0)
    ends = {text[-n:] for text in texts for n in range(1, longest)}
    return tuple({name[i:] for name in names for i in range(1, len(name)) if name[:i] in ends})


def _split(text: str, controls: Iterable[str], cut: str) -> str:
    found = sorted({name for name in controls if len(name) > 1 and name in text}, key=len, reverse=True)
    if not found:
        return text
    split = re.sub("|".join(map(re.escape, found)), lambda match: match[0][0] + cut + match[0][1:], text)
    return _split(split, found, cut)  # again, for control tokens that overlapped a split one


def _rendered(template: str, variables: Mapping[str, Any], length: int, n_before: int) -> str:
    seconds, memory = MAX_SECONDS + length // 150_000, MAX_BYTES + 96 * length
    limits = {"chars": MAX_CHARS + 8 * length, "seconds": seconds, "bytes": memory, "before": n_before}
    raw = _answer(json.dumps({"template": template, "variables": variables, **limits}, ensure_ascii=False))
    try:
        ((kind, text),) = json.loads(raw.decode("utf-8", "surrogatepass")).items()
    except ValueError:  # no answer: a limit ended the process
        most = f"{seconds} s or {size_text(memory)} of memory"
        raise ModelError(f"the chat template failed: it takes more than {most}; {_REMEDY}") from None
    if kind == "text":
        return str(text)
    message = shown(" ".join(str(text).split()), 200)
    if kind == "refused":
        raise DataError(f"the chat template refuses these messages: {message}; change the messages")
    raise ModelError(f"the chat template failed: {message}; {_REMEDY}")


def _answer(request: str) -> bytes:
    """Run `template.py`, which limits its own processor time. Waiting for it may take longer on a busy machine."""
    script = Path(__file__).with_name("template.py")
    if getattr(sys, "frozen", False) or not sys.executable or not script.is_file():
        raise _cannot_start("this program has no Python interpreter of its own")
    origins = [spec.origin for name in ("jinja2", "markupsafe") if (spec := find_spec(name)) and spec.origin]
    folders = dict.fromkeys(str(Path(origin).parent.parent) for origin in origins)
    command = [sys.executable, "-I", "-S", "-c", _START, str(script), *folders]  # imports only Jinja's site packages
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    try:  # in a process group of its own: Ctrl-C interrupts only lce, which then ends the process
        process = Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=kept, process_group=0)
    except OSError as error:
        raise _cannot_start(error.strerror or type(error).__name__) from None
    with process:
        try:
            answer: bytes = process.communicate(request.encode("utf-8", "surrogatepass"), timeout=MOST_WAITED)[0]
        except TimeoutExpired:
            late = f"the chat template was not rendered within {MOST_WAITED} s: the machine is too busy; try again"
            raise LceError(late) from None
        finally:
            process.kill()
            process.wait()
    if process.returncode == 1:
        raise _cannot_start("Python or Jinja does not start there")
    return answer


def _cannot_start(reason: str) -> ModelError:
    remedy = "write the prompt in the model's format yourself, and use generate"
    return ModelError(f"cannot start a process that renders the chat template: {shown(reason)}; {remedy}")
