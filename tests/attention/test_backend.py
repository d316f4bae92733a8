"""Backends are found by their names, and `auto` takes one that the machine has."""

import importlib.util
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lce.attention
from lce.attention import Attended, Attention, Tiles
from lce.attention.attention import backends
from lce.attention.reference import Reference
from lce.errors import UsageError
from tests.attention.truth import routed_vectors, slots, turns_of
from tests.running import threads


def test_backends_have_names_and_unknown_ones_are_refused_with_the_nearest() -> None:
    assert Attention.choose().name in ("compiled", "triton"), "needs nothing"
    assert Attention.choose("reference").name == "reference"
    nearest = r"'refrence'; did you mean 'reference'\? valid: auto, compiled, .*, torch, triton"
    with pytest.raises(UsageError, match=nearest):
        Attention.choose("refrence")
    if importlib.util.find_spec("flash_attn") is None:
        with pytest.raises(UsageError, match=r"flash-attn package: .*; it is for GPUs alone"):
            Attention.choose("flash")


def test_one_file_a_backend() -> None:
    files = {path.stem for path in Path(lce.attention.__path__[0]).glob("[!_]*.py")}
    assert set(backends()) <= files
    assert all(cls.__module__ == f"lce.attention.{name}" for name, cls in backends().items())


def test_auto_takes_the_fastest_that_suits(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fast(Reference):
        name, speed = "fast", 9

    class Absent(Fast):
        name, speed = "absent", 10

        @classmethod
        def missing(cls) -> str | None:
            return "a package that nobody has"

    known: dict[str, type[Attention]] = {**backends(), "fast": Fast, "absent": Absent}
    monkeypatch.setattr("lce.attention.attention.backends", lambda: known)
    assert Attention.choose().name == "fast"
    with pytest.raises(UsageError, match="'absent' needs a package that nobody has"):
        Attention.choose("absent")


def test_a_tile_is_attended_once_however_many_queries_chose_it() -> None:
    """Calls of the kernel, and the padding of its queries: at most a quarter."""
    seen: list[tuple[int, int]] = []

    class Counting(Reference):
        def softmax(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Attended:
            seen.append((len(k), q.shape[-2]))
            return super().softmax(q, k, v, **options)

    q, k, v = routed_vectors(8, 2, 300, 6, 5)
    chosen = torch.rand(8, 300, 6, generator=torch.Generator().manual_seed(1)).argsort(-1)[..., :3]
    Counting().routed(q, slots(turns_of(300, 3)), chosen, [Tiles.of_chunks(k, v)])
    assert sum(n_tiles for n_tiles, _ in seen) == 12
    rows = sum(n_tiles * n_queries for n_tiles, n_queries in seen)
    assert 8 * 300 * 3 <= rows <= 8 * 300 * 3 * 1.25


@pytest.mark.parametrize("name", ["torch", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n_threads", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_tile_does_not_depend_on_the_tiles_beside_it(name: str, dtype: torch.dtype, n_threads: int) -> None:
    """To the bit: memory budgets decide which tiles come together."""
    backend = backends()[name]()
    random = torch.Generator().manual_seed(2)
    with threads(n_threads):
        for n_queries, size, dim in product((1, 2, 3, 4, 5, 7, 10, 16, 40), (1, 8, 15, 64), (16, 20, 64)):
            q = torch.randn(9, n_queries, dim, generator=random).to(dtype)
            k, v = (torch.randn(9, size, dim, generator=random).to(dtype) for _ in range(2))
            whole = backend.softmax_of_tiles(q, k, v)
            for some in (slice(0, 1), slice(4, 5), slice(1, 3), slice(5, 9)):
                for one, other in zip(backend.softmax_of_tiles(q[some], k[some], v[some]), whole, strict=True):
                    assert torch.equal(one, other[some])
