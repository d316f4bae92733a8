"""The dtypes that kernels for CPUs read, and PyTorch's threads, which come back."""

from collections.abc import Iterator

import pytest
import torch

SLOW = pytest.param(torch.float16, marks=pytest.mark.slow)  # kernels of a third dtype compile for half a minute


@pytest.fixture(params=[torch.float32, torch.bfloat16, SLOW], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


@pytest.fixture
def any_threads() -> Iterator[None]:
    """Let the test set PyTorch's number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
