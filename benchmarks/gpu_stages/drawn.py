"""Models of published shapes with weights drawn on the device; only a config.json is read and written."""

from __future__ import annotations

import json
import math
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

import lce
from lce.weights import source

Shape = Mapping[str, Any]
SHAPES: dict[str, Shape] = {
    "llama-2-7b": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096, "rope_theta": 10000.0,
    },
    "llama-3-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 128, "rope_theta": 10000.0,
    },
}  # fmt: skip
SPREAD = 0.02  # standard deviation of the weights


class Drawn:
    """A substitute for a `Checkpoint` that has every wanted weight, drawn when loaded."""

    manifest = quantised = None
    shapes: Mapping[str, tuple[int, ...]] = {}
    schemes: Mapping[str, Any] = {}

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def open(cls, folder: Path) -> Self:
        return cls(folder)

    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    def schemes_on(self, device: torch.device) -> Mapping[str, Any]:
        return self.schemes

    def fingerprint(self) -> str:
        return "drawn"

    def load(
        self, wanted: Mapping[str, tuple[str, tuple[int, ...]]], *, dtype: torch.dtype,
        device: Callable[[str], torch.device],
        joined: Mapping[str, Sequence[str]] | None = None, **more: Any,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Draw weights: ones for norms, all else normal. Bytes: the weights. The same for a device and a seed."""
        torch.manual_seed(0)
        wholes = joined or {}
        parts = {part for names in wholes.values() for part in names}
        shapes = {name: shape for name, (_, shape) in wanted.items() if name not in parts}
        for whole, names in wholes.items():
            sizes = [wanted[part][1] for part in names]
            shapes[whole] = (sum(size[0] for size in sizes), *sizes[0][1:])
        found = {}
        for name, shape in shapes.items():
            x = torch.empty(shape, dtype=dtype, device=device(name))
            found[name] = x.fill_(1.0) if len(shape) == 1 else x.normal_(std=SPREAD)
        return found


def write_config(folder: Path, shape: str) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", **SHAPES[shape], "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": None,
        "eos_token_id": None,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def engine_of(
    shape: str, method: str | lce.Method, device: torch.device, sharing: lce.Engine | None = None, **options: Any
) -> lce.Engine:
    """Load a drawn model as `lce.load`. Give `sharing` for every engine but a shape's first."""
    before = source.Checkpoint
    source.Checkpoint = Drawn  # type: ignore[assignment,misc]
    try:
        with tempfile.TemporaryDirectory() as folder:
            write_config(Path(folder), shape)
            return lce.load(folder, method, device=device, dtype="bfloat16", sharing=sharing, **options)
    finally:
        source.Checkpoint = before  # type: ignore[misc]


def methods(names: Sequence[str]) -> dict[str, lce.Method]:
    """Return methods by name, for a model without learned maps."""
    return {name: lce.methods.make(name, {"compress": "pca"} if name == "esa" else {}) for name in names}


def published(engine: lce.Engine) -> dict[str, Tensor]:
    """Return an engine's weights by published names, as views."""
    model = engine.setup.model
    wanted, joined = type(model).weights(model.config), type(model).joined(model.config)
    own: dict[str, Tensor] = {"embed": model.embed, "norm": model.final_norm, "head": model.head}
    for layer in model.layers:
        own |= {f"{layer.index}.{name}": x for name, x in layer.w.items()}
    for whole, parts in joined.items():
        own |= dict(zip(parts, own[whole].split([wanted[part][1][0] for part in parts]), strict=True))
    return {name: own[ours] for ours, (name, _) in wanted.items()}


def random_ids(engine: lce.Engine, length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(engine.setup.model.config.vocab_size) for _ in range(length)]


def weight_bytes(engine: lce.Engine) -> int:
    """Return the bytes of weights that a decode step reads: all but the embedding."""
    return sum(x.nbytes for name, x in published(engine).items() if "embed_tokens" not in name)


def attended(method: Any, length: int) -> int:
    """Return the tokens that a decode step attends in each layer and head, in a text of `length` tokens."""
    most = {
        "longheads": lambda: method.chunks * method.chunk_size,
        "infllm": lambda: method.sinks + method.local + method.top_k * method.block_size,
        "esa": lambda: method.sinks + method.local + method.top_k,
    }.get(method.name, lambda: length)()
    return min(length, most)


def attended_bytes(engine: lce.Engine, length: int) -> int:
    """Return the bytes of keys and values that a decode step attends, in all layers, without summaries."""
    config = engine.setup.model.config
    a_token = 2 * config.n_layers * config.n_kv_heads * config.head_dim * engine.setup.dtype.itemsize
    return attended(engine.method, length) * a_token


def prefill_flops(engine: lce.Engine, length: int) -> float:
    """Return the operations of a prefill: two a layer weight and token, and 4 D a query, head and attended key."""
    config = engine.setup.model.config
    layers = sum(x.numel() for name, x in published(engine).items() if ".layers." in name)
    seen = attended(engine.method, length)
    pairs = math.fsum((seen * seen / 2, (length - seen) * seen))
    return 2.0 * layers * length + 4.0 * config.n_layers * config.n_heads * config.head_dim * pairs
