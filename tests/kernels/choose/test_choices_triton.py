"""Choices on a GPU, or in Triton's interpreter, beside those of the CPU's kernels."""

import pytest
import torch
from torch import Tensor

from lce.kernels.choose import choices as cpu

pytest.importorskip("triton")
from lce.kernels.choose import choices_triton as choices
from tests.kernels.truth import DEVICE, ON_GPU, lane_rows, on_device

pytestmark = ON_GPU
ODD = [torch.nan, -torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.0, 1.0, -1.0, 1e-40]


def same(scores: Tensor, forced: Tensor, n: int, start: int, size: int) -> None:
    expected = cpu.best_chunks(scores, forced, n, start, size)
    first = torch.arange(start, start + scores.shape[1], device=DEVICE) if start % 2 else start
    chosen = choices.best_chunks(scores.to(DEVICE), forced.to(DEVICE), n, first, size)
    assert torch.equal(chosen.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n_chunks", "n", "start"), [(1, 3, 3), (40, 5, 131), (40, 64, 30), (700, 12, 2790)])
def test_choices_of_random_scores(dtype: torch.dtype, n_chunks: int, n: int, start: int) -> None:
    scores = torch.randn(2, 2, n_chunks).mul(4).round().to(dtype)  # many are equal
    forced = torch.rand(2, n_chunks) < 0.05
    same(scores, forced, n, start, 4)


def test_choices_of_odd_scores() -> None:
    pick = torch.randint(len(ODD), (3, 2, 37))
    scores, forced = torch.tensor(ODD)[pick], torch.rand(2, 37) < 0.1
    for start in (0, 61, 200):
        same(scores, forced, 6, start, 5)
    same(torch.full((1, 2, 9), -torch.inf), torch.zeros(2, 9, dtype=torch.bool), 4, 100, 5)
    same(torch.full((1, 2, 9), torch.nan), torch.ones(2, 9, dtype=torch.bool), 4, 100, 5)


def test_scores_of_few() -> None:
    q, keys = torch.randn(3, 2, 20, device=DEVICE), torch.randn(3, 90, 24, device=DEVICE)[:, 7:, :20]
    expected = q.double() @ keys.double().mT
    torch.testing.assert_close(choices.scores_of_few(q, keys).double(), expected, rtol=1e-5, atol=1e-5)
    bounds, q = torch.randn(2, 9, 2, 20, device=DEVICE).sort(dim=2).values, torch.randn(4, 2, 20, device=DEVICE)
    low, high = bounds.repeat_interleave(2, 0)[:, None].double().unbind(dim=3)  # [H, 1, M, D]
    expected = torch.maximum(q[:, :, None] * low, q[:, :, None] * high).sum(-1)
    torch.testing.assert_close(choices.scores_of_few(q, bounds).double(), expected, rtol=1e-5, atol=1e-5)


def decoded(q: Tensor, kept: Tensor, position: int, size: int, n: int, choosers: int, least: bool, last: int) -> Tensor:
    """The definition, on the CPU: what the query at `position` chooses, chunk 0 and the `last` complete ones forced."""
    seen = min(position // size, kept.shape[1])
    rows = kept[:, :seen].double().repeat_interleave(len(q) // len(kept), 0)
    query = q.double()[:, None]
    if kept.ndim == 4:
        scores = torch.maximum(query * rows[:, :, 0], query * rows[:, :, 1]).sum(-1)
    else:
        scores = (query * rows).sum(-1)
    scores = scores.unflatten(0, (choosers, -1)).sum(1) * (-1 if least else 1)
    forced = torch.zeros(1, seen, dtype=torch.bool)
    forced[:, :1] = forced[:, max(0, seen - last) :] = True
    return cpu.best_chunks(scores[:, None].float(), forced, n, position, size)[:, 0]


CASES = [(4, False, False, torch.float32), (2, False, True, torch.bfloat16), (1, False, False, torch.float32)]


@pytest.mark.parametrize(
    ("choosers", "bounds", "least", "dtype"),
    [*CASES, pytest.param(4, True, False, torch.float32, marks=pytest.mark.slow)],
)
def test_a_query_chooses_at_any_position_with_the_same_tensors(
    choosers: int, bounds: bool, least: bool, dtype: torch.dtype
) -> None:
    """Rows behind the complete chunks are NaN: memory that nobody has written."""
    size, n, places = 3, 5, (0, 5, 16, 211)
    q, shape = torch.randn(4, len(places), 24).to(dtype), (2, 70, 2, 24) if bounds else (4, 70, 24)
    rows = [torch.randn(shape).sort(dim=2).values if bounds else torch.randn(shape) for _ in places]
    kept = [x.to(dtype) for x in rows]
    for x, position in zip(kept, places, strict=True):
        x[:, position // size :] = torch.nan
    at, held = torch.zeros(1, dtype=torch.int64, device=DEVICE), on_device(*kept)
    for own in (False, True):
        last = 1 + own  # one chunk, or two
        how = {"choosers": choosers, "n_first": 1, "n_last": last, "least": least, "own": own}
        everywhere = torch.tensor(places, device=DEVICE)
        together = choices.best_runs(*on_device(q), lane_rows(held), everywhere, size, n, **how)
        for i, position in enumerate(places):
            at.fill_(position)
            first, count = choices.best_runs(*on_device(q[:, i : i + 1]), held[i], at, size, n, **how)
            assert first.shape == count.shape == (choosers, 1, n + own)
            assert torch.equal(torch.stack((first, count))[:, :, 0], torch.stack(together)[:, :, i])
            expected = decoded(q[:, i], kept[i], position, size, n, choosers, least, last)
            (first, count), chosen = (first[:, 0].cpu(), count[:, 0].cpu()), expected.shape[1]
            assert torch.equal(first[:, :chosen], expected.clamp(min=0) * size)
            assert torch.equal(count[:, :chosen], (expected >= 0) * size)
            assert not count[:, chosen:n].any()
            if own:
                assert torch.equal(first[:, n], torch.full((choosers,), position // size * size))
                assert torch.equal(count[:, n], torch.full((choosers,), position % size + 1))


@pytest.mark.parametrize("at", [None, [0, 7], [8, 29]])
def test_runs_of_chosen_chunks(at: list[int] | None) -> None:
    chosen = torch.tensor([[[0, 2, 5], [1, -1, -1]]], device=DEVICE)
    position = None if at is None else torch.tensor(at, device=DEVICE)
    first, count = choices.runs_of_chunks(chosen, 8, position)
    own = [[] if at is None else [(i // 8 * 8, i % 8 + 1)] for i in at or (0, 0)]
    expected = [[(0, 8), (16, 8), (40, 8), *own[0]], [(8, 8), (-8, 0), (-8, 0), *own[1]]]
    assert torch.stack((first, count), -1).tolist() == [[[list(run) for run in runs] for runs in expected]]
