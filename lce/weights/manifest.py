"""The manifest of a quantised file, in the file's metadata.

A packed matrix `NAME` is stored as several tensors, which its scheme names: `NAME.codes` and `NAME.scales`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from lce.errors import shown
from lce.files import JsonError, parse_json
from lce.weights.packed import Scheme, all_schemes
from lce.weights.safetensors_file import MOST_VALUES, NAMES, Damaged, TensorInfo

FORMAT = 1
_REMEDY = "quantize the checkpoint again"
METADATA = "lce.quantised"  # the manifest's key in the file's metadata


@dataclass(frozen=True)
class Manifest:
    """The manifest of a quantised file.

    `weights` is the scheme that the user chose; `matrices` has the scheme and shape of each packed matrix. `dtype` and
    `source` are the dtype and the fingerprint of the source checkpoint. `samples` is the fingerprint of the file's own
    tensors.
    """

    weights: str
    dtype: str
    source: str
    samples: str
    matrices: Mapping[str, tuple[str, tuple[int, int]]]
    format: int = FORMAT

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        return {name: shape for name, (_, shape) in self.matrices.items()}

    @property
    def schemes(self) -> dict[str, Scheme]:
        return {name: all_schemes()[scheme] for name, (scheme, _) in self.matrices.items()}

    def text(self) -> str:
        """Return the manifest as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str, file: Path, tensors: Mapping[str, TensorInfo]) -> Self:
        """Read the manifest in a file's metadata. Raises ModelError if it is damaged or contradicts the tensors."""
        try:
            raw = parse_json(text.encode(), most=MOST_VALUES, unique=True)
            if raw["format"] != FORMAT:
                raise Damaged(file, f"format {shown(raw['format'])}; this lce reads {FORMAT}", _REMEDY)
            matrices = {name: (scheme, (n_out, n_in)) for name, (scheme, (n_out, n_in)) in raw["matrices"].items()}
            found = cls(raw["weights"], raw["dtype"], raw["source"], raw["samples"], matrices)
        except (JsonError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise Damaged(file, f"its manifest is incomplete ({shown(str(error), 60)})", _REMEDY) from None
        texts = found.weights, found.dtype, found.source, found.samples
        if not all(isinstance(text, str) and 0 < len(text) <= 100 for text in texts):
            raise Damaged(file, "its manifest has values that are no texts", _REMEDY)
        if found.weights not in all_schemes() or found.dtype not in ("float32", "bfloat16", "float16"):
            raise Damaged(file, f"unknown weights {shown(found.weights)} of {shown(found.dtype)}", _REMEDY)
        for name, (scheme, shape) in matrices.items():
            if not isinstance(scheme, str) or scheme not in all_schemes() or not all(type(n) is int for n in shape):
                raise Damaged(file, f"unknown weights {shown(scheme)} of {shown(name)}, {shown(shape)}", _REMEDY)
            for part, (size, dtype) in all_schemes()[scheme].parts(shape).items():
                info, expected = tensors.get(f"{name}.{part}"), (NAMES[dtype], size)
                got = None if info is None else (info.dtype, info.shape)
                if got != expected:
                    raise Damaged(file, f"{shown(f'{name}.{part}')} is {got}; expected {expected}", _REMEDY)
        return found
