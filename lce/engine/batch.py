"""Runs many requests at once. Each has a context, a method and a sampling of its own.

One pass decodes a token of every answer; then a block of the oldest prompt that is not read yet is read, and so on.
While a block is read on a CPU, its kernels run in slices, and between two slices the answers get their next token. The
length of a slice follows from the time of a pass. Prompts are read in one thread and answers decoded in another, and
only one of the two works at a time.

A request begins with the longest prefix that a kept context holds: see `lce.engine.prefixes`. Memory for prompt and
answer is reserved before the prompt is read. If there is none, the request waits until others end, and kept contexts
leave memory. On a CPU, the bits of an answer do not depend on the requests beside it. Behind a kept prefix, blocks
begin at other tokens than without one, so sums may be rounded otherwise.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import torch

from lce.engine.answer import Answer, Piece
from lce.engine.arguments import GenerationOptions, Options, Prompt, check_names
from lce.engine.context import Context, Unique
from lce.engine.lanes import forward
from lce.engine.planning import ALLOWANCE
from lce.engine.prefixes import PrefixCache
from lce.engine.requests import BatchStream, Request
from lce.errors import BusyError, CapacityError, DataError, LceError, UsageError, nearest, shown
from lce.files import path_of
from lce.methods.base import Method
from lce.methods.registry import make
from lce.models.products import SHARED_ROWS, Slices
from lce.progress import reported
from lce.sizes import count, in_bytes
from lce.system import free_host_memory
from lce.tokenizer.chat import ChatText

if TYPE_CHECKING:
    from lce.engine.engine import Engine

MOST_LANES = 64  # a pass takes them in groups of `SHARED_ROWS`
MOST_METHODS = 32  # engines with other methods that a batch keeps
SLOWDOWN = 1.6  # A pass of decode and the slice of prefill after it take so many times the shortest pass of decode.
FORGET = 1.002  # With each pass, what counts as the shortest one grows by this factor.
LEAST_SLICE_S, IDLE_SLICE_S = 0.001, 0.05


class Batch(Unique):
    """Many requests of one engine at once. Any thread, and any event loop, may ask.

        with engine.batch(max_lanes=8) as batch:
            streams = [batch.stream(prompt) for prompt in prompts]
            print([stream.finish().text for stream in streams])

        async with engine.batch() as batch:
            async for piece in batch.stream("..."):
                print(piece.text, end="")

    `close`, or the end of `with`, ends requests that are running.
    """

    _instead = "make another batch"

    def __init__(
        self, engine: Engine, max_lanes: int | str = SHARED_ROWS, max_waiting: int | str = 256,
        cache_dir: str | Path | None = None, cache_budget: int | str = "50GiB", cache_memory: int | str | None = None,
        *, keep: bool = True,
    ) -> None:  # fmt: skip
        """Begin a batch: see `Engine.batch`. Without `keep`, no context is kept for later requests."""
        self.engine = engine
        self.max_lanes = count(max_lanes, "max_lanes", most=MOST_LANES)
        self.max_waiting = count(max_waiting, "max_waiting", least=0)
        folder, budget = None, in_bytes(cache_budget, "cache_budget")
        if cache_dir is not None:
            folder = path_of(cache_dir, "cache_dir")
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(f"cache_dir is {shown(str(folder))}: {error.strerror}; name another folder") from None
        self._keeps = keep
        self._changed = threading.Condition()
        memory = (free_host_memory() or 8 << 30) // 2
        if cache_memory is not None:
            memory = in_bytes(cache_memory, "cache_memory")
        self._prefixes = PrefixCache(folder, memory, budget, self._wake)
        self._choosing = threading.Lock()  # for `_engines`
        self._engines: dict[Method, Engine] = {engine.method: engine}
        self._named: dict[str, tuple[Engine, Context]] = {}
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # in the order in which they were admitted
        self._ending: float | None = None  # the time until which running requests may go on; None: no end is planned
        self._totals: Counter[str] = Counter()
        self._slice_s = 0.0  # the seconds of the next slice of prefill
        self._shortest_s: dict[int, float] = {}  # by the number of lanes: the time of a pass of decode at its fastest
        self._slices = Slices(self._pause)
        # A thread of its own for decode: prefill, which it interrupts, goes on with what its thread keeps in memory.
        self._decoder = ThreadPoolExecutor(1, thread_name_prefix="lce-decode")
        self._thread = threading.Thread(target=self._work, name="lce-batch", daemon=True)
        self._thread.start()
        self._own_threads = {self._thread.ident}  # those in which requests' callbacks are called
        self._process = os.getpid()
        atexit.register(self._exit)

    def engine_of(self, method: str | Method | None = None, options: Mapping[str, Any] | None = None) -> Engine:
        """Return the engine for a method and its knobs, with the batch's model; the batch's own engine for None.

        Raises `UsageError` for a method or knobs that cannot be used.
        """
        if options is not None and not isinstance(options, Mapping):
            raise UsageError(f"method_options is {shown(options)}; expected a mapping of knobs to values")
        if method is None and not options:
            return self.engine
        if method is None:
            method = self.engine.method.label
        if isinstance(method, str):
            method = make(method, dict(options or {}))
        elif options:
            raise UsageError("method_options are for a method's name; give the method its knobs")
        if not isinstance(method, Method):
            raise UsageError(f"method is {shown(method)}; expected a method's name, or an instance of Method")
        with self._choosing:
            if method not in self._engines:
                if len(self._engines) >= MOST_METHODS:
                    self._engines = {self.engine.method: self.engine}
                self._engines[method] = self.engine.using(method)
            return self._engines[method]

    def stream(
        self, prompt: Prompt | ChatText, *, method: str | Method | None = None,
        method_options: Mapping[str, Any] | None = None, context: str | Context | None = None,
        **options: Any,
    ) -> BatchStream:  # fmt: skip
        """Ask for the answer to a prompt: text, token ids, or a rendered chat. Returns at once.

        `method` and `method_options` are the request's own method and knobs. `context` is a context that the prompt
        continues, or the name of one: see `add_context`. Options are those of `Engine.generate`. Raises `UsageError`
        for what cannot be used, and `BusyError` if the queue is full.
        """
        engine = self.engine_of(method, method_options)
        start: Context | None = None
        if isinstance(context, str):
            with self._changed:
                if context not in self._named:
                    raise self._unknown(context)
                own, start = self._named[context]
            if method is not None and own.method != engine.method:
                raise UsageError(f"the context {context} has a method of its own; leave `method` out")
            engine = own
        elif context is not None:
            start = engine._own(context)
        checked = engine._options(cast(GenerationOptions, options))
        return self._submit(engine, prompt, checked, start, None)

    def make_context(self, name: str, prompt: Prompt | ChatText, **how: Any) -> BatchStream:
        """Read a text, and keep it as the context `name`. The stream ends, without pieces, when it is read.

        `how` may be `method` and `method_options`. Raises the errors of `stream`.
        """
        self._check_name(name)
        check_names(how, ("method", "method_options"), "option")
        engine = self.engine_of(how.get("method"), how.get("method_options"))
        return self._submit(engine, prompt, engine._options({"max_tokens": 1}), None, name)

    def add_context(self, name: str, path: str | Path) -> None:
        """Keep the context in a file, made with the batch's engine, under a name. Raises `DataError` if it is none."""
        self._check_name(name)
        context = self.engine.open_context(path)
        with self._changed:
            self._check_name(name)
            self._named[name] = self.engine, context

    def _check_name(self, name: object) -> None:
        if not isinstance(name, str) or not name or len(name) > 200 or not name.isprintable() or "@" in name:
            raise UsageError(f"a context's name is {shown(name)}; expected some printable characters without @")
        with self._changed:
            if name in self._named:
                raise UsageError(f"there is a context {name} already; name another, or drop it first")

    @property
    def contexts(self) -> dict[str, Context]:
        """The named contexts."""
        with self._changed:
            return {name: context for name, (_, context) in self._named.items()}

    def drop_context(self, name: str) -> None:
        """Give up a named context. Requests that have begun with it go on. Raises `UsageError` if there is none."""
        with self._changed:
            if self._named.pop(name, None) is None:
                raise self._unknown(name)

    def _unknown(self, name: object) -> UsageError:
        remedy = nearest(str(name), self._named) if self._named else "make one by make_context or add_context"
        return UsageError(f"there is no context {shown(name)}; {remedy}")

    def _submit(
        self, engine: Engine, prompt: Prompt | ChatText, options: Options, start: Context | None, name: str | None
    ) -> BatchStream:
        ids = engine.tokenizer.encode_parts(prompt) if isinstance(prompt, ChatText) else engine._ids(prompt, start)
        request = Request(engine, prompt if isinstance(prompt, ChatText) else ids, ids, options, start, name)
        if not ids and start is None:
            raise UsageError("the prompt is empty; expected some text")
        request.asked = time.perf_counter()
        request.result.stats.prompt_tokens = len(ids)
        request.result.logprobs = None if options.logprobs is None else []
        request.result.warning = engine._warn(len(ids) + (0 if start is None else len(start)))
        with self._changed:
            if self._ending is not None:
                raise BusyError("the batch is closed; ask another one")
            if len(self._waiting) >= self.max_waiting + self.max_lanes - len(self._running):
                raise BusyError(f"{len(self._waiting)} requests are waiting, as many as may; ask again later")
            self._waiting.append(request)
            self._changed.notify_all()
        return BatchStream(request)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def gauges(self) -> dict[str, float]:
        """Return figures about the batch: requests now, tokens so far, and the share of memory that contexts use."""
        held = 0
        for context in [each.context for each in [*self._running]]:
            with suppress(UsageError, RuntimeError):  # it was closed just now, or its memory is being rearranged
                held += 0 if context is None else sum(context.cache.bytes_by_tier.values())
        kept = self._prefixes.memory_bytes
        free = free_host_memory() or 0
        return {
            "running": len(self._running), "waiting": len(self._waiting), "contexts": self._prefixes.n_contexts,
            "kv_usage": (held + kept) / max(1, held + kept + free), "kept_bytes": kept,
            **{name: self._totals[name] for name in ("prompt_tokens", "cached_tokens", "decode_tokens")},
        }  # fmt: skip

    # What follows runs in the batch's thread.

    def _work(self) -> None:
        """Run requests until the batch is closed."""
        with torch.inference_mode():
            while True:
                with self._changed:
                    while not self._has_work():
                        if self._ending is not None:
                            return
                        self._changed.wait()
                    if self._ending is not None and time.perf_counter() >= self._ending:
                        for request in (*self._waiting, *self._running):
                            request.cancelled = True
                try:
                    self._admit()
                    self._decode()
                    self._read()
                except BaseException as error:  # a fault of ours: it must not end the thread, for others wait for it
                    for request in [*self._running]:
                        self._end(request, error)

    def _has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def _admit(self) -> None:
        """Let requests in, in their order, while there are lanes."""
        with self._changed:
            for request in [each for each in self._waiting if each.cancelled]:
                self._waiting.remove(request)
                self._end(request)
            while self._waiting and len(self._running) < self.max_lanes:
                self._running.append(self._waiting.popleft())

    def _decode(self) -> None:
        """Generate one token of every answer, and wait for that."""
        for request in [each for each in self._running if each.cancelled and each.state == "decode"]:
            self._end(request)
        asked = [each for each in self._running if each.state == "decode"]
        if asked:
            self._decoder.submit(self._decode_all, asked).result()

    @torch.inference_mode()
    def _decode_all(self, asked: Sequence[Request]) -> None:
        self._own_threads.add(threading.get_ident())
        began = time.perf_counter()
        lanes = []
        for each in asked:
            assert each.context is not None
            ids = each.context._uncached
            lanes.append(each.engine.alone.lane(each.context, ids, decoding=True))
        forward(self.engine.model, lanes)
        for request, lane in zip(asked, lanes, strict=True):
            assert request.context is not None
            request.is_sound = lane.error is None
            try:
                lane.check()
                request.context._store_logits(lane)
                self._say(request, lane.likeliest)
            except BaseException as error:  # a callback may raise any, and it must not end the thread
                self._end(request, error)
        seconds = time.perf_counter() - began
        shortest = min(seconds, self._shortest_s.get(len(asked), seconds) * FORGET)
        self._shortest_s[len(asked)] = shortest
        self._slice_s = max(LEAST_SLICE_S, SLOWDOWN * shortest - seconds)

    def _say(self, request: Request, likeliest: int | None = None) -> None:
        """Draw the next token of an answer, and hand its text over."""
        context, answer = request.context, request.answer
        assert context is not None
        assert answer is not None
        assert context.logits is not None
        text = answer.take(context.logits, likeliest)
        del context.token_ids[request.n_said :]
        context.token_ids.extend(request.result.token_ids)
        if text:
            request.channel.put(Piece(text))
        if answer.done:
            self._end(request)

    def _pause(self) -> float:
        """Decode between two slices of prefill; return the seconds of the next slice."""
        self._decode()
        decoding = any(each.state == "decode" for each in self._running)
        return self._slice_s if decoding else IDLE_SLICE_S

    def _read(self) -> None:
        """Read a block of the oldest prompt."""
        for request in [each for each in self._running if each.state in ("waiting", "prefill")]:
            try:
                if request.cancelled:
                    self._end(request)
                    continue
                if request.state == "waiting" and not self._begin(request):
                    continue
                self._read_block(request)
            except BaseException as error:  # a callback may raise any, and it must not end the thread
                if not self._begins_again(request, error):
                    self._end(request, error)
            return
        if self._running and all(each.state == "waiting" for each in self._running):
            with self._changed:
                self._changed.wait(0.05)  # for a context that is being saved, or for memory

    def _begin(self, request: Request) -> bool:
        """Find the context that a prompt continues, and reserve memory. Return False if the request has to wait."""
        engine, options, ids = request.engine, request.options, request.ids
        if request.start is not None:
            context: Context | None = request.start.fork()
            request.n_before = len(request.start)
        elif self._keeps:
            others = [each.context for each in self._running if each.engine is engine and each.state == "decode"]
            if isinstance(request.prompt, ChatText):
                request.ids = ids = self._prefixes.spelled(engine, request.prompt, ids, len(ids) + options.max_tokens)
                request.result.stats.prompt_tokens = len(ids)
            also = [each for each in others if each is not None]
            context, busy = self._prefixes.find(engine, ids, len(ids) + options.max_tokens, also)
            if busy:
                return False
        else:
            context = None
        whole = request.n_before + len(ids) + options.max_tokens
        try:
            if context is None:
                context = engine.new_context(whole)
            else:
                engine._reserve(context.cache, whole)
        except CapacityError:
            if context is not None and self._keeps and request.start is None:
                self._prefixes.put(engine, context)
            if self._prefixes.shrink(1) or any(each.state in ("prefill", "decode") for each in self._running):
                return False
            raise
        request.context, request.state = context, "prefill"
        n_cached = min(len(context), context.cache.n_tokens) - request.n_before
        request.result.stats.read_before = request.n_read = max(0, n_cached)
        self._totals.update(prompt_tokens=len(ids), cached_tokens=request.n_read)
        context.token_ids.extend(ids[len(context) - request.n_before :])
        request.report = request.closing.enter_context(reported(options.progress, "prefill"))
        if context.logits is None and not context._uncached:
            context.cache.truncate(context.cache.nearest(context.cache.length - 1))
        return True

    def _begins_again(self, request: Request, error: BaseException) -> bool:
        """Return whether a prompt is to be read anew, because a file of the cache with its beginning is damaged."""
        context = request.context
        if request.is_sound or context is None or not isinstance(error, DataError):
            return False
        if request.start is not None or not self._prefixes.forget(context, error):
            return False
        request.closing.close()
        request.context, request.state, request.is_sound, request.n_read = None, "waiting", True, 0
        return True

    def _read_block(self, request: Request) -> None:
        """Read the next block of a prompt; after the last one, draw the first token."""
        engine, context, stats = request.engine, request.context, request.result.stats
        assert context is not None
        if uncached := context._uncached[: engine.block]:
            request.is_sound = False
            engine.alone.append(context, uncached, slices=self._slices)
            request.is_sound = True
            request.n_read = min(len(request.ids), context.cache.n_tokens - request.n_before)
            if request.report is not None:
                request.report(context.cache.n_tokens, len(context))
        if request.cancelled or context._uncached:
            return
        stats.prefill_s = time.perf_counter() - request.asked
        if request.name is not None:
            with self._changed:
                self._check_name(request.name)
                self._named[request.name] = engine, context
            self._end(request)
            return
        request.n_said, request.state = len(context), "decode"
        eos_ids, tokenizer = engine.alone.eos_ids, engine.tokenizer
        request.answer = Answer(request.options, eos_ids, tokenizer, request.result, context.token_ids)
        self._say(request)

    def _end(self, request: Request, error: BaseException | None = None) -> None:
        """End a request, and keep its context for later ones."""
        if request in self._running:
            self._running.remove(request)
        result, context = request.result, request.context
        request.state, request.context = "done", None
        with suppress(Exception):
            request.closing.close()
        is_named = context is not None and context in self.contexts.values()
        if error is None and not result.finish_reason and not is_named:
            result.finish_reason = "cancelled"
        self._totals["decode_tokens"] += len(result.token_ids)
        try:
            if context is not None:
                result.stats.memory, result.stats.traffic = context.cache.bytes_by_tier, context.cache.traffic
                result.warning = result.warning or request.engine.beyond(len(context))
                del context.token_ids[max(context.cache.n_tokens, request.n_said and len(context)) :]
                ALLOWANCE.give_back(context.cache, len(context))
                if isinstance(error, DataError):
                    self._prefixes.forget(context, error)
                if not is_named and request.start is None and self._keeps and request.is_sound:
                    self._prefixes.put(request.engine, context)
        except Exception as failure:
            error = error or failure
        request.channel.put(error)
        self._wake()

    # What follows is for the callers' threads again.

    def close(self, drain_s: float = 0.0) -> None:
        """Take no more requests, let running ones go on for `drain_s` seconds, and save contexts that are not saved.

        Contexts are saved only with a `cache_dir`. An interpreter that ends without `close` saves no more contexts.
        """
        if threading.get_ident() in self._own_threads and self._thread.is_alive():
            raise UsageError("a request's callback cannot close its batch; cancel the request, or close later")
        self._stop(drain_s, save=self._keeps)
        atexit.unregister(self._exit)

    def _exit(self) -> None:
        """End the threads before the interpreter ends: a thread within a library's code would abort the process."""
        if os.getpid() == self._process:
            self._stop(0.0, save=False)

    def _stop(self, drain_s: float, *, save: bool) -> None:
        with self._changed:
            self._ending = min(self._ending or float("inf"), time.perf_counter() + drain_s)
            self._changed.notify_all()
        self._thread.join()
        self._decoder.shutdown()
        self._prefixes.close(save=save)
        for context in self.contexts.values():
            with suppress(LceError):
                context.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.close)
