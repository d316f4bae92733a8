"""Products of many rows in float32, for processors without instructions for products of the weights' dtype.

Weights are converted to panels first. A panel has 16 rows of a weight matrix `[out, in]` in float32, transposed:
`[in, 16]`. Six rows of x at a time are multiplied with some inputs of a panel, which stay in a core's L1 cache.
"""

from __future__ import annotations

import numpy as np
from numba import carray, float32

from lce.kernels.code import vectors
from lce.kernels.code.compiling import ByDtype, by_dtype, inner, kernel
from lce.kernels.code.numbers import itemsize, pointer, read, stored
from lce.kernels.code.products import finish_row
from lce.kernels.code.shared import LANES, PANEL_ROWS, PANELS

_INPUTS = 384  # the most inputs of a panel that are multiplied at a time

_transpose = ByDtype(lambda dtype: vectors.transpose(dtype, False))
_multiply = vectors.multiply(False, "float32", ((6, 1), (4, 1), (2, 1), (1, 1)))


@by_dtype(kernel)
def pack(begin, end, memory, weight_at, panels_at, n_rows, size):
    """Convert the rows of a matrix `[n_rows, size]` to panels; the last panel has zeros below the last row."""
    for panel in range(begin, end):
        row_at, panel_at = weight_at + panel * LANES * size * itemsize, panels_at + 4 * LANES * panel * size
        n_here = min(LANES, n_rows - panel * LANES)
        whole = size // LANES * LANES if n_here == LANES else 0
        for j in range(0, whole, LANES):
            _transpose(row_at + j * itemsize, size * itemsize, panel_at + 4 * LANES * j, 4 * LANES)
        weight, out = carray(pointer(row_at, stored), (n_here, size)), carray(pointer(panel_at, float32), (size, LANES))
        for j in range(whole, size):
            for row in range(LANES):
                out[j, row] = read(weight[row, j]) if row < n_here else np.float32(0)


@by_dtype(kernel)
def product(
    begin, end, memory, x_at, panels_at, bias_at, out_at, n, n_out, first, n_panels, size, stride, gate, adds, wide
):
    """Multiply float32 `x [n, size]` with panels; write columns `first..` of the result `[n, n_out]`.

    Panels are `stride` inputs apart. With `gate`, `n_panels` panels of the first half of the matrix are followed by as
    many of the second half. A task is `PANEL_ROWS` rows of x times `PANELS` panels.
    """
    n_groups, n_parts = (n_panels + PANELS - 1) // PANELS, 2 if gate else 1
    n_slices = (size + _INPUTS - 1) // _INPUTS
    inputs = (size + n_slices - 1) // n_slices
    sums = carray(pointer(memory, float32), (2, PANEL_ROWS, LANES))
    for task in range(begin, end):
        row, group = task // n_groups * PANEL_ROWS, task % n_groups * PANELS
        n_rows = min(PANEL_ROWS, n - row)
        for panel in range(group, min(n_panels, group + PANELS)):
            column = first + panel * LANES
            n_here = min(LANES, n_out - column)
            for part in range(n_parts):
                at = bias_at + (part * n_out + column) * itemsize
                _fill(bias_at != 0, at, n_here, n_rows, sums[part])
                panel_at = panels_at + 4 * LANES * (part * n_panels + panel) * stride
                for number in range(n_slices):  # a range with a variable step could raise
                    start = number * inputs
                    x_here, here = x_at + 4 * (row * size + start), panel_at + 4 * LANES * start
                    _add_slice(x_here, size, here, sums[part].ctypes.data, n_rows, min(inputs, size - start))
            for i in range(n_rows):
                finish_row(out_at, (row + i) * n_out + column, n_here, gate, adds, wide, sums[0, i], sums[1, i])


@by_dtype(inner)
def _fill(biased, bias_at, n_here, n_rows, sums):
    """Set each of `n_rows` rows of sums to `n_here` numbers at an address, or to zeros."""
    bias = carray(pointer(bias_at, stored), (LANES,))
    for lane in range(LANES):
        number = read(bias[lane]) if biased and lane < n_here else np.float32(0)
        for i in range(n_rows):
            sums[i, lane] = number


@inner
def _add_slice(x_at, size, panel_at, sums_at, n_rows, n_inputs):
    """Add the products of `n_rows` rows of x with some inputs of a panel to sums `[n_rows, 16]`."""
    i = 0
    while i < n_rows:
        left = n_rows - i
        step = 6 if left >= 6 else 4 if left >= 4 else 2 if left >= 2 else 1
        x_here, sums_here = x_at + 4 * i * size, sums_at + 4 * LANES * i
        _multiply(step, 1, x_here, 4 * size, panel_at, 4 * LANES, sums_here, 4 * LANES, n_inputs)
        i += step
