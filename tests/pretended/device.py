"""The pretended GPUs: run operators as CUDA would, count what waits and what is copied, hold streams and memory."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.pretended import rules
from tests.pretended.streams import Event, Stream
from tests.pretended.tensor import Allocation, Mode, Pinned, PretendedTensor, flat, poison, unwrapped

META = torch.device("meta")
OVERRIDES: dict[str, Callable[..., Any]] = {}  # operators with a stand-in, by name; called with pretended tensors


@dataclass
class Counts:
    """What a stretch of code made the device do."""

    syncs: int = 0  # the CPU waited for the device: item, tolist, copies to the CPU, nonzero, ...
    uploads: int = 0  # copies from the CPU to the device; those of memory that is not pinned wait, too
    launches: int = 0  # operators and kernels
    at: dict[str, int] | None = None

    def note(self, what: str) -> None:
        self.at = self.at or {}
        self.at[what] = self.at.get(what, 0) + 1


class Gpus:
    """One or more pretended GPUs of one process."""

    def __init__(self, n_devices: int = 1, memory: int = 1 << 34) -> None:
        self.n_devices = n_devices
        self.memory = memory
        self.counts: list[Counts] = []
        self.pinned = Pinned()
        self.local = threading.local()
        self.used = [0] * n_devices
        self.peak = [0] * n_devices
        self.by_storage: dict[int, Any] = {}
        self.lock = threading.RLock()
        self.defaults = [Stream(self, torch.device("cuda", index)) for index in range(n_devices)]

    # What the code does

    @contextmanager
    def counting(self) -> Iterator[Counts]:
        """Count in this stretch."""
        counts = Counts()
        self.counts.append(counts)
        try:
            yield counts
        finally:
            self.counts.remove(counts)

    def count(self, kind: str, what: str) -> None:
        for counts in self.counts:
            setattr(counts, kind, getattr(counts, kind) + 1)
            if kind != "launches":
                counts.note(f"{kind}: {what}")

    def waits_for(self, device: torch.device, what: str) -> None:
        """The CPU waits until the current stream of a device is done."""
        self.count("syncs", what)

    # Devices and streams

    @property
    def current(self) -> int:
        return int(getattr(self.local, "device", 0))

    @current.setter
    def current(self, index: int) -> None:
        self.local.device = index

    def device(self, given: Any = None) -> torch.device:
        """A device with its index: of a device, a number, a name, or nothing."""
        if given is None or isinstance(given, int):
            index = self.current if given is None or given < 0 else given
        else:
            named = torch.device(given)
            index = self.current if named.index is None else named.index
        if index >= self.n_devices:
            raise RuntimeError("CUDA error: invalid device ordinal")
        return torch.device("cuda", index)

    def device_of(self, given: Any) -> torch.device:
        named = torch.device(given)
        return self.device(named) if named.type == "cuda" else named

    @property
    def asked(self) -> torch.device | None:
        """The device of the tensor whose device C++ asked for last."""
        return getattr(self.local, "asked", None)

    def default_stream(self, device: Any = None) -> Stream:
        return self.defaults[self.device(device).index]

    def current_stream(self, device: Any = None) -> Stream:
        device = self.device(device)
        return getattr(self.local, "streams", {}).get(device.index) or self.defaults[device.index]

    def new_stream(self, device: Any = None, **_: Any) -> Stream:
        return Stream(self, self.device(device))

    def new_event(self, **options: Any) -> Event:
        return Event(self, **options)

    @contextmanager
    def on_stream(self, stream: Stream | None) -> Iterator[None]:
        """Work of this thread goes to a stream, and its device is the current one."""
        if stream is None:
            yield
            return
        before, device = getattr(self.local, "streams", {}), self.current
        self.local.streams, self.current = {**before, stream.device.index: stream}, stream.device.index
        try:
            yield
        finally:
            self.local.streams, self.current = before, device

    def synchronize(self, device: Any = None) -> None:
        self.waits_for(self.device(device), "synchronize")

    def submit(self, work: Callable[..., Any], args: Any, kwargs: Any, uses: list[Allocation]) -> Any:
        """Do work in the current stream."""
        with _disable_current_modes():
            return work(args, kwargs)

    # Memory

    def allocated(self, allocation: Allocation) -> None:
        with self.lock:
            index = allocation.device.index
            self.used[index] += allocation.n_bytes
            self.peak[index] = max(self.peak[index], self.used[index])

    def freed(self, allocation: Allocation) -> None:
        with self.lock:
            self.used[allocation.device.index] -= allocation.n_bytes
            self.by_storage.pop(allocation.storage._cdata, None)
        if not sys.is_finalizing():
            with _disable_current_modes(), torch.inference_mode():
                torch.empty(0, dtype=torch.uint8).set_(allocation.storage).fill_(0xFF)

    def wrap(self, inner: Tensor, device: torch.device) -> PretendedTensor:
        """A tensor of a device over one on the CPU, whose memory it is from now on."""
        key = inner.untyped_storage()._cdata
        allocation = self.by_storage.get(key)
        allocation = allocation and allocation()
        if allocation is None:
            allocation = Allocation(self, inner, device)
            self.by_storage[key] = weakref.ref(allocation)
        return PretendedTensor(inner, device, allocation)

    # Operators

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One operator, on any devices."""
        leaves = flat((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        target = kwargs.get("device")
        if target == META and self.asked is not None:  # C++ makes a tensor like one whose device it asked for
            kwargs["device"] = target = self.asked
        to_gpu = target is not None and torch.device(target).type == "cuda"
        if kwargs.pop("pin_memory", None) and not to_gpu and not any(x.is_cuda for x in tensors):
            return self.pinned.add(func(*args, **kwargs))
        name = rules.name_of(func)
        if name == "aten::is_pinned":
            return self.pinned.has(args[0])
        if name in ("aten::_pin_memory", "aten::pin_memory"):
            return self.pinned.add(args[0].clone())
        gpu = next((x for x in tensors if isinstance(x, PretendedTensor)), None)
        if gpu is None and not to_gpu:
            return func(*args, **kwargs)
        if name == "prim::device":
            self.local.asked = gpu.device
            return META  # what PyTorch's C++ sees: a build without CUDA has no guards for its devices
        if func._can_decompose():  # in inference mode, composite operators come here whole
            with Mode(self):
                return func.decompose(*args, **kwargs)
        if name == "aten::record_stream":
            gpu.allocation.recorded.add(args[1])
            return None
        with _disable_current_modes():
            if name in OVERRIDES:
                return OVERRIDES[name](self, *args, **kwargs)
            return self._run(func, args, kwargs, tensors, gpu)

    def _run(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], gpu: PretendedTensor | None) -> Any:
        name, target = rules.name_of(func), kwargs.get("device")
        if tensors and gpu is not None:
            rules.check_devices(func, args, tensors, written(func, args, kwargs))
        device = gpu.device if gpu is not None else None
        if target is not None and torch.device(target).type == "cuda":
            device = self.device(target)
        if rules.waits(func, args, kwargs):
            self.waits_for(device, name)
        for _ in range(rules.cpu_indices(func, args)):
            self.count("uploads", name)
        self.count("launches", name)
        plain_args, plain_kwargs = unwrapped((args, kwargs))
        if name in rules.COPIES:
            done = self._copied(name, args, kwargs, device)
            if done:
                device = None
        out = func(*plain_args, **plain_kwargs)
        if name.startswith(("aten::empty", "aten::new_empty")):
            poison(out)
        if name == "aten::_local_scalar_dense":
            return out
        known = {id(x.inner): x for x in tensors if isinstance(x, PretendedTensor)}
        known |= {id(x): x for x in tensors if not isinstance(x, PretendedTensor)}

        def back(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            if id(x) in known:
                same = known[id(x)]
                assert same.shape == x.shape, f"{name} changed the shape of a tensor of the device, to {list(x.shape)}"
                return same
            return x if device is None else self.wrap(x, device)

        return torch.utils._pytree.tree_map(back, out)

    def _copied(self, name: str, args: Any, kwargs: Any, device: torch.device | None) -> bool:
        """Count a copy. Whether its result is on the CPU."""
        if name == "aten::copy_":
            to, source = args[0], args[1]
            no_wait = (args[2] if len(args) > 2 else kwargs.get("non_blocking")) or False
            to_device = to.device
        else:
            source, no_wait = args[0], kwargs.get("non_blocking") or False
            to_device = torch.device(kwargs.get("device") or source.device)
        if source.is_cuda and to_device.type == "cpu":
            if name == "aten::copy_" and no_wait and self.pinned.has(args[0]):
                return True
            self.waits_for(source.device, name)
            return True
        if not source.is_cuda and to_device.type == "cuda":
            self.count("uploads", name)
        return False


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operator writes to."""
    found = []
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            found += [x for x in flat(value) if isinstance(x, Tensor)]
    return found
