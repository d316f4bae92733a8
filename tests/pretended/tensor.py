"""Tensors that say they are on a GPU, over tensors on the CPU, and what runs operators on them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

if TYPE_CHECKING:
    from tests.pretended.device import Gpus

CPU = torch.device("cpu")
FAR = 1 << 56  # added to addresses: whoever reads there with the CPU is killed


class Allocation:
    """Memory of a device: lives as long as a pretended tensor over it. The next to get it finds no zeros there."""

    def __init__(self, gpus: Gpus, inner: Tensor, device: torch.device) -> None:
        self.gpus = gpus
        self.storage = inner.untyped_storage()
        self.device = device
        self.n_bytes = -(-self.storage.nbytes() // 512) * 512
        self.stream = gpus.current_stream(device)
        self.recorded: set[Any] = set()  # streams that `record_stream` named
        gpus.allocated(self)

    def __del__(self) -> None:
        self.gpus.freed(self)


class PretendedTensor(Tensor):
    """A tensor on a pretended GPU. `inner` holds its numbers, on the CPU."""

    inner: Tensor
    allocation: Allocation
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device, allocation: Allocation) -> PretendedTensor:
        n = inner.untyped_storage().nbytes() // inner.element_size()
        shape = torch.empty(n, dtype=inner.dtype, device="meta")
        shape = shape.as_strided(inner.size(), inner.stride(), inner.storage_offset())
        self = Tensor._make_subclass(cls, shape, False, dispatch_device=True, device_for_backend_keys=device)
        self.inner, self._device, self.allocation = inner, device, allocation
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Without the mode: in a thread that began outside it."""
        gpus = next(x for x in flat((args, kwargs)) if isinstance(x, PretendedTensor)).allocation.gpus
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

    def data_ptr(self) -> int:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith("lce.kernels.") and not caller.startswith("lce.kernels.cuda"):
            raise RuntimeError(f"{caller} reads memory of {self.device} with the CPU")
        return self.inner.data_ptr() + FAR

    def untyped_storage(self) -> Any:
        raise RuntimeError("a pretended tensor does not show its storage")

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host"
            " memory first."
        )

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.numpy()

    def tolist(self) -> Any:
        self.allocation.gpus.waits_for(self.device, "tolist")
        return self.inner.tolist()

    def __repr__(self, **_: Any) -> str:
        return f"{self.inner!r} on {self.device}"


class Mode(TorchDispatchMode):
    """Every operator of a thread goes through here: those that make tensors, too."""

    def __init__(self, gpus: Gpus) -> None:
        super().__init__()
        self.gpus = gpus

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.gpus.run(func, args, kwargs or {})


class Pinned:
    """Which tensors of the host are page-locked: those in storages that were made so."""

    def __init__(self) -> None:
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.lock = threading.Lock()

    def add(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        with self.lock:
            self.storages = {key: value for key, value in self.storages.items() if not value[0].expired()}
            self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return x

    def has(self, x: Tensor) -> bool:
        held = self.storages.get(x.untyped_storage()._cdata)
        return held is not None and not held[0].expired()

    @property
    def n_bytes(self) -> int:
        """What is locked: PyTorch rounds every allocation up to a power of two."""
        alive = [n for ref, n in self.storages.values() if not ref.expired()]
        return sum(1 << (n - 1).bit_length() for n in alive if n)


def plain_index(index: Any) -> Any:
    """An index with lists and arrays as tensors on the CPU: C++ would make them on the device that it sees."""
    parts = index if isinstance(index, tuple) else (index,)
    parts = tuple(torch.as_tensor(x) if isinstance(x, list | np.ndarray) else x for x in parts)
    return parts if isinstance(index, tuple) else parts[0]


def flat(tree: Any) -> list[Any]:
    return tree_flatten(tree)[0]


def pretended(tree: Any) -> Iterator[PretendedTensor]:
    return (x for x in flat(tree) if isinstance(x, PretendedTensor))


def unwrapped(tree: Any) -> Any:
    """The same with the inner tensors, and the CPU for a GPU."""

    def inner(x: Any) -> Any:
        if isinstance(x, PretendedTensor):
            return x.inner
        return CPU if isinstance(x, torch.device) and x.type == "cuda" else x

    return tree_map(inner, tree)


def poison(x: Tensor) -> None:
    """What uninitialised memory may hold: NaN, and numbers that are no index."""
    if x.dtype == torch.bool:
        x.fill_(True)
    elif x.dtype == torch.uint8:
        x.fill_(0xFF)
    elif x.is_floating_point() or x.is_complex():
        x.fill_(torch.nan)
    else:
        x.fill_(torch.iinfo(x.dtype).min)
