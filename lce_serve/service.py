"""What all requests share: the batch, its model's name, the settings and the counts of a running server."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import lce
from lce.engine.grammar import Vocabulary
from lce.engine.options import CACHE_BUDGET
from lce.methods import Method, available, make
from lce.progress import notice
from lce.sizes import in_bytes, size_text
from lce_serve.contexts import NamedContexts
from lce_serve.metrics import Metrics
from lce_serve.refusals import Refusal

T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """The settings of a server. Web pages of `origins` may read answers. `ping_s` is the longest silence of a stream.

    `hosts` are the valid names in the Host header while there is no key. With `open_metrics`, `/metrics` needs no key.
    """

    model: str
    key: str | None = None
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ("localhost", "127.0.0.1", "[::1]")
    open_metrics: bool = False
    ping_s: float = 5.0
    head_s: float = 10.0  # seconds that a client may take to send a request's head
    body_s: float = 60.0  # the same for its body
    send_s: float = 60.0  # seconds that a client may take to receive one event or an answer
    most_body: int = 64 << 20  # bytes of a body
    most_values: int = 4 << 20  # JSON values in a body; a prompt of token ids has one for each token
    most_depth: int = 64  # levels of nesting in a body
    most_headers: int = 100
    most_connections: int = 1024
    drain_s: float = 30.0


@dataclass(frozen=True)
class Load:
    """The model and contexts to load: arguments of `lce.load` and `Engine.batch`, and files of contexts by name."""

    loading: Mapping[str, Any]
    batch: Mapping[str, Any] = field(default_factory=dict)
    contexts: Mapping[str, str] = field(default_factory=dict)

    def begin(self, named: NamedContexts) -> Any:
        """Load the model, open the contexts into `named`, and return a batch."""
        batch = lce.load(**self.loading).batch(**self.batch)
        most, flag = f"{size_text(int(batch.gauges()['most_kept_bytes']))} of memory", "--cache-memory"
        if folder := self.batch.get("cache_dir"):
            disk = size_text(in_bytes(self.batch.get("cache_budget", CACHE_BUDGET), "--cache-budget"))
            most, flag = f"{most}, and {disk} of disk in {folder}", f"{flag} or --cache-budget"
        notice(f"contexts of ended requests may take {most}; {flag} sets another limit")
        try:
            for name, path in self.contexts.items():
                setup = batch.setup_of(_method_of(path))
                named.add(name, setup, lce.Engine(setup).open_context(path))
        except BaseException:
            batch.close()
            raise
        return batch


def _method_of(path: str) -> Method | None:
    """Return the method by which a file's text was read; None if that takes code, or another method for prompts."""
    found = lce.info(path)
    if isinstance(found, lce.ContextInfo) and found.method in available():
        return make(found.method, found.knobs)
    return None


def served_name(model: str) -> str:
    """Return the name under which a model is served: the last part of its path or id."""
    return model.rstrip("/").rpartition("/")[2].removesuffix(".gguf").replace("@", "-") or model


class OneThread:
    """Work in threads, one at a time. A thread goes on when its caller is cancelled, and the next call waits for it."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(1)

    async def call(self, work: Callable[[], T]) -> T:
        """Return the result of `work()`, called in a thread as soon as no other call's thread runs."""
        await self._free.acquire()
        task = asyncio.ensure_future(asyncio.to_thread(work))
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Future[Any]) -> None:
        self._free.release()
        if not task.cancelled():
            task.exception()  # asyncio complains of an error that nobody has seen


class Service:
    """The state of a server. `batch` is None while the model is loading."""

    def __init__(self, settings: Settings, batch: Any = None) -> None:
        self.settings = settings
        self.metrics, self.named = Metrics(settings.model), NamedContexts()
        self.started = int(time.time())
        self.draining = False
        self.active = 0  # requests that are being answered
        self.compiling, self._beside = OneThread(), OneThread()  # for grammars; for what works beside the batch
        self._batch: Any = None
        if batch is not None:
            self.serve(batch)

    def serve(self, batch: Any) -> None:
        """Answer requests by a batch from now on."""
        self._batch = batch
        self.metrics.watch(batch)

    async def beside(self, work: Callable[[threading.Event], T]) -> T:
        """Call `work(event)` in a thread beside the batch, one call at a time. The client's leaving sets the event."""
        given_up = threading.Event()
        try:
            return await self._beside.call(lambda: work(given_up))
        finally:
            given_up.set()

    @property
    def status(self) -> str:
        """`loading`, `ok` or `draining`."""
        return "draining" if self.draining else "loading" if self._batch is None else "ok"

    def check_ready(self) -> None:
        """Refuse a request that comes too early or too late."""
        if self.status != "ok":
            raise Refusal(503, f"the server is {self.status}; try again later", code=self.status)

    @property
    def batch(self) -> Any:
        """The batch. Refuses a request that comes too early or too late."""
        self.check_ready()
        return self._batch

    @property
    def engine(self) -> lce.Engine:
        """The batch's engine. Refuses a request that comes too early or too late."""
        return lce.Engine(self.batch.setup)

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary for grammars."""
        return self.engine.setup.vocabulary

    def context_of(self, model: str | None, context: str | None) -> str | None:
        """Return the named context that a request means, by `context` or by a model name `MODEL@context`.

        Refuses other models with 404, and unknown contexts with 404. A missing model is the one that is served.
        """
        name, _, behind = (model or self.settings.model).partition("@")
        if (model or self.settings.model) == self.settings.model:
            name, behind = self.settings.model, ""
        if name != self.settings.model:
            line = f"there is no model {name[:80]!r}; this is {self.settings.model!r}"
            raise Refusal(404, line, "model", "model_not_found")
        context = context or behind or None
        if context is not None:
            self.check_ready()
            self.named.get(context)
        return context


@dataclass
class Record:
    """The record of one request, for the log and the metrics. It never holds texts."""

    id: str
    endpoint: str = ""
    started: float = field(default_factory=time.monotonic)
    status: int = 0
    stream: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    first_token_s: float | None = None
    finish: str | None = None
    error: str | None = None
    replica: str | None = None  # the one that answered, if there are several
