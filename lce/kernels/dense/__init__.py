"""Dense attention: all T queries of a head see the same keys.

    s[t, n] = q[t] · k[n] / √D          for the keys n that query t sees: causal, within a window, or all
    out[t] = Σ_n e^(s[t, n] - lse[t]) · v[n],   lse[t] = ln Σ_n e^s[t, n]

For `q [H, T, D]` and `k v [G, N, D]`, where H / G query heads share a KV head, the result is `out [H, T, D]` and
`lse [H, T]` (float32). Multiplications: 2 · H · T · N · D, half of it if causal. Scores are never written to memory:
`lce.kernels.rows` has the arithmetic of a task's rows.
"""
