"""Where the pretence begins and ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.pretended.device import Gpus
from tests.pretended.fakes import patch_everything
from tests.pretended.tensor import Mode


@contextmanager
def pretended_gpus(n_devices: int = 1, memory: int = 16 << 30, *, late: bool = True) -> Iterator[Gpus]:
    """Have PyTorch find this many GPUs, each of so many bytes. `late`: streams do their work when it is waited for."""
    gpus = Gpus(n_devices, memory, late)
    before = torch._C._only_lift_cpu_tensors()
    with pytest.MonkeyPatch.context() as patch:
        patch_everything(patch, gpus)
        torch._C._set_only_lift_cpu_tensors(True)
        try:
            with Mode(gpus):
                yield gpus
        finally:
            torch._C._set_only_lift_cpu_tensors(before)
    assert not gpus.faults, gpus.faults
