"""`pages`: published methods and dense attention as points of its plane, what it refuses, and contexts in files."""

from pathlib import Path
from typing import Any

import pytest
import torch

import lce
from lce.errors import UsageError
from lce.methods import make, settings
from lce.methods.lowdim import LowDimMap, LowDimMaps
from tests import oracle
from tests.checkpoints import tokens
from tests.methods.test_matrix import PLANE
from tests.running import as_knobs, cut, low_dim_map, run, vectors

WINDOW, L, N = 32, 4, 200
BLOCKS = [70, *cut(126, 20), 1, 1, 1, 1]
SAME = {"page": L, "budget": 6 * L, "budget.sinks": L, "budget.local": L}


@pytest.mark.parametrize(
    ("name", "theirs", "ours"),
    [
        ("longheads", "chunks=6 summary=values share=head", "select=summary"),
        ("longheads", "chunks=6", "select=summary select.of=keys share=group"),
        ("longheads", "chunks=6 top_p=0.5 share=head", "select=summary select.of=keys budget.top_p=0.5"),
        (
            "longheads",
            "chunks=6 placement=true share=layer",
            "select=summary select.of=keys placement=true share=layer",
        ),
        (
            "longheads",
            "chunks=6 placement=constant summary=values local=0",
            "select=summary share=group budget.local=0 placement=constant",
        ),
        ("longheads", "chunks=3 summary=values share=head", "select=summary budget=12"),
        ("oracle", "chunks=6 judge=true", "select=oracle select.judge=true"),
        ("oracle", "chunks=6 placement=true keep_first=False", "select=oracle placement=true budget.sinks=0"),
        ("random", "chunks=6 seed=3", "select=random select.seed=3"),
        ("quest", "", "select=bounds placement=true budget.sinks=0 budget.local=0"),
        ("reattention", "span=4 top_k=3 local=8", "select=best_key"),
        ("reattention", "span=4 top_k=3 local=8 share=group", "select=best_key share=group"),
        ("quest", "top_p=0.6", "select=bounds placement=true budget.sinks=0 budget.local=0 budget.top_p=0.6"),
    ],
    ids=str,
)
def test_a_published_method_is_a_point_of_the_plane(name: str, theirs: str, ours: str) -> None:
    """To the bit."""
    q, k, v = vectors(3, 8, 2, N, 16)
    sizes = {"quest": {"page": L, "budget": 6 * L, "dense_layers": 0}, "reattention": {}}.get(name, {"chunk_size": L})
    methods = make(name, sizes | as_knobs(theirs)), make("pages", SAME | as_knobs(ours))
    published, point = (run(method, q, k, v, BLOCKS, window=WINDOW) for method in methods)
    assert torch.equal(published, point)


@pytest.mark.parametrize(
    ("name", "theirs", "ours"),
    [
        ("full", "", "placement=side_by_side page=4"),
        ("full", "", "placement=true page=4"),
        ("rerope", "local=9", "placement=constant page=1 budget.local=8"),
        ("self_extend", "local=9 group=3", "placement=grouped page=1 budget.local=8 placement.group=3"),
        ("dca", "chunk_size=20", "placement=dual page=4 placement.chunk_size=20"),
        ("dca", "", "placement=dual page=4"),
    ],
    ids=str,
)
def test_everything_selected_is_the_dense_method_of_the_placement(name: str, theirs: str, ours: str) -> None:
    q, k, v = vectors(4, 8, 2, N, 16)
    methods = make(name, as_knobs(theirs)), make("pages", as_knobs(ours) | {"budget": N + L})
    dense, pages = (run(method, q, k, v, BLOCKS, window=WINDOW) for method in methods)
    assert (dense - pages).abs().max() <= 1e-4


@pytest.mark.parametrize("place", ["side_by_side", "grouped", "dual"])
@pytest.mark.parametrize("top_p", [None, 0.5])
def test_learned_maps(place: str, top_p: float | None) -> None:
    q, k, v = vectors(5, 8, 2, N, 16)
    tensors = {name: x / 8 for name, x in low_dim_map(8, 2, 16, 6, seed=1).tensors().items()}
    knobs = {**SAME, "select": "lowdim", "placement": place, "select.low_dim": 6, "budget.top_p": top_p}
    setting = oracle.Setting(WINDOW)
    truth = oracle.attention(q, k, v, oracle.pages(q, k, v, setting, **knobs, maps=tensors), setting)
    method = make("pages", {**knobs, "select.maps": LowDimMaps([LowDimMap(**tensors)])})
    for blocks in (BLOCKS, [N]):
        assert (run(method, q, k, v, blocks, window=WINDOW) - truth).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ("placement.group=4", "placement.group is a knob of placement=grouped alone, and placement is side_by_side; "),
        ("placement.chunk_size=8 placement=grouped", "placement.chunk_size is a knob of .*=dual alone, .* is grouped;"),
        ("placement.far=8", "placement.far is a knob of placement=constant and dual alone, and placement is side_by"),
        ("select.repr_tokens=2", "select.repr_tokens is a knob of select=representatives alone, and select is bound"),
        ("select.judge=true select=random", "select.judge is a knob of select=oracle alone"),
        ("select.seed=0", "select.seed is a knob of select=random alone"),
        ("select.compress=pca", "select.compress is a knob of select=lowdim alone"),
        ("select.low_dim=8", "select.low_dim is a knob of select=lowdim alone"),
        ("select=lowdim select.compress=pca share=head", "low-dim keys have the sum .*; give share=layer"),
        ("select=lowdim select.compress=pca budget.top_p=0.5", "budget.top_p needs .*; drop .*, or give select.c"),
        ("select=lowdim select.compress=pca select.maps=x", "select.compress=pca computes its .*; drop sel"),
        ("select=lowdim", "this model has no calibrated maps; make them by .* give -o select.compress=p"),
        ("budget=15 page=4 budget.local=7", "budget is 15; expected 16 or more, 4 pages of 4 tokens: lower "),
        ("budget=3 page=2 budget.sinks=0 budget.local=0", "budget is 3; expected 4 or more, 2 pages of 2 tokens"),
        ("placement=dual page=2 placement.chunk_size=9", ".*chunk_size is 9; expected a multiple of page, 2"),
        ("placement=dual page=2 placement.chunk_size=66", "placement.chunk_size is 66; .* and at most the window, 64"),
        ("placement=dual placement.far=20", "placement.far is 20; expected 47 or more, or a smaller placement"),
        ("budget.grows_from=9", "budget.grows_from is a knob of budget.growth=sqrt and linear alone, and budget.gro"),
        ("budget.growth=sqrt budget.grows_to=9 budget=16 page=2", "budget.grows_to is 9; expected budget, 16, or more"),
        ("budget.top_p=1.5", "budget.top_p is 1.5; expected a share above 0, at most 1"),
        ("queries=page budget.top_p=0.5", "with queries=page all .* attend as many pages; drop budget.top_p"),
        ("queries=page budget.growth=sqrt", "with queries=page all .* as many pages; drop budget.growth"),
    ],
    ids=str,
)
def test_what_means_nothing_is_refused(knobs: str, words: str) -> None:
    with pytest.raises(UsageError, match=f"^pages: {words}") as error:
        make("pages", as_knobs(knobs)).resolve(64)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("knobs", "expected", "limit"),
    [
        ("", "page=16 budget=2048 budget.sinks=16 budget.local=16 share=head placement.group=None", None),
        ("budget=4112", "budget=4112", 4096),
        ("budget.growth=sqrt", "budget=2048 budget.grows_from=4096 budget.grows_to=4096", None),
        ("budget.growth=sqrt budget.grows_to=8192", "budget.grows_from=4096", 4096),
        ("placement=true", "page=16 placement.far=None", 4096),
        ("placement=constant budget.local=100", "placement.far=128", None),
        ("placement=constant placement.far=4096", "budget.local=16", 4096),
        ("placement=grouped", "placement.group=8", (4096 - 32 + 4) * 8),
        ("placement=dual", "placement.chunk_size=3072 placement.far=4095", None),
        ("placement=dual placement.far=5000", "placement.chunk_size=3072", 4096),
        ("select=lowdim select.compress=pca", "share=layer select.low_dim=128", None),
        ("select=representatives page=256", "select.repr_tokens=4 budget=2048", None),
    ],
    ids=str,
)
def test_what_is_left_out_follows_the_window(knobs: str, expected: str, limit: int | None) -> None:
    method = make("pages", as_knobs(knobs)).resolve(4096)
    assert {name: settings(method).get(name) for name in as_knobs(expected)} == as_knobs(expected)
    assert method.limit(4096) == limit
    assert method.resolve(4096) == method


@pytest.mark.parametrize("place", ["side_by_side", "grouped"])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8-device"])
def test_queries_of_a_page_choose_alike_in_passes_of_whole_pages(place: str, kv_dtype: str) -> None:
    """Whatever the number of pages in a pass; and not where passes cut pages."""
    q, k, v = vectors(6, 8, 2, 40 * L, 16)
    method = make("pages", {**SAME, "placement": place, "queries": "page", "share": "group"})
    whole, blocks, cuts = (
        run(method, q, k, v, blocks, window=WINDOW, kv_dtype=kv_dtype, backend="auto")
        for blocks in ([40 * L], [9 * L, L, *cut(30 * L, 3 * L)], [5, *cut(40 * L - 5, 9 * L)])
    )
    assert (whole - blocks).abs().max() <= 1e-5
    assert (whole - cuts).abs().max() > 1e-2


def test_a_length_at_which_groups_fill_the_window() -> None:
    """The largest distance is the window's last, and one token more needs a larger one."""
    spelled = as_knobs("page=2 placement=grouped placement.group=3 budget.local=4 budget=400")
    method = make("pages", spelled).resolve(WINDOW)
    n = method.limit(WINDOW)
    assert n is not None
    q, k, v = vectors(1, 4, 2, n + 1, 8)
    knobs = {name: x for name, x in settings(method).items() if name not in ("select", "share")}
    tables = oracle.pages(q, k, v, oracle.Setting(WINDOW), **knobs)
    farthest = tables.distance[0].amax(1)
    assert (int(farthest[n - 1]), int(farthest[n])) == (WINDOW - 1, WINDOW)


@pytest.mark.parametrize("knobs", PLANE, ids=lambda knobs: f"{knobs['select']} {knobs['placement']}")
@pytest.mark.covering
def test_a_saved_context_goes_on_as_if_it_had_never_stopped(
    knobs: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    fits = {"select.low_dim": 8} if "select.low_dim" in knobs else {}
    engine = lce.load(tiny_model, make("pages", knobs | fits), block=32)
    ids = list(dict.fromkeys(tokens(200)))[:110]  # no token twice: of equal keys, rounding would choose one
    whole = engine.generate(ids, max_tokens=6).token_ids
    for n in (20, 101):  # within the budget, and beyond
        path = tmp_path / f"{n}.lce"
        engine.prefill(ids[:n]).save(path)
        other = lce.load(tiny_model, engine.method, block=32)
        assert other.generate(ids[n:], context=other.open_context(path), max_tokens=6).token_ids == whole
