"""The pretended GPUs: run operators as CUDA would, count what waits and what is copied, hold streams and memory."""

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from tests.pretended import flash, rules
from tests.pretended.rules import Rule
from tests.pretended.streams import NOT_CAPTURED, Event, Stream
from tests.pretended.tensor import Memory, Mode, Owner, Pinned, PretendedTensor, poison, unwrapped

META = torch.device("meta")
# Operators that a CPU has not: `check` and `compute`.
STAND_INS = {
    "aten::_flash_attention_forward": flash,
    **dict.fromkeys(("aten::mm.dtype", "aten::bmm.dtype"), flash.Product),
}


@dataclass
class Counts:
    """What a stretch of code made the device do."""

    syncs: int = 0  # the CPU waited for the device: item, tolist, copies to the CPU, nonzero, ...
    uploads: int = 0  # copies from the CPU to the device; those of memory that is not pinned wait, too
    launches: int = 0  # operators and kernels
    at: dict[str, int] = field(default_factory=dict)  # which they were

    def launched(self) -> list[str]:
        """The operators and kernels, sorted, each as often as it was launched; memory without a value is none.

        The code must not have waited for the device, nor copied to it.
        """
        assert (self.syncs, self.uploads) == (0, 0), self
        names = {name.removeprefix("launches: "): n for name, n in self.at.items() if not name.endswith("empty")}
        return sorted(name for name, n in names.items() for _ in range(n))


class Gpus:
    """One or more pretended GPUs of one process."""

    def __init__(self, n_devices: int = 1, memory: int = 16 << 30) -> None:
        self.n_devices, self.memory = n_devices, memory
        self.faults: list[str] = []  # what no operator raises
        self.counts: list[Counts] = []
        self.pinned = Pinned()
        self.used, self.peak = [0] * n_devices, [0] * n_devices
        self._local = threading.local()
        self.Stream = type("Stream", (Stream,), {"gpus": self})
        self.Event = type("Event", (Event,), {"gpus": self})
        self.streams = weakref.WeakSet[Stream]()
        self.defaults = [self.Stream(index, late=False) for index in range(n_devices)]
        self._lock = threading.RLock()
        self._owners: dict[int, weakref.ref[Owner]] = {}
        self._rules: dict[Any, Rule] = {}

    @contextmanager
    def counting(self) -> Iterator[Counts]:
        """Count in this stretch, in all threads."""
        counts = Counts()
        self.counts.append(counts)
        try:
            yield counts
        finally:
            self.counts.remove(counts)

    def count(self, kind: str, what: str) -> None:
        for counts in self.counts:
            setattr(counts, kind, getattr(counts, kind) + 1)
            name = f"{kind}: {what.removeprefix('aten::')}"
            counts.at[name] = counts.at.get(name, 0) + 1

    # Devices and streams

    @property
    def current(self) -> int:
        """The current device of this thread."""
        return int(getattr(self._local, "device", 0))

    @current.setter
    def current(self, index: int) -> None:
        self._local.device = index

    def device(self, given: Any = None) -> torch.device:
        """A GPU with its index: of a device, a number, a name, or nothing."""
        if given is None or isinstance(given, int):
            index = self.current if given is None or given < 0 else given
        else:
            named = torch.device(given)
            index = self.current if named.index is None else named.index
        if index >= self.n_devices:
            raise RuntimeError("CUDA error: invalid device ordinal")
        return torch.device("cuda", index)

    def device_of(self, given: Any) -> torch.device:
        """Any device; a GPU with its index."""
        named = torch.device(given)
        return self.device(named) if named.type == "cuda" else named

    def current_stream(self, device: Any = None) -> Stream:
        device = self.device(device)
        return getattr(self._local, "streams", {}).get(device.index) or self.defaults[device.index]

    @contextmanager
    def on_stream(self, stream: Stream | None) -> Iterator[None]:
        """Work of this thread goes to a stream, and its device is the current one."""
        if stream is None:
            yield
            return
        before, device = getattr(self._local, "streams", {}), self.current
        self._local.streams, self.current = {**before, stream.device.index: stream}, stream.device.index
        try:
            yield
        finally:
            self._local.streams, self.current = before, device

    def synchronize(self, device: Any = None) -> None:
        device = self.device(device)
        self.count("syncs", "synchronize")
        with _disable_current_modes():
            for stream in list(self.streams):
                if stream.device == device:
                    stream.host_waits()

    def host_waits(self, device: torch.device, what: str) -> None:
        """The CPU waits until the current stream of a device is done."""
        self.count("syncs", what)
        with _disable_current_modes():
            self.current_stream(device).host_waits()

    def host_saw(self, stream: Stream, upto: int) -> None:
        for other in list(self.streams):
            other.seen[stream] = max(upto, other.seen.get(stream, 0))

    # Memory

    def wrap(self, inner: Tensor, device: torch.device, view_of: Tensor | None = None) -> PretendedTensor:
        """A tensor of a device over one on the CPU, whose memory it is from now on.

        A view of a tensor that was made in inference mode is one that was made there, and the other way round.
        """
        if view_of is not None and view_of.is_inference() != torch.is_inference_mode_enabled():
            with torch.inference_mode(view_of.is_inference()):
                return self.wrap(inner, device)
        key = inner.untyped_storage()._cdata
        with self._lock:
            ref = self._owners.get(key)
            owner = None if ref is None else ref()
            if owner is None:
                memory = Memory(inner, device, self.current_stream(device))
                owner = Owner(self, memory)
                self._owners[key] = weakref.ref(owner)
                self.used[device.index] += memory.n_bytes
                self.peak[device.index] = max(self.peak[device.index], self.used[device.index])
        return PretendedTensor(inner, device, owner)

    def free(self, memory: Memory) -> None:
        """Nobody has this memory any more: the next to get it overwrites it."""
        with self._lock:
            memory.freed = True
            self.used[memory.device.index] -= memory.n_bytes
            self._owners.pop(memory.storage._cdata, None)
        if sys.is_finalizing() or memory.graph is not None:
            return
        for stream, place in memory.users.items():
            if stream not in memory.recorded and memory.stream.seen.get(stream, 0) < place:
                made, used = ("default" if x in self.defaults else "side" for x in (memory.stream, stream))
                self.faults.append(
                    f"{memory.storage.nbytes()} bytes, made in a {made} stream, were freed while a {used} stream may"
                    " still use them: record_stream is missing"
                )
        work = partial(_overwrite, memory)
        busy = [stream for stream in {memory.stream, *memory.recorded} if stream.queue]
        if not busy:
            work()
        elif len(busy) == 1:  # once the stream has done what it has to do with it
            busy[0].queue.append((busy[0].issued, work))

    def note_use(self, memory: Memory, stream: Stream) -> None:
        """What is about to be queued in a stream uses this memory."""
        if stream.graph is not None:
            stream.graph.use(memory)
        elif stream is not memory.stream:
            memory.users[stream] = stream.issued + 1

    # Operators

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One operator, on any devices."""
        rule = self._rules.get(func) or self._rules.setdefault(func, Rule(func))
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        gpu = next((x for x in tensors if isinstance(x, PretendedTensor)), None)
        if gpu is not None and rule.name == "prim::device":
            self._local.asked = gpu.device
            return META  # what PyTorch's C++ sees: a build without CUDA has no guards for its devices
        target = kwargs.get("device")
        if target == META:  # C++ makes a tensor like the one whose device it asked for
            kwargs["device"] = target = getattr(self._local, "asked", META)
        device = gpu.device if gpu is not None else None
        if target is not None and torch.device(target).type == "cuda":
            device = self.device(target)
        if device is None:
            return self._run_on_cpu(rule, func, args, kwargs)
        kwargs.pop("pin_memory", None)
        if rule.composite:  # in inference mode, these come here whole
            with Mode(self):
                return func.decompose(*args, **kwargs)
        if rule.name == "aten::is_pinned":
            return False
        with _disable_current_modes():
            return self._run_on_gpu(rule, func, args, kwargs, tensors, device)

    def _run_on_cpu(self, rule: Rule, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if rule.name == "aten::is_pinned":
            return self.pinned.has(args[0])
        if rule.name in ("aten::_pin_memory", "aten::pin_memory"):
            func, args, kwargs = torch.ops.aten.clone.default, args[:1], {"pin_memory": True}
        if not kwargs.pop("pin_memory", None):
            return func(*args, **kwargs)
        if any(stream.graph is not None for stream in list(self.streams)):
            raise RuntimeError(NOT_CAPTURED)
        return self.pinned.add(func(*args, **kwargs))

    def _run_on_gpu(self, rule: Rule, func: Any, args: Any, kwargs: Any, tensors: Any, device: torch.device) -> Any:
        written = rule.written(args, kwargs)
        gpu_tensors = [x for x in tensors if isinstance(x, PretendedTensor)]
        if gpu_tensors:
            rules.check_devices(rule, args, tensors, tree_leaves(written))
        if rules.waits(rule, args, kwargs):
            self.host_waits(device, rule.name)
        for _ in range(rules.cpu_indices(rule, args)):
            self.count("uploads", rule.name)
            self.current_stream(device).host_waits()
        compute = func
        if rule.full_name in STAND_INS:
            STAND_INS[rule.full_name].check(*args, **kwargs)
            compute = STAND_INS[rule.full_name].compute
        if rule.name in rules.COPIES:
            to = args[0].device if written else torch.device(kwargs.get("device") or args[0].device)
            source = args[1] if written else args[0]
            if source.is_cuda != (to.type == "cuda"):
                return self._copy(rule, func, args, kwargs, source, to)
            device = self.device(to)
        stream = self.current_stream(device)
        sources = [x for x in gpu_tensors if x.device != device]
        for x in sources:  # a copy between GPUs is in order with the current streams of both
            stream.wait_stream(self.current_stream(x.device))
        if not rule.is_view:
            self.count("launches", rule.name)
            for x in gpu_tensors:
                self.note_use(x.owner.memory, stream)
        plain = unwrapped((args, kwargs))
        known = {id(x.inner): x for x in gpu_tensors}

        def back(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            same = known.get(id(x))
            if same is None:
                return self.wrap(x, device, gpu_tensors[0] if rule.is_view else None)
            assert same.shape == x.shape, f"{rule.name} changed the shape of a tensor in place, to {list(x.shape)}"
            return same

        out = tree_map(back, self._queue(stream, rule, compute, plain, unwrapped(written)))
        for x in sources:
            self.current_stream(x.device).wait_stream(stream)
        return out

    def _queue(self, stream: Stream, rule: Rule, compute: Callable[..., Any], plain: Any, written: list[Any]) -> Any:
        """Queue an operator on inner tensors; its result, whose numbers may come later."""
        args, kwargs = plain
        if rule.is_view:
            return compute(*args, **kwargs)
        held = stream.late or stream.graph is not None
        if not held:
            stream.issued += 1
            out = compute(*args, **kwargs)
            if rule.makes_garbage:
                poison(out)
            return out
        if written:
            stream.submit(lambda: compute(*args, **kwargs))
            return written[0] if len(written) == 1 else tuple(written)
        out = compute(*args, **kwargs)  # for its shape
        results = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        for x in results:
            poison(x, whole_numbers=False)
        if not rule.makes_garbage:

            def work() -> None:
                again = [x for x in tree_leaves(compute(*args, **kwargs)) if isinstance(x, Tensor)]
                for x, numbers in zip(results, again, strict=True):
                    x.copy_(numbers)

            stream.submit(work)
        return out

    def _copy(self, rule: Rule, func: Any, args: Any, kwargs: Any, source: Tensor, to: torch.device) -> Any:
        """A copy between the CPU and a device."""
        at = 2 if rule.writes else len(args)
        no_wait = bool(args[at] if len(args) > at else kwargs.get("non_blocking"))
        gpu = source if source.is_cuda else args[0] if rule.writes else None
        stream = self.current_stream(to if gpu is None else gpu.device)
        if gpu is not None:
            self.note_use(gpu.owner.memory, stream)
        if source.is_cuda:
            return self._download(rule, func, args, kwargs, stream, no_wait)
        pinned = self.pinned.has(source)
        self.count("uploads", rule.name)
        if not (no_wait and pinned):
            stream.host_waits()
        numbers = source.clone()
        if pinned and no_wait:
            stream.sources.append((stream.issued + 1, source, numbers))
        else:
            source = numbers
        stream.submit(lambda: [other.arrive() for other in list(self.streams)])  # what it may be about to read
        plain_args, plain_kwargs = unwrapped((args, kwargs))
        if rule.writes:
            stream.submit(lambda: plain_args[0].copy_(source))
            return args[0]
        out = func(*plain_args, **plain_kwargs)
        if stream.late or stream.graph is not None:
            poison(out, whole_numbers=False)
            stream.submit(lambda: out.copy_(source))
        return self.wrap(out, to)

    def _download(self, rule: Rule, func: Any, args: Any, kwargs: Any, stream: Stream, no_wait: bool) -> Any:
        plain_args, plain_kwargs = unwrapped((args, kwargs))
        if not no_wait or (rule.writes and not self.pinned.has(args[0])):
            self.host_waits(stream.device, rule.name)
            return func(*plain_args, **plain_kwargs)
        source = plain_args[1] if rule.writes else plain_args[0]
        target = args[0] if rule.writes else self.pinned.add(func(*plain_args, **plain_kwargs))
        poison(target, whole_numbers=False)
        place = stream.issued + 1
        stream.submit(lambda: stream.arrivals.append((place, target, source.to(target.dtype, copy=True))))
        return target


def _overwrite(memory: Memory) -> None:
    with _disable_current_modes(), torch.inference_mode():
        torch.empty(0, dtype=torch.uint8, device="cpu").set_(memory.storage).fill_(0xFF)
