"""The contexts of an engine: makes them, checks them and their prompts, and reserves their memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from lce.cache.kv import KVCache
from lce.engine.arguments import ids_of
from lce.engine.context import Context
from lce.engine.planning import ALLOWANCE
from lce.engine.saving import ContextData
from lce.engine.setup import Setup
from lce.engine.window import warn
from lce.errors import UsageError, shown
from lce.files import path_of
from lce.sizes import count

T = TypeVar("T")


def new_context(setup: Setup, length: int | str) -> Context:
    """Return an empty context: see `Engine.new_context`."""
    cache, announced = KVCache.empty(setup.layout), count(length, "length")
    reserve(setup, cache, announced)
    return context_of(setup, ContextData(cache, announced=announced))


def open_context(setup: Setup, path: str | Path) -> Context:
    """Open a context file: see `Engine.open_context`."""
    return context_of(setup, setup.files.open(path_of(path)))


def context_of(setup: Setup, data: ContextData) -> Context:
    """Return the context that `data` has the parts of."""
    rope = setup.rope_of(data.announced, data.cache.n_tokens - data.cache.length)
    return Context(data, rope, setup.files)


def reserve(setup: Setup, cache: KVCache, length: int) -> None:
    """Reserve memory for `length` tokens of a cache, if `ALLOWANCE` has enough. Raises `CapacityError` if not."""
    before, n_rows = ALLOWANCE.promised(cache), cache.rows_of(length)

    def promise() -> None:
        ALLOWANCE.promise(cache, n_rows)
        cache.reserve(n_rows)

    try:
        setup.ranks.together(promise)
    except BaseException:
        ALLOWANCE.give_back(cache, before)
        raise


def own_context(setup: Setup, context: object) -> Context | None:
    """Return a context of this engine, or None. Raises `UsageError` for another engine's context."""
    if context is None:
        return None
    if not isinstance(context, Context):
        raise UsageError(f"context is {shown(context)}; expected what prefill, open_context or fork returns")
    if context.files is not setup.files:
        raise UsageError("this context was made by another engine; ask that one, or prefill the text again")
    return context


def given_context(setup: Setup, context: object) -> Context:
    """Return a context of this engine. Raises `UsageError` for None and for another engine's context."""
    if (own := own_context(setup, context)) is None:
        raise UsageError("context is None; expected what prefill, open_context or fork returns")
    return own


def prompt_ids(setup: Setup, prompt: object, context: Context | None = None) -> list[int]:
    """Return a prompt as checked token ids. Text that continues a context gets no beginning-of-text token."""
    if isinstance(prompt, str):
        ids = setup.tokenizer.encode(prompt, bos=None if context is None else False) if prompt else []
    else:
        ids = ids_of(prompt, setup.model.config.vocab_size)
    if not ids and (context is None or not len(context)):
        raise UsageError("the prompt is empty; expected some text")
    return ids


def appended(setup: Setup, context: Context | None, n_new: int, announced: int, work: Callable[[Context], T]) -> T:
    """Call `work`, which appends `n_new` tokens, on `context` or a new context. Undo all changes after an error."""
    held = new_context(setup, max(n_new, announced)) if context is None else context
    with held.hold():
        warn(setup.beyond(len(held) + n_new))
        reserve(setup, held.cache, max(len(held) + n_new, announced))
        mark = held.mark()
        try:
            return work(held)
        except BaseException:
            held.go_back(mark)
            raise
