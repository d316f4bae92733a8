"""A checkpoint's weights: safetensors files whose headers are checked in full before any data is read.

Weights are converted while they are read: peak memory is the model in its final dtype, plus at most 64 MiB. A file that
changes between the check of its header and the end of loading is refused; later changes have no effect.
"""

import functools
import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lce import system
from lce.errors import CapacityError, ModelError, shown
from lce.files import named
from lce.kernels.product.quantised import QuantisedMatrix
from lce.kernels.runtime import launching
from lce.sizes import size_text
from lce.weights.folder import INDEX, WEIGHTS, other_file, read_shards
from lce.weights.gguf_packed import GPU_SCHEMES, SCHEMES, Blocks, fill_blocks, say_unpacked
from lce.weights.gguf_types import BY_NAME, IN_BLOCKS
from lce.weights.packed import METADATA, ROUNDED, ROW_BLOCK, Manifest, PackedMatrix, Scheme, Stacked
from lce.weights.safetensors_file import DTYPES, Files, TensorInfo, allocate, few, fill, opened, pread, read_header

CPU = torch.device("cpu")
_SAMPLE = 4096  # The bytes of one sample in the fingerprint.


@dataclass
class _Target:
    """A tensor or a quantised matrix to load: the stored tensors `names`, of `shapes`, joined along dimension 0.

    `parts` has what is loaded: a matrix' parts by name, or under "" a plain tensor. `dtype` is that of a plain tensor,
    or of a matrix before loading quantises it; None for a matrix that is stored quantised.
    """

    names: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    scheme: Scheme | None
    dtype: torch.dtype | None
    device: torch.device
    parts: dict[str, Tensor] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(shape[0] for shape in self.shapes), *self.shapes[0][1:])

    @property
    def sizes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return self.scheme.parts(self.shape) if self.scheme else {"": (self.shape, self.dtype or torch.float32)}

    @property
    def staged(self) -> int:
        """The bytes of a matrix before loading quantises it; 0 for a target that loading does not quantise."""
        return math.prod(self.shape) * self.dtype.itemsize if self.scheme and self.dtype else 0

    def split(self, parts: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Split parts into views, by stored tensor and by part. A quantised part has a row per `row_block` rows."""
        found: dict[str, dict[str, Tensor]] = {name: {} for name in self.names}
        for part, whole in parts.items():
            counts = [
                -(-shape[0] // self.scheme.row_block) if self.scheme and part else shape[0] for shape in self.shapes
            ]
            for name, rows in zip(self.names, whole.split(counts), strict=True):
                found[name][part] = rows
        return found

    def value(self) -> Tensor | PackedMatrix:
        return self.scheme.matrix(self.shape, self.parts) if self.scheme else self.parts[""]


@dataclass(frozen=True)
class Checkpoint:
    """The tensors in the weight files of a checkpoint, a folder or a GGUF file; they are not loaded yet.

    A file that was changed after its header was read no longer matches its stamp in `stamps`: size, inode and times.
    `manifest` describes weights that lce quantised; it is None for other checkpoints. Row i of a tensor is row
    `orders[name][i]` of the stored tensor; most tensors have no order. `columns` maps a tensor to the first column that
    is loaded and the column after the last; `tensors` has its stored width. Other tensors are loaded whole.
    """

    folder: Path
    tensors: Mapping[str, TensorInfo]
    stamps: Mapping[Path, tuple[int, ...]] = field(default_factory=dict, repr=False)
    manifest: Manifest | None = field(default=None, repr=False)
    orders: Mapping[str, NDArray[np.int64]] = field(default_factory=dict, repr=False)
    columns: Mapping[str, tuple[int, int]] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Find the weights, as transformers does, and check every header. Raises ModelError if one is damaged."""
        whole = folder / WEIGHTS
        if not os.path.lexists(whole) and (whole := other_file(folder)).name == INDEX:
            return cls(folder, *read_shards(whole))
        tensors, metadata, stamp = read_header(whole)
        if METADATA not in metadata:
            return cls(folder, tensors, {whole: stamp})
        manifest = Manifest.read(metadata[METADATA], whole, tensors)
        tensors = {name: replace(info, checks=tuple(manifest.checks[name])) for name, info in tensors.items()}
        return cls(folder, tensors, {whole: stamp}, manifest)

    @cached_property
    def schemes(self) -> Mapping[str, Scheme]:
        """The scheme of each matrix that is stored quantised, and stays so in memory on a CPU, by name."""
        if self.manifest:
            return {name: ROUNDED[scheme] for name, (scheme, _) in self.manifest.matrices.items()}
        matrices = {name: info.dtype for name, info in self.tensors.items() if len(info.shape) == 2}
        return {name: SCHEMES[kind] for name, kind in matrices.items() if kind in SCHEMES}

    def schemes_on(self, device: torch.device) -> Mapping[str, Scheme]:
        """Return the schemes of the matrices that stay quantised on a device: on a GPU, if it has Triton."""
        if self.manifest or device.type == "cpu":
            return self.schemes
        if device.type != "cuda" or not launching.installed():
            return {}
        return {name: GPU_SCHEMES[self.tensors[name].dtype] for name in self.schemes}

    @cached_property
    def _type_sizes(self) -> Counter[str]:
        sizes = Counter[str]()
        for info in self.tensors.values():
            sizes[info.dtype] += info.stop - info.start
        return sizes

    @property
    def quantised(self) -> str | None:
        """What the weights are quantised to: lce's scheme, or the GGUF type of most bytes. None for plain weights."""
        if self.manifest:
            return self.manifest.weights
        sizes = {kind: size for kind, size in self._type_sizes.items() if size and kind in IN_BLOCKS}
        return max(sizes, key=sizes.__getitem__, default=None)

    def load(
        self,
        wanted: Mapping[str, tuple[str, tuple[int, ...]]],
        *,
        dtype: torch.dtype | None,
        device: torch.device | Callable[[str], torch.device],
        ignore: Sequence[str] = (),
        joined: Mapping[str, Sequence[str]] | None = None,
        schemes: Mapping[str, Scheme] | None = None,
        wide: Collection[str] = (),
    ) -> dict[str, Any]:
        """Load the tensors of `wanted`, in `dtype` (None: as stored), on `device`, which may be a function of a name.

        `wanted` maps the caller's names to the name in the checkpoint and the expected shape. Other tensors must match
        a pattern in `ignore`. `joined` maps a new name to names in `wanted`, to join along dimension 0. Tensors of the
        names in `wide` are float32. `schemes` maps names in the checkpoint to the schemes that quantise their matrices.
        These, and matrices stored quantised, are returned as `PackedMatrix`; joined ones become one `Stacked` if their
        schemes differ, or if the rows of one are no multiple of `ROW_BLOCK`.

        Before anything is read, raises `CapacityError` for weights larger than the free memory, and ModelError for
        wrong names, shapes and dtypes. While reading, raises ModelError for NaN, infinity, and a file that was changed.
        """
        shapes = dict(wanted.values())
        self.check(shapes, ignore)
        places = {key: device if isinstance(device, torch.device) else device(key) for key in wanted}
        stored = self._kept(wanted, places, dtype) if self.quantised else {}
        schemes, stacked = stored or schemes or {}, dict[str, Sequence[str]]()
        groups = {key: [name] for key, (name, _) in wanted.items()}
        for key, parts in (joined or {}).items():
            names, places[key] = [wanted[part][0] for part in parts], places[parts[0]]
            whole_blocks = names[0] not in schemes or all(shapes[name][0] % ROW_BLOCK == 0 for name in names)
            if whole_blocks and len({schemes.get(name) for name in names}) == 1:
                groups[key] = [name for part in parts for name in groups.pop(part)]
            else:
                stacked[key] = parts
        targets = {}
        for key, names in groups.items():
            scheme, kind = schemes.get(names[0]), torch.float32 if key in wide else dtype
            if names[0] in stored:
                kind = None
            elif scheme or dtype is None:
                kind = functools.reduce(torch.promote_types, (DTYPES[self.tensors[name].dtype] for name in names))
            targets[key] = _Target(names, [shapes[name] for name in names], scheme, kind, places[key])
        self._allocate(targets.values())
        with opened(self.stamps) as files:
            outs = [target.split(target.parts) for target in targets.values() if not target.staged]
            self._fill(dict(each for split in outs for each in split.items()), files, dtype)
            if rounded := [target for target in targets.values() if target.staged]:
                self._quantise(rounded, files, dtype)
            self.fingerprint()  # computed now, while the bytes that it samples are in the system's page cache
        found: dict[str, Any] = {key: target.value() for key, target in targets.items()}
        return found | {key: Stacked([found.pop(part) for part in parts]) for key, parts in stacked.items()}

    def _kept(
        self, wanted: Mapping[str, tuple[str, Any]], places: Mapping[str, torch.device], dtype: torch.dtype | None
    ) -> dict[str, Scheme]:
        """Return the schemes of the matrices that stay quantised; say once which others are unpacked, and the cost."""
        kept, unpacked = {}, []
        schemes = {device: self.schemes_on(device) for device in {*places.values()}}
        for key, (name, shape) in wanted.items():
            if scheme := schemes[places[key]].get(name):
                kept[name] = scheme
            elif self.tensors[name].dtype in IN_BLOCKS and len(shape) > 1:
                unpacked.append((self.tensors[name], math.prod(shape)))
        if unpacked:
            say_unpacked(unpacked, dtype or torch.float32, places.values())
        return kept

    def _allocate(self, targets: Collection[_Target]) -> None:
        staged = max((target.staged for target in targets), default=0)
        for device in {target.device for target in targets}:
            own = [target for target in targets if target.device == device]
            sizes = [size for target in own for size in target.sizes.values()]
            needed = staged + sum(math.prod(shape) * dtype.itemsize for shape, dtype in sizes)
            free = system.free_memory(device)
            if free is not None and needed > free:
                take = f"the weights of {named(self.folder)} take {size_text(needed)} of memory on {device}"
                remedy = "free some, or use a smaller dtype or model"
                raise CapacityError(f"{take}, and {size_text(free)} is available; {remedy}")
            memory = iter(allocate(sizes, device))
            for target in own:
                target.parts = {part: next(memory) for part in target.sizes}

    def _quantise(self, targets: Sequence[_Target], files: Files, dtype: torch.dtype | None) -> None:
        """Read each matrix into one buffer, and quantise it from there."""
        (stage,) = allocate([((max(target.staged for target in targets),), torch.uint8)], CPU)
        for target in targets:
            assert target.scheme is not None
            assert target.dtype is not None
            weight = stage[: target.staged].view(target.dtype).view(target.shape)
            self._fill(target.split({"": weight}), files, dtype)
            matrix = target.scheme.matrix(target.shape, target.parts)
            assert isinstance(matrix, QuantisedMatrix)
            matrix.pack(weight)

    def _fill(self, outs: Mapping[str, Mapping[str, Tensor]], files: Files, dtype: torch.dtype | None) -> None:
        as_stored, blocks = dict[str, Tensor](), []
        for name, parts in outs.items():
            info, order, columns = self.tensors.get(name), self.orders.get(name), self.columns.get(name)
            if info and (info.dtype not in DTYPES or order is not None or columns):
                kind = parts[""].dtype if "" in parts else dtype or torch.float32
                blocks.append(Blocks(name, info, order, parts, kind, columns))
            else:
                as_stored |= {f"{name}.{part}" if part else name: out for part, out in parts.items()}
        fill(as_stored, self.tensors, files)
        if blocks:
            fill_blocks(blocks, files)

    def dtype(self) -> torch.dtype:
        """Return the dtype of most bytes, before lce quantised them; quantised GGUF types count as bfloat16."""
        if self.manifest:
            return getattr(torch, self.manifest.dtype)  # type: ignore[no-any-return]
        sizes = {kind: self._type_sizes[kind] for kind in DTYPES}
        sizes["BF16"] += sum(self._type_sizes[kind] for kind in IN_BLOCKS)
        found = max(DTYPES, key=sizes.__getitem__)
        if not sizes[found]:
            raise ModelError(f"{named(self.folder)} has no weights in {', '.join(DTYPES)}; use another checkpoint")
        return DTYPES[found]

    def fingerprint(self) -> str:
        """Return a SHA-256 of the weights, however sharded. Contexts and learned maps belong to weights of one hash.

        The hash covers all names, dtypes and shapes, and samples of each tensor's beginning, middle and end. Weights
        that lce quantised have the hash of their source.
        """
        return self.manifest.source if self.manifest else self._samples

    @cached_property
    def _samples(self) -> str:
        digest = hashlib.sha256()
        with opened(self.stamps) as files:
            for name, info in sorted(self.tensors.items()):
                digest.update(json.dumps([name, info.dtype, info.shape]).encode() + b"\n")
                starts, size = [info.start], info.stop - info.start
                if size > 3 * _SAMPLE:
                    starts, size = [info.start, (info.start + info.stop - _SAMPLE) // 2, info.stop - _SAMPLE], _SAMPLE
                for start in starts:
                    digest.update(pread(files[info.file], size, start, info.file))
        return digest.hexdigest()

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every tensor, by name. A quantised matrix counts as one tensor."""
        shapes = {name: info.shape for name, info in self.tensors.items()}
        shapes |= {name: (shapes[name][0], stop - first) for name, (first, stop) in self.columns.items()}
        matrices = {name: shape for name, (_, shape) in self.manifest.matrices.items()} if self.manifest else {}
        return {name: shape for name, shape in shapes.items() if name.rpartition(".")[0] not in matrices} | matrices

    def check(self, wanted: Mapping[str, tuple[int, ...]], ignore: Sequence[str]) -> None:
        """Raise ModelError unless all of `wanted` are there, and all other tensors match a pattern in `ignore`."""
        published = self.shapes
        extra = [x for x in published if x not in wanted and not any(fnmatchcase(x, pattern) for pattern in ignore)]
        wrong = [name for name, shape in wanted.items() if published.get(name) != tuple(shape)]
        unread = [name for name, info in self.tensors.items() if name in wanted and info.dtype not in BY_NAME]
        if extra or wrong or unread:
            raise self._refusal(wanted, extra, wrong, sorted(unread))

    def _refusal(self, wanted: Mapping[str, Any], extra: list[str], wrong: list[str], unread: list[str]) -> ModelError:
        published, remedy = self.shapes, "check that the config belongs to these weights"
        faults = {"missing": sorted({*wrong} - published.keys()), "unexpected": extra}
        if any(faults.values()):
            texts = [f"{len(names)} {what} ({few(names)})" for what, names in faults.items() if names]
            fault, remedy = f"tensors {' and '.join(texts)}", f"{remedy}, or download the checkpoint again"
        elif wrong:
            shapes = f"{shown(wrong[0])} is {list(published[wrong[0]])}, expected {list(wanted[wrong[0]])}"
            fault = f"{len(wrong)} wrong shapes: {shapes}"
        else:
            found = few([f"{name} ({self.tensors[name].dtype})" for name in unread])
            fault, remedy = f"expected weights in {', '.join(DTYPES)}, got {found}", "use an unquantized checkpoint"
        return ModelError(f"{named(self.folder)}: {fault}; {remedy}")
