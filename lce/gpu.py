"""lce's kernels for GPUs, a module each: `gpu.elementwise`. They need Triton, so a module is imported when first used.

`launching` says whether they can run, and needs no Triton: ask `gpu.launching.runs_on` before any other module.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from lce.kernels.runtime import launching

__all__ = [
    "attention",
    "best",
    "choices",
    "chosen",
    "decoding",
    "elementwise",
    "launching",
    "merging",
    "pages",
    "products",
    "rows",
]

if TYPE_CHECKING:
    from lce.kernels.choose import best_triton as best
    from lce.kernels.choose import choices_triton as choices
    from lce.kernels.dense import attention_triton as attention
    from lce.kernels.elementwise import elementwise_triton as elementwise
    from lce.kernels.merge import merging_triton as merging
    from lce.kernels.product import products_triton as products
    from lce.kernels.routed import chosen_triton as chosen
    from lce.kernels.routed import decoding_triton as decoding
    from lce.kernels.rows import pages_triton as pages
    from lce.kernels.rows import rows_triton as rows
else:
    _FOLDERS = {"attention": "dense", "best": "choose", "choices": "choose", "chosen": "routed", "decoding": "routed"}
    _FOLDERS |= {
        "elementwise": "elementwise",
        "merging": "merge",
        "pages": "rows",
        "products": "product",
        "rows": "rows",
    }

    def __getattr__(name: str) -> ModuleType:
        return importlib.import_module(f"lce.kernels.{_FOLDERS[name]}.{name}_triton")
