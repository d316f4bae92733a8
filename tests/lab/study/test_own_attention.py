"""Choices, spans and distances are right: a softmax over them at these distances is the method's own output."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lce.lab.study.own_attention import own_attention
from lce.methods import make
from tests.lab.study.recorded import CASES, HEADS, KV_HEADS, PLAIN, WINDOW, tensors, watched

LOOKED = (2, 37, 79, 100, 119)


@pytest.mark.parametrize(("name", "knobs"), [*CASES, *PLAIN], ids=str)
def test_gives_the_output_of_the_method(name: str, knobs: dict[str, Any]) -> None:
    watch, out = watched(name, knobs, LOOKED)
    first, size = make(name, knobs).resolve(WINDOW).choices
    values = tensors()[2]
    heads = torch.arange(HEADS)[:, None]
    for query in LOOKED:
        seen = watch.layers[0].queries[query]
        tokens, weights = own_attention(watch.layers[0], seen, first, size) or pytest.fail("a distance is unknown")
        rows = values[heads * KV_HEADS // HEADS, tokens]  # [H, n, D]
        assert ((weights[..., None] * rows).sum(1) - out[:, query]).abs().max() <= 1e-5
