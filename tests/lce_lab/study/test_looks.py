"""Looks against the definitions: true attention, recalls, ranks and bytes worked out slowly from explicit tables."""

from typing import Any

import pytest
import torch

from lce.methods import Observed, make
from lce_lab.analysis.mass import JUDGES, Judge
from lce_lab.eval.meter import AttentionMeter
from lce_lab.study.looks import looks_of, own_attention, rounded
from tests import oracle
from tests.lce_lab.study.recorded import BLOCKS, CASES, HEADS, KV_HEADS, PLAIN, WINDOW, N, looks_at, tensors, watched
from tests.running import run

LOOKED = (3, 40, 85, 118, 119)
CLOSE = {"abs": 1.01e-4}  # looks have 4 decimals


def test_choices_far_longer_than_the_text_take_no_more_memory() -> None:
    watch, _ = watched("full", {}, LOOKED)
    looks = {size: looks_of(watch, (0, size)) for size in (N, 1 << 50)}
    assert looks[1 << 50] == looks[N]


@pytest.mark.parametrize(("name", "knobs"), [*CASES, *PLAIN], ids=str)
def test_equals_the_definitions(name: str, knobs: dict[str, Any]) -> None:
    for judge in JUDGES:
        looks = looks_at(name, knobs, LOOKED, judge, marks=[(30, 34), (119, 130)])
        q, k, v = tensors()
        setting = oracle.Setting(WINDOW, BLOCKS)
        tables = oracle.DEFINITIONS[name](q, k, v, setting, **knobs)
        truth = oracle.true_mass(q, k, setting, judge)
        first, size = make(name, knobs).resolve(WINDOW).choices
        assert sorted(looks) == list(LOOKED)
        for query, look in looks.items():
            (layer,) = look["layers"]
            for head, found in enumerate(layer["heads"]):
                row, mask = truth[head, query], tables.mask[head, query]
                check_head(layer, found, head, row, mask, first, size, query)
            assert look["bytes"]["full"] == 2 * 2 * 8 * 4 * (query + 1)
            pieces = look["always"][layer["always"]]
            for a, b, near, far in pieces:
                seen = tables.distance.expand(HEADS, -1, -1)[0, query, a:b]
                assert (near, far) == (int(seen.min()), int(seen.max()))


def check_head(layer: Any, found: Any, head: int, row: Any, mask: Any, first: int, size: int, query: int) -> None:
    """One head's look against its true attention `row [N]` and what it attends `mask [N]`."""
    chosen = layer["chosen"][head * len(layer["chosen"]) // HEADS] if layer["chosen"] else []
    shares = [float(row[first + c * size : first + (c + 1) * size].sum()) for c in chosen]
    assert found["mass"] == pytest.approx(shares, **CLOSE)
    assert found["recall"] == pytest.approx(float(row[mask].sum()), **CLOSE)
    assert found["reachable"] >= found["recall"] - 1e-4
    n_chunks = -(-(query + 1 - first) // size)
    masses = [float(row[first + c * size : first + (c + 1) * size].sum()) for c in range(n_chunks)]
    assert [mass for _, mass, _, _ in found["best"]] == pytest.approx(sorted(masses, reverse=True)[:8], **CLOSE)
    for c, mass, _, is_chosen in found["best"]:
        assert (mass, bool(is_chosen)) == (pytest.approx(masses[c], **CLOSE), c in chosen)
    for number, mass, _, share in found["marked"]:
        a, b = ((30, 34), (119, min(130, query + 1)))[number]
        assert mass == pytest.approx(float(row[a:b].sum()), **CLOSE)
        assert share == pytest.approx(float(mask[a:b].float().mean()), **CLOSE)
    assert len(found["marked"]) == (query >= 30) + (query >= 119)


@pytest.mark.parametrize("judge", JUDGES)
def test_why_a_head_misses(judge: Judge) -> None:
    """Scores that are the true attention leave nothing to a better selection; the worst choice leaves much."""
    size, n = 4, 5
    best: dict[str, Any] = {"chunk_size": size, "chunks": n, "judge": judge, "keep_first": False, "keep_last": False}
    for look in looks_at("oracle", best, LOOKED, judge).values():
        for found in look["layers"][0]["heads"]:
            assert found["why"] in (None, "budget")
            assert found["reachable"] == pytest.approx(found["recall"], **CLOSE)
            assert (found["why"] is None) == (found["recall"] >= 0.9)
    worst = {"chunk_size": size, "chunks": n, "rank": "last", "keep_first": False, "local": 0}
    looks = looks_at("longheads", worst, LOOKED, judge).values()
    assert "selection" in [found["why"] for look in looks for found in look["layers"][0]["heads"]]


@pytest.mark.parametrize(("name", "knobs"), [*CASES, ("full", {})], ids=str)
def test_bytes_are_those_of_lce_eval_selection(name: str, knobs: dict[str, Any]) -> None:
    measured = AttentionMeter()
    measured.begin(0, LOOKED)
    run(Observed(make(name, knobs), measured), *tensors(), BLOCKS, window=WINDOW)
    expected = measured.end()
    counts = [look["bytes"] for look in looks_at(name, knobs, LOOKED).values()]
    sums = {key: sum(each[key] for each in counts) / len(counts) for key in ("read", "scored", "full")}
    full = {"read": expected.read_bytes, "scored": expected.scored_bytes, "full": expected.full_bytes}
    assert sums == pytest.approx(full)


def test_rounded() -> None:
    assert rounded(torch.tensor([0.123456, 0.0])) == [0.1235, 0.0]
    assert rounded(torch.tensor([123.456, -0.04, float("nan")]), digits=4) == [123.5, -0.0, None]


@pytest.mark.parametrize(("name", "knobs"), [*CASES, *PLAIN], ids=str)
def test_own_attention_gives_the_output_of_the_method(name: str, knobs: dict[str, Any]) -> None:
    watch, out = watched(name, knobs, (2, 37, 79, 100, 119))
    first, size = make(name, knobs).resolve(WINDOW).choices
    values = tensors()[2]
    heads = torch.arange(HEADS)[:, None]
    for query in (2, 37, 79, 100, 119):
        seen = watch.layers[0].queries[query]
        tokens, weights = own_attention(watch.layers[0], seen, first, size) or pytest.fail("a distance is unknown")
        rows = values[heads * KV_HEADS // HEADS, tokens]  # [H, n, D]
        assert ((weights[..., None] * rows).sum(1) - out[:, query]).abs().max() <= 1e-5
