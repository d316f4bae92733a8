"""The engine: a model, a method and the loops, behind one face."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from lce.attention.attention import Attention
from lce.cache.kv import KVCache
from lce.cache.tiering import Budgets, CacheShape, Tiering
from lce.engine.context import Context
from lce.engine.decode import Generation, Piece, Stats, Stream, decode
from lce.engine.planning import Planner
from lce.engine.prefill import Progress, Reader, blocks
from lce.engine.sampling import Sampling
from lce.engine.saving import Identity, Sitting, open_saved
from lce.engine.trace import Trace
from lce.errors import UsageError
from lce.methods.base import Method
from lce.models.config import RopeConfig
from lce.models.layers import Model
from lce.models.rope import Rope
from lce.tokenizer.tokenizer import Tokenizer, checked_ids
from lce.weights.checkpoint import Checkpoint


class Engine:
    """Reads and writes text with one model and one method. Never changes: all state is in contexts."""

    def __init__(
        self, model: Model, tokenizer: Tokenizer, method: Method, attention: Attention, device: torch.device,
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
        self._reader = Reader(model, method, attention, device, window, self._identity)
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
        with self._in_use(context, len(ids) + max_tokens) as context:
            started = time.perf_counter()
            result.stats.prompt_tokens = len(ids)
            with context.saying(ids):
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
        with self._in_use(context, len(ids), length or 0) as context, context.saying(ids):
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
        return Trace.of(seen, self.method.choices)

    def prefill_file(
        self,
        document: str | Sequence[int],
        path: str | Path,
        *,
        length: int | None = None,
        checkpoint_every: int | None = None,
        progress: Progress | None = None,
    ) -> Stats:
        """Read a document into a context file; the figures of this call.

        What memory may not hold goes to the file as it is read, and is written once. With `checkpoint_every`, an
        interrupted call goes on from the last so many tokens when it is made again. `length` announces how long the
        context will become in all. Raises `DataError` where `path` is under work for another text or engine,
        `CapacityError` where the disk or the memory has no room.
        """
        if checkpoint_every is not None and checkpoint_every < 1:
            raise UsageError(f"checkpoint_every is {checkpoint_every}; expected 1 or more tokens")
        ids = self._ids(document, None)
        announced = max(len(ids), length or 0)
        Planner.into_file(self._shape, self.model.config.n_heads, self.method, self._tiering).check(len(ids))
        sitting = Sitting(Path(path), self._shape, self._tiering, self._reader.identity, ids, announced)
        context = Context(sitting.cache, self.rope_of(announced), self._reader, announced)
        context.token_ids, context.logits = ids, sitting.logits
        started, stats = time.perf_counter(), Stats(prompt_tokens=len(context.unread))
        noted = context.cache.length
        try:
            with torch.inference_mode():
                for part in blocks(context.unread, self.block, progress, done=noted):
                    if checkpoint_every is not None and context.cache.length - noted >= checkpoint_every:
                        sitting.note(ids, context.logits)
                        noted = context.cache.length
                    self._reader.read(context, part)
            stats.prefill_s = time.perf_counter() - started
            sitting.finish(ids, context.logits)
        except BaseException as error:
            sitting.leave(error)
            raise
        stats.memory, stats.traffic = context.cache.bytes_by_tier, context.cache.traffic
        return stats

    def open_context(self, path: str | Path) -> Context:
        """The context of a file that `Context.save` or `prefill_file` wrote; its keys and values are read as needed.

        Raises `DataError` for a file of another model, method, RoPE scaling or dtype, and for a damaged one.
        """
        saved = open_saved(Path(path), self._shape, self._tiering, self._reader.identity)
        context = Context(saved.cache, self.rope_of(saved.announced), self._reader, saved.announced)
        context.token_ids, context.logits = saved.token_ids, saved.logits
        return context

    def _identity(self) -> Identity:
        return Identity(
            model=self.fingerprint,
            method=repr(self.method),
            window=str(self.window),
            rope=repr(self.rope),
            dtype=str(self.dtype),
        )

    @property
    def _shape(self) -> CacheShape:
        config = self.model.config
        return CacheShape(
            n_layers=config.n_layers,
            n_kv_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            chunk_size=self.method.cache_chunk,
            dtype=self.dtype,
            device=self.device,
        )

    @property
    def _tiering(self) -> Tiering:
        return Tiering.of(self.budgets, self.method, self.block)

    def _start(self, length: int) -> Context:
        """An empty context, announced to become `length` tokens long."""
        Planner.of(self._shape, self.model.config.n_heads, self.method, self._tiering).check(length)
        return Context(KVCache(self._shape, length, self._tiering), self.rope_of(length), self._reader, length)

    @contextmanager
    def _in_use(self, context: Context | None, more: int, length: int = 0) -> Iterator[Context]:
        """Hold a context, or a new one, for a call by which it becomes `more` tokens longer, or `length` in all.

        Raises `CapacityError` before any work where that cannot fit.
        """
        held = self._start(max(more, length)) if context is None else context
        with held.in_use():
            if context is not None:
                planner = Planner.growing(context.cache, self.model.config.n_heads, self.method)
                planner.check(max(len(context) + more, length))
            held.cache.reserve(max(len(held) + more, length))
            yield held

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
            ids = checked_ids(prompt, self.model.config.vocab_size)
        if not ids and (context is None or not len(context)):
            raise UsageError("the prompt is empty; expected some text")
        return ids
