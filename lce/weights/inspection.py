"""What can be said of a checkpoint: its tensors by purpose and type, and whether the files are as they were written."""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from lce.files import read_file
from lce.weights.checkpoint import CPU, Checkpoint
from lce.weights.gguf_packed import Blocks, fill_blocks
from lce.weights.gguf_types import IN_BLOCKS
from lce.weights.packed import LARGEST, sha256_of
from lce.weights.safetensors_file import AGAIN, STORED, Damaged, allocate, fill, opened

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
    members, sizes = defaultdict[tuple[str, str], set[str]](set), Counter[tuple[str, str]]()
    matrices = checkpoint.manifest.matrices if checkpoint.manifest else {}
    for name, info in checkpoint.tensors.items():
        matrix = name.rpartition(".")[0]
        whole = matrix if matrix in matrices else name
        *_, module, last = ["", "", *whole.split(".")]
        word = last if last == "bias" else "norm" if module.endswith("norm") else module
        group = _KINDS.get(word, _KINDS[""]), matrices[whole][0] if whole in matrices else info.dtype
        members[group].add(whole)
        sizes[group] += info.stop - info.start
    order = list(_KINDS.values())
    found = [TensorGroup(*group, len(members[group]), size) for group, size in sizes.items()]
    return tuple(sorted(found, key=lambda group: (order.index(group.kind), -group.n_bytes, group.type)))


def verify(checkpoint: Checkpoint, progress: Callable[[int, int], None]) -> bool:
    """Read all tensors, and all files that `lce.quantize` wrote. Return whether there were checksums to compare with.

    Raises ModelError for a file that is not as it was written, cannot be read, or has a number that is not finite.
    `progress` is called with the bytes of the tensors read so far and of all tensors.
    """
    for name, digest in checkpoint.manifest.files.items() if checkpoint.manifest else ():
        if digest != sha256_of(read_file(checkpoint.folder / name, LARGEST) or b""):
            raise Damaged(checkpoint.folder / name, "the file is not as `lce quantize` wrote it", AGAIN)
    done, total = 0, sum(info.stop - info.start for info in checkpoint.tensors.values())
    with opened(checkpoint.stamps) as files:
        for name, info in checkpoint.tensors.items():
            size = info.stop - info.start
            if info.dtype in IN_BLOCKS:
                fill_blocks([Blocks(name, info, None, {}, torch.float32)], files)
            else:
                kind = info.dtype if info.dtype in STORED else "U8"
                (out,) = allocate([((size // STORED[kind].itemsize,), STORED[kind])], CPU)
                fill({name: out}, {name: replace(info, dtype=kind)}, files)
            done += size
            progress(done, total)
    return checkpoint.manifest is not None
