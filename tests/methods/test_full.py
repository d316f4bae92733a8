"""Full attention: it alone applies a checkpoint's sliding window."""

from __future__ import annotations

import pytest

from lce.methods import make
from tests import oracle
from tests.running import cut, run, vectors


@pytest.mark.parametrize("sliding", [1, 5, 16, 1000])
@pytest.mark.parametrize("block", [1, 7, 64, 150])
def test_honours_the_sliding_window(sliding: int, block: int) -> None:
    q, k, v = vectors(1, 4, 2, 150, 8)
    setting = oracle.Setting(32, sliding_window=sliding)
    truth = oracle.attention(q, k, v, oracle.full(q, k, v, setting), setting)
    out = run(make("full"), q, k, v, cut(150, block), window=32, sliding_window=sliding)
    assert (out - truth).abs().max() <= 1e-4
