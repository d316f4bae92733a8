"""Formats: rounding to 8 bits against its definition, stored pages against their rows, scales that no number has."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lce.attention import ROW, row_bytes
from lce.cache.formats import FORMATS, Int8, KVFormat
from lce.cache.layout import kv_dtype_of
from lce.errors import DataError, UsageError

SIZE = 6
INT8 = Int8(2, SIZE, 10, torch.float32)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def pages(n: int, format: KVFormat = INT8, seed: int = 0, spread: float = 2.0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    shape = (2, n, format.heads, SIZE, format.stored_dim)
    x = torch.randn(shape, generator=random) * torch.randn(shape[-1], generator=random).mul(spread).exp()
    k, v = x.to(format.stored_dtype)
    return k, v


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_are_rounded_by_channel_and_values_by_token(dtype: torch.dtype) -> None:
    format = replace(INT8, stored_dtype=dtype)
    k, v = pages(5, format)
    for x, found, axis in zip((k, v), format.unpack(format.pack(k, v)), (-2, -1), strict=True):
        assert found.dtype == dtype
        peak = x.double().abs().amax(axis, keepdim=True)
        scale = np.abs(x.double().numpy()).max(axis=axis, keepdims=True) / 127
        truth = torch.from_numpy(np.round(x.double().numpy() / scale) * scale)
        close = (found.double() - truth).abs() <= peak * (2.0**-15 + torch.finfo(dtype).eps)
        at_a_half = (found.double() - x.double()).abs() <= peak * (0.5 / 127 + 2.0**-15 + torch.finfo(dtype).eps)
        assert close.double().mean() > 0.99
        assert at_a_half.all()


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_rounded_numbers_are_rounded_to_themselves(data: st.DataObject) -> None:
    """To the bit, for magnitudes of any size, and where an interruption left some of them rounded."""
    dtype = data.draw(st.sampled_from(DTYPES))
    power = data.draw(st.sampled_from([0, 3, -8, -14, -24] if dtype == torch.float16 else [0, 9, -40, -110, -130, 60]))
    k, v = pages(3, INT8, data.draw(st.integers(0, 10**6)), data.draw(st.floats(0, 2)))
    k, v = ((x * 2.0**power).to(dtype).clamp(-60000, 60000) for x in (k, v))
    k[:, :, data.draw(st.integers(0, SIZE - 1))] = 0
    format = replace(INT8, stored_dtype=dtype)
    packed = format.pack(k, v)
    once = format.unpack(packed)
    assert torch.equal(format.pack(*once), packed)
    half = data.draw(st.integers(0, SIZE))
    mixed = [torch.cat((new[:, :, :half], old[:, :, half:]), dim=2) for new, old in zip(once, (k, v), strict=True)]
    again = format.unpack(format.pack(*mixed))
    assert all(torch.equal(a, b) for a, b in zip(again, once, strict=True))


def test_chunks_of_a_buffer_are_rounded_in_place() -> None:
    k, v = pages(4)
    expected = INT8.unpack(INT8.pack(k, v))
    buffers = [x.transpose(0, 1).flatten(1, 2) for x in (k, v)]  # [P, m·L, D]
    for _ in range(2):
        INT8.round(buffers[0], buffers[1])
        for x, page in zip(buffers, expected, strict=True):
            assert torch.equal(x.unflatten(1, (-1, SIZE)).transpose(0, 1), page)


@pytest.mark.parametrize("value", [0.0, 1e-42, 3e38, torch.inf])
def test_numbers_that_are_out_of_the_ordinary(value: float) -> None:
    k = torch.full((1, 2, SIZE, 10), value)
    found = INT8.unpack(INT8.pack(k, -k))
    assert all(x.isfinite().all() and bool(x.any()) == (value > 1) for x in found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("kind", FORMATS.values())
def test_pages_are_found_again_in_their_rows(kind: type[KVFormat], heads: int, dtype: torch.dtype) -> None:
    format = kind(heads, SIZE, *((row_bytes(10), ROW) if kind.on_device else (10, dtype)))
    k, v = pages(4, format)
    if kind.on_device:
        k, v = (torch.randint(0, 255, x.shape, dtype=ROW) for x in (k, v))
    rows = format.pack(k, v)
    assert (tuple(rows.shape), rows.dtype) == ((4, format.page_rows, *format.row_shape), format.row_dtype)
    assert rows.nbytes == 4 * format.page_bytes
    whole = torch.stack(format.unpack(rows), dim=1)
    if not format.rounds:
        assert torch.equal(whole, torch.stack((k, v), dim=1))
    page, offset = torch.tensor([3, 0, 1]), torch.tensor([0, 5, 2])
    found = format.tokens(rows[page, offset], rows[page, SIZE:])
    assert torch.equal(found, whole[page, :, :, offset])
    k, v = (x.unflatten(0, (2, 2)).transpose(1, 2).flatten(2, 3) for x in (k, v))  # [2, P, 2·L, D]
    assert torch.equal(format.pack(k, v), rows.reshape(2, -1, *format.row_shape))


@pytest.mark.parametrize("value", [-1.0, torch.nan, torch.inf, 3e38])
@pytest.mark.parametrize("which", ["keys", "values"])
def test_scales_that_no_number_has_are_refused(which: str, value: float) -> None:
    rows = INT8.pack(*pages(2))
    tokens, extra = rows[:, :SIZE], rows[:, SIZE:]
    INT8.check(tokens, extra, "the file")
    where = extra[1, 0, :4] if which == "keys" else tokens[1, 0, 40:44]
    where.copy_(torch.tensor([value]).view(torch.uint8))
    with pytest.raises(DataError, match="the file was altered since it was written; prefill the text again"):
        INT8.check(tokens, extra, "the file")


def test_a_user_names_a_format() -> None:
    assert [kv_dtype_of(x) for x in (None, "auto", "int8", torch.int8)] == ["auto", "auto", "int8", "int8"]
    for other in ("int4", 8, torch.float32, ["int8"]):
        with pytest.raises(UsageError, match=rf"^unknown kv_dtype .*{re.escape('expected auto, int8, int8-device')}\Z"):
            kv_dtype_of(other)
