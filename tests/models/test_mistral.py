"""Mistral against transformers: sliding window, none, and Nemo's narrow heads."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import MistralConfig

from tests.parity import (
    PLAIN,
    Kind,
    Saved,
    assert_bfloat16_as_close,
    assert_kind_matters,
    assert_same_greedy_tokens,
    assert_same_logits,
    rope,
    save_kind,
)

MISTRAL = {"sliding_window": None, **rope("default", 1e6)}
KINDS = {
    "mistral-0.1": Kind(MistralConfig, {"sliding_window": 24, **PLAIN}, {"sliding_window": 23}),
    "mistral-0.3": Kind(MistralConfig, MISTRAL, {"sliding_window": 60}),
    "nemo": Kind(MistralConfig, {"head_dim": 24, **MISTRAL}, PLAIN),
}


@pytest.fixture(scope="module", params=KINDS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save_kind(tmp_path_factory.mktemp(request.param), KINDS[request.param])


def test_same_logits_as_transformers(saved: Saved) -> None:
    assert_same_logits(saved)


def test_what_makes_the_kind_makes_a_difference(saved: Saved, tmp_path: Path) -> None:
    assert_kind_matters(saved, tmp_path / "edited")


def test_bfloat16_stays_as_close_as_transformers(saved: Saved, tmp_path: Path) -> None:
    assert_bfloat16_as_close(tmp_path, saved)


@pytest.mark.parametrize("name", ["mistral-0.1", "nemo"])
def test_greedy_tokens_as_transformers_generates(name: str, tmp_path: Path) -> None:
    assert_same_greedy_tokens(tmp_path, KINDS[name])
