"""Counts what prefill and decode compute and read, from a model's config and a method's `cost`; nothing is run.

Operations are multiply-adds of matrix products; one is two floating-point operations (FLOPs). Bytes are bytes read: the
weights once a block, and in each layer the keys, the values and the method's own state that the block sees. Each byte
counts once a block. Written bytes are not counted.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lce.engine.loading import Devices, Planned, planned
from lce.errors import UsageError
from lce.methods.base import Method
from lce.methods.costs import UNCOUNTED, PaperFigure, QueryBlock, total
from lce.methods.selective import ChunkSelection
from lce.models.registry import model_class
from lce.sizes import count

PROJECTIONS = ("q", "k", "v", "o")  # a layer's matrices around attention; the others are the MLP's
LONGEST = 1 << 24  # tokens; counting this many takes a minute or more with the slowest methods


@dataclass(frozen=True)
class OperationCount:
    """The work of some blocks of tokens in all layers: multiply-adds, and bytes read. None: not counted.

    `projections`, `mlp` and `head` are products with weights; the head runs only for each block's last token.
    `attention`, `scores`, `summaries` and `low_dim` are the method's: see `lce.methods.Cost`. `causal` is the cost of
    plain causal attention instead of these four.
    """

    tokens: int
    projections: int
    mlp: int
    head: int
    attention: int | None
    scores: int | None
    summaries: int | None
    low_dim: int | None
    causal: int
    weight_bytes: int
    key_bytes: int | None  # of keys and values; an upper bound if heads choose independently
    state_bytes: int | None

    @property
    def selection(self) -> int | None:
        """The multiply-adds of choosing: scores, summaries and low-dim maps."""
        return total(self.scores, self.summaries, self.low_dim)

    @property
    def operations(self) -> int | None:
        """The multiply-adds in all."""
        return total(self.projections, self.mlp, self.head, self.attention, self.selection)

    @property
    def flops(self) -> int | None:
        """The floating-point operations in all: two a multiply-add."""
        return None if self.operations is None else 2 * self.operations

    @property
    def bytes_read(self) -> int | None:
        return total(self.weight_bytes, self.key_bytes, self.state_bytes)

    @property
    def share(self) -> float | None:
        """Attention and selection as a share of plain causal attention."""
        counted = total(self.attention, self.selection)
        return None if counted is None else counted / self.causal

    def __add__(self, other: OperationCount) -> OperationCount:
        sums: dict[str, Any] = {name: total(n, getattr(other, name)) for name, n in vars(self).items()}
        return OperationCount(**sums)


@dataclass(frozen=True)
class Operations:
    """The work for a text of `tokens` tokens: `prefill` in blocks of `block`, and `decode` of the last token.

    For a method that selects chunks, `decode` counts the last chunk's worth of tokens, because a summary is made once a
    chunk. `paper_figures` are figures of cost that the method's paper states, computed for this model.
    """

    tokens: int
    method: str
    dtype: str
    block: int
    prefill: OperationCount
    decode: OperationCount
    paper_figures: Sequence[PaperFigure] = ()


def operations(
    model: str | Path, method: str | Method = "full", *, tokens: int | str, device: Devices = "auto",
    dtype: str | torch.dtype | None = "auto", block: int | str | None = None, window: int | str | None = None,
    kv_device_budget: int | str | None = None, kv_host_budget: int | str | None = None,
    spill_dir: str | Path | None = None, kv_dtype: str | torch.dtype | None = "auto", weights: str | None = "auto",
) -> Operations:  # fmt: skip
    """Count what prefill and decode of a text of `tokens` tokens compute and read. Takes the options of `plan`.

    Reads config.json alone. A user's method is counted by its `Method.cost`; without one only the products with weights
    are counted. Time: tens of microseconds for each block and layer.
    """
    n_tokens = count(tokens, "tokens")
    made = planned(
        model, method, device=device, dtype=dtype, block=block, window=window, kv_device_budget=kv_device_budget,
        kv_host_budget=kv_host_budget, spill_dir=spill_dir, kv_dtype=kv_dtype, weights=weights,
    )  # fmt: skip
    if n_tokens > LONGEST:
        raise UsageError(f"tokens is {n_tokens:,}; operations are counted block by block, of {LONGEST:,} or fewer")
    each, steps = made.layout.block, made.layout.chunk_size if isinstance(made.method, ChunkSelection) else 1
    blocks = ((start, min(start + each, n_tokens)) for start in range(0, n_tokens, each))
    config = made.config
    sizes = QueryBlock(n_tokens - 1, n_tokens, config.n_heads, config.n_kv_heads, config.head_dim, config.n_layers)
    return Operations(
        n_tokens,
        made.method.label,
        str(made.layout.dtype).removeprefix("torch."),
        each,
        _count(made, blocks),
        _count(made, ((index, index + 1) for index in range(max(0, n_tokens - steps), n_tokens))),
        tuple(made.method.paper_figures(sizes)),
    )


@dataclass(frozen=True)
class _Weights:
    """Multiply-adds of one token with the weights, and the weights' bytes."""

    projections: int
    mlp: int
    head: int
    n_bytes: int  # without an untied embedding, of which only the tokens' rows are read
    row_bytes: int  # of one embedding row

    @classmethod
    def of(cls, made: Planned) -> _Weights:
        counts = {"projections": 0, "mlp": 0, "head": 0}
        weights = model_class(made.config).weights(made.config)
        for name, (_, shape) in weights.items():
            index, in_layer, own = name.partition(".")
            kind = ("projections" if own in PROJECTIONS else "mlp") if in_layer else index
            if len(shape) == 2 and kind in counts:
                counts[kind] += math.prod(shape)
        tied, (rows, size) = "head" not in weights, weights["embed"][1]
        if tied:
            return cls(**counts | {"head": rows * size}, n_bytes=sum(made.weight_bytes.values()), row_bytes=0)
        embed_bytes = made.weight_bytes["embed"]
        return cls(**counts, n_bytes=sum(made.weight_bytes.values()) - embed_bytes, row_bytes=embed_bytes // rows)


def _count(made: Planned, blocks: Iterable[tuple[int, int]]) -> OperationCount:
    """Count the work of blocks `start..stop-1`."""
    weights = _Weights.of(made)
    works = [_of_block(made, weights, start, stop) for start, stop in blocks]
    return functools.reduce(operator.add, works)


def _of_block(made: Planned, weights: _Weights, start: int, stop: int) -> OperationCount:
    config, n = made.config, stop - start
    first = QueryBlock(start, stop, config.n_heads, config.n_kv_heads, config.head_dim, config.n_layers)
    layers = (replace(first, layer=i, sliding_window=config.sliding_window) for i in range(config.n_layers))
    counted = made.method.counted
    cost = functools.reduce(operator.add, ((counted and made.method.cost(layer)) or UNCOUNTED for layer in layers))
    size = made.layout.dtype.itemsize
    return OperationCount(
        tokens=n,
        projections=n * weights.projections,
        mlp=n * weights.mlp,
        head=weights.head,
        **{name: getattr(cost, name) for name in ("attention", "scores", "summaries", "low_dim")},
        causal=config.n_layers * (first.causal.attention or 0),
        weight_bytes=weights.n_bytes + n * weights.row_bytes,
        key_bytes=None if cost.rows_read is None else cost.rows_read * 2 * config.head_dim * size,
        state_bytes=None if cost.state_read is None else cost.state_read * size,
    )
