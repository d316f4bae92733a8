"""Rows: the arithmetic of attention that `lce.kernels.dense` and `lce.kernels.routed` share, an online softmax.

A row is one query of one head. Its state is `top`, the sum of weights and `sums [D]`, the sum of weighted values. A
block of keys and values `k v [N, D]` changes the state so:

    top'  = max(top, max_n s_n)
    w_n   = 2^(s_n - top')                  s_n = q · k_n · log2(e) / √D
    total' = total · 2^(top - top') + Σ w_n
    sums'  = sums · 2^(top - top') + Σ w_n · v_n

and at the end `out = sums / total`, `lse = (top + log2 total) · ln 2`. Multiplications: 2 · D for each row and key.

Keys and values have the queries' dtype, or are `int8_rows`: 8-bit numbers with a scale for each vector. Few rows read
such keys in place, by integers: `pair_products_body`.
"""
