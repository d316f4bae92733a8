"""The bodies of all kernels, by name and kind."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType
from typing import Any

from lce.kernels.runtime.compiling import ByDtype
from lce.kernels.runtime.library import sources
from lce.kernels.runtime.shared import ITEMSIZE


def body(name: str, kind: Any) -> Callable[..., Any]:
    """Return a kernel's body. Example: `products.product` is the function `product` of `product/products_body.py`."""
    module, function = name.split(".")
    found = getattr(_modules()[module], function)
    return found if kind is None else found[kind]


def names() -> Iterator[tuple[str, Any]]:
    """Yield the name and the kind of each kernel of the package."""
    for module_name, module in sorted(_modules().items()):
        for name, value in vars(module).items():
            if isinstance(value, ByDtype) and value.kernels_of == module.__name__:
                kinds = getattr(module, f"{name.upper()}_KINDS", getattr(module, "KINDS", ITEMSIZE))
                yield from ((f"{module_name}.{name}", kind) for kind in kinds)
            elif getattr(value, "is_kernel", False) and value.__module__ == module.__name__:
                yield f"{module_name}.{name}", None


@cache
def _modules() -> dict[str, ModuleType]:
    """Return the modules with bodies of kernels, by their names without `_body`."""
    return {
        file.stem.removesuffix("_body"): importlib.import_module(f"lce.kernels.{file.parent.name}.{file.stem}")
        for file in sources()
        if file.stem.endswith("_body")
    }
