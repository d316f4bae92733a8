"""LongHeads: each head of each query attends a few chosen chunks, within the trained window."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal, Self

from torch import Tensor

from lce.errors import UsageError
from lce.methods.base import ATTENDING, filled, knob, resolved
from lce.methods.costs import Cost, PaperFigure, QueryBlock, paper_figures
from lce.methods.registry import register
from lce.methods.selection import Selection, Share
from lce.methods.selective import SelectiveMethod
from lce.methods.selectors import Summary, random_scores
from lce.methods.step import Step

PAPER = {"chunk_size": 256, "local": 256, "share": "head", "summary": "values", "placement": "side_by_side"}


@register("longheads")
@dataclass(frozen=True)
class LongHeads(SelectiveMethod, promises={"counted": (*ATTENDING, "choose", "score", "summarise")}):
    """LongHeads (Lu et al., 2024, "Multi-Head Attention is Secretly a Long Context Processor").

    For each complete chunk the method stores a summary c, a mean of the chunk's keys, weighted by how the chunk's own
    queries attend them (`Summary`; Eq. 1-2 with `summary="values"`). Keys and queries are rotated to their offsets
    0..L-1. The score of a chunk is `q · c` with the unrotated query (Eq. 3). A query attends chunk 0, the last complete
    chunks with `local` tokens, the best chunks between, and its own chunk, `chunks` in all. They stand side by side
    from position 0, so a text of at most `chunks` chunks has full attention.

    `share` says which heads sum their scores to choose together: none (`head`, the paper), the query heads of one KV
    head (`group`), or all heads (`layer`). Some knobs are ablations of the paper. `rank` takes the best, the worst
    or random chunks. With `keep_first=False` chunk 0 is chosen by score alone, with `local=0` the last complete ones;
    a query still attends `chunks` chunks. With `fix_head` all heads attend the chunks that the first head chose;
    with `fix_layer` all layers attend the first layer's chunks. The paper's `placement` is `side_by_side`.

    The preset `paper` has the chunks, the summaries and the choice of the paper, and `released` the values of the
    authors' code for Llama 2. By default chunks are smaller, weights come from keys, and the heads of a KV head choose
    together: with these SmolLM2-135M found more facts, and a token read less. Small chunks need several `local` ones:
    without them a question does not see its own words.

    Cost: scoring M chunks takes O(H · M · D) per token, and a token attends at most `chunks · L` keys. A chunk's
    summary is G · D numbers; with `summary="values"` H · D.
    """

    chunk_size: int | None = knob(None, "tokens of a chunk; none is 8, fewer in a window below 1024", least=1)
    chunks: int | None = knob(None, "chunks that a query attends; none is what half of the window holds, or 8")
    share: Share = knob("group", "which heads choose together: none, a KV head's, or all")
    rank: Literal["top", "last", "random"] = knob("top", "take the best chunks, the worst or random ones")
    keep_first: bool = knob(True, "the first chunk is always attended")
    local: int | None = knob(None, "last tokens always attended, in whole chunks; none is 1/16 of the window", least=0)
    fix_head: bool = knob(False, "all heads take the choice of the first")
    fix_layer: bool = knob(False, "all layers take the choice of the first")
    summary: Literal["values", "keys"] = knob(
        "keys", "where a key's weight comes from: the chunk's values, or keys alone"
    )

    presets: ClassVar = {"paper": PAPER, "released": {**PAPER, "chunks": 16}}

    def resolve(self, window: int) -> Self:
        if self.fix_head and self.share == "layer":
            raise UsageError(f"longheads: fix_head follows one head and share={self.share!r} sums several: drop one")
        if self.rank != "top" and self.top_p is not None:
            raise UsageError(f"longheads: top_p takes the best chunks first and rank={self.rank!r} does not: drop one")
        made = filled(self, chunk_size=min(8, max(2, window // 128), max(1, window // 32)))
        size = resolved(made.chunk_size)
        made = super(LongHeads, filled(made, chunks=max(min(8, window // size), window // (2 * size)))).resolve(window)
        n_chunks = resolved(made.chunks)
        made = filled(made, local=max(size, min(window // 16, n_chunks * size // 4)))
        if n_chunks < (least := 1 + made.selection.n_first + made.selection.n_last):
            fault = (
                f"chunks is {n_chunks}; expected {least} or more, for local={made.local} and chunks of {size} tokens"
            )
            raise UsageError(f"{made.label}: {fault}: lower local")
        return made

    @cached_property
    def selection(self) -> Selection:
        made, share = super().selection, "layer" if self.fix_head else self.share
        budget = replace(made.budget, sinks=made.size if self.keep_first else 0, local=self.local)
        return replace(made, budget=budget, share=share, one_layer=self.fix_layer)

    @property
    def selector(self) -> "Ranked":
        return Ranked(self.summary, self.rank, self.fix_head)


@paper_figures.register(LongHeads)
def _(method: LongHeads, block: QueryBlock) -> Sequence[PaperFigure]:
    heads, layers = method.selection.n_choosers(block.n_heads, block.n_kv_heads), block.n_layers
    reach, seen = resolved(method.chunks) * heads * layers, f"{heads} choices of {layers} layers can see in all"
    return (
        PaperFigure(f"chunks that {seen}, |P| · heads · layers", "", reach),
        PaperFigure("the same in tokens", "", reach * resolved(method.chunk_size)),
    )


@dataclass(frozen=True)
class Ranked(Summary):
    """LongHeads' summaries and scores (Eq. 1-3), with its ablations of ranks and of heads that follow the first."""

    rank: Literal["top", "last", "random"] = "top"
    fix_head: bool = False

    @property
    def by_number(self) -> bool:  # type: ignore[override]
        return self.rank == "random"

    @property
    def plain(self) -> Literal["best", "worst"] | None:
        if self.rank == "random" or self.fix_head:
            return None
        return "worst" if self.rank == "last" else "best"

    @property
    def multiplies(self) -> bool:
        return self.rank == "top" and not self.fix_head

    def scores(self, q: Tensor, summary: Tensor, n_choosers: int, step: Step, layer: int) -> Tensor:
        if self.multiplies:
            return super().scores(q, summary, n_choosers, step, layer)
        scores = self.score(q[:1], summary[:1], step, layer) if self.fix_head else self.score(q, summary, step, layer)
        if self.rank == "random":
            scores = random_scores(len(scores), scores.shape[-1], step, layer, scores.device)
        elif self.rank == "last":
            scores = -scores.float()
        return scores if self.fix_head else self.together(scores, n_choosers)

    def log_mass(self, scores: Tensor, n_heads: int, head_dim: int, size: int) -> Tensor:
        return super().log_mass(scores, len(scores) if self.fix_head else n_heads, head_dim, size)

    def cost(self, block: QueryBlock, selection: Selection) -> Cost:
        follows = selection.one_layer and block.layer > block.first_layer
        n_scored = 0 if follows else 1 if self.fix_head else block.n_heads
        summaries = super().cost(block, selection).summaries
        return replace(super().cost(replace(block, n_heads=n_scored), selection), summaries=summaries)
