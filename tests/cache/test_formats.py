"""Rounding to 8 bits against its definition, packed pages against their rows, and scales that no number has."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lce.cache.layout import AccessPattern, CacheLayout
from lce.cache.packing import from_rows, key_scales_of, pack, round_chunks, to_rows, tokens_of_rows, unpack
from lce.errors import DataError

SIZE = 6
LAYOUT = CacheLayout(1, 4, 2, 10, torch.float32, torch.device("cpu"), AccessPattern(SIZE), kv_dtype=torch.int8)
APART = replace(LAYOUT, access=AccessPattern(SIZE, per_head=True))
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def pages(n: int, layout: CacheLayout = LAYOUT, seed: int = 0, spread: float = 2.0) -> tuple[Tensor, Tensor]:
    """Keys and values `[n, P, L, D]`; magnitudes of channels and tokens differ."""
    random = torch.Generator().manual_seed(seed)
    shape = (2, n, layout.page_heads, SIZE, layout.head_dim)
    x = torch.randn(shape, generator=random) * torch.randn(shape[-1], generator=random).mul(spread).exp()
    k, v = x.to(layout.dtype)
    return k, v


def by_definition(x: Tensor, axis: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Numbers of 8 bits times their scale, in float64."""
    numbers = x.double().numpy()
    scale = np.abs(numbers).max(axis=axis, keepdims=True) / 127
    return np.asarray(np.round(numbers / scale) * scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_are_rounded_by_channel_and_values_by_token(dtype: torch.dtype) -> None:
    k, v = pages(5, replace(LAYOUT, dtype=dtype))
    parts = pack(k, v)
    assert [tuple(x.shape[2:]) for x in parts] == [(SIZE, 10), (1, 10), (SIZE, 10), (SIZE, 1)]
    assert [x.dtype for x in parts] == [torch.int8, torch.float32] * 2
    for x, found, axis in zip((k, v), unpack(parts, dtype), (-2, -1), strict=True):
        assert found.dtype == dtype
        peak = x.double().abs().amax(axis, keepdim=True)
        truth = torch.from_numpy(by_definition(x, axis))
        close = (found.double() - truth).abs() <= peak * (2.0**-15 + torch.finfo(dtype).eps)
        at_a_half = (found.double() - x.double()).abs() <= peak * (0.5 / 127 + 2.0**-15 + torch.finfo(dtype).eps)
        assert close.double().mean() > 0.99
        assert at_a_half.all()


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_rounded_numbers_are_rounded_to_themselves(data: st.DataObject) -> None:
    """To the bit, for magnitudes of any size, and where an interruption left some of them rounded."""
    dtype = data.draw(st.sampled_from(DTYPES))
    power = data.draw(st.sampled_from([0, 3, -8, -14, -24] if dtype == torch.float16 else [0, 9, -40, -110, -130, 60]))
    k, v = pages(3, replace(LAYOUT, dtype=torch.float32), data.draw(st.integers(0, 10**6)), data.draw(st.floats(0, 2)))
    k, v = ((x * 2.0**power).to(dtype).clamp(-60000, 60000) for x in (k, v))
    k[:, :, data.draw(st.integers(0, SIZE - 1))] = 0
    parts = pack(k, v)
    once = unpack(parts, dtype)
    assert all(torch.equal(a, b) for a, b in zip(pack(*once), parts, strict=True))
    half = data.draw(st.integers(0, SIZE))
    mixed = [torch.cat((new[:, :, :half], old[:, :, half:]), dim=2) for new, old in zip(once, (k, v), strict=True)]
    again = unpack(pack(*mixed), dtype)
    assert all(torch.equal(a, b) for a, b in zip(again, once, strict=True))


def test_chunks_of_a_buffer_are_rounded_in_place() -> None:
    k, v = pages(4)
    expected = unpack(pack(k, v), torch.float32)
    buffers = [x.transpose(0, 1).flatten(1, 2) for x in (k, v)]  # [P, m·L, D]
    for _ in range(2):
        round_chunks(*buffers, SIZE)
        for x, page in zip(buffers, expected, strict=True):
            assert torch.equal(x.unflatten(1, (-1, SIZE)).transpose(0, 1), page)


def test_numbers_that_are_out_of_the_ordinary() -> None:
    for value in (0.0, 1e-42, 3e38, torch.inf):
        k = torch.full((1, 1, 2, 2), value)
        found = unpack(pack(k, -k), torch.float32)
        assert all(x.isfinite().all() for x in found)
    assert not unpack(pack(torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2, 2)), torch.float32)[0].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", [LAYOUT, APART], ids=["together", "apart"])
def test_pages_are_found_again_in_their_rows(layout: CacheLayout, dtype: torch.dtype) -> None:
    layout = replace(layout, dtype=dtype)
    parts = pack(*pages(3, layout))
    rows = to_rows(parts, layout)
    assert tuple(rows.shape) == (3, layout.page_rows, *layout.row_shape)
    assert rows.dtype == layout.row_dtype
    assert rows.nbytes == 3 * layout.stored_page_bytes
    assert all(torch.equal(a, b) for a, b in zip(from_rows(rows, layout, "f"), parts, strict=True))
    scales = key_scales_of(rows[:, SIZE:], layout, "f")
    tokens = tokens_of_rows(rows[:, 4], scales, layout, "f")
    whole = torch.stack(unpack(parts, dtype), dim=1)[:, :, :, 4]
    assert torch.equal(tokens, whole)


def test_plain_pages_have_a_row_a_token() -> None:
    layout = replace(LAYOUT, kv_dtype=None)
    k, v = pages(3, layout)
    rows = to_rows((k, v), layout)
    assert tuple(rows.shape) == (3, SIZE, 2, 2, 10)
    assert torch.equal(rows[1, 2, 0], k[1, :, 2])
    assert torch.equal(rows[2, 5, 1], v[2, :, 5])
    found = from_rows(rows, layout, "f")
    assert torch.equal(found[0], k)
    assert torch.equal(found[1], v)


@pytest.mark.parametrize("value", [-1.0, torch.nan, torch.inf, 3e38])
@pytest.mark.parametrize("which", ["keys", "values"])
def test_scales_that_no_number_has_are_refused(which: str, value: float) -> None:
    k, k_scale, v, v_scale = pack(*pages(2))
    (k_scale if which == "keys" else v_scale)[1, 0, 0, 0] = value
    rows = to_rows((k, k_scale, v, v_scale), LAYOUT)
    with pytest.raises(DataError, match="the file was altered since it was written; prefill the text again"):
        from_rows(rows, LAYOUT, "the file")
