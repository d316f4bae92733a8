"""Compiles CPU kernels by Numba, once per kind of processor; the code is cached."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from inspect import Parameter, Signature
from pathlib import Path
from types import FunctionType
from typing import Any, cast

import llvmlite
import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps
from numba.extending import intrinsic

from lce.files import read_file, write_whole
from lce.kernels.code.shared import MOST_ARGUMENTS
from lce.progress import StepNotices, notice

_OPTIONS: dict[str, Any] = {"fastmath": {"reassoc", "contract", "nsz", "arcp"}, "error_model": "numpy"}
_I64 = ir.IntType(64)
_DIGEST_BYTES = 32  # the bytes of a SHA-256

_lock = threading.RLock()

_steps = StepNotices("compiling kernels")

_announced: set[str] = set()


def _announce(what: str, more: str) -> None:
    """Print a notice on stderr, once for each `what`."""
    if what not in _announced:
        _announced.add(what)
        notice(f"{what}{more}")


@cache
def _source() -> str:
    """Return a digest of the source files of all CPU kernels."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def usable_cache() -> Path | None:
    """Create and return the folder of compiled kernels; None if the folder cannot be used.

    The folder's name has a digest of the source, so a cached kernel is never stale. Files in this folder are executed,
    so the folder is used only if this user owns it and nobody else can write to it.
    """
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = (Path(home) / "lce" / f"kernels-{_source()}").absolute()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except (OSError, RuntimeError):  # RuntimeError: a user without a home folder
        return None
    private = found.st_uid == os.geteuid() and not found.st_mode & 0o022
    return folder if private and os.access(folder, os.R_OK | os.W_OK | os.X_OK) else None


def kernel(body: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel's body, `body(first, stop, memory, *args)`, under a name of its own.

    `memory` is the address of memory of the thread. Arguments are integers. The body allocates nothing and raises
    nothing. The compiler may reassociate a sum to vectorise it.
    """
    return _named(body)


class ByDtype(dict[Any, Any]):
    """A dict from kinds of kernels, mostly dtypes, to values that `make(kind)` creates at the first look-up."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self.make = make

    def __missing__(self, kind: Any) -> Any:
        self[kind] = made = self.make(kind)
        return made


def by_dtype(make: Callable[[Callable[..., Any]], Any]) -> Callable[[Callable[..., Any]], ByDtype]:
    """Return a decorator that makes one function per dtype: `@by_dtype(kernel) def norm(...)` defines `norm[dtype]`.

    `norm[dtype]` is `make(copy)`, here `Kernel(copy)`, for a copy of the function. If the function uses a global name
    whose value is a `ByDtype`, the copy uses the value for its own dtype.
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


@intrinsic(prefer_literal=True)
def arguments(typing: Any, address: Any, n: Any) -> Any:
    """In a kernel that takes only the address of its n arguments, return the n integers there as a tuple."""
    number, result = n.literal_value, types.UniTuple(types.intp, n.literal_value)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first = builder.inttoptr(args[0], ir.PointerType(_I64))
        places = [builder.gep(first, [ir.Constant(_I64, i)]) for i in range(number)]
        return context.make_tuple(builder, result, [builder.load(place) for place in places])

    return result(types.intp, n), generate


@intrinsic
def number_of(typing: Any, argument: Any) -> Any:
    """In a kernel, decode an argument that `argument_of` encoded, as float32."""
    return types.float32(types.intp), lambda context, builder, _, args: builder.fptrunc(
        builder.bitcast(args[0], ir.DoubleType()), ir.FloatType()
    )


@intrinsic
def call(typing: Any, address: Any, first: Any, stop: Any, argument: Any) -> Any:
    """In a kernel, call the kernel at an address, which takes no memory, with one argument."""
    return types.intp(*[types.intp] * 4), lambda context, builder, _, values: _status(
        context, builder, *values[:3], _I64(0), values[3]
    )


@intrinsic
def call_packed(typing: Any, address: Any, first: Any, stop: Any, memory: Any, args: Any, n_args: Any) -> Any:
    """In a kernel, call another kernel with memory and with `n_args` arguments, read from the address `args`."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        *own, at, number = values
        end, status = builder.append_basic_block("called"), cgutils.alloca_once(builder, _I64)
        arguments = builder.inttoptr(at, ir.PointerType(_I64))
        chosen = builder.switch(number, end)
        for n in range(MOST_ARGUMENTS + 1):
            block = builder.append_basic_block("case")
            chosen.add_case(_I64(n), block)
            builder.position_at_end(block)
            given = [builder.load(builder.gep(arguments, [_I64(i)])) for i in range(n)]
            builder.store(_status(context, builder, *own, *given), status)
            builder.branch(end)
        builder.position_at_end(end)
        return builder.load(status)

    return types.intp(*[types.intp] * 6), generate


def _status(context: Any, builder: Any, address: Any, *values: Any) -> Any:
    kinds = [types.intp] * len(values)
    function = builder.inttoptr(address, ir.PointerType(context.call_conv.get_function_type(types.none, kinds)))
    status, _ = context.call_conv.call_function(builder, function, types.none, kinds, values)
    return builder.zext(status.is_error, _I64)


def compiled(body: Callable[..., Any], signature: Any) -> Callable[..., Any]:
    """Compile a function for one signature, or load its machine code from the cache."""
    with _lock, _configured(DISABLE_JIT=0):
        made: Any = numba.njit(nogil=True, **_OPTIONS)(body)
        made._cache = _KernelFile(usable_cache(), body.__name__)
        try:
            made.compile(signature)
        finally:
            _steps.end()
    made.disable_compile()
    return cast("Callable[..., Any]", made)


class _KernelFile:
    """A file with one kernel's machine code; Numba calls `load_overload` and `save_overload` when it compiles.

    The file is the SHA-256 of its name and contents, then the contents: what Numba pickles. Neither machine code nor
    a pickle can be checked while it is loaded, so both are loaded only if the SHA-256 agrees. A file that is missing,
    damaged, cut short or another kernel's is replaced. The file is renamed to its name when it is complete, so
    processes that compile at once do not disturb each other. Without a folder, nothing is loaded or kept.
    """

    def __init__(self, folder: Path | None, name: str) -> None:
        # Numba's own key contains pickled closures, which differ between processes. The kernel's name suffices as a
        # key, because the folder's name has the digest of the source.
        codegen = numba.core.registry.cpu_target.target_context.codegen()
        key = numba.__version__, llvmlite.__version__, EXTENSION_SUFFIXES[0], codegen.magic_tuple(), name
        self._path = folder and folder / f"{name}.{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.kernel"

    def _digest(self, contents: bytes) -> bytes:
        return hashlib.sha256(str(self._path and self._path.name).encode() + contents).digest()

    def load_overload(self, signature: Any, context: Any) -> Any:
        """Return the compiled function in the file, None if it has to be compiled."""
        with contextlib.suppress(Exception):  # without these lines, too, the kernel is compiled
            raw = self._path and read_file(self._path)
            if raw and raw[:_DIGEST_BYTES] == self._digest(raw[_DIGEST_BYTES:]):
                context.refresh()
                return CompileResult._rebuild(context, *pickle.loads(raw[_DIGEST_BYTES:]))
        kept = "later runs find them in a cache" if self._path else "which every run does: no cache"
        _steps.begin(f"compiling kernels for this processor{';' if self._path else ','} {kept}")
        return None

    def save_overload(self, signature: Any, made: Any) -> None:
        """Write the file, if there is a folder. If that fails, say so once: the kernel works, and is not kept."""
        assert not made.library.has_dynamic_globals, "addresses of this process are in the machine code"
        if self._path:
            contents = dumps(made._reduce())
            try:
                write_whole(self._path, self._digest(contents) + contents)
            except Exception as error:
                _announce("compiled kernels are not kept, so that every run compiles them", f": {error}")


def inner(body: Callable[..., Any], inlined: bool = True) -> Callable[..., Any]:
    """Return a Numba function that is inlined into each kernel that calls it.

    Without inlining, each kernel would have its own copy of the function, and the linker would use the first copy in a
    process for all kernels. Which copy is first depends on what was compiled before, and two copies may add up a sum in
    different orders.
    """
    with _configured(DISABLE_JIT=0):
        return cast("Callable[..., Any]", numba.njit(forceinline=inlined, **_OPTIONS)(_named(body)))


def separate(body: Callable[..., Any]) -> Callable[..., Any]:
    """Return a Numba function that kernels call without inlining, so that they compile faster than with `inner`.

    All kernels' copies of the function must give the same bits (`inner` says why). The function may move numbers and
    call products of `vectors`, but not add up a sum itself.
    """
    return inner(body, inlined=False)


def intrinsic_of(name: str, signature: Any, emit: Callable[..., Any]) -> Callable[..., Any]:
    """Return a Numba intrinsic: a function that kernels can call. `emit(builder, *values)` emits its LLVM code.

    `emit` returns the LLVM value of the result, or None if there is no result. `signature` is the only signature of the
    intrinsic. `name` is part of the key under which Numba caches a caller's machine code, so it must be unique.
    """

    def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
        result = emit(builder, *values)
        return context.get_dummy_value() if result is None else result

    def made(typing: Any, *args: Any) -> Any:
        return signature, generate

    names = ["typing", *(f"x{i}" for i in range(len(signature.args)))]
    made.__signature__ = Signature([Parameter(x, Parameter.POSITIONAL_OR_KEYWORD) for x in names])  # type: ignore[attr-defined]
    made.__name__ = made.__qualname__ = name
    result: Callable[..., Any] = intrinsic(made)
    return result


def features() -> frozenset[str]:
    """Return the processor features that kernels are compiled for; Numba's environment variables can restrict them."""
    codegen = numba.core.registry.cpu_target.target_context.codegen()
    return frozenset(name[1:] for name in codegen.magic_tuple()[2].split(",") if name.startswith("+"))


@contextlib.contextmanager
def _configured(**values: Any) -> Iterator[None]:
    """Change Numba's settings within the context, and restore them afterwards for other users of Numba."""
    before = {name: getattr(numba.config, name) for name in values}
    try:
        for name, value in values.items():
            setattr(numba.config, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(numba.config, name, value)


def _named(body: Callable[..., Any]) -> Callable[..., Any]:
    """Give a function a unique name: of two functions with one name, the linker would use the first for both."""
    digest = hashlib.sha256(repr(_label(body)).encode()).hexdigest()[:16]
    body.__name__ = body.__qualname__ = f"{body.__name__}_{digest}"
    return body


def _label(x: Any) -> Any:
    """Return a label that distinguishes a function, with the values of its closure, from all other kernel functions."""
    function = getattr(x, "py_func", x)
    name = getattr(function, "__qualname__", None)
    if name is None:
        return repr(x)
    cells = getattr(function, "__closure__", None) or ()
    return function.__module__, name, tuple(_label(cell.cell_contents) for cell in cells)
