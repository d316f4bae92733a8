"""Weight matrices in the blocks of GGUF files on GPUs, each field of the blocks apart: as many bytes as in the file."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockType:
    """How a type's blocks of `size` weights are read. `fields` maps a part to a field of the block, and its bytes.

    A part has the fields of all blocks of a row in turn. Codes of `bits` bits lie in runs of `run` bytes: the lowest
    bits of all bytes of a run come first. The bits above, `high` of them in runs of `high_run`, are moved up by `up`.
    A group of `group` weights shares a scale, which `scales` names the packing of; "" if a block is one group.
    """

    size: int
    group: int
    bits: int
    run: int
    fields: tuple[tuple[str, str, int], ...]
    offset: int = 0
    scales: str = ""
    high: int = 0
    high_run: int = 32
    up: int = 4
    looked_up: bool = False  # whether codes are numbers of IQ4_NL's values

    def parts(self, n_out: int, n_in: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the shape and dtype of each stored tensor of a matrix `[n_out, n_in]`."""
        n = n_in // self.size
        return {
            part: ((n_out, n), torch.float16) if part in ("d", "low") else ((n_out, n * n_bytes), torch.uint8)
            for part, _, n_bytes in self.fields
        }


_D, _M, _DMIN = ("d", "d", 2), ("low", "m", 2), ("low", "dmin", 2)
_QS, _QH, _LONG, _SUPER = ("codes", "qs", 16), ("high", "qh", 4), ("codes", "qs", 128), ("scales", "scales", 12)
BLOCK_TYPES: Mapping[str, BlockType] = {
    "Q4_0": BlockType(32, 32, 4, 16, (_D, _QS), 8),
    "Q4_1": BlockType(32, 32, 4, 16, (_D, _M, _QS)),
    "Q5_0": BlockType(32, 32, 4, 16, (_D, _QH, _QS), 16, high=1, high_run=1),
    "Q5_1": BlockType(32, 32, 4, 16, (_D, _M, _QH, _QS), high=1, high_run=1),
    "Q8_0": BlockType(32, 32, 8, 32, (_D, ("codes", "qs", 32))),
    "Q2_K": BlockType(256, 16, 2, 32, (("scales", "scales", 16), ("codes", "qs", 64), _D, _DMIN), scales="nibbles"),
    "Q3_K": BlockType(
        256, 16, 2, 32, (("high", "hmask", 32), ("codes", "qs", 64), _SUPER, _D), 4, scales="q3_k", high=1, up=2
    ),
    "Q4_K": BlockType(256, 32, 4, 32, (_D, _DMIN, _SUPER, _LONG), scales="pairs"),
    "Q5_K": BlockType(256, 32, 4, 32, (_D, _DMIN, _SUPER, ("high", "qh", 32), _LONG), scales="pairs", high=1),
    "Q6_K": BlockType(
        256, 16, 4, 64, (("codes", "ql", 128), ("high", "qh", 64), ("scales", "scales", 16), _D), 32, "int8", 2
    ),
    "IQ4_NL": BlockType(32, 32, 4, 16, (_D, _QS), looked_up=True),
    "IQ4_XS": BlockType(
        256, 32, 4, 16, (_D, ("more", "scales_h", 2), ("scales", "scales_l", 4), _LONG), 0, "iq4_xs", looked_up=True
    ),
}


class BlockMatrix:
    """A matrix `[out, in]` of GGUF blocks on a GPU; `parts` are the tensors that its type names."""

    def __init__(self, kind: BlockType, shape: tuple[int, ...], parts: Mapping[str, Tensor]) -> None:
        self.kind, self.parts = kind, parts
        self.shape = shape[0], shape[1]
        for name, expected in kind.parts(*self.shape).items():
            assert (parts[name].shape, parts[name].dtype) == expected, (name, parts[name].shape, expected)
            assert parts[name].is_contiguous(), name

    def on(self, device: torch.device) -> "BlockMatrix":
        """Return a copy on another GPU."""
        return BlockMatrix(self.kind, self.shape, {name: part.to(device) for name, part in self.parts.items()})

    def product(self, x: Tensor, bias: Tensor | None = None, **around: Any) -> Tensor:
        """Multiply a few rows `x [T, in]` with the matrix transposed, as `products_triton.product` does.

        One launch. Bytes moved: the blocks once.
        """
        from lce.kernels.product import products_triton

        return products_triton.product(x, self, bias, **around)

    def unpacked(self, first: int, out: Tensor) -> Tensor:
        """Unpack rows, from row `first` on, into `out [rows, in]`, of any dtype; return `out`. One launch."""
        from lce.kernels.product import blocks_triton

        return blocks_triton.unpack(self, None, first, out)

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the unpacked rows `ids [T]` (int64): `[T, in]`. One launch; ids are not checked."""
        from lce.kernels.product import blocks_triton

        return blocks_triton.unpack(self, ids, 0, ids.new_empty(len(ids), self.shape[1], dtype=dtype))
