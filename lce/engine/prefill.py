"""Chunked prefill: a sequence is read in blocks, each through all layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from lce.attention.attention import Attention
from lce.engine.context import Context
from lce.engine.saving import Identity
from lce.methods.base import Method
from lce.methods.step import Step
from lce.models.layers import Model

Progress = Callable[[int, int], None]  # tokens read, tokens to read


class Reader:
    """Runs blocks through a model with a method behind its hook; holds no state of its own."""

    def __init__(
        self, model: Model, method: Method, attention: Attention, device: torch.device, window: int,
        identify: Callable[[], Identity],
    ) -> None:  # fmt: skip
        self.model = model
        self.method = method
        self.attention = attention
        self.device = device
        self.window = window
        self._identify = identify

    @cached_property
    def identity(self) -> Identity:
        """What must be the same for another engine to go on with a context of this one."""
        return self._identify()

    def read(self, context: Context, ids: Sequence[int], note: Callable[[int, Tensor], None] | None = None) -> Tensor:
        """One block: append tokens `ids` `[T]` to the context's cache; their hidden states `[T, hidden]`.

        Leaves the logits after the last of them in the context. Whatever interrupts the pass, the context is as it was
        before it, or as it is after it.
        """
        cache = context.cache
        config = self.model.config
        step = Step(
            start=cache.length,
            stop=cache.length + len(ids),
            rope=context.rope,
            attention=self.attention,
            window=self.window,
            n_kv_heads=config.n_kv_heads,
            sliding_window=config.sliding_window,
            note=note,
        )

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if len(ids) == 1:
                cache.prefetch(layer + 1)
            self.method.keep(k, v, cache.layers[layer], step)
            return self.method.attend(q, cache.layers[layer], step)

        try:
            cache.reserve(step.stop)
            if len(ids) == 1:  # the next token chooses much as the last one did
                cache.prefetch(0)
            hidden = self.model(torch.tensor(ids, device=self.device), step.start, attend)
            logits = self.model.logits(hidden[-1:])[0]
        except BaseException:
            cache.discard()
            raise
        try:
            _keep(context, logits)
        except BaseException:  # Ctrl-C between two layers: keep the rest as well
            _keep(context, logits)
            raise
        return hidden


def _keep(context: Context, logits: Tensor) -> None:
    context.cache.commit()
    context.logits = logits


def blocks(ids: Sequence[int], block: int, progress: Progress | None = None, done: int = 0) -> Iterator[Sequence[int]]:
    """`ids` in runs of `block`, telling `progress` after each; `done` were read before."""
    for start in range(0, len(ids), block):
        part = ids[start : start + block]
        yield part
        if progress:
            progress(done + start + len(part), done + len(ids))
