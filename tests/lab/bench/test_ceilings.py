"""What the machine can do, measured on little."""

import time

import pytest
import torch

import lce.lab.bench.ceilings as measured
from lce.lab.bench.ceilings import ceilings, machine, products, shortest


def test_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(measured, "LEAST_BYTES", 1 << 20)
    for dtype in (torch.float32, torch.bfloat16):
        found = ceilings([(16, 32), (32, 16)], 8, dtype, torch.device("cpu"))
        assert found.rows == 8
        assert min(found.reading, found.copying) > 1e8
        assert found.product > 1e5


def test_products_are_products() -> None:
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    for product in products(torch.float32, torch.device("cpu")):
        torch.testing.assert_close(product(x, weight), x @ weight.T)
    assert len(products(torch.bfloat16, torch.device("cpu"))) == 1


def test_the_first_run_does_not_count() -> None:
    naps = iter([0.0, 0.02, 0.01, 0.03])
    found = shortest(lambda: time.sleep(next(naps)), torch.device("cpu"), runs=3)
    assert 0.01 <= found < 0.02


def test_the_machine_has_a_name() -> None:
    assert f"torch {torch.__version__} with {torch.get_num_threads()} threads" in machine()
