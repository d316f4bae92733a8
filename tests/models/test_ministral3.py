"""Ministral 3 against transformers, over texts that are several times the window before scaling."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Ministral3Config

import lce
from tests.parity import FamilyTests, Kind, rope, save_kind


def ministral(beta: float = 0.1, factor: float = 16.0, original: int = 16, **values: float) -> dict[str, Any]:
    """The published scaling, with a window of 16 or so before it."""
    known = {"mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": original} | values
    return rope("yarn", 1e6, type="yarn", factor=factor, llama_4_scaling_beta=beta, **known)


MINISTRAL = {"head_dim": 24, "max_position_embeddings": 256, "sliding_window": None, **ministral()}
KINDS = {
    "ministral-3": Kind(Ministral3Config, MINISTRAL, ministral(beta=0.0)),
    "multi-head": Kind(Ministral3Config, {"num_key_value_heads": 4, **MINISTRAL}, ministral(beta=0.0)),
    "ministral-3-3b": Kind(Ministral3Config, {"tie_word_embeddings": True, **MINISTRAL}, ministral(factor=2.0)),
    "strong": Kind(Ministral3Config, MINISTRAL | ministral(beta=0.5, original=40), ministral(beta=0.5, original=41)),
    "yarn-scale": Kind(Ministral3Config, MINISTRAL | ministral(mscale_all_dim=0.0), ministral()),
    "sliding-window": Kind(Ministral3Config, MINISTRAL | {"sliding_window": 24}, {"sliding_window": 23}),
}


class TestMinistral3(FamilyTests):
    kinds = KINDS
    greedy = ("ministral-3", "strong")
    refused = tuple(
        ({"rope_parameters": ministral()["rope_parameters"] | {key: value}}, f"rope_parameters: {message}")
        for key, value, message in (
            ("llama_4_scaling_beta", None, "llama_4_scaling_beta is None; expected a number from 0 to 100"),
            ("llama_4_scaling_beta", "0.1", "llama_4_scaling_beta is '0.1'; expected a number from 0 to 100"),
            ("original_max_position_embeddings", None, "original_max_position_embeddings is None; expected a whole nu"),
        )
    )


def test_queries_grow_with_their_index_in_the_text(tmp_path: Path) -> None:
    """One token everywhere: the queries of the first layer differ by 1 + beta ln(1 + i // 16) alone."""
    save_kind(tmp_path, KINDS["ministral-3"])
    model = lce.load(tmp_path).setup.model
    seen: list[Tensor] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append(q)
        return torch.zeros_like(q)

    for start, n in ((0, 40), (40, 1), (1_600_000, 3)):
        x = model.embedded(torch.zeros(n, dtype=torch.int64))
        model(x, model.attending(attend, torch.arange(start, start + n)))
    queries = torch.cat(seen[::2], dim=1)  # [H, 44, D], of the first layer
    indices = [*range(41), 1_600_000, 1_600_001, 1_600_002]
    expected = torch.tensor([1 + 0.1 * math.log(1 + i // 16) for i in indices])
    torch.testing.assert_close(queries, queries[:, :1] * expected[:, None])
