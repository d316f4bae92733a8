"""The compiled kernels: a folder an operation, and `runtime` below them.

In a folder, NAME.py has the calls for CPUs, NAME_body.py what Numba compiles for these calls, and NAME_triton.py the
kernels for GPUs with their calls. Bodies are imported only where a kernel is compiled, Triton only where a GPU runs.

| operation     | on CPUs, as levels of processors differ                                | on GPUs                  |
|---------------|------------------------------------------------------------------------|--------------------------|
| `product`     | few rows of a step: `products`, `quantised`; rows that are read:       | `products`, up to 4 rows |
|               | `panels`, in bfloat16 with AVX512_BF16; PyTorch with AMX               | else PyTorch             |
| `dense`       | `attention`; for read tokens in bfloat16 with AMX PyTorch              | `attention`              |
| `routed`      | `attention` of `dense`                                                 | `attention`, `decoding`  |
| `rows`        | `rows`, in bfloat16 with AVX512_BF16; `int8_rows`                      | `rows`                   |
| `merge`       | `merging`                                                              | `merging`                |
| `choose`      | `choices`, `scores`                                                    | `choices`                |
| `elementwise` | `elementwise`                                                          | `elementwise`            |

Compiled code checks nothing, so the function that calls a kernel first checks the shapes, strides and dtypes of its
tensors.
"""
