"""An engine of the tiny model, full and selective, in blocks of 32."""

from pathlib import Path

import pytest

import lce
from lce.methods import Full, LongHeads

METHODS = {"full": Full(), "longheads": LongHeads(chunk_size=8, chunks=4)}


@pytest.fixture(scope="module", params=METHODS)
def engine(request: pytest.FixtureRequest, tiny_model: Path) -> lce.Engine:
    return lce.load(tiny_model, METHODS[request.param], block=32)
