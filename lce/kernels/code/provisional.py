"""Compiles kernels where they are used."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

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
