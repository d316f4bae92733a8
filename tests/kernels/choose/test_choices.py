"""The best chunks of rows and the best tokens, beside stable sorts of reversed rows: of equal scores, the last."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lce.kernels.choose.choices import best_chunks, best_tokens


def chosen_by_sorting(scores: Tensor, forced: Tensor, n: int, start: int, size: int) -> Tensor:
    ids = torch.arange(scores.shape[-1])
    own = ((start + torch.arange(scores.shape[1])) // size)[:, None]
    scores = scores.double().nan_to_num(nan=1e300, posinf=1e299, neginf=-math.inf)
    scores = scores.masked_fill(forced, math.inf).masked_fill(ids >= own, -math.inf)
    best = scores.flip(-1).sort(dim=-1, descending=True, stable=True)
    n = min(n, scores.shape[-1])
    indices = scores.shape[-1] - 1 - best.indices[..., :n]
    chosen = indices.masked_fill(best.values[..., :n] == -math.inf, 1 << 40).sort(dim=-1).values
    return chosen.masked_fill(chosen == 1 << 40, -1)


@pytest.mark.parametrize(
    ("shape", "n", "size", "start"),
    [
        *(((1, 3, 1), 4, 4, 4), ((3, 20, 9), 4, 4, 20), ((2, 50, 70), 15, 4, 200), ((4, 1, 512), 15, 256, 131072)),
        *(((2, 9, 600), 63, 3, 1790), ((1, 40, 20), 30, 2, 0)),
    ],
)
def test_the_best_chunks_are_those_of_a_stable_sort(dtype: Any, shape: Any, n: int, size: int, start: int) -> None:
    ids, own = torch.arange(shape[2]), ((start + torch.arange(shape[1])) // size)[:, None]
    forced = ((ids == 0) | (ids == own - 1)).contiguous()
    none = torch.zeros_like(forced)
    for scores in (torch.randn(shape).to(dtype), torch.randint(0, 4, shape).to(dtype)):  # the second has equal ones
        for must in (forced, none):
            truth = chosen_by_sorting(scores, must, n, start, size)
            assert torch.equal(best_chunks(scores, must, n, start, size), truth)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_scores_that_are_no_numbers_have_a_place(value: float) -> None:
    scores = torch.randn(2, 6, 40)
    scores[:, :, ::3] = value
    forced = torch.zeros(6, 40, dtype=torch.bool)
    forced[:, 6] = True
    for n in (1, 5, 20, 40):
        truth = chosen_by_sorting(scores, forced, n, 150, 4)
        assert torch.equal(best_chunks(scores, forced, n, 150, 4), truth)


@pytest.mark.parametrize("n_tokens", [1, 5, 17, 300, 9000])
@pytest.mark.parametrize("eps", [0, 1, 3, 20])
def test_the_best_tokens_are_those_of_a_stable_sort(n_tokens: int, eps: int) -> None:
    for scores in (torch.randn(n_tokens), torch.randint(0, 9, (n_tokens,)).float()):
        reach = torch.nn.functional.pad(scores, (eps, eps), value=-math.inf).unfold(0, 2 * eps + 1, 1).amax(1)
        order = n_tokens - 1 - reach.flip(0).sort(descending=True, stable=True).indices
        for n in {1, min(n_tokens, 7), -(-n_tokens // 3), n_tokens}:
            assert torch.equal(best_tokens(scores, n, eps), order[:n].sort().values)


def test_nan_and_infinite_tokens_are_valid_choices() -> None:
    scores = torch.tensor([math.nan, -math.inf, math.inf, 0.0, -math.inf, math.nan])
    assert (best_tokens(scores, 2).tolist(), best_tokens(scores, 4).tolist()) == ([0, 5], [0, 2, 3, 5])
    assert best_tokens(scores, 6).tolist() == list(range(6))
    assert best_tokens(torch.full((100,), math.nan), 3, 2).tolist() == [97, 98, 99]
