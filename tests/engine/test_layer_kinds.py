"""Models whose layers differ: the method acts in global layers, and a layer's own window and RoPE hold elsewhere."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lce
from tests.checkpoints import tokens
from tests.kinds import of_kinds, save_made, true_logits

METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "dca": {"chunk_size": 10},
    "longheads": {"chunk_size": 4, "chunks": 5},
    "esa": {"sinks": 4, "local": 12, "top_k": 9, "compress": "none"},
}
each_method = pytest.mark.parametrize("name", METHODS)


@pytest.fixture(scope="module", autouse=True)
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the made model, whose layers are of several kinds as long as the module's tests run."""
    with of_kinds():
        yield save_made(tmp_path_factory.mktemp("made"))


def load(folder: Path, name: str, **options: Any) -> lce.Engine:
    return lce.load(folder, lce.methods.make(name, METHODS[name]), **options)


@each_method
def test_each_layer_attends_by_its_kind(made: Path, name: str) -> None:
    ids, truth = tokens(100), None
    for block in (64, 7, 1):
        engine = load(made, name, block=block)
        if truth is None or name == "esa":  # the queries of a block choose together
            truth = true_logits(engine, ids, name, METHODS[name], block)
        assert (engine.logits(ids) - truth).abs().max() <= 1e-3, block
