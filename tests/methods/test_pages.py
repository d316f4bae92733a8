"""`pages`: published methods and dense attention as points of its plane, what it refuses, and contexts in files."""

from pathlib import Path
from typing import Any

import pytest
import torch

import lce
from lce.errors import UsageError
from lce.methods import make
from lce.methods.lowdim import LowDimMap, LowDimMaps
from tests import oracle
from tests.checkpoints import tokens
from tests.methods.test_matrix import PLANE
from tests.running import cut, run, vectors

WINDOW, L, N = 32, 4, 200
BLOCKS = [70, *cut(126, 20), 1, 1, 1, 1]
SAME = {"page": L, "budget": 6 * L, "sinks": L, "local": L}


@pytest.mark.parametrize(
    ("name", "theirs", "ours"),
    [
        ("longheads", {"chunks": 6}, {"select": "summary", "place": "side_by_side"}),
        (
            "longheads",
            {"chunks": 6, "share": "group", "top_p": 0.5},
            {"select": "summary", "share": "group", "top_p": 0.5},
        ),
        (
            "longheads",
            {"chunks": 6, "placement": "true", "share": "layer"},
            {"select": "summary", "place": "true", "share": "layer"},
        ),
        (
            "longheads",
            {"chunks": 6, "placement": "constant", "keep_last": False},
            {"select": "summary", "local": 0, "place": "constant"},
        ),
        ("longheads", {"chunks": 3}, {"select": "summary", "budget": 3 * L}),
        ("oracle", {"chunks": 6, "judge": "true"}, {"select": "oracle", "judge": "true"}),
        (
            "oracle",
            {"chunks": 6, "placement": "true", "keep_first": False},
            {"select": "oracle", "place": "true", "sinks": 0},
        ),
        ("random", {"chunks": 6, "seed": 3}, {"select": "random", "seed": 3}),
        ("quest", {}, {"select": "bounds", "place": "true", "sinks": 0, "local": 0}),
        ("reattention", {"span": L, "top_k": 3, "local": 2 * L}, {"select": "best_key"}),
        (
            "reattention",
            {"span": L, "top_k": 3, "local": 2 * L, "share": "group"},
            {"select": "best_key", "share": "group"},
        ),
        ("quest", {"top_p": 0.6}, {"select": "bounds", "place": "true", "sinks": 0, "local": 0, "top_p": 0.6}),
    ],
    ids=str,
)
def test_a_published_method_is_a_point_of_the_plane(name: str, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """To the bit."""
    q, k, v = vectors(3, 8, 2, N, 16)
    sizes = {"page": L, "budget": 6 * L, "dense_layers": 0} if name == "quest" else {"chunk_size": L}
    sizes = {} if name == "reattention" else sizes
    methods = make(name, sizes | theirs), make("pages", {**SAME, **ours})
    published, point = (run(method, q, k, v, BLOCKS, window=WINDOW) for method in methods)
    assert torch.equal(published, point)


@pytest.mark.parametrize(
    ("name", "theirs", "ours"),
    [
        ("full", {}, {"place": "side_by_side", "page": L}),
        ("full", {}, {"place": "true", "page": L}),
        ("rerope", {"local": 9}, {"place": "constant", "page": 1, "local": 8}),
        ("self_extend", {"local": 9, "group": 3}, {"place": "grouped", "page": 1, "local": 8, "group": 3}),
        ("dca", {"chunk_size": 20}, {"place": "dual", "page": L, "chunk_size": 20}),
        ("dca", {}, {"place": "dual", "page": L}),
    ],
    ids=str,
)
def test_everything_selected_is_the_dense_method_of_the_placement(
    name: str, theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    q, k, v = vectors(4, 8, 2, N, 16)
    methods = make(name, theirs), make("pages", {**ours, "budget": N + L})
    dense, pages = (run(method, q, k, v, BLOCKS, window=WINDOW) for method in methods)
    assert (dense - pages).abs().max() <= 1e-4


@pytest.mark.parametrize("place", ["side_by_side", "grouped", "dual"])
@pytest.mark.parametrize("top_p", [None, 0.5])
def test_learned_maps(place: str, top_p: float | None) -> None:
    q, k, v = vectors(5, 8, 2, N, 16)
    random = torch.Generator().manual_seed(1)
    shapes = LowDimMap.shapes(8, 2, 16, 6).items()
    tensors = {name: torch.randn(shape, generator=random) / 8 for name, shape in shapes}
    knobs = {**SAME, "select": "lowdim", "place": place, "low_dim": 6, "top_p": top_p}
    setting = oracle.Setting(WINDOW)
    truth = oracle.attention(q, k, v, oracle.pages(q, k, v, setting, **knobs, maps=tensors), setting)
    method = lce.methods.Pages(**knobs, maps=LowDimMaps([LowDimMap(**tensors)]))  # type: ignore[arg-type]
    for blocks in (BLOCKS, [N]):
        assert (run(method, q, k, v, blocks, window=WINDOW) - truth).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"group": 4}, "group is a knob of place=grouped alone, and place is side_by_side; drop group"),
        ({"chunk_size": 8, "place": "grouped"}, "chunk_size is a knob of place=dual alone, and place is grouped"),
        ({"far": 8}, "far is a knob of place=constant and dual alone, and place is side_by_side; drop far"),
        ({"repr_tokens": 2}, "repr_tokens is a knob of select=representatives alone, and select is bounds; drop"),
        ({"judge": "true", "select": "random"}, "judge is a knob of select=oracle alone"),
        ({"seed": 0}, "seed is a knob of select=random alone"),
        ({"compress": "pca"}, "compress is a knob of select=lowdim alone"),
        ({"low_dim": 8}, "low_dim is a knob of select=lowdim alone"),
        ({"select": "lowdim", "compress": "pca", "share": "head"}, "low-dim keys have the sum .*; give share=layer"),
        ({"select": "lowdim", "compress": "pca", "top_p": 0.5}, "top_p needs scores .*; drop top_p, or give compress="),
        ({"select": "lowdim", "compress": "pca", "maps": "x"}, "compress=pca computes its own maps .*; drop maps"),
        ({"select": "lowdim"}, "this model has no calibrated maps; make them by .* give -o compress=pca"),
        ({"budget": 15, "page": 4, "local": 7}, "budget is 15; expected 16 or more, 4 pages of 4 tokens: lower page, "),
        ({"budget": 3, "page": 2, "sinks": 0, "local": 0}, "budget is 3; expected 4 or more, 2 pages of 2 tokens"),
        ({"place": "dual", "chunk_size": 9, "page": 2}, "chunk_size is 9; expected a multiple of page, 2, and at most"),
        ({"place": "dual", "chunk_size": 66, "page": 2}, "chunk_size is 66; .* and at most the window, 64"),
        ({"place": "dual", "far": 20}, "far is 20; expected 47 or more, or a smaller chunk_size"),
        ({"grows_from": 9}, "grows_from is a knob of growth=sqrt and linear alone, and growth is None; drop"),
        ({"growth": "sqrt", "grows_to": 9, "budget": 16, "page": 2}, "grows_to is 9; expected budget, 16, or more"),
        ({"top_p": 1.5}, "top_p is 1.5; expected a share above 0, at most 1"),
        ({"queries": "page", "top_p": 0.5}, "with queries=page all queries of a page attend as many pages; drop top_p"),
        ({"queries": "page", "growth": "sqrt"}, "with queries=page all queries .* as many pages; drop growth"),
    ],
    ids=str,
)
def test_what_means_nothing_is_refused(knobs: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=f"^pages: {words}") as error:
        make("pages", knobs).resolve(64)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("knobs", "expected", "limit"),
    [
        ({}, {"page": 16, "budget": 2048, "sinks": 16, "local": 16, "share": "head", "group": None, "far": None}, None),
        ({"budget": 4112}, {"budget": 4112}, 4096),
        ({"growth": "sqrt"}, {"budget": 2048, "grows_from": 4096, "grows_to": 4096}, None),
        ({"growth": "sqrt", "grows_to": 8192}, {"grows_from": 4096}, 4096),
        ({"place": "true"}, {"page": 16}, 4096),
        ({"place": "constant", "local": 100}, {"far": 128}, None),
        ({"place": "constant", "far": 4096}, {"local": 16}, 4096),
        ({"place": "grouped"}, {"group": 8}, (4096 - 32 + 4) * 8),
        ({"place": "dual"}, {"chunk_size": 3072, "far": 4095}, None),
        ({"place": "dual", "far": 5000}, {"chunk_size": 3072}, 4096),
        ({"select": "lowdim", "compress": "pca"}, {"share": "layer", "low_dim": 128}, None),
        ({"select": "representatives", "page": 256}, {"repr_tokens": 4, "budget": 2048}, None),
    ],
    ids=str,
)
def test_what_is_left_out_follows_the_window(
    knobs: dict[str, Any], expected: dict[str, Any], limit: int | None
) -> None:
    method = make("pages", knobs).resolve(4096)
    assert {name: getattr(method, name) for name in expected} == expected
    assert method.limit(4096) == limit
    assert method.resolve(4096) == method


@pytest.mark.parametrize("place", ["side_by_side", "grouped"])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8-device"])
def test_queries_of_a_page_choose_alike_in_passes_of_whole_pages(place: str, kv_dtype: str) -> None:
    """Whatever the number of pages in a pass; and not where passes cut pages."""
    q, k, v = vectors(6, 8, 2, 40 * L, 16)
    method = make("pages", {**SAME, "place": place, "queries": "page", "share": "group"})
    whole, blocks, cuts = (
        run(method, q, k, v, blocks, window=WINDOW, kv_dtype=kv_dtype, backend="auto")
        for blocks in ([40 * L], [9 * L, L, *cut(30 * L, 3 * L)], [5, *cut(40 * L - 5, 9 * L)])
    )
    assert (whole - blocks).abs().max() <= 1e-5
    assert (whole - cuts).abs().max() > 1e-2


def test_a_length_at_which_groups_fill_the_window() -> None:
    """The largest distance is the window's last, and one token more needs a larger one."""
    method = make("pages", {"page": 2, "place": "grouped", "group": 3, "local": 4, "budget": 400}).resolve(WINDOW)
    n = method.limit(WINDOW)
    assert n is not None
    q, k, v = vectors(1, 4, 2, n + 1, 8)
    knobs = {name: getattr(method, name) for name in ("page", "place", "group", "local", "budget")}
    tables = oracle.pages(q, k, v, oracle.Setting(WINDOW), **knobs)
    farthest = tables.distance[0].amax(1)
    assert (int(farthest[n - 1]), int(farthest[n])) == (WINDOW - 1, WINDOW)


@pytest.mark.parametrize("knobs", PLANE, ids=lambda knobs: f"{knobs['select']} {knobs['place']}")
@pytest.mark.covering
def test_a_saved_context_goes_on_as_if_it_had_never_stopped(
    knobs: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    engine = lce.load(tiny_model, make("pages", {**knobs, **({"low_dim": 8} if "low_dim" in knobs else {})}), block=32)
    ids = list(dict.fromkeys(tokens(200)))[:110]  # no token twice: of equal keys, rounding would choose one
    whole = engine.generate(ids, max_tokens=6).token_ids
    for n in (20, 101):  # within the budget, and beyond
        path = tmp_path / f"{n}.lce"
        engine.prefill(ids[:n]).save(path)
        other = lce.load(tiny_model, engine.method, block=32)
        assert other.generate(ids[n:], context=other.open_context(path), max_tokens=6).token_ids == whole
