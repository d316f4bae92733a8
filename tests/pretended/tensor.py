"""Tensors that say they are on a GPU, over tensors on the CPU."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from tests.pretended.device import Gpus
    from tests.pretended.streams import CUDAGraph, Stream

CPU = torch.device("cpu")
FAR = 1 << 56  # added to addresses: whoever reads there with the CPU is killed


class Memory:
    """Memory of a device: of the stream that asked for it, or of a graph's pool."""

    def __init__(self, inner: Tensor, device: torch.device, stream: Stream) -> None:
        self.storage = inner.untyped_storage()
        self.device = device
        self.n_bytes = -(-self.storage.nbytes() // 512) * 512
        self.stream = stream
        self.graph: CUDAGraph | None = stream.graph
        self.recorded: set[Stream] = set()  # streams that `record_stream` named
        self.users: dict[Stream, int] = {}  # other streams, and the last that they did with it
        self.freed = False


class Owner:
    """What all tensors over one memory share; it is freed when the last of them goes."""

    def __init__(self, gpus: Gpus, memory: Memory) -> None:
        self.gpus, self.memory = gpus, memory

    def __del__(self) -> None:
        self.gpus.free(self.memory)


class PretendedTensor(Tensor):
    """A tensor on a pretended GPU. `inner` holds its numbers, on the CPU."""

    inner: Tensor
    owner: Owner
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device, owner: Owner) -> PretendedTensor:
        n = inner.untyped_storage().nbytes() // inner.element_size()
        shape = torch.empty(n, dtype=inner.dtype, device="meta")
        shape = shape.as_strided(inner.size(), inner.stride(), inner.storage_offset())
        self = Tensor._make_subclass(cls, shape, False, dispatch_device=True, device_for_backend_keys=device)
        self.inner, self._device, self.owner = inner, device, owner
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Without the mode: in a thread that began outside it."""
        gpus = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, PretendedTensor)).owner.gpus
        return gpus.run(func, args, kwargs or {})

    device = property(lambda self: self._device)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)
    is_meta = property(lambda self: False)

    def __setitem__(self, index: Any, value: Any) -> None:
        """A number is an argument of the kernel."""
        if not isinstance(value, Tensor):
            value = torch.full((), value, dtype=self.dtype, device=self.device)
        elif value.ndim == 0:
            value = value.to(self.device)
        super().__setitem__(plain_index(index), value)

    def __getitem__(self, index: Any) -> Tensor:
        return super().__getitem__(plain_index(index))

    def record_stream(self, stream: Stream) -> None:
        self.owner.memory.recorded.add(stream)

    def data_ptr(self) -> int:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith("lce.kernels.") and not caller.endswith("_triton"):
            raise RuntimeError(f"{caller} reads memory of {self.device} with the CPU")
        return self.inner.data_ptr() + FAR

    def untyped_storage(self) -> Any:
        raise RuntimeError("a pretended tensor does not show its storage")

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first.")

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.numpy()

    def tolist(self) -> Any:
        self.owner.gpus.host_waits(self.device, "tolist")
        return self.inner.tolist()

    def __repr__(self, **_: Any) -> str:
        return f"{self.inner!r} on {self.device}"


class Mode(TorchDispatchMode):
    """Every operator of a thread goes through here: those that make tensors, too."""

    def __init__(self, gpus: Gpus) -> None:
        super().__init__()
        self.gpus = gpus

    def around(self, call: Any) -> Any:
        """A method that is called in a mode of its own."""

        def run(own: Any) -> None:
            with Mode(self.gpus):
                call(own)

        return run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.gpus.run(func, args, kwargs or {})


class Pinned:
    """Which tensors of the host are page-locked: those in storages that were made so."""

    def __init__(self) -> None:
        self.storages: dict[int, StorageWeakRef] = {}
        self.lock = threading.Lock()

    def add(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        with self.lock:
            self.storages = {key: ref for key, ref in self.storages.items() if not ref.expired()}
            self.storages[storage._cdata] = StorageWeakRef(storage)
        return x

    def has(self, x: Tensor) -> bool:
        if not self.storages or isinstance(x, PretendedTensor):
            return False
        held = self.storages.get(x.untyped_storage()._cdata)
        return held is not None and not held.expired()


def plain_index(index: Any) -> Any:
    """An index with lists and arrays as tensors on the CPU: C++ would make them on the device that it sees."""
    if isinstance(index, tuple):
        return tuple(map(plain_index, index))
    return torch.as_tensor(index) if isinstance(index, list | np.ndarray) else index


def unwrapped(tree: Any) -> Any:
    """The same with the inner tensors, and the CPU for a GPU."""

    def inner(x: Any) -> Any:
        if isinstance(x, PretendedTensor):
            return x.inner
        return CPU if isinstance(x, torch.device) and x.type == "cuda" else x

    return tree_map(inner, tree)


def poison(x: Tensor, whole_numbers: bool = True) -> None:
    """What uninitialised memory may hold: NaN, and numbers that are no index, or zeros for these."""
    if x.is_floating_point() or x.is_complex():
        x.fill_(torch.nan)
    elif not whole_numbers or x.dtype in (torch.uint16, torch.uint32, torch.uint64):
        x.zero_()
    elif x.dtype == torch.bool:
        x.fill_(True)
    else:
        info = torch.iinfo(x.dtype)
        x.fill_(info.min or info.max)
