"""The engine: prefills, generates, scores, traces and chats with one model and one method."""

from __future__ import annotations

import secrets
import time
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, Unpack, overload

import torch
from torch import Tensor

from lce.attention import Attention
from lce.cache.kv import KVCache
from lce.cache.layout import CacheLayout
from lce.engine.alone import Alone, Keep, blocks
from lce.engine.answer import Generation, Piece, Stats
from lce.engine.arguments import GenerationOptions, Options, Prompt, Prompts, are_many, generation_options, ids_of
from lce.engine.batch import Batch
from lce.engine.chat import Conversation
from lce.engine.context import Context, Unique
from lce.engine.divided_files import DividedFiles
from lce.engine.eviction import attention_peaks, best_rows, check_evictable, checked_keep, copy_rows, repetitions
from lce.engine.graph import CudaTape
from lce.engine.identity import Identity
from lce.engine.planning import ALLOWANCE
from lce.engine.sampling import Scorer, TokenScores, check_logits, recommended
from lce.engine.sampling_options import Sampling
from lce.engine.saving import ContextData, ContextFiles, PrefillJob, Target
from lce.engine.stream import AsyncStream, CancelFlag, Stream
from lce.engine.trace import Trace, TraceObserver
from lce.engine.window import beyond, readable, warn
from lce.errors import UsageError, shown
from lce.files import path_of
from lce.methods.base import Method
from lce.methods.observed import Observed, Observer
from lce.methods.run import Driver
from lce.models.config import RopeConfig
from lce.models.layers import Model
from lce.models.products import SHARED_ROWS
from lce.models.ranks import Division
from lce.models.rope import Rope
from lce.progress import Progress, check_progress, reported
from lce.sizes import count
from lce.system import give_back_freed_memory
from lce.tokenizer.tokenizer import NoTokenizer, Tokenizer
from lce.weights.checkpoint import Checkpoint

T = TypeVar("T")


class Engine(Unique):
    """A model with an attention method. An engine prefills and generates, and never changes: all state is in contexts.

    `method` has every knob filled in. `window`, `rope`, `block`, `dtype` and `weights` (a quantisation scheme or None)
    follow from `lce.load`'s options. `device` is the first layer's device. `tokenizer` turns text into ids and back.
    """

    _instead = "load the model again in the other process, and hand over contexts as files"

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        checkpoint: Checkpoint,
        layout: CacheLayout,
        method: Method,
        attention: Attention,
        window: int,
        rope: RopeConfig,
        weights: str | None,
        again: Callable[..., Engine],
        division: Division,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.method = method
        self.layout = layout
        self.device = layout.device
        self.dtype = layout.dtype
        self.block = layout.block
        self.window = window
        self.rope = rope
        self.weights = weights
        self._fingerprint = checkpoint.fingerprint
        self._again = again  # `load` with the options of this engine
        self.division = division
        self.ranks = division.ranks
        config, whole = model.config, division.config
        self.identity = Identity(
            lambda: whole.identity(checkpoint.fingerprint()),
            method,
            window,
            rope,
            self.dtype,
            config.vocab_size,
            layout.kv_dtype,
            weights,
        )
        divided = self.ranks.count > 1
        self.files = DividedFiles(layout, self.identity, division) if divided else ContextFiles(layout, self.identity)
        driver = Driver(method, attention, window, config.n_kv_heads, config.sliding_window, config.kinds)
        recorded = (
            self.device.type == "cuda"
            and not divided
            and method.decodes
            and attention.decodes(self.dtype, config.head_dim)
        )
        eos_ids = frozenset((*config.eos_ids, *tokenizer.eos_ids))
        self.alone = Alone(model, driver, tokenizer, eos_ids, self.block, self.device, CudaTape if recorded else None)
        self._end = _End()  # freed after the model, because it is the last attribute

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the weights, without the config. Files of learned maps must match this fingerprint."""
        return self._fingerprint()

    @property
    def eos_ids(self) -> frozenset[int]:
        """The tokens that end an answer."""
        return self.alone.eos_ids

    @property
    def recommended_sampling(self) -> Sampling | None:
        """The sampling that the model's generation_config.json recommends, for `sampling=`; None if it names none."""
        return recommended(self.model.config.generation)

    def using(self, method: str | Method) -> Engine:
        """Return an engine with another method, and this engine's weights and options.

        A method that reads prompts alone (`prefill_method`) is not taken over. Raises `UsageError` for a method or a
        knob that cannot be used.
        """
        return self._again(method=method, sharing=self)

    def observed(self, observer: Observer) -> Engine:
        """Return an engine like this one with an observer, which sees what the method chooses in every layer.

        The two engines may use each other's contexts. `observer` has the methods of `lce.methods.Observer`.
        """
        if not (hasattr(observer, "rows") and hasattr(observer, "observe")):
            raise UsageError(f"observer is {shown(observer)}; expected an object with `rows` and `observe`")
        engine = self.using(Observed(self.method, observer))
        engine.identity, engine.files = self.identity, self.files
        return engine

    def __repr__(self) -> str:
        where, parts = str(self.device), self.layout.by_device
        if len(parts) > 1:
            spans = ((part.first_layer, part.first_layer + part.n_layers - 1, part.device) for part in parts)
            where = "; ".join(f"layers {first} to {last} on {device}" for first, last, device in spans)
        return f"Engine({self.method!r}, window={self.window}, block={self.block}, {where}, {self.dtype})"

    @overload
    def generate(self, prompt: Prompt, **options: Unpack[GenerationOptions]) -> Generation: ...

    @overload
    def generate(self, prompt: Prompts, **options: Unpack[GenerationOptions]) -> list[Generation]: ...

    def generate(self, prompt: Prompt | Prompts, **options: Unpack[GenerationOptions]) -> Generation | list[Generation]:
        """Prefill `prompt` (text or token ids) and generate up to `max_tokens` tokens.

        Options: `max_tokens` (256), `context` to continue, the knobs of `Sampling` as keywords (`temperature`, `top_k`,
        `top_p`, `min_p`, `seed`, `stop`, `repetition_penalty`, `presence_penalty`, `frequency_penalty`) or
        `sampling=Sampling(...)`, `logprobs=k` for the log-probability of each token and of the k likeliest, and
        `progress`: True for a bar, or a function of the tokens done and the total.

        A list of prompts gives a list of results. Up to 8 prompts are answered at once, each on its own fork of
        `context`, if given. Raises `UsageError` for a prompt or an option that cannot be used, and `CapacityError`
        before any work if memory cannot hold the prompt and `max_tokens` more tokens. Warns by `WindowWarning` if the
        text is longer than the method can read. After any error or Ctrl-C, `context` is as it was before.
        """
        checked, many = self._options(options), are_many(prompt)
        all_ids = [self._ids(each, checked.context) for each in (prompt if many else [prompt])]
        if not many:
            return self._stream(all_ids[0], checked, CancelFlag(), keep="nothing").finish()
        self._check_undivided("a list of prompts", "give them one by one")
        lanes = min(len(all_ids), SHARED_ROWS)
        with Batch(self, lanes, len(all_ids), keep=False) as batch:
            return [stream.finish() for stream in [batch.stream(ids, **options) for ids in all_ids]]

    def stream(self, prompt: Prompt, **options: Unpack[GenerationOptions]) -> Stream:
        """Return a stream that generates text piece by piece from its first `next` on; `stream.result` has the figures.

        If prefill fails, or is interrupted or cancelled, `context` is as it was before. Once prefill is complete, the
        answer so far stays in `context`. No other call may use `context` until the stream ends. Any thread may end the
        stream early: see `Stream.cancel` and `Stream.close`.
        """
        checked = self._options(options)
        return self._stream(self._ids(prompt, checked.context), checked, CancelFlag())

    def astream(self, prompt: Prompt, **options: Unpack[GenerationOptions]) -> AsyncStream:
        """Generate like `stream`, for `async for`. The stream's own thread does the work once the loop starts."""
        checked = self._options(options)
        return AsyncStream(lambda flag: self._stream(self._ids(prompt, checked.context), checked, flag))

    def batch(
        self,
        max_lanes: int | str = SHARED_ROWS,
        max_waiting: int | str = 256,
        *,
        cache_dir: str | Path | None = None,
        cache_budget: int | str = "50GiB",
        cache_memory: int | str | None = None,
    ) -> Batch:
        """Begin a batch, which runs many requests at once.

        Up to `max_lanes` requests run, and `max_waiting` more wait; further ones are refused. Contexts of ended
        requests are kept, and a prompt that begins with the tokens of one is read from there on. With `cache_dir`, a
        folder, they are kept as files, too, of up to `cache_budget` bytes together, and outlive the process. In memory
        they have up to `cache_memory` bytes, by default half of what is free.
        """
        self._check_undivided("a batch", "ask prompt by prompt, with Engine.generate or stream")
        return Batch(self, max_lanes, max_waiting, cache_dir, cache_budget, cache_memory)

    def _check_undivided(self, what: str, remedy: str) -> None:
        """Raise `UsageError` if ranks share the model: `what` is then impossible."""
        if self.ranks.count > 1:
            raise UsageError(f"{what} is for a model on one rank, and {self.ranks.count} share this one; {remedy}")

    def beyond(self, n_tokens: int) -> str | None:
        """Return a one-line warning if a text of `n_tokens` is longer than the method can read, else None."""
        return beyond(self.method, self.model.config, self.window, self.rope, count(n_tokens, "n_tokens", least=0))

    def _stream(self, ids: list[int], options: Options, flag: CancelFlag, keep: Keep = "answer") -> Stream:
        result = Generation(logprobs=None if options.logprobs is None else [])
        result.warning = self._warn(len(ids) + len(options.context or ()))
        return Stream(self._pieces(ids, options, result, flag, keep), result, flag)

    def _pieces(
        self, ids: list[int], options: Options, result: Generation, flag: CancelFlag, keep: Keep
    ) -> Generator[Piece, None, None]:
        """Generate, and yield the text in pieces. `keep` says what a failed generation leaves in the context."""
        n_new = len(ids) + options.max_tokens
        if flag.is_set:
            return
        context = self.new_context(n_new) if options.context is None else options.context
        with context._hold():
            self._reserve(context.cache, len(context) + n_new)
            yield from self.alone.pieces(context, ids, options, result, flag, keep)
            result.warning = result.warning or self._warn(len(context))

    def _warn(self, n_tokens: int) -> str | None:
        """Warn if a text of `n_tokens` is longer than the method can read; return the warning, or None."""
        return warn(self.beyond(n_tokens))

    def prefill(
        self,
        document: Prompt,
        *,
        context: Context | None = None,
        length: int | str | None = None,
        progress: Progress | bool | None = None,
    ) -> Context:
        """Append a document to `context`, or to a new context, by prefilling the document; return the context.

        `length` announces how many tokens the context will have in the end. Raises `UsageError` for an unusable
        document, and `CapacityError` before any work if memory is too small. After an error `context` is unchanged.
        """
        announced = 0 if length is None else count(length, "length", least=0)
        ids = self._ids(document, self._own(context))

        def read(held: Context) -> Context:
            held.token_ids.extend(ids)
            with reported(progress, "prefill") as tell:
                self.alone.read(held, tell)
            return held

        return self._appended(context, len(ids), announced, read)

    def _appended(self, context: Context | None, n_new: int, announced: int, work: Callable[[Context], T]) -> T:
        """Call `work`, which appends `n_new` tokens, on `context` or a new context. Undo all changes after an error."""
        held = self.new_context(max(n_new, announced)) if context is None else context
        with held._hold():
            self._warn(len(held) + n_new)
            self._reserve(held.cache, max(len(held) + n_new, announced))
            mark = held._mark()
            try:
                return work(held)
            except BaseException:
                held._go_back(mark)
                raise

    @torch.inference_mode()
    def logits(self, token_ids: Prompt) -> Tensor:
        """Return the logits after each of T tokens, `[T, vocab]` float32. Raises `UsageError` for unknown ids."""
        ids = self._ids(token_ids)
        self._warn(len(ids))
        context, found = self.new_context(len(ids)), []
        for part in blocks(ids, self.block):
            found.append(self.model.logits(self._hidden(context, part)))
            check_logits(found[-1], context.cache.length - len(part))
        return torch.cat(found)

    @torch.inference_mode()
    def score(
        self,
        token_ids: Prompt,
        *,
        context: Context | None = None,
        first: int | None = None,
        progress: Progress | bool | None = None,
    ) -> TokenScores:
        """Return the log-probability of each token from `first` on, given all tokens before it.

        The tokens are appended to `context`, if given. By default `first` is 0 after a `context` that has tokens, and
        otherwise 1, because nothing precedes the first token. Logits are in memory for one slice of the text at a time,
        and are not computed for tokens before `first`. After any error or Ctrl-C, `context` is as it was before.

        Example: `engine.score(ids).logprobs.sum()` is the log-probability of a text, given its first token.
        """
        ids, before = self._ids(token_ids, self._own(context)), 0 if context is None else len(context)
        least = 0 if before else 1
        first = least if first is None else count(first, "first", least)
        if first > len(ids):
            raise UsageError(f"first is {first}; expected {len(ids)} or less, the number of tokens")
        scorer = Scorer(ids, first, self.model.logits, self.model.config.vocab_size)

        def read(held: Context) -> TokenScores:
            if before:
                self.alone.read(held)
            if first == 0 and ids:
                assert held.logits is not None
                scorer.note(held.logits[None], 0)
            held.token_ids.extend(ids)
            with reported(progress, "score") as tell:
                for part in blocks(held._uncached, self.block, tell):
                    start = held.cache.n_tokens - before
                    scorer.add(self._hidden(held, part), start, before)
            return scorer.scores()

        return self._appended(context, len(ids), 0, read)

    @torch.inference_mode()
    def trace(self, token_ids: Prompt, *, scores: bool = False) -> Trace:
        """Prefill a text; return the chunks that each head of each layer chose for each token, with scores and ranks.

        With `scores`, the trace also has the scores of all M chunks: N · M numbers per layer and head for N tokens.
        """
        if not isinstance(scores, bool):
            raise UsageError(f"scores is {shown(scores)}; expected True or False")
        self._check_undivided("a trace", "load the model without ranks")
        ids = self._ids(token_ids)
        self._warn(len(ids))
        context = self.new_context(len(ids))
        observer = TraceObserver(keep_all=scores)
        driver = replace(self.alone.driver, method=Observed(self.method, observer))
        for part in blocks(ids, self.block):
            self.alone.append(context, part, driver)
        return observer.trace(self.method.choices)

    def prefill_file(
        self,
        document: Prompt,
        path: str | Path,
        *,
        context: Context | None = None,
        length: int | str | None = None,
        checkpoint_every: int | str | None = None,
        force: bool = False,
        progress: Progress | bool | None = None,
        keep: float | None = None,
    ) -> Stats:
        """Prefill a document into the context file `path`, after a copy of `context` if given; return `Stats`.

        Keys and values beyond the memory budget go straight to the file and are written once. `checkpoint_every` is the
        number of tokens between checkpoints: an interrupted call that is repeated resumes at the last one. `length`
        announces how many tokens the context will have in the end; with a `context`, the length announced for
        `context` counts. `context` stays as it is, and `path` may be the file from which `context` was opened. Any
        other file is replaced only with `force`. Raises `UsageError` if `path` is such a file, `DataError` if it is the
        unfinished prefill of another text or engine, and `CapacityError` if space is short.

        With `keep`, the file has that share of the keys and values: see `evict`. The text is then prefilled in memory,
        or within the budgets, as it is after a `context` of which keys were evicted; `checkpoint_every` is refused.
        """
        every = None if checkpoint_every is None else count(checkpoint_every, "checkpoint_every")
        path, ids = path_of(path), self._ids(document, self._own(context))
        wanted = 0 if length is None else count(length, "length", least=0)
        check_progress(progress)
        if keep is not None or self.ranks.count > 1 or (context is not None and context.cache.n_evicted):
            if every is not None:
                raise UsageError("checkpoint_every is for a prefill on one rank that keeps all keys; leave it out")
            return self._evicted_file(
                ids, Target(path, force, context._saves if context else ()), context, wanted, keep, progress
            )
        with nullcontext() if context is None else context._hold():
            before = None if context is None else context._data
            ids = ids if before is None else [*before.token_ids, *ids]
            announced = max(len(ids), wanted) if before is None else before.announced
            ALLOWANCE.planner(self.layout, into_file=True).check(len(ids))
            self._warn(len(ids))
            target = Target(path, force, () if before is None else before.saves)
            job = PrefillJob(target, self.layout, self.identity, ids, announced)
            try:
                held = self._context(job.start(before))
                ALLOWANCE.promise(held.cache, len(ids))
                stats = Stats(prompt_tokens=len(held._uncached), read_before=held.cache.length)
                started = time.perf_counter()
                with torch.inference_mode(), reported(progress, "prefill") as tell:
                    for part in blocks(held._uncached, self.block, tell, done=held.cache.length):
                        if held.cache.length - job.n_written >= (every or len(ids)):
                            job.checkpoint(held._data)
                        self.alone.append(held, part)
                stats.prefill_s = time.perf_counter() - started
                job.finish(held._data)
            except BaseException as error:
                job.abandon(error)
                raise
        stats.memory, stats.traffic = held.cache.bytes_by_tier, held.cache.traffic
        return stats

    def _evicted_file(
        self,
        ids: Sequence[int],
        target: Target,
        context: Context | None,
        length: int,
        keep: float | None,
        progress: Progress | bool | None,
    ) -> Stats:
        """Prefill a document in memory, evict all keys but the share `keep`, if given, and write the context's file."""
        if keep is not None:
            checked_keep(keep)
            check_evictable(self.method, self.model.config, context)
        target.check()
        n = len(ids)
        stats, whole = Stats(prompt_tokens=n, read_before=len(context or ())), n if keep is None else 2 * n
        with reported(progress, "prefill") as tell:
            started, held = time.perf_counter(), None if context is None else context.fork()
            held = self.prefill(ids, context=held, length=length, progress=lambda done, _: tell(done, whole))
            stats.prefill_s = time.perf_counter() - started
            with held:
                kept = held
                if keep is not None:
                    kept = self.evict(held, keep, progress=lambda done, total: tell(n + done * n // total, whole))
                    stats.evict_s = time.perf_counter() - started - stats.prefill_s
                with kept:
                    self.files.save(target, kept._data)
                    stats.memory, stats.traffic = kept.cache.bytes_by_tier, kept.cache.traffic
        return stats

    def evict(self, context: Context, keep: float, *, progress: Progress | bool | None = None) -> Context:
        """Return a new context with the share `keep` of the keys and values of `context`, which stays as it is.

        The model repeats the text, and each KV head keeps the keys that it attends most (KVzip; `lce.engine.eviction`
        has the details). This takes longer than prefill did. The text's later tokens are cached as usual. With `keep`
        1 the new context is a fork. Raises `UsageError` for a method other than `full`, for a model with a sliding
        window, and for a context of which keys were evicted before.
        """
        if self._own(context) is None:
            raise UsageError("context is None; expected what prefill, open_context or fork returns")
        checked_keep(keep)
        check_evictable(self.method, self.model.config, context)
        n_rows = max(1, round(keep * len(context)))
        if n_rows >= len(context):
            return context.fork()
        longest = readable(self.method, self.model.config, self.window, self.rope)
        passes = repetitions(context.token_ids, self.tokenizer, longest)
        with context._hold(), reported(progress, "repeat") as tell:
            needed = len(context) + max(len(each.ids) for each in passes)
            self._warn(needed)
            self.alone.read(context)
            self._reserve(context.cache, needed)
            rows = [best_rows(peaks, n_rows) for peaks in attention_peaks(self.alone, context, passes, tell)]
            cache = KVCache.empty(self.layout)
            self._reserve(cache, n_rows)
            copy_rows(context.cache, rows, cache)
            return self._context(replace(context._data, cache=cache, source=None, saves=set()))

    def open_context(self, path: str | Path) -> Context:
        """Open a file that `Context.save` or `prefill_file` wrote. Keys and values are read when needed.

        Raises `DataError` for a file of another model, method, RoPE scaling or dtype, and for a damaged one.
        """
        return self._context(self.files.open(path_of(path)))

    def new_context(self, length: int | str) -> Context:
        """Return an empty context with memory for `length` tokens. Raises `CapacityError` if they cannot fit."""
        cache, announced = KVCache.empty(self.layout), count(length, "length")
        self._reserve(cache, announced)
        return self._context(ContextData(cache, announced=announced))

    def _context(self, data: ContextData) -> Context:
        return Context(data, self.rope_of(data.announced), self.files)

    def _reserve(self, cache: KVCache, length: int) -> None:
        """Reserve memory for `length` tokens of a cache, if `ALLOWANCE` has enough. Raises `CapacityError` if not."""
        before, n_rows = ALLOWANCE.promised(cache), length - cache.n_evicted

        def reserve() -> None:
            ALLOWANCE.promise(cache, n_rows)
            cache.reserve(n_rows)

        try:
            self.ranks.together(reserve)
        except BaseException:
            ALLOWANCE.give_back(cache, before)
            raise

    def rope_of(self, length: int) -> Rope:
        """Return the RoPE of a context that is announced to have `length` tokens in the end."""
        return Rope(self.rope, self.model.config.head_dim, self.model.config.window, length)

    def _hidden(self, context: Context, ids: Sequence[int]) -> Tensor:
        """Append a block of tokens to a context; return their hidden states `[T, hidden]`."""
        hidden = self.alone.append(context, ids, self.alone.driver).hidden
        assert hidden is not None, "only recorded steps keep no hidden states"
        return hidden

    def _options(self, given: GenerationOptions) -> Options:
        options = generation_options(given)
        self._own(options.context)
        options.sampling.check(self.model.config.vocab_size)
        if options.sampling.stop and isinstance(self.tokenizer, NoTokenizer):
            raise UsageError("stop is given, but this checkpoint has no tokenizer, so there is no text; leave it out")
        if self.ranks.count > 1 and options.sampling.seed is None and not options.sampling.greedy:
            seed = self.ranks.exchange(secrets.randbits(62))[0]  # ranks with one seed draw the same tokens
            options = replace(options, sampling=replace(options.sampling, seed=seed))
        return options

    def _own(self, context: object) -> Context | None:
        """Return a context of this engine, or None. Raises `UsageError` for another engine's context."""
        if context is None:
            return None
        if not isinstance(context, Context):
            raise UsageError(f"context is {shown(context)}; expected what prefill, open_context or fork returns")
        if context._files is not self.files:
            raise UsageError("this context was made by another engine; ask that one, or prefill the text again")
        return context

    def _ids(self, prompt: object, context: Context | None = None) -> list[int]:
        """Return a prompt as checked token ids. Text that continues a context gets no beginning-of-text token."""
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt, bos=None if context is None else False) if prompt else []
        else:
            ids = ids_of(prompt, self.model.config.vocab_size)
        if not ids and (context is None or not len(context)):
            raise UsageError("the prompt is empty; expected some text")
        return ids

    def conversation(
        self, system: str | None = None, *, context: Context | None = None, length: int | str = 0
    ) -> Conversation:
        """Begin a chat whose turns prefill only new tokens. `system` is the text of a system message.

        With `context` the chat continues that context. `length` announces how many tokens the chat will have in the
        end. Raises `ModelError` if the model has no chat template.
        """
        return Conversation(self, system, context=self._own(context), length=length)

    def chat(self, messages: str | Sequence[Mapping[str, str]], **options: Unpack[GenerationOptions]) -> Generation:
        """Answer a list of messages `{"role": ..., "content": ...}`, or one user's message given as a text.

        Takes the options of `generate`. With `context`, the messages are formatted as if they followed an answer.
        Raises `ModelError` if the model has no chat template, and `DataError` for messages that the template refuses.
        """
        return self.chat_stream(messages, **options).finish()

    def chat_stream(self, messages: str | Sequence[Mapping[str, str]], **options: Unpack[GenerationOptions]) -> Stream:
        """Answer like `chat`, but return a stream of the text."""
        context = options.pop("context", None)
        return Conversation(self, context=self._own(context), keep="answer").stream(messages, **options)


class _End:
    """An object that returns freed memory to the system when the engine that holds the object is freed."""

    def __init__(self) -> None:
        weakref.finalize(self, give_back_freed_memory).atexit = False  # a `__del__` would fail when Python ends
