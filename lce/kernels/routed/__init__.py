"""Routed attention: each query of each head has its own list of chunks, and sees each of these at its own rotation.

For `q [H, T, D]` (not rotated), lists `chosen [H, T, K]` (-1 for none), rotations `turns[t, s]` and tiles
`k v [E, L, D]`, each the keys and values of one chunk of one KV head, the result is one softmax over all keys of the
K tiles that a query chose: `out [H, T, D]` and `lse [H, T]` (float32). Multiplications: 2 · H · T · K · L · D. Choices
are sorted by chunk, so a chunk is read once for all rows of a task that chose it. But small tiles that all heads of a
KV head chose are attended query by query, those of eight keys by a body of their own (bfloat16, AVX512_BF16).

Tasks of both kinds of attention share their pieces and memory, so the calls and bodies stand beside those of `dense`.
On GPUs, `chosen_triton` walks the union of a block's choices, and in a decode step `decoding_triton` attends runs of
tokens, whose bounds are read on the device.
"""
