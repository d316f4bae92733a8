"""The n best of many scores on a GPU, or in Triton's interpreter, beside a stable sort."""

import pytest
import torch

pytest.importorskip("triton")
from lce.kernels.choose.best_triton import best_tokens
from tests.kernels.truth import DEVICE, ON_GPU

pytestmark = ON_GPU


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("n_scores", "n"), [(1, 1), (50, 50), (4097, 1), (9000, 8999), (16384, 4096), (16385, 700), (20000, 19999)]
)
def test_the_best_ascending_and_of_equal_ones_the_last(n_scores: int, n: int, dtype: torch.dtype) -> None:
    scores = (
        torch.randn(n_scores, generator=torch.Generator().manual_seed(n)).mul(4).round().to(dtype)
    )  # many are equal
    scores[::7] = torch.randn(len(scores[::7]), generator=torch.Generator().manual_seed(1)).to(dtype)
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e-40, -1e-40]).to(dtype)
    if n_scores > 99:
        scores[90:95] = odd
        scores[-5:] = odd
    numbers = torch.where(scores.isnan(), torch.inf, scores.double())
    order = sorted(range(n_scores), key=lambda i: (numbers[i].item(), str(numbers[i].item())[0] != "-", i))
    assert best_tokens(scores.to(DEVICE), n).tolist() == sorted(order[-n:])


@pytest.mark.parametrize("n_scores", [5000, 17000])
@pytest.mark.parametrize("value", [-torch.inf, torch.nan, 0.0])
def test_all_equal(n_scores: int, value: float) -> None:
    chosen = best_tokens(torch.full((n_scores,), value, device=DEVICE), 3)
    assert chosen.tolist() == [n_scores - 3, n_scores - 2, n_scores - 1]


@pytest.mark.parametrize("n_scores", [3000, 17000])
def test_fewer_can_be_taken_than_are_asked_for(n_scores: int) -> None:
    """The last ones of those with -inf fill the choice."""
    scores = torch.full((n_scores,), -torch.inf, device=DEVICE)
    scores[10:20] = torch.arange(10.0)
    assert best_tokens(scores, 12).tolist() == [*range(10, 20), n_scores - 2, n_scores - 1]
