"""Reads a conversation of any API into the messages that chat templates take: role, text, thought, calls, results.

A history is not refused for what it holds. Text is read wherever it stands. What a text model cannot read leaves a note
in its place, such as `[image]` or `[file: plan.pdf]`. Only a last turn of the user that has nothing but notes is
refused.
"""

from __future__ import annotations

import base64
import json
from typing import Any

from lce_serve.fields import Fields
from lce_serve.refusals import Refusal

MOST_MESSAGES = 4096
_TEXTS = ("text", "input_text", "output_text", "summary_text", "reasoning_text")
_NAMES = ("refusal", "title", "filename", "file_name", "tool_name", "name", "text", "content")  # what a note may say
_FILES = ("file", "input_file", "document", "search_result")
_ARGUMENTS = ("arguments", "input", "action", "operation", "code")  # the fields that hold what a call is given
CHANGING = ("x-anthropic-billing-header:",)  # begin a first system line that differs in each request and says nothing
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # the fields in which clients send a thought back


class History:
    """The messages of a request, which an API's reader adds one by one. `done` returns them."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._unread: str | None = None  # the field of the last user's turn, if it has nothing but notes

    def say(self, role: str, fields: Fields, field: str = "content", skip: tuple[str, ...] = (), **more: str) -> None:
        """Add a message whose text, or list of parts, is the field `field`. Parts of the kinds `skip` are left out."""
        text, has_text = content_of(fields, field, skip)
        is_new = not self._messages or self._messages[-1]["role"] not in ("user", "tool")
        if role != "user" or has_text or not text:
            self._unread = None if role != "system" else self._unread
        elif is_new:
            self._unread = fields.name(field)
        role = "system" if role == "developer" else role
        begun = self._messages[-1] if self._messages and role == "assistant" else {"role": ""}
        if begun["role"] == role and not begun["content"]:  # the message of the calls before
            begun |= {"content": text, **more}
        else:
            self._messages.append({"role": role, "content": text, **more})

    def think(self, text: str) -> None:
        """Add a thought to the answer that stands last, or to a new one."""
        if text:
            said = self._answer()
            said["reasoning_content"] = "\n".join(filter(None, (said.get("reasoning_content"), text)))

    def note(self, text: str) -> None:
        """Add a note to the answer that stands last, or to a new one."""
        said = self._answer()
        said["content"] = "\n".join(filter(None, (said["content"], text)))

    def call(self, name: str, arguments: object, call_id: str | None) -> None:
        """Add a call to the answer that stands last, or to a new one. JSON text becomes an object."""
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                arguments = {"input": arguments}
        arguments = {} if arguments is None else arguments
        given = arguments if isinstance(arguments, dict) else {"input": arguments}
        made = {"type": "function", "id": call_id or "", "function": {"name": name, "arguments": given}}
        self._answer().setdefault("tool_calls", []).append(made)

    def done(self, field: str) -> list[dict[str, Any]]:
        """Return the messages. Refuses a history without any, and one whose last turn nobody can read.

        A first system line that clients change in each request is dropped, so that what follows it stays cached.
        """
        if not self._messages:
            raise Refusal(400, f"{field} is empty; expected one message or more", field)
        if self._unread:
            line = f"{self._unread} has nothing that this model can read, which reads text only; add a text to it"
            raise Refusal(400, line, self._unread)
        first, *others = self._messages
        if first["role"] == "system" and first["content"].startswith(CHANGING):
            left = first["content"].partition("\n")[2]
            return [*([{**first, "content": left}] if left or not others else []), *others]
        return self._messages

    def _answer(self) -> dict[str, Any]:
        if not self._messages or self._messages[-1]["role"] != "assistant":
            self._unread = None
            self._messages.append({"role": "assistant", "content": ""})
        return self._messages[-1]


def text_of(fields: Fields, field: str = "content") -> str:
    """Return a text: a string, or a list of parts, of which each but texts and files of text leaves a note."""
    return content_of(fields, field)[0]


def content_of(fields: Fields, field: str, skip: tuple[str, ...] = ()) -> tuple[str, bool]:
    """Return the text as `text_of` does, and whether there is more in it than notes."""
    found = fields.value(field, (str, list), "a string or a list of parts")
    if found is None or isinstance(found, str):
        return found or "", bool(found)
    given = [part for part in fields.each(field) if part.body.get("type") not in skip]
    parts = [(_read(part), part) for part in given]
    texts = [note_of(part) if text is None else text for text, part in parts]
    return "\n".join(texts), any(text for text, _ in parts)


def note_of(part: Fields) -> str:
    """Return the note that stands for a part or an item that cannot be read: its kind, and what it says of itself."""
    kind = (part.text("type") or "part")[:64].removeprefix("input_").removesuffix("_url")
    inner = [part.body, *(each for each in part.body.values() if isinstance(each, dict))]
    said = (each.get(name) for name in _NAMES for each in inner)
    name = next((text for text in said if text and isinstance(text, str)), "")
    return f"[{kind}: {name}]" if name else f"[{kind}]"


def _read(part: Fields) -> str | None:
    """Return the text of a part; None for a part that is no text."""
    kind = part.text("type", "text" if part.has("text") else None)
    if kind is None:  # such as what a shell wrote
        return "\n".join(text for text in part.body.values() if isinstance(text, str) and text)
    if kind in _TEXTS:
        return part.text("text") or ""
    if kind not in _FILES:
        return None
    file = part.inner("source") if isinstance(part.body.get("source"), dict) else part
    file = file.inner("file") if file.has("file") else file
    found = text_of(file) if file.has("content") else _decoded(file)
    names = [part.body.get(name) or file.body.get(name) for name in ("title", "filename", "source", "context")]
    return None if found is None else "\n".join([*(name for name in names if isinstance(name, str)), found])


def _decoded(file: Fields) -> str | None:
    """Return the text of a file that is in the request, as text or in base64; None for other files."""
    data = file.text("data") or file.text("file_data") or ""
    if file.text("type") == "text":
        return data
    try:
        text = base64.b64decode(data.partition(";base64,")[2] or data, validate=True).decode()
    except ValueError:
        return None
    return None if "\0" in text or text.startswith("%PDF") or not text else text


def openai_messages(fields: Fields) -> list[dict[str, Any]]:
    """Return the messages of a chat request in the form that chat templates take."""
    fields.needed("messages", list, "a list of messages")
    history = History()
    for message in fields.each("messages", MOST_MESSAGES):
        role = role_of(message)
        more: dict[str, Any] = {name: message.text(name) for name in ("tool_call_id", "name") if message.has(name)}
        history.say(role, message, **more)
        if role != "assistant":
            continue
        history.think(thought_of(message))
        if not message.has("content"):
            for field in ("refusal", "audio"):
                if message.has(field):
                    history.note(note_of(Fields({"type": field, field: message.body[field]})))
        for call in message.each("tool_calls"):
            read_call(history, call.inner("custom") if call.has("custom") else call.inner("function"), call.text("id"))
        if message.has("function_call"):
            read_call(history, message.inner("function_call"), None)
    return history.done("messages")


def role_of(message: Fields, default: str | None = None) -> str:
    """Return the role of a message. The role `function` is the name of `tool` in older clients."""
    role = message.text("role", default)
    if role not in ("system", "developer", "user", "assistant", "tool", "function"):
        expected = "must be one of system, developer, user, assistant, tool"
        raise Refusal(400, f"{message.name('role')} {expected}", message.name("role"))
    return "tool" if role == "function" else role


def thought_of(message: Fields) -> str:
    """Return the thought that a client sends back with an answer, empty if there is none."""
    return next((text for name in _THOUGHTS if (text := message.body.get(name)) and isinstance(text, str)), "")


def read_call(history: History, call: Fields, call_id: str | None) -> None:
    """Add the call that a function, a custom tool's call or an item such as `local_shell_call` stands for."""
    name = call.text("name") or (call.text("type") or "").removesuffix("_call")
    history.call(name, next((call.body[each] for each in _ARGUMENTS if call.has(each)), None), call_id)
