"""How large what a cache keeps besides keys and values can become, for plans made before anything is read.

Every number here is the most that the buffers named in its docstring can hold, their room to grow included.
"""

from __future__ import annotations

from lce.cache.tiering import CacheShape


def table_bytes(n_tokens: int, shape: CacheShape) -> int:
    """Bytes of a layer's `ChunkTable` without its summaries: four numbers a chunk."""
    return 4 * 8 * by_half(-(-n_tokens // shape.chunk_size))


def summary_rows(n_tokens: int, shape: CacheShape) -> int:
    """Summaries that a layer's `ChunkTable` has room for, with `n_tokens` in its chunks."""
    n_complete = n_tokens // shape.chunk_size
    return max(16, by_half(n_complete)) if n_complete else 0


def token_rows(n_tokens: int) -> int:
    """Rows that `TokenRows` has room for."""
    return max(64, by_half(n_tokens))


def recent_keys(keep: int, n_tokens: int, block: int) -> int:
    """Keys that `RecentKeys` has room for, which are written in blocks of at most `block`."""
    first = max(keep, min(n_tokens, block))
    return first if n_tokens <= first else keep + max(keep, block)


def by_half(n: int) -> int:
    """A buffer's room for `n`, that grows by half whenever it is full."""
    return n * 3 // 2
