"""`lce chat`: the conversation at a terminal or through a pipe, and the chat options of `lce generate`."""

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

import lce
from lce.errors import DataError, LceError, UsageError, nearest, shown
from lce.files import named
from lce.progress import notice
from lce.terminal import figures, options
from lce.terminal.output import Output, generation_line, tell
from lce.terminal.reading import decoded, read_chat, read_text

if TYPE_CHECKING:
    from lce.methods.choices import Choice
    from lce.tokenizer.tokenizer import Tokenizer

QUOTES = '"""'
HELP = """\
/file PATH  put a file's text before the next message; /file alone forgets the files
/save PATH  save the conversation; `lce chat --context PATH` goes on with it;
            /save PATH --force replaces a file that is not this conversation's own
/reset      begin again
/help       show these commands
/exit       end; so does Ctrl-D. Ctrl-C stops an answer.
A pasted text is one message. Three quotation marks begin a message of several lines, and end it.
A line that begins with // is a message that begins with /."""

TURNS_SHOWN = 3  # A chat that goes on shows this many of its last turns.


@dataclass
class ChatLoop:
    """A loop that reads messages (lines, pasted texts, lines between `QUOTES`) and commands, and writes answers."""

    conversation: "lce.Conversation"
    output: Output
    answering: dict[str, Any]  # options of `Conversation.stream`
    chooses: bool = False  # whether each message chooses the method, by the length of the conversation
    chosen: "Choice | None" = None  # that of the last message
    files: list[str] = field(default_factory=list)  # the texts of files that go before the next message
    terminal: bool = field(default_factory=lambda: sys.stdin is not None and sys.stdin.isatty())

    def run(self, first: str = "") -> None:
        """Answer the message `first`, if any; then messages and commands until stdin ends or /exit is read."""
        if self.terminal:
            self._note_turns()
            self._note("Type a message, or /help. Ctrl-D ends.")
        with keyboard() if self.terminal else nullcontext():
            entry = _message(first)
            while True:
                try:
                    if entry.startswith("/") and not entry.startswith("//"):
                        self._command(*entry[1:].split(maxsplit=1))
                    elif entry.strip():
                        self._answer(entry.removeprefix("/"))
                    entry = self._read()
                except EOFError:
                    return
                except (KeyboardInterrupt, LceError) as error:
                    if not self.terminal:
                        raise
                    entry = ""
                    self._note(f"error: {error}" if isinstance(error, LceError) else "\nCtrl-D ends the chat.")
                    self._note_files()

    def _read(self) -> str:
        """Read a command, or a message of one or more lines. Raises `EOFError` at the end of stdin."""
        text = self._line("> ").rstrip("\r\n")
        if not text.startswith(QUOTES) or ("\n" in text and not text.endswith(QUOTES)):
            return _message(text) if "\n" in text else text
        text = text.removeprefix(QUOTES)
        while not text.rstrip().endswith(QUOTES):
            try:
                text += "\n" + self._line("... ")
            except EOFError:
                raise DataError(f"stdin ended within a message; end the message with {QUOTES}") from None
        return _message(text.rstrip().removesuffix(QUOTES).strip("\n"))

    def _line(self, mark: str) -> str:
        """Return the next line of stdin, or at a terminal what is typed or pasted behind the prompt `mark`."""
        if self.terminal:
            if not sys.stdout.isatty():
                click.echo(mark, err=True, nl=False)
            return input(mark if sys.stdout.isatty() else "")  # readline must know the prompt mark's width
        raw = b"" if sys.stdin is None else sys.stdin.buffer.readline()
        if not raw:
            raise EOFError
        return decoded(raw, "stdin").rstrip("\r\n")

    def _command(self, name: str = "", argument: str = "") -> None:
        path = os.path.expanduser(argument.strip())
        match name:
            case "file" if not path:
                self.files.clear()
                self._note("no file goes before the next message")
            case "file":
                self.files.append(text := read_text(path))
                self._note(f"{named(path)}: {len(text):,} characters go before the next message")
            case "save" if not path:
                raise UsageError("/save takes a path, such as /save chat.lce")
            case "save":
                path = path.removesuffix(" --force").rstrip()
                self.conversation.save(path, force=argument.endswith(" --force"))
                self._note(f"saved {named(path)}")
            case "reset":
                self.files.clear()
                self.conversation.reset()
                self._note("the conversation begins again")
            case "help":
                self._note(HELP)
            case "exit":
                raise EOFError
            case _:
                hint = nearest(f"/{name}", ["/file", "/save", "/reset", "/help", "/exit"])
                raise UsageError(f"/{name} is no command; {hint}; begin with // to send it as a message")

    def _answer(self, line: str) -> None:
        before, message = len(self.conversation.messages), "\n\n".join([*self.files, line])
        n_read, n_new = 0, 0

        def advance(done: int, total: int) -> None:
            nonlocal n_read, n_new
            n_read, n_new = done, total
            bar(done, total)

        try:
            if self.chooses:
                self._choose(message)
            with self.output.bar("prefill", " tok") as bar:
                stream = self.conversation.stream(message, progress=advance, **self.answering)
                self.output.generation(stream, self.conversation.thinking)
        except KeyboardInterrupt:
            if len(self.conversation.messages) == before:
                state = f"{n_read:,} of its {n_new:,} tokens were read, and need not be read again"
                self._note(f"\nstopped; the message has no answer and is forgotten{f'; {state}' if n_read else ''}")
                self._note_files()
                return
            self._note("stopped; the answer so far is kept")
        else:
            self.output.object(figures.generation_object(stream.result, self.conversation.setup.method))
            self.output.figures(generation_line(stream.result.stats))
        self.files.clear()

    def _choose(self, message: str) -> None:
        """Take the method for the conversation with a new message and its answer, if the last turn's is another."""
        talk, tokenizer = self.conversation, self.conversation.setup.tokenizer
        chat = tokenizer.render_chat([*talk.messages, {"role": "user", "content": message}])
        n_tokens = len(tokenizer.encode_parts(chat)) + self.answering["max_tokens"]
        choice, length = talk.setup.choice(n_tokens), n_tokens
        if choice.rope is not None:  # a factor for some more turns, which need not read all anew
            length += talk.setup.window // 4
            choice = talk.setup.choice(length)
        if self.chosen is None and choice.spelled == "full":
            notice(choice.line(n_tokens, talk.setup.reach))
        elif choice != self.chosen or (choice.rope is not None and talk.setup.beyond(n_tokens)):
            talk.use("auto", length)
        self.chosen = choice

    def _note(self, text: str) -> None:
        if self.terminal or not self.output.quiet:
            tell(text)

    def _note_files(self) -> None:
        if self.files:
            self._note(f"files that go before the next message: {len(self.files)}; /file alone forgets them")

    def _note_turns(self) -> None:
        context, tokenizer = self.conversation.context, self.conversation.setup.tokenizer
        if context is None:
            return
        turns = turns_of(tokenizer, context.token_ids)
        self._note(f"so far: {len(context):,} tokens, turns: {len(turns):,}")
        for question, answer in turns[-TURNS_SHOWN:]:
            for mark, text in (("> ", question), ("  ", answer)):
                self._note(mark + shown(" ".join(text.split()), 70)[1:-1])


def _message(text: str) -> str:
    return f"/{text}" if text.startswith("/") else text


@contextmanager
def keyboard() -> Iterator[None]:
    """Edit lines by readline, if Python has it: a pasted text is one line. Ctrl-C keeps what is typed ahead."""
    import termios

    with suppress(ImportError):
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")
    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin)
    termios.tcsetattr(stdin, termios.TCSANOW, [*before[:3], before[3] | termios.NOFLSH, *before[4:]])
    try:
        yield
    finally:
        termios.tcsetattr(stdin, termios.TCSANOW, before)


def turns_of(tokenizer: "Tokenizer", token_ids: Sequence[int]) -> list[tuple[str, str]]:
    """Return the questions and answers in the tokens of a chat, as far as the chat template marks them."""
    names = {"user": "This was asked.", "assistant": "This was said."}
    messages = [{"role": role, "content": names[role]} for role in ("user", "assistant", "user")]
    parts = re.split("|".join(map(re.escape, names.values())), tokenizer.chat(messages))
    before, said, asked = (part.strip() for part in parts[:3]) if len(parts) == 4 else ("", "", "")
    if not said or not asked:
        return []
    opening = os.path.commonprefix([before[::-1], asked[::-1]])[::-1]  # noqa: RUF071  begins the first question
    found = [turn.partition(said) for turn in tokenizer.decode(token_ids, skip_special=False).split(asked)]
    turns = [(asked.rpartition(opening)[2] if opening else asked, answer) for asked, mark, answer in found if mark]
    return [(question.strip(), answer.strip()) for question, answer in turns]


def chat_sampling(engine: "lce.Engine", given: Mapping[str, Any], output: Output) -> "lce.Sampling":
    """Return and print a conversation's sampling: `Setup.sampling_for` the options `given`."""
    sampling, greedy = lce.Sampling(**engine.setup.sampling_for(given)), vars(lce.Sampling())
    if given.get("temperature") == 0:
        return options.seeded(sampling)
    source = "its makers recommend" if engine.setup.recommended_sampling else "of lce, since its makers recommend none"
    own = {knob: x for knob, x in vars(sampling).items() if x != greedy[knob]}
    used = [f"{knob} {x:g}" for knob, x in own.items() if knob not in ("temperature", "seed", "stop")]
    first = f"temperature {sampling.temperature:g}" if sampling.temperature else "the likeliest token"
    text = f"lce: sampling: {', '.join([first, *used])} ({source})"
    output.figures(f"{text}; --temperature 0 is greedy, without penalties")
    return options.seeded(sampling)


chat_prompt_options = options.packed(
    "prompt",
    read_chat,
    *options.PROMPT,
    options.flag("--chat", "Ask in the model's chat format; the prompt is a user's message.", is_flag=True),
    options.flag("--system TEXT", "The system message of a chat."),
    options.flag("--messages FILE", "Messages of a chat: a JSON list of role and content; - is stdin."),
)
