"""`lce chat`: the conversation at a terminal or through a pipe, and the chat options of `lce generate`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

import lce
from lce.errors import LceError, UsageError, nearest
from lce.files import named
from lce.terminal import figures, options
from lce.terminal.output import Output
from lce.terminal.reading import decoded, read_chat, read_text

HELP = """\
/file PATH  put a file's text before the next message
/save PATH  save the conversation; `lce chat --context PATH` goes on with it
/reset      begin again
/help       show these commands
/exit       end; so does Ctrl-D. Ctrl-C stops an answer.
A line that begins with // is a message that begins with /."""
PATHS = {"file": "document.txt", "save": "chat.lce"}  # Example paths, shown if /file or /save has no path.


@dataclass
class ChatLoop:
    """A loop that reads messages and commands from stdin, one per line, and writes answers to stdout.

    The prompt mark, notes, progress and figures go to stderr.
    """

    conversation: lce.Conversation
    output: Output
    answering: dict[str, Any]  # options of `Conversation.stream`
    saved: set[str] = field(default_factory=set)  # the files that /save may replace
    files: list[str] = field(default_factory=list)  # the texts of files that go before the next message
    terminal: bool = field(default_factory=lambda: sys.stdin is not None and sys.stdin.isatty())

    def run(self) -> None:
        """Answer messages and run commands until stdin ends or /exit is read."""
        if self.terminal:
            self._note("Type a message, or /help. Ctrl-D ends.")
        for line in self._lines():
            try:
                if line.startswith("/") and not line.startswith("//"):
                    if not self._command(*line[1:].split(maxsplit=1)):
                        return
                elif line.strip():
                    self._answer(line.removeprefix("/"))
            except LceError as error:
                if not self.terminal:
                    raise
                self._note(f"error: {error}")

    def _lines(self) -> Iterator[str]:
        if not self.terminal:
            for raw in [] if sys.stdin is None else iter(sys.stdin.buffer.readline, b""):
                yield decoded(raw, "stdin").rstrip("\r\n")
            return
        with suppress(ImportError):
            import readline  # noqa: F401  makes `input` edit lines and remember them
        while True:
            try:
                if not sys.stdout.isatty():
                    click.echo("> ", err=True, nl=False)
                line = input("> " if sys.stdout.isatty() else "")  # readline must know the prompt mark's width
            except EOFError:
                return
            except KeyboardInterrupt:
                self._note("\nCtrl-D ends the chat.")
            else:
                yield line

    def _command(self, name: str = "", argument: str = "") -> bool:
        """Run the chat command `/name argument` and return whether the chat goes on."""
        if name in PATHS and not argument:
            raise UsageError(f"/{name} takes a path, such as /{name} {PATHS[name]}")
        path = os.path.expanduser(argument.strip())
        match name:
            case "file":
                self.files.append(text := read_text(path))
                self._note(f"{named(path)}: {len(text):,} characters go before the next message")
            case "save":
                if Path(path).exists() and os.path.realpath(path) not in self.saved:
                    raise UsageError(f"{named(path)} exists; name another file")
                self.conversation.save(path)
                self.saved.add(os.path.realpath(path))
                self._note(f"saved {named(path)}")
            case "reset":
                self.files.clear()
                self.conversation.reset()
                self._note("the conversation begins again")
            case "help":
                self._note(HELP)
            case "exit":
                return False
            case _:
                hint = nearest(f"/{name}", ["/file", "/save", "/reset", "/help", "/exit"])
                raise UsageError(f"/{name} is no command; {hint}; begin with // to send it as a message")
        return True

    def _answer(self, line: str) -> None:
        before = len(self.conversation.messages)
        try:
            with self.output.bar("prefill", " tok") as bar:
                message = "\n\n".join([*self.files, line])
                stream = self.conversation.stream(message, progress=bar, **self.answering)
                self.output.generation(stream)
        except KeyboardInterrupt:
            if len(self.conversation.messages) == before:
                self._note("stopped; the message was not answered and is forgotten")
                return
            self._note("stopped; the answer so far is kept")
        else:
            self.output.object(figures.generation_object(stream.result, self.conversation.engine.method))
            self.output.figures(figures.generation_line(stream.result.stats))
        self.files.clear()

    def _note(self, text: str) -> None:
        if self.terminal or not self.output.quiet:
            click.echo(text, err=True)


chat_prompt_options = options.packed(
    "prompt", read_chat, *options.PROMPT,
    options.flag("--chat", "Ask in the model's chat format; the prompt is a user's message.", is_flag=True),
    options.flag("--system TEXT", "The system message of a chat."),
    options.flag("--messages FILE", "Messages of a chat: a JSON list of role and content; - is stdin."),
)  # fmt: skip
