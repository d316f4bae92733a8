"""Conversations: the history is a context, so each turn reads only new tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Unpack

from lce.engine.answer import Generation
from lce.engine.arguments import GenerationOptions, generation_options
from lce.engine.context import Context, Unique
from lce.engine.stream import Stream
from lce.errors import ModelError, UsageError
from lce.methods.base import Method
from lce.sizes import count
from lce.tokenizer.chat import ChatText
from lce.tokenizer.tokenizer import Tokenizer

_SAID = "This is what was said before."  # stands for the tokens of a context whose messages are not known


class Answering(Protocol):
    """The part of an engine that a conversation uses."""

    @property
    def method(self) -> Method: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    def new_context(self, length: int) -> Context: ...

    def stream(self, prompt: list[int], **options: Unpack[GenerationOptions]) -> Stream: ...


@dataclass(frozen=True)
class _Turn:
    """A turn of a conversation: the new messages, the text up to the answer, and the answer as it comes."""

    messages: list[dict[str, str]]
    chat: ChatText
    n_asked: int  # tokens of the context before the answer
    stream: Stream


@dataclass(frozen=True)
class _Past:
    """The messages and the text that a context holds. Replaced in one assignment, so Ctrl-C never leaves half of one.

    `text` is the context's text after the tokens that it began with. Each of `marks` pairs a number of characters of
    `text` with a number of tokens of the context. `turn` is the last turn, until it is among the messages.
    """

    messages: Sequence[dict[str, str]]
    text: str
    marks: Sequence[tuple[int, int]]
    turn: _Turn | None = None


class Conversation(Unique):
    """A chat with a model. The history is a context, so a turn reads only the new messages.

        conversation = engine.conversation(system="Be brief.")
        print(conversation.ask("What is a llama?").text)
        for piece in conversation.stream("And an alpaca?"):
            print(piece.text, end="")

    For every turn the template writes all messages anew. The context is kept as far as the text is the same as before.
    Where the text differs (Qwen3's template leaves out earlier thoughts), the context is truncated there, or at the
    nearest earlier token that the method's state can go back to, and reading continues from that token. `tokens_read`
    says how many tokens the last turn had to read. The white space around an answer stays as the model wrote it.

    With `context` the conversation continues a context, such as a saved chat or a document: the template writes the new
    messages as if they followed an answer.

    One call at a time may use a conversation. A new turn ends an open stream of the last turn; the text so far stays in
    the history.
    """

    instead = "save it, or make another one and give it the messages"

    def __init__(
        self, engine: Answering, system: str | None = None, *, context: Context | None = None, length: int | str = 0
    ) -> None:
        """Begin a conversation. `length` announces how long the context will become in all, for RoPE scaling `dynamic`.

        Raises `ModelError` if the model has no chat template.
        """
        self.engine = engine
        self.context = context  # of all turns so far; None before the first
        self.tokens_read = 0  # by the last turn
        self._length = count(length, "length", least=0)
        self._before = [] if context is None else list(context.token_ids)  # tokens that no message stands for
        if self._before and system is not None:
            raise UsageError("a system message begins a conversation, but this context has begun; leave it out")
        engine.tokenizer.require_chat()
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._past = _Past(self._opening, "", [(0, len(self._before))])

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages so far, with the text so far of an unfinished answer."""
        said, turn = self._past.messages, self._past.turn
        said = said if turn is None or not self._answered(turn) else [*said, *_with_answer(turn)]
        return [dict(message) for message in said]

    def ask(self, message: str | Sequence[Mapping[str, str]], **options: Unpack[GenerationOptions]) -> Generation:
        """Return the answer to a user's message, or to several messages.

        Takes the options of `Engine.generate` except `context`.
        """
        return self.stream(message, **options).finish()

    def stream(self, message: str | Sequence[Mapping[str, str]], **options: Unpack[GenerationOptions]) -> Stream:
        """Answer like `ask`, but stream the text.

        A turn that fails before its answer begins leaves no message behind.
        """
        if options.pop("context", None) is not None:
            raise UsageError("a conversation has a context of its own; give one when the conversation is made")
        generation_options(options)
        self._settle()
        new = _as_messages(message)
        chat = self._render([*self._past.messages, *new])
        ids = self._fit(chat)
        assert self.context is not None
        options["context"] = self.context
        stream = self.engine.stream(ids, **options)
        self.tokens_read = len(ids)
        turn = _Turn([dict(message) for message in new], chat, len(self.context) + len(ids), stream)
        self._past = replace(self._past, turn=turn)
        return stream

    def reset(self) -> None:
        """Forget all messages but the system message, and all tokens but those of the context given at first."""
        self._settle()
        self._past = _Past(self._opening, "", [(0, len(self._before))])
        if not self._before:
            self.context = None

    def save(self, path: str | Path) -> None:
        """Save the context; continue with `conversation(context=engine.open_context(path))`."""
        self._settle()
        if self.context is None or not len(self.context):
            raise UsageError("the conversation is empty; ask something before it is saved")
        self.context.save(path)

    def _answered(self, turn: _Turn) -> bool:
        result = turn.stream.result
        return bool(result.token_ids) or result.finish_reason == "stop"

    def _settle(self) -> None:
        """End the last turn, and record which part of it the context holds. May be repeated."""
        past, turn = self._past, self._past.turn
        if turn is None:
            return
        turn.stream.close()
        assert self.context is not None
        if not self._answered(turn):
            self._past = replace(past, turn=None)  # the context may hold some of the messages; `_fit` finds out
            return
        result, marks = turn.stream.result, [*past.marks, (len(turn.chat.text), turn.n_asked)]
        text = turn.chat.text + result.text
        whole = self.engine.tokenizer.decode(result.token_ids) == result.text  # no stop string was cut off
        if whole and len(self.context) == turn.n_asked + len(result.token_ids):
            marks.append((len(text), len(self.context)))
        self._past = _Past([*past.messages, *_with_answer(turn)], text, marks)

    def _render(self, messages: Sequence[Mapping[str, str]]) -> ChatText:
        """Return the template's text of the messages."""
        tokenizer = self.engine.tokenizer
        if not self._before:
            return tokenizer.render_chat(messages)
        before = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": _SAID}]
        chat = tokenizer.render_chat([*before, *messages])
        at = chat.text.find(_SAID) + len(_SAID)
        if at < len(_SAID):
            raise ModelError(
                "nothing can be asked behind this context, because the chat template leaves out earlier answers; "
                "begin a new conversation"
            )
        return ChatText(chat.text[at:], tuple(cut - at for cut in chat.cuts if cut > at))

    def _fit(self, chat: ChatText) -> list[int]:
        """Truncate the context to where it agrees with `chat`; return the ids to read after that."""
        encode = self.engine.tokenizer.encode_parts
        past = self._past
        n_same, n_held = _common(past.text, chat.text), 0 if self.context is None else len(self.context)
        marks = [mark for mark in past.marks if mark[0] <= n_same and mark[1] <= n_held]
        marks += self._mark_of_answer(chat.text, n_same)
        if marks:
            n_chars, n_tokens = marks[-1]
            ids = encode(chat, n_chars)
        else:  # the context does not even hold what was before
            n_tokens, ids = 0, [*self._before, *encode(chat)]
        self._past = _Past(past.messages, chat.text, marks or [(0, len(self._before))])
        if self.context is None:
            self.context = self.engine.new_context(max(len(ids), self._length))
        wanted = [*self.context.token_ids[:n_tokens], *ids]  # a turn that failed may have been read in part
        return wanted[self._cut(_common(self.context.token_ids, wanted[:-1])) :]

    def _mark_of_answer(self, text: str, n_same: int) -> list[tuple[int, int]]:
        """Return the mark after the last answer, if `text` has that answer with other white space around it."""
        past = self._past
        if self.context is None or len(past.marks) < 3 or past.marks[-1][1] != len(self.context):
            return []
        start, end = past.marks[-2][0], past.marks[-1][0]
        answer = past.text[start:end].strip()
        rest = text[start:].lstrip()
        if not start <= n_same < end or not answer or not rest.startswith(answer):
            return []
        return [(len(text) - len(rest) + len(answer), len(self.context))]

    def _cut(self, n_tokens: int) -> int:
        """Drop the context's tokens behind the first `n_tokens`, or more where the method's state goes back no better.

        Returns how many are left.
        """
        assert self.context is not None
        if n_tokens < len(self.context):
            cache = self.context.cache
            if n_tokens < cache.length:
                n_tokens = cache.nearest(max(0, n_tokens - 1)) + 1  # the last token that is left is read again
            self.context.truncate(n_tokens)
        return n_tokens


def _as_messages(message: str | Sequence[Mapping[str, str]]) -> list[Any]:
    """Return a list of messages; a text is one of the user. The tokenizer checks the rest."""
    if isinstance(message, str):
        return [{"role": "user", "content": message}]
    return list(message) if isinstance(message, Sequence | Mapping) else [message]


def _with_answer(turn: _Turn) -> list[dict[str, str]]:
    return [*turn.messages, {"role": "assistant", "content": turn.stream.result.text}]


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the longest common beginning."""
    n = min(len(one), len(other))
    if one[:n] == other[:n]:
        return n
    return next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
