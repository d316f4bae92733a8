"""ReAttention: each query attends the spans of tokens with its best keys, scored without positions, side by side."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Self

from lce.errors import UsageError
from lce.methods.base import Example, filled, knob, resolved
from lce.methods.budget import TOP_P, Budget
from lce.methods.choosing import block_of
from lce.methods.registry import register
from lce.methods.selection import Selection, Share, SideBySide
from lce.methods.selective import ChunkMethod
from lce.methods.selectors import BestKey


@register("reattention")
@dataclass(frozen=True)
class ReAttention(ChunkMethod):
    """ReAttention (Liu et al., 2024, "ReAttention: Training-Free Infinite Context with Finite Attention Scope").

    The score of a token is `q · k` with query and key unrotated. A query attends the first `sinks` tokens, the `top_k`
    spans of `span` tokens that have the best tokens, and the last `local` tokens with its own span. All of them stand
    side by side from position 0, in their order, and RoPE is applied there, so that distances stay within the window.
    Sinks and local tokens are rounded up to whole spans.

    The method is `pages` with `select=best_key placement=side_by_side`. The defaults are the authors' values for a
    window of 8,192: 32 sinks, 127 spans of 32 tokens, 4,096 local tokens. In their code each query votes for its best 4
    tokens, a block attends the spans around the tokens with most votes, and all heads attend the same tokens. Here each
    query of each head chooses for itself, and spans begin at multiples of `span`.

    Cost: scoring reads all keys, O(H · N · D) per token. A token attends at most a window of keys.
    """

    span: int | None = knob(None, "tokens of a span; none is 32, fewer in a window below 512", least=1)
    top_k: int | None = knob(None, "spans that a query chooses; none is what the window holds", least=1)
    sinks: int | None = knob(None, "first tokens, always attended, in whole spans; none is a span", least=0)
    local: int | None = knob(None, "last tokens, always attended, in whole spans; none is half of the window", least=1)
    share: Share = knob("head", "which heads choose together: none, a KV head's, or all")
    top_p: float | None = knob(None, TOP_P, is_share=True, kw_only=True)
    example: ClassVar = Example({"span": 2, "local": 4})

    def resolve(self, window: int) -> Self:
        made = filled(self, span=min(32, max(1, window // 16)), local=max(1, window // 2))
        made = filled(made, sinks=made.span)
        span, sinks, local = made.sizes
        made = filled(made, top_k=max(0, (window - sinks - local) // span))
        if resolved(made.top_k) < 1:
            raise UsageError(f"{self.label}: sinks and local fill the window, {window}; lower span, sinks or local")
        return made

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The tokens of a span, and of the sinks and the local tokens in whole spans."""
        span = self.span or 1
        return span, -(-(self.sinks or 0) // span) * span, -(-(self.local or 1) // span) * span

    @cached_property
    def selection(self) -> Selection:
        """The spans that a query attends. The knob `local` includes the own span, and that of a `Budget` does not."""
        span, sinks, local = self.sizes
        budget = Budget((self.top_k or 0) * span + sinks + local, sinks, local - span, top_p=self.top_p)
        return Selection(span, BestKey(), SideBySide(), budget, self.share)

    @property
    def block(self) -> int:
        return block_of(self.selection.n_choices)
