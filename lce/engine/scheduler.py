"""Runs the requests of a batch in threads of their own.

One pass decodes a token of every answer; then a block of one prompt is read, and so on. Every other block is of the
oldest prompt; a block between is of the shortest prompt, if that is much shorter. While a block is read on a CPU, its
kernels run in slices, and between two slices the answers get their next token. The length of a slice follows from the
time of a pass. Prompts are read in one thread and answers decoded in another, and only one of the two works at a time.

A request begins with the longest prefix that a kept context holds: see `lce.engine.prefixes`. Memory for prompt and
answer is reserved before the prompt is read. If there is none, the request waits until others end, and kept contexts
leave memory. Up to `MOST_OVERTAKING` later requests that fit may begin before it.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Literal

import torch

from lce.cache.kv import off_grid
from lce.engine.answer import Answer
from lce.engine.context import Context, new_context, reserve
from lce.engine.lanes import Recorder, forward
from lce.engine.planning import ALLOWANCE
from lce.engine.prefixes import PrefixCache
from lce.engine.requests import Request
from lce.engine.running import append, goes_on, lane_of
from lce.engine.stream import Piece
from lce.errors import BusyError, CapacityError, DataError, UsageError
from lce.models.layers import Model
from lce.models.products import Slices
from lce.progress import reported
from lce.system import free_host_memory

SLOWDOWN = 1.6  # A pass of decode and the slice of prefill after it take so many times the shortest pass of decode.
FORGET = 1.002  # With each pass, what counts as the shortest one grows by this factor.
LEAST_SLICE_S, IDLE_SLICE_S = 0.001, 0.05
SHORTER = 4  # A prompt overtakes the oldest one if it has so many times fewer tokens left to read.
MOST_OVERTAKING = 16
BESIDE = 2048  # the most tokens of a prompt that a GPU reads while answers wait for their next token
RETRY_S = 0.05  # between two looks whether a request need wait no longer


class Scheduler:
    """Runs requests of contexts of one model, up to `max_lanes` at once; `max_waiting` more wait in order."""

    def __init__(
        self, model: Model, recorder: Recorder | None, max_lanes: int, max_waiting: int, prefixes: PrefixCache
    ) -> None:
        self.model, self.recorder, self.prefixes = model, recorder, prefixes
        self.max_lanes, self.max_waiting = max_lanes, max_waiting
        self.totals: Counter[str] = Counter()
        self._changed = prefixes.changed  # guards the queue
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # in the order in which they began
        self._overtook = False  # whether the last block was not of the oldest prompt
        self._ending: float | None = None  # the time until which running requests may go on; None: no end is planned
        self._slice_s = 0.0  # the seconds of the next slice of prefill
        self._shortest_s: dict[int, float] = {}  # by the number of lanes: the time of a pass of decode at its fastest
        self._slices = Slices(self._pause)
        # A thread of its own for decode: prefill, which it interrupts, goes on with what its thread keeps in memory.
        self._decoder = ThreadPoolExecutor(1, thread_name_prefix="lce-decode")
        self.threads: set[int] = set()  # those in which requests' callbacks are called
        self.thread = threading.Thread(target=self._work, name="lce-batch", daemon=True)
        self.thread.start()

    def submit(self, request: Request) -> None:
        """Add a request to the queue. Raises `BusyError` if the queue is full or closed."""
        request.threads = self.threads
        with self._changed:
            if self._ending is not None:
                raise BusyError("the batch is closed; ask another one")
            if len(self._waiting) >= self.max_waiting + self.max_lanes - len(self._running):
                raise BusyError(f"{len(self._waiting)} requests are waiting, as many as may; ask again later")
            self._waiting.append(request)
            self._changed.notify_all()

    def gauges(self) -> dict[str, float]:
        """Return figures: requests now, tokens so far, and the share of memory that contexts use."""
        held = 0
        for context in [each.context for each in [*self._running]]:
            with suppress(UsageError, RuntimeError):  # it was closed just now, or its memory is being rearranged
                held += 0 if context is None else sum(context.cache.bytes_by_tier.values())
        kept, free = self.prefixes.memory_bytes, free_host_memory() or 0
        usage = (held + kept) / max(1, held + kept + free)
        found = {"running": len(self._running), "waiting": len(self._waiting), "contexts": self.prefixes.n_contexts}
        counts = {name: self.totals[name] for name in ("prompt_tokens", "cached_tokens", "decode_tokens")}
        counts |= self.prefixes.unsaved
        return {**found, **counts, "kept_bytes": kept, "most_kept_bytes": self.prefixes.memory, "kv_usage": usage}

    def close(self, drain_s: float) -> None:
        """Take no more requests, let running ones go on for `drain_s` seconds, and end the threads."""
        with self._changed:
            self._ending = min(self._ending or float("inf"), time.perf_counter() + drain_s)
            self._changed.notify_all()
        self.thread.join()
        self._decoder.shutdown()

    def _work(self) -> None:
        """Run requests until the batch is closed."""
        self.threads.add(threading.get_ident())
        with torch.inference_mode():
            while True:
                with self._changed:
                    while not (self._running or self._waiting):
                        if self._ending is not None:
                            return
                        self._changed.wait()
                    if self._ending is not None and time.perf_counter() >= self._ending:
                        for request in (*self._waiting, *self._running):
                            request.cancelled = True
                try:
                    began = self._admit()
                    self._decode()
                    if not self._read() and not began and not self._running:
                        with self._changed:
                            self._changed.wait(RETRY_S)  # for a context that is being saved, or for memory
                except BaseException as error:  # a fault of ours: it must not end the thread, for others wait for it
                    for request in [*self._running]:
                        self._end(request, error)

    def _admit(self) -> bool:
        """Let requests begin while there are lanes, in their order but for those that wait. Return whether any did."""
        with self._changed:
            waiting = list(self._waiting)
        short: list[Request] = []  # of memory
        n_before = len(self._running)
        for request in waiting:
            if request.cancelled:
                self._end(request)
            elif len(self._running) < self.max_lanes and all(each.n_overtaking < MOST_OVERTAKING for each in short):
                self._try(request)
                if request.waits_for == "memory":
                    short.append(request)
                elif request.state == "prefill":
                    for each in short:
                        each.n_overtaking += 1
        return len(self._running) > n_before

    def _try(self, request: Request) -> None:
        """Begin a request unless that failed just now; `waits_for` then says why."""
        if not request.waits_for or time.perf_counter() >= request.tried + RETRY_S:
            request.waits_for = ""
            try:
                request.waits_for = self._begin(request)
            except BaseException as error:  # a callback may raise any, and it must not end the thread
                self._end(request, error)
            request.tried = time.perf_counter()

    def _decode(self) -> None:
        """Generate one token of every answer, and wait for that."""
        for request in [each for each in self._running if each.cancelled and each.state == "decode"]:
            self._end(request)
        asked = [each for each in self._running if each.state == "decode"]
        if asked:
            self._decoder.submit(self._decode_all, asked).result()

    @torch.inference_mode()
    def _decode_all(self, asked: Sequence[Request]) -> None:
        self.threads.add(threading.get_ident())
        began = time.perf_counter()
        pairs = [(each, each.context) for each in asked if each.context is not None]
        lanes = [lane_of(each.setup, context, context.uncached, decoding=True) for each, context in pairs]
        forward(self.model, lanes, self.recorder)
        for (request, context), lane in zip(pairs, lanes, strict=True):
            request.is_sound = lane.error is None
            try:
                lane.check()
                context.store_logits(lane)
                self._say(request, context, lane.likeliest)
            except BaseException as error:  # a callback may raise any, and it must not end the thread
                self._end(request, error)
        seconds = time.perf_counter() - began
        shortest = min(seconds, self._shortest_s.get(len(asked), seconds) * FORGET)
        self._shortest_s[len(asked)] = shortest
        self._slice_s = max(LEAST_SLICE_S, SLOWDOWN * shortest - seconds)

    def _say(self, request: Request, context: Context, likeliest: int | None = None) -> None:
        """Draw the next token of an answer, and hand its text over."""
        answer = request.answer
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
        return self._slice_s if self._decoding else IDLE_SLICE_S

    @property
    def _decoding(self) -> bool:
        return any(each.state == "decode" for each in self._running)

    def _read(self) -> bool:
        """Read a block of a prompt; return whether there was one."""
        for request in [each for each in self._running if each.cancelled]:
            self._end(request)
        prompts = [each for each in self._running if each.state == "prefill"]
        if not prompts:
            return False
        oldest, request = prompts[0], min(prompts, key=_n_left)
        if self._overtook or _n_left(request) * SHORTER > _n_left(oldest):
            request = oldest
        self._overtook = request is not oldest
        try:
            self._read_block(request)
        except BaseException as error:  # a callback may raise any, and it must not end the thread
            if not self._begins_again(request, error):
                self._end(request, error)
        return True

    def _begin(self, request: Request) -> Literal["", "context", "memory"]:
        """Find the context that a prompt continues, and reserve memory. Return what the request must wait for."""
        setup, options = request.setup, request.options
        context, is_busy = self.prefixes.beginning(request, self._running)
        if is_busy:
            return "context"
        ids, whole = request.ids, request.n_before + len(request.ids) + options.max_tokens
        try:
            if context is None:
                context = new_context(setup, whole)
            else:
                reserve(setup, context.cache, whole)
        except CapacityError:
            if context is not None:
                self.prefixes.keep(request, context)
            if self.prefixes.shrink(1) or self._running:
                return "memory"
            raise
        with self._changed:
            self._waiting.remove(request)
            self._running.append(request)
        request.context, request.state = context, "prefill"
        n_cached = min(len(context), context.cache.n_tokens) - request.n_before
        request.result.stats.read_before = request.n_read = max(0, n_cached)
        self.totals.update(prompt_tokens=len(ids), cached_tokens=request.n_read)
        context.token_ids.extend(ids[len(context) - request.n_before :])
        request.report = request.closing.enter_context(reported(options.progress, "prefill"))
        if context.logits is None and not context.uncached:
            context.cache.truncate(context.cache.nearest(context.cache.n_tokens - 1))
        return ""

    def _begins_again(self, request: Request, error: BaseException) -> bool:
        """Return whether a prompt is to be read anew, because a file of the cache with its beginning is damaged."""
        context, is_damage = request.context, isinstance(error, DataError) and not request.is_sound
        if context is None or not is_damage or not self.prefixes.forget(context, error):
            return False
        request.closing.close()
        request.context, request.state, request.is_sound, request.n_read = None, "waiting", True, 0
        with self._changed:
            self._running.remove(request)
            self._waiting.appendleft(request)
        return True

    def _read_block(self, request: Request) -> None:
        """Read the next block of a prompt; after the last one, draw the first token."""
        setup, context, stats = request.setup, request.context, request.result.stats
        assert context is not None
        beside = self._decoding and setup.device.type == "cuda" and setup.method.promised("plain")
        size = min(setup.block, BESIDE) if beside else setup.block
        if uncached := context.uncached[: size - off_grid(context.cache)]:
            request.is_sound = False
            append(setup, context, [uncached], slices=self._slices, decoding=goes_on(context, request.ids))
            request.is_sound = True
            request.n_read = min(len(request.ids), context.cache.n_tokens - request.n_before)
            if request.report is not None:
                request.report(context.cache.n_tokens, len(context))
        if request.cancelled or context.uncached:
            return
        stats.prefill_s = time.perf_counter() - request.asked
        if request.reads_only:
            request.result.finish_reason = "stop"
            self._end(request)
            return
        request.n_said, request.state = len(context), "decode"
        request.answer = Answer(request.options, setup.eos_ids, setup.tokenizer, request.result, context.token_ids)
        self._say(request, context)

    def _end(self, request: Request, error: BaseException | None = None) -> None:
        """End a request, and hand its context over, or keep it for later ones."""
        with self._changed:
            for requests in (self._waiting, self._running):
                if request in requests:
                    requests.remove(request)
        result, context = request.result, request.context
        request.state, request.context = "done", None
        with suppress(Exception):
            request.closing.close()
        if error is None:
            result.finish_reason = result.finish_reason or "cancelled"
        self.totals["decode_tokens"] += len(result.token_ids)
        try:
            if context is not None:
                result.stats.memory, result.stats.traffic = context.cache.bytes_by_tier, context.cache.traffic
                result.warning = result.warning or request.setup.beyond(len(context), rope=context.rope)
                del context.token_ids[max(context.cache.n_tokens, request.n_said and len(context)) :]
                ALLOWANCE.give_back(context.cache, context.cache.length)
                if isinstance(error, DataError):
                    self.prefixes.forget(context, error)
                if request.gives and error is None and result.finish_reason != "cancelled":
                    request.held = context if request.gives == "context" else context.fork()
                if request.is_sound and request.held is not context:
                    self.prefixes.keep(request, context)
        except Exception as failure:
            error = error or failure
        request.channel.put(error)
        with self._changed:
            self._changed.notify_all()


def _n_left(request: Request) -> int:
    """Return the number of tokens of a prompt that are to be read."""
    assert request.context is not None
    return len(request.context.token_ids) - request.context.cache.n_tokens
