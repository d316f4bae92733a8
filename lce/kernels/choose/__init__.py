"""Choices by score: the n best chunks for each query, and the n best tokens for a block of queries; and the scores.

`scores` computes dot products of queries `[H, T, D]` with vectors of keys or chunks `[S, M, D]`, `[H, T, M]` (float32),
and reductions of them. `choices` takes the n largest of M scores, in ascending order of their indices; of equal scores,
the last, so a choice depends on the scores alone. Multiplications of scores: H · T · M · D. A choice passes some twenty
times over M sort keys in a core's L1 cache.
"""
