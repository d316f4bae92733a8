"""Products of many rows in float32, with weights of any kind."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import lce
from lce.kernels.code.shared import INT4, INT8, Gate, Layout
from lce.kernels.cpu import panels
from lce.kernels.cpu.quantised import QuantisedMatrix, parts_of
from lce.models.products import linear
from lce.terminal.figures import model_lines
from lce.weights.packed import Stacked

LAYOUTS = {"int8": INT8, "int4": INT4}


def packed(weight: torch.Tensor, layout: Layout) -> QuantisedMatrix:
    parts = {name: torch.zeros(size, dtype=dtype) for name, (size, dtype) in parts_of(layout, *weight.shape).items()}
    matrix = QuantisedMatrix(layout, weight.shape, parts)
    matrix.pack(weight)
    return matrix


@pytest.fixture
def slow_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panels, "slow_dtypes", lambda: frozenset({torch.bfloat16}))


@pytest.mark.usefixtures("slow_bfloat16")
@pytest.mark.parametrize("kind", ["plain", "int8", "int4"])
@pytest.mark.parametrize(("rows", "n_out", "n_in"), [(9, 64, 40), (13, 96, 400), (101, 32, 800)])
def test_equals_the_product_in_float64(kind: str, rows: int, n_out: int, n_in: int) -> None:
    """With a norm, a bias, a gate and hidden states to add to: rounded once, at the end."""
    random = torch.Generator().manual_seed(rows)
    x, norm = torch.randn(rows, n_in, generator=random), torch.rand(n_in, generator=random).bfloat16()
    plain = (torch.randn(n_out, n_in, generator=random) / 4).bfloat16()
    bias = torch.randn(n_out, generator=random).bfloat16()
    weight: Any = plain if kind == "plain" else packed(plain, LAYOUTS[kind])
    dense = plain if kind == "plain" else weight.unpacked(0, torch.empty(n_out, n_in))
    normed = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.double()
    truth = normed @ dense.double().T + bias.double()
    half = n_out // 2
    gated = F.silu(truth[:, :half]) * truth[:, half:]
    out = linear(x, weight, bias, norm=norm, eps=1e-5)
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out.double(), truth, rtol=2**-8, atol=1e-4)
    for gate, expected in ((None, truth), ("silu", gated)):
        onto = torch.ones(rows, expected.shape[1])
        added = linear(x, weight, bias, norm=norm, eps=1e-5, gate=gate, onto=onto)
        torch.testing.assert_close(added.double(), expected + 1, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("dtype", "slow"), [("bfloat16", True), ("float16", False), ("float32", False)])
@pytest.mark.usefixtures("slow_bfloat16")
def test_info_says_what_prefill_computes_in(dtype: str, slow: bool) -> None:
    lines = model_lines(dataclasses.replace(lce.info("demo"), dtype=dtype))
    assert any("products in float32 on this CPU" in line for line in lines) is slow


@pytest.mark.usefixtures("slow_bfloat16")
def test_odd_shapes_and_stacked_matrices() -> None:
    x = torch.randn(11, 37).bfloat16()
    first, second = torch.randn(21, 37).bfloat16(), torch.randn(9, 37).bfloat16()
    truth = x.double() @ torch.cat([first, second]).double().T
    stacked = linear(x, Stacked([first, packed(second, INT8)]), out_dtype=torch.float32)
    torch.testing.assert_close(stacked[:, :21].double(), truth[:, :21], rtol=1e-5, atol=1e-4)
    assert (stacked[:, 21:].double() - truth[:, 21:]).abs().max() < 0.5
    gated = linear(x, Stacked([first[:9], second]), gate="silu")
    torch.testing.assert_close(gated.double(), F.silu(truth[:, :9]) * truth[:, 21:], rtol=1e-4, atol=1e-4)


def test_bits_depend_neither_on_threads_nor_on_scratch_nor_on_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(200, 400), torch.randn(80, 400).bfloat16()

    def product(x: torch.Tensor, gate: Gate | None = None) -> torch.Tensor:
        return panels.product(x, weight, None, gate, None, torch.float32)

    before, whole, gated = torch.get_num_threads(), product(x), product(x, "silu")
    try:
        torch.set_num_threads(1)
        monkeypatch.setattr(panels, "SCRATCH", 1)  # one panel at a time
        assert torch.equal(product(x), whole)
        assert torch.equal(product(x, "silu"), gated)
        assert torch.equal(product(x[7:20]), whole[7:20])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("has", "level", "most", "slow"),
    [
        ("avx2", "", "", {"bfloat16", "float16"}),
        ("avx2 avx512_f avx512_bf16", "", "", {"float16"}),
        ("avx2 avx512_f avx512_bf16", "v3", "", {"bfloat16", "float16"}),
        ("avx2 avx512_f avx512_bf16", "v4-bf16", "AVX2", {"bfloat16", "float16"}),
        ("avx2 avx512_f avx512_bf16", "", "avx512_core_bf16", {"float16"}),
        ("avx512_bf16 avx512_fp16 amx_bf16", "", "ALL", set()),
        ("avx512_bf16 avx512_fp16 amx_bf16", "", "AVX512_CORE_VNNI", {"bfloat16", "float16"}),
        ("neon bf16", "", "", {"float16"}),
        ("neon fp16_arith", "", "", {"bfloat16", "float16"}),
    ],
)
def test_slow_dtypes_follow_the_processor(
    has: str, level: str, most: str, slow: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(has.split(), True))
    monkeypatch.setenv("LCE_CPU", level)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", most)
    panels.slow_dtypes.cache_clear()
    try:
        assert panels.slow_dtypes() == {getattr(torch, name) for name in slow}
    finally:
        panels.slow_dtypes.cache_clear()
