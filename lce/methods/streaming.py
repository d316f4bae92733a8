"""StreamingLLM: each query attends the first and the last tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor

from lce.cache.layout import AccessPattern
from lce.methods.base import Example, Method, filled, knob, resolved
from lce.methods.parts import LayerFacts, Part
from lce.methods.registry import register


@register("streaming")
@dataclass(frozen=True)
class Streaming(Method):
    """StreamingLLM (Xiao et al., 2024, "Efficient Streaming Language Models with Attention Sinks").

    A query attends the first `sinks` tokens and the last `local` tokens, itself included (section 3.2). Positions count
    only the attended tokens, for every query of a long prefill as in decode. A local key is seen at its true distance,
    and a sink from position `sinks + local - 1` when there are tokens between sinks and local tokens.

    Example: `sinks=2, local=3`; query 9 attends tokens 0, 1, 7, 8, 9 as if they were a text of five.

    Keys are cached at their absolute positions, and only the query is rotated to other positions.
    Time: O((sinks + local) · D) per token and head, whatever the length.
    """

    sinks: int = knob(4, "first tokens, always attended", least=0)
    local: int | None = knob(None, "last tokens; none is the window without the sinks", least=1)
    example: ClassVar = Example({"sinks": 2, "local": 6})

    def resolve(self, window: int) -> Self:
        return filled(self, local=max(1, window - self.sinks))

    @property
    def block(self) -> int:
        """A quarter of the tokens that a query attends, but at least 512 (large products run faster), at most 1,024."""
        return max(512, min(1024, (self.access.sinks + self.access.local) // 4))

    @property
    def access(self) -> AccessPattern:
        return AccessPattern(sinks=self.sinks, local=resolved(self.local))

    def parts_of(self, i: Tensor, layer: LayerFacts) -> Iterator[Part]:
        first, n_kept = i + 1 - self.access.local, self.sinks + self.access.local
        yield Part(keys=(first, i + 1), query_at=i)
        yield Part(keys=(0, first.clamp(max=self.sinks)), query_at=i.clamp(max=n_kept - 1))
