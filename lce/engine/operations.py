"""Counts the operations and the bytes read of prefill and decode, from a model's config and a method's cost alone.

An operation is a multiply-add of a matrix product: two floating-point operations (FLOPs). The bytes read are those of
the weights, and in each layer those of the keys, the values and the method's own state that a block of queries sees.
Each byte counts once per block. Written bytes are not counted.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lce.engine.options import takes
from lce.engine.setup import Planned
from lce.engine.sizing import Planning, planned
from lce.errors import UsageError
from lce.methods.costs import Cost, PaperFigure, QueryBlock, cost, paper_figures, total
from lce.methods.run import method_of
from lce.methods.selective import ChunkMethod
from lce.models.config import ModelConfig
from lce.models.layers import model_class
from lce.sizes import count

PROJECTIONS = ("q", "k", "v", "qkv", "o")  # a layer's matrices for attention; its other matrices are the MLP's
LONGEST = 1 << 24  # the longest text that is counted, in tokens: a minute or more for the slowest methods


@dataclass(frozen=True)
class OperationCount:
    """The work for `tokens` tokens in all layers: multiply-adds, and bytes read. A field that is not counted is None.

    `projections`, `mlp` and `head` are products with weights; the head runs only for each block's last token.
    `attention`, `scores`, `summaries` and `low_dim` are the method's: see `lce.methods.Cost`. Plain causal attention
    would take `causal` multiply-adds instead of these four. `key_bytes` counts keys and values; it is an upper bound if
    heads choose independently, because two heads may choose the same chunk.
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
    key_bytes: int | None
    state_bytes: int | None

    @property
    def selection(self) -> int | None:
        """The multiply-adds for choosing chunks or tokens: scores, summaries and low-dim maps."""
        return total(self.scores, self.summaries, self.low_dim)

    @property
    def operations(self) -> int | None:
        """All multiply-adds."""
        return total(self.projections, self.mlp, self.head, self.attention, self.selection)

    @property
    def flops(self) -> int | None:
        """All floating-point operations: two for each multiply-add."""
        return None if self.operations is None else 2 * self.operations

    @property
    def bytes_read(self) -> int | None:
        return total(self.weight_bytes, self.key_bytes, self.state_bytes)

    @property
    def share(self) -> float | None:
        """The multiply-adds of attention and selection divided by those of plain causal attention."""
        counted = total(self.attention, self.selection)
        return None if counted is None else counted / self.causal


@dataclass(frozen=True)
class Operations:
    """The work for a text of `tokens` tokens: `prefill` in blocks of `block` tokens, and `decode` of the last token.

    For a method that selects chunks of L tokens, `decode` is the work for the last L tokens together, because only one
    token in L makes a summary. `paper_figures` are the costs that the method's paper states, computed for this model.
    """

    tokens: int
    method: str
    dtype: str
    block: int
    prefill: OperationCount
    decode: OperationCount
    paper_figures: Sequence[PaperFigure] = ()


@takes(Planning)
def operations(given: Planning) -> Operations:
    """Count what prefill and decode of a text of `tokens` tokens compute and read. Takes the arguments of `plan`.

    Reads config.json alone. If the method does not promise that its cost is counted, only the products with weights are
    counted. Takes tens of microseconds per block and layer.
    """
    n_tokens = count(given.tokens, "tokens")
    made = planned(given)
    if n_tokens > LONGEST:
        raise UsageError(f"tokens is {n_tokens:,}; operations are counted block by block, of {LONGEST:,} or fewer")
    block, config = made.layout.block, made.config
    steps = made.layout.chunk_size if isinstance(made.method, ChunkMethod) else 1
    sizes = _block(config, n_tokens - 1, n_tokens)
    return Operations(
        n_tokens,
        made.method.label,
        str(made.layout.dtype).removeprefix("torch."),
        block,
        _count(made, [(start, min(start + block, n_tokens)) for start in range(0, n_tokens, block)]),
        _count(made, [(index, index + 1) for index in range(max(0, n_tokens - steps), n_tokens)]),
        tuple(paper_figures(made.method, sizes)),
    )


def _block(config: ModelConfig, start: int, stop: int) -> QueryBlock:
    """Return the queries of tokens `start..stop-1` in layer 0."""
    acting, heads = config.acting_layers, (config.n_heads, config.n_kv_heads, config.head_dim)
    layers = {"n_layers": len(acting), "first_layer": min(acting, default=0)}
    return QueryBlock(start, stop, *heads, sliding_window=config.sliding_window, **layers)


def _count(made: Planned, blocks: Sequence[tuple[int, int]]) -> OperationCount:
    """Count the work of blocks `(start, stop)`, each of the tokens `start` to `stop - 1`."""
    config, size, n = made.config, made.layout.dtype.itemsize, sum(stop - start for start, stop in blocks)
    work, causal, methods = Cost(0), 0, {kind: method_of(made.method, kind) for kind in {*config.kinds}}
    for start, stop in blocks:
        first = _block(config, start, stop)
        causal += config.n_layers * (first.causal.attention or 0)
        for index, kind in enumerate(config.kinds):
            work += cost(methods[kind], replace(first, layer=index))
    products = {"projections": 0, "mlp": 0, "head": 0}  # the multiply-adds of one token
    weights = model_class(config).weights(config)
    for name, (_, shape) in weights.items():
        index_or_name, in_layer, own = name.partition(".")
        product = ("projections" if own in PROJECTIONS else "mlp") if in_layer else index_or_name
        if len(shape) == 2 and product in products:
            products[product] += math.prod(shape)
    vector_bytes = made.layout.token_bytes // (made.layout.n_layers * made.layout.n_kv_heads)  # of keys and of values
    once, rows = sum(made.weight_bytes.values()), weights["embed"][1][0]
    if "head" in weights:  # an untied embedding: only the rows of the tokens are read
        once, row_bytes = once - made.weight_bytes["embed"], made.weight_bytes["embed"] // rows
    else:
        products["head"], row_bytes = math.prod(weights["embed"][1]), 0
    return OperationCount(
        tokens=n,
        projections=n * products["projections"],
        mlp=n * products["mlp"],
        head=len(blocks) * products["head"],
        **{name: getattr(work, name) for name in ("attention", "scores", "summaries", "low_dim")},
        causal=causal,
        weight_bytes=len(blocks) * once + n * row_bytes,
        key_bytes=None if work.rows_read is None else work.rows_read * vector_bytes,
        state_bytes=None if work.state_read is None else work.state_read * size,
    )
