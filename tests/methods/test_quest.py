"""Quest: what its score promises, and its knobs."""

from __future__ import annotations

import pytest
import torch

import lce
from lce.cache.layout import CacheLayout
from lce.errors import UsageError
from lce.methods import Quest
from tests.running import vectors

WINDOW = 64


def test_defaults_follow_the_window() -> None:
    assert Quest().resolve(4096) == Quest(page=16, budget=1024, dense_layers=2)
    assert Quest().resolve(32).budget == 32, "two pages at least"


def test_knobs_that_cannot_work() -> None:
    for knobs, words in (
        ({"page": 0}, "page is 0; expected 1 or more"),
        ({"dense_layers": -1}, "dense_layers is -1; expected 0 or more"),
        ({"budget": 31}, "budget is 31; expected two pages of 16 tokens or more"),
    ):
        with pytest.raises(UsageError, match=words):
            Quest(**knobs).resolve(WINDOW)


def test_no_key_answers_better_than_its_page_promises() -> None:
    """The score is an upper bound of `q · k`, and is reached where a page has one key."""
    q, k, v = vectors(1, 8, 2, 60, 16)
    pages = k.unflatten(1, (12, 5))
    quest = Quest(page=5)
    summary = quest.summarise(q[:, :0], pages, v.unflatten(1, (12, 5)), None)  # type: ignore[arg-type]
    score = quest.score(q, summary, None, 0)  # type: ignore[arg-type]
    logits = torch.einsum("htd,hmld->html", q, pages.repeat_interleave(4, 0))
    assert (logits.amax(-1) <= score + 1e-4).all()
    single = quest.summarise(q[:, :0], k[:, :, None], v[:, :, None], None)  # type: ignore[arg-type]
    exact = q @ k.repeat_interleave(4, 0).mT
    torch.testing.assert_close(quest.score(q, single, None, 0), exact, rtol=0, atol=1e-4)  # type: ignore[arg-type]


def test_the_first_layers_attend_everything() -> None:
    q, k, v = vectors(2, 4, 2, 300, 16)
    full = lce.methods.run("full", q, k, v, window=WINDOW)
    assert torch.equal(lce.methods.run(Quest(dense_layers=1), q, k, v, window=WINDOW), full)
    assert not torch.allclose(lce.methods.run(Quest(dense_layers=0), q, k, v, window=WINDOW), full, atol=1e-2)


def test_what_is_kept_is_two_numbers_a_channel_and_page() -> None:
    method = Quest(dense_layers=0).resolve(WINDOW)
    assert set(method.state(_layout())) == {"summaries"}
    assert method.state(_layout())["summaries"].most_bytes(16_000, 512) == 1500 * 2 * 2 * 16 * 4


def _layout() -> CacheLayout:
    return CacheLayout(1, 4, 2, 16, torch.float32, torch.device("cpu"))
