"""Norms, gates, rotations, copies and merges, on a CPU and on a GPU or in Triton's interpreter, beside float64."""

import importlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lce.attention import Attention
from lce.kernels.elementwise import elementwise as on_cpu
from tests.kernels.truth import DEVICE, EPS, MOST, ON_GPU, gated, lane_rows, normed, random, rotated

MANY = on_cpu.ALONE // 16  # rows of 16 numbers that several threads share
CLOSER = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}  # errors of merges on a CPU
CUDA = pytest.param("cuda", marks=ON_GPU)
each_room = pytest.mark.parametrize("room", ["cpu", CUDA])
each_dtype = pytest.mark.parametrize("dtype", MOST, ids=str)
each_size = pytest.mark.parametrize(
    ("room", "n"), [("cpu", 1), ("cpu", 7), ("cpu", MANY), *(pytest.param("cuda", n, marks=ON_GPU) for n in (1, 7))]
)


def kernels(room: str, name: str = "elementwise") -> tuple[Any, str]:
    """A module of a room, and the device of its tensors."""
    folder = "merge" if name == "merging" else name
    if room == "cpu":
        return importlib.import_module(f"lce.kernels.{folder}.{name}"), "cpu"
    pytest.importorskip("triton")
    return importlib.import_module(f"lce.kernels.{folder}.{name}_triton"), DEVICE


def close(room: str, got: Tensor, expected: Tensor) -> None:
    """Within the rounding of the result; on a GPU, whose functions are approximations, ten times that."""
    eps = torch.finfo(got.dtype).eps
    rtol, atol = (eps + 1e-6, 1e-6) if room == "cpu" else (1e-5, 1e-5) if eps < 1e-6 else (1e-2, 1e-2)
    assert got.is_contiguous()
    torch.testing.assert_close(got.double(), expected, rtol=rtol, atol=atol)


@each_size
@each_dtype
def test_the_norm_of_rows_and_of_heads(room: str, n: int, dtype: torch.dtype) -> None:
    module, device = kernels(room)
    norm = module.rms_norm if room == "cpu" else lambda x, weight, eps: module.rms_norms(eps, (x, weight))[0]
    weight, rows = random(16, dtype=dtype, seed=2).to(device), random(n, 3, 16, dtype=dtype).to(device)
    for x in (rows[:, 1].contiguous(), rows[:, 1], rows.transpose(0, 1)):
        close(room, norm(x, weight, EPS), normed(x, weight))
        wide = norm(x.float() * 1.001, weight, EPS)
        assert wide.dtype == dtype
        close(room, wide, normed(x.float() * 1.001, weight))
    if room == "cuda":
        q, k = rows.transpose(0, 1)[:2], rows.transpose(0, 1)[2:]
        for got, x in zip(module.rms_norms(EPS, (q, weight), (k, weight)), (q, k), strict=True):
            close(room, got, normed(x, weight))


@pytest.mark.parametrize("n", [1, 7, MANY])
@each_dtype
def test_a_norm_is_converted_or_added(n: int, dtype: torch.dtype) -> None:
    """With weights in float32 or the model's dtype, as by PyTorch's operators behind the norm; without any, too."""
    heads, x = random(n, 3, 16, dtype=dtype).transpose(0, 1), random(n, 16, seed=3)
    for weight in (random(16, seed=2), random(16, dtype=dtype, seed=2)):
        own = on_cpu.rms_norm(heads, weight, EPS)
        assert torch.equal(on_cpu.rms_norm(heads, weight, EPS, dtype), own.to(dtype))
        assert torch.equal(on_cpu.rms_norm(x, weight, EPS, dtype), on_cpu.rms_norm(x, weight, EPS).to(dtype))
        onto = random(3, n, 16, seed=4)
        expected = onto + own
        assert on_cpu.rms_norm(heads, weight, EPS, onto=onto) is onto
        assert torch.equal(onto, expected)
    for there in (x, random(2 * n, 16, seed=3)[::2], heads.float()):
        assert torch.equal(on_cpu.rms_norm(there, None, dtype=dtype), there.to(dtype))


@each_size
@each_dtype
@pytest.mark.parametrize("width", [46, 4200])
def test_the_gate_of_an_mlp(room: str, n: int, width: int, dtype: torch.dtype) -> None:
    module, device = kernels(room)
    x = random(n if width == 46 else 2, width, dtype=dtype).to(device) * 8
    x[0, :4] = torch.tensor([90.0, -90.0, torch.inf, -1e4])
    if room == "cuda":
        close(room, module.silu_mul(x), gated(x))
        return
    for gate in ("silu", "gelu_tanh"):
        close(room, module.gate_mul(x, gate), gated(x, gate))


@each_size
@each_dtype
@pytest.mark.parametrize("layout", ["heads", "tokens first", "one turn", "slots", "rows", "views"])
def test_rotations_broadcast(room: str, n: int, layout: str, dtype: torch.dtype) -> None:
    module, device = kernels(room)
    x, turns = random(3, n, 16, dtype=dtype).to(device), random(2, n, 8, dtype=dtype, seed=2).to(device)
    match layout:
        case "tokens first":
            x = random(n, 3, 16, dtype=dtype).to(device).transpose(0, 1)
        case "one turn":
            turns = turns[:, :1]
        case "slots":
            x, turns = x[:, :, None], random(2, n, 4, 8, dtype=dtype, seed=2).to(device)
        case "rows":
            x = x[0]
        case "views":
            x, turns = random(3, n + 1, 16, dtype=dtype).to(device)[:, 1:], turns[:, :1].expand(2, n, 8)
    close(room, module.rotate(x, *turns), rotated(x, *turns))


@each_size
@each_dtype
@pytest.mark.parametrize("turned", [False, True])
def test_append_writes_its_rows_and_no_others(room: str, n: int, turned: bool, dtype: torch.dtype) -> None:
    module, device = kernels(room)
    joined = random(n, 5, 16, dtype=dtype).to(device).transpose(0, 1)
    k, v, turns = joined[1:3], joined[3:], random(2, n, 8, dtype=dtype, seed=2).to(device)
    for at in (3, torch.tensor([3], device=device)) if room == "cuda" else (3,):
        into = torch.zeros(2, 2, n + 4, 16, dtype=dtype, device=device)
        module.append(k, v, *into, at, *(turns if turned else (None, None)))
        got = into[0, :, 3 : n + 3]
        if turned:
            close(room, got.contiguous(), rotated(k, *turns))
        if room == "cpu" or not turned:
            assert torch.equal(got, module.rotate(k, *turns) if turned else k)
        assert torch.equal(into[1, :, 3 : n + 3], v)
        assert not into[:, :, :3].any()
        assert not into[:, :, n + 3 :].any()


@each_room
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 90, 3), (3, 200, 64)])
def test_rows_are_those_of_the_index(room: str, stored: torch.dtype, shape: tuple[int, int, int]) -> None:
    module, device = kernels(room)
    one, two = ((random(shape[0], shape[1] + 3, shape[2], seed=i) * 9).to(device, stored)[:, 2:-1] for i in (1, 2))
    for index in (torch.arange(shape[1]), torch.randint(shape[1], (77,)), torch.zeros(0, dtype=torch.int64)):
        there = index.to(device)
        taken = module.take_rows((one, two), there) if room == "cpu" else module.take_rows(one, two, there)
        assert all(torch.equal(a, x[:, there]) for a, x in zip(taken, (one, two), strict=True))


def test_rows_go_where_the_caller_wants_them() -> None:
    tensors, index = (torch.randn(2, 90, 4), torch.randn(2, 90, 4)), torch.tensor([3, 3, 80])
    buffer = torch.empty(50)
    taken = on_cpu.take_rows(tensors, index, buffer)
    assert all(torch.equal(a, x[:, index]) for a, x in zip(taken, tensors, strict=True))
    assert (taken[0].data_ptr(), taken[1].data_ptr()) == (buffer.data_ptr(), buffer[24:].data_ptr())
    assert torch.equal(on_cpu.take_rows(tensors, index, buffer[:47])[1], tensors[1][:, index])  # too small: not used


@each_dtype
def test_numbers_are_rounded_as_pytorch_does(dtype: torch.dtype) -> None:
    special = [0.0, -0.0, 1.0, -1.5, 65504.0, 1e-8, 3.0e38, float("inf"), float("-inf"), float("nan"), 1 / 3]
    x = torch.cat([torch.tensor(special), torch.randn(1001)])[:, None].to(dtype)
    cos = torch.randn(len(x), 1).to(dtype)
    got = on_cpu.rotate(torch.cat([x, torch.zeros_like(x)], dim=1), cos, torch.zeros_like(cos))[:, :1]
    torch.testing.assert_close(got, (x.float() * cos.float()).to(dtype), rtol=0, atol=0, equal_nan=True)


@each_room
def test_rows_behind_the_end_are_refused(room: str) -> None:
    module, device = kernels(room)
    k, into = torch.zeros(2, 3, 16, device=device), torch.zeros(2, 8, 16, device=device)
    for at in (-1, 6):
        with pytest.raises(AssertionError):
            module.append(k, k, into, into.clone(), at, None, None)


@pytest.mark.parametrize("room", [CUDA])
@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 1.13862), (torch.bfloat16, 1.0)])
def test_turns(room: str, dtype: torch.dtype, scale: float) -> None:
    """As of angles in float64, at a million too."""
    module, device = kernels(room)
    positions = torch.tensor([[0, 3], [70, 4095], [131_071, 1_000_003]])
    frequencies = 10_000.0 ** -(torch.arange(20, dtype=torch.float64) / 20)
    angles = positions[..., None] * frequencies
    found = module.turns(positions.to(device), frequencies.to(device), scale, dtype)
    for one, expected in zip(found, (angles.cos() * scale, angles.sin() * scale), strict=True):
        atol = 1.2e-7 if dtype is torch.float32 else 4e-3
        torch.testing.assert_close(one.cpu(), expected.to(dtype), rtol=0, atol=atol)


def merges(room: str) -> tuple[Any, Any]:
    """How a room merges parts, and slots: on a CPU slots are merged by PyTorch, if at all."""
    module, _ = kernels(room, "merging")
    if room == "cuda":
        return module.combined, lambda x, lse: module.merge_pieces(x.movedim(2, 0), lse.movedim(2, 0), x.dtype)
    return module.merged, Attention.choose("torch").merge_slots


def parts_of(room: str, n_parts: int, dtype: torch.dtype, dim: int = 24) -> tuple[Tensor, Tensor]:
    """`[P, 2, 3, D]`, `[P, 2, 3]`: a part that saw nothing holds NaN; one query saw nothing in any part."""
    out, lse = random(n_parts, 2, 3, dim, dtype=dtype), random(n_parts, 2, 3, seed=2) * 9
    lse[0, 0, 1] = -math.inf
    lse[:, 1, 2] = -math.inf
    out[lse == -math.inf] = math.nan
    device = DEVICE if room == "cuda" else "cpu"
    return out.to(device), lse.to(device)


def same(room: str, found: tuple[Tensor, Tensor], out: Tensor, lse: Tensor, dtype: torch.dtype) -> None:
    total = lse.double().logsumexp(0)
    weights = (lse.double() - total.nan_to_num(neginf=0.0)).exp()
    expected = (weights[..., None] * out.double().nan_to_num()).sum(0)
    most = MOST[dtype] if room == "cuda" else CLOSER[dtype]
    assert found[0].dtype == dtype
    torch.testing.assert_close(found[0].double(), expected, rtol=0, atol=most)
    torch.testing.assert_close(found[1].double(), total, rtol=0, atol=2e-5)


@each_room
@each_dtype
@pytest.mark.parametrize("n_parts", [2, 3, 4, 9, 17])
def test_parts_are_combined(room: str, n_parts: int, dtype: torch.dtype) -> None:
    out, lse = parts_of(room, n_parts, dtype)
    apart = out.transpose(1, 2).contiguous().transpose(1, 2), lse.mT.contiguous().mT
    same(room, merges(room)[0](list(zip(*apart, strict=True))), out, lse, dtype)


@pytest.mark.parametrize("room", [CUDA])
@each_dtype
@pytest.mark.parametrize("n_parts", [1, 3, 70])
def test_slots_and_pieces_are_merged(room: str, n_parts: int, dtype: torch.dtype) -> None:
    out, lse = parts_of(room, n_parts, dtype)
    same(room, merges(room)[1](out.movedim(0, 2).contiguous(), lse.movedim(0, 2).contiguous()), out, lse, dtype)
    merge_pieces = kernels(room, "merging")[0].merge_pieces
    same(room, merge_pieces(out.float(), lse, dtype), out, lse, dtype)


@each_room
@pytest.mark.parametrize("value", [math.nan, 0.5])
def test_a_part_that_is_nan_is_not_hidden(room: str, value: float) -> None:
    out, lse = parts_of(room, 3, torch.float32)
    out[1, 0, 0], lse[1, 0, 0] = math.nan, value
    by_parts, by_slots = merges(room)
    slots = out.movedim(0, 2).contiguous(), lse.movedim(0, 2).contiguous()
    for found, total in (by_parts(list(zip(out, lse, strict=True))), by_slots(*slots)):
        assert found[0, 0].isnan().all()
        assert total[0, 0].isnan() == math.isnan(value)
        assert not found[0, 1:].isnan().any()


@pytest.mark.parametrize(
    "n", [pytest.param(n, marks=[*ON_GPU, *([pytest.mark.slow] if n > 5 else [])]) for n in (1, 2, 5, 33)]
)
@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.bfloat16), (80, torch.float16), (256, torch.float32)])
def test_rows_of_several_contexts_are_written_and_read_where_they_are(n: int, dim: int, dtype: torch.dtype) -> None:
    """The last context stands in for none; one of five writes no row."""
    pytest.importorskip("triton")
    from lce.kernels.elementwise import elementwise_triton as module

    held = [random(2, 12 + b % 3, dim, dtype=dtype, seed=b).to(DEVICE) for b in range(n)]
    before, k, v = [x.clone() for x in held], *(random(2, n, dim, dtype=dtype, seed=s).to(DEVICE) for s in (91, 92))
    turns, at = random(2, n, dim // 2, dtype=dtype, seed=93).to(DEVICE), torch.arange(n, device=DEVICE) % 5 - 1
    rows, values = lane_rows(held, n_written=max(1, n - 1)), [x.clone() for x in held]
    module.append(k, v, rows, lane_rows(values, max(1, n - 1)), at, *turns)
    first, turned = torch.arange(n, device=DEVICE) % 4, module.rotate(k, *turns)
    for b in range(n):
        if at[b] >= 0 and (b < n - 1 or n == 1):
            before[b][:, at[b]] = turned[:, b]
            assert torch.equal(values[b][:, at[b]], v[:, b])
        assert torch.equal(held[b], before[b]), b
        assert torch.equal(module.take_lanes(rows, first, 7)[:, b], held[b][:, first[b] : first[b] + 7])
        assert torch.equal(module.take_lanes(rows, None, 5)[:, b], held[b][:, :5])
