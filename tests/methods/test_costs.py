"""Costs that methods declare are those of a run: every product of matrices that it makes is counted.

Attention is counted at its door: the keys that a query is asked to attend, whatever a backend does with a mask. All
other products are counted as PyTorch runs them, by methods that take no compiled kernels.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import lce
from lce.attention import Attention
from lce.methods import esa, selectors
from lce.methods.base import Method, promises_of
from lce.methods.costs import Cost, QueryBlock, cost, paper_figures
from lce.methods.lowdim import LowDimMap, LowDimMaps
from tests.running import as_knobs, low_dim_map, vectors

D, WINDOW, LENGTH = 8, 40, 131
ATTENTION, SCORES, SUMMARIES, LOW_DIM, BASIS = "attention", "scores", "summaries", "low_dim", "basis"


class Counter(TorchDispatchMode):
    """Counts multiply-adds of matrix products under the name of what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names = [SCORES]  # a product that has no other name
        self.counts = dict.fromkeys((ATTENTION, SCORES, SUMMARIES, LOW_DIM, BASIS), 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._opname in ("mm", "bmm", "addmm", "baddbmm") and self.names[-1] != ATTENTION:
            self.counts[self.names[-1]] += out.numel() * args[-2].shape[-1]
        return out

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        self.names.append(name)
        yield
        self.names.pop()

    def under(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.named(name):
                return function(*args, **kwargs)

        return run

    def attended(self, q: Tensor, pairs: int) -> None:
        """Queries that attend `pairs` keys in all; a part of a summary counts as one."""
        name = SUMMARIES if self.names[-1] == SUMMARIES else ATTENTION
        self.counts[name] += 2 * pairs * q.shape[-1]


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    made = Counter()
    dense, routed = Attention.dense, Attention.routed

    def count_dense(
        self: Attention, q: Tensor, k: Tensor, v: Tensor, causal: bool, window: Any = None, **more: Any
    ) -> Any:
        (n_heads, n_queries, _), n_keys = q.shape, k.shape[1] - (more["order"].unseen if "order" in more else 0)
        seen = [n_keys - n_queries + t + 1 if causal else n_keys for t in range(n_queries)]
        made.attended(q, n_heads * sum(min(n, window or n) for n in seen) if n_keys else 0)
        with made.named(ATTENTION):
            return dense(self, q, k, v, causal, window, **more)

    def count_routed(self: Attention, q: Tensor, turns: Any, chunk_ids: Tensor, tiles: Any, **more: Any) -> Any:
        tiles = list(tiles)
        made.attended(q, int((chunk_ids >= 0).sum()) * tiles[0].k.shape[1])
        with made.named(ATTENTION):
            return routed(self, q, turns, chunk_ids, tiles, **more)

    monkeypatch.setattr(Attention, "dense", count_dense)
    monkeypatch.setattr(Attention, "routed", count_routed)
    monkeypatch.setattr("lce.attention.scores.compiled_for", lambda x: False)
    monkeypatch.setattr("lce.methods.choosing.n_seeing_all", lambda *_: 0)  # a cost counts the choices of all queries
    for owner, name, kind in (
        (selectors.Summary, "summarise", SUMMARIES),
        (lce.methods.InfLLM, "votes", SUMMARIES),
        (selectors.Representatives, "summarise", SUMMARIES),
        (LowDimMap, "low_keys", LOW_DIM),
        (LowDimMap, "low_queries", LOW_DIM),
        (esa, "find_basis", BASIS),
    ):
        monkeypatch.setattr(owner, name, made.under(kind, getattr(owner, name)))
    return made


def pages(knobs: str, **more: Any) -> Method:
    return lce.methods.make("pages", as_knobs(knobs) | more)


def methods(n_heads: int, n_kv_heads: int) -> dict[str, Method]:
    own = lce.methods
    low, some = LowDimMaps([low_dim_map(n_heads, n_kv_heads, D, 3)]), {"sinks": 3, "local": 20, "top_k": 9}
    return {
        "full": own.Full(),
        "streaming": own.Streaming(sinks=3, local=17),
        "streaming without sinks": own.Streaming(sinks=0, local=17),
        "lm_infinite": own.LMInfinite(sinks=3, local=17),
        "rerope": own.ReRope(local=17),
        "self_extend": own.SelfExtend(local=17, group=8),
        "self_extend auto": own.SelfExtend(local=7, group="auto"),
        "dca": own.DualChunk(chunk_size=30),
        "dca intra": own.DualChunk(chunk_size=30, parts="intra"),
        "dca intra+inter": own.DualChunk(chunk_size=30, parts="intra+inter"),
        "longheads": own.LongHeads(chunk_size=8, chunks=4),
        "longheads layer": own.LongHeads(chunk_size=8, chunks=4, share="layer", rank="last", local=0),
        "longheads fixed": own.LongHeads(chunk_size=8, chunks=4, fix_head=True, placement="constant"),
        "quest": own.Quest(page=8, budget=24, dense_layers=0),
        "quest dense": own.Quest(page=8, budget=24, dense_layers=1),
        "pages": pages("page=8 budget=40 budget.sinks=8 budget.local=16"),
        "pages constant": pages("select=summary placement=constant page=8 budget=40 budget.local=9 share=layer"),
        "pages dual": pages("select=mean placement=dual page=8 budget=40 placement.chunk_size=24 share=group"),
        "pages grouped": pages("select=representatives placement=grouped page=8 budget=40 select.repr_tokens=2"),
        "pages lowdim": pages("select=lowdim page=8 budget=24 select.low_dim=3", **{"select.maps": low}),
        "pages growing": pages("page=4 budget=16 budget.growth=linear placement=constant share=group"),
        "pages growing side by side": pages("page=4 budget=16 budget.growth=sqrt"),
        "reattention": own.ReAttention(span=4, top_k=3, local=9),
        "infllm": own.InfLLM(block_size=8, repr_tokens=2, top_k=3, sinks=3, local=20),
        "esa": own.ESA(**some, low_dim=3, maps=low),
        "esa exact": own.ESA(**some, compress="none"),
    }


def declared(counter: Counter, method: Method, blocks: list[int], heads: tuple[int, int]) -> Cost:
    """What a method says of these blocks, which are run and counted."""
    with counter:
        lce.methods.run(method, *vectors(1, *heads, LENGTH, D), window=WINDOW, blocks=blocks, attention="reference")
    found, start = Cost(0), 0
    for size in blocks:
        found, start = found + cost(method, QueryBlock(start, start + size, *heads, D)), start + size
    return found


@pytest.mark.parametrize("heads", [(4, 2), (3, 3)], ids=["grouped", "multi-head"])
@pytest.mark.parametrize("name", methods(1, 1))
def test_the_declared_cost_is_that_of_a_run(counter: Counter, name: str, heads: tuple[int, int]) -> None:
    """Prefill in blocks of several sizes, and decode."""
    method = methods(*heads)[name].resolve(WINDOW)
    cost = declared(counter, method, [7, 33, 24, 16, 1, 1, 46, 1, 1, 1], heads)
    assert counter.names == [SCORES]
    found = {kind: counter.counts[kind] for kind in (ATTENTION, SCORES, SUMMARIES, LOW_DIM)}
    assert {kind: getattr(cost, kind) for kind in found} == found
    assert counter.counts[ATTENTION]


def test_tokens_that_each_head_chooses(counter: Counter) -> None:
    """Their scores serve as logits: the products of both are counted together."""
    method = lce.methods.LMInfinite(sinks=3, local=17, top_k=5).resolve(WINDOW)
    cost = declared(counter, method, [30, 60, 40, 1], (4, 2))
    assert cost.attention + cost.scores == counter.counts[ATTENTION] + counter.counts[SCORES]


def test_principal_components_are_not_counted(counter: Counter) -> None:
    method = lce.methods.ESA(sinks=3, local=20, top_k=9, low_dim=3, compress="pca").resolve(WINDOW)
    cost = declared(counter, method, [50, 50, 30, 1], (4, 2))
    assert (cost.attention, cost.scores) == (counter.counts[ATTENTION], counter.counts[SCORES])
    late = 100 * 2 * D * 3  # the low-dim keys of the tokens up to the first block that chooses
    assert cost.low_dim == counter.counts[LOW_DIM]
    assert counter.counts[BASIS] > late


@pytest.mark.parametrize("name", methods(1, 1))
def test_what_a_decode_step_reads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of keys and values that the backend is given, where no head shares its keys."""
    method, rows = methods(3, 3)[name].resolve(WINDOW), []
    said = cost(method, QueryBlock(LENGTH - 1, LENGTH, 3, 3, D)).rows_read  # before `attend` is another
    backend = type(Attention.choose())
    attend, dense, routed = type(method).attend, backend.dense, backend.routed

    def begin(self: Method, *args: Any) -> Tensor:
        rows.clear()
        return attend(self, *args)

    def count_dense(self: Attention, q: Tensor, k: Tensor, *args: Any, **more: Any) -> Any:
        rows.append(k.shape[0] * k.shape[1] if q.shape[1] else 0)
        return dense(self, q, k, *args, **more)

    def count_routed(self: Attention, q: Tensor, turns: Any, chunk_ids: Tensor, *args: Any, **more: Any) -> Any:
        rows.append(int((chunk_ids >= 0).sum()) * method.access.chunk_size)
        return routed(self, q, turns, chunk_ids, *args, **more)

    monkeypatch.setattr(type(method), "attend", begin)
    monkeypatch.setattr(backend, "dense", count_dense)
    monkeypatch.setattr(backend, "routed", count_routed)
    lce.methods.run(method, *vectors(1, 3, 3, LENGTH, D), window=WINDOW, blocks=[65, 65, 1], prompt=130)
    assert said == sum(rows)


def test_a_block_is_the_sum_of_its_queries() -> None:
    for method in methods(4, 2).values():
        if isinstance(method, lce.methods.ESA | lce.methods.InfLLM):
            continue  # their queries choose together
        resolved = method.resolve(WINDOW)
        whole = cost(resolved, QueryBlock(0, 90, 4, 2, D))
        each = [cost(resolved, QueryBlock(i, i + 1, 4, 2, D)) for i in range(90)]
        assert whole.attention == sum(one.attention for one in each)


def test_every_method_of_ours_is_counted() -> None:
    found = [lce.methods.find(name) for name in lce.methods.available()]
    assert all("counted" in promises_of(cls) for cls in found if cls.__module__.startswith("lce"))


class Other(lce.methods.LongHeads):
    def score(self, q: Tensor, summary: Tensor, step: Any, layer: int) -> Tensor:
        return super().score(q, summary, step, layer)


class Mean(lce.methods.SelectiveMethod):
    def summarise(self, q: Tensor, k: Tensor, v: Tensor, step: Any) -> Tensor:
        return k.mean(dim=2).repeat_interleave(len(q) // len(k), dim=0)


def test_what_a_method_of_ones_own_says() -> None:
    """A cost stands for the hooks that it knows. A selector's own summary is not counted, what it attends is."""
    block = QueryBlock(100, 101, 4, 2, D)
    assert not Other().resolve(WINDOW).promised("counted")
    mean = Mean(chunk_size=8, chunks=4).resolve(WINDOW)
    found, known = cost(mean, block), cost(methods(4, 2)["longheads"].resolve(WINDOW), block)
    assert mean.promised("counted")
    assert (found.attention, found.scores, found.summaries) == (known.attention, known.scores, None)


def test_figures_of_the_papers() -> None:
    """ESA: 128 numbers a token, 32 heads and 8 KV heads of 128 dimensions. LongHeads on Llama 2 7B."""
    esa_, heads = lce.methods.ESA(), lce.methods.LongHeads(chunk_size=256, chunks=16)
    shares = [figure.value for figure in paper_figures(esa_, QueryBlock(0, 1, 32, 8, 128, 32))]
    assert [f"{share:.2%}" for share in shares] == ["1.56%", "6.25%"]
    reach = [figure.value for figure in paper_figures(heads, QueryBlock(0, 1, 32, 32, 128, 32))]
    assert reach == [16 * 32 * 32, 256 * 16 * 32 * 32]
    n = 1 << 20
    block = QueryBlock(n - 1, n, 32, 8, 128)
    scores = cost(lce.methods.ESA(local=4096, top_k=2048, compress="calibrated").sized(8192), block)
    full = cost(lce.methods.Full(), block)
    assert math.isclose(scores.scores / full.attention, 0.015625, rel_tol=0.005)
