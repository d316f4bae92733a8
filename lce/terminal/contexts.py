"""Continues context files: the options of a context are those of its file, unless the command line has others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lce

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class MethodOption:
    """The method and the knobs of a command line. `method` is None if the command line names no method."""

    method: str | None
    knobs: Mapping[str, str]

    def load(
        self, model: str, context_file: str | None, loading: Mapping[str, Any]
    ) -> tuple[lce.Engine, lce.Context | None]:
        """Return an engine and the context of a context file; for no file, an engine for new texts, and None.

        The engine has the options of the file, overridden by those of the command line; for new texts the default
        method is `full`. Raises an error for options that contradict the file.
        """
        if context_file is None:
            name = "full" if self.method is None else self.method
            return lce.load(model, lce.methods.make(name, self.knobs), **loading), None
        from lce.engine.info import describe

        context = describe(context_file)
        name = context.method if self.method is None else self.method
        knobs = {**(context.knobs if name == context.method else {}), **self.knobs}
        engine = lce.load(model, lce.methods.make(name, knobs), **continued(context, loading))
        return engine, engine.open_context(context_file)


def continued(context: lce.ContextInfo, loading: Mapping[str, Any]) -> dict[str, Any]:
    """Return `loading`, options of `lce.load`, with missing options taken from a context file."""
    own: dict[str, Any] = {"window": context.window, "dtype": context.dtype, "weights": context.weights or "auto"}
    own["kv_dtype"] = "int8" if context.kv_dtype == "int8" else "auto"
    if loading.get("rope") is None and loading.get("rope_factor") is None:
        own |= {"rope": context.rope, "rope_factor": None if context.rope == "none" else context.rope_factor}
    return {**loading, **{name: value for name, value in own.items() if loading.get(name) in (None, "auto")}}


def ask(
    engine: lce.Engine, prompt: str | Sequence[Mapping[str, str]], context: lce.Context | None, *,
    max_tokens: int, sampling: lce.Sampling, progress: Progress,
) -> tuple[lce.Stream, Callable[[str], None]]:  # fmt: skip
    """Return the answer to a prompt or to a chat's messages, and a function that saves the context after the answer."""
    if not isinstance(prompt, str):
        conversation = engine.conversation(context=context)
        stream = conversation.stream(prompt, max_tokens=max_tokens, sampling=sampling, progress=progress)
        return stream, conversation.save
    ids = engine.tokenizer.encode(prompt, bos=None if context is None else False)
    held = engine.new_context(len(ids) + max_tokens) if context is None else context
    stream = engine.stream(ids, context=held, max_tokens=max_tokens, sampling=sampling, progress=progress)
    return stream, held.save


def ends(model: str, context: lce.ContextInfo, n_tokens: int = 24) -> tuple[str, str]:
    """Return the first and the last `n_tokens` tokens of a context as text, decoded by the model that read them."""
    engine, opened = MethodOption(None, {}).load(model, str(context.path), {})
    ids = opened.token_ids if opened is not None else []
    return engine.tokenizer.decode(ids[:n_tokens]), engine.tokenizer.decode(ids[-n_tokens:])
