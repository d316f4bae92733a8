"""A made model whose layers are of several kinds: sliding windows with a RoPE of their own, no rotation, and plain."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lce
from lce.models.config import Fields, LayerKind, ModelConfig, RopeConfig
from lce.models.llama import Llama
from tests import oracle
from tests.checkpoints import save_tiny
from tests.parity import oracle_logits
from tests.running import cut

WINDOW, SLIDING, THETA = 32, 9, 1000.0
SLIDES = LayerKind(SLIDING, RopeConfig(theta=100.0))
KINDS = (SLIDES, LayerKind(), SLIDES, LayerKind(rotated=False), LayerKind(2 * SLIDING))
ACTING = (1, 3)  # the layers in which a method acts
METHODS: dict[str, dict[str, Any]] = {"full": {}, "dca": {"chunk_size": 10}}
METHODS |= {
    "longheads": {"chunk_size": 4, "chunks": 5},
    "esa": {"sinks": 4, "local": 12, "top_k": 9, "compress": "none"},
}


@contextmanager
def of_kinds(kinds: Sequence[LayerKind] = KINDS) -> Iterator[None]:
    """Llama configs have these kinds of layers."""

    def configure(cls: type, config: ModelConfig, fields: Fields) -> ModelConfig:
        return replace(config, layer_kinds=tuple(kinds))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Llama, "configure", classmethod(configure))
        patch.setattr(Llama, "implements", ("layer_types",))
        yield


def save_made(folder: Path, **changes: Any) -> Path:
    """A random model of as many layers as `KINDS` has."""
    sizes = {"num_hidden_layers": len(KINDS), "max_position_embeddings": WINDOW, "rope_theta": THETA}
    return save_tiny(folder, **sizes | changes)


def load(folder: Path, name: str, **options: Any) -> lce.Engine:
    return lce.load(folder, lce.methods.make(name, METHODS[name]), **options)


def true_logits(engine: lce.Engine, ids: Sequence[int], name: str, block: int, stretch: float = 1.0) -> Tensor:
    """The logits `[N, vocab]` of a text by explicit masks and distances, layer by layer, without a cache.

    Rotated layers without a sliding window have positions divided by `stretch`.
    """

    def setting(kind: LayerKind, dim: int) -> oracle.Setting:
        theta = THETA if kind.rope is None else kind.rope.theta
        frequencies = torch.tensor([theta ** (-2 * i / dim) for i in range(dim // 2)], dtype=torch.float64)
        frequencies *= (1 / stretch if kind.sliding_window is None else 1) * kind.rotated
        blocks = cut(len(ids), block)
        return oracle.Setting(WINDOW, blocks, frequencies=frequencies, sliding_window=kind.sliding_window)

    return oracle_logits(engine, ids, setting, **METHODS[name])


def attended(n: int, size: int) -> int:
    """The query-key pairs of n queries, each of which sees `size` tokens at most."""
    return sum(min(i + 1, size) for i in range(n))
