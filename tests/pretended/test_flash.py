"""The stand-in of PyTorch's flash attention computes what the kernel does, and refuses what it refuses."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.pretended import Gpus

SHAPES = {"q": (1, 5, 4, 16), "k": (1, 9, 2, 16), "v": (1, 9, 2, 16)}


def vectors(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(1)
    made = {**SHAPES, **shapes}
    return {name: torch.randn(made[name], generator=random).bfloat16().cuda() for name in SHAPES}


def flash(q: Tensor, k: Tensor, v: Tensor, bounds: Any = (None, None), most: Any = None, **options: Any) -> Any:
    causal = options.pop("causal", False)
    most = most or (q.shape[1], k.shape[1])
    return torch.ops.aten._flash_attention_forward(q, k, v, *bounds, *most, 0.0, causal, False, **options)


@pytest.mark.parametrize(("causal", "left"), [(False, -1), (True, -1), (True, 2)])
def test_the_dense_form(gpus: Gpus, causal: bool, left: int) -> None:
    x = vectors()
    out, lse, *_ = flash(**x, causal=causal, window_size_left=left, window_size_right=0 if causal else -1)
    q, k, v = (y.cpu()[0].transpose(0, 1).double() for y in x.values())
    i, j = torch.arange(4, 9)[:, None], torch.arange(9)
    seen = (j <= i) & ((i - j <= left) | (left < 0)) if causal else j >= 0
    scores = (q @ k.repeat_interleave(2, 0).mT / 4).masked_fill(~seen, -torch.inf)
    assert (out.shape, lse.shape) == ((1, 5, 4, 16), (1, 4, 5))
    assert torch.allclose(lse.cpu()[0].double(), scores.logsumexp(-1))
    truth = scores.softmax(-1) @ v.repeat_interleave(2, 0)
    assert (out.cpu()[0].transpose(0, 1) - truth).abs().max() < 1e-2


def test_the_form_with_bounds(gpus: Gpus) -> None:
    """Three problems: 2 rows and 4 keys; none and 5; 3 rows and no key. Rows behind the last are not written."""
    x = vectors(q=(6, 4, 16), k=(9, 2, 16), v=(9, 2, 16))
    bounds = [torch.tensor(ends, dtype=torch.int32, device="cuda") for ends in ([0, 2, 2, 5], [0, 4, 9, 9])]
    out, lse, *_ = flash(**x, bounds=bounds, most=(3, 5))
    assert lse.shape == (4, 6)
    own, own_lse, *_ = flash(x["q"][None, :2], x["k"][None, :4], x["v"][None, :4])
    assert torch.equal(out[:2].cpu(), own[0].cpu())
    assert torch.equal(lse[:, :2].cpu(), own_lse[0].cpu())
    assert not out[2:5].cpu().any()
    assert lse[:, 2:5].cpu().isposinf().all(), "as the kernel has it, not -inf"
    assert out[5].cpu().isnan().all()
    used = torch.tensor([3, 9, 0], dtype=torch.int32, device="cuda")
    fewer, *_ = flash(**x, bounds=bounds, most=(3, 5), seqused_k=used)
    assert torch.equal(fewer[:2].cpu(), flash(x["q"][None, :2], x["k"][None, :3], x["v"][None, :3])[0][0].cpu())


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda x: {name: y.float() for name, y in x.items()}, {}, "fp16 and bf16"),
        (lambda x: {**x, "k": x["k"].cpu()}, {}, "same device"),
        (lambda x: {**x, "v": x["v"].mT.contiguous().mT}, {}, "contiguous last"),
        (lambda x: {name: y[..., :12] for name, y in x.items()}, {}, "multiple of 8"),
        (lambda x: {name: y[..., 1:9] for name, y in x.items()}, {}, "misaligned"),
        (lambda x: {**x, "q": x["q"][:, :, :3]}, {}, "divide"),
        (lambda x: {**x, "q": x["q"][:, :0]}, {}, "invalid configuration"),
        (lambda x: x, {"num_splits": 1}, "2.11"),
    ],
)
def test_what_it_refuses(gpus: Gpus, change: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        flash(**change(vectors()), **options)


@pytest.mark.parametrize(
    ("q_ends", "k_ends", "most", "dtype", "message"),
    [
        ([0, 2, 5], [0, 4, 9], (3, 5), torch.int64, "int32"),
        ([0, 2, 5], [0, 9], (3, 9), torch.int32, "shape"),
        ([0, 2, 7], [0, 4, 9], (5, 5), torch.int32, "leave the tensor"),
        ([0, 2, 5], [0, 4, 9], (2, 5), torch.int32, "max_q is 2"),
    ],
)
def test_bounds_that_it_refuses(gpus: Gpus, q_ends: Any, k_ends: Any, most: Any, dtype: Any, message: str) -> None:
    x = vectors(q=(5, 4, 16), k=(9, 2, 16), v=(9, 2, 16))
    bounds = [torch.tensor(ends, dtype=dtype, device="cuda") for ends in (q_ends, k_ends)]
    with pytest.raises(RuntimeError, match=message):
        flash(**x, bounds=bounds, most=most)
