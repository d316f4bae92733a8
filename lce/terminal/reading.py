"""Reads the texts of commands: prompts, documents and the messages of a chat, from files and stdin."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from typing import Any

import click

from lce.errors import CapacityError, DataError, UsageError
from lce.files import JsonError, named, open_regular, parse_json, path_of
from lce.sizes import size_text
from lce.system import free_host_memory

BYTES_OF_TEXT = 16  # The most bytes of memory per byte of input: for the input, its characters and token ids.
MAX_MESSAGES_VALUES = 1 << 20


def read_prompt(text: str | None, prompt: str | None, prompt_file: str | None) -> str:
    """Return a command line's prompt. Raises `UsageError` without a prompt, and `DataError` for an unreadable file."""
    if text is not None and prompt is not None:
        raise UsageError("the prompt is given as an argument and with --prompt; give one of them")
    prompt = text if prompt is None else prompt
    if prompt == "-" and prompt_file == "-":
        raise UsageError("--prompt and --prompt-file are both stdin; give one of them")
    if prompt == "":
        raise UsageError("--prompt is empty; expected some text")
    if prompt is None and prompt_file is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise UsageError("no prompt; give --prompt TEXT, --prompt-file FILE, or text on stdin")
        prompt = "-"
    parts = [] if prompt_file is None else [read_text(prompt_file)]
    if prompt is not None:
        parts.append(read_text("-") if prompt == "-" else prompt)
    return "\n".join(parts)


def read_chat(chat: bool, system: str | None, messages: str | None, **prompt: Any) -> str | list[Any]:
    """Return the input of `lce generate`: a prompt, or messages if a chat option is given."""
    if not chat and system is None and messages is None:
        return read_prompt(**prompt)
    if messages == "-" and "-" in prompt.values():
        raise UsageError("--messages and the prompt are both stdin; give one of them")
    said = [] if messages is None else read_messages(messages)
    if messages is None or any(value is not None for value in prompt.values()):
        said.append({"role": "user", "content": read_prompt(**prompt)})
    return said if system is None else [{"role": "system", "content": system}, *said]


def read_text(name: str) -> str:
    """Return a file's text, stdin's for `-`, without its last line break. Raises `DataError` or `CapacityError`."""
    source, data = read_bytes(name)
    if not (text := decoded(data, source).removesuffix("\n").removesuffix("\r")):
        remedy = ": write it to stdin, or give it as an argument or a file" if name == "-" else ""
        raise DataError(f"{source} is empty; expected some text{remedy}")
    return text


def decoded(data: bytes, source: str) -> str:
    """Decode UTF-8 bytes of `source`, and drop a byte order mark. Raises `DataError` for bytes that are not UTF-8."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        fault = f"byte {error.start} is 0x{data[error.start]:02x}"
        raise DataError(f"{source} is not UTF-8 text: {fault}; convert it to UTF-8") from None


def read_messages(name: str) -> list[Any]:
    """Return the messages in a JSON file, or in stdin for "-". Each message is checked later, by the chat template."""
    source, data = read_bytes(name)
    expected = 'expected a list of {"role": a string, "content": a string}'
    try:
        found = parse_json(data.removeprefix("\ufeff".encode()), MAX_MESSAGES_VALUES)
    except JsonError as error:
        raise DataError(f"{source}: {error}; {expected}") from None
    if not isinstance(found, list):
        raise DataError(f"{source} holds a {type(found).__name__}; {expected}")
    return found


def read_bytes(name: str) -> tuple[str, bytes]:
    """Read a file, or stdin for "-". Return its name for error messages, and its bytes. Of several ranks, one reads."""
    command = click.get_current_context(silent=True)
    if command is None or not command.params.get("ranks"):
        return _read_bytes(name)
    from lce.engine.dividing import ranks_of

    ranks = ranks_of("all")
    return ranks.exchange(ranks.together(lambda: ("", b"") if ranks.rank else _read_bytes(name)))[0]


def _read_bytes(name: str) -> tuple[str, bytes]:
    stdin = name == "-"
    source, remedy = ("stdin", "give a file") if stdin else (named(name), "check the path and its permissions")
    if stdin and sys.stdin is None:
        raise DataError("stdin is closed; give a file")
    if not stdin and path_of(name).is_fifo():
        raise DataError(f"{source} is a pipe; expected a file, or - and the text on stdin: command | lce ...")
    data = bytearray()
    try:
        with nullcontext(sys.stdin.buffer) if stdin else open(open_regular(name), "rb") as file:
            _check_length(0 if stdin else os.fstat(file.fileno()).st_size, source)
            while piece := file.read(1 << 20):
                data += piece
                _check_length(len(data), source)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {source}: {getattr(error, 'strerror', None) or error}; {remedy}") from error
    return source, bytes(data)


def _check_length(n_bytes: int, source: str) -> None:
    free = free_host_memory()
    if free is not None and n_bytes * BYTES_OF_TEXT > free:
        fault = f"has {size_text(n_bytes)} of text or more, and {size_text(free)} of memory is free"
        most = f"expected {size_text(free // BYTES_OF_TEXT)} at most; give a shorter text"
        raise CapacityError(f"{source} {fault}; {most}")
