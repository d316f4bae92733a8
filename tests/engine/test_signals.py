"""Real signals at random instants: context, cache and files are as before a call, or as after it."""

import gc
import os
import random
import signal
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lce
from lce.methods import Full, LongHeads
from tests.checkpoints import tokens

BLOCK = 16
QUESTION = tokens(40, seed=1)
ENGINES: dict[str, tuple[Any, dict[str, str]]] = {
    "full": (Full(), {}),
    "longheads": (LongHeads(chunk_size=8, chunks=4), {}),
    "in tiers": (LongHeads(chunk_size=8, chunks=4), {"kv_host_budget": "48KiB"}),
}
RUNS = 250  # of each call and engine
HEALED: list[torch.inference_mode] = []  # each ends an inference mode that an interruption left on, until it is freed
Alarm = Callable[[float, Callable[[], object]], KeyboardInterrupt | None]


@pytest.fixture
def alarm() -> Iterator[Alarm]:
    """Make a call, interrupted after so many seconds; returns the interruption, None where the call was faster."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def run(delay_s: float, call: Callable[[], object]) -> KeyboardInterrupt | None:
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, delay_s)
                call()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt as error:
            return error
        return None

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        yield run
    finally:
        signal.signal(signal.SIGALRM, before)
        gc.collect()
        if torch.is_inference_mode_enabled():  # PyTorch's, if a signal comes while one begins or ends within another
            HEALED.append(torch.inference_mode(False))
            HEALED[-1].__enter__()


class Calls:
    """The calls that are interrupted, over forks of one context, and what is true of their contexts."""

    def __init__(self, engine: lce.Engine, folder: Path) -> None:
        self.engine, self.path, self.opened_from = engine, folder / "files" / "saved.lce", folder / "base.lce"
        self.path.parent.mkdir()
        self.base = engine.prefill(tokens(75))
        engine.generate([], max_tokens=3, context=self.base)  # its last token is not cached
        self.base.save(self.opened_from)
        self._answers: dict[tuple[int, ...], list[int]] = {}

    def call(self, what: str, context: lce.Context) -> object:
        engine = self.engine
        calls: dict[str, Callable[[], object]] = {
            "generate": lambda: engine.generate(QUESTION, max_tokens=5, context=context),
            "stream": lambda: [*engine.stream(QUESTION, max_tokens=5, context=context)],
            "prefill": lambda: engine.prefill(QUESTION, context=context),
            "fork": context.fork,
            "truncate": lambda: context.truncate(50),
            "save": lambda: context.save(self.path, force=True),
            "open": lambda: engine.open_context(self.opened_from),
        }
        return calls[what]()

    def answer(self, context: lce.Context) -> list[int]:
        return self.engine.generate([7, 8, 9], max_tokens=4, context=context).token_ids

    def truth(self, token_ids: list[int]) -> list[int]:
        key = tuple(token_ids)
        if key not in self._answers:
            context = self.base.fork()
            n = next((i for i, (a, b) in enumerate(zip(context.token_ids, key, strict=False)) if a != b), None)
            context.truncate(min(len(context), len(key)) if n is None else n)
            self._answers[key] = self.answer(self.engine.prefill(token_ids[len(context) :], context=context))
        return self._answers[key]


def time_s(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


@pytest.mark.slow
@pytest.mark.timeout(840, method="thread")  # the alarm is what the test itself rings
@pytest.mark.parametrize("what", ["generate", "stream", "prefill", "fork", "truncate", "save", "open"])
@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::lce.errors.WindowWarning")
def test_a_signal_at_any_instant_leaves_all_as_before_or_as_after(
    name: str, what: str, tiny_model: Path, tmp_path: Path, alarm: Alarm
) -> None:
    method, options = ENGINES[name]
    spill = {"spill_dir": tmp_path} if options else {}
    calls = Calls(lce.load(tiny_model, method, block=BLOCK, **options, **spill), tmp_path)
    base, whole = calls.base, calls.base.fork()
    calls.call(what, whole)  # loads kernels
    forks = [base.fork() for _ in range(9)]
    durations_s = deque((time_s(lambda context=context: calls.call(what, context)) for context in forks), maxlen=9)
    draw, kept, n_interrupted = random.Random(what + name), list[object](), 0
    for _ in range(RUNS):
        calls.path.unlink(missing_ok=True)
        context = base.fork()
        began, delay_s = time.perf_counter(), draw.random() * statistics.median(durations_s)
        error = alarm(delay_s, lambda context=context: calls.call(what, context))
        if error is None:  # a machine's speed changes: the next delays follow what calls take now
            durations_s.append(time.perf_counter() - began)
        n_interrupted += error is not None
        kept[:] = [error] if what != "stream" else []  # as a notebook keeps a traceback, which keeps a stream open
        error, said = None, list(context.token_ids)
        if what == "stream" and len(said) > len(base):
            assert said == whole.token_ids[: len(said)]
            assert len(said) >= len(base) + len(QUESTION)
        else:
            assert said in (base.token_ids, whole.token_ids)
        context.hold()  # raises if the context is in use
        assert calls.answer(context) == calls.truth(said)
        found = os.listdir(calls.path.parent)
        assert found in ([], [calls.path.name])
        for path in [*([calls.path] if found else []), *([calls.opened_from] if what == "open" else [])]:
            with calls.engine.open_context(path) as opened:
                assert calls.answer(opened) == calls.truth(base.token_ids)
    assert n_interrupted > RUNS // 4
    del context
    kept.clear()
    gc.collect()
