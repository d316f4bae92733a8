"""Numba as the kernels use it: compiled once for a processor, cached, and run by PyTorch's threads."""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import threading
from array import array
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from inspect import Parameter, Signature
from pathlib import Path
from types import FunctionType
from typing import Any, cast

import numba
import torch
from llvmlite import ir
from numba import types
from numba.core import event
from numba.extending import intrinsic

from lce.errors import UsageError
from lce.progress import notice

MOST_ROWS = 8  # the most rows that a product for decoding takes

_OPTIONS: dict[str, Any] = {"fastmath": {"reassoc", "contract", "nsz", "arcp"}, "error_model": "numpy"}
_MOST_ARGUMENTS = 16  # arguments of a kernel; more are passed in memory
_I64 = ir.IntType(64)

_lock = threading.RLock()
_turn = threading.Lock()
_threads = threading.local()


class _Announcement(event.Listener):
    """Prints once, in one line on stderr, that kernels are being compiled."""

    said = False

    def on_start(self, event: Any) -> None:
        if not _Announcement.said:
            _Announcement.said = True
            kept = "; later runs find them in a cache" if usable_cache() else ", which every run does: no cache"
            notice(f"compiling kernels for this processor{kept}")

    def on_end(self, event: Any) -> None:
        pass


def cache_folder() -> Path:
    """Return where compiled kernels are kept: a folder for each state of this room's source, so that none is ever
    stale.
    """
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "lce" / f"kernels-{_source()}"


@cache
def _source() -> str:
    """Return a digest of this room's source."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def usable_cache() -> Path | None:
    """Return the folder of compiled kernels, made if need be; None where it cannot be used.

    Files in this folder are executed, so it is used only if nobody else can have written to it.
    """
    try:
        folder = cache_folder().absolute()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except (OSError, RuntimeError):  # RuntimeError: a user without a home
        return None
    private = found.st_uid == os.geteuid() and not found.st_mode & 0o022
    return folder if private and os.access(folder, os.R_OK | os.W_OK | os.X_OK) else None


class Kernel:
    """A function `body(first, stop, *args)` over a range, compiled at its first call. Threads share the range.

    Arguments are 64-bit integers; `argument_of` encodes a float as one. One thread calls the body directly and does not
    start Numba's threads, which do not survive a fork. Several threads call the body through `_spread`, which is
    compiled once for all kernels. Sums do not depend on how the range is divided.
    """

    def __init__(self, body: Callable[..., Any]) -> None:
        self._body = _named(body)
        self._signature = types.void(*[types.intp] * body.__code__.co_argcount)

    def __call__(self, n: int, *args: int, least: int = 1) -> None:
        """Run the range `0..n-1`; a thread takes `least` of it or more."""
        n_parts = 1 if n < 2 * least else min(n // least, n_threads())
        if n_parts == 1:
            self._alone(0, n, *args)
            return
        given = array("q", args)
        if _spread()(n, n_parts, self.address, given.buffer_info()[0], len(given)):
            raise MemoryError("a kernel's own memory")

    @cached_property
    def _alone(self) -> Callable[..., Any]:
        return compiled(self._body, self._signature)

    @cached_property
    def address(self) -> int:
        """Return where the machine code is: kernels can `call` each other."""
        made = cast("Any", self._alone).overloads[self._signature.args]
        return int(made.library.get_pointer_to_function(made.fndesc.llvm_func_name))


def kernel(body: Callable[..., Any]) -> Kernel:
    """Make a `Kernel` of a function of a range and of numbers and addresses. The GIL is released.

    Sums may be reassociated, so that they are vectorised; the order does not depend on the number of threads.
    """
    return Kernel(body)


class ByDtype(dict[Any, Any]):
    """Something for each dtype, or other kind of kernel, made when it is first looked up."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self.make = make

    def __missing__(self, kind: Any) -> Any:
        self[kind] = made = self.make(kind)
        return made


def by_dtype(make: Callable[[Callable[..., Any]], Any]) -> Callable[[Callable[..., Any]], ByDtype]:
    """Make a kernel, or another compiled function, for each dtype of one body.

    `@by_dtype(kernel) def norm(...)` is `norm[dtype]`: what the body names that is `ByDtype` is that dtype's there.
    """

    def instances(body: Callable[..., Any]) -> ByDtype:
        def instance(kind: Any) -> Any:
            known = body.__globals__
            own = {name: known[name][kind] for name in body.__code__.co_names if isinstance(known.get(name), ByDtype)}
            made = FunctionType(body.__code__, known | own, body.__name__)
            made.__module__, made.__qualname__ = body.__module__, f"{body.__qualname__}[{kind}]"
            return make(made)

        return ByDtype(instance)

    return instances


@cache
def _spread() -> Callable[..., Any]:
    """Return the function `(n, n_parts, address, args, n_args)` that divides a kernel's range among threads.

    The threads must have been started by `n_threads`. Returns how many parts failed: for want of memory.
    """

    def spread(n, n_parts, address, args, n_args):
        failed = 0
        for part in numba.prange(n_parts):
            failed += _call_packed(address, n * part // n_parts, n * (part + 1) // n_parts, args, n_args)
        return failed

    made = compiled(spread, types.intp(*[types.intp] * 5), parallel=True)
    return _in_turn(made) if _layer() == "workqueue" else made


@intrinsic(prefer_literal=True)
def arguments(typing: Any, address: Any, n: Any) -> Any:
    """Return n arguments that lie at an address, of a kernel that takes more than fit a call, as a tuple."""
    number, result = n.literal_value, types.UniTuple(types.intp, n.literal_value)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first = builder.inttoptr(args[0], ir.PointerType(_I64))
        places = [builder.gep(first, [ir.Constant(_I64, i)]) for i in range(number)]
        return context.make_tuple(builder, result, [builder.load(place) for place in places])

    return result(types.intp, n), generate


@cache
def argument_of(number: float) -> int:
    """Return the argument that stands for a number that is not whole: its bits."""
    return int.from_bytes(struct.pack("<d", number), "little", signed=True)


@intrinsic
def number_of(typing: Any, argument: Any) -> Any:
    """Return the number, as float32, that `argument_of` made an argument of."""
    return types.float32(types.intp), lambda context, builder, _, args: builder.fptrunc(
        builder.bitcast(args[0], ir.DoubleType()), ir.FloatType()
    )


@intrinsic
def call(typing: Any, address: Any, first: Any, stop: Any, argument: Any) -> Any:
    """Call the machine code of a kernel with one argument; return 1 if it failed, for want of memory, else 0."""
    return types.intp(*[types.intp] * 4), lambda context, builder, _, values: _status(context, builder, *values)


@intrinsic
def _call_packed(typing: Any, address: Any, first: Any, stop: Any, args: Any, n_args: Any) -> Any:
    """Call the machine code of a kernel with arguments in memory, up to `_MOST_ARGUMENTS`."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        *own, at, number = values
        end, status = builder.append_basic_block("called"), builder.alloca(_I64)
        arguments = builder.inttoptr(at, ir.PointerType(_I64))
        chosen = builder.switch(number, end)
        for n in range(_MOST_ARGUMENTS + 1):
            block = builder.append_basic_block("case")
            chosen.add_case(_I64(n), block)
            builder.position_at_end(block)
            given = [builder.load(builder.gep(arguments, [_I64(i)])) for i in range(n)]
            builder.store(_status(context, builder, *own, *given), status)
            builder.branch(end)
        builder.position_at_end(end)
        return builder.load(status)

    return types.intp(*[types.intp] * 5), generate


def _status(context: Any, builder: Any, address: Any, *values: Any) -> Any:
    kinds = [types.intp] * len(values)
    function = builder.inttoptr(address, ir.PointerType(context.call_conv.get_function_type(types.none, kinds)))
    status, _ = context.call_conv.call_function(builder, function, types.none, kinds, values)
    return builder.zext(status.is_error, _I64)


def compiled(body: Callable[..., Any], signature: Any, *, parallel: bool = False) -> Callable[..., Any]:
    """Compile a function, or load it from the cache."""
    with _lock, event.install_listener("numba:compile", _Announcement()):
        folder = usable_cache()
        if folder is not None:
            # Whatever lies in the cache, damaged, half written on a full disk, or of another Numba: functions are
            # compiled again, first to be kept in its place, then without it.
            for fresh in (False, True):
                with contextlib.suppress(Exception):
                    return _made(body, signature, parallel, folder, fresh)
        return _made(body, signature, parallel, None, False)


def _made(
    body: Callable[..., Any], signature: Any, parallel: bool, folder: Path | None, fresh: bool
) -> Callable[..., Any]:
    """Compile the function, or load it from a folder of compiled functions; `fresh` overwrites what is there."""
    _use_torch_threads()
    with _configured(CACHE_DIR=str(folder or ""), DISABLE_JIT=0):
        made: Any = numba.njit(parallel=parallel, cache=folder is not None, nogil=True, **_OPTIONS)(body)
        if folder is not None:
            _name_in_cache(made._cache, body.__name__)
            if fresh:
                made._cache.flush()
        made.compile(signature)
    made.disable_compile()
    return cast("Callable[..., Any]", made)


def inner(body: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that becomes part of each kernel which calls it.

    Never a function of its own: of several copies in a process the linker would take the first, which depends on what
    was compiled before, and whose sums may be added up in another order.
    """
    with _configured(DISABLE_JIT=0):
        return cast("Callable[..., Any]", numba.njit(forceinline=True, **_OPTIONS)(_named(body)))


def separate(body: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a separate function, for code with the same bits however compiled: moves, products of `vectors`.

    Kernels compile faster than with `inner`.
    """
    with _configured(DISABLE_JIT=0):
        return cast("Callable[..., Any]", numba.njit(**_OPTIONS)(_named(body)))


def intrinsic_of(name: str, signature: Any, generate: Callable[..., Any]) -> Callable[..., Any]:
    """Make an intrinsic of one signature. The name tells it from others in the cache's keys."""

    def made(typing: Any, *args: Any) -> Any:
        return signature, generate

    names = ["typing", *(f"x{i}" for i in range(len(signature.args)))]
    made.__signature__ = Signature([Parameter(x, Parameter.POSITIONAL_OR_KEYWORD) for x in names])  # type: ignore[attr-defined]
    made.__name__ = made.__qualname__ = name
    result: Callable[..., Any] = intrinsic(made)
    return result


def features() -> frozenset[str]:
    """Return the processor's features that kernels are compiled for: fewer than it has, if the environment says so."""
    codegen = numba.core.registry.cpu_target.target_context.codegen()
    return frozenset(name[1:] for name in codegen.magic_tuple()[2].split(",") if name.startswith("+"))


@contextlib.contextmanager
def _configured(**values: Any) -> Iterator[None]:
    """Set Numba's settings for a while; the environment's, which others in this process rely on, come back after it."""
    before = {name: getattr(numba.config, name) for name in values}
    try:
        for name, value in values.items():
            setattr(numba.config, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(numba.config, name, value)


def _name_in_cache(cache: Any, label: Any) -> None:
    """Give a kernel files of its own in the cache: processes that write at the same time write the same.

    Numba's own key has pickles of the closure, which differ between processes. The folder stands for the source, so
    that names are enough.
    """
    codegen = numba.core.registry.cpu_target.target_context.codegen()
    key = numba.__version__, codegen.magic_tuple(), label
    digest = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    file = cache._cache_file
    file._index_name = f"{digest}.nbi"
    file._index_path = os.path.join(file._cache_path, file._index_name)
    file._data_name_pattern = f"{digest}.{{number:d}}.nbc"
    file._source_stamp = digest
    cache._index_key = lambda types, codegen: (types, codegen.magic_tuple(), label)


def _in_turn(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Make calls of a kernel wait for each other, where Numba's threads serve one call and abort at a second."""

    def call(*args: Any) -> Any:
        with _turn:
            return compiled(*args)

    return call


def _layer() -> str:
    """Return the name of the layer that Numba's threads run on: "omp", "tbb" or "workqueue"; the first call starts
    them.
    """
    n_threads()
    try:
        return str(numba.threading_layer())
    except ValueError:  # one thread has not started any
        return ""


def _named(body: Callable[..., Any]) -> Callable[..., Any]:
    """Give a function a name of its own: of two with one name in a process the linker would take the first."""
    digest = hashlib.sha256(repr(_label(body)).encode()).hexdigest()[:16]
    body.__name__ = body.__qualname__ = f"{body.__name__}_{digest}"
    return body


def _label(x: Any) -> Any:
    """Return a label that tells a function, closure included, from others of this room's source."""
    function = getattr(x, "py_func", x)
    name = getattr(function, "__qualname__", None)
    if name is None:
        return repr(x)
    cells = getattr(function, "__closure__", None) or ()
    return function.__module__, name, tuple(_label(cell.cell_contents) for cell in cells)


def n_threads() -> int:
    """Return PyTorch's number of threads, and set Numba's to the same: 0.2 us."""
    number = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
    if number == 1:
        return 1
    if getattr(_threads, "number", 0) != number:
        before = torch.get_num_threads()
        _use_torch_threads()
        try:
            numba.set_num_threads(number)
        except ValueError as error:
            raise UsageError(
                f"Numba has no threading layer {os.environ.get('NUMBA_THREADING_LAYER', '')!r} here; expected omp, tbb "
                "or workqueue, and what it needs; unset NUMBA_THREADING_LAYER"
            ) from error
        _threads.number = number
        if torch.get_num_threads() != before:  # starting its threads set OpenMP's number, which PyTorch reads
            torch.set_num_threads(before)
    return number


def _use_torch_threads() -> None:
    """Have Numba run on OpenMP, which PyTorch loaded: one pool of threads, and no two that spin for one core."""
    if not os.environ.get("NUMBA_THREADING_LAYER"):
        numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]
