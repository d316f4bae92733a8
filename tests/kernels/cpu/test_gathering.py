"""Rows that are taken are those that `index_select` takes."""

from __future__ import annotations

import pytest
import torch

from lce.kernels.cpu.gathering import take_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 90, 3), (3, 200, 64)])
def test_rows_are_those_of_the_index(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    tensors = tuple((torch.randn(shape[0], shape[1] + 3, shape[2]) * 9).to(dtype)[:, 2:-1] for _ in range(2))
    for index in (torch.arange(shape[1]), torch.randint(shape[1], (77,)), torch.zeros(0, dtype=torch.int64)):
        taken = take_rows((tensors[0], tensors[1]), index)
        assert all(torch.equal(a, x[:, index]) for a, x in zip(taken, tensors, strict=True))


def test_rows_go_where_the_caller_wants_them() -> None:
    tensors, index = (torch.randn(2, 90, 4), torch.randn(2, 90, 4)), torch.tensor([3, 3, 80])
    buffer = torch.empty(50)
    taken = take_rows(tensors, index, buffer)
    assert all(torch.equal(a, x[:, index]) for a, x in zip(taken, tensors, strict=True))
    assert taken[0].data_ptr() == buffer.data_ptr()
    assert taken[1].data_ptr() == buffer[24:].data_ptr()
    assert torch.equal(take_rows(tensors, index, buffer[:47])[1], tensors[1][:, index])  # too small: not used
