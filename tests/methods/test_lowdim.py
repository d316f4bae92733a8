"""Low-dimensional keys: the choice of tokens, the maps and their file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from lce.errors import CapacityError, DataError
from lce.methods import lowdim
from lce.methods.lowdim import LowDimMap, LowDimMaps, block_scores, first_best, principal, spread


def maps(n_layers: int = 2) -> LowDimMaps:
    return LowDimMaps([LowDimMap(torch.randn(16, 3), torch.randn(8, 3)) for _ in range(n_layers)])


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    made, file = maps(), tmp_path / "maps.safetensors"
    made.save(file, "this model")
    opened = LowDimMaps.open(file, "this model")
    assert opened.low_dim == 3
    assert list(tmp_path.iterdir()) == [file]
    for ours, theirs in zip(made.layers, opened.layers, strict=True):
        assert torch.equal(ours.query, theirs.query)
        assert torch.equal(ours.key, theirs.key)
    assert opened.layer(1, torch.zeros(1, dtype=torch.bfloat16)).key.dtype == torch.bfloat16


def test_files_that_are_refused(tmp_path: Path) -> None:
    file, remedy = tmp_path / "maps.safetensors", "lce calibrate"
    with pytest.raises(DataError, match=remedy):
        LowDimMaps.open(file, "this model")
    maps().save(file, "another")
    with pytest.raises(DataError, match=f"another model's weights; .*{remedy}"):
        LowDimMaps.open(file, "this model")
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(DataError, match=remedy):
        LowDimMaps.open(file, "another")
    save_file({"x": torch.zeros(1)}, file)
    with pytest.raises(DataError, match="holds no low-dim maps"):
        LowDimMaps.open(file, "another")
    metadata = {"format": lowdim.FORMAT, "fingerprint": "m"}
    save_file({"layers.0.query": torch.zeros(4, 2)}, file, metadata)
    with pytest.raises(DataError, match="lacks maps"):
        LowDimMaps.open(file, "m")
    save_file({"layers.0.query": torch.zeros(4, 2), "layers.0.key": torch.zeros(4, 3)}, file, metadata)
    with pytest.raises(DataError, match="unequal shapes"):
        LowDimMaps.open(file, "m")


def test_an_unwritable_place_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match="cannot write"):
        maps().save(tmp_path / "none" / "maps.safetensors", "m")


def test_principal_directions_are_those_of_the_largest_variance() -> None:
    k = torch.randn(2, 200, 4) * torch.tensor([3.0, 0.1, 1.0, 0.5]) + 2
    rows = k.transpose(0, 1).flatten(1).numpy().astype(np.float64)
    axes = np.linalg.svd(rows - rows.mean(0), full_matrices=False)[2][:3]
    ours = principal(k, 3).numpy()
    assert np.abs(np.abs(axes @ ours) - np.eye(3)).max() < 1e-4
    assert principal(k, 100).shape == (8, 8)


def test_of_equal_scores_the_first_are_taken() -> None:
    scores = torch.tensor([1.0, 5.0, 3.0, 5.0, 3.0, 3.0, 0.0])
    for n, expected in ((1, [1]), (2, [1, 3]), (3, [1, 2, 3]), (4, [1, 2, 3, 4]), (7, list(range(7)))):
        assert first_best(scores, n).tolist() == expected


def test_neighbours_come_along() -> None:
    assert spread(torch.tensor([0.0, 1.0, 9.0, 2.0, 0.0]), 1).tolist() == [1.0, 9.0, 9.0, 9.0, 2.0]
    assert spread(torch.tensor([7.0, 1.0]), 3).tolist() == [7.0, 7.0]
    assert spread(torch.tensor([7.0, 1.0]), 0).tolist() == [7.0, 1.0]


def test_queries_are_looked_at_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    f = torch.randn(11, 20)
    whole = block_scores(lambda rows: f[rows], 11, 20)
    assert torch.equal(whole, (f - f.amax(1, keepdim=True)).amax(0))
    monkeypatch.setattr(lowdim, "SCORES_AT_ONCE", 60)
    sliced: list[int] = []

    def some(rows: slice) -> torch.Tensor:
        sliced.append(len(f[rows]))
        return f[rows]

    assert torch.equal(block_scores(some, 11, 20), whole)
    assert sliced == [3, 3, 3, 2]
