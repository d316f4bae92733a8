"""The pretence: what stands in for `torch.cuda`, and for the few functions of PyTorch that ask C++ for a GPU."""

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lce.cache import movers
from lce.kernels.runtime import launching
from lce.system import lasting_executor
from tests.pretended.device import Gpus
from tests.pretended.streams import Capture, CUDAGraph
from tests.pretended.tensor import FAR, Mode, PretendedTensor, unwrapped


@contextlib.contextmanager
def pretended_gpus(n_devices: int = 1, memory: int = 16 << 30, *, triton: bool = False) -> Iterator[Gpus]:
    """Have PyTorch find this many GPUs, each of so many bytes.

    With `triton` lce finds Triton there, whose kernels run in its interpreter, slowly; else PyTorch's operators serve.
    """
    gpus = Gpus(n_devices, memory)
    before = torch._C._only_lift_cpu_tensors()
    with pytest.MonkeyPatch.context() as patch:
        _patch_cuda(patch, gpus)
        _patch_conversions(patch, gpus)
        patch.setattr(threading.Thread, "run", Mode(gpus).around(threading.Thread.run))
        _patch_kernels(patch, gpus)
        patch.setattr(launching, "installed", lambda: triton)
        patch.setattr(launching, "missing", lambda: None if triton else "Triton")
        torch._C._set_only_lift_cpu_tensors(True)
        lasting_executor.cache_clear()  # a thread keeps the GPUs with which it began
        try:
            with Mode(gpus):
                yield gpus
        finally:
            lasting_executor(1, movers.FETCHER).shutdown()
            lasting_executor.cache_clear()
            torch._C._set_only_lift_cpu_tensors(before)
    assert not gpus.faults, gpus.faults


def _patch_cuda(patch: pytest.MonkeyPatch, gpus: Gpus) -> None:
    @contextlib.contextmanager
    def device_context(given: Any) -> Iterator[None]:
        before, gpus.current = gpus.current, gpus.device(given).index
        try:
            yield
        finally:
            gpus.current = before

    def index_of(given: Any = None) -> int:
        return gpus.device(given).index

    fakes = {
        "_lazy_init": lambda: None,
        **dict.fromkeys(("is_available", "is_initialized"), lambda: True),
        "device_count": lambda: gpus.n_devices,
        "current_device": lambda: gpus.current,
        "device": device_context,
        "get_device_name": lambda given=None: "a pretended GPU",
        "mem_get_info": lambda given=None: (gpus.memory - gpus.used[index_of(given)], gpus.memory),
        **dict.fromkeys(("memory_allocated", "memory_reserved"), lambda given=None: gpus.used[index_of(given)]),
        "max_memory_allocated": lambda given=None: gpus.peak[index_of(given)],
        "reset_peak_memory_stats": lambda given=None: gpus.peak.__setitem__(
            index_of(given), gpus.used[index_of(given)]
        ),
        "get_device_properties": lambda given=None: SimpleNamespace(
            name="a pretended GPU", major=9, minor=0, multi_processor_count=132, total_memory=gpus.memory
        ),
        "get_device_capability": lambda given=None: (9, 0),
        "empty_cache": lambda: None,
        "synchronize": gpus.synchronize,
        "Stream": gpus.Stream,
        "Event": gpus.Event,
        "CUDAGraph": lambda **options: CUDAGraph(gpus, **options),
        "graph": lambda cuda_graph, *args, **options: Capture(gpus, cuda_graph, *args, **options),
        "current_stream": gpus.current_stream,
        "stream": gpus.on_stream,
        "graph_pool_handle": lambda: (0, 1),
    }
    for name, fake in fakes.items():
        patch.setattr(torch.cuda, name, fake)


def _patch_conversions(patch: pytest.MonkeyPatch, gpus: Gpus) -> None:
    """`to` and `tensor` ask C++ for the guard of a device, which a build without CUDA has not."""
    plain = {name: getattr(torch, name) for name in ("tensor", "as_tensor")}
    plain_to = torch.Tensor.to

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copy = kwargs.pop("copy", False)
        device, dtype, no_wait, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        device = self.device if device is None else gpus.device_of(device)
        if device == self.device and dtype in (None, self.dtype) and not copy and memory_format is None:
            return self
        if device.type != "cuda" and not self.is_cuda:
            return plain_to(self, *args, **kwargs, copy=copy)
        options = {"dtype": dtype, "device": device, "non_blocking": no_wait, "memory_format": memory_format}
        return torch.ops.aten._to_copy(self, **options)

    def cuda(self: Tensor, device: Any = None, non_blocking: bool = False, **_: Any) -> Tensor:
        return to(self, gpus.device(device), non_blocking=non_blocking)

    def maker(name: str) -> Any:
        def make(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
            if device is None or torch.device(device).type != "cuda":
                return plain[name](data, device=device, **kwargs)
            return plain[name](data, **kwargs).to(device)

        return make

    patch.setattr(torch.Tensor, "to", to, raising=False)
    patch.setattr(torch.Tensor, "cuda", cuda, raising=False)
    patch.setattr(torch.Tensor, "cpu", lambda self: to(self, "cpu"), raising=False)
    for name in plain:
        patch.setattr(torch, name, maker(name))


def _patch_kernels(patch: pytest.MonkeyPatch, gpus: Gpus) -> None:
    """Kernels that the interpreter runs get the inner tensors, if it is there."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    plain = interpreter.GridExecutor.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        on_gpu = [x for x in tensors if isinstance(x, PretendedTensor)]
        if not on_gpu:
            plain(self, *args, **kwargs)
            return
        device = gpus.device()
        for x in tensors:
            if not isinstance(x, PretendedTensor):
                raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
            if x.device != device:
                raise RuntimeError(f"a kernel on {device} reads memory of {x.device}")
        gpus.count("launches", self.fn.__name__)
        stream = gpus.current_stream()
        for x in on_gpu:
            gpus.note_use(x.owner.memory, stream)
        plain_args, plain_kwargs = unwrapped((args, kwargs))
        stream.submit(lambda: plain(self, *plain_args, **plain_kwargs))

    patch.setattr(interpreter.GridExecutor, "__call__", call)
    cast = interpreter.InterpreterBuilder.create_int_to_ptr

    def pointer(self: Any, address: Any, kind: Any) -> Any:
        """Kernels read, at addresses in tables, the GPU's memory and the host's page-locked memory."""
        near = np.where(address.data >= FAR, address.data - FAR, address.data)
        return cast(self, interpreter.TensorHandle(near, address.dtype), kind)

    patch.setattr(interpreter.InterpreterBuilder, "create_int_to_ptr", pointer)
