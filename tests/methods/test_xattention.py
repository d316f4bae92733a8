"""`xattention`: what its definition implies, and its knobs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import lce
from lce.errors import UsageError
from lce.methods import XAttention, make, xattention
from lce.methods.costs import cost
from tests.methods.test_decoding import differences
from tests.methods.test_matrix import KNOBS, WINDOW
from tests.running import cut, run, vectors


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_passes_of_whole_blocks_give_the_same(data: st.DataObject) -> None:
    """The last tokens of a text, fewer than a block, may come in any passes."""
    method = XAttention(**data.draw(st.sampled_from(KNOBS["xattention"]))).resolve(WINDOW)
    n_blocks, rest = data.draw(st.integers(1, 12)), data.draw(st.integers(0, method.size - 1))
    q, k, v = vectors(data.draw(st.integers(0, 3)), 4, 2, n_blocks * method.size + rest, 8)
    sizes, left = list[int](), n_blocks
    while left:
        sizes.append(data.draw(st.integers(1, left)) * method.size)
        left -= sizes[-1] // method.size
    last = cut(rest, data.draw(st.integers(1, method.size)))
    whole = run(method, q, k, v, [q.shape[1]], window=WINDOW)
    assert (run(method, q, k, v, [*sizes, *last], window=WINDOW) - whole).abs().max() <= 1e-4


def test_a_pass_that_cuts_blocks_is_dense_there_alone() -> None:
    method, n = XAttention(stride=2, block_size=8, top_p=0.3).resolve(WINDOW), 60
    q, k, v = vectors(1, 4, 2, n, 8)
    full = run(make("full"), q, k, v, [n], window=WINDOW)
    whole = run(method, q, k, v, [n], window=WINDOW)
    passes = run(method, q, k, v, [20, 29, 11], window=WINDOW)
    cut_rows = [*range(16, 24), *range(48, n)]  # block 2, and blocks 6 and 7; 7 is cut by the text's end
    kept_rows = [i for i in range(n) if i not in cut_rows]
    assert (passes - full)[:, cut_rows].abs().max() <= 1e-5
    assert (passes - whole)[:, kept_rows].abs().max() <= 1e-5
    assert (whole - full)[:, kept_rows].abs().max() > 0.1
    assert (run(method, q, k, v, cut(n, 7), window=WINDOW) - full).abs().max() <= 1e-5, "no pass has a block"


def test_the_block_with_the_needle_is_chosen() -> None:
    """All keys are alike but those of block 3, which the queries of block 6 ask for."""
    method, size, chosen = XAttention(stride=2, block_size=4, top_p=0.9).resolve(WINDOW), 4, list[Tensor]()
    q, k, v = torch.zeros(2, 32, 8), torch.zeros(1, 32, 8), torch.randn(1, 32, 8)
    q[0, 6 * size : 7 * size, 3] = k[0, 3 * size : 4 * size, 3] = 8.0  # the slowest pair of dimensions is 3 and 7
    run(method, q, k, v, [32], window=WINDOW, note=lambda _, some: chosen.append(some))
    (some,) = chosen
    of_rows = [set(row.tolist()) - {-1} for row in some[0]]
    assert some.shape == (2, 32, 8)
    assert of_rows[6 * size : 7 * size] == [{0, 3}] * size
    assert of_rows[:size] == [set()] * size
    assert set(some[1, -1].tolist()) - {-1} >= {0, 1, 2, 3, 4, 5}, "even shares need nearly all"


def test_slices_of_a_pass_choose_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    method, noted = XAttention(stride=2, block_size=4, top_p=0.6).resolve(WINDOW), list[Tensor]()
    q, k, v = vectors(1, 4, 2, 93, 8)

    def out() -> Tensor:
        return run(method, q, k, v, [93], window=WINDOW, note=lambda _, some: noted.append(some))

    whole = out()
    assert len(list(method.slices(0, 93))) == 1
    monkeypatch.setattr(xattention, "CHOICES_AT_ONCE", 3 * 4 * 23)
    assert list(method.slices(2, 93)) == [(1, 4), (4, 7), (7, 10), (10, 13), (13, 16), (16, 19), (19, 22), (22, 23)]
    assert (out() - whole).abs().max() <= 1e-5
    assert torch.equal(*noted)


def test_half_of_the_blocks_is_half_of_the_work() -> None:
    """The estimate costs 1 / (2 · stride) of full attention, and is counted with the most that a choice may cost."""
    method, n = XAttention().resolve(8192), 8192
    block = lce.methods.QueryBlock(0, n, 9, 3, 64)
    found, full = cost(method, block), cost(lce.methods.Full(), block)
    assert found.scores / full.attention == pytest.approx(1 / 16, rel=0.15)
    assert found.attention == pytest.approx(full.attention, rel=0.001)
    step = lce.methods.QueryBlock(n - 1, n, 9, 3, 64)
    assert cost(method, step) == cost(lce.methods.Full(), step)


def test_a_recorded_step_ignores_the_checkpoints_sliding_window() -> None:
    found, recorded = differences(XAttention(stride=4), 60, 90, sliding_window=20)
    assert max(found) <= 1e-4
    assert len(recorded) == 30


def test_blocks_suit_the_window_and_the_stride() -> None:
    def size(window: int, **knobs: int) -> int:
        return XAttention(**knobs).resolve(window).size

    assert [size(window) for window in (32, 512, 4096, 131072)] == [8, 16, 128, 128]
    assert [size(8192, stride=stride) for stride in (1, 3, 16, 200)] == [128, 126, 128, 200]
    assert size(32, stride=1) == 2
    assert XAttention(block_size=96).resolve(8192).block == 21 * 96
    with pytest.raises(UsageError, match="xattention: block_size is 20; expected a multiple of stride, 8"):
        size(512, block_size=20)
    with pytest.raises(UsageError, match="top_p is 0; expected a share above 0"):
        size(512, top_p=0)
