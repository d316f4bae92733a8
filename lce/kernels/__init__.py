"""The compiled kernels: `cpu` for CPUs, compiled by Numba, and `cuda` for GPUs, compiled by Triton.

Compiled code checks nothing, so the function that calls a kernel first checks the shapes, strides and dtypes of its
tensors.
"""
