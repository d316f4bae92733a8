"""Self-Extend: each query attends every key, near keys at their own distance, far keys at their group's distance."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from torch import Tensor

from lce.cache.layout import AccessPattern, CacheLayout
from lce.cache.method_state import MethodState
from lce.errors import UsageError
from lce.methods.base import Example, LocalMethod, Promise, filled, knob, resolved
from lce.methods.parts import LayerFacts, Part
from lce.methods.registry import register
from lce.methods.turned_keys import GROUPED, GroupedKeys


@register("self_extend")
@dataclass(frozen=True)
class SelfExtend(LocalMethod):
    """Self-Extend (Jin et al., 2024, "LLM Maybe LongLM: Self-Extend LLM Context Window Without Tuning").

    A query attends every earlier key: keys nearer than `local` at their true distance, farther keys at the distance
    `i // group - j // group + local - local // group` (Eq. 3-4, with the paper's floors), which grows `group` times
    more slowly. A window of W positions then holds `(W - local) · group + local` tokens. A longer text needs a larger
    `group`.

    With `group=auto` each query i has a group of its own, as Jet-Long has one for each text (2026, "Dynamic Bifocal
    RoPE", arXiv:2607.07740): the smallest for which `i // group + local - local // group`, its largest distance, is at
    most `far`. So a text within the window has full attention, and any length fits.

    Example: `local=4, group=2`; query 9 sees keys 9..6 at 0..3, then 5, 4 at 4 and 3, 2 at 5.

    Keys are cached at their group's position, and the last `local` keys also at their own. With `group=auto` they are
    cached at their own, and a copy of the far keys is rotated to the present group's: see `GroupedKeys`.
    Time: O(N · D) per token and head.
    """

    local: int | None = knob(None, "last tokens, at exact distances; none is a quarter of the window", least=1)
    group: int | Literal["auto"] = knob(8, "tokens that share a position farther away; auto: as few as fit", least=1)
    far: int | None = knob(None, "with group=auto: the largest distance; none is the window, less 1", least=1)
    example: ClassVar = Example({"local": 4, "group": 3})

    def resolve(self, window: int) -> Self:
        made = filled(self, local=max(1, window // 4), far=window - 1 if self.group == "auto" else None)
        if made.far is None:
            return made
        if self.group != "auto":
            raise UsageError(f"{self.label}: far is {self.far} with group={self.group}; expected group=auto")
        if made.n_local > made.far:
            raise UsageError(
                f"{self.label}: local is {made.local}; expected {made.far} or less with group=auto, because no group "
                "brings farther tokens within the window"
            )
        return made

    def limit(self, window: int, sliding_window: int | None = None) -> int | None:
        """Return the length for which the farthest distance, `i // group + local - local // group`, is `window - 1`."""
        if self.group == "auto":
            return None
        grouped = window - self.n_local + self.n_local // self.group
        return max(window, grouped * self.group)

    @property
    def n_recent(self) -> int:
        return 0 if self.group == "auto" else self.n_local

    @property
    def access(self) -> AccessPattern:
        return AccessPattern(local=self.n_local)

    def promised(self, what: Promise) -> bool:
        return super().promised(what) and (what != "recorded" or self.group != "auto")

    def state(self, layout: CacheLayout) -> Mapping[str, MethodState]:
        if self.group == "auto":
            return {GROUPED: GroupedKeys(layout, resolved(self.far) + 1)}
        return super().state(layout)

    def key_positions(self, indices: Tensor) -> Tensor | None:
        return indices if self.group == "auto" else indices // self.group

    def parts_of(self, i: Tensor, layer: LayerFacts) -> Iterator[Part]:
        local, group = self.n_local, self.group
        if group == "auto":
            yield from self._parts_of_groups(i)
        else:
            yield Part(keys=(i + 1 - local, i + 1), query_at=i, exact=True)
            yield Part(keys=(0, i + 1 - local), query_at=i // group + local - local // group)

    def _parts_of_groups(self, i: Tensor) -> Iterator[Part]:
        """Yield a part of near keys, and one of far keys for each group. To queries of group 1 all keys are near."""
        local, groups = self.n_local, self.groups(i)
        yield Part(keys=((i + 1 - local).masked_fill(groups == 1, 0), i + 1), query_at=i)
        for group in groups.unique().tolist():
            if group > 1:
                stop = (i + 1 - local).masked_fill(groups != group, 0)
                yield Part(keys=(0, stop), query_at=i // group + local - local // group, group=group)

    def groups(self, i: Tensor) -> Tensor:
        """Return the group of each query `i [T]` with `group=auto`.

        Example: `local=4, far=11`; queries up to 11 have group 1, queries 12 to 19 group 2, and 20 to 26 group 3.
        """
        local, far = self.n_local, resolved(self.far)
        found = (i - local).clamp(min=0) // (far + 1 - local) + 1  # no smaller group is enough
        while (lacking := i // found + local - local // found > far).any():
            found = found + lacking
        return found
