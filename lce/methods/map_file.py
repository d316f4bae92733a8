"""Files of low-dim maps (`lce.methods.lowdim`), sealed by a digest that shows any change.

A sealed file is a safetensors file whose metadata has the SHA-256 of all other bytes of the file, header included.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, float32

from lce.errors import DataError, UsageError, shown
from lce.files import named, open_regular, path_of, write_whole
from lce.methods.lowdim import LearnedFor, LowDimMap, LowDimMaps, missing
from lce.methods.step import ModelFacts
from lce.models.config import RopeConfig

FORMAT = "lce low-dim maps 2"
_SEAL = re.compile(rb'"digest":"([0-9a-f]{64})"')
_HEADER_BYTES = 1 << 16  # the largest size of a header, without its entries for tensors
_ENTRY_BYTES = 256  # the largest size of a header's entry for one tensor


def sealed(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of a sealed file with these tensors and metadata, to be read by `unsealed`."""
    raw = save(dict(tensors), {**metadata, "digest": "0" * 64})
    match = _SEAL.search(raw)
    assert match is not None, "just written"
    return b"".join((raw[: match.start(1)], _digest(raw, match).encode(), raw[match.end(1) :]))


def unsealed(raw: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a sealed file's bytes. Raises `ValueError` if any byte was changed."""
    match = _SEAL.search(raw)
    if match is None or _digest(raw, match) != match[1].decode():
        raise ValueError("its contents do not match their digest")
    try:
        return load(raw), json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]
    except (SafetensorError, RecursionError, LookupError, TypeError) as error:
        raise ValueError(shown(str(error))) from None


def read_sealed(path: Path, most: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read and unseal a file of at most `most` bytes.

    Raises `DataError` if the file is not a regular one, `ValueError` if the file is longer or its digest is wrong.
    """
    with open(open_regular(path, follow=False), "rb") as file:
        raw = file.read(most + 1)
    if len(raw) > most:
        raise ValueError(f"it is longer than {most:,} bytes")
    return unsealed(raw)


def _digest(raw: bytes, seal: re.Match[bytes]) -> str:
    view = memoryview(raw)
    total = hashlib.sha256(view[: seal.start(1)])
    total.update(view[seal.end(1) :])
    return total.hexdigest()


def save_maps(maps: LowDimMaps, path: Path, learned_for: LearnedFor) -> None:
    """Write maps and the setting that they were learned for; the file appears whole or not at all."""
    tensors = {
        f"layers.{index}.{name}": x.to("cpu", float32).contiguous()
        for index, layer in maps.layers.items()
        for name, x in layer.tensors().items()
    }
    write_whole(path, sealed(tensors, {"format": FORMAT, "learned_for": json.dumps(asdict(learned_for))}))


def open_maps(
    path: Path,
    learned_for: LearnedFor,
    shapes: Mapping[str, tuple[int, ...]],
    layers: Collection[int],
    model: object = "M",
) -> LowDimMaps:
    """Read a map file for these layers of the model `model`; a layer's tensors must have the shapes `shapes`.

    The header is checked before the data is read. Raises `UsageError` for maps that were learned for other options,
    `DataError` for maps of another model and for a file that cannot be trusted.
    """
    wanted = {f"layers.{index}.{name}": (float32, shape) for index in layers for name, shape in shapes.items()}
    with open(open_regular(path), "rb") as file:
        try:
            raw = file.read(8)
            raw += file.read(min(int.from_bytes(raw, "little"), _HEADER_BYTES + _ENTRY_BYTES * len(wanted)))
            learned_for.check(_learned_for(raw[8:]), str(path), model)
            rest = 4 * sum(math.prod(shape) for _, shape in wanted.values())
            if os.fstat(file.fileno()).st_size != len(raw) + rest:
                raise ValueError("it is cut short, or too long")
            tensors, _ = unsealed(raw + file.read(rest))
            if {name: (x.dtype, tuple(x.shape)) for name, x in tensors.items()} != wanted:
                raise ValueError(f"its tensors are not those of {len(layers)} layers of this model")
            if not all(bool(x.isfinite().all()) for x in tensors.values()):
                raise ValueError("some numbers are not finite")
        except UsageError:  # the maps are sound, and were learned for other options
            raise
        except (OSError, ValueError) as error:
            remedy = f"make it anew by `{learned_for.command(model)}`"
            raise DataError(f"{named(path)} holds no maps that can be used: {error}; {remedy}") from None
    maps = {index: LowDimMap(**{name: tensors[f"layers.{index}.{name}"] for name in shapes}) for index in layers}
    return LowDimMaps(maps, str(path), learned_for)


def _learned_for(header: bytes) -> LearnedFor:
    """Return the setting that the header of a map file states. Raises `ValueError` for the header of another file."""
    try:
        metadata = json.loads(header)["__metadata__"]
        if metadata["format"] != FORMAT:
            raise ValueError(f"its format is {shown(metadata['format'])}, expected {FORMAT!r}")
        facts = json.loads(metadata["learned_for"])
        return LearnedFor(**{**facts, "rope": RopeConfig(**facts["rope"])})
    except (LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"its header is no header of maps: {shown(str(error))}") from None


def maps_for(reader: Any, label: str, far: int, model: ModelFacts, otherwise: str) -> dict[str, Any]:
    """Return the knobs to replace in `reader`, a method or selector with the knobs `compress`, `low_dim` and `maps`.

    With `compress=calibrated` its maps become those of the file `maps`, or of the file beside the model. Raises an
    error for maps of another model or setting, and if there are none; `otherwise` are options without maps.
    """
    maps = reader.maps
    if reader.compress != "calibrated":
        return {}
    if model.plan_only:
        return {"compress": "pca", "maps": None}  # `pca` needs no maps; its low-dim keys have the same size
    if model.rope.follows_length:
        kind = model.rope.kind
        ntk = "" if kind == "longrope" else f"--rope {'ntk' if kind == 'dynamic' else kind} --rope-factor F, "
        raise UsageError(
            f"{label}: under {kind} RoPE scaling queries rotate by the length of each text, and maps are "
            f"learned for one rotation; give {ntk}{otherwise}"
        )
    fingerprint = model.source.checkpoint.fingerprint()
    wanted = LearnedFor(fingerprint, reader.low_dim, far, model.window, model.rope)
    sizes = (model.config.n_heads, model.config.n_kv_heads, model.config.head_dim)
    if isinstance(maps, LowDimMaps):
        if maps.learned_for is not None:
            wanted.check(maps.learned_for, maps.source, model.source.path)
        maps.check_shapes(model.config.acting_layers, *sizes)
        return {}
    path = model.source.maps_file if maps is None else path_of(maps, "maps")
    if maps is None and not path.exists():
        raise missing(label, wanted.command(model.source.path), otherwise)
    shapes = LowDimMap.shapes(*sizes, reader.low_dim)
    return {"maps": open_maps(path, wanted, shapes, model.config.acting_layers, model.source.path)}


def check_maps(reader: Any, label: str, far: int, window: int, otherwise: str) -> None:
    """Raise `UsageError` unless a resolved method or selector reads no maps, or maps that fit its knobs."""
    maps, low_dim = reader.maps, reader.low_dim
    if reader.compress != "calibrated":
        return
    if not isinstance(maps, LowDimMaps):
        command = f"lce calibrate --model M --text FILE --out maps.safetensors --far {far}"
        raise missing(label, command, otherwise)
    if maps.low_dim != low_dim:
        what = f"low_dim is {low_dim}, but {maps!r} has {maps.low_dim}"
        raise UsageError(f"{label}: {what}; give -o low_dim={maps.low_dim}")
    if maps.learned_for is not None:
        replace(maps.learned_for, far=far, window=window).check(maps.learned_for, maps.source)
