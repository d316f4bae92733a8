"""The types of GGUF against the gguf package."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import quants

from lce.weights.gguf_types import TYPES, UNREAD, Exploded, GgufType

QUANTISED = [kind for kind in TYPES.values() if kind.codes]
# Scales as float16: zeros, the least and the largest below and above 2^-14, the largest of all, infinities, NaN.
SPECIAL = [0, 0x8000, 1, 0x8001, 0x3FF, 0x400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0xFFFF]


def blocks(kind: GgufType) -> np.ndarray:
    """Random blocks, which have every kind of scale, and blocks of one special word throughout."""
    raw = np.random.default_rng(kind.number).integers(0, 256, (150_000 // kind.n_bytes, kind.n_bytes), dtype=np.uint8)
    for row, word in zip(raw, SPECIAL, strict=False):
        row[:] = np.resize(np.array([word], "<u2").view(np.uint8), kind.n_bytes)
    return raw


def formula(exploded: Exploded) -> np.ndarray:
    """The weights by `Exploded`'s formula in float64, where every step is exact."""
    d = exploded.d.astype(np.float64)[:, None]
    sub = np.ones((1, 1)) if exploded.sub is None else exploded.sub
    out = exploded.codes.reshape(len(d), sub.shape[1], -1) * (d * sub)[..., None]
    if exploded.dmin is not None:
        low = exploded.dmin.astype(np.float64)[:, None]
        out += (low if exploded.submin is None else -low * exploded.submin)[..., None]
    return out.reshape(exploded.codes.shape)


def test_numbers_names_and_sizes_are_the_packages():
    for kind in Type:
        found = TYPES.get(kind)
        assert (found.name if found else UNREAD[kind]) == kind.name
        assert found is None or (found.size, found.n_bytes) == gguf.GGML_QUANT_SIZES[kind]
    assert not TYPES.keys() & UNREAD.keys()


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning:gguf")
@pytest.mark.parametrize("kind", TYPES.values(), ids=lambda kind: kind.name)
def test_weights_equal_the_packages_to_the_bit(kind):
    raw = blocks(kind)
    expected, got = quants.dequantize(raw, Type(kind.number)).reshape(-1, kind.size), kind.dequantise(raw)
    assert (got.dtype, kind.dequantise(raw[:0]).shape) == (np.float32, (0, kind.size))
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(got), ~numbers)
    np.testing.assert_array_equal(got[numbers].view(np.uint32), expected[numbers].view(np.uint32))


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_codes_and_scales_make_the_weights_without_rounding_but_of_the_sum(kind):
    exploded = kind.explode(blocks(kind))
    with np.errstate(all="ignore"):
        exact = formula(exploded)
        np.testing.assert_array_equal(exploded.weights(), exact.astype(np.float32))
    assert exploded.codes.dtype == np.int8
    assert kind.explode(np.empty((0, kind.n_bytes), np.uint8)).weights().shape == (0, kind.size)
    assert (exploded.codes.min(), exploded.codes.max()) == kind.codes
    most = 1 if exploded.sub is None else np.abs(exploded.sub.astype(int)).max()
    assert (2**11 - 1) * most * max(map(abs, kind.codes)) < 2**24  # so that every product is exact in float32


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_the_bound_of_a_block_is_finite_exactly_if_its_scales_are(kind):
    exploded = kind.explode(blocks(kind))
    bound, weights = kind.largest(exploded), exploded.weights()
    finite = np.isfinite(exploded.d) & (True if exploded.dmin is None else np.isfinite(exploded.dmin))
    if kind.name == "MXFP4":
        finite &= exploded.d < 2.0**125  # 12 times that is beyond float32
    np.testing.assert_array_equal(np.isfinite(bound), finite)
    assert 0 < finite.sum() < len(finite)
    assert (bound[finite] >= np.abs(weights[finite]).max(1)).all()
