"""Every registered method against the oracle, and the properties that all of them share."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lce.cache.layout import Budgets
from lce.methods import Method, Observation, available, find, make
from lce.methods import knobs as spelling
from lce.methods.base import promises_of
from lce.models.config import RopeConfig
from lce_lab.analysis import distances
from tests import oracle
from tests.depth import cover
from tests.pretended import Gpus
from tests.running import BY_BLOCK, as_knobs, by_block, cut, run, threads, vectors

WINDOW = 32
HEADS = {"multi-head": (4, 4), "grouped-query": (8, 2)}
# Knobs that a method needs if no model provides them.
NEEDS: dict[str, dict[str, object]] = {"esa": {"compress": "none"}}


def cases(text: str) -> list[dict[str, object]]:
    """The knobs of several cases, as in "chunk_size=4, chunk_size=8 chunks=3"."""
    return [as_knobs(case) for case in text.split(",")]


# Every selector at every placement, with several pages of sinks and local tokens.
SELECTS = cases(
    "select=summary, select=bounds, select=mean, select=representatives select.repr_tokens=2, select=best_key, "
    "select=lowdim select.compress=pca select.low_dim=12, select=oracle select.judge=true, select=random select.seed=1"
)
PLACES = cases(
    "placement=side_by_side, placement=true, placement=constant, placement=grouped placement.group=3, "
    "placement=dual placement.chunk_size=20"
)
SIZES = as_knobs("page=4 budget=32 budget.sinks=5 budget.local=7")
PLANE = [select | place | SIZES for select in SELECTS for place in PLACES]
# Knobs that every method is also tested with, besides its defaults.
KNOBS: dict[str, list[dict[str, object]]] = {
    "dca": cases(
        "chunk_size=10, chunk_size=32, temperature=True, chunk_size=10 parts=intra, "
        "chunk_size=10 parts=intra+inter temperature=True, chunk_size=20 far=32, chunk_size=40 far=52"
    ),
    "esa": cases(
        "sinks=4 top_k=9, sinks=0 local=5 top_k=4 eps=1, sinks=3 local=7 eps=0 far=20, "
        "sinks=4 top_k=9 compress=pca low_dim=12, sinks=4 top_k=12 top_p=0.3, sinks=4 top_k=9 heads=max"
    ),
    "full": cases(""),
    "infllm": cases(
        "block_size=8 sinks=4 top_k=3 repr_tokens=2, block_size=5 sinks=0 top_k=1 local=9 far=13, "
        "block_size=4 sinks=7 top_k=5 repr_tokens=9 local=40, block_size=4 sinks=3 top_k=12 top_p=0.5"
    ),
    "lm_infinite": cases(
        "sinks=2 local=20, sinks=0 local=1, sinks=3 local=16 top_k=5, sinks=0 local=9 top_k=2 from_layer=1"
    ),
    "longheads": cases(
        "chunk_size=4, chunk_size=8 chunks=3, chunk_size=4 share=group, chunk_size=4 share=layer, "
        "chunk_size=4 rank=last, chunk_size=4 keep_first=False, chunk_size=8 local=0, "
        "chunk_size=8 chunks=3 keep_first=False local=0, chunk_size=4 fix_head=True, chunk_size=5 chunks=6, "
        "chunk_size=4 placement=true, chunk_size=4 placement=constant, "
        "chunk_size=5 chunks=6 placement=constant share=group, chunk_size=4 top_p=0.4 keep_first=False, "
        "chunk_size=4 chunks=9 local=14, chunk_size=4 summary=values, chunk_size=8 chunks=3 share=head, "
        "chunk_size=5 chunks=6 summary=values share=head, "
        "chunk_size=4 placement=true summary=values"
    ),
    "oracle": cases(
        "chunk_size=5 budget=30 judge=true placement=constant, "
        "chunk_size=4 placement=true top_p=0.7 keep_first=False keep_last=False, chunk_size=1 chunks=9 judge=true"
    ),
    "pages": PLANE
    + cases(
        "page=5 budget=26 budget.sinks=0 budget.local=0 select=summary share=group, "
        "page=1 budget=16 budget.sinks=2 budget.local=3 placement=constant placement.far=31 share=layer, "
        "page=4 budget=32 select=representatives placement=true budget.top_p=0.4 budget.sinks=0, "
        "page=4 budget=32 placement=constant budget.top_p=0.6 share=group, "
        "page=4 budget=32 select=oracle budget.top_p=0.6 share=group budget.local=8, "
        "page=4 budget=32 select=random budget.top_p=0.37 share=layer, "
        "page=8 budget=50 select=mean placement=side_by_side, "
        "page=4 budget=24 select=summary select.of=keys share=group, "
        "page=4 budget=24 select=summary select.of=keys placement=constant, "
        "page=4 budget=24 placement=dual budget.top_p=0.6 share=group placement.far=40, "
        "page=2 budget=24 select=summary placement=grouped budget.top_p=0.5 budget.local=9 placement.group=8, "
        "page=4 budget=32 queries=page budget.sinks=5 budget.local=7, "
        "page=5 budget=32 queries=page share=group placement=true, "
        "page=4 budget=32 queries=page share=layer placement=grouped budget.local=9 select=summary, "
        "page=4 budget=32 queries=page share=group placement=constant select=oracle, "
        "page=4 budget=32 queries=page placement=dual placement.chunk_size=20 select=mean, "
        "page=4 budget=32 queries=page share=group select=random, page=2 budget=12 budget.growth=sqrt, "
        "page=2 budget=12 budget.growth=linear select=mean budget.grows_from=20 budget.grows_to=25, "
        "page=4 budget=20 budget.growth=linear placement=constant share=group budget.grows_to=70, "
        "page=4 budget=16 budget.growth=sqrt placement=dual budget.top_p=0.7 select=best_key"
    ),
    "reattention": cases(
        "span=4 top_k=3 sinks=5 local=9, span=3 top_k=2 sinks=0 local=1 share=group, "
        "span=4 share=layer local=8 top_p=0.5"
    ),
    "quest": cases(
        "dense_layers=0, dense_layers=0 page=4 budget=16, dense_layers=0 page=5 budget=11, "
        "dense_layers=0 page=4 budget=24 top_p=0.6"
    ),
    "random": cases("chunk_size=4 seed=1 placement=constant top_p=0.37"),
    "rerope": cases("local=1, local=100, log_scale=True"),
    "self_extend": cases(
        "local=10 group=3, local=1 group=16, local=64, group=1, group=auto, group=auto local=1 far=40, "
        "group=auto local=30"
    ),
    "streaming": cases("sinks=0, sinks=9 local=5, sinks=1 local=1"),
}
CASES = [(name, {**NEEDS.get(name, {}), **knobs}) for name in available() for knobs in [{}, *KNOBS.get(name, [])]]
# Methods for analysis read every key, from whichever tier: where only tiers differ, one short case of each is enough.
ANALYSIS = [name for name in available() if "analysis" in promises_of(find(name))]
SERVING = [case for case in CASES if case[0] not in ANALYSIS]
# Without other budgets and votes of the same methods: they change what is chosen, not where it lies or for which heads.
BASIC = [case for case in SERVING if not {"top_p", "budget.top_p", "heads"} & {*case[1]}]
# Each value of each knob once: for what concerns a choice, a place or a state, and not two of them at once.
EACH, EACH_BASIC = cover(CASES), cover(BASIC)
# Each reader of keys: what else a knob changes is what is chosen.
IN_8_BITS: list[Any] = [
    *(("full", {}), ("longheads", {"chunk_size": 4})),
    ("esa", {"compress": "pca", "sinks": 4, "top_k": 9, "low_dim": 12}),
]
CONSTANT = ("longheads", {"chunk_size": 4, "placement": "constant"})
# Methods that read keys of any tier as another does: chunks as `pages`, sinks as `lm_infinite`, all keys as `rerope`.
READ_ALIKE = ("longheads", "reattention", "quest", "streaming", "dca", "self_extend")
STATELESS = ("reattention", "streaming", "dca")  # they keep nothing beside keys and values, as `full`
CUTS = {
    "1": lambda n: [*cut(40, 1), n - 40],
    "7": lambda n: cut(n, 7),
    "64": lambda n: cut(n, 64),
    "whole": lambda n: [n],
    "prefill, then decode": lambda n: [n - 25, *cut(25, 1)],
    "mixed": lambda n: [3, 90, 1, 1, n - 95],
}
# Of these, cuts into few blocks: within a window and longer than one, and single tokens beyond a window.
FEW = ("7", "64", "mixed")


def small(name: str) -> dict[str, object]:
    """Knobs by which a method leaves something out of a text of a few windows."""
    return KNOBS[name][2 if name == "lm_infinite" else 0] | NEEDS.get(name, {})


def exact_length(method: Method) -> int | None:
    """The longest text for which the method equals full attention, in tokens; None: any."""
    knobs = {name.rpartition(".")[2]: value for name, value in spelling.settings(method).items()}
    local, sinks = knobs.get("local", 0), knobs.get("sinks", 0)
    match method.name:
        case "full":
            return None
        case "dca":
            size, far = knobs["chunk_size"], knobs["far"]
            return min(2 * size, far + 1) if knobs["parts"] == "all" else size
        case "longheads" | "oracle" | "random" if knobs["top_p"] is None:
            return knobs["chunk_size"] * (1 if knobs["placement"] == "constant" else knobs["chunks"])
        case "quest" if knobs["top_p"] is None:
            return None if knobs["dense_layers"] else knobs["budget"] // knobs["page"] * knobs["page"]
        case "pages" if knobs["top_p"] is None:
            page, near = knobs["page"], knobs["placement"] in ("constant", "grouped")
            whole = (-(-local // page) + 1 if near else knobs["budget"] // page) * page
            return min(whole, 2 * knobs["chunk_size"], knobs["far"] + 1) if knobs["placement"] == "dual" else whole
        case "reattention" if knobs["top_p"] is None:
            span = knobs["span"]
            return (-(-sinks // span) + knobs["top_k"] + -(-local // span)) * span
        case "infllm":
            return local + (1 if knobs["far"] == local else 0)
        case "lm_infinite":
            return local + (1 if sinks else 0)
        case "esa":
            return sinks + local + 1
        case "streaming":
            return sinks + local
        case "rerope":
            return local + 1
        case "self_extend":
            return local if knobs["group"] != "auto" else knobs["far"] + 1
    return 1


def beyond(method: Method, windows: int) -> int:
    """Tokens far beyond the window: so many windows, and 3 more where the sinks alone are several of them."""
    return (windows + 3 * ((getattr(method, "sinks", 0) or 0) > 2 * WINDOW)) * WINDOW


def once(define: Callable[..., oracle.Tables]) -> Callable[..., oracle.Tables]:
    """The definition for one text, in whatever blocks: the tables of each setting of its knobs are made once."""
    made: dict[str, oracle.Tables] = {}

    def tables(q: Tensor, k: Tensor, v: Tensor, setting: oracle.Setting, **knobs: object) -> oracle.Tables:
        if repr(knobs) not in made:
            made[repr(knobs)] = define(q, k, v, setting, **knobs)
        return made[repr(knobs)]

    return tables


def test_every_method_has_a_definition() -> None:
    assert set(oracle.DEFINITIONS) == set(available())


@pytest.mark.parametrize(
    ("name", "knobs", "heads", "cuts"),
    [
        (*case, cuts)
        for grouped, cuts in (((4, 2), FEW), ((8, 2), tuple(called for called in CUTS if called not in FEW)))
        for case in [*((*case, grouped) for case in CASES), *((*case, (4, 4)) for case in EACH_BASIC)]
    ],
    ids=str,
)
@pytest.mark.covering
def test_equals_the_oracle_far_beyond_the_window(
    name: str, knobs: dict[str, object], heads: tuple[int, int], cuts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in {*oracle.DEFINITIONS} - BY_BLOCK - ({"pages"} if by_block("pages", knobs) else set()):
        monkeypatch.setitem(oracle.DEFINITIONS, each, once(oracle.DEFINITIONS[each]))
    method = make(name, knobs)
    n = beyond(method, 4) + 5
    q, k, v = vectors(7, *heads, n, 16)
    truth = None
    for called in cuts:
        blocks = CUTS[called](n)
        if truth is None or by_block(name, knobs):
            setting = oracle.Setting(WINDOW, blocks)
            truth = oracle.attention(q, k, v, oracle.DEFINITIONS[name](q, k, v, setting, **knobs), setting)
        out = run(method, q, k, v, blocks, window=WINDOW)
        assert (out - truth).abs().max() <= 1e-4, f"blocks: {called}"


@pytest.mark.parametrize(("name", "knobs"), CASES, ids=str)
@pytest.mark.covering
def test_what_is_attended_is_what_a_method_says(
    name: str, knobs: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it always attends and what it notes are all that the definition attends, at the distances that it says."""
    method, found, seen_at = make(name, knobs).resolve(WINDOW), [], []
    (first, size), noted, attend = method.choices, [], type(method).attend
    n = beyond(method, 3) + 3
    q, k, v = vectors(7, 4, 2, n, 16)

    def watched(self: Method, q: Tensor, cache: Any, step: Any) -> Tensor:
        out = attend(self, q, cache, step)
        whole = Observation(self, q, cache, step, torch.arange(q.shape[1]), None, None)
        always = distances.observed_always(whole)
        if always is None:
            pytest.skip("it does not say")
        attended = always.expand(len(q), -1, -1).clone()
        own = distances.distance(self, cache.index, step.positions(q.device), torch.arange(step.stop), step)
        distance = torch.nn.functional.pad(own.expand(len(q), -1, -1), (0, n + size - step.stop))
        for chosen in noted:
            near, far = distances.choice_distance(self, cache.index, chosen, step).unbind(-1)  # type: ignore[union-attr]
            keys = self.key_positions((first + chosen.clamp(min=0)[..., None] * size + torch.arange(size)).flatten())
            keys = torch.zeros(*far.shape, size, dtype=torch.int64) if keys is None else keys.view(*far.shape, size)
            seen = far[..., None] + keys[..., :1] - keys
            assert torch.equal(seen[..., -1][chosen >= 0], near[chosen >= 0])
            at = (first + chosen[..., None] * size + torch.arange(size)).masked_fill(chosen[..., None] < 0, n)
            distance = distance.scatter(-1, at.flatten(2), seen.flatten(2))
            tokens = (first + chosen[..., None] * size + torch.arange(size)).masked_fill(chosen[..., None] < 0, n)
            wide = torch.nn.functional.pad(attended, (0, n + size - step.stop))
            attended = wide.scatter(-1, tokens.flatten(2), value=True)[..., : step.stop]
        noted.clear()
        seen_at.append(distance[..., :n])
        found.append(torch.nn.functional.pad(attended, (0, n - step.stop)))
        return out

    monkeypatch.setattr(type(method), "attend", watched)
    setting = oracle.Setting(WINDOW, [n - 31, 30, 1])
    run(method, q, k, v, setting.blocks, window=WINDOW, note=lambda _, chosen: noted.append(chosen))
    tables, attended = oracle.DEFINITIONS[name](q, k, v, setting, **knobs), torch.cat(found, dim=1)
    assert torch.equal(attended, tables.mask)
    assert torch.equal(torch.cat(seen_at, dim=1)[attended], tables.distance.expand(attended.shape)[attended])


@pytest.mark.parametrize("name", available())
def test_backends_agree(name: str) -> None:
    q, k, v = vectors(3, 4, 2, 150, 8)
    setting = oracle.Setting(WINDOW, cut(150, 40))
    knobs = NEEDS.get(name, {})
    truth = oracle.attention(q, k, v, oracle.DEFINITIONS[name](q, k, v, setting, **knobs), setting)
    for backend in ("torch", "reference"):
        out = run(make(name, knobs), q, k, v, setting.blocks, window=WINDOW, backend=backend)
        assert (out - truth).abs().max() <= 1e-4, backend


@pytest.mark.cuda
@pytest.mark.parametrize(("name", "knobs"), CASES, ids=str)
def test_equals_the_oracle_on_cuda(name: str, knobs: dict[str, object]) -> None:
    q, k, v = vectors(3, 4, 2, 150, 16)
    setting = oracle.Setting(WINDOW, [70, *cut(80, 30)])
    truth = oracle.attention(q, k, v, oracle.DEFINITIONS[name](q, k, v, setting, **knobs), setting)
    out = run(make(name, knobs), q.cuda(), k.cuda(), v.cuda(), setting.blocks, window=WINDOW)
    assert (out.cpu() - truth).abs().max() <= 1e-4


@pytest.mark.cuda
@pytest.mark.parametrize(("dtype", "scale"), [(torch.float16, 1.0), (torch.bfloat16, 1.0), (torch.float16, 64.0)])
@pytest.mark.parametrize(("name", "knobs"), CASES, ids=str)
def test_half_precision_on_cuda(name: str, knobs: dict[str, object], dtype: torch.dtype, scale: float) -> None:
    """All queries are close to the oracle but the few whose rounded scores choose something else.

    With a scale of 64, dot products are some hundred thousand; float16 ends at 65,504.
    """
    q, k, v = (x.to(dtype) for x in vectors(3, 4, 2, 150, 16))
    q, k = q * scale, k * scale
    setting = oracle.Setting(WINDOW, [70, *cut(78, 26), 1, 1])
    wide = [x.float() for x in (q, k, v)]
    truth = oracle.attention(*wide, oracle.DEFINITIONS[name](*wide, setting, **knobs), setting)
    out = run(make(name, knobs), q.cuda(), k.cuda(), v.cuda(), setting.blocks, window=WINDOW)
    assert out.dtype == dtype
    assert out.isfinite().all()
    error = (out.cpu().double() - truth).abs().amax(-1)
    tolerance = 0.02 if dtype is torch.float16 else 0.1
    assert error.median() <= tolerance / 5
    # Very large scores make votes of exactly 0 and 1, and any of equal tokens may stand for a block.
    assert (error > tolerance).double().mean() <= (0.15 if scale == 1 else 0.4)


@pytest.mark.parametrize("name", ["dca", "esa", "infllm", "lm_infinite"])
def test_no_pass_waits_for_a_gpu(name: str, gpus: Gpus) -> None:
    """In float32, by plain arithmetic. The frequencies of RoPE are uploaded once, and nothing else."""
    knobs = small(name)
    q, k, v = vectors(3, 4, 2, 98, 16)
    blocks = [70, 26, 1, 1]
    truth, on_gpu = run(make(name, knobs), q, k, v, blocks, window=WINDOW), [x.to("cuda") for x in (q, k, v)]
    with gpus.counting() as counts:
        out = run(make(name, knobs), *on_gpu, blocks, window=WINDOW)
    assert (counts.syncs, counts.uploads) == (0, 1), counts.at
    assert (out.cpu() - truth).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("name", "scaling"),
    [  # yarn alone has a factor of attention; the others have frequencies only, of which a method takes any
        pytest.param(name, scaling, marks=[pytest.mark.slow] * (j < 3 and i % 3 != j))
        for i, name in enumerate(available())
        for j, scaling in enumerate(("linear", "dynamic", "llama3", "yarn"))
    ],
)
def test_combines_with_every_rope_scaling(name: str, scaling: str) -> None:
    """The frequencies are transformers' own."""
    n, dim, factor = 3 * WINDOW + 3, 16, 4.0
    published = {"rope_type": scaling, "rope_theta": 10000.0, "factor": factor}
    if scaling in ("yarn", "llama3"):
        published["original_max_position_embeddings"] = WINDOW
    if scaling == "llama3":
        published |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = LlamaConfig(
        hidden_size=4 * dim, num_attention_heads=4, max_position_embeddings=WINDOW, rope_parameters=published
    )
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS[scaling](config, torch.device("cpu"), seq_len=n)
    knobs, (q, k, v) = small(name), vectors(4, 4, 2, n, dim)
    setting = oracle.Setting(WINDOW, cut(n, 40), frequencies=frequencies, factor=attention_factor)
    truth = oracle.attention(q, k, v, oracle.DEFINITIONS[name](q, k, v, setting, **knobs), setting)
    ours = RopeConfig(kind=scaling, factor=factor)
    out = run(make(name, knobs), q, k, v, setting.blocks, window=WINDOW, scaling=ours)
    assert (out - truth).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("name", "knobs", "heads"), [*((*case, (8, 2)) for case in CASES), *((*case, (4, 4)) for case in EACH)], ids=str
)
@pytest.mark.covering
def test_equals_full_attention_while_everything_fits(
    name: str, knobs: dict[str, object], heads: tuple[int, int]
) -> None:
    method = make(name, knobs).resolve(WINDOW)
    n = exact_length(method) or 3 * WINDOW
    q, k, v = vectors(5, *heads, n, 16)
    truth = run(make("full"), q, k, v, [n], window=WINDOW)
    for blocks in (cut(n, 1), cut(n, 7), [n]):
        assert (run(method, q, k, v, blocks, window=WINDOW) - truth).abs().max() <= 1e-5


def drawn(data: st.DataObject, n: int, most: int) -> list[int]:
    """Blocks of up to `most` tokens that add up to `n`."""
    blocks = list[int]()
    while left := n - sum(blocks):
        blocks.append(data.draw(st.integers(1, min(left, most))))
    return blocks


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_blocks_give_the_same(data: st.DataObject) -> None:
    name, knobs = data.draw(st.sampled_from([case for case in CASES if not by_block(*case)]))
    n = data.draw(st.integers(1, 5 * WINDOW))
    q, k, v = vectors(data.draw(st.integers(0, 3)), 4, 2, n, 8)
    blocks = drawn(data, n, n)
    whole = run(make(name, knobs), q, k, v, [n], window=WINDOW)
    assert (run(make(name, knobs), q, k, v, blocks, window=WINDOW) - whole).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("name", "knobs"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case[0] in STATELESS)) for case in EACH],
    ids=str,
)
@pytest.mark.covering("name")
def test_discarded_passes_and_copies_leave_no_trace(name: str, knobs: dict[str, object]) -> None:
    q, k, v = vectors(9, 4, 2, 3 * WINDOW, 8)
    blocks = [30, 1, 1, *cut(3 * WINDOW - 32, 9)]
    calm = run(make(name, knobs), q, k, v, blocks, window=WINDOW)
    for disturb in (1, 5, 70):
        assert torch.equal(run(make(name, knobs), q, k, v, blocks, window=WINDOW, disturb=disturb), calm)


@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_a_truncated_text_goes_on_as_if_no_more_had_been_read(data: st.DataObject) -> None:
    """In any budget. What the method cannot go back to is read again, in other blocks."""
    name, knobs = data.draw(st.sampled_from([case for case in SERVING if not by_block(*case)]))
    n, budgets = 3 * WINDOW, None
    q, k, v = vectors(9, 4, 2, n, 16)
    whole = run(make(name, knobs), q, k, v, cut(n, 30), window=WINDOW)
    cuts = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=3))
    with TemporaryDirectory() as folder:
        if data.draw(st.booleans()):
            budgets = Budgets(host=0, spill_dir=Path(folder))
        out = run(make(name, knobs), q, k, v, cut(n, 30), window=WINDOW, budgets=budgets, truncate=cuts)
    assert (out - whole).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("name", "knobs", "heads", "n_threads"),
    [
        pytest.param(*case, heads, n_threads, marks=[pytest.mark.slow] * (case[0] in READ_ALIKE))
        for i, case in enumerate(sorted(cover(SERVING), key=lambda case: (case[0], not case[1])))
        for j, (heads, n_threads) in enumerate((((8, 2), 2), ((8, 2), 1), ((4, 4), 1)))
        if (case in BASIC and i % 3 == j) or (case not in BASIC and j == 0)
    ],
    ids=str,
)
@pytest.mark.covering("name")
def test_the_smallest_budget_changes_nothing(
    name: str, knobs: dict[str, object], heads: tuple[int, int], n_threads: int, tmp_path: Path
) -> None:
    """To the bit: the result does not depend on where keys and values are."""
    with threads(n_threads):
        check_the_smallest_budget(make(name, knobs), heads, tmp_path, windows=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ANALYSIS)
def test_the_smallest_budget_changes_nothing_of_an_analysis(name: str, tmp_path: Path) -> None:
    check_the_smallest_budget(make(name, KNOBS[name][0]), HEADS["grouped-query"], tmp_path, "int8")


def check_the_smallest_budget(
    method: Method, heads: tuple[int, int], tmp_path: Path, kv_dtype: str = "auto", windows: int = 4
) -> Tensor:
    calm = in_small_pieces(method, heads, windows, kv_dtype=kv_dtype)
    how: Any = {"kv_dtype": kv_dtype, "budgets": Budgets(host=0, spill_dir=tmp_path), "disturb": 5}
    assert torch.equal(in_small_pieces(method, heads, windows, **how), calm)
    return calm


def in_small_pieces(method: Method, heads: tuple[int, int], windows: int = 4, **how: Any) -> Tensor:
    """Chunks of 4 tokens where the method has no size of its own, and reads of 24.

    Fewer tokens where each is a chunk: the smallest budget holds one of them, and is filled again for every other.
    """
    n = beyond(method, 2 if method.resolve(WINDOW).access.chunk_size == 1 else windows)
    q, k, v = vectors(9, *heads, n, 16)
    blocks = [30, 1, 1, *cut(n - 52, 9), *cut(20, 1)]
    return run(method, q, k, v, blocks, window=WINDOW, pieces=(4, 24), **how)


def changes(knobs: dict[str, object]) -> int:
    """How much a choice that rounding changes counts: where low-dim keys choose, it is that of all heads."""
    return 2 if knobs.get("select") == "lowdim" else 1


@pytest.mark.parametrize(("name", "knobs"), EACH_BASIC[1::2], ids=str)
@pytest.mark.slow
def test_keys_and_values_in_8_bits_are_close_and_the_same_in_any_budget(
    name: str, knobs: dict[str, object], tmp_path: Path
) -> None:
    """To the bit, with one and two threads. Close: 1% of the result on the mean, in which few choices differ."""
    method, heads, budgets = make(name, knobs), HEADS["grouped-query"], Budgets(host=0, spill_dir=tmp_path)
    found = check_the_smallest_budget(method, heads, tmp_path, "int8")
    with threads(2):
        assert torch.equal(in_small_pieces(method, heads, kv_dtype="int8", budgets=budgets, disturb=5), found)
    exact = in_small_pieces(method, heads)
    difference = (found - exact).abs()
    assert difference.mean() <= 0.01 * changes(knobs) * exact.abs().mean()
    assert not difference[:, :30].any(), "nothing is old in the first block"
    if name in ("full", "longheads", "esa", "infllm", "quest", "rerope", "self_extend"):
        assert difference.any(), "the method sees old tokens"


@pytest.mark.parametrize(
    ("name", "knobs"),
    IN_8_BITS + [pytest.param(*x, marks=pytest.mark.slow) for x in [CONSTANT, *EACH_BASIC[::2]] if x not in IN_8_BITS],
    ids=str,
)
def test_keys_and_values_in_8_bits_on_the_device(name: str, knobs: dict[str, object], tmp_path: Path) -> None:
    """The same in any budget, to the bit; close to 16 bits; with small differences if the blocks are others."""
    method, heads = make(name, knobs), HEADS["grouped-query"]
    found = check_the_smallest_budget(method, heads, tmp_path, "int8-device", windows=2)
    exact = in_small_pieces(method, heads, windows=2)
    assert 0 < (found - exact).abs().mean() <= 0.03 * changes(knobs) * exact.abs().mean()
    if name == "full":
        q, k, v = vectors(9, *heads, found.shape[1], 16)
        other = run(method, q, k, v, cut(len(q[0]), 7), window=WINDOW, kv_dtype="int8-device")
        assert (other - found).abs().max() < 1e-4


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_no_budget_changes_anything(data: st.DataObject) -> None:
    name, knobs = data.draw(st.sampled_from(SERVING))
    heads = data.draw(st.sampled_from(sorted(HEADS.values())))
    n = data.draw(st.integers(1, 8 * WINDOW))
    q, k, v = vectors(data.draw(st.integers(0, 3)), *heads, n, 16)
    blocks = drawn(data, n, 2 * WINDOW)
    pieces = (data.draw(st.integers(1, 40)), data.draw(st.integers(1, 3 * WINDOW)))
    with TemporaryDirectory() as folder, threads(data.draw(st.integers(1, 3))):
        kind = data.draw(st.sampled_from(["auto", "int8"]))
        calm = run(make(name, knobs), q, k, v, blocks, window=WINDOW, pieces=pieces, kv_dtype=kind)
        budgets = Budgets(host=data.draw(st.integers(0, 2 * k.nbytes)), spill_dir=Path(folder))
        out = run(make(name, knobs), q, k, v, blocks, window=WINDOW, pieces=pieces, budgets=budgets, kv_dtype=kind)
    assert torch.equal(out, calm)


@pytest.mark.parametrize("name", available())
def test_half_precision_stays_close(name: str) -> None:
    method = make(name, NEEDS.get(name, {})).resolve(WINDOW)
    n = min(exact_length(method) or WINDOW, WINDOW)
    q, k, v = (x.bfloat16() for x in vectors(2, 4, 2, n, 16))
    out = run(method, q, k, v, [n], window=WINDOW)
    truth = run(make("full"), q.float(), k.float(), v.float(), [n], window=WINDOW)
    assert out.dtype == torch.bfloat16
    assert (out.float() - truth).abs().max() < 0.1


@pytest.mark.parametrize(("name", "knobs"), EACH, ids=str)
@pytest.mark.covering("name")
@pytest.mark.slow
def test_half_precision_runs_far_beyond_the_window(name: str, knobs: dict[str, object]) -> None:
    q, k, v = (x.bfloat16() for x in vectors(2, 4, 2, 3 * WINDOW, 16))
    out = run(make(name, knobs), q, k, v, [70, *cut(3 * WINDOW - 70, 1)], window=WINDOW)
    assert out.dtype == torch.bfloat16
    assert out.isfinite().all()
