"""The engine: a model, a method and the loops, behind one face."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index

import torch
from torch import Tensor

from lce.cache.kv import KVCache
from lce.cache.tiering import Budgets, CacheShape, Tiering
from lce.engine.attention import Attention
from lce.engine.capacity import Planner
from lce.engine.context import Context
from lce.engine.decode import Generation, Piece, Stream, decode
from lce.engine.prefill import Progress, Reader, blocks
from lce.engine.sampling import Sampling
from lce.errors import UsageError
from lce.methods.base import Method
from lce.models.config import RopeConfig
from lce.models.llama import Llama
from lce.models.rope import Rope
from lce.weights.checkpoint import Checkpoint
from lce.weights.tokenizer import Tokenizer


@dataclass(frozen=True)
class Trace:
    """What a method chose: `chosen[layer]` `[H, T, K]`, ascending, -1 for none.

    Choice c stands for the `chunk_size` tokens from `first + c · chunk_size` on. What a query attends unasked, its own
    chunk or its local window, is not listed. Empty for a method that chooses nothing.
    """

    chunk_size: int
    chosen: list[Tensor]
    first: int = 0


class Engine:
    """Reads and writes text with one model and one method. Never changes: all state is in contexts."""

    def __init__(
        self, model: Llama, tokenizer: Tokenizer, method: Method, attention: Attention, device: torch.device,
        dtype: torch.dtype, block: int, window: int, rope: RopeConfig, checkpoint: Checkpoint, budgets: Budgets,
    ) -> None:  # fmt: skip
        self.model = model
        self.tokenizer = tokenizer
        self.method = method
        self.device = device
        self.dtype = dtype
        self.block = block
        self.window = window
        self.rope = rope
        self.budgets = budgets
        self._checkpoint = checkpoint
        self._reader = Reader(model, method, attention, device, window)
        self._eos_ids = frozenset((*model.config.eos_ids, *tokenizer.eos_ids))

    @cached_property
    def fingerprint(self) -> str:
        """What ties a file to this model's weights."""
        return self._checkpoint.fingerprint()

    def __repr__(self) -> str:
        return f"Engine({self.method!r}, window={self.window}, block={self.block}, {self.device}, {self.dtype})"

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 256,
        context: Context | None = None,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> Generation:
        """Read `prompt` (text or token ids), behind what `context` already holds, and write up to `max_tokens` tokens.

        Raises `UsageError` for a prompt or an option that cannot be used, and `CapacityError` before anything is read
        if the prompt and so many tokens cannot fit.
        """
        stream = self.stream(
            prompt, max_tokens=max_tokens, context=context, sampling=sampling, stop=stop, progress=progress
        )
        for _ in stream:
            pass
        return stream.result

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 256,
        context: Context | None = None,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> Stream:
        """Like `generate`, a piece of text at a time, from the first `next` on; `.result` has the figures."""
        if max_tokens < 1:
            raise UsageError(f"max_tokens is {max_tokens}; expected 1 or more")
        sampling = sampling or Sampling()
        if stop:
            sampling = dataclasses.replace(
                sampling, stop=(*sampling.stop, *([stop] if isinstance(stop, str) else stop))
            )
        self._own(context)
        ids = self._ids(prompt, context)
        result = Generation()
        return Stream(self._pieces(ids, context, sampling, max_tokens, progress, result), result)

    def _pieces(
        self, ids: list[int], context: Context | None, sampling: Sampling, max_tokens: int, progress: Progress | None,
        result: Generation,
    ) -> Iterator[Piece]:  # fmt: skip
        known = context
        context = self._start(len(ids) + max_tokens) if known is None else known
        with context.in_use():
            if known is not None:
                self._check_room(known, len(known) + len(ids) + max_tokens)
            started = time.perf_counter()
            result.stats.prompt_tokens = len(ids)
            with context.saying(ids):
                context.cache.reserve(len(context) + max_tokens)
                self._advance(context, progress)
            result.stats.prefill_s = time.perf_counter() - started
            yield from decode(context, self.tokenizer, sampling, max_tokens, self._eos_ids, result, self._advance)
            result.stats.memory = context.cache.bytes_by_tier
            result.stats.traffic = context.cache.traffic

    def prefill(
        self,
        document: str | Sequence[int],
        *,
        context: Context | None = None,
        length: int | None = None,
        progress: Progress | None = None,
    ) -> Context:
        """Read a document, to be asked about later. `length` announces how long the context will become in all.

        Raises `UsageError` for a document that cannot be used, and `CapacityError` before any work if it cannot fit.
        """
        self._own(context)
        ids = self._ids(document, context)
        known = context
        context = self._start(max(len(ids), length or 0)) if known is None else known
        with context.in_use():
            if known is not None:
                self._check_room(known, max(len(known) + len(ids), length or 0))
            with context.saying(ids):
                self._advance(context, progress)
        return context

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """Logits after each token: `[T, vocab]`, float32. Raises `UsageError` for ids that the model does not have."""
        ids = self._ids(token_ids, None)
        context = self._start(len(ids))
        return torch.cat([self.model.logits(self._reader.read(context, part)) for part in blocks(ids, self.block)])

    @torch.inference_mode()
    def trace(self, token_ids: Sequence[int]) -> Trace:
        """Which chunks each head of each layer chose for each token."""
        ids = self._ids(token_ids, None)
        context = self._start(len(ids))
        seen: list[list[Tensor]] = [[] for _ in self.model.layers]
        for part in blocks(ids, self.block):
            before = [len(parts) for parts in seen]
            self._reader.read(context, part, lambda layer, chosen: seen[layer].append(chosen))
            for parts, count in zip(seen, before, strict=True):
                if len(parts) == count:  # nothing to choose from yet
                    parts.append(torch.empty(self.model.config.n_heads, len(part), 0, dtype=torch.int64))
        widest = [max(part.shape[-1] for part in parts) for parts in seen]
        first, size = self.method.choices
        return Trace(
            size,
            [
                torch.cat([_widened(part.cpu(), width) for part in parts], dim=1)
                for parts, width in zip(seen, widest, strict=True)
            ],
            first,
        )

    def _start(self, length: int) -> Context:
        """An empty context, announced to become `length` tokens long."""
        config = self.model.config
        shape = CacheShape(
            n_layers=config.n_layers,
            n_kv_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            chunk_size=self.method.cache_chunk,
            dtype=self.dtype,
            device=self.device,
        )
        tiering = Tiering.of(self.budgets, self.method, self.block)
        Planner.of(shape, config.n_heads, self.method, tiering).check(length)
        return Context(KVCache(shape, length, tiering), self.rope_of(length), self._reader)

    def _check_room(self, context: Context, length: int) -> None:
        """Refuse a context that cannot grow to `length` tokens, before any work."""
        Planner.growing(context.cache, self.model.config.n_heads, self.method).check(length)

    def rope_of(self, length: int) -> Rope:
        """The rotation of a context that was announced to become `length` tokens long."""
        return Rope(self.rope, self.model.config.head_dim, self.model.config.window, length)

    def _own(self, context: Context | None) -> None:
        """Refuse a context whose cache another engine filled: its keys may be placed otherwise."""
        if context is not None and context.maker is not self._reader:
            raise UsageError("this context was made by another engine; ask that one, or prefill the text again")

    @torch.inference_mode()
    def _advance(self, context: Context, progress: Progress | None = None) -> None:
        """Read what the context has not read yet; leaves the logits after its last token."""
        for part in blocks(context.unread, self.block, progress):
            self._reader.read(context, part)

    def _ids(self, prompt: str | Sequence[int], context: Context | None) -> list[int]:
        """A prompt as checked token ids; text that goes on a context gets no beginning token."""
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt, bos=None if context is None else False) if prompt else []
        else:
            ids = self._checked(prompt)
        if not ids and (context is None or not len(context)):
            raise UsageError("the prompt is empty; expected some text")
        return ids

    def _checked(self, token_ids: Sequence[int]) -> list[int]:
        try:
            ids = [index(i) for i in token_ids]
        except TypeError:
            raise UsageError(f"the prompt is a {type(token_ids).__name__}; expected text or token ids") from None
        vocab = self.model.config.vocab_size
        wrong = next((i for i in ids if not 0 <= i < vocab), None)
        if wrong is not None:
            raise UsageError(f"token id {wrong} is not in the model's vocabulary; expected 0 to {vocab - 1}")
        return ids


def _widened(chosen: Tensor, width: int) -> Tensor:
    """Chosen chunks `[H, T, K]` as `[H, T, width]`, -1 behind."""
    return torch.nn.functional.pad(chosen, (0, width - chosen.shape[-1]), value=-1)
