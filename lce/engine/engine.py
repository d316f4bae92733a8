"""The engine: a model, a method, and the loops that prefill, decode, save and trace."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lce.attention import Attention
from lce.cache.kv import KVCache
from lce.cache.layout import CacheLayout
from lce.engine.context import Context, ContextMark
from lce.engine.decode import Generation, Piece, Request, Stats, Stream, decode
from lce.engine.holding import Streaming
from lce.engine.planning import Planner
from lce.engine.sampling import Sampling
from lce.engine.saving import ContextData, Identity, PrefillJob, open_saved
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
        self.identity = Identity(
            checkpoint.fingerprint, repr(self.method), str(self.window), repr(self.rope), str(self.dtype)
        )
        config = model.config
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
        prompt and `max_tokens` more tokens cannot fit. After any error or Ctrl-C, `context` is as it was before.
        """
        stream = self._stream(prompt, max_tokens, context, sampling, stop, progress, undo=True)
        try:
            for _ in stream:
                pass
        except BaseException:
            stream.close()  # a traceback may keep it
            raise
        return stream.result

    def stream(
        self, prompt: str | Sequence[int], *, max_tokens: int = 256, context: Context | None = None,
        sampling: Sampling | None = None, stop: Sequence[str] = (), progress: Progress | None = None,
    ) -> Stream:  # fmt: skip
        """Like `generate`, a piece of text at a time. Work starts at the first `next`; `.result` has the figures.

        If prefill fails or is interrupted, `context` is as it was before; later, what was said stays in it. A stream
        uses its context until it ends, or is closed.
        """
        return self._stream(prompt, max_tokens, context, sampling, stop, progress)

    def _stream(
        self, prompt: str | Sequence[int], max_tokens: int, context: Context | None, sampling: Sampling | None,
        stop: Sequence[str], progress: Progress | None, *, undo: bool = False,
    ) -> Stream:  # fmt: skip
        if max_tokens < 1:
            raise UsageError(f"max_tokens is {max_tokens}; expected 1 or more")
        sampling = sampling or Sampling()
        sampling = dataclasses.replace(sampling, stop=(*sampling.stop, *Sampling(stop=stop).stop))
        request = Request(self._ids(prompt, context), sampling, max_tokens, self._eos_ids)
        result, holder = Generation(), Streaming()
        return Stream(holder.bind(self._pieces(request, context, progress, result, holder, undo=undo)), result)

    def _pieces(
        self, request: Request, context: Context | None, progress: Progress | None, result: Generation,
        holder: Streaming, *, undo: bool,
    ) -> Generator[Piece, None, None]:  # fmt: skip
        """The pieces of a generation. `undo`: if it does not reach its end, it leaves nothing in the context."""
        stats, n_prompt = result.stats, len(request.token_ids)
        held = self._new_context(n_prompt + request.max_tokens) if context is None else context
        held.hold(holder)
        self._reserve(held, len(held) + n_prompt + request.max_tokens)
        mark: ContextMark | None = held.mark()
        started = time.perf_counter()
        try:
            stats.prompt_tokens = n_prompt
            held.token_ids.extend(request.token_ids)
            self._advance(held, progress)
            stats.prefill_s = time.perf_counter() - started
            if not undo:
                mark = None  # what is said from here on stays
            yield from decode(held, request, self.tokenizer, result, self._advance)
            stats.memory, stats.traffic = held.cache.bytes_by_tier, held.cache.traffic
        except BaseException:
            if mark is not None:
                held.go_back(mark)
            raise

    def prefill(
        self, document: str | Sequence[int], *, context: Context | None = None, length: int | None = None,
        progress: Progress | None = None,
    ) -> Context:  # fmt: skip
        """Prefill a document, to ask about it later. `length` announces how long the context will become in all.

        Raises `UsageError` for a document that cannot be used, and `CapacityError` before any work if it cannot fit.
        After any error or Ctrl-C, `context` is as it was before.
        """
        ids = self._ids(document, context)
        held = self._new_context(max(len(ids), length or 0)) if context is None else context
        with held.in_use():
            self._reserve(held, max(len(held) + len(ids), length or 0))
            mark = held.mark()
            try:
                held.token_ids.extend(ids)
                self._advance(held, progress)
            except BaseException:
                held.go_back(mark)
                raise
        return held

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
        self, document: str | Sequence[int], path: str | Path, *, length: int | None = None,
        checkpoint_every: int | None = None, progress: Progress | None = None,
    ) -> Stats:  # fmt: skip
        """Prefill a document into a context file; returns the figures of this call.

        Keys and values beyond the memory budget go straight to the file and are written once. With `checkpoint_every`
        tokens between checkpoints, an interrupted call resumes from its last checkpoint when it is made again. `length`
        announces how long the context will become in all. Raises `DataError` where `path` is being written for another
        text or by another engine, and `CapacityError` where the disk or the memory is too small.
        """
        if checkpoint_every is not None and checkpoint_every < 1:
            raise UsageError(f"checkpoint_every is {checkpoint_every}; expected 1 or more tokens")
        ids = self._ids(document)
        announced, every = max(len(ids), length or 0), checkpoint_every or len(ids)
        Planner.into_file(self.layout, self.method.name).check(len(ids))
        job = PrefillJob(Path(path), self.layout, self.identity, ids, announced)
        try:
            context = self._context(job.data)
            started, stats = time.perf_counter(), Stats(prompt_tokens=len(context.uncached))
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

    def _reserve(self, context: Context, length: int) -> None:
        """Make space for a context to become `length` tokens long. Raises `CapacityError` where they cannot fit."""
        if len(context):  # a new one was checked
            Planner.growing(context.cache, self.method.name).check(length)
        context.cache.reserve(length)

    def rope_of(self, length: int) -> Rope:
        """The rotation of a context that was announced to become `length` tokens long."""
        return Rope(self.rope, self.model.config.head_dim, self.model.config.window, length)

    @torch.inference_mode()
    def _advance(self, context: Context, progress: Progress | None = None) -> None:
        """Prefill the context's tokens that are not in its cache yet, and have its logits."""
        if context.logits is None and len(context) == context.cache.length > 0:
            context.cache.truncate(context.cache.nearest(context.cache.length - 1))
        for part in _blocks(context.uncached, self.block, progress):
            self._append(context, part)

    def _append(self, context: Context, ids: Sequence[int], note: Note | None = None) -> Tensor:
        """Append a block of tokens to the context's cache; their hidden states `[T, hidden]`.

        Sets the context's logits to those after the block. After an error or an interruption the context is as it was
        before the block, or as it is after it.
        """
        context.cache.settle()
        before, logits = context.cache.length, context.logits

        def model_call(attend: Attend) -> Tensor:
            hidden = self.model(torch.tensor(ids, device=self.device), before, attend)
            context.set_logits(self.model.logits(hidden[-1:])[0], before + len(ids))
            return hidden

        try:
            return self._driver.forward(context.cache, context.rope, len(ids), model_call, note)
        except BaseException:
            if context.cache.length == before:  # the block was discarded
                context.set_logits(logits, before)
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
