"""`Part`: some keys that the queries of a step see, and the positions of these queries and keys.

A method declares its parts once, in `Method.parts_of`. The parts are used to compute the attention of blocks
(`attending`) and of recorded decode steps (`decoding`), operation counts (`costs`), and in the laboratory distances.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from torch import Tensor

Index = int | Tensor  # a token's index or a position: one number for all queries, or one for each query, `[T]`
CHOSEN: Final = "chosen"  # the value of `Part.keys` for keys that the method's selection chooses
RECENT = "recent keys"  # the name of the state that holds the last keys at their absolute positions


@dataclass(frozen=True)
class Part:
    """Some keys that the queries `i [T]` of a step see, with positions for queries and keys.

    `keys` is the span `(start, stop)` of the tokens that each query sees, or `CHOSEN`. No span reaches beyond the
    query: a start below 0 means 0, a stop beyond `i + 1` means `i + 1`. A span whose stop is not after its start is
    empty. `query_at` is the position from which the queries see the keys. For chosen keys the position may differ by
    slot, the place in a query's list of K chunks: `[T, K]`. A query that chose fewer chunks than its `n_slots [T]`
    has these chunks in its last slots. Or the position differs by band, a range of chunks: with `bands [T, B-1]`,
    ascending, `query_at` is `[T, B]`, and chunk c is seen from position `query_at[t, b]`, where b of the numbers
    `bands[t]` are c or less.

    Keys are seen at the positions where the method caches them (`Method.key_positions`), or with `exact` at their own
    index. Unrotated keys are at position 0, so that `query_at` is the distance. If the method caches keys at their own
    index, those of a span with a `group` are seen at `index // group`.

    Example: ReRoPE with `local = 3` has `Part((i - 2, i + 1), i, exact=True)` and `Part((0, i - 2), 3)`.
    """

    keys: tuple[Index, Index] | Literal["chosen"]
    query_at: Index
    exact: bool = False
    n_slots: Tensor | None = None
    bands: Tensor | None = None
    group: int | None = None


@dataclass(frozen=True)
class LayerFacts:
    """The facts about a layer and its text that parts may depend on, besides the queries' indices.

    `kind` is the layer's `Method.layer_kind`. `longest` is the largest length that the text can have: for a block, the
    length up to the block's end. `sliding_window` is the checkpoint's, in tokens.
    """

    kind: str
    longest: int
    sliding_window: int | None = None


class Declaring(Protocol):
    """What the functions that compute with parts ask of a method: these members of `Method` (`lce.methods.base`)."""

    @property
    def label(self) -> str: ...
    def promised(self, what: Any) -> bool: ...
    def layer_kind(self, layer: int) -> str: ...
    def key_positions(self, indices: Tensor) -> Tensor | None: ...
    def query_scale(self, i: Tensor, window: int) -> Tensor | None: ...
    def parts_of(self, i: Tensor, layer: LayerFacts) -> Iterable[Part]: ...
    def attend_part(self, q: Tensor, placed: Any, cache: Any, step: Any) -> Any: ...
    def decode_chosen(self, q: Tensor, turn: Any, others: Any, cache: Any, step: Any) -> Any: ...
    def choice_cost(self, block: Any) -> Any: ...
