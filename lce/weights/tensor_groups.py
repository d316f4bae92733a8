"""Groups a checkpoint's tensors by what they are for and by the type in which they are stored."""

from collections import Counter
from dataclasses import dataclass

from lce.weights.checkpoint import Checkpoint

# What the modules of the published names are for, in the order of a listing.
_KINDS = {
    "embed_tokens": "embedding",
    **{f"{part}_proj": f"attention {part}" for part in ("q", "k", "v", "qkv", "o")},
    "gate_proj": "mlp gate",
    "up_proj": "mlp up",
    "gate_up_proj": "mlp gate and up",
    "down_proj": "mlp down",
    "lm_head": "head",
    "norm": "norms",
    "bias": "biases",
    "": "other",
}


@dataclass(frozen=True)
class TensorGroup:
    """Tensors of one kind, such as "attention q", and one type, such as "Q4_K"; a quantised matrix counts as one."""

    kind: str
    type: str
    count: int
    n_bytes: int


def tensor_groups(checkpoint: Checkpoint) -> tuple[TensorGroup, ...]:
    """Return the groups of a checkpoint's tensors, in the order in which a token meets them; the largest type first."""
    counts, sizes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    matrices = checkpoint.manifest.matrices if checkpoint.manifest else {}
    for name, info in checkpoint.tensors.items():
        matrix = name.rpartition(".")[0]
        whole = matrix if matrix in matrices else name
        group = _kind(whole), matrices[whole][0] if whole in matrices else info.dtype
        sizes[group] += info.stop - info.start
    for name in checkpoint.shapes:
        counts[_kind(name), matrices[name][0] if name in matrices else checkpoint.tensors[name].dtype] += 1
    order = list(_KINDS.values())
    found = [TensorGroup(*group, counts[group], size) for group, size in sizes.items()]
    return tuple(sorted(found, key=lambda group: (order.index(group.kind), -group.n_bytes, group.type)))


def _kind(name: str) -> str:
    *_, module, last = ["", "", *name.split(".")]
    word = last if last == "bias" else "norm" if module.endswith("norm") else module
    return _KINDS.get(word, _KINDS[""])
