"""The smallest kernel, by which `launching` finds out whether Triton can compile and launch."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_one(out):
    tl.store(out, 1.0)
