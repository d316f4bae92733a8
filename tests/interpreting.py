"""What Triton's interpreter gets wrong, put right: tests call `repair` before they run a kernel there.

Version 3.6 keeps bfloat16 as its bits: a dot multiplies them as integers, and rounding to bfloat16 cuts. And it makes
numbers of arrays `[1]` in a way that newer versions of NumPy refuse.
"""

import warnings
from typing import Any

import numpy as np
import torch

from lce.kernels.runtime import launching


def repair() -> None:
    """Dots of bfloat16 are those of float32; rounding is to the nearest; bounds of loops are numbers."""
    if not (launching.interpreting() and launching.installed()):
        return
    import triton.language as tl
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    if hasattr(builder, "repaired"):
        return
    dot, cast = builder.create_dot, builder.cast_impl

    def to_float(x: Any) -> Any:
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        a, b = (to_float(x) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(self, a, b, d, *rest)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar == tl.bfloat16 and dst_type.scalar == tl.float32:
            return to_float(src)
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            rounded = torch.from_numpy(np.ascontiguousarray(src.data)).bfloat16().view(torch.int16).numpy()
            return interpreter.TensorHandle(rounded.view(np.uint16), tl.bfloat16)
        return cast(self, src, dst_type)

    patch_tensor = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    execute = interpreter.GridExecutor.__call__

    def quietly(self: Any, *args: Any, **options: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # NumPy warns of NaN and of infinities, which are meant
            execute(self, *args, **options)

    interpreter.GridExecutor.__call__ = quietly
    interpreter._patch_lang_tensor = patch_lang_tensor
    builder.create_dot, builder.cast_impl, builder.repaired = create_dot, cast_impl, True
