"""Kernels of scores, beside PyTorch's operators in float32."""

import math

import pytest
import torch

from lce.kernels.choose.scores import add_weights, best_below_top, scores_of_few, scores_of_many, weight_sums
from tests.kernels.truth import unseen


@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (3, 1, 300, 64), (2, 4, 700, 16)])
def test_few_queries(dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    n_groups, n, n_keys, dim = shape
    q, keys = torch.randn(n_groups, n, dim).to(dtype), torch.randn(n_groups, n_keys + 9, dim).to(dtype)
    keys = keys[:, 5 : n_keys + 5]
    scores = scores_of_few(q, keys)
    assert scores.dtype == torch.float32
    assert (scores - q.float() @ keys.float().mT).abs().max() < 1e-4


@pytest.mark.parametrize("together", [1, 2, 6])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("wide", [False, True], ids=["alike", "float32 queries"])
def test_heads_that_share_keys_and_bounds(dtype: torch.dtype, wide: bool, n: int, together: int) -> None:
    """Queries as they lie in a product's rows; the bounds of a page are its keys' smallest and largest channels."""
    q = torch.randn(n, 12, 8).to(torch.float32 if wide else dtype).transpose(0, 1)  # [H, T, D]
    keys = torch.randn(2, 300, 5, 8).to(dtype)
    bounds = torch.stack(keys.aminmax(dim=2), dim=2)  # [G, M, 2, D]
    shared = q.float().unflatten(0, (2, 6))  # [G, H/G, T, D]
    products = torch.einsum("grtd,gmd->grtm", shared, keys[:, :, 0].float()).flatten(0, 1)
    either = shared[:, :, :, None, None] * bounds.float()[:, None, None]
    bounded = either.amax(dim=-2).sum(dim=-1).flatten(0, 1)
    for kept, each in ((keys[:, :, 0].contiguous(), products), (bounds, bounded)):
        expected = each.unflatten(0, (-1, together)).sum(dim=1)
        torch.testing.assert_close(scores_of_few(q, kept, together), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shape", [(2, 1, 2), (40, 100, 64), (128, 1000, 130)])
def test_many_queries(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    n, n_keys, dim = shape
    q, keys = torch.randn(n, dim).to(dtype), torch.randn(n_keys, dim).to(dtype)
    into = torch.full((n_keys * 128,), torch.nan)
    scores = scores_of_many(q, keys, into)
    assert (scores.dtype, scores.data_ptr()) == (torch.float32, into.data_ptr())
    torch.testing.assert_close(scores.double(), keys.double() @ q.double().T, rtol=1e-5, atol=1e-4)
    assert torch.equal(best_below_top(scores), best_below_top(scores.contiguous()))


@pytest.mark.parametrize("shape", [(1, 1), (600, 7), (1500, 40)])
def test_what_tokens_are_worth(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    scores = torch.randn(shape).to(dtype)
    wide = scores.float()
    assert torch.equal(best_below_top(scores), (wide - wide.amax(dim=0)).amax(dim=1))


@pytest.mark.parametrize(
    ("n", "n_keys", "window"), [(1, 300, 100), (1, 1, 5), (40, 40, 12), (70, 600, 300), (9, 20, 99)]
)
def test_weights_of_the_keys_that_are_seen(dtype: torch.dtype, n: int, n_keys: int, window: int) -> None:
    logits, lse = torch.randn(3, n, n_keys).to(dtype), torch.rand(3, n) + 4
    into = torch.ones(3, n_keys + 4)[:, 2:-2]
    add_weights(logits, lse, 0.5, into, n_keys - n, window)
    truth = (logits.float() * 0.5 - lse[..., None]).masked_fill(unseen(n, n_keys, window), -math.inf).exp().sum(dim=1)
    assert (into - 1 - truth).abs().max() < 1e-5


@pytest.mark.parametrize(("n", "n_keys", "window"), [(9, 9, 3), (40, 140, 12), (70, 600, 300), (130, 150, 999)])
def test_weights_of_keys_recomputed_for_many_queries(dtype: torch.dtype, n: int, n_keys: int, window: int) -> None:
    q, keys = torch.randn(6, n, 64).to(dtype), torch.randn(2, n_keys + 5, 64).to(dtype)[:, 2 : n_keys + 2]
    lse = torch.rand(6, n) + 4
    logits = q.double() @ keys.double().repeat_interleave(3, 0).mT * 0.25
    truth = (logits - lse[..., None]).masked_fill(unseen(n, n_keys, window), -math.inf).exp().sum(dim=1)
    torch.testing.assert_close(weight_sums(q, keys, lse, 0.25, window).double(), truth, rtol=1e-4, atol=1e-5)


def test_the_number_of_threads_changes_no_bit() -> None:
    q, keys = torch.randn(2, 3, 64), torch.randn(2, 3000, 64)
    logits, lse, found = torch.randn(2, 9, 3000), torch.rand(2, 9) + 5, []
    for n_threads in (1, 2):
        torch.set_num_threads(n_threads)
        into = torch.zeros(2, 3000)
        add_weights(logits, lse, 1.0, into, 2991, 2000)
        many = scores_of_many(logits[0, :, :64].contiguous(), keys[0])
        sums = weight_sums(logits[:, :, :64], keys, lse, 1.0, 99)
        found.append((into, many, sums, scores_of_few(q, keys), best_below_top(logits[0].T.contiguous())))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
