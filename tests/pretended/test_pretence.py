"""The pretended GPU is as strict as CUDA, as late, and counts."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lce.kernels.choose import scores
from tests.command import within
from tests.pretended import Gpus, pretended_gpus

MODES = pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])


@MODES
def test_operators_give_what_they_give_on_a_cpu(gpus: Gpus, mode: type) -> None:
    with mode():
        x = torch.arange(24.0).view(4, 6)
        y = x.to("cuda")
        assert (y.is_cuda, y.is_cpu, y.device) == (True, False, torch.device("cuda:0"))
        view = y[1:3, 2:4]
        view.mul_(2)
        x[1:3, 2:4].mul_(2)
        y[0] = 7.0
        x[0] = 7.0
        y[:, torch.tensor([0, 5], device="cuda")] += 1
        x[:, [0, 5]] += 1
        y.masked_fill_(y > 30, torch.tensor(1.0))  # a number on the CPU is an argument of the kernel
        x.masked_fill_(x > 30, 1.0)
        out = torch.empty(4, 4, device="cuda")
        assert torch.matmul(y, y.mT, out=out) is out
        assert torch.equal(out.cpu(), x @ x.mT)
        assert (view.stride(), view.storage_offset()) == ((6, 1), 8)
        assert y.to("cuda") is y


FLASH_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
REFUSED: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "a sum with the CPU": (lambda x: x + torch.ones(4), "same device"),
    "a result on the CPU": (lambda x: torch.add(x, x, out=torch.empty(4)), "same device"),
    "an index on the CPU": (lambda x: x.index_select(0, torch.tensor([1])), "same device"),
    "values on the CPU": (lambda x: x.index_put_((torch.tensor([1, 2]),), torch.ones(2)), "same device"),
    "another GPU": (lambda x: x + x.to("cuda:1"), "same device"),
    "a third GPU": (lambda x: x.to("cuda:2"), "invalid device"),
    "numpy": (lambda x: x.numpy(), "can't convert cuda:0"),
    "integers in a product": (lambda x: x.long()[None] @ x.long()[:, None], "not implemented"),
    "the CPU's flash kernel": (lambda x: FLASH_ON_CPU(*[x.view(1, 1, 1, 4)] * 3), "Could not run"),
    "a kernel of Numba": (lambda x: scores.scores_of_few(x.view(1, 1, 4), x.view(1, 1, 4)), "with the CPU"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cuda_refuses(case: str) -> None:
    call, message = REFUSED[case]
    with pretended_gpus(2), pytest.raises((RuntimeError, TypeError, NotImplementedError), match=message):
        call(torch.ones(4, device="cuda"))


COUNTED: dict[str, tuple[Callable[[Tensor], object], int, int]] = {
    "item": (lambda x: x.sum().item(), 1, 0),
    "tolist": (lambda x: x.tolist(), 1, 0),
    "bool": (lambda x: bool((x == x).all()), 1, 0),
    "cpu": (lambda x: x.cpu(), 1, 0),
    "nonzero": (lambda x: x.nonzero(), 1, 0),
    "a mask": (lambda x: x[x > 0], 1, 0),
    "a mask to fill": (lambda x: x.__setitem__(x > 0, 1.0), 0, 0),
    "repeats": (lambda x: x.repeat_interleave(x.long()), 1, 0),
    "repeats of a known sum": (lambda x: x.repeat_interleave(x.long(), output_size=4), 0, 0),
    "a list of indices": (lambda x: x[[0, 1]], 0, 1),
    "tensor": (lambda x: torch.tensor([1, 2], device="cuda"), 0, 1),
    "to": (lambda x: torch.ones(2).to("cuda"), 0, 1),
    "full": (lambda x: torch.full((2,), 3.0, device="cuda"), 0, 0),
    "between places of the device": (lambda x: x.clone().copy_(x).double(), 0, 0),
}


@pytest.mark.parametrize("case", COUNTED)
def test_waiting_and_uploads_are_counted(case: str, gpus: Gpus) -> None:
    call, syncs, uploads = COUNTED[case]
    x = torch.ones(4, device="cuda")
    with gpus.counting() as counts:
        call(x)
    assert (counts.syncs, counts.uploads) == (syncs, uploads), counts


def test_memory(gpus: Gpus) -> None:
    x, pinned = torch.empty(1000, device="cuda"), torch.empty(1000, pin_memory=True)
    assert x.isnan().all()
    assert torch.cuda.memory_allocated() == 4096
    assert [y.is_pinned() for y in (pinned[3:], torch.ones(2))] == [True, False]
    inner, view = x.inner, x[5:]
    del x
    view.zero_()
    assert torch.cuda.mem_get_info() == (gpus.memory - 4096, gpus.memory)
    del view
    assert torch.cuda.memory_allocated() == 0
    assert inner.isnan().all(), "freed memory is overwritten"


def test_other_threads_and_devices() -> None:
    with pretended_gpus(2):
        assert within(lambda: torch.ones(2, device="cuda") * 2).is_cuda
        with torch.cuda.device(1):
            assert torch.zeros(1, device="cuda").device.index == 1 == torch.cuda.current_device()
        side, x = torch.cuda.Stream(0), torch.ones(2, device="cuda:0")
        with torch.cuda.stream(side):
            y = (x + 1).to("cuda:1") * 2  # in order with both
        assert y.tolist() == [4, 4]
        torch.cuda.synchronize(0)
    assert not torch.cuda.is_available()


@MODES
def test_work_is_done_when_something_waits_for_it(gpus: Gpus, mode: type) -> None:
    with mode():
        side, x = torch.cuda.Stream(), torch.zeros(4, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x[1:3] += 5
            y = x + 1
            done = side.record_event()
            x.mul_(2)
        assert x.inner.tolist() == [0, 0, 0, 0]
        assert y.inner.isnan().all()
        torch.cuda.current_stream().wait_event(done)
        assert y.tolist() == [1, 6, 6, 1]
        assert x.inner.tolist() == [0, 5, 5, 0], "what was queued after the event"
        torch.cuda.synchronize()
        assert x.tolist() == [0, 10, 10, 0]
        torch.cuda.current_stream().wait_stream(side)


@pytest.mark.parametrize("waits", [True, False])
def test_copies_to_and_from_pinned_memory(waits: bool) -> None:
    def copy() -> None:
        with pretended_gpus() as gpus:
            x, target = torch.ones(2, device="cuda"), torch.empty(2, pin_memory=True)
            with gpus.counting() as counts:
                target.copy_(x, non_blocking=True)
                event = torch.cuda.current_stream().record_event()
            assert counts.syncs == 0
            assert target.isnan().all()
            event.synchronize()
            assert target.tolist() == [1, 1]
            x.copy_(target, non_blocking=True)
            if waits:
                torch.cuda.synchronize()
            target.zero_()
            assert x.tolist() == [1, 1]

    if waits:
        copy()
    else:
        with pytest.raises(AssertionError, match="pinned memory was written"):
            copy()


@pytest.mark.parametrize("careful", [None, "record", "wait"])
def test_memory_that_another_stream_uses_must_be_recorded(careful: str | None) -> None:
    def drop() -> None:
        with pretended_gpus():
            side, x = torch.cuda.Stream(), torch.ones(2, device="cuda")
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                y = x + 1
            if careful == "record":
                x.record_stream(side)
            elif careful == "wait":
                torch.cuda.current_stream().wait_stream(side)
            del x
            torch.cuda.current_stream().wait_stream(side)
            assert y.tolist() == [2, 2] or careful is None
            torch.cuda.synchronize()

    if careful is None:
        with pytest.raises(AssertionError, match="record_stream"):
            drop()
    else:
        drop()


@MODES
def test_a_graph_reads_the_device_anew(gpus: Gpus, mode: type) -> None:
    with mode():
        position, buffer = torch.zeros(1, dtype=torch.int64, device="cuda"), torch.zeros(4, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = (buffer.index_select(0, position) + 0) * 2 + 1  # the sum is the graph's own
            buffer.index_fill_(0, position, 7.0)
            position.add_(1)
        assert buffer.tolist() == [0, 0, 0, 0], "nothing is done while a graph captures"
        assert found.isnan().all()
        buffer.copy_(torch.arange(4.0))
        seen = []
        for _ in range(3):
            graph.replay()
            seen += found.tolist()
        assert (seen, buffer.tolist()) == ([1, 3, 5], [7, 7, 7, 3])
        del buffer
        with pytest.raises(RuntimeError, match="freed since it was captured"):
            graph.replay()


UNCAPTURED: dict[str, Callable[[Tensor], object]] = {"item": lambda x: x[0].item()}
UNCAPTURED |= {"an upload": lambda x: x.copy_(torch.ones(4)), "synchronize": lambda x: torch.cuda.synchronize()}
UNCAPTURED |= {"pinned memory": lambda x: torch.empty(4, pin_memory=True)}


@pytest.mark.parametrize("case", UNCAPTURED)
def test_what_a_capture_refuses(gpus: Gpus, case: str) -> None:
    x = torch.ones(4, device="cuda")
    with pytest.raises(RuntimeError, match="not permitted when str"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        UNCAPTURED[case](x)
    x.tolist()
