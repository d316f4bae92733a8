"""ReAttention: each query attends the spans of tokens with its best keys, scored without positions, side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from lce.cache.layout import AccessPattern
from lce.errors import UsageError
from lce.methods.base import Example, filled, knob, resolved
from lce.methods.costs import Cost, QueryBlock
from lce.methods.oracle import WithoutSummaries
from lce.methods.registry import register
from lce.methods.selective import block_of, choosers
from lce.methods.selectors import BEST_KEY, ContextSelector
from lce.methods.top_p import top_p_knob


@register("reattention")
@dataclass(frozen=True)
class ReAttention(WithoutSummaries):
    """ReAttention (Liu et al., 2024, "ReAttention: Training-Free Infinite Context with Finite Attention Scope").

    The score of a token is `q · k` with query and key unrotated. A query attends the first `sinks` tokens, the `top_k`
    spans of `span` tokens that have the best tokens, and the last `local` tokens with its own span. All of them stand
    side by side from position 0, in their order, and RoPE is applied there, so that distances stay within the window.
    Sinks and local tokens are rounded up to whole spans.

    The method is `pages` with `select=best_key place=side_by_side`. The defaults are the authors' values for a window
    of 8,192: 32 sinks, 127 spans of 32 tokens, 4,096 local tokens. In their code each query votes for its best 4
    tokens, a block attends the spans around the tokens with most votes, and all heads attend the same tokens. Here each
    query of each head chooses for itself, and spans begin at multiples of `span`.

    Cost: scoring reads all keys, O(H · N · D) per token. A token attends at most a window of keys.
    """

    placement = "side_by_side"

    span: int | None = knob(None, "tokens of a span; none is 32, fewer in a window below 512", least=1)
    top_k: int | None = knob(None, "spans that a query chooses; none is what the window holds", least=1)
    sinks: int | None = knob(None, "first tokens, always attended, in whole spans; none is a span", least=0)
    local: int | None = knob(None, "last tokens, always attended, in whole spans; none is half of the window", least=1)
    share: Literal["head", "group", "layer"] = knob("head", "which heads choose together: none, a KV head's, or all")
    top_p: float | None = top_p_knob()
    example: ClassVar = Example({"span": 2, "local": 4})

    def resolve(self, window: int) -> Self:
        made = filled(self, span=min(32, max(1, window // 16)), local=max(1, window // 2))
        made = filled(made, sinks=made.size)
        made = filled(made, top_k=max(0, window // made.size - made.n_first - made.n_last - 1))
        if resolved(made.top_k) < 1:
            raise UsageError(f"{self.label}: sinks and local fill the window, {window}; lower span, sinks or local")
        return made

    @property
    def size(self) -> int:
        return resolved(self.span)

    @property
    def n_first(self) -> int:
        return -(-resolved(self.sinks) // self.size)

    @property
    def n_last(self) -> int:
        return -(-resolved(self.local) // self.size) - 1

    @property
    def n_choices(self) -> int:
        return self.n_first + resolved(self.top_k) + self.n_last

    @property
    def block(self) -> int:
        return block_of(self.n_choices)

    @property
    def access(self) -> AccessPattern:
        sinks, local = self.n_first * self.size, (self.n_last + 1) * self.size
        return AccessPattern(self.size, sinks=sinks, local=local, per_head=self.share != "layer")

    def limit(self, window: int, sliding_window: int | None = None) -> int | None:
        """Return the window if what a query attends is larger."""
        return window if (self.n_choices + 1) * self.size > window else None

    @property
    def selector(self) -> ContextSelector:
        return BEST_KEY

    def n_choosers(self, n_heads: int, n_kv_heads: int) -> int:
        return choosers(self.share, n_heads, n_kv_heads)

    def choice_cost(self, block: QueryBlock) -> Cost:
        return self.seen_cost(block, together=self.share != "head") + self.selector.cost(block, self.size)
