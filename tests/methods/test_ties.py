"""Texts of repeated spans: chunks of equal keys have equal scores, and of equal scores the later one is taken first."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import lce
from lce.attention import best_chunks, best_first, best_tokens
from lce.methods import make
from tests import oracle
from tests.checkpoints import tokens
from tests.methods.test_matrix import CASES, WINDOW
from tests.running import as_knobs, by_block, cut, run, vectors

SIZE = 4
# Every selector where equal keys are cached at equal positions, by heads alone and together.
TIED = [
    *("longheads chunk_size=4", "longheads chunk_size=4 share=layer", "longheads chunk_size=4 rank=last"),
    *("longheads chunk_size=4 top_p=0.4 keep_first=False", "reattention span=4 top_k=3 sinks=5 local=9"),
    *(
        "reattention span=4 share=layer local=8 top_p=0.5",
        "oracle chunk_size=4",
        "lm_infinite sinks=3 local=16 top_k=5",
    ),
    *("esa compress=none sinks=4 top_k=9", "esa compress=none sinks=0 local=5 top_k=6 eps=0 heads=max"),
    *("esa compress=none sinks=4 top_k=12 top_p=0.3", "infllm block_size=4 sinks=4 top_k=3 repr_tokens=2"),
    "infllm block_size=4 sinks=4 top_k=12 top_p=0.5",
    *(f"pages select={name} page=4 budget=32" for name in ("summary", "bounds", "mean", "best_key", "representatives")),
    *(f"pages select={name} page=4 budget=32 placement=constant share=group" for name in ("bounds", "best_key")),
    "pages page=4 budget=32 queries=page",
    "pages page=4 budget=16 budget.growth=linear select=mean",
]


def repeated(seed: int, heads: tuple[int, int], n: int, dim: int = 16) -> tuple[Tensor, ...]:
    """Vectors of a text of n tokens that repeats three spans of `SIZE` tokens in a random order."""
    order = torch.randint(3, (-(-n // SIZE),), generator=torch.Generator().manual_seed(seed))
    token = (order[:, None] * SIZE + torch.arange(SIZE)).flatten()[:n]
    return tuple(x[:, token] for x in vectors(seed, *heads, 3 * SIZE, dim))


@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=pytest.mark.slow if i % 2 else ()) for i, each in enumerate(TIED)]
)
def test_of_equal_chunks_the_later_is_attended_in_any_blocks(case: str) -> None:
    name, _, text = case.partition(" ")
    knobs, n, truth = as_knobs(text), 133, None
    q, k, v = repeated(3, (8, 2), n)
    for blocks in (cut(n, 64), cut(n, 7), [n - 9, *cut(9, 1)]):
        if truth is None or by_block(name, knobs):
            setting = oracle.Setting(WINDOW, blocks)
            truth = oracle.attention(q, k, v, oracle.DEFINITIONS[name](q, k, v, setting, **knobs), setting)
        out = run(make(name, knobs), q, k, v, blocks, window=WINDOW)
        assert (out - truth).abs().max() <= 1e-4, f"blocks: {blocks[0]}"


@pytest.mark.parametrize(
    "case",
    [
        *("reattention", "pages select=best_key placement=true"),
        pytest.param("pages select=best_key placement=grouped", marks=pytest.mark.slow),
        pytest.param("pages select=best_key placement=dual share=group", marks=pytest.mark.slow),
        pytest.param("pages select=best_key budget.top_p=0.5", marks=pytest.mark.slow),
        "pages select=lowdim select.compress=pca placement=true budget=64",
        pytest.param("pages select=lowdim select.compress=pca placement=dual", marks=pytest.mark.slow),
    ],
)
def test_equal_tokens_tie_wherever_they_are(tiny_model: Path, case: str) -> None:
    """Keys are scored without positions, so equal tokens have equal scores at any offset in a span."""
    name, _, text = case.partition(" ")
    ids = [2 + x % 9 for x in tokens(144, seed=1)]  # no block is of 8 or less, which other kernels multiply, or all are
    blocks = (16, 64) if "pca" in case else (1, 16, 64)  # components are of many tokens, whatever the block
    whole, *others = (
        lce.load(tiny_model, make(name, as_knobs(text)), block=block).logits(ids) for block in (144, *blocks)
    )
    for other in others:
        assert (other - whole).abs().max() <= 1e-4


def test_every_method_that_chooses_is_here() -> None:
    chooses = {name for name, knobs in CASES if {"top_k", "top_p", "chunks", "budget"} & {*knobs}}
    assert {case.split()[0] for case in TIED} >= chooses - {"quest", "random"}  # positions or hashes differ


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_rule_in_every_backend(dtype: torch.dtype) -> None:
    """Kernels choose by float32 and bfloat16 scores, and torch chooses by others."""
    scores = torch.randint(3, (2, 50, 30), generator=torch.Generator().manual_seed(1)).to(dtype)
    scores[0, :, ::4], forced = -torch.inf, torch.zeros(50, 30, dtype=torch.bool)
    forced[:, 1] = True
    chosen = best_chunks(scores, forced, 7, 40, 2)
    assert torch.equal(best_chunks(scores, forced, 7, torch.tensor([40]), 2), chosen)
    for c, t in ((0, 0), (0, 49), (1, 20)):
        rank = [9.0 if i == 1 else float(x) for i, x in enumerate(scores[c, t])]
        expected = [i for i in oracle.best_first(range(min(30, (40 + t) // 2)), rank) if rank[i] > -torch.inf][:7]
        assert chosen[c, t][: len(expected)].tolist() == sorted(expected)
        assert best_first(scores[c, t], 9).tolist() == oracle.best_first(range(30), scores[c, t].tolist())[:9]
        assert best_tokens(scores[c, t], 9).tolist() == best_first(scores[c, t], 9).sort().values.tolist()
