"""The engine: a model, a method, and the loops that prefill, decode, save and trace."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lce.attention import Attention
from lce.cache.kv import KVCache
from lce.cache.layout import CacheLayout
from lce.engine.context import Context
from lce.engine.decode import Generation, Piece, Request, Stats, Stream, decode
from lce.engine.identity import Identity
from lce.engine.job import PrefillJob
from lce.engine.planning import Planner
from lce.engine.sampling import Sampling
from lce.engine.saving import ContextData, open_saved
from lce.engine.trace import Trace, TraceRecorder
from lce.errors import UsageError
from lce.methods.base import Method
from lce.methods.run import Driver
from lce.methods.step import Note
from lce.models.config import RopeConfig
from lce.models.layers import Attend, Model
from lce.models.rope import Rope
from lce.tokenizer.tokenizer import Tokenizer, checked_ids
from lce.weights.checkpoint import Checkpoint

Progress = Callable[[int, int], None]  # tokens prefilled, tokens to prefill


@dataclass(frozen=True)
class EngineOptions:
    """What was chosen when an engine was loaded, with every default filled in and the method resolved."""

    method: Method
    attention: Attention
    window: int
    rope: RopeConfig
    layout: CacheLayout  # dtype, device, block and budgets are the cache's too


class Engine:
    """Prefills and generates with one model and one method. Never changes: all state is in contexts."""

    def __init__(self, model: Model, tokenizer: Tokenizer, checkpoint: Checkpoint, options: EngineOptions) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.method = options.method
        self.layout = options.layout
        self.device = options.layout.device
        self.dtype = options.layout.dtype
        self.block = options.layout.block
        self.window = options.window
        self.rope = options.rope
        config = model.config
        self.identity = Identity(
            checkpoint.fingerprint, self.method, self.window, self.rope, self.dtype, config.vocab_size
        )
        self._driver = Driver(self.method, options.attention, self.window, config.n_kv_heads, config.sliding_window)
        self._eos_ids = frozenset((*config.eos_ids, *tokenizer.eos_ids))

    @property
    def fingerprint(self) -> str:
        """What ties a file to this model's weights."""
        return self.identity.model

    def __repr__(self) -> str:
        return f"Engine({self.method!r}, window={self.window}, block={self.block}, {self.device}, {self.dtype})"

    def generate(
        self, prompt: str | Sequence[int], *, max_tokens: int = 256, context: Context | None = None,
        sampling: Sampling | None = None, stop: Sequence[str] = (), progress: Progress | None = None,
    ) -> Generation:  # fmt: skip
        """Prefill `prompt` (text or token ids), behind the tokens of `context`, and generate up to `max_tokens` tokens.

        Raises `UsageError` for a prompt or an option that cannot be used, and `CapacityError` before any work if the
        prompt and `max_tokens` more tokens cannot fit.
        """
        stream = self.stream(
            prompt, max_tokens=max_tokens, context=context, sampling=sampling, stop=stop, progress=progress
        )
        for _ in stream:
            pass
        return stream.result

    def stream(
        self, prompt: str | Sequence[int], *, max_tokens: int = 256, context: Context | None = None,
        sampling: Sampling | None = None, stop: Sequence[str] = (), progress: Progress | None = None,
    ) -> Stream:  # fmt: skip
        """Like `generate`, a piece of text at a time. Work starts at the first `next`; `.result` has the figures."""
        if max_tokens < 1:
            raise UsageError(f"max_tokens is {max_tokens}; expected 1 or more")
        sampling = sampling or Sampling()
        sampling = dataclasses.replace(sampling, stop=(*sampling.stop, *Sampling(stop=stop).stop))
        request = Request(self._ids(prompt, context), sampling, max_tokens, self._eos_ids)
        result = Generation()
        return Stream(self._pieces(request, context, progress, result), result)

    def _pieces(
        self, request: Request, context: Context | None, progress: Progress | None, result: Generation
    ) -> Iterator[Piece]:
        stats, n_prompt = result.stats, len(request.token_ids)
        with self._in_use(context, n_prompt + request.max_tokens) as context:
            started = time.perf_counter()
            stats.prompt_tokens = n_prompt
            with context.adding(request.token_ids):
                self._advance(context, progress)
            stats.prefill_s = time.perf_counter() - started
            yield from decode(context, request, self.tokenizer, result, self._advance)
            stats.memory, stats.traffic = context.cache.bytes_by_tier, context.cache.traffic

    def prefill(
        self, document: str | Sequence[int], *, context: Context | None = None, length: int | None = None,
        progress: Progress | None = None,
    ) -> Context:  # fmt: skip
        """Prefill a document, to ask about it later. `length` announces how long the context will become in all.

        Raises `UsageError` for a document that cannot be used, and `CapacityError` before any work if it cannot fit.
        """
        ids = self._ids(document, context)
        with self._in_use(context, len(ids), length or 0) as context, context.adding(ids):
            self._advance(context, progress)
        return context

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """Logits after each token: `[T, vocab]`, float32. Raises `UsageError` for ids that the model does not have."""
        ids = self._ids(token_ids)
        context = self._new_context(len(ids))
        return torch.cat([self.model.logits(self._append(context, part)) for part in _blocks(ids, self.block)])

    @torch.inference_mode()
    def trace(self, token_ids: Sequence[int]) -> Trace:
        """Which chunks each head of each layer chose for each token."""
        ids = self._ids(token_ids)
        context = self._new_context(len(ids))
        recorder = TraceRecorder(self.model.config.n_layers, self.model.config.n_heads)
        for part in _blocks(ids, self.block):
            self._append(context, part, recorder.note)
            recorder.end_block(len(part))
        return recorder.trace(self.method.choices)

    def prefill_file(
        self, document: str | Sequence[int], path: str | Path, *, context: Context | None = None,
        length: int | None = None, checkpoint_every: int | None = None, progress: Progress | None = None,
    ) -> Stats:  # fmt: skip
        """Prefill a document into a context file, behind a copy of `context`; returns the figures of this call.

        Keys and values beyond the memory budget go straight to the file and are written once. With `checkpoint_every`
        tokens between checkpoints, an interrupted call resumes from its last checkpoint when it is made again. `length`
        announces how long the context will become in all; a context has announced its own. Raises `DataError` where
        `path` is being written for another text or by another engine, and `CapacityError` where the disk or the memory
        is too small. `context` stays as it is, and `path` may be the file that it was opened from.
        """
        if checkpoint_every is not None and checkpoint_every < 1:
            raise UsageError(f"checkpoint_every is {checkpoint_every}; expected 1 or more tokens")
        ids = self._ids(document, context)
        with nullcontext() if context is None else context.in_use():
            before = None if context is None else context.data
            ids = ids if before is None else [*before.token_ids, *ids]
            announced = max(len(ids), length or 0) if before is None else before.announced
            Planner.into_file(self.layout, self.method.name).check(len(ids))
            job = PrefillJob(Path(path), self.layout, self.identity, ids, announced, before)
        every, context = checkpoint_every or len(ids), self._context(job.data)
        started, stats = time.perf_counter(), Stats(prompt_tokens=len(context.uncached))
        try:
            with torch.inference_mode():
                for part in _blocks(context.uncached, self.block, progress, done=context.cache.length):
                    if context.cache.length - job.n_written >= every:
                        job.checkpoint(context.data)
                    self._append(context, part)
            stats.prefill_s = time.perf_counter() - started
            job.finish(context.data)
        except BaseException as error:
            job.abandon(error)
            raise
        stats.memory, stats.traffic = context.cache.bytes_by_tier, context.cache.traffic
        return stats

    def open_context(self, path: str | Path) -> Context:
        """The context of a file that `Context.save` or `prefill_file` wrote; its keys and values are read when needed.

        Raises `DataError` for a file of another model, method, RoPE scaling or dtype, and for a damaged one.
        """
        return self._context(open_saved(Path(path), self.layout, self.identity))

    def _context(self, data: ContextData) -> Context:
        return Context(data, self.rope_of(data.announced), self.identity)

    def _new_context(self, length: int) -> Context:
        """An empty context, announced to become `length` tokens long."""
        Planner.of(self.layout, self.method.name).check(length)
        return self._context(ContextData(KVCache.empty(self.layout, length), announced=length))

    @contextmanager
    def _in_use(self, context: Context | None, more: int, length: int = 0) -> Iterator[Context]:
        """Hold a context, or a new one, for a call that adds `more` tokens, or makes it `length` tokens long.

        Raises `CapacityError` before any work where they cannot fit.
        """
        held = self._new_context(max(more, length)) if context is None else context
        with held.in_use():
            if context is not None:
                Planner.growing(context.cache, self.method.name).check(max(len(context) + more, length))
            held.cache.reserve(max(len(held) + more, length))
            yield held

    def rope_of(self, length: int) -> Rope:
        """The rotation of a context that was announced to become `length` tokens long."""
        return Rope(self.rope, self.model.config.head_dim, self.model.config.window, length)

    @torch.inference_mode()
    def _advance(self, context: Context, progress: Progress | None = None) -> None:
        """Prefill the context's tokens that are not in its cache yet."""
        for part in _blocks(context.uncached, self.block, progress):
            self._append(context, part)

    def _append(self, context: Context, ids: Sequence[int], note: Note | None = None) -> Tensor:
        """Append a block of tokens to the context's cache; their hidden states `[T, hidden]`.

        Sets the context's logits to those after the block. After an error or an interruption the context is as it was
        before the block, or as it is after it.
        """
        before, logits = context.cache.length, context.logits

        def model_call(attend: Attend) -> Tensor:
            hidden = self.model(torch.tensor(ids, device=self.device), before, attend)
            context.logits = self.model.logits(hidden[-1:])[0]
            return hidden

        try:
            return self._driver.forward(context.cache, context.rope, len(ids), model_call, note)
        except BaseException as error:
            if context.cache.length == before:  # the block was discarded
                context.logits = logits
            context.data.blame(error)
            raise

    def _ids(self, prompt: str | Sequence[int], context: Context | None = None) -> list[int]:
        """A prompt as checked token ids; text that continues a context gets no beginning token.

        Refuses a context of another engine: its keys may be placed otherwise.
        """
        if context is not None and context.identity is not self.identity:
            raise UsageError("this context was made by another engine; ask that one, or prefill the text again")
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt, bos=None if context is None else False) if prompt else []
        else:
            ids = checked_ids(prompt, self.model.config.vocab_size)
        if not ids and (context is None or not len(context)):
            raise UsageError("the prompt is empty; expected some text")
        return ids


def _blocks(ids: Sequence[int], block: int, progress: Progress | None = None, done: int = 0) -> Iterator[Sequence[int]]:
    """`ids` in blocks; `progress` is called after each block, and counts `done` tokens before the first."""
    for start in range(0, len(ids), block):
        part = ids[start : start + block]
        yield part
        if progress:
            progress(done + start + len(part), done + len(ids))
