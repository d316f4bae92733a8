"""Triton kernels on pretended GPUs."""

from __future__ import annotations

import pytest
import torch

from lce.kernels.cuda.launching import launch
from tests.pretended import Gpus, pretended_gpus

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


@triton.jit
def add_one(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)


def test_a_kernel_runs_on_its_device() -> None:
    with pretended_gpus(2) as gpus:
        x = torch.arange(10.0, device="cuda:1")[2:]
        out = torch.empty(8, device="cuda:1")
        with gpus.counting() as counts:
            launch(add_one, (2,), x, out, 7, BLOCK=4)
        assert counts.launches == 1
        assert counts.syncs == 0
        assert out.tolist()[:7] == [3, 4, 5, 6, 7, 8, 9]
        assert out[7].isnan(), "uninitialised memory"


@pytest.mark.parametrize("other", ["cpu", "cuda:1"])
def test_a_kernel_takes_no_memory_of_elsewhere(other: str) -> None:
    with pretended_gpus(2), pytest.raises((ValueError, RuntimeError), match=r"Pointer argument|memory of cuda:1"):
        launch(add_one, (2,), torch.ones(8, device="cuda"), torch.empty(8, device=other), 8, BLOCK=4)


def test_a_graph_captures_kernels(gpus: Gpus) -> None:
    x, out = torch.zeros(4, device="cuda"), torch.empty(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(add_one, (1,), x, out, 4, BLOCK=4)
        x.copy_(out)
    assert out.isnan().all()
    for _ in range(3):
        graph.replay()
    assert x.tolist() == [3] * 4
