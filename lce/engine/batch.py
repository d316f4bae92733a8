"""Answers many requests of one engine at once. Each has a context, a method and a sampling of its own.

On a CPU, the bits of an answer do not depend on the requests beside it, nor on kept tokens that were read. Kept tokens
that were generated have other bits than read ones: `repeatable` keeps none of them.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Self

from lce.engine.arguments import Prompt, Prompts
from lce.engine.context import Context, Unique, own_context
from lce.engine.lanes import MOST_LANES
from lce.engine.options import CACHE_BUDGET
from lce.engine.planning import ALLOWANCE
from lce.engine.prefixes import PrefixCache
from lce.engine.requests import BatchStream, Request
from lce.engine.running import checked_options, prompt_ids, seeded
from lce.engine.scheduler import Scheduler
from lce.engine.setup import Setup
from lce.engine.stream import Generation
from lce.errors import UsageError, shown
from lce.files import path_of
from lce.methods.base import Method
from lce.methods.registry import as_method, make, with_knobs
from lce.models.products import SHARED_ROWS
from lce.sizes import count, in_bytes
from lce.system import free_host_memory
from lce.tokenizer.chat import ChatText

MOST_METHODS = 32  # engines with other methods that a batch keeps


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
        self,
        setup: Setup,
        max_lanes: int | str | None = None,
        max_waiting: int | str = 256,
        cache_dir: str | Path | None = None,
        cache_budget: int | str = CACHE_BUDGET,
        cache_memory: int | str | None = None,
        *,
        repeatable: bool = False,
        reuse: bool = True,
    ) -> None:
        """Begin a batch: see `Engine.batch`. Without `reuse`, no context is kept for later requests."""
        self.setup = setup
        wanted = usual_lanes(setup) if max_lanes is None else max_lanes
        self.max_lanes = count(wanted, "max_lanes", most=MOST_LANES)
        self.max_waiting = count(max_waiting, "max_waiting", least=0)
        folder, budget = None, in_bytes(cache_budget, "cache_budget")
        if cache_dir is not None:
            folder = path_of(cache_dir, "cache_dir")
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(f"cache_dir is {shown(str(folder))}: {error.strerror}; name another folder") from None
        quarter = (free_host_memory() or 8 << 30) // 4
        memory = quarter if cache_memory is None else in_bytes(cache_memory, "cache_memory")
        self._prefixes = PrefixCache(folder, memory, budget, reuse, repeatable)
        self._choosing = threading.Lock()  # for `_using`, so that each method has one setup
        self._using = lru_cache(MOST_METHODS)(setup.using)
        self._prefixes.learn(setup)
        self._scheduler = Scheduler(setup.model, setup.recorder, self.max_lanes, self.max_waiting, self._prefixes)
        self._process = os.getpid()
        atexit.register(self._at_exit)

    def setup_of(self, method: str | Method | Setup | None = None, options: Mapping[str, Any] | None = None) -> Setup:
        """Return the setup for a method and its knobs, with the batch's model; the batch's own setup for None.

        A `Setup` is returned as it is. Raises `UsageError` for a method or knobs that cannot be used.
        """
        if not options and (method is None or isinstance(method, Setup)):
            return method or self.setup
        named = with_knobs(self.setup.method.label if method is None else method, options)
        method = as_method(make(named) if isinstance(named, str) else named)  # `as_method` would run a file by its name
        with self._choosing:
            return self.setup if method == self.setup.method else self._using(method)

    def stream(
        self,
        prompt: Prompt,
        *,
        method: str | Method | Setup | None = None,
        method_options: Mapping[str, Any] | None = None,
        context: Context | None = None,
        keep_context: bool = False,
        **options: Any,
    ) -> BatchStream:
        """Ask for the answer to a prompt: text, token ids, or a rendered chat. Returns at once.

        `method` and `method_options` are the request's own method and knobs; `method` may be the `setup` of a stream.
        The prompt continues `context`, a context of an engine with this method. With `keep_context`, the stream's
        `context` has prompt and answer when the stream has ended; it is the caller's, and is not kept for other
        requests. Options are those of `Engine.generate`. Raises `UsageError` for what cannot be used, `CapacityError`
        for what would not fit even alone, and `BusyError` if the queue is full.
        """
        return self._ask(prompt, method, method_options, context, options, "context" if keep_context else "")

    def chat(self, messages: str | Sequence[Mapping[str, Any]], **how: Any) -> BatchStream:
        """Ask for the answer to messages, or to a user's text, as `Engine.chat` does. Takes what `stream` takes."""
        asked = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        text = self.setup.tokenizer.render_chat(asked, following=how.get("context") is not None)
        return self.stream(text, **self.setup.sampling_for(how))

    def read(
        self,
        prompt: Prompt,
        *,
        method: str | Method | Setup | None = None,
        method_options: Mapping[str, Any] | None = None,
        context: Context | None = None,
        keep_context: bool = False,
    ) -> BatchStream:
        """Read a prompt. The stream ends, without pieces, when it is read; its `context` is then the caller's own.

        The context belongs to the engine of the stream's `setup`. Without `keep_context`, later requests may begin with
        a copy of it. Arguments and errors are those of `stream`.
        """
        return self._ask(prompt, method, method_options, context, None, "context" if keep_context else "fork")

    def _ask(
        self,
        prompt: Prompt,
        method: str | Method | Setup | None,
        knobs: Mapping[str, Any] | None,
        context: Context | None,
        given: Mapping[str, Any] | None,
        gives: Literal["", "context", "fork"],
    ) -> BatchStream:
        """Submit a request: see `stream`. Without options in `given`, the prompt is only read."""
        if os.getpid() != self._process:
            raise UsageError("this batch runs in the process that made it; make another one here")
        setup = self.setup_of(method, knobs)
        start = own_context(setup, context)
        options = seeded(checked_options(setup, {"max_tokens": 1} if given is None else given, prompt))
        chat = prompt if isinstance(prompt, ChatText) else None
        ids = prompt_ids(setup, prompt, start)
        request = Request(setup, chat, ids, options, start, given is None, gives)
        ALLOWANCE.check_alone(setup.layout, len(ids) + options.max_tokens)
        request.asked = time.perf_counter()
        request.result.stats.prompt_tokens = len(ids)
        request.result.logprobs = None if options.logprobs is None else []
        request.result.seed = options.seed
        before, rope = (0, None) if start is None else (len(start), start.rope)
        request.result.warning = setup.warn(len(ids) + before, rope)
        self._scheduler.submit(request)
        return BatchStream(request)

    def gauges(self) -> dict[str, float]:
        """Return figures about the batch: requests now, tokens so far, and the share of memory that contexts use."""
        return self._scheduler.gauges()

    def close(self, drain_s: float = 0.0) -> None:
        """Take no more requests, let running ones go on for `drain_s` seconds, and save contexts that are not saved.

        Contexts are saved only with a `cache_dir`. An interpreter that ends without `close` saves no more contexts.
        """
        if not isinstance(drain_s, int | float) or not 0 <= drain_s < float("inf"):
            raise UsageError(f"drain_s is {shown(drain_s)}; expected a number of seconds")
        if threading.get_ident() in self._scheduler.threads and self._scheduler.thread.is_alive():
            raise UsageError("a request's callback cannot close its batch; cancel the request, or close later")
        self._stop(drain_s, save=True)
        atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        """End the threads before the interpreter ends: a thread within a library's code would abort the process."""
        if os.getpid() == self._process:
            self._stop(0.0, save=False)

    def _stop(self, drain_s: float, *, save: bool) -> None:
        self._scheduler.close(drain_s)
        self._prefixes.close(save=save)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.close)


def usual_lanes(setup: Setup) -> int:
    """Return how many requests run at once where nobody says it: on a CPU, as many as share products."""
    return MOST_LANES if setup.device.type == "cuda" else SHARED_ROWS


def answers(setup: Setup, prompts: Prompts, options: Mapping[str, Any]) -> list[Generation]:
    """Return the answers to several prompts, for `Engine.generate`."""
    context = checked_options(setup, options).context
    read = [each if isinstance(each, ChatText) else prompt_ids(setup, each, context) for each in prompts]
    setup.check_undivided("a list of prompts", "give them one by one")
    with Batch(setup, min(len(read), usual_lanes(setup)), len(read), reuse=False) as batch:
        return [stream.finish() for stream in [batch.stream(each, **options) for each in read]]
