"""What watched queries attend, against tables worked out from the definitions and by hand."""

from itertools import product
from typing import Any

import pytest
import torch

from lce.errors import UsageError
from lce.methods import Method, Observed, make
from lce_lab.analysis.mass import JUDGES, Judge
from lce_lab.eval.meter import AttentionMeter, States, cover_and_gini
from lce_lab.eval.record import Attended
from tests import oracle
from tests.running import run, vectors

WINDOW, N, ITEM = 32, 120, 4
KV = 2 * 8 * ITEM  # bytes of a token's key and value of one KV head
CASES: list[tuple[str, dict[str, Any]]] = [
    ("longheads", {"chunk_size": 4, "chunks": 5}),
    ("longheads", {"chunk_size": 4, "chunks": 5, "share": "layer"}),
    ("quest", {"dense_layers": 0, "page": 4, "budget": 20}),
    ("infllm", {"block_size": 4, "sinks": 4, "top_k": 3}),
    ("esa", {"compress": "none", "sinks": 4, "top_k": 8}),
    ("full", {}),
    ("streaming", {}),
]


def seen(
    method: Method, judge: Judge, states: States = "own", facts: Any = (), positions: Any = None
) -> tuple[Attended, torch.Tensor]:
    meter = AttentionMeter(judge, states)
    meter.begin(100, positions, facts)
    out = run(Observed(method, meter), *vectors(3, 4, 2, N, 8), [80, 39, 1], window=WINDOW)
    return meter.end(), out


@pytest.mark.parametrize("judge", JUDGES)
@pytest.mark.parametrize(("name", "knobs"), CASES, ids=str)
def test_equals_the_definitions(name: str, knobs: dict[str, Any], judge: Judge) -> None:
    found, out = seen(make(name, knobs), judge, facts=[(10, 14), (50, 51)])
    q, k, v = vectors(3, 4, 2, N, 8)
    setting = oracle.Setting(WINDOW, [80, 39, 1])
    mask = oracle.DEFINITIONS[name](q, k, v, setting, **knobs).mask[:, 100:]
    truth = oracle.true_mass(q, k, setting, judge)[:, 100:]
    assert found.queries == 20
    assert torch.tensor(found.recall[0]).sub((truth * mask).sum(-1).mean(-1)).abs().max() <= 1e-5
    assert found.tokens[0] == pytest.approx(mask.sum(-1).float().mean(-1).tolist())
    fact = (mask[..., 10:14].float().mean(-1) + mask[..., 50].float()) / 2
    assert found.fact[0] == pytest.approx(fact.mean(-1).tolist())
    assert found.read_bytes == pytest.approx(float(mask.unflatten(0, (2, 2)).any(1).sum()) / 20 * KV)
    assert found.full_bytes == pytest.approx(sum(range(101, N + 1)) / 20 * 2 * KV)
    assert torch.equal(out, run(make(name, knobs), q, k, v, [80, 39, 1], window=WINDOW)), "watching changes nothing"


def test_what_choices_are_made_by_costs_bytes() -> None:
    scored = {
        "longheads": 2 * 8 * ITEM * sum(n // 4 for n in range(101, 121)) / 20,  # a vector a KV head and chunk
        "quest": 2 * 2 * 8 * ITEM * sum(n // 4 for n in range(101, 121)) / 20,
        "esa": 2 * 8 * ITEM * sum(n - 16 - 4 for n in range(100, 120)) / 20,  # the keys between, all heads
        "full": 0,
    }
    found = {name: seen(make(name, knobs), "true")[0].scored_bytes for name, knobs in CASES if name in scored}
    assert found == pytest.approx(scored)


def test_hits_are_ranks_of_scores() -> None:
    """The oracle's scores are the true mass, so its best chunk is the heaviest one."""
    method = make("oracle", {"chunk_size": 4, "chunks": 5, "judge": "true"})
    fact = (40, 46)  # chunks 10 and 11
    found, _ = seen(method, "true", facts=[fact])
    q, k, _ = vectors(3, 4, 2, N, 8)
    mass = oracle.true_mass(q, k, oracle.Setting(WINDOW), "true")[:, 100:].unflatten(-1, (-1, 4)).sum(-1)
    hits = torch.zeros(2, 4)
    for h, t in product(range(4), range(20)):
        order = mass[h, t, : (100 + t) // 4].argsort(descending=True).tolist()
        rank = min(order.index(chunk) for chunk in (10, 11))
        hits[:, h] += torch.tensor([rank < 1, rank < 5]) / 20
    assert [found.hit1[0], found.hit5[0]] == [pytest.approx(each) for each in hits.tolist()]
    assert 0 < sum(found.hit1[0]) < sum(found.hit5[0])


@pytest.mark.parametrize(
    ("times", "cover", "gini"),
    [([1, 1, 1, 1], 1.0, 0.0), ([2, 2, 0, 0], 0.5, 0.5), ([0, 0, 0, 4], 0.25, 0.75), ([1, 3], 1.0, 0.25), ([], 0, 0)],
    ids=str,
)
def test_cover_and_gini(times: list[int], cover: float, gini: float) -> None:
    assert cover_and_gini(torch.tensor(times)) == pytest.approx((cover, gini))


def test_cover_counts_the_choices_of_all_heads() -> None:
    """One query of four heads; five chunks in all, two of them forced, out of 25 and 29 that it could choose."""
    notes: list[torch.Tensor] = []
    method = make("longheads", {"chunk_size": 4, "chunks": 5})
    found, _ = seen(method, "true", positions=[103, 119])
    run(method, *vectors(3, 4, 2, N, 8), [N], window=WINDOW, note=lambda _, chosen: notes.append(chosen))
    spread = [torch.bincount(notes[0][:, i].flatten(), minlength=i // 4) for i in (103, 119)]
    expected = [sum(x) / 2 for x in zip(*(cover_and_gini(times) for times in spread), strict=True)]
    assert (found.queries, found.cover, found.gini) == pytest.approx((2, *expected))
    assert expected[0] < 0.5


def test_states_of_the_judge_are_full_attention() -> None:
    q, k, v = vectors(3, 4, 2, N, 8)
    for judge in JUDGES:
        truth = oracle.true_mass(q, k, oracle.Setting(WINDOW), judge) @ v.double().repeat_interleave(2, 0)
        for name in ("longheads", "esa"):
            _, out = seen(make(name, dict(CASES)[name]), judge, "judge")
            assert (out - truth).abs().max() <= 1e-4


def test_low_dim_scores_find_a_share_of_the_best() -> None:
    """All of them with as many dimensions as keys have; fewer with fewer."""

    def share(low_dim: int) -> float:
        found, _ = seen(make("esa", {"compress": "pca", "low_dim": low_dim, "sinks": 4, "top_k": 8}), "true")
        return found.found[0]

    assert share(16) >= 0.9
    assert share(2) < share(8) < share(16) + 1e-9


def test_a_method_that_does_not_say_is_refused() -> None:
    with pytest.raises(UsageError, match="lm_infinite does not say which tokens it always attends"):
        seen(make("lm_infinite", {"sinks": 3, "local": 16, "top_k": 5}), "true")


def test_nothing_watched_is_an_error() -> None:
    with pytest.raises(UsageError, match="no query was watched"):
        AttentionMeter().end()
