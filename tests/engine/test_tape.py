"""A recording that fails costs time and nothing else, whatever fails, and wherever."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import lce
from lce.attention import Attention
from lce.engine.graph import TRIES, DriverSteps
from lce.engine.tape import OUTSTANDING, CudaTape
from lce.kernels.runtime import launching
from tests.engine.test_graph import METHODS, PROMPT, PlainRuns, graph_of, same_state
from tests.pretended import Gpus

NOT_PERMITTED = RuntimeError("CUDA error: operation not permitted when stream is capturing")
ERRORS = (NOT_PERMITTED, OSError("a kernel cannot be compiled"), MemoryError(), KeyError("x"))


class Failing:
    """Raises `error` at launch number `at` of the first `times` captures, counted from 0, or when a capture ends."""

    def __init__(self, gpus: Gpus, at: int | None, error: BaseException, times: int) -> None:
        self.gpus, self.at, self.error, self.times = gpus, at, error, times
        self.n_captures, self.seen, self._count = 0, 0, gpus.count

    def count(self, kind: str, what: str) -> None:
        graph = self.gpus.current_stream().graph
        if graph is not None and kind == "launches":
            assert not gc.isenabled(), "the collector may free what a capture must not"
            assert graph.mode == "relaxed"
            self.seen += 1
            if self.n_captures < self.times and self.seen - 1 == self.at:
                raise self.error
        self._count(kind, what)

    def end(self, graph: Any, end: Any) -> None:
        first, self.n_captures, self.last, self.seen = self.n_captures < self.times, self.n_captures + 1, self.seen, 0
        end(graph)
        if first and self.at is None:
            raise self.error


@contextmanager
def failing(gpus: Gpus, at: int | None, error: BaseException, times: int) -> Iterator[Failing]:
    from tests.pretended.streams import CUDAGraph

    found = Failing(gpus, at, error, times)
    with pytest.MonkeyPatch.context() as patch:
        end = CUDAGraph.capture_end
        patch.setattr(gpus, "count", found.count)
        patch.setattr(CUDAGraph, "capture_end", lambda graph: found.end(graph, end))
        yield found


@pytest.fixture
def engine(tiny_model: Path, gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> lce.Engine:
    monkeypatch.setattr(Attention, "choose", lambda name: PlainRuns())
    monkeypatch.setattr(launching, "installed", lambda: False)
    return lce.load(tiny_model, METHODS["longheads"], block=32, device="cuda", dtype="float32")


def asked(engine: lce.Engine) -> tuple[list[int], lce.Context, DriverSteps]:
    context = engine.prefill(PROMPT, length=200)
    ids = engine.generate([7, 8], context=context, max_tokens=8).token_ids
    return ids, context, graph_of(engine, context)


@pytest.mark.parametrize("times", [1, TRIES])
def test_a_capture_that_fails_costs_time_alone(engine: lce.Engine, gpus: Gpus, times: int) -> None:
    with failing(gpus, None, NOT_PERMITTED, 0) as none:
        truth, right, _ = asked(engine)
    for at, error in zip((0, none.last // 2, none.last - 1, None), ERRORS, strict=True):
        engine.setup.recorder.recorded.clear()
        with failing(gpus, at, error, times):
            ids, context, graph = asked(engine)
        assert ids == truth, (at, error)
        same_state(context, right)
        assert gc.isenabled()
        assert graph.n_failed == times
        assert bool(graph.refused) == (times == TRIES)
        assert (graph.n_replayed > 0) == (times < TRIES)
        assert gpus.current_stream() is gpus.defaults[0]


def test_ctrl_c_in_a_capture_leaves_the_context_as_before(engine: lce.Engine, gpus: Gpus) -> None:
    truth = asked(engine)[0]
    context = engine.prefill(PROMPT, length=200)
    with failing(gpus, 3, KeyboardInterrupt(), 1), pytest.raises(KeyboardInterrupt):
        engine.generate([7, 8], context=context, max_tokens=8)
    assert gc.isenabled()
    same_state(context, engine.prefill(context.token_ids, length=200))
    rest = [7, 8][max(0, len(context.token_ids) - len(PROMPT)) :]
    ids = engine.generate(rest, context=context, max_tokens=4).token_ids
    assert (context.token_ids + ids[-1:])[len(PROMPT) :][:6] == [7, 8, *truth[:4]]


def test_numbers_are_read_in_their_order_from_memory_that_is_made_once(gpus: Gpus) -> None:
    tape, numbers = CudaTape(torch.device("cuda:0")), torch.zeros(2, dtype=torch.int64, device="cuda")
    readers = []
    for i in range(7):
        numbers.fill_(i)
        readers.append(tape.reader(numbers))
        if len(readers) == OUTSTANDING:
            assert readers.pop(0)() == [i - 1] * 2
