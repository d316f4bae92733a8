"""Makes samples from a benchmark's items: cuts items that are too long and applies the chat template."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lce.errors import UsageError, shown
from lce.lab.eval.published.base import Item, Tokens
from lce.lab.eval.sample import Sample

AUTO, NONE, CHAT = "auto", "none", "chat"
_ROOM = 512  # tokens that L-Eval keeps free for the answer
_STEP = 250  # further words that L-Eval cuts off while a document is still too long


@dataclass(frozen=True)
class Asking:
    """How prompts are made for a model.

    `template` is `auto` (as in the benchmark's own code), `chat` (the model's chat template), `none`, or a text with
    `{prompt}`, such as `[INST]{prompt}[/INST]`. Prompts of more than `max_length` tokens are cut as the benchmark cuts
    prompts; None cuts none. Raises `UsageError`.
    """

    template: str = AUTO
    max_length: int | None = None

    def __post_init__(self) -> None:
        if self.template not in (AUTO, NONE, CHAT) and "{prompt}" not in self.template:
            raise UsageError(
                f"template is {shown(self.template)}; expected auto, chat, none, or a text with {{prompt}} in it"
            )
        if self.max_length is not None and self.max_length < 2:
            raise UsageError(f"max_length is {self.max_length}; expected 2 or more tokens")

    def check(self, tokenizer: Any) -> None:
        """Raise `ModelError` if the template is `chat` and the model has none."""
        if self.template == CHAT:
            tokenizer.require_chat()

    def sample(self, item: Item, tokenizer: Any) -> Sample:
        """Return the sample of an item, for the tokenizer's model.

        The sample's document ends where the benchmark's context ends.
        """
        if self.max_length is not None:
            item = CUTS[item.cut](item, Tokens.of(tokenizer), self.max_length)
        template = item.template if item.fixed or self.template == AUTO else self.template
        if template == CHAT and tokenizer.chat_template is None:
            template = NONE
        if template == NONE:
            return item.sample
        if template == CHAT:
            system = [{"role": "system", "content": item.system}] if item.system else []
            written = tokenizer.chat([*system, {"role": "user", "content": item.prompt}])
        else:
            written = template.replace("{system}", item.system).replace("{prompt}", item.prompt)
        text = written + item.opening
        end = _end_of_context(item, text)
        return replace(item.sample, document=text[:end], question=text[end:])


def _end_of_context(item: Item, text: str) -> int:
    """Return the end of the benchmark's context within templated `text`. Templates may strip the prompt."""
    context = item.context.strip()
    at = text.find(context) if context else -1
    return len(text) if at < 0 else at + len(context)


def _middle(item: Item, tokens: Tokens, most: int) -> Item:
    """Keep the first and the last `most // 2` tokens of the prompt (LongBench, InfiniteBench's open models)."""
    ids, half = tokens.encode(item.prompt), most // 2
    if len(ids) <= most:
        return item
    return replace(item, before="", context=tokens.decode(ids[:half]) + tokens.decode(ids[-half:]), after="")


def _middle_joined(item: Item, tokens: Tokens, most: int) -> Item:
    """Cut as `_middle`, decoded in one piece, also `most` tokens if odd (LongBench v2, InfiniteBench's GPT-4)."""
    ids = tokens.encode(item.prompt)
    if len(ids) <= most:
        return item
    return replace(item, before="", context=tokens.decode(ids[: most // 2] + ids[-most // 2 :]), after="")


def _words(item: Item, tokens: Tokens, most: int, *, keep_first: bool) -> Item:
    """Drop words at one end of the document until the answer has room (L-Eval)."""
    limit, cut, text = most - _ROOM, 0, item.context
    while text and len(tokens.encode(text)) > limit:
        n_words = limit - cut
        if n_words <= 0:
            raise UsageError(f"max_length is {most}; expected more, for the document and {_ROOM} tokens of the answer")
        words = text.split(" ")
        text = " ".join(words[:n_words] if keep_first else words[-n_words:])
        cut += _STEP
    return replace(item, context=text)


def _uncut(item: Item, tokens: Tokens, most: int) -> Item:
    n_tokens = len(tokens.encode(item.prompt))
    if n_tokens > most:
        raise UsageError(
            f"a prompt has {n_tokens} tokens, max_length is {most}, and this benchmark cuts none; give shorter data"
        )
    return item


CUTS: dict[str, Callable[[Item, Tokens, int], Item]] = {
    "middle": _middle,
    "middle_joined": _middle_joined,
    "words_right": lambda item, tokens, most: _words(item, tokens, most, keep_first=True),
    "words_left": lambda item, tokens, most: _words(item, tokens, most, keep_first=False),
    "none": _uncut,
}
