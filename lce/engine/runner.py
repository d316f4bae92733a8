"""The runner: a model with a method over contexts, a block of tokens at a time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lce.attention import Attention
from lce.cache.kv import KVCache
from lce.cache.layout import CacheLayout
from lce.engine.allowance import ALLOWANCE
from lce.engine.context import Context, Unique
from lce.engine.graph import CudaTape, DecodeGraph, Tape
from lce.engine.identity import Identity
from lce.engine.process import uses_threads
from lce.engine.sampling import check_logits
from lce.engine.saving import ContextData
from lce.methods.base import Method
from lce.methods.run import Driver
from lce.models.config import RopeConfig
from lce.models.layers import Attend, Model
from lce.models.rope import Rope
from lce.progress import Progress
from lce.system import give_back_freed_memory
from lce.tokenizer.tokenizer import Tokenizer
from lce.weights.checkpoint import Checkpoint


@dataclass(frozen=True)
class EngineOptions:
    """What was chosen when an engine was loaded, with every default filled in and the method resolved."""

    method: Method
    attention: Attention
    window: int
    rope: RopeConfig
    weights: str | None  # the scheme of rounded weights
    layout: CacheLayout  # dtype, device, block and budgets are the cache's too


class Runner(Unique):
    """Makes contexts of one model under one method, and reads tokens into them. Holds no state of its own."""

    instead = "load the model again in the other process, and hand over contexts as files"

    def __init__(self, model: Model, tokenizer: Tokenizer, checkpoint: Checkpoint, options: EngineOptions) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.method = options.method
        self.layout = options.layout
        self.device = options.layout.device  # that of the first layer, where there are several
        self.dtype = options.layout.dtype
        self.block = options.layout.block
        self.window = options.window
        self.rope = options.rope
        self.weights = options.weights
        config = model.config
        self._fingerprint = checkpoint.fingerprint
        self.identity = Identity(
            lambda: config.identity(checkpoint.fingerprint()),
            self.method, self.window, self.rope, self.dtype, config.vocab_size, options.layout.kv_dtype, self.weights,
        )  # fmt: skip
        self._driver = Driver(self.method, options.attention, self.window, config.n_kv_heads, config.sliding_window)
        kernels = options.attention.decodes(self.dtype, model.config.head_dim)
        recorded = self.device.type == "cuda" and self.method.decodes and kernels
        self._tape: Callable[[torch.device], Tape] | None = CudaTape if recorded else None
        self._eos_ids = frozenset((*config.eos_ids, *tokenizer.eos_ids))
        self._end = _End()  # the last attribute: it is freed after the model

    def _context(self, data: ContextData) -> Context:
        return Context(data, self.rope_of(data.announced), self.identity)

    def _new_context(self, length: int) -> Context:
        """An empty context, announced to become `length` tokens long."""
        cache = KVCache.empty(self.layout)
        self._reserve(cache, length)
        return self._context(ContextData(cache, announced=length))

    def _reserve(self, cache: KVCache, length: int) -> None:
        """Make space for a cache to become `length` tokens long. Raises `CapacityError` where they cannot fit."""
        before = ALLOWANCE.promised(cache)
        ALLOWANCE.promise(cache, self.method.name, length)
        try:
            cache.reserve(length)
        except BaseException:
            ALLOWANCE.give_back(cache, before)
            raise

    def rope_of(self, length: int) -> Rope:
        """The rotation of a context that was announced to become `length` tokens long."""
        return Rope(self.rope, self.model.config.head_dim, self.model.config.window, length)

    @torch.inference_mode()
    def _advance(self, context: Context, progress: Progress | None = None, *, ahead: bool = False) -> None:
        """Prefill the context's tokens that are not in its cache yet, and have its logits.

        `ahead`: the likeliest token will be next, unless the text ends.
        """
        if context.logits is None and len(context) == context.cache.length > 0:
            context.cache.truncate(context.cache.nearest(context.cache.length - 1))
        for part in blocks(context.uncached, self.block, progress):
            if self._tape is None or len(part) > 1 or not self._append_recorded(context, part[0], self._tape, ahead):
                self._append(context, part)

    def _append_recorded(
        self, context: Context, token_id: int, tape: Callable[[torch.device], Tape], ahead: bool
    ) -> bool:
        """Append a token by the context's recorded step; False, and nothing done, where it has none."""
        if context.graph is None:
            context.graph = DecodeGraph(self.model, self._driver, self.device, tape(self.device))
        return context.graph.append(context, token_id, ahead=ahead)

    def _append(self, context: Context, ids: Sequence[int], driver: Driver | None = None) -> Tensor:
        """Append a block of tokens to the context's cache; their hidden states `[T, hidden]`.

        `driver` is by default that of the engine's own method.

        Sets the context's logits to those after the block. After an error or an interruption the context is as it was
        before the block, or as it is after it.
        """
        uses_threads()
        if context.graph is not None:
            context.graph.forget()
        context.cache.settle()
        before, logits = context.cache.length, context.logits

        def model_call(attend: Attend) -> Tensor:
            hidden = self.model(torch.tensor(ids, device=self.device), before, attend)
            last = self.model.logits(hidden[-1:])
            check_logits(last, before + len(ids) - 1)
            context.set_logits(last[0], before + len(ids))
            return hidden

        try:
            return (driver or self._driver).forward(context.cache, context.rope, len(ids), model_call)
        except BaseException as error:
            if context.cache.length == before:  # the block was discarded
                context.set_logits(logits, before)
            context.data.blame(error)
            raise


class _End:
    """Gives freed memory back when an engine ends."""

    def __init__(self) -> None:
        weakref.finalize(self, give_back_freed_memory).atexit = False  # `__del__` fails while Python itself ends


def blocks(ids: Sequence[int], block: int, progress: Progress | None = None, done: int = 0) -> Iterator[Sequence[int]]:
    """`ids` in blocks; `progress` is called after each block, and counts `done` tokens before the first."""
    for start in range(0, len(ids), block):
        part = ids[start : start + block]
        yield part
        if progress:
            progress(done + start + len(part), done + len(ids))
