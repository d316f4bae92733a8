"""A made model whose layers are of several kinds: sliding windows with a RoPE of their own, no rotation, and global."""

from collections.abc import Iterator, Mapping, Sequence
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
from tests.running import cut

WINDOW, SLIDING, THETA = 32, 9, 1000.0
KINDS = (
    LayerKind(SLIDING, RopeConfig(theta=100.0)),
    LayerKind(),
    LayerKind(SLIDING, RopeConfig(theta=100.0)),
    LayerKind(rotated=False),
    LayerKind(2 * SLIDING),
)
GLOBAL = (1, 3)


@contextmanager
def of_kinds(kinds: Sequence[LayerKind] = KINDS) -> Iterator[None]:
    """Llama configs have these kinds of layers."""

    def configure(cls: type, config: ModelConfig, fields: Fields) -> ModelConfig:
        return replace(config, layer_kinds=tuple(kinds))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Llama, "configure", classmethod(configure))
        yield


def save_made(folder: Path, **changes: Any) -> Path:
    """A random model of as many layers as `KINDS` has."""
    sizes = {"num_hidden_layers": len(KINDS), "max_position_embeddings": WINDOW, "rope_theta": THETA}
    return save_tiny(folder, **sizes | changes)


def true_logits(engine: lce.Engine, ids: Sequence[int], name: str, knobs: Mapping[str, Any], block: int) -> Tensor:
    """The logits of a text by explicit masks and distances, layer by layer, without a cache: `[N, vocab]`."""
    config, indices = engine.model.config, torch.arange(len(ids))
    blocks = cut(len(ids), block)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kind, dim = config.layer_kinds[layer], q.shape[-1]
        theta = THETA if kind.rope is None else kind.rope.theta
        frequencies = torch.tensor([theta ** (-2 * i / dim) if kind.rotated else 0.0 for i in range(dim // 2)])
        setting = oracle.Setting(WINDOW, blocks, frequencies=frequencies, sliding_window=kind.sliding_window)
        if kind.sliding_window is None:
            tables = oracle.DEFINITIONS[name](q, k, v, setting, **knobs)
        else:
            tables = oracle.full(q, k, v, setting)
        return oracle.attention(q, k, v, tables, setting).to(q.dtype)

    with torch.inference_mode():
        return engine.model.logits(engine.model(torch.tensor(ids), indices, attend))
