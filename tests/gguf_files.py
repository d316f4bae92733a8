"""Writes GGUF files of any tensor types by the gguf package, and says what their tensors hold.

    path, values = write_gguf(tmp_path / "a.gguf", {"blk.0.attn_q.weight": array}, "Q4_K", {"llama.block_count": 1})

`values` are the weights in the file as float32, dequantised by the gguf package: what a reader has to find.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType as Value
from gguf import quants

# As llama.cpp does: where a row is no multiple of 256, the type that takes the place of a type of blocks of 256.
FALLBACKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "Q2_K": "IQ4_NL", "Q3_K": "IQ4_NL", "IQ4_XS": "IQ4_NL"}
# Patterns of tensor names, the first that matches counts. A file called Q4_K_M is made so; in a model whose rows are no
# multiple of 256 its types become Q5_0 and Q8_0.
Q4_K_M = {f"{name}.weight": "Q6_K" for name in ("output", "token_embd", "blk.0.attn_v", "blk.0.ffn_down")}
Q4_K_M |= {"*": "Q4_K"}
# Of types that the package cannot make: where `d` and `dmin` lie in a block, and the code in the middle if it is not 0.
_MADE = {"Q2_K": (80, 82, 1.5), "Q3_K": (108, None, 0), "Q4_K": (0, 2, 7.5), "Q5_K": (0, 2, 15.5)}
_MADE |= {"Q6_K": (208, None, 0), "IQ4_NL": (0, None, 0), "IQ4_XS": (0, None, 0)}


def write_gguf(
    path: Path, tensors: Mapping[str, Any], types: Any = "F32", metadata: Any = None, per_file: int = 0, **options: Any
) -> tuple[Path, dict[str, np.ndarray]]:
    """Write tensors, and return the file's path and the values of its tensors.

    `types` is a type's name, or maps patterns of tensor names to types (`Q4_K_M`). A tensor of one dimension is always
    F32, and a type whose blocks do not fit a row is replaced as `type_for` says. The package quantises to most types;
    for the others, blocks are random, with the spread of the tensor's values. Values of `metadata` get the types that
    converters use: uint32 for int, float32 for float; NumPy scalars keep their own. With `per_file`, the model is split
    into files of so many tensors, and the first file's path is returned. `options` are the package's own.
    """
    metadata = {"general.architecture": "llama", **(metadata or {})}
    writer = gguf.GGUFWriter(path, metadata.pop("general.architecture"), split_max_tensors=per_file, **options)
    if "general.alignment" in metadata:
        writer.add_custom_alignment(metadata.pop("general.alignment"))
    for key, value in metadata.items():
        writer.add_key_value(key, *_typed(value))
    values, rng = {}, np.random.default_rng(0)
    for name, tensor in tensors.items():
        array = np.ascontiguousarray(tensor, np.float32)
        kind = Type[type_for(name, array.shape, types)]
        raw = random_rows(kind.name, array, rng) if kind.name in _MADE else quants.quantize(array, kind)
        writer.add_tensor(name, raw, raw_dtype=kind)
        values[name] = quants.dequantize(raw, kind).astype(np.float32).reshape(array.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    first = writer.format_shard_names(path)[0]
    writer.close()
    return first, values


def type_for(name: str, shape: tuple[int, ...], types: str | Mapping[str, str]) -> str:
    """Return the type in which a tensor is stored, with llama.cpp's replacements for rows that blocks do not fit."""
    if len(shape) == 1:
        return "F32"
    patterns = {"*": types} if isinstance(types, str) else types
    kind = next((kind for pattern, kind in patterns.items() if fnmatchcase(name, pattern)), "F32")
    if shape[-1] % gguf.GGML_QUANT_SIZES[Type[kind]][0]:
        kind = FALLBACKS.get(kind, "F16")
    return "F16" if shape[-1] % gguf.GGML_QUANT_SIZES[Type[kind]][0] else kind


def random_rows(kind: str, like: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return random blocks in place of `like`: bytes `[..., bytes of a row]`, with a mean of about 0 and its spread."""
    size, n_bytes = gguf.GGML_QUANT_SIZES[Type[kind]]
    d, dmin, middle = _MADE[kind]
    blocks = rng.integers(0, 256, (like.size // size, n_bytes), dtype=np.uint8)

    def scale(by: np.ndarray) -> None:
        for offset, value in ((d, by), (dmin, by * middle)):
            if offset is not None:
                blocks[:, offset : offset + 2] = value.astype("<f2")[:, None].view(np.uint8)

    scale(np.full(len(blocks), 2.0**-6))
    spread = quants.dequantize(blocks, Type[kind]).std() * 2.0**6
    scale(like.std() / spread * rng.uniform(0.5, 1.3, len(blocks)))
    return blocks.reshape(*like.shape[:-1], -1)


def _typed(value: Any) -> tuple[Any, Value, Value | None]:
    """Return a metadata value with the types for the writer: its own, and that of a list's elements."""
    if isinstance(value, list):
        return value, Value.ARRAY, _typed(value[0])[1]
    if isinstance(value, np.generic):
        name = value.dtype.name.upper()
        return value.item(), Value[name], None
    if isinstance(value, int) and not isinstance(value, bool):
        return value, Value.UINT32 if 0 <= value < 1 << 32 else Value.INT64, None
    return value, Value.get_type(value), None
