"""The operations of a decoder layer between matrix products; memory is read once and written once.

    norm       x / √(mean x² + eps) · weight        x `[..., D]`, weight `[D]`
    gate_mul   gate(a) · b                          the halves a and b of each row of x `[T, 2·D]`
    rotate     (a·cos - b·sin, b·cos + a·sin)       the halves a and b of vectors `[..., D]`, as RoPE does
    append     keys, rotated or not, and values to a cache's rows `[G, n, D]`
    take_rows  the rows `index [n]` of two tensors `[G, N, D]`

Arithmetic is float32; results are rounded once.
"""
