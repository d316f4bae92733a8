"""The merge of attention results."""

import numpy as np
from numba import carray, float32, int64

from lce.kernels.runtime.compiling import by_dtype, kernel
from lce.kernels.runtime.numbers import exp, itemsize, log2, pointer, read, stored, write


@by_dtype(kernel)
def merged(first, stop, memory, n_parts, size, out_at, total_at, args):
    """Write the merge of n parts: `args [n, 2]` has the addresses of each part's outputs and log-sum-exps."""
    parts = carray(pointer(args, int64), (n_parts, 2))
    total = carray(pointer(total_at, float32), (stop,))
    sums = carray(pointer(memory, float32), (size,))
    weights = carray(pointer(memory + 4 * size, float32), (n_parts,))
    for row in range(first, stop):
        top = np.float32(-np.inf)
        for i in range(n_parts):
            weights[i] = carray(pointer(parts[i, 1] + 4 * row, float32), (1,))[0]
            top = max(top, weights[i])
        whole = np.float32(0)
        for i in range(n_parts):
            weights[i] = exp(weights[i] - top) if weights[i] != np.float32(-np.inf) else np.float32(0)
            whole += weights[i]
        total[row] = top + log2(whole) * np.float32(0.6931471805599453)
        scale = np.float32(1) / whole if whole != np.float32(0) else np.float32(0)
        sums[:] = 0
        for i in range(n_parts):
            if weights[i] != np.float32(0):  # a weight that is NaN is not skipped
                part = carray(pointer(parts[i, 0] + row * size * itemsize, stored), (size,))
                weight = weights[i] * scale
                for d in range(size):
                    sums[d] += weight * read(part[d])
        out = carray(pointer(out_at + row * size * itemsize, stored), (size,))
        for d in range(size):
            out[d] = write(sums[d])
