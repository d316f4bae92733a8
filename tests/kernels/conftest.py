"""The dtypes that kernels for CPUs read."""

from typing import Any

import pytest
import torch

SLOW = pytest.param(torch.float16, marks=pytest.mark.slow)  # kernels of a third dtype compile for half a minute


@pytest.fixture(params=[torch.float32, torch.bfloat16, SLOW], ids=str)
def dtype(request: pytest.FixtureRequest) -> Any:
    return request.param
