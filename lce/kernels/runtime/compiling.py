"""Compiles CPU kernels by Numba and LLVM to flat code for a level of processors.

Numba makes LLVM's code of a kernel and of the functions that it calls, and optimises nothing. All of it is linked to
one module, then optimised and translated once for the level, so any machine can compile for any level.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from inspect import Parameter, Signature
from types import FunctionType
from typing import Any, cast

import llvmlite.binding as llvm
import numba
from llvmlite import ir
from numba import types
from numba.core import codegen, cpu, fastmathpass, typing
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from lce.kernels.runtime import levels
from lce.kernels.runtime.linking import link

_OPTIONS: dict[str, Any] = {
    "fastmath": {"reassoc", "contract", "nsz", "arcp"},
    "error_model": "numpy",
    "nogil": True,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}
_I64 = ir.IntType(64)

# With these functions of the C library, LLVM would replace loops that copy numbers or write zeros.
_WITHOUT = " ".join(f'"no-builtin-{name}"' for name in ("memset", "memcpy", "memmove"))
_DEFINED = re.compile(r"^(define .*?)(?= \{$)", re.MULTILINE)  # the first lines of functions
# What a kernel's code begins with, and Numba's counting of references to arrays, which does nothing because kernels
# allocate none.
_ENTRY = """
declare i32 @"{function}"(ptr, ptr{kinds})
define i32 @entry(ptr %result, ptr %error, i64 %0, i64 %1, i64 %2, ptr %args) {without} section ".text.entry" {{
start:
  {loads}
  %status = call i32 @"{function}"(ptr %result, ptr %error{given})
  ret i32 %status
}}
define void @NRT_incref(ptr %p) alwaysinline {{ ret void }}
define void @NRT_decref(ptr %p) alwaysinline {{ ret void }}
"""


class _Library(codegen.AOTCodeLibrary):
    """Numba's code of a function and of what it calls, not optimised."""

    def _optimize_functions(self, ll_module: Any) -> None:
        pass

    def _optimize_final_module(self) -> None:
        pass


class _Codegen(codegen.AOTCPUCodegen):
    """Numba's maker of `_Library`."""

    _library_class = _Library


class _Context(cpu.CPUContext):
    """Numba's translation of Python's operations, into a `_Library`, without machine code and without a runtime."""

    def init(self) -> None:
        super().init()
        self._internal_codegen = _Codegen("lce")

    def post_lowering(self, mod: Any, library: Any) -> None:
        if self.fastmath:
            fastmathpass.rewrite_module(mod, self.fastmath)

    def get_executable(self, library: Any, fndesc: Any, env: Any) -> Any:
        library._ensure_finalized()
        return [].append  # in the place of what Numba would call from Python: any function of C, another each time


@cache
def _contexts() -> dict[str, Any]:
    known = typing.Context()
    return {"_toplevel_typing_context": known, "_toplevel_target_context": _Context(known, "cpu")}


@contextlib.contextmanager
def _ours() -> Iterator[None]:
    """Have Numba compile into our contexts, and restore its own afterwards for other users of Numba."""
    with global_compiler_lock:
        known, jit = vars(cpu_target), numba.config.DISABLE_JIT
        typing_context, target_context = cpu_target.typing_context, cpu_target.target_context
        known.update(_contexts())
        numba.config.DISABLE_JIT = 0
        try:
            yield
        finally:
            known.update(_toplevel_typing_context=typing_context, _toplevel_target_context=target_context)
            numba.config.DISABLE_JIT = jit


def machine_code(name: str, body: Callable[..., Any]) -> bytes:
    """Compile a kernel's body for the level; return flat code that begins with the function that calls the body.

    The function's arguments are those of Numba's functions, an address for the result, which is nothing, and another
    for an error, which does not occur; then the body's first three, and the address of the others. Raises
    `linking.LinkError` about the kernel's `name`.
    """
    signature = types.void(*[types.intp] * body.__code__.co_argcount)
    with _ours():
        made = numba.njit(**_OPTIONS)(body)
        made.compile(signature)
        found: Any = made.overloads[signature.args]
        module = llvm.parse_assembly(_DEFINED.sub(rf"\1 {_WITHOUT}", str(found.library._final_module)))
    function = found.fndesc.llvm_func_name
    module.link_in(llvm.parse_assembly(_entry(function, body.__code__.co_varnames[: len(signature.args)])))
    machine = _target_machine()
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    for each in (*module.functions, *module.global_variables):
        if not each.is_declaration and each.name != "entry":
            each.linkage = "internal"
    module.get_function(function).add_function_attribute("alwaysinline")
    tuning = llvm.create_pipeline_tuning_options(speed_level=3)
    tuning.loop_vectorization, tuning.slp_vectorization = True, False
    passes = llvm.create_pass_builder(machine, tuning)
    passes.getModulePassManager().run(module, passes)
    return link(name, machine.emit_object(module))


def _entry(function: str, names: Sequence[str]) -> str:
    """Return LLVM's code of the function that loads the arguments behind the third, and calls a body's function."""
    loads = []
    for i in range(3, len(names)):
        loads.append(f"%at{i} = getelementptr i64, ptr %args, i64 {i - 3}")
        loads.append(f"%{i} = " + (f"ptrtoint ptr %at{i} to i64" if names[i] == "args" else f"load i64, ptr %at{i}"))
    kinds, given = ", i64" * len(names), "".join(f", i64 %{i}" for i in range(len(names)))
    return _ENTRY.format(function=function, kinds=kinds, given=given, loads="\n  ".join(loads), without=_WITHOUT)


@cache
def _target_machine() -> Any:
    """Return LLVM's compiler for the level: position-independent code in ELF's format, whatever this system is."""
    level = levels.asked()
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    native = not level.cpu
    return llvm.Target.from_triple(f"{level.machine}-unknown-linux-gnu").create_target_machine(
        cpu=llvm.get_host_cpu_name() if native else level.cpu,
        features=",".join(_features()),
        opt=3,
        reloc="pic",
        codemodel="small",
    )


@cache
def _features() -> tuple[str, ...]:
    """Return LLVM's names of the level's features, each with a sign: + or -."""
    level = levels.asked()
    if level.cpu:
        return tuple(f"+{name}" for name in level.features.split())
    return tuple(llvm.get_host_cpu_features().flatten().split(","))


def features() -> frozenset[str]:
    """Return the processor features that kernels are compiled for: those of the level."""
    return frozenset(name[1:] for name in _features() if name.startswith("+"))


def kernel(body: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a kernel's body, `body(first, stop, memory, ...)`.

    `memory` is the address of memory of the thread. Arguments are integers. The last one may be called `args`: it is
    the address of all arguments from there on. The body allocates nothing, raises nothing and calls no function of the
    C library. The compiler may reassociate a sum to vectorise it.
    """
    body.is_kernel = True  # type: ignore[attr-defined]
    return body


class ByDtype(dict[Any, Any]):
    """A dict from kinds of kernels, mostly dtypes, to values that `make(kind)` creates at the first look-up."""

    def __init__(self, make: Callable[[Any], Any], kernels_of: str = "") -> None:
        self.make, self.kernels_of = make, kernels_of  # the module, if the values are bodies of its kernels

    def __missing__(self, kind: Any) -> Any:
        self[kind] = made = self.make(kind)
        return made


def by_dtype(make: Callable[[Callable[..., Any]], Any]) -> Callable[[Callable[..., Any]], ByDtype]:
    """Return a decorator that makes one function per dtype: `@by_dtype(kernel) def norm(...)` defines `norm[dtype]`.

    `norm[dtype]` is `make(copy)`, here `kernel(copy)`, for a copy of the function. If the function uses a global name
    whose value is a `ByDtype`, the copy uses the value for its own dtype.
    """

    def instances(body: Callable[..., Any]) -> ByDtype:
        def instance(kind: Any) -> Any:
            known = body.__globals__
            own = {name: known[name][kind] for name in body.__code__.co_names if isinstance(known.get(name), ByDtype)}
            made = FunctionType(body.__code__, known | own, body.__name__)
            made.__module__, made.__qualname__ = body.__module__, f"{body.__qualname__}[{kind}]"
            return make(made)

        return ByDtype(instance, body.__module__ if make is kernel else "")

    return instances


@intrinsic(prefer_literal=True)
def arguments(typing: Any, address: Any, n: Any) -> Any:
    """In a kernel, return the n integers at an address, such as that of its arguments, as a tuple."""
    number, result = n.literal_value, types.UniTuple(types.intp, n.literal_value)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first = builder.inttoptr(args[0], ir.PointerType(_I64))
        places = [builder.gep(first, [ir.Constant(_I64, i)]) for i in range(number)]
        return context.make_tuple(builder, result, [builder.load(place) for place in places])

    return result(types.intp, n), generate


@intrinsic
def number_of(typing: Any, argument: Any) -> Any:
    """In a kernel, decode an argument that was a float, as float32."""
    return types.float32(types.intp), lambda context, builder, _, args: builder.fptrunc(
        builder.bitcast(args[0], ir.DoubleType()), ir.FloatType()
    )


@intrinsic
def call_with(typing: Any, address: Any, first: Any, stop: Any, memory: Any, args: Any) -> Any:
    """In a kernel, call the kernel at an address with memory, and with the arguments at the address `args`."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        at, *given = values
        kinds = [types.intp] * len(given)
        function = builder.inttoptr(at, ir.PointerType(context.call_conv.get_function_type(types.none, kinds)))
        status, _ = context.call_conv.call_function(builder, function, types.none, kinds, given)
        return builder.zext(status.is_error, _I64)

    return types.intp(*[types.intp] * 5), generate


def inner(body: Callable[..., Any], inlined: bool = True) -> Callable[..., Any]:
    """Return a Numba function that is inlined into each kernel that calls it."""
    with _ours():
        return cast("Callable[..., Any]", numba.njit(forceinline=inlined, **_OPTIONS)(body))


@inner
def call(address, first, stop, args):
    """In a kernel, call another one that takes no memory."""
    return call_with(address, first, stop, 0, args)


def separate(body: Callable[..., Any]) -> Callable[..., Any]:
    """Return a Numba function that kernels call without inlining, so that they compile faster than with `inner`."""
    return inner(body, inlined=False)


def intrinsic_of(name: str, signature: Any, emit: Callable[..., Any]) -> Callable[..., Any]:
    """Return a Numba intrinsic: a function that kernels can call. `emit(builder, *values)` emits its LLVM code.

    `emit` returns the LLVM value of the result, or None if there is no result. `signature` is the only signature of the
    intrinsic. `name` is what errors of Numba call the function.
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
