"""The cut of a choice to a share of the mass, on numbers worked out by hand, and the knob."""

import math

import pytest
import torch

from lce.methods import make
from lce.methods.budget import enough, keep_best, prune
from tests.running import run, vectors

INF = math.inf


@pytest.mark.parametrize(("p", "expected"), [(0.5, 1), (0.6, 1), (0.61, 2), (0.9, 2), (0.95, 3), (1.0, 3)])
def test_enough_is_the_fewest_that_reach_the_share(p: float, expected: int) -> None:
    """Masses 6, 3, 1."""
    masses = torch.tensor([3.0, 1.0, 6.0, 0.0]).log()
    assert enough(masses, torch.tensor([2, 0, 1]), p) == expected


def test_what_does_not_reach_the_share_is_taken_whole() -> None:
    assert enough(torch.tensor([1.0, 1.0, 98.0]).log(), torch.tensor([0, 1]), 0.5) == 2


@pytest.mark.parametrize(
    ("p", "forced", "expected"),
    [
        (0.3, [], [[1, -1, -1], [3, -1, -1]]),
        (0.7, [], [[1, 3, -1], [3, -1, -1]]),
        (0.3, [0], [[0, 1, -1], [0, 3, -1]]),  # what is forced counts first, and is not enough
        (0.05, [0], [[0, -1, -1], [0, 3, -1]]),
        (1.0, [], [[0, 1, 3], [0, 1, 3]]),
    ],
)
def test_a_choice_is_cut_to_its_best(p: float, forced: list[int], expected: list[list[int]]) -> None:
    """Two queries; chunk 4 is after both of them."""
    masses = torch.tensor([[[0.1, 0.5, 0.0, 0.4, 9.0], [0.01, 0.09, 0.0, 0.9, 9.0]]])
    scores = masses.log()
    scores[..., 4] = -INF
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[:, forced] = True
    chosen = torch.tensor([[[0, 1, 3], [0, 1, 3]]])
    assert prune(chosen, scores, scores, mask, p).tolist() == [expected]


def test_nothing_to_choose_from_stays_nothing() -> None:
    none, scores = torch.tensor([[[-1, -1]]]), torch.full((1, 1, 2), -INF)
    assert prune(none, scores, scores, torch.zeros(1, 2, dtype=torch.bool), 0.5).tolist() == none.tolist()


def test_the_best_of_a_choice_are_kept() -> None:
    """Two queries keep two and three of four chunks; the chunk that is forced counts first."""
    scores = torch.tensor([[[0.1, 0.5, 0.2, 0.4], [0.1, 0.5, 0.2, 0.4]]])
    mask = torch.zeros(2, 4, dtype=torch.bool)
    mask[:, 0] = True
    chosen = torch.tensor([[[0, 1, 3], [0, 1, 2]]])
    found = keep_best(chosen, scores, mask, torch.tensor([2, 3]))
    assert found.tolist() == [[[0, 1, -1], [0, 1, 2]]]


SELECTORS = {
    "longheads": {"chunk_size": 4},
    "oracle": {"chunk_size": 4},
    "quest": {"dense_layers": 0, "page": 4, "budget": 100},
    "infllm": {"block_size": 4, "sinks": 4, "top_k": 9},
    "esa": {"compress": "none", "sinks": 4, "top_k": 39},
}


@pytest.mark.parametrize(("name", "knobs"), SELECTORS.items(), ids=SELECTORS)
def test_the_whole_mass_is_the_budget_alone(name: str, knobs: dict[str, object]) -> None:
    q, k, v = vectors(1, 4, 2, 120, 8)
    plain, whole = (run(make(name, {**knobs, **p}), q, k, v, [60, 59, 1], window=32) for p in ({}, {"top_p": 1.0}))
    assert (whole - plain).abs().max() <= 1e-5  # `plain` attends densely while a query sees all


@pytest.mark.parametrize(("name", "knobs"), SELECTORS.items(), ids=SELECTORS)
def test_less_mass_is_fewer_choices(name: str, knobs: dict[str, object]) -> None:
    q, k, v = vectors(1, 4, 2, 120, 8)

    def chosen(p: float) -> int:
        found: list[torch.Tensor] = []
        method = make(name, {**knobs, "top_p": p})
        run(method, q, k, v, [60, 60], window=32, note=lambda _, some: found.append(some))
        return sum(int((some >= 0).sum()) for some in found)

    assert 0 < chosen(0.1) < chosen(0.5) < chosen(1.0)


def test_steps_of_a_share_are_not_recorded() -> None:
    assert make("longheads").promised("recorded")
    assert not make("longheads", {"top_p": 0.5}).promised("recorded")
