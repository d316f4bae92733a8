"""Reads what a command line names: texts and messages, in files and stdin, and methods, models and context files."""

import os
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import click

import lce
from lce.errors import CapacityError, DataError, UsageError
from lce.files import JsonError, named, open_regular, parse_json, path_of
from lce.sizes import size_text
from lce.system import free_host_memory
from lce.terminal.output import note

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


_DOCUMENTS = {b"%PDF-": "a PDF", b"{\\rtf": "an RTF document", b"PK\3\4": "a ZIP archive or a Word document"}


def decoded(data: bytes, source: str) -> str:
    """Decode UTF-8 bytes of `source`, and drop a byte order mark. Raises `DataError` for other bytes and documents."""
    if (kind := next((kind for begun, kind in _DOCUMENTS.items() if data.startswith(begun)), None)) is not None:
        raise DataError(f"{source} is {kind}, and texts alone are read; save it as plain text in UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        fault = f"byte {error.start} is 0x{data[error.start]:02x}"
        how = "convert it to UTF-8, as `iconv -f WINDOWS-1252 -t UTF-8` does"
        raise DataError(f"{source} is not UTF-8 text: {fault}; {how}") from None


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


@dataclass(frozen=True)
class Opening:
    """What a command line opens: a model or a context file, the method, its knobs, and options of `lce.load`."""

    model: str
    context_file: str | None
    loading: Mapping[str, Any]
    method: str | None = None
    knobs: Mapping[str, str] = field(default_factory=dict)
    prefill_method: str | None = None

    @property
    def is_chosen_later(self) -> bool:
        """Whether a chat chooses the method, when it knows what it reads."""
        automatic = self.method == lce.methods.registry.AUTO and not self.knobs
        return automatic and self.context_file is None and self.prefill_method is None

    def load(
        self, text: str | list[Any] | None = None, more: int = 0, least: int = 0
    ) -> "tuple[lce.Engine, lce.Context | None]":
        """Return an engine, and the context opened from the context file; without a file, an engine and None.

        With a file, the engine has the file's options but for those of the command line, which may not contradict it.
        Without, the method is `full` by default. `auto`, as a method or a factor, is for the tokens of `text`, a prompt
        or messages, and `more`, but at least for `least` tokens; without `text` the method is `full` for now.
        """
        if self.context_file is not None:
            return self._opened(self.context_file)
        is_later = text is None and self.is_chosen_later
        name, length = "full" if is_later or self.method is None else self.method, None
        stretches = self.loading.get("rope") and self.loading.get("rope_factor") in (None, "auto")
        if text is not None and (name == lce.methods.registry.AUTO or stretches):
            length = max(least, n_tokens_of(self.model, text) + more)
        how: Any = {"length": length, **named_methods(name, self.knobs, self.prefill_method), **self.loading}
        return lce.load(self.model, **how), None

    def _opened(self, context_file: str) -> "tuple[lce.Engine, lce.Context]":
        from lce.engine.info import describe
        from lce.methods.wrapped import BETWEEN, PREFILL

        context = describe(context_file)
        if self.method is None and context.method_file is not None:
            where = f"{context.method} of {context.method_file}, which is code and runs only if you name it"
            raise UsageError(f"{named(context_file)} was made with the method {where}; give --method FILE.py")
        own, _, prefill = context.method.partition(BETWEEN)
        name = own if self.method in (None, lce.methods.registry.AUTO) else self.method
        if name is own and self.method is not None:
            note(f"the method of {named(context_file)} is {own}: for another, read its text again by `lce prefill`")
        before = self.prefill_method or prefill or None
        same = {False: name == own, True: before == prefill}  # by whether a knob is the method of prefill's
        knobs = {key: value for key, value in context.knobs.items() if same[key.startswith(PREFILL)]}
        how = {**named_methods(name, {**knobs, **self.knobs}, before), **continued(context, self.loading)}
        engine = lce.load(self.model, **how)
        return engine, engine.open_context(context_file)


def text_of(name: str) -> str | None:
    """Return the text of a file or, for "-", of stdin; None for a folder, a context file and other data."""
    if name == "-" or (os.path.isfile(name) and b"\0" not in read_bytes(name)[1][:4096]):
        return read_text(name)
    return None


def n_tokens_of(model: str, text: str | list[Any]) -> int:
    """Return how many tokens a prompt or a chat's messages have, by the tokenizer of a model; loads no weights."""
    from lce.models.layers import read_config
    from lce.weights.source import source_of

    source = source_of(model, metadata_only=True)
    tokenizer = source.tokenizer(read_config(source).vocab_size)
    return len(tokenizer.encode(text) if isinstance(text, str) else tokenizer.encode_parts(tokenizer.render_chat(text)))


def named_methods(method: str, knobs: Mapping[str, Any], prefill_method: str | None) -> dict[str, Any]:
    """Return the options `method` and `prefill_method` of `lce.load` and `lce.plan`, with the knobs of each.

    The method may be `auto`, without knobs. Knobs of the method of prefill are named `prefill_method.KEY`.
    """
    from lce.methods.wrapped import PREFILL

    own = {key: value for key, value in knobs.items() if not key.startswith(PREFILL)}
    others = {key.removeprefix(PREFILL): value for key, value in knobs.items() if key not in own}
    if others and prefill_method is None:
        raise UsageError(f"-o {PREFILL}{next(iter(others))} is a knob of the method of prefill; give --prefill-method")
    made = None if prefill_method is None else lce.methods.make(prefill_method, others)
    if method != lce.methods.registry.AUTO:
        return {"method": lce.methods.make(method, own), "prefill_method": made}
    if own:
        raise UsageError(f"-o {next(iter(own))} is a knob of one method, and {method} takes one with its own; name it")
    return {"method": method, "prefill_method": made}


def method_name(method: str) -> str:
    """Return the name of a method that a user named by its name or by its Python file. Runs the file, and says so."""
    if not method.endswith(".py"):
        return method
    note(f"{named(method)} runs as your own code: it may do whatever you may")
    return lce.methods.from_file(method).name


def continued(context: "lce.ContextInfo", loading: Mapping[str, Any]) -> dict[str, Any]:
    """Return `loading`, options of `lce.load`, with missing options taken from a context file."""
    own: dict[str, Any] = {"window": context.window, "dtype": context.dtype, "weights": context.weights or "auto"}
    own["kv_dtype"] = context.kv_dtype if context.kv_dtype in ("int8", "int8-device") else "auto"
    if loading.get("rope") in (None, context.rope) and loading.get("rope_factor") is None:
        own |= {"rope": context.rope, "rope_factor": None if context.rope == "none" else context.rope_factor}
    return {**loading, **{name: value for name, value in own.items() if loading.get(name) in (None, "auto")}}


def ends(model: str, context: "lce.ContextInfo", n_tokens: int = 24) -> tuple[str, str]:
    """Return the first and the last `n_tokens` tokens of a context as text, decoded by the model that read them."""
    engine, opened = Opening(model, str(context.path), {}).load()
    ids = opened.token_ids if opened is not None else []
    return engine.tokenizer.decode(ids[:n_tokens]), engine.tokenizer.decode(ids[-n_tokens:])
