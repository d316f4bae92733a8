"""A checkpoint's weights: safetensors files whose headers are checked in full before any data is mapped.

On the CPU, weights in their stored dtype are views of a private mapping of the file: nothing is copied, pages are read
when they are touched, and writing to a tensor never reaches the file. Other weights are converted one at a time, and
the mapped pages of each are given back, so that peak memory is the converted model and one stored tensor.
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PureWindowsPath

import torch
from torch import Tensor

from lce.errors import CapacityError, ModelError, shown
from lce.files import map_copy
from lce.weights.header import LARGEST_HEADER, Damaged, TensorInfo, parse_object, read_bytes, read_header

__all__ = ["DTYPES", "Checkpoint", "TensorInfo"]

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

_SAMPLE = 4096  # bytes of each tensor's beginning, middle and end in the fingerprint
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".gguf", ".npz", ".h5", ".msgpack")


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a checkpoint folder. `unindexed` are those in a shard that the index does not list."""

    folder: Path
    tensors: Mapping[str, TensorInfo]
    unindexed: frozenset[str] = frozenset()

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Find the weights and check every header. Raises ModelError if they are missing, damaged or not safetensors.

        As transformers does, `model.safetensors` comes first, then `model.safetensors.index.json` with its shards.
        Without either, a single other `*.safetensors` is taken; `model*` takes precedence over Mistral's own
        `consolidated*`, whose tensors have other names.
        """
        folder = Path(folder)
        if not os.path.isdir(folder):
            raise ModelError(f"{folder} is not a folder; expected a checkpoint's folder; check the path")
        whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
        if not os.path.isfile(whole) and os.path.isfile(index):
            return cls(folder, *_sharded(folder, index))
        return cls(folder, read_header(whole if os.path.isfile(whole) else _only_file(folder)))

    def load(
        self, wanted: Mapping[str, tuple[str, tuple[int, ...]]], *, dtype: torch.dtype | None, device: torch.device,
        ignore: Sequence[str] = (),
    ) -> dict[str, Tensor]:  # fmt: skip
        """The tensors of `wanted`, under its keys, in `dtype` (None: as stored) on `device`.

        An entry of `wanted` maps the caller's name to the name in the checkpoint and the shape it must have. Names,
        shapes and stored dtypes are all checked first. Every other tensor of the checkpoint must match one of the
        patterns in `ignore` (`"*.rotary_emb.inv_freq"`). Two entries with one published name share one tensor.
        """
        shapes = dict(wanted.values())
        self._check(shapes, ignore)
        by_file: dict[Path, list[str]] = {}
        for name, info in sorted(self.tensors.items(), key=lambda item: item[1].start):
            if name in shapes:
                by_file.setdefault(info.file, []).append(name)
        loaded: dict[str, Tensor] = {}
        for file, names in by_file.items():
            mapping = _map(file, max(info.stop for info in self.tensors.values() if info.file == file))
            for name in names:
                loaded[name] = _load_tensor(mapping, self.tensors[name], dtype, device)
        return {key: loaded[name] for key, (name, _) in wanted.items()}

    def dtype(self) -> torch.dtype:
        """The dtype that most bytes are stored in."""
        sizes: Counter[str] = Counter()
        for info in self.tensors.values():
            sizes[info.dtype] += info.stop - info.start
        for name, _ in sizes.most_common():
            if name in DTYPES:
                return DTYPES[name]
        raise ModelError(f"{self.folder} has no weights in {', '.join(DTYPES)}; use a checkpoint in one of these")

    def fingerprint(self) -> str:
        """A SHA-256 that ties a context or a map file to these weights, however they are sharded or named on disk.

        It covers every name, dtype and shape, and three samples of every tensor's bytes; a change elsewhere in a
        large tensor is not seen. Reads 12 KiB a tensor at most.
        """
        digest = hashlib.sha256()
        for name, info in sorted(self.tensors.items()):
            digest.update(json.dumps([name, info.dtype, info.shape]).encode() + b"\n")
            for start, stop in _samples(info.start, info.stop):
                sample = read_bytes(info.file, stop - start, start)
                if len(sample) != stop - start:
                    raise Damaged(info.file, "the file was cut short since it was opened")
                digest.update(sample)
        return digest.hexdigest()

    def _check(self, wanted: Mapping[str, tuple[int, ...]], ignore: Sequence[str]) -> None:
        unexpected = [
            name
            for name in self.tensors
            if (name not in wanted or name in self.unindexed)
            and not any(fnmatchcase(name, pattern) for pattern in ignore)
        ]
        missing = [name for name in wanted if name not in self.tensors]
        faults = [f"{len(missing)} missing ({_few(sorted(missing))})"] if missing else []
        faults += [f"{len(unexpected)} unexpected ({_few(unexpected)})"] if unexpected else []
        if faults:
            remedy = "check that config.json belongs to these weights, or download the checkpoint again"
            raise ModelError(f"{self.folder}: tensors {' and '.join(faults)}; {remedy}")
        shapes = [
            f"{shown(name)} is {list(self.tensors[name].shape)}, expected {list(shape)}"
            for name, shape in wanted.items()
            if self.tensors[name].shape != tuple(shape)
        ]
        if shapes:
            remedy = "check that config.json belongs to these weights"
            raise ModelError(f"{self.folder}: wrong shapes: {_few(shapes, quoted=False)}; {remedy}")
        unread = [
            f"{name} ({self.tensors[name].dtype})" for name in sorted(wanted) if self.tensors[name].dtype not in DTYPES
        ]
        if unread:
            remedy = "use an unquantized checkpoint"
            raise ModelError(f"{self.folder}: expected weights in {', '.join(DTYPES)}, got {_few(unread)}; {remedy}")


def _few(names: Sequence[str], quoted: bool = True) -> str:
    first = ", ".join(shown(name) if quoted else name for name in names[:3])
    return first + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _only_file(folder: Path) -> Path:
    """The one safetensors file of a folder that has neither of the usual names."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise ModelError(f"{folder} cannot be read ({error.strerror}); check its permissions") from None
    found = [name for name in names if name.endswith(".safetensors")]
    own = [name for name in found if not name.startswith(("consolidated", "adapter"))]
    best = [name for name in own if name.startswith("model")] or own or found
    if len(best) == 1 and not re.search(r"-\d+-of-\d+\.", best[0]):
        return folder / best[0]
    if best:
        remedy = "download model.safetensors.index.json, or leave one whole file"
        raise ModelError(f"{folder} has {_few(best)} but no index; expected one file or shards with an index; {remedy}")
    others = [name for name in names if name.endswith(_OTHER_WEIGHTS)]
    if others:
        remedy = "convert them, e.g. with transformers' save_pretrained(folder, safe_serialization=True)"
        raise ModelError(f"{folder} has weights only as {_few(others)}; lce reads safetensors alone; {remedy}")
    raise ModelError(f"{folder} has no weights; expected model.safetensors or shards with an index; check the path")


def _sharded(folder: Path, index: Path) -> tuple[dict[str, TensorInfo], frozenset[str]]:
    """All tensors of the index's shards, and the names of those that the index does not list."""
    raw = read_bytes(index, LARGEST_HEADER + 1)
    if len(raw) > LARGEST_HEADER:
        raise Damaged(index, f"more than {LARGEST_HEADER} bytes")
    weight_map = parse_object(raw, index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise Damaged(index, "weight_map is not an object of tensor names and file names")
    shards = sorted(set(weight_map.values()))
    _check_shard_names(folder, index, shards)
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        for name, info in read_header(folder / shard).items():
            if name in tensors or weight_map.get(name, shard) != shard:
                raise Damaged(index, f"tensor {shown(name)} is in {shard} and in another shard")
            tensors[name] = info
    absent = [name for name in weight_map if name not in tensors]
    if absent:
        raise Damaged(index, f"its shards lack {len(absent)} of the tensors that it lists ({_few(absent)})")
    return tensors, frozenset(tensors.keys() - weight_map.keys())


def _check_shard_names(folder: Path, index: Path, shards: Iterable[str]) -> None:
    """A shard's name must be a file name without a path. The file may be a link, as in the cache of Hugging Face."""
    for shard in shards:
        if PureWindowsPath(shard).name != shard or not shard.endswith(".safetensors") or "\0" in shard:
            remedy = "use a checkpoint from a source you trust"
            raise ModelError(f"{index}: the shard {shown(shard)} is not a plain *.safetensors name; {remedy}")
    missing = [shard for shard in shards if not os.path.isfile(folder / shard)]
    if missing:
        raise ModelError(f"{folder} lacks {len(missing)} of the index's shards ({_few(missing)}); download them")


def _map(file: Path, size: int) -> mmap.mmap:
    """A private, writable mapping of the whole file. On Linux it reserves no swap, so it may be larger than memory."""
    try:
        with file.open("rb") as handle:
            if os.fstat(handle.fileno()).st_size != size:
                raise Damaged(file, "the file changed since it was opened")
            return map_copy(handle.fileno(), size)
    except OSError as error:
        kind = CapacityError if error.errno == errno.ENOMEM else ModelError
        raise kind(f"{file} cannot be mapped ({error.strerror}); check the file, its permissions and memory") from None


def _load_tensor(mapping: mmap.mmap, info: TensorInfo, dtype: torch.dtype | None, device: torch.device) -> Tensor:
    """One tensor: a view of the mapping if dtype and device allow it, else a copy; then its pages are given back."""
    stored = DTYPES[info.dtype]
    if info.start == info.stop:
        return torch.empty(info.shape, dtype=dtype or stored, device=device)
    raw = torch.frombuffer(mapping, dtype=torch.uint8, count=info.stop - info.start, offset=info.start)
    aligned = raw.clone() if info.start % stored.itemsize else raw
    tensor = aligned.view(stored).view(info.shape).to(device=device, dtype=dtype or stored)
    if tensor.data_ptr() != raw.data_ptr() and hasattr(mmap, "MADV_DONTNEED"):
        start = info.start - info.start % mmap.PAGESIZE
        mapping.madvise(mmap.MADV_DONTNEED, start, info.stop - start)
    return tensor


def _samples(start: int, stop: int) -> list[tuple[int, int]]:
    if stop - start <= 3 * _SAMPLE:
        return [(start, stop)]
    middle = (start + stop - _SAMPLE) // 2
    return [(start, start + _SAMPLE), (middle, middle + _SAMPLE), (stop - _SAMPLE, stop)]
