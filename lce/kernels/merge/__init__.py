"""The merge of n attention results for disjoint sets of keys: one softmax over all these keys.

    lse = ln Σ_i e^lse_i,   out = Σ_i e^(lse_i - lse) · out_i

for outputs `out_i [..., D]` and log-sum-exps `lse_i [...]` (float32); that of attention to no key is -inf. Bytes moved:
each result once.
"""
