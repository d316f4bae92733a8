"""Writes a quantised checkpoint as one safetensors file. Peak memory is two copies of the largest matrix."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from lce.errors import ModelError
from lce.files import named, written_whole
from lce.weights.checkpoint import Checkpoint
from lce.weights.packed import METADATA, Manifest, Scheme, sha256_of
from lce.weights.safetensors_file import NAMES, PIECE, STORED, checksums


def save_quantised(
    checkpoint: Checkpoint,
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    schemes: Mapping[str, Scheme],
    weights: str,
    files: Mapping[str, bytes],
    progress: Callable[[int, int], None],
) -> None:
    """Write a checkpoint's tensors of these `shapes` to `path`: matrices in `schemes` are quantised, others copied.

    `weights` is the scheme's name that the user chose, `files` the contents of the files beside the weights. The file
    appears whole or not at all, with checksums of its tensors and of `files`. `progress` gets bytes read, and in all.
    """
    if checkpoint.quantised:
        raise ModelError(f"{named(checkpoint.folder)} is quantised already; give the checkpoint that it was made of")
    entries: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, shape in sorted(shapes.items()):
        if name in schemes:
            entries |= {f"{name}.{part}": found for part, found in schemes[name].parts(shape).items()}
        else:
            entries[name] = shape, STORED[checkpoint.tensors[name].dtype]
    matrices = {name: (scheme.name, (shapes[name][0], shapes[name][1])) for name, scheme in schemes.items()}
    dtype = str(checkpoint.dtype()).removeprefix("torch.")
    counts = {name: -(-math.prod(shape) * kind.itemsize // PIECE) for name, (shape, kind) in entries.items()}
    checks = {name: ["0" * 16] * n for name, n in counts.items()}  # as long as those written at the end
    digests = {name: sha256_of(data) for name, data in files.items()}
    manifest = Manifest(weights, dtype, checkpoint.fingerprint(), matrices, checks, digests)
    sizes = {name: checkpoint.tensors[name].stop - checkpoint.tensors[name].start for name in shapes}
    done, total, cpu = 0, sum(sizes.values()), torch.device("cpu")
    with written_whole(path) as file:
        file.write(_header(entries, manifest))
        for name, shape in sorted(shapes.items()):
            found = checkpoint.load({name: (name, shape)}, dtype=None, device=cpu, ignore=["*"], schemes=schemes)[name]
            parts = {f"{name}.{part}": x for part, x in found.parts.items()} if name in schemes else {name: found}
            for stored, tensor in parts.items():
                data = tensor.view(-1).view(torch.uint8).numpy()
                checks[stored] = checksums(data)
                file.write(data)
            done += sizes[name]
            progress(done, total)
        file.seek(0)
        file.write(_header(entries, manifest))


def _header(entries: Mapping[str, tuple[tuple[int, ...], torch.dtype]], manifest: Manifest) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt", METADATA: manifest.text()}}
    start = 0
    for name, (shape, dtype) in entries.items():
        stop = start + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 64 + 56)  # the data begins at a multiple of 64
    return len(raw).to_bytes(8, "little") + raw
