"""Products of many rows, with weights of any kind."""

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import lce
from lce.kernels.product import panels
from lce.kernels.product.quantised import QuantisedMatrix, parts_of
from lce.kernels.runtime import levels, shared
from lce.kernels.runtime.shared import INT8, Gate, Layout
from lce.models.products import linear
from lce.terminal.figures import model_lines
from lce.weights.gguf_packed import SCHEMES
from lce.weights.packed import Stacked
from tests.kernels.truth import EPS, LAYOUTS, gated, normed, packed

DTYPES = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}  # and the rounding of a result
# Kernels of a layout, and of a third dtype, compile for some seconds. The types of GGUF are those of
# tests/weights/test_gguf_packed.py, whose kernels are compiled anyway.
QUICK = (*LAYOUTS.values(), *(SCHEMES[kind].layout for kind in ("Q4_K", "Q6_K")), torch.float32, torch.bfloat16)


def deeper(kinds: Iterable[Any]) -> list[Any]:
    """The kinds as cases, those that are not `QUICK` slow; none where another processor's level is tried, once."""
    all_at_once = bool(os.environ.get("LCE_CPU"))
    return [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in QUICK and not all_at_once)) for kind in kinds]


@pytest.mark.parametrize("dtype", deeper(DTYPES), ids=str)
@pytest.mark.parametrize("kind", ["plain", "int8", "int4"])
@pytest.mark.parametrize(("rows", "n_out", "n_in"), [(9, 64, 40), (13, 96, 400), (300, 160, 800)])
def test_equals_the_product_in_float64(dtype: torch.dtype, kind: str, rows: int, n_out: int, n_in: int) -> None:
    """With a norm, a bias, a gate and hidden states to add to: rounded once, at the end.

    Where PyTorch multiplies, both factors of a gate are rounded before, each by its size.
    """
    random = torch.Generator().manual_seed(rows)
    x, norm = torch.randn(rows, n_in, generator=random), torch.rand(n_in, generator=random).to(dtype)
    plain = (torch.randn(n_out, n_in, generator=random) / n_in**0.5).to(dtype)
    bias = torch.randn(n_out, generator=random).to(dtype)
    weight: Any = plain if kind == "plain" else packed(plain, LAYOUTS[kind])
    computed = panels.arithmetic(dtype)
    dense = plain if kind == "plain" else weight.unpacked(0, torch.empty(n_out, n_in, dtype=computed))
    rows_in = normed(x, norm)
    truth = rows_in @ dense.double().T + bias.double()
    half = n_out // 2
    eps = 1e-5 if computed is torch.float32 else 2**-7  # where x is rounded, too
    out = linear(x, weight, bias, norm=norm, eps=EPS)
    assert out.dtype is dtype
    torch.testing.assert_close(out.double(), truth, rtol=max(eps, DTYPES[dtype]), atol=max(eps, DTYPES[dtype]))
    wide = linear(x, weight, bias, norm=norm, eps=EPS, out_dtype=torch.float32)
    exact = rows_in @ (dense if kind == "plain" else weight.unpacked(0, torch.empty(n_out, n_in))).double().T + bias
    torch.testing.assert_close(wide.double(), exact, rtol=1e-5, atol=1e-5)
    factors = (truth[:, :half] * truth[:, half:]).abs() if computed is None else torch.zeros(())
    for gate, expected, size in ((None, truth, torch.zeros(())), ("silu", gated(truth), factors)):
        onto = torch.ones(rows, expected.shape[1])
        added = linear(x, weight, bias, norm=norm, eps=EPS, gate=gate, onto=onto)
        error = (added.double() - (expected + 1)).abs()
        assert (error <= eps * (1 + (expected + 1).abs() + size)).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_info_says_what_prefill_computes_in(dtype: str) -> None:
    lines = model_lines(dataclasses.replace(lce.info("demo"), dtype=dtype))
    wide = panels.arithmetic(getattr(torch, dtype)) is torch.float32 and dtype != "float32"
    assert any("products in float32 on this CPU" in line for line in lines) is wide


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_odd_shapes_and_stacked_matrices(dtype: torch.dtype) -> None:
    x = torch.randn(11, 37).to(dtype)
    first, second = torch.randn(21, 37).to(dtype), torch.randn(9, 37).to(dtype)
    truth = x.double() @ torch.cat([first, second]).double().T
    stacked = linear(x, Stacked([first, packed(second, INT8)]), out_dtype=torch.float32)
    torch.testing.assert_close(stacked[:, :21].double(), truth[:, :21], rtol=1e-5, atol=1e-4)
    assert (stacked[:, 21:].double() - truth[:, 21:]).abs().max() < 0.5
    eps = 1e-4 if panels.arithmetic(dtype) is torch.float32 else 0.05
    gated = linear(x, Stacked([first[:9], second]), gate="silu")
    torch.testing.assert_close(gated.double(), F.silu(truth[:, :9]) * truth[:, 21:], rtol=eps, atol=eps)
    torch.testing.assert_close(linear(x, first).double(), truth[:, :21], rtol=2**-8, atol=2**-8)


@pytest.mark.parametrize("kind", ["plain", "int8"])
def test_bits_depend_neither_on_threads_nor_on_scratch_nor_on_other_rows(kind: str, monkeypatch: Any) -> None:
    x, plain = torch.randn(300, 400), torch.randn(160, 400)
    weight = plain if kind == "plain" else packed(plain, INT8)

    def product(x: torch.Tensor, gate: Gate | None = None) -> torch.Tensor:
        return panels.product(x, weight, None, gate, None, torch.float32)

    torch.set_num_threads(2)
    whole, gated = product(x), product(x, "silu")
    torch.set_num_threads(1)
    monkeypatch.setattr(panels, "SCRATCH", 1)  # the fewest weights at a time
    monkeypatch.setattr(panels, "PACKED", 1)  # and the fewest rows
    assert torch.equal(product(x), whole)
    assert torch.equal(product(x, "silu"), gated)
    assert torch.equal(product(x[7:20]), whole[7:20])


def any_codes(layout: Layout, n_out: int, n_in: int) -> QuantisedMatrix:
    """A matrix of random codes, scales and lows, of any layout."""
    random, parts = torch.Generator().manual_seed(n_in), {}
    for name, (shape, dtype) in parts_of(layout, n_out, n_in).items():
        numbers = torch.rand(shape, generator=random)
        if dtype.is_floating_point:
            parts[name] = (numbers / 100).to(dtype)
        else:
            least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
            parts[name] = (least + numbers * (most - least)).round().to(dtype)
    return QuantisedMatrix(layout, (n_out, n_in), parts)


@pytest.mark.parametrize("kind", deeper([*shared.LAYOUTS, *DTYPES]), ids=str)
@pytest.mark.parametrize(("n_out", "n_in"), [(96, 512), (74, 328)])
def test_few_rows_have_the_bits_of_many(kind: Layout | torch.dtype, n_out: int, n_in: int) -> None:
    """For each number of rows and threads, with a bias, a gate, a sum, and results of any dtype."""
    if isinstance(kind, Layout) and kind.nested:
        n_in = 512
    gates: tuple[Gate | None, ...] = (None, "silu", "gelu_tanh") if n_out % 32 == 0 else (None,)
    if not isinstance(kind, Layout) and panels.arithmetic(kind) is None:
        pytest.skip("PyTorch multiplies this dtype here")
    for dtype in DTYPES if isinstance(kind, Layout) else (kind,):
        weight = any_codes(kind, n_out, n_in) if isinstance(kind, Layout) else torch.randn(n_out, n_in).to(dtype)
        bias = torch.randn(n_out).to(dtype)
        for number in {torch.float32, panels.arithmetic(dtype) or torch.float32}:
            x = torch.randn(40, n_in).to(number)
            for around in itertools.product((None, bias), gates, (False, True), {dtype, torch.float32}):
                torch.set_num_threads(1)
                whole = product_of(x, weight, *around)
                for n in range(1, 9):
                    torch.set_num_threads(1 + n % 2)
                    assert torch.equal(product_of(x[3 : 3 + n], weight, *around), whole[3 : 3 + n]), (around[1:], n)


def product_of(
    x: torch.Tensor, weight: Any, bias: torch.Tensor | None, gate: Gate | None, adds: bool, dtype: torch.dtype
) -> torch.Tensor:
    width = weight.shape[0] // 2 if gate else weight.shape[0]
    onto = torch.full((len(x), width), 1.25, dtype=dtype) if adds else None
    return panels.product(x, weight, bias, gate, onto, dtype)


Pretended = Callable[..., None]


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretended]:
    """Pretends another processor, and variables that restrict it."""

    def pretend(has: str, level: str = "", most: str = "") -> None:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(has.split(), True))
        monkeypatch.setenv("LCE_CPU", level)
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", most)
        forget()

    def forget() -> None:
        panels.slow_dtypes.cache_clear()
        panels.arithmetic.cache_clear()
        panels.has_tiles.cache_clear()

    yield pretend
    forget()


@pytest.mark.parametrize(
    ("has", "level", "most", "slow"),
    [
        *(("avx2", "", "", "bfloat16 float16"), ("avx2 avx512_f avx512_bf16", "", "", "float16")),
        ("avx2 avx512_f avx512_bf16", "v3", "", "bfloat16 float16"),
        ("avx2 avx512_f avx512_bf16", "v4-bf16", "AVX2", "bfloat16 float16"),
        ("avx2 avx512_f avx512_bf16", "", "avx512_core_bf16", "float16"),
        ("avx512_bf16 avx512_fp16 amx_bf16", "", "ALL", ""),
        ("avx512_bf16 avx512_fp16 amx_bf16", "", "AVX512_CORE_VNNI", "bfloat16 float16"),
        *(("neon bf16", "", "", "float16"), ("neon fp16_arith", "", "", "bfloat16 float16")),
    ],
)
def test_slow_dtypes_follow_the_processor(has: str, level: str, most: str, slow: str, pretended: Pretended) -> None:
    pretended(has, level, most)
    assert panels.slow_dtypes() == {getattr(torch, name) for name in slow.split()}


@pytest.mark.parametrize(
    ("has", "level", "computed"),
    [
        ("avx2", "v3", "float32 float32 float32"),
        ("avx2 avx512_f", "v4", "float32 float32 float32"),
        ("avx2 avx512_f avx512_bf16", "v4-bf16", "float32 bfloat16 float32"),
        ("avx2 avx512_f avx512_bf16 avx512_fp16 amx_bf16", "v4-bf16", "float32 None None"),
        ("neon bf16", "arm64", "float32 None float32"),
    ],
)
def test_what_is_computed_in_follows_the_processor(
    has: str, level: str, computed: str, pretended: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(levels, "current", lambda: levels.LEVELS[level])
    pretended(has)
    assert [str(panels.arithmetic(dtype)).removeprefix("torch.") for dtype in DTYPES] == computed.split()
