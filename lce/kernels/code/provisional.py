"""Compiles kernels where they are used, and runs them on Numba's threads."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import numba
import torch
from numba import types

from lce.kernels.code import compiling


@cache
def address(name: Any, kind: Any) -> int:
    """Compile a kernel; return the address of its machine code."""
    if isinstance(name, str):
        module, function = name.split(".")
        found = getattr(importlib.import_module(f"lce.kernels.code.{module}"), function)
        body = found if kind is None else found[kind]
    else:
        body = compiling.kernel(name)
    signature = types.void(*[types.intp] * body.__code__.co_argcount)
    made: Any = compiling.compiled(body, signature)
    entry = made.overloads[signature.args]
    _kept.append(made)
    return int(entry.library.get_pointer_to_function(entry.fndesc.llvm_func_name))


_kept: list[Any] = []


@cache
def _alone() -> Any:
    def alone(n, address, at, args, n_args):
        return compiling._call_packed(address, 0, n, at, args, n_args)

    return compiling.compiled(compiling._named(alone), types.intp(*[types.intp] * 5))


@cache
def _spread() -> Any:
    def spread(n, n_parts, address, at, stride, args, n_args):
        failed = 0
        for part in numba.prange(n_parts):
            begin, end = n * part // n_parts, n * (part + 1) // n_parts
            failed += compiling._call_packed(address, begin, end, at + part * stride, args, n_args)
        return failed

    return compiling.compiled(compiling._named(spread), types.intp(*[types.intp] * 7), parallel=True)


def spread(n: int, n_parts: int, address: int, at: int, stride: int, args: int, n_args: int) -> None:
    if n_parts == 1:
        _alone()(n, address, at, args, n_args)
        return
    numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
    _spread()(n, n_parts, address, at, stride, args, n_args)
