"""A checkpoint's weights: safetensors files whose headers are checked in full before any data is read.

Weights are read into memory of our own, converted on the way: peak memory is the model in its final dtype and 64 MiB at
most. Changes to a file after loading have no effect; a file that changes between the check of its header and the end of
loading is refused.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path, PureWindowsPath
from typing import Any, Self

import torch
from torch import Tensor

from lce import system
from lce.errors import CapacityError, ModelError, shown
from lce.files import named, open_regular
from lce.sizes import size_text
from lce.weights.header import (
    LARGEST_HEADER,
    MOST_TENSORS,
    Damaged,
    TensorInfo,
    parse_object,
    pread,
    read_bytes,
    read_open,
)
from lce.weights.manifest import METADATA, Manifest
from lce.weights.packed import Scheme, Stacked
from lce.weights.reading import DTYPES, Job, Stamp, allocate, fill

__all__ = ["DTYPES", "Checkpoint", "TensorInfo"]

Size = tuple[Sequence[int], torch.dtype]  # of a tensor
_MOST_SHARDS = 4096
_SAMPLE = 4096  # bytes of each tensor's beginning, middle and end in the fingerprint
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".gguf", ".npz", ".h5", ".msgpack")


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a checkpoint folder. `unindexed` are those in a shard that the index does not list.

    `stamps` are the files' stamps when their headers were read. `manifest` describes quantised weights.
    """

    folder: Path
    tensors: Mapping[str, TensorInfo]
    unindexed: frozenset[str] = frozenset()
    stamps: Mapping[Path, Stamp] = field(default_factory=dict, repr=False)
    manifest: Manifest | None = field(default=None, repr=False)

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Find the weights and check every header. Raises ModelError if they are missing, damaged or not safetensors.

        As transformers does, `model.safetensors` comes first, then `model.safetensors.index.json` with its shards.
        Without either, a single other `*.safetensors` is taken; `model*` takes precedence over Mistral's own
        `consolidated*`, whose tensors have other names.
        """
        folder = Path(folder)
        if not os.path.isdir(folder):
            raise ModelError(f"{named(folder)} is not a folder; expected a checkpoint's folder; check the path")
        whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
        if not os.path.lexists(whole) and os.path.lexists(index):
            return cls(folder, *_sharded(folder, index))
        file = whole if os.path.lexists(whole) else _only_file(folder)
        tensors, metadata, stamp = _header(file)
        manifest = Manifest.read(metadata[METADATA], file, tensors) if METADATA in metadata else None
        return cls(folder, tensors, stamps={file: stamp}, manifest=manifest)

    def load(
        self, wanted: Mapping[str, tuple[str, tuple[int, ...]]], *, dtype: torch.dtype | None,
        device: torch.device | Callable[[str], torch.device],
        ignore: Sequence[str] = (), joined: Mapping[str, Sequence[str]] | None = None,
        schemes: Mapping[str, Scheme] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Load the tensors of `wanted`, under its keys, in `dtype` (None: as stored) on `device`, or on that of each
        key.

        An entry of `wanted` maps the caller's name to the name in the checkpoint and the shape it must have. Names,
        shapes and stored dtypes are all checked first. Every other tensor of the checkpoint must match one of the
        patterns in `ignore` (`"*.rotary_emb.inv_freq"`). Two entries with one published name share one tensor. `joined`
        maps a new name to names of `wanted` whose tensors are read into one tensor, one beneath the other.

        `schemes` maps names in the checkpoint to schemes by which their matrices are packed; these matrices, and
        matrices stored packed, come as `PackedMatrix`. Joined matrices of different schemes, or without whole blocks of
        rows, come as one `Stacked`.

        Raises `CapacityError`, before anything is read, for weights larger than the free memory, and ModelError for
        NaN and infinity, naming the tensor, and for a file that changed since its header was read.
        """
        shapes = dict(wanted.values())
        self.check(shapes, ignore)
        schemes = self.manifest.schemes if self.manifest else schemes or {}
        published = {name: [wanted[part][0] for part in parts] for name, parts in (joined or {}).items()}
        wholes = {key: names for key, names in published.items() if _in_one(names, shapes, schemes)}
        stacked = {key: parts for key, parts in (joined or {}).items() if key not in wholes}
        inside = {part for key, parts in (joined or {}).items() if key in wholes for part in parts}
        apart = {key: [name] for key, (name, _) in wanted.items() if key not in inside}
        together = {tuple(names): key for key, names in (apart | wholes).items()}  # one entry a tensor
        plain = sorted((names for names in together if names[0] not in schemes), key=self._place)
        rounded = sorted((names for names in together if names[0] in schemes), key=self._place)
        whole_shapes = {names: _beneath([shapes[name] for name in names]) for names in together}
        where = {names: device if isinstance(device, torch.device) else device(key) for names, key in together.items()}
        sizes: dict[torch.device, list[Size]] = {each: [] for each in where.values()}
        for names in plain:
            sizes[where[names]].append((whole_shapes[names], dtype or self._dtype_of(names)))
        for names in rounded:
            sizes[where[names]] += schemes[names[0]].parts(whole_shapes[names]).values()
        staged = 0 if self.manifest else max((self._staged(names, shapes) for names in rounded), default=0)
        for each, own in sizes.items():
            self._check_memory(sum(math.prod(shape) * kind.itemsize for shape, kind in own) + staged, each)
        memory = {each: iter(allocate(own, each)) for each, own in sizes.items()}
        loaded: dict[tuple[str, ...], Any] = {names: next(memory[where[names]]) for names in plain}
        packed = {
            names: {part: next(memory[where[names]]) for part in schemes[names[0]].parts(whole_shapes[names])}
            for names in rounded
        }
        outs = {name: out for names in plain for name, out in _split(names, loaded[names], shapes, 1).items()}
        if self.manifest:
            for names in rounded:
                for part, whole in packed[names].items():
                    rows = _split(names, whole, shapes, schemes[names[0]].row_block)
                    outs.update({f"{name}.{part}": out for name, out in rows.items()})
        with self.opened() as files:
            self.read(files, outs)
            if not self.manifest:
                self._round(files, packed, shapes, schemes, staged)
            self._check_samples()  # of what was just read
        for names, parts in packed.items():
            n_out, n_in = whole_shapes[names]
            loaded[names] = schemes[names[0]].matrix((n_out, n_in), parts)
        found = {key: loaded[tuple(names)] for key, names in (apart | wholes).items()}
        return found | {key: Stacked([found.pop(part) for part in parts]) for key, parts in stacked.items()}

    def _place(self, names: Sequence[str]) -> tuple[Path, int]:
        """Return where a tensor, or the first of several, lies: tensors are read in the order in which they lie on the
        disk.
        """
        info = self.tensors.get(names[0])
        if info is None and self.manifest:
            shape = self.manifest.shapes[names[0]]
            info = self.tensors[f"{names[0]}.{next(iter(self.manifest.schemes[names[0]].parts(shape)))}"]
        assert info is not None, names
        return info.file, info.start

    def read(self, files: Mapping[Path, int], outs: Mapping[str, Tensor]) -> None:
        """Read stored tensors by name."""
        order = sorted(outs, key=lambda name: self._place([name]))
        infos = self.tensors
        fill([Job(name, infos[name], files[infos[name].file], outs[name]) for name in order])

    def _staged(self, names: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Return the bytes that one tensor's matrices take before rounding."""
        return math.prod(_beneath([shapes[name] for name in names])) * self._dtype_of(names).itemsize

    def _round(
        self, files: Mapping[Path, int], packed: Mapping[tuple[str, ...], Mapping[str, Tensor]],
        shapes: Mapping[str, tuple[int, ...]], schemes: Mapping[str, Scheme], staged: int,
    ) -> None:  # fmt: skip
        """Read matrices, one after the other into the same memory, and round them."""
        (stage,) = allocate([((staged,), torch.uint8)], torch.device("cpu"))
        for names, parts in packed.items():
            stored = stage[: self._staged(names, shapes)].view(self._dtype_of(names))
            weight = stored.view(_beneath([shapes[name] for name in names]))
            self.read(files, _split(names, weight, shapes, 1))
            schemes[names[0]].pack(weight, parts)

    def _dtype_of(self, names: Sequence[str]) -> torch.dtype:
        """Return the widest dtype in which one of these is stored."""
        return functools.reduce(torch.promote_types, (DTYPES[self.tensors[name].dtype] for name in names))

    def _check_memory(self, needed: int, device: torch.device) -> None:
        free = system.free_memory(device)
        if free is not None and needed > free:
            raise CapacityError(
                f"the weights of {named(self.folder)} take {size_text(needed)} of memory on {device}, and "
                f"{size_text(free)} is available; free some, or use a smaller dtype or model"
            )

    @contextmanager
    def opened(self) -> Iterator[dict[Path, int]]:
        """Open all files. Raises ModelError if one is not what it was when its header was read.

        Files are checked again at the end, so that all data read belongs to the checked headers.
        """
        files: dict[Path, int] = {}
        try:
            for file in self.stamps:
                files[file] = open_regular(file, ModelError)
            self._check_stamps(files)
            try:
                yield files
            finally:  # after an error too: another process that writes to a file explains it
                self._check_stamps(files)
        finally:
            for descriptor in files.values():
                os.close(descriptor)

    def _check_stamps(self, files: Mapping[Path, int]) -> None:
        for file, descriptor in files.items():
            if Stamp.of(descriptor) != self.stamps[file]:
                raise ModelError(f"{named(file)} changed while it was loaded; load it again when nothing writes to it")

    def dtype(self) -> torch.dtype:
        """Return the dtype of most stored bytes; for quantised weights, the dtype before rounding."""
        if self.manifest:
            return getattr(torch, self.manifest.dtype)  # type: ignore[no-any-return]
        sizes: Counter[str] = Counter()
        for info in self.tensors.values():
            sizes[info.dtype] += info.stop - info.start
        for name, _ in sizes.most_common():
            if name in DTYPES:
                return DTYPES[name]
        where = named(self.folder)
        raise ModelError(f"{where} has no weights in {', '.join(DTYPES)}; use a checkpoint in one of these")

    def fingerprint(self) -> str:
        """Return a SHA-256 that ties a context or a map file to these weights, however they are sharded or named on
        disk.

        It covers every name, dtype and shape, and three samples of every tensor's bytes; a change elsewhere in a large
        tensor is not seen. `load` takes the samples, 12 KiB a tensor at most, with the weights. Without `load` the
        samples are read here, and a file that changed since its header was read is refused. Quantised weights have the
        fingerprint of their source checkpoint; their file is checked by its own samples.
        """
        self._check_samples()
        return self._fingerprint if self.manifest is None else self.manifest.source

    def _check_samples(self) -> None:
        """Take the samples; for quantised weights, check them against the manifest."""
        if self._fingerprint != (self.manifest.samples if self.manifest else self._fingerprint):
            where = ", ".join(named(file) for file in self.stamps)
            raise ModelError(f"{where}: its tensors are not those of its manifest; quantize the checkpoint again")

    def samples(self) -> str:
        """Return the fingerprint of these files' own tensors."""
        return self._fingerprint

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors; a packed matrix counts as one."""
        return frozenset(self._published)

    @cached_property
    def _published(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor; a matrix that is stored rounded counts as one."""
        shapes = {name: info.shape for name, info in self.tensors.items()}
        if self.manifest:
            for name, shape in self.manifest.shapes.items():
                for part in self.manifest.schemes[name].parts(shape):
                    del shapes[f"{name}.{part}"]
                shapes[name] = shape
        return shapes

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        with self.opened() as files:
            for name, info in sorted(self.tensors.items()):
                digest.update(json.dumps([name, info.dtype, info.shape]).encode() + b"\n")
                for start, stop in _samples(info.start, info.stop):
                    digest.update(pread(files[info.file], stop - start, start, info.file))
        return digest.hexdigest()

    def check(self, wanted: Mapping[str, tuple[int, ...]], ignore: Sequence[str]) -> None:
        unexpected = [
            name
            for name in self._published
            if (name not in wanted or name in self.unindexed)
            and not any(fnmatchcase(name, pattern) for pattern in ignore)
        ]
        published = self._published
        missing = [name for name in wanted if name not in published]
        faults = [f"{len(missing)} missing ({_few(sorted(missing))})"] if missing else []
        faults += [f"{len(unexpected)} unexpected ({_few(unexpected)})"] if unexpected else []
        if faults:
            remedy = "check that config.json belongs to these weights, or download the checkpoint again"
            raise ModelError(f"{named(self.folder)}: tensors {' and '.join(faults)}; {remedy}")
        shapes = [
            f"{shown(name)} is {list(published[name])}, expected {list(shape)}"
            for name, shape in wanted.items()
            if published[name] != tuple(shape)
        ]
        if shapes:
            remedy = "check that config.json belongs to these weights"
            raise ModelError(f"{named(self.folder)}: wrong shapes: {_few(shapes, quoted=False)}; {remedy}")
        unread = [
            f"{name} ({self.tensors[name].dtype})"
            for name in sorted(wanted)
            if name in self.tensors and self.tensors[name].dtype not in DTYPES
        ]
        if unread:
            expected = f"expected weights in {', '.join(DTYPES)}"
            raise ModelError(f"{named(self.folder)}: {expected}, got {_few(unread)}; use an unquantized checkpoint")


def _in_one(names: Sequence[str], shapes: Mapping[str, tuple[int, ...]], schemes: Mapping[str, Scheme]) -> bool:
    """Return whether these matrices can be stacked in one tensor."""
    scheme = schemes.get(names[0])
    alike = all(schemes.get(name) == scheme for name in names)
    return alike and (scheme is None or all(shapes[name][0] % scheme.row_block == 0 for name in names))


def _beneath(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape of tensors one beneath the other."""
    assert len({shape[1:] for shape in shapes}) == 1, f"{shapes} do not lie beneath each other"
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def _split(names: Sequence[str], whole: Tensor, shapes: Mapping[str, tuple[int, ...]], rows: int) -> dict[str, Tensor]:
    """Split a tensor by rows into its named parts. One row of the tensor stands for `rows` rows of a matrix."""
    if len(names) == 1:
        return {names[0]: whole}
    return dict(zip(names, whole.split([shapes[name][0] // rows for name in names]), strict=True))


def _few(names: Sequence[str], quoted: bool = True) -> str:
    first = ", ".join(shown(name) if quoted else name for name in names[:3])
    return first + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _header(file: Path) -> tuple[dict[str, TensorInfo], dict[str, str], Stamp]:
    """Return the tensors of a file, its metadata, and its stamp from before its header was read."""
    descriptor = open_regular(file, ModelError)
    try:
        stamp = Stamp.of(descriptor)
        return *read_open(descriptor, file), stamp
    finally:
        os.close(descriptor)


def _only_file(folder: Path) -> Path:
    """Return the one safetensors file of a folder that has neither of the usual names."""
    where = named(folder)
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise ModelError(f"{where} cannot be read ({error.strerror}); check its permissions") from None
    found = [name for name in names if name.endswith(".safetensors")]
    own = [name for name in found if not name.startswith(("consolidated", "adapter"))]
    best = [name for name in own if name.startswith("model")] or own or found
    if len(best) == 1 and not re.search(r"-\d+-of-\d+\.", best[0]):
        return folder / best[0]
    if best:
        remedy = "download model.safetensors.index.json, or leave one whole file"
        raise ModelError(f"{where} has {_few(best)} but no index; expected one file or shards with an index; {remedy}")
    others = [name for name in names if name.endswith(_OTHER_WEIGHTS)]
    if others:
        remedy = "convert them, e.g. with transformers' save_pretrained(folder, safe_serialization=True)"
        raise ModelError(f"{where} has weights only as {_few(others)}; lce reads safetensors alone; {remedy}")
    raise ModelError(f"{where} has no weights; expected model.safetensors or shards with an index; check the path")


def _sharded(folder: Path, index: Path) -> tuple[dict[str, TensorInfo], frozenset[str], dict[Path, Stamp]]:
    """Return all tensors of the index's shards, the names of those that the index does not list, and the shards'
    stamps.
    """
    raw = read_bytes(index, LARGEST_HEADER + 1)
    if len(raw) > LARGEST_HEADER:
        raise Damaged(index, f"more than {LARGEST_HEADER} bytes")
    weight_map = parse_object(raw, index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise Damaged(index, "weight_map is not an object of tensor names and file names")
    shards = sorted(set(weight_map.values()))
    if len(shards) > _MOST_SHARDS:
        raise Damaged(index, f"{len(shards)} shards; expected at most {_MOST_SHARDS}")
    _check_shard_names(folder, index, shards)
    tensors: dict[str, TensorInfo] = {}
    stamps: dict[Path, Stamp] = {}
    for shard in shards:
        found, _, stamps[folder / shard] = _header(folder / shard)
        for name, info in found.items():
            if name in tensors or weight_map.get(name, shard) != shard:
                raise Damaged(index, f"tensor {shown(name)} is in {shown(shard)} and in another shard")
            tensors[name] = info
        if len(tensors) > MOST_TENSORS:
            raise Damaged(index, f"its shards have more than {MOST_TENSORS} tensors")
    absent = [name for name in weight_map if name not in tensors]
    if absent:
        raise Damaged(index, f"its shards lack {len(absent)} of the tensors that it lists ({_few(absent)})")
    return tensors, frozenset(tensors.keys() - weight_map.keys()), stamps


def _check_shard_names(folder: Path, index: Path, shards: Iterable[str]) -> None:
    """Refuse a shard's name that has a path. The file may be a link, as in the cache of Hugging Face."""
    for shard in shards:
        if PureWindowsPath(shard).name != shard or not shard.endswith(".safetensors") or "\0" in shard:
            remedy = "use a checkpoint from a source you trust"
            raise ModelError(f"{named(index)}: the shard {shown(shard)} is not a plain *.safetensors name; {remedy}")
    missing = [shard for shard in shards if not os.path.lexists(folder / shard)]
    if missing:
        raise ModelError(f"{named(folder)} lacks {len(missing)} of the index's shards ({_few(missing)}); download them")


def _samples(start: int, stop: int) -> list[tuple[int, int]]:
    if stop - start <= 3 * _SAMPLE:
        return [(start, stop)]
    middle = (start + stop - _SAMPLE) // 2
    return [(start, start + _SAMPLE), (middle, middle + _SAMPLE), (stop - _SAMPLE, stop)]
