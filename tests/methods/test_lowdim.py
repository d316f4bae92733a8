"""Low-dimensional keys: the choice of tokens, and the maps."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from lce.attention import best_tokens, spread
from lce.attention.scores import leading
from lce.errors import UsageError
from lce.methods.lowdim import LowDimMap, LowDimMaps, principal
from tests.running import low_dim_map


def layer(n_heads: int = 4, n_kv_heads: int = 2, low_dim: int = 3) -> LowDimMap:
    return low_dim_map(n_heads, n_kv_heads, 4, low_dim)


def test_the_digest_covers_every_number() -> None:
    first = layer()
    digests = {LowDimMaps([first]).digest, LowDimMaps([first, first]).digest}
    for name, x in first.tensors().items():
        changed = x.clone()
        changed.view(-1)[-1] += 1
        digests.add(LowDimMaps([replace(first, **{name: changed})]).digest)
    assert len(digests) == 6


def test_maps_of_no_layer_are_refused() -> None:
    with pytest.raises(UsageError, match="of no layer"):
        LowDimMaps([])


@pytest.mark.parametrize("layers", [[layer()], [layer(), layer(8)], [layer(), layer(4, 1)], [layer(), layer(4, 2, 2)]])
def test_maps_of_other_sizes_are_refused(layers: list[LowDimMap]) -> None:
    LowDimMaps([layer(), layer()]).check_shapes(range(2), 4, 2, 4)
    LowDimMaps([layer(), layer()]).check_shapes(range(1), 4, 2, 4)
    with pytest.raises(UsageError, match=r"expected maps of 2 layers"):
        LowDimMaps(layers).check_shapes(range(2), 4, 2, 4)


def test_principal_directions_are_those_of_the_largest_variance() -> None:
    k = torch.randn(2, 200, 4) * torch.tensor([3.0, 0.1, 1.0, 0.5]) + 2
    rows = k.transpose(0, 1).flatten(1).numpy().astype(np.float64)
    axes = np.linalg.svd(rows - rows.mean(0), full_matrices=False)[2][:3]
    ours = principal(k, 3).numpy()
    assert np.abs(np.abs(axes @ ours) - np.eye(3)).max() < 1e-4
    assert principal(k, 100).shape == (8, 8)


def test_leading_eigenvectors_are_found_by_iteration() -> None:
    x = torch.randn(90, 96, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * torch.arange(96, 0, -1)
    x = x.T @ x  # of rank 90
    values, vectors = torch.linalg.eigh(x)
    found = leading(x, 6)
    assert torch.allclose((found.T @ x @ found).diagonal(), values[-6:], rtol=1e-3)
    assert ((found.T @ vectors[:, -6:]) ** 2).sum() > 5.99
    assert leading(torch.zeros_like(x), 6).isfinite().all()


def test_of_equal_scores_the_last_are_taken() -> None:
    scores = torch.tensor([1.0, 5.0, 3.0, 5.0, 3.0, 3.0, 0.0])
    for n, expected in ((1, [3]), (2, [1, 3]), (3, [1, 3, 5]), (4, [1, 3, 4, 5]), (7, list(range(7)))):
        assert best_tokens(scores, n).tolist() == expected


def test_neighbours_come_along() -> None:
    assert spread(torch.tensor([0.0, 1.0, 9.0, 2.0, 0.0]), 1).tolist() == [1.0, 9.0, 9.0, 9.0, 2.0]
    assert spread(torch.tensor([7.0, 1.0]), 3).tolist() == [7.0, 7.0]
    assert spread(torch.tensor([7.0, 1.0]), 0).tolist() == [7.0, 1.0]
