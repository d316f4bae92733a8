"""What the wrappers of CPU kernels and the kernels' code both know: sizes of tasks, gates, and layouts of matrices."""

from dataclasses import dataclass
from typing import Literal

LANES = 16  # numbers in a vector
MOST_ROWS = 8  # the largest number of input rows (tokens) in a product of `products` or `quantised`

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of a number of each dtype
Gate = Literal["silu", "gelu_tanh"]  # the activation of a gated MLP's first half
GATES: dict[Gate | None, int] = {None: 0, "silu": 1, "gelu_tanh": 2}  # the kernels' argument for each gate

PRODUCT_ROWS = 32  # weight rows that a thread of `products` takes at a time
QUANTISED_TASK = 2  # blocks that a thread of `quantised` takes at a time
BEGUN_BYTES = 64  # bytes at the start of the memory of products, which say whether x is prepared
MIXED = (5, 6)  # bits of codes of which four lie in one vector and those above in another
SUPER = 256  # inputs that share the numbers in `supers`
PACKED_ROWS = 64  # rows of x that a thread of `panels.pack` takes at a time
PANEL_ROWS = 96  # weight rows in a task of `panels.product`
PANEL_COLUMNS = 256  # rows of x in such a task
PANEL_INPUTS = 192  # words of a row that are multiplied at a time
FEW_ROWS = 32  # weight rows that a thread of `few_rows` takes at a time
FEW_INPUTS = 64  # inputs or words of such rows that are multiplied at a time
QUERY_ROWS = 96  # the most queries (of all heads) in a task; packing keys costs little beside so many
CHOSEN_ROWS = 384  # the most queries (of all heads) in a task of chosen tiles: few of them choose the same tile
TURN_KEYS = 8  # the most keys of a chosen tile, for each head that chose it, that are attended query by query
ALIGNED = 32  # keys that a sum may take together: the first key of a tensor lies at a multiple of it in its text
READ_PIECE = 4096  # keys of a piece for read tokens; if there are few tokens, pieces are tasks of their own
KEYS = 256  # keys that are packed together: with D from 64 to 128, keys and values stay in a core's L2 cache
SCORED_KEYS = 256  # keys that a thread of `scores` takes at a time
SCORED_TOKENS = 96  # keys that a thread of `scores_of_many` takes at a time
SCORED_COLUMNS = 512  # tokens that a thread of `best_below_top` takes at a time
TAKEN_ROWS = 64  # rows that a thread of `take_rows` takes at a time
WORD = 4  # bytes that `take_rows` copies at once


@dataclass(frozen=True)
class Layout:
    """A way to store a matrix: codes of `bits` bits, groups of `group` inputs, and scales of the dtype `scale`.

    `low` names what a group has beside its scale: "zeros", "mins" or nothing. A weight is `scale * (code - offset)`,
    `scale * (code - zero / 16)` or `scale * code + min`. Scales of 8-bit integers are multiplied with a number in
    `supers`; mins are then uint8 and are multiplied with another one, minus dmin. Otherwise mins are float16.
    """

    bits: int
    group: int
    scale: str
    low: str = ""
    offset: int = 0

    @property
    def nested(self) -> bool:
        return self.scale in ("int8", "uint8")

    def parts(self, n_out: int, n_in: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return the shape and the dtype's name of each stored tensor of a matrix `[n_out, n_in]`."""
        blocks, groups = -(-n_out // LANES), -(-n_in // self.group)
        codes = (blocks, groups * self.group * self.bits // 32, 4 * LANES)
        found: dict[str, tuple[tuple[int, ...], str]] = {
            "codes": (codes, "int8" if self.bits == 8 else "uint8"),
            "scales": ((blocks, groups, LANES), self.scale),
        }
        if self.low:
            narrow = self.nested or self.low == "zeros"
            found[self.low] = (blocks, groups, LANES), "uint8" if narrow else "float16"
        if self.nested:
            found["supers"] = (blocks, -(-n_in // SUPER), 2 if self.low else 1, LANES), "float16"
        return found


INT8, INT4 = Layout(8, 128, "bfloat16"), Layout(4, 32, "bfloat16", "zeros")
GGUF_LAYOUTS = {  # by the type of GGUF's that is read so
    "Q4_0": Layout(4, 32, "float16", offset=8),
    "Q4_1": Layout(4, 32, "float16", "mins"),
    "Q2_K": Layout(4, 16, "uint8", "mins"),
    "Q3_K": Layout(4, 16, "int8", offset=4),
    "Q4_K": Layout(4, 32, "uint8", "mins"),
    **dict.fromkeys(("Q5_0", "Q8_0", "IQ4_NL"), Layout(8, 32, "float16")),
    "Q5_1": Layout(8, 32, "float16", "mins"),
    "Q5_K": Layout(5, 32, "uint8", "mins"),
    "Q6_K": Layout(6, 16, "int8", offset=32),
    "IQ4_XS": Layout(8, 32, "int8"),
}
LAYOUTS = tuple(dict.fromkeys((INT8, INT4, *GGUF_LAYOUTS.values())))
