"""The pretended GPU is as strict as CUDA, and counts."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lce.kernels.cpu import scores
from tests.pretended import Gpus, pretended_gpus

MODES = pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])


@MODES
def test_operators_give_what_they_give_on_a_cpu(gpus: Gpus, mode: type) -> None:
    with mode():
        x = torch.arange(24.0).view(4, 6)
        y = x.to("cuda")
        assert y.is_cuda
        assert not y.is_cpu
        assert y.device == torch.device("cuda:0")
        view = y[1:3, 2:4]
        view.mul_(2)
        x[1:3, 2:4].mul_(2)
        y[0] = 7.0
        x[0] = 7.0
        y[:, torch.tensor([0, 5], device="cuda")] += 1
        x[:, [0, 5]] += 1
        out = torch.empty(4, 4, device="cuda")
        assert torch.matmul(y, y.mT, out=out) is out
        assert torch.equal(out.cpu(), x @ x.mT)
        assert torch.equal(torch.einsum("ij,kj->ik", y, y).cpu(), x @ x.mT)
        assert y.reshape(-1).is_contiguous()
        assert (view.stride(), view.storage_offset()) == ((6, 1), 8)
        assert torch.nn.functional.rms_norm(y, (6,), torch.ones(6, device="cuda")).is_cuda
        assert y.to("cuda") is y
        assert y.new_zeros(2).is_cuda
        assert y.cuda().cpu().is_cpu


REFUSED: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "a sum with the CPU": (lambda x: x + torch.ones(4), "same device"),
    "a result on the CPU": (lambda x: torch.add(x, x, out=torch.empty(4)), "same device"),
    "a CPU tensor and a number of the GPU": (lambda x: torch.ones(4) + x.sum(), "same device"),
    "an index on the CPU": (lambda x: x.index_select(0, torch.tensor([1])), "same device"),
    "values on the CPU": (lambda x: x.index_put_((torch.tensor([1, 2]),), torch.ones(2)), "same device"),
    "another GPU": (lambda x: x + x.to("cuda:1"), "same device"),
    "a third GPU": (lambda x: x.to("cuda:2"), "invalid device"),
    "numpy": (lambda x: x.numpy(), "can't convert cuda:0"),
    "integers in a product": (lambda x: x.long()[None] @ x.long()[:, None], "not implemented"),
    "the CPU's flash kernel": (
        lambda x: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*[x.view(1, 1, 1, 4)] * 3),
        "Could not run",
    ),
    "a kernel of Numba": (lambda x: scores.scores_of_few(x.view(1, 1, 4), x.view(1, 1, 4)), "with the CPU"),
}


@MODES
@pytest.mark.parametrize("case", REFUSED)
def test_what_cuda_refuses(case: str, mode: type) -> None:
    call, message = REFUSED[case]
    with pretended_gpus(2), mode(), pytest.raises((RuntimeError, TypeError, NotImplementedError), match=message):
        call(torch.ones(4, device="cuda"))


@MODES
def test_what_cuda_permits(gpus: Gpus, mode: type) -> None:
    with mode():
        x = torch.zeros(4, device="cuda")
        x.add_(torch.tensor(2.0))  # a number on the CPU is an argument of the kernel
        x.masked_fill_(x > 3, torch.tensor(1.0))
        x[torch.tensor([0])] = 1.0
        x[1:].copy_(torch.ones(3))
        assert x.tolist() == [1, 1, 1, 1]


COUNTED: dict[str, tuple[Callable[[Tensor], object], int, int]] = {
    "item": (lambda x: x.sum().item(), 1, 0),
    "tolist": (lambda x: x.tolist(), 1, 0),
    "bool": (lambda x: bool((x == x).all()), 1, 0),
    "cpu": (lambda x: x.cpu(), 1, 0),
    "nonzero": (lambda x: x.nonzero(), 1, 0),
    "unique": (lambda x: x.unique(), 1, 0),
    "a mask": (lambda x: x[x > 0], 1, 0),
    "a mask to fill": (lambda x: x.__setitem__(x > 0, 1.0), 0, 0),
    "repeats": (lambda x: x.repeat_interleave(x.long()), 1, 0),
    "repeats of a known sum": (lambda x: x.repeat_interleave(x.long(), output_size=4), 0, 0),
    "a list of indices": (lambda x: x[[0, 1]], 0, 1),
    "tensor": (lambda x: torch.tensor([1, 2], device="cuda"), 0, 1),
    "to": (lambda x: torch.ones(2).to("cuda"), 0, 1),
    "full": (lambda x: torch.full((2,), 3.0, device="cuda"), 0, 0),
    "a number": (lambda x: x.__setitem__(0, 3.0), 0, 0),
    "between places of the device": (lambda x: x.clone().copy_(x).double(), 0, 0),
}


@MODES
@pytest.mark.parametrize("case", COUNTED)
def test_waiting_and_uploads_are_counted(case: str, gpus: Gpus, mode: type) -> None:
    call, syncs, uploads = COUNTED[case]
    with mode():
        x = torch.ones(4, device="cuda")
        with gpus.counting() as counts:
            call(x)
        assert (counts.syncs, counts.uploads) == (syncs, uploads), counts


def test_memory(gpus: Gpus) -> None:
    x = torch.empty(1000, device="cuda")
    assert x.isnan().all()
    assert torch.cuda.memory_allocated() == 4096
    inner, view = x.inner, x[5:]
    del x
    view.zero_()
    assert torch.cuda.mem_get_info() == (gpus.memory - 4096, gpus.memory)
    del view
    assert torch.cuda.memory_allocated() == 0
    assert torch.cuda.max_memory_allocated() >= 4096
    assert inner.isnan().all(), "freed memory is overwritten"


def test_pinned_memory_is_rounded_up(gpus: Gpus) -> None:
    x = torch.empty(1000, pin_memory=True)
    assert [y.is_pinned() for y in (x, x[3:], torch.ones(2), torch.ones(2).pin_memory())] == [True, True, False, True]
    assert gpus.pinned.n_bytes == 4096
    del x
    assert gpus.pinned.n_bytes == 0


def test_a_pool_made_in_inference_mode_stays_there(gpus: Gpus) -> None:
    with torch.inference_mode():
        x = torch.zeros(2, device="cuda")
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        x.add_(1)


def test_other_threads_and_devices() -> None:
    found: list[Tensor] = []
    with pretended_gpus(2):
        thread = threading.Thread(target=lambda: found.append(torch.ones(2, device="cuda") * 2))
        thread.start()
        thread.join(60)
        assert found[0].is_cuda
        with torch.cuda.device(1):
            assert torch.zeros(1, device="cuda").device.index == 1 == torch.cuda.current_device()
        assert torch.cuda.current_device() == 0
    assert not torch.cuda.is_available()


def test_a_copy_between_gpus_is_in_order_with_both() -> None:
    with pretended_gpus(2):
        x = torch.ones(2, device="cuda:0")
        side = torch.cuda.Stream(0)
        with torch.cuda.stream(side):
            y = (x + 1).to("cuda:1") * 2
        assert y.device.index == 1
        assert y.tolist() == [4, 4]
        torch.cuda.synchronize(0)
