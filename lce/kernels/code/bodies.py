"""The bodies of all kernels, by name and kind."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import lce.kernels.code
from lce.kernels.code.compiling import ByDtype
from lce.kernels.code.shared import ITEMSIZE


def body(name: str, kind: Any) -> Callable[..., Any]:
    """Return a kernel's body. `name` is that of its function with its module, "products.product"."""
    module, function = name.split(".")
    found = getattr(importlib.import_module(f"lce.kernels.code.{module}"), function)
    return found if kind is None else found[kind]


def names() -> Iterator[tuple[str, Any]]:
    """Yield the name and the kind of each kernel of the package."""
    for module_name in sorted(module.name for module in pkgutil.iter_modules(lce.kernels.code.__path__)):
        if module_name.startswith("_"):
            continue
        module = importlib.import_module(f"lce.kernels.code.{module_name}")
        for name, value in vars(module).items():
            if isinstance(value, ByDtype) and value.kernels_of == module.__name__:
                kinds = getattr(module, f"{name.upper()}_KINDS", getattr(module, "KINDS", ITEMSIZE))
                yield from ((f"{module_name}.{name}", kind) for kind in kinds)
            elif getattr(value, "is_kernel", False) and value.__module__ == module.__name__:
                yield f"{module_name}.{name}", None
