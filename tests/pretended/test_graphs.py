"""CUDA graphs on pretended GPUs: captured work is done at replay, on the memory that it was captured with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.pretended import Gpus

MODES = pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])


@MODES
def test_a_graph_reads_the_device_anew(gpus: Gpus, mode: type) -> None:
    with mode():
        position, buffer = torch.zeros(1, dtype=torch.int64, device="cuda"), torch.zeros(4, device="cuda")
        baked = 1
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = buffer.index_select(0, position) * 2 + baked
            buffer.index_fill_(0, position, 7.0)
            position.add_(1)
        assert buffer.tolist() == [0, 0, 0, 0], "nothing is done while a graph captures"
        assert found.isnan().all()
        buffer.copy_(torch.arange(4.0))
        baked = 2
        seen = []
        for _ in range(3):
            graph.replay()
            seen += found.tolist()
        assert seen == [1, 3, 5], "a number is what it was"
        assert buffer.tolist() == [7, 7, 7, 3]
        with gpus.counting() as counts:
            graph.replay()
        assert (counts.launches, counts.syncs) == (1, 0)


REFUSED: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "cpu": lambda x: x.cpu(),
    "an upload": lambda x: x.copy_(torch.ones(4)),
    "nonzero": lambda x: x.nonzero(),
    "synchronize": lambda x: torch.cuda.synchronize(),
    "pinned memory": lambda x: torch.empty(4, pin_memory=True),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_capture_refuses(gpus: Gpus, case: str) -> None:
    x = torch.ones(4, device="cuda")
    with (
        pytest.raises(RuntimeError, match="not permitted when stream is capturing"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        REFUSED[case](x)
    x.tolist()


def test_memory_that_a_graph_reads_must_live(gpus: Gpus) -> None:
    x = torch.ones(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = (x + 1) * 2  # the sum is the graph's own
    graph.replay()
    assert y.tolist() == [4] * 4
    del x
    with pytest.raises(RuntimeError, match="freed since it was captured"):
        graph.replay()
