"""Where the pretence begins and ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from lce.cache import pool
from lce.kernels.cuda import launching
from tests.pretended.device import Gpus
from tests.pretended.fakes import patch_everything
from tests.pretended.tensor import Mode


@contextmanager
def pretended_gpus(
    n_devices: int = 1, memory: int = 16 << 30, *, late: bool = True, triton: bool = False
) -> Iterator[Gpus]:
    """Have PyTorch find this many GPUs, each of so many bytes. `late`: streams do their work when it is waited for.

    With `triton` lce finds Triton there, whose kernels run in its interpreter, slowly; else PyTorch's operators serve.
    """
    gpus = Gpus(n_devices, memory, late)
    before = torch._C._only_lift_cpu_tensors()
    with pytest.MonkeyPatch.context() as patch:
        patch_everything(patch, gpus)
        patch.setattr(launching, "installed", lambda: triton)
        patch.setattr(launching, "missing", lambda: None if triton else "Triton")
        torch._C._set_only_lift_cpu_tensors(True)
        pool._thread.cache_clear()  # a thread keeps the GPUs with which it began
        try:
            with Mode(gpus):
                yield gpus
        finally:
            pool._thread().shutdown()
            pool._thread.cache_clear()
            torch._C._set_only_lift_cpu_tensors(before)
    assert not gpus.faults, gpus.faults
