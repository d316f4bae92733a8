"""lce's kernels for GPUs, a module each: `gpu.elementwise`. They need Triton, so a module is imported when first used.

`launching` says whether they can run, and needs no Triton: ask `gpu.launching.runs_on` before any other module.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from lce.kernels.cuda import launching as launching

if TYPE_CHECKING:
    from lce.kernels.cuda import attention as attention
    from lce.kernels.cuda import choices as choices
    from lce.kernels.cuda import decoding as decoding
    from lce.kernels.cuda import elementwise as elementwise
    from lce.kernels.cuda import merging as merging
    from lce.kernels.cuda import products as products
    from lce.kernels.cuda import rows as rows
else:

    def __getattr__(name: str) -> ModuleType:
        return importlib.import_module(f"lce.kernels.cuda.{name}")
