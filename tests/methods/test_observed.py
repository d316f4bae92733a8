"""A method inside another one does what it does alone."""

from typing import Any

import pytest
import torch

from lce.methods import Method, QueryBlock, Wrapped, make
from lce.methods.costs import cost, paper_figures
from tests.running import run, vectors

WINDOW, N = 32, 120
CASES: list[tuple[str, dict[str, Any]]] = [
    ("longheads", {"chunk_size": 4, "chunks": 5, "share": "layer"}),
    ("dca", {}),
    ("esa", {"compress": "pca", "sinks": 4, "top_k": 8}),
    ("quest", {"page": 4, "budget": 20}),
]


@pytest.mark.parametrize(("name", "knobs"), CASES, ids=str)
def test_gives_the_same_bits(name: str, knobs: dict[str, Any]) -> None:
    inner = make(name, knobs)
    q, k, v = vectors(3, 4, 2, N, 8)
    alone, wrapped = (run(method, q, k, v, [80, 39, 1], window=WINDOW) for method in (inner, Wrapped(inner)))
    assert torch.equal(alone, wrapped)


def test_says_of_itself_what_the_inner_one_does() -> None:
    inner = make("longheads", {"chunk_size": 4}).resolve(WINDOW)
    wrapped = Wrapped(make("longheads", {"chunk_size": 4})).resolve(WINDOW)
    assert wrapped.inner == inner
    names = ("block", "choices", "label", "access")
    assert [getattr(wrapped, name) for name in names] == [getattr(inner, name) for name in names]
    block = QueryBlock(100, 108, 4, 2, 8)
    assert wrapped.promised("counted") == inner.promised("counted")
    assert (cost(wrapped, block), paper_figures(wrapped, block)) == (cost(inner, block), paper_figures(inner, block))
    assert not wrapped.promised("recorded"), "attend is called for every token"


def test_no_hook_is_forgotten() -> None:
    """What a method may define is forwarded, but what decode steps that are recorded need."""
    own = {name for name in vars(Method) if not name.startswith("_") and callable(getattr(Method, name))}
    own |= {name for name, value in vars(Method).items() if isinstance(value, property)}
    assert own - {*vars(Wrapped)} == {"decode_chosen", "bound"}
