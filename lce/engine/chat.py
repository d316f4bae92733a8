"""Conversations with a model. A context holds the history, so each turn prefills only new tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from lce.engine.answer import GenerationOptions
from lce.engine.context import Context, Unique, new_context
from lce.engine.running import Rest, checked_options, prompt_ids, stream
from lce.engine.setup import Setup
from lce.engine.stream import CancelFlag, Generation, Stream
from lce.errors import ModelError, UsageError
from lce.methods.base import Method
from lce.sizes import count
from lce.tokenizer.chat import ChatText, ends_with_answer
from lce.tokenizer.thinking import Thinking


@dataclass(frozen=True)
class _Turn:
    """A turn of a conversation: the new messages `asked`, and the answer's `stream`.

    `chat` is the template's text of all messages before the answer, held by the context's first `n_asked` tokens.
    """

    asked: list[dict[str, str]]
    chat: ChatText
    n_asked: int
    stream: Stream

    @property
    def messages(self) -> list[dict[str, str]]:
        """The new messages and the answer so far; empty before the answer begins."""
        result = self.stream.result
        if not result.token_ids and result.finish_reason != "stop":
            return []
        if ends_with_answer(self.asked):
            *asked, last = self.asked
            return [*asked, {**last, "content": last["content"] + result.text}]
        return [*self.asked, {"role": "assistant", "content": result.text}]


@dataclass(frozen=True)
class _Past:
    """The history of a conversation. It is replaced as a whole, so that Ctrl-C cannot leave it half changed.

    `text` is the chat template's text of `messages`. Each of `marks` has the number of characters in a prefix of `text`
    and the number of context tokens that hold the prefix. The context's first `n_tokens` tokens hold `messages`; None
    if a failed turn had `messages` prefilled in another form. Blocks of a failed turn may follow these tokens. `turn`
    is the last turn; None once it is in `messages`.
    """

    messages: Sequence[dict[str, str]]
    text: str
    marks: Sequence[tuple[int, int]]
    n_tokens: int | None
    turn: _Turn | None = None


class Conversation(Unique):
    """A chat with a model. The history is a context, so a turn prefills only the new messages.

        conversation = engine.conversation(system="Be brief.")
        print(conversation.ask("What is a llama?").text)
        for piece in conversation.stream("And an alpaca?"):
            print(piece.text, end="")

    For every turn the chat template formats all messages again. If the new text does not continue the old text (Qwen3's
    template leaves out earlier thoughts), the context is truncated to the common prefix of the two texts, or to the
    nearest earlier token to which the method's state can go back, and the rest is prefilled. `tokens_read` says how
    many tokens the last turn prefilled. The white space around an answer stays as the model wrote it.

    With `context` the conversation continues a context, such as a saved chat or a document: the chat template formats
    the new messages as if they followed an answer.

    A turn that is interrupted while it is prefilled leaves no message, but its complete blocks stay in the context: a
    turn that begins with the same text prefills only what is missing.

    One call at a time may use a conversation. A new turn ends the last turn's stream, if open; its text so far stays.
    """

    _instead = "save it, or make another one and give it the messages"

    def __init__(
        self,
        setup: Setup,
        system: str | None = None,
        *,
        context: Context | None = None,
        length: int | str = 0,
        rest: Rest = "blocks",
    ) -> None:
        """Begin a conversation: see `Engine.conversation`. `rest` says what a turn that fails leaves in the context."""
        self.setup = setup
        self.context = context  # None before the first turn
        self.tokens_read = 0
        self._rest = rest
        self._length = count(length, "length", least=0)
        self._before = [] if context is None else list(context.token_ids)  # the tokens of the given context
        if self._before and system is not None:
            raise UsageError("a system message begins a conversation, but this context has begun; leave it out")
        setup.tokenizer.require_chat()
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._past = self._begun()

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages so far. The last one may be an unfinished answer with its text so far."""
        turn = self._past.turn
        return [dict(message) for message in (*self._past.messages, *(turn.messages if turn else ()))]

    @property
    def thinking(self) -> Thinking | None:
        """How the last turn's answer may begin with a thought; None if it has none."""
        return self._past.turn.chat.thinking if self._past.turn else None

    def ask(self, message: str | Sequence[Mapping[str, Any]], **options: Unpack[GenerationOptions]) -> Generation:
        """Generate the answer to one or more messages. Takes the options of `Engine.generate` except `context`.

        If the last message is the assistant's, it is continued: the result has what comes behind it. Knobs of sampling
        that are left out are as the model's makers recommend: see `Setup.sampling_for`.
        """
        return self.stream(message, **options).finish()

    def stream(self, message: str | Sequence[Mapping[str, Any]], **options: Unpack[GenerationOptions]) -> Stream:
        """Answer like `ask`, but stream the text. A turn that fails before its answer begins leaves no message."""
        together = self.setup.together
        if together(lambda: options.pop("context", None), lambda given: {"context": given is not None}) is not None:
            raise UsageError("a conversation has a context of its own; give one when the conversation is made")
        given = self.setup.sampling_for(options)
        checked = checked_options(self.setup, given)
        self._settle()
        new: list[Any] = [{"role": "user", "content": message}]
        if not isinstance(message, str):  # `render_chat` checks the messages
            new = list(message) if isinstance(message, Sequence) else [message]
        said, begun = [*self._past.messages, *new], ends_with_answer(new)
        render = partial(self.setup.tokenizer.render_chat, said, following=bool(self._before))
        chat = together(partial(render, continue_final_message=begun))
        if chat.thinking is not None:
            checked = checked_options(self.setup, given, chat)
        context, ids = self._fit(chat, checked.max_tokens)
        prompt_ids(self.setup, ids, context)
        found = stream(self.setup, ids, replace(checked, context=context), CancelFlag(), self._rest)
        self.tokens_read = len(ids)
        turn = _Turn([dict(message) for message in new], chat, len(context) + len(ids), found)
        self._past = replace(self._past, turn=turn)
        return found

    def use(self, method: str | Method, length: int | None = None) -> None:
        """Go on with another method: the next turn reads all messages anew. "auto" chooses for `length` tokens.

        Not for a conversation with a context.
        """
        if self._before:
            fault = "this conversation continues a context, whose text another method has read"
            raise UsageError(f"{fault}; begin a new one")
        setup = self.setup.using(method, length)
        self._settle()
        self._past = replace(self._past, text="", marks=[(0, 0)], n_tokens=None if self._past.messages else 0)
        self.setup, self.context = setup, None

    def reset(self) -> None:
        """Forget all messages except the system message, and all tokens except those of the context given at first."""
        self._settle()
        self._past = self._begun()
        if not self._before:
            self.context = None

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Save the context; `engine.conversation(context=engine.open_context(path))` continues the chat.

        Without `force`, the only file that is replaced is this conversation's own: see `Context.save`.
        """
        self._settle()
        n_tokens = self._past.n_tokens
        if self.context is None or not n_tokens:
            state = "empty" if n_tokens == 0 else "incomplete, because its last turn was interrupted"
            raise UsageError(f"the conversation is {state}; ask something before it is saved")
        if n_tokens < len(self.context):
            self.context.truncate(n_tokens)
        self.context.save(path, force=force)

    def _begun(self) -> _Past:
        """Return the history of a conversation that has no turn yet."""
        return _Past(self._opening, "", [(0, len(self._before))], len(self._before))

    def _settle(self) -> None:
        """End the last turn, and move its messages to the history. An interrupted call can be repeated."""
        past, turn = self._past, self._past.turn
        if turn is None:
            return
        turn.stream.close()
        assert self.context is not None
        if not (said := turn.messages):
            self._past = replace(past, turn=None)  # `_fit` finds out which of the new tokens the context holds
            return
        result = turn.stream.result
        text, marks = turn.chat.text + result.text, [*past.marks, (len(turn.chat.text), turn.n_asked)]
        whole = self.setup.tokenizer.decode(result.token_ids) == result.text  # False if a stop string was cut off
        if whole and len(self.context) == turn.n_asked + len(result.token_ids):
            marks.append((len(text), len(self.context)))
        self._past = _Past([*past.messages, *said], text, marks, len(self.context))

    def _fit(self, chat: ChatText, max_tokens: int) -> tuple[Context, list[int]]:
        """Truncate the context to the tokens that agree with the text `chat`; return it, and the ids to prefill."""
        past = self._past
        n_same, n_held = _common(past.text, chat.text), 0 if self.context is None else len(self.context)
        marks = [mark for mark in past.marks if mark[0] <= n_same and mark[1] <= n_held]
        marks += self._mark_of_answer(chat.text, n_same)
        n_chars, n_tokens = marks[-1] if marks else (0, 0)
        ids = self.setup.tokenizer.encode_parts(chat, n_chars)
        if not marks:  # even the tokens of the context given at first are missing
            ids = [*self._before, *ids]
        if self.context is None:
            if not ids:
                raise ModelError("the chat template writes nothing for these messages; use generate with a prompt")
            self.context = new_context(self.setup, max(len(ids) + max_tokens, self._length))
        context, cache = self.context, self.context.cache
        wanted = [*context.token_ids[:n_tokens], *ids]  # the context may hold a part of a turn that failed
        n_kept = _common(context.token_ids, wanted[:-1])
        if n_kept < min(len(context), cache.n_tokens):  # the last token is read again for its logits
            n_kept = cache.nearest(max(0, n_kept - 1)) + 1
        whole = past.n_tokens if past.n_tokens is not None and past.n_tokens <= n_kept else None
        self._past = _Past(past.messages, chat.text, marks or [(0, len(self._before))], whole)
        if n_kept < len(context):
            context.truncate(n_kept)
        return context, wanted[n_kept:]

    def _mark_of_answer(self, text: str, n_same: int) -> list[tuple[int, int]]:
        """Return the mark at the end of the last answer if `text` has this answer with other white space around it."""
        past = self._past
        if self.context is None or len(past.marks) < 3 or past.marks[-1][1] != len(self.context):
            return []
        start, end = past.marks[-2][0], past.marks[-1][0]
        answer, rest = past.text[start:end].strip(), text[start:].lstrip()
        if not start <= n_same < end or not answer or not rest.startswith(answer):
            return []
        return [(len(text) - len(rest) + len(answer), len(self.context))]


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the longest common prefix of two sequences."""
    n = min(len(one), len(other))
    same = one[:n] == other[:n]  # one comparison of slices is faster than one for each item
    return n if same else next(i for i in range(n) if one[i] != other[i])
