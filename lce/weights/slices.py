"""Slices of a checkpoint: of each matrix, only the rows or the columns that one rank of a divided model has.

For rows, only their bytes are read. For columns, whole rows are read, a few at a time, because files store row by row;
only the columns stay in memory. Quantised matrices are cut between the blocks of weights that share a scale.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lce.errors import UsageError, shown
from lce.files import named
from lce.weights.checkpoint import Checkpoint
from lce.weights.gguf_types import BY_NAME
from lce.weights.packed import Scheme


@dataclass(frozen=True)
class Slice:
    """The part of a stored tensor that is loaded: runs of rows, and a run of columns. None stands for all."""

    rows: Sequence[tuple[int, int]] | None = None
    columns: tuple[int, int] | None = None

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of this part of a tensor of the shape `whole`."""
        rows = whole[:1] if self.rows is None else (sum(stop - first for first, stop in self.rows),)
        return rows + (whole[1:] if self.columns is None else (self.columns[1] - self.columns[0],))


def sliced(checkpoint: Checkpoint, slices: Mapping[str, Slice]) -> Checkpoint:
    """Return a checkpoint with only these slices of some tensors. Raises `UsageError` for weights rounded by lce."""
    if checkpoint.manifest:
        remedy = f"load the checkpoint that they were made of, with weights={checkpoint.manifest.weights!r}"
        raise UsageError(f"the weights of {named(checkpoint.folder)} cannot be divided among ranks; {remedy}")
    tensors, orders = dict(checkpoint.tensors), dict(checkpoint.orders)
    for name, part in slices.items():
        info, order = tensors[name], orders.get(name)
        if part.rows is not None and len(part.rows) == 1:
            (first, stop), n_bytes = part.rows[0], (info.stop - info.start) // info.shape[0]
            begin, end = info.start + first * n_bytes, info.start + stop * n_bytes
            tensors[name] = replace(info, shape=(stop - first, *info.shape[1:]), start=begin, stop=end)
            if order is not None:  # a file's order of rows exchanges rows of one head alone
                orders[name] = order[first:stop] - first
        elif part.rows is not None:
            rows = np.concatenate([np.arange(*run) for run in part.rows])
            orders[name] = rows if order is None else order[rows]
            tensors[name] = replace(info, shape=(len(rows), *info.shape[1:]))
    columns = {name: part.columns for name, part in slices.items() if part.columns is not None}
    return replace(checkpoint, tensors=tensors, orders=orders, columns=columns)


def block_size(checkpoint: Checkpoint, name: str, scheme: Scheme | None) -> int:
    """Return how many neighbouring weights of a row share a scale, as they are stored or as `scheme` rounds them."""
    if scheme:
        return scheme.layout.group
    kind = BY_NAME.get(checkpoint.tensors[name].dtype) if name in checkpoint.tensors else None
    return 1 if kind is None else kind.size


def check_cuts(checkpoint: Checkpoint, name: str, block: int, cuts: Iterable[int]) -> None:
    """Raise `UsageError` unless columns of a matrix are cut between blocks of `block` weights."""
    for cut in cuts:
        if cut % block:
            where = f"{shown(name)} at column {cut}, within a block of {block} weights that share a scale"
            remedy = "use fewer ranks, or weights of another type, such as bfloat16"
            raise UsageError(f"{named(checkpoint.folder)}: these ranks would cut {where}; {remedy}")
