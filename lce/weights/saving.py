"""Writes a quantised checkpoint as one safetensors file. Peak memory: two copies of a matrix."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lce.errors import ModelError
from lce.files import named, written_whole
from lce.weights.checkpoint import Checkpoint
from lce.weights.header import read_open
from lce.weights.manifest import METADATA, Manifest
from lce.weights.packed import Scheme
from lce.weights.reading import NAMES, STORED, Stamp

_NO_SAMPLES = "0" * 64


def save_quantised(
    checkpoint: Checkpoint, path: Path, shapes: Mapping[str, tuple[int, ...]], schemes: Mapping[str, Scheme],
    weights: str, version: str, progress: Callable[[int, int], None],
) -> Manifest:  # fmt: skip
    """Write the tensors `shapes` of a checkpoint to `path`, those of `schemes` rounded, the others as they are stored.

    The file appears whole or not at all. Time: that of reading and rounding. `progress` is called with bytes read.
    """
    if checkpoint.manifest:
        raise ModelError(f"{named(checkpoint.folder)} is quantised already; give the checkpoint that it was made of")
    entries: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, shape in sorted(shapes.items()):
        if name in schemes:
            entries |= {f"{name}.{part}": found for part, found in schemes[name].parts(shape).items()}
        else:
            entries[name] = shape, STORED[checkpoint.tensors[name].dtype]
    matrices = {name: (scheme.name, (shapes[name][0], shapes[name][1])) for name, scheme in schemes.items()}
    dtype = str(checkpoint.dtype()).removeprefix("torch.")
    manifest = Manifest(weights, dtype, checkpoint.fingerprint(), _NO_SAMPLES, matrices, version)
    with written_whole(path) as file:
        starts = _write_header(file, entries, manifest)
        _write_tensors(checkpoint, file, starts, shapes, schemes, progress)
        file.flush()
        draft = Path(file.name)
        tensors, _ = read_open(file.fileno(), draft)
        own = Checkpoint(draft.parent, tensors, stamps={draft: Stamp.of(file.fileno())})
        manifest = replace(manifest, samples=own.fingerprint())
        file.seek(0)
        _write_header(file, entries, manifest)
    return manifest


def _write_header(
    file: Any, entries: Mapping[str, tuple[tuple[int, ...], torch.dtype]], manifest: Manifest
) -> dict[str, int]:
    """Write the header; return where each tensor begins in the file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", METADATA: manifest.text()}}
    offset, starts = 0, {}
    for name, (shape, dtype) in entries.items():
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        starts[name], offset = offset, end
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 64 + 56)  # the data begins at a multiple of 64
    file.write(len(raw).to_bytes(8, "little") + raw)
    return {name: 8 + len(raw) + start for name, start in starts.items()}


def _write_tensors(
    checkpoint: Checkpoint, file: Any, starts: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]],
    schemes: Mapping[str, Scheme], progress: Callable[[int, int], None],
) -> None:  # fmt: skip
    sizes = {name: checkpoint.tensors[name].stop - checkpoint.tensors[name].start for name in shapes}
    done, total = 0, sum(sizes.values())
    with checkpoint.opened() as files:
        for name, shape in shapes.items():
            stored = torch.empty(shape, dtype=STORED[checkpoint.tensors[name].dtype])
            checkpoint.read(files, {name: stored})
            parts: Mapping[str, Tensor] = {name: stored}
            if name in schemes:
                found = schemes[name].parts(shape)
                packed = {part: torch.empty(size, dtype=dtype) for part, (size, dtype) in found.items()}
                schemes[name].pack(stored, packed)
                parts = {f"{name}.{part}": tensor for part, tensor in packed.items()}
            for part, tensor in parts.items():
                file.seek(starts[part])
                file.write(tensor.view(-1).view(torch.uint8).numpy())
            done += sizes[name]
            progress(done, total)
