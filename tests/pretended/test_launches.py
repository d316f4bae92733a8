"""Triton kernels on pretended GPUs, and how many of them a recorded decode step of a token launches."""

from collections import Counter
from pathlib import Path

import pytest
import torch

import lce
from lce.engine.graph import DriverSteps
from lce.engine.running import lane_of
from lce.engine.tape import CudaTape, Work
from lce.kernels.runtime import launching
from lce.methods import DualChunk, Full, LongHeads, Method, Quest
from tests.checkpoints import tokens
from tests.pretended import Gpus, pretended_gpus

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
ATTENTION = ["_append", "_merge_row", "_rows_together"]
CHOICE = ["_append", "_choose", "_merge_row", "_one_row", "_score"]
PRODUCTS = ["_product"] * 4
SUMMARY = ["_rotate", "_softmax", "_to_copy", "amax", "bmm", "div", "div", "mean", "mul", "sum", "sum"]
SUMMARY += ["_append", "_append", "_take_lanes", "_take_lanes", "_take_lanes"]
CASES: dict[str, tuple[Method, list[str]]] = {  # what a layer launches
    "completes": (LongHeads(chunk_size=17, chunks=4), [*ATTENTION, "_choose", "_score", *PRODUCTS, *SUMMARY]),
    "full": (Full(), ATTENTION + PRODUCTS),
    "dca": (DualChunk(chunk_size=16), ATTENTION + PRODUCTS),
    "longheads": (LongHeads(chunk_size=8, chunks=4, share="head"), CHOICE + PRODUCTS + ["_append"]),
    "quest": (Quest(page=8, budget=32, dense_layers=0), CHOICE + PRODUCTS + ["_rotate"]),
}
AROUND = 46  # what all layers share, the embedding and the head


@pytest.mark.parametrize(("name", "n_lanes"), [*((name, 1) for name in CASES), ("longheads", 3)])
def test_launches_of_a_step(
    name: str, n_lanes: int, triton_gpus: Gpus, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, expected = CASES[name]
    engine = lce.load(tiny_model, method, device="cuda", dtype="bfloat16")
    with monkeypatch.context() as patch:
        patch.setattr(launching, "installed", lambda: False)  # fast
        contexts = [engine.prefill(tokens(50), length=64) for _ in range(n_lanes)]
    for context in contexts:
        context.token_ids.append(7)
    counted = []
    for n_layers in (2, 1):
        monkeypatch.setattr(engine.setup.model, "_of_generated", engine.setup.model._of_generated[:n_layers])
        lanes = [lane_of(engine.setup, each, each.uncached, decoding=True) for each in contexts]
        graph = DriverSteps(engine.setup.model, lanes[0], CudaTape)
        bound, tape = graph._bound(lanes[0]), graph.tape
        assert bound is not None
        work = graph._prepared(lanes, bound).work

        def count(work: Work = work) -> None:
            with triton_gpus.counting() as counts:
                work()
            counted.append(Counter(counts.launched()))

        with torch.inference_mode():
            tape.record(count)  # nothing is run
    layer = counted[0] - counted[1]
    assert layer == Counter(expected)
    around = counted[1] - layer
    assert around.total() <= AROUND, around


@triton.jit
def add_one(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)


def test_a_kernel_runs_on_its_device() -> None:
    with pretended_gpus(2) as gpus:
        x = torch.arange(10.0, device="cuda:1")[2:]
        out = torch.empty(8, device="cuda:1")
        with gpus.counting() as counts:
            launching.launch(add_one, (2,), x, out, 7, BLOCK=4)
        assert (counts.launches, counts.syncs, out.tolist()[:7]) == (1, 0, [3, 4, 5, 6, 7, 8, 9])
        assert out[7].isnan(), "uninitialised memory"


@pytest.mark.parametrize("other", ["cpu", "cuda:1"])
def test_a_kernel_takes_no_memory_of_elsewhere(other: str) -> None:
    with pretended_gpus(2), pytest.raises((ValueError, RuntimeError), match=r"Pointer argument|memory of cuda:1"):
        launching.launch(add_one, (2,), torch.ones(8, device="cuda"), torch.empty(8, device=other), 8, BLOCK=4)


def test_a_graph_captures_kernels(gpus: Gpus) -> None:
    x, out = torch.zeros(4, device="cuda"), torch.empty(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launching.launch(add_one, (1,), x, out, 4, BLOCK=4)
        x.copy_(out)
    assert out.isnan().all()
    for _ in range(3):
        graph.replay()
    assert x.tolist() == [3] * 4
