"""LongHeads: each head of each query attends a few chosen chunks, within the trained window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from torch import Tensor

from lce.cache.layer import LayerCache
from lce.cache.layout import AccessPattern
from lce.errors import UsageError
from lce.methods.base import knob
from lce.methods.costs import Cost, PaperFigure, QueryBlock, paper_figures
from lce.methods.registry import register
from lce.methods.selective import SELECTING, SelectiveMethod, choosers
from lce.methods.selectors import BY_NUMBER, SUMMARY, random_scores
from lce.methods.step import Step


@register("longheads")
@dataclass(frozen=True)
class LongHeads(SelectiveMethod, promises=SELECTING):
    """LongHeads (Lu et al., 2024, "Multi-Head Attention is Secretly a Long Context Processor").

    For each complete chunk and query head, the method stores a summary c. With keys and queries rotated to their
    offsets 0..L-1, `O = softmax(Q Kᵀ/√D) V` without a causal mask, `q^c = mean(O)`, `c = softmax(q^c Kᵀ/√D) K` (Eq.
    1-2). The score of a chunk is `q · c` with the unrotated query (Eq. 3). A query attends chunk 0, the `chunks - 3`
    best chunks after chunk 0, the last complete chunk, and its own chunk. All of these chunks stand side by side from
    position 0, so a text of at most `chunks` chunks has full attention.

    `share` says which heads sum their scores to choose together: none (`head`, the paper), the query heads of one KV
    head (`group`), or all heads (`layer`). Some knobs are ablations of the paper. `rank` takes the best, the worst
    or random chunks. With `keep_first=False` chunk 0 is chosen by score alone, with `keep_last=False` the last complete
    chunk; a query still attends `chunks` chunks. With `fix_head` all heads attend the chunks that the first head chose;
    with `fix_layer` all layers attend the first layer's chunks. The paper's `placement` is `side_by_side`. The preset
    `paper` has the chunks of the paper, and `released` the values of the authors' code for Llama 2. By default chunks
    are smaller: among as many tokens, a published model finds more facts in more and smaller chunks.

    Cost: scoring M chunks takes O(H · M · D) per token, and a token attends at most `chunks · L` keys. A chunk's
    summary is H · D numbers.
    """

    share: Literal["head", "group", "layer"] = knob("head", "which heads choose together: none, a KV head's, or all")
    rank: Literal["top", "last", "random"] = knob("top", "take the best chunks, the worst or random ones")
    keep_first: bool = knob(True, "the first chunk is always attended")
    keep_last: bool = knob(True, "the last complete chunk is always attended")
    fix_head: bool = knob(False, "all heads take the choice of the first")
    fix_layer: bool = knob(False, "all layers take the choice of the first")

    presets: ClassVar = {"paper": {"chunk_size": 256}, "released": {"chunk_size": 256, "chunks": 16}}
    keeps_vectors = True

    def resolve(self, window: int) -> Self:
        if self.fix_head and self.share != "head":
            raise UsageError(
                f"longheads: fix_head follows one head and share={self.share!r} sums several: drop one of them"
            )
        if self.rank != "top" and self.top_p is not None:
            raise UsageError(f"longheads: top_p takes the best chunks first and rank={self.rank!r} does not: drop one")
        return super().resolve(window)

    @property
    def access(self) -> AccessPattern:
        per_head = self.share != "layer" and not self.fix_head
        return AccessPattern(self.size, sinks=self.size if self.keep_first else 0, local=self.size, per_head=per_head)

    @property
    def couples_heads(self) -> str | None:
        return BY_NUMBER if self.rank == "random" else super().couples_heads

    def n_choosers(self, n_heads: int, n_kv_heads: int) -> int:
        return 1 if self.fix_head else choosers(self.share, n_heads, n_kv_heads)

    def summarise(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        return SUMMARY.summarise(q, k, v, step)

    def score(self, q: Tensor, summary: Tensor, step: Step, layer: int) -> Tensor:
        together = len(q) // self.n_choosers(len(q), step.n_kv_heads)
        if self.rank == "top" and not self.fix_head:
            return SUMMARY.score(q, summary, together)
        scores = SUMMARY.score(q[:1], summary[:1]) if self.fix_head else SUMMARY.score(q, summary)  # [H, T, M]
        if self.rank == "random":
            scores = random_scores(len(scores), scores.shape[-1], step, layer, scores.device)
        elif self.rank == "last":
            scores = -scores.float()
        return scores if self.fix_head else SUMMARY.together(scores, len(q) // together)

    def log_mass(self, scores: Tensor, n_heads: int, head_dim: int) -> Tensor:
        return super().log_mass(scores, len(scores) if self.fix_head else n_heads, head_dim)

    def choice_cost(self, block: QueryBlock) -> Cost:
        n_scored = 0 if self.fix_layer and block.layer > block.first_layer else 1 if self.fix_head else block.n_heads
        choosing = SUMMARY.cost(replace(block, n_heads=n_scored), self.size)
        summaries = SUMMARY.cost(block, self.size).summaries
        together = self.share != "head" or self.fix_head
        return self.seen_cost(block, together=together) + replace(choosing, summaries=summaries)

    @property
    def plain_choice(self) -> Literal["best", "worst"] | None:
        if self.rank == "random" or self.fix_head or self.fix_layer:
            return None
        return "worst" if self.rank == "last" else "best"

    def choose(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor | None:
        if not self.fix_layer:
            return super().choose(q, cache, step)
        return step.once_on_all(
            "choice of the first layer", lambda: super(LongHeads, self).choose(q, cache, step), q.device
        )


@paper_figures.register(LongHeads)
def _(method: LongHeads, block: QueryBlock) -> Sequence[PaperFigure]:
    heads, layers = block.n_heads, block.n_layers
    reach, seen = (method.n_choices + 1) * heads * layers, f"{heads} heads of {layers} layers can see in all"
    return (
        PaperFigure(f"chunks that {seen}, |P| · heads · layers", "", reach),
        PaperFigure("the same in tokens", "", reach * method.size),
    )
