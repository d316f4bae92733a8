"""What the machine can do, measured on little."""

import time
from pathlib import Path

import pytest
import torch

import lce_lab.bench.ceilings as measured
from lce_lab.bench.ceilings import Ceilings, ceilings, machine, products, shortest


@pytest.mark.slow
def test_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(measured, "LEAST_BYTES", 1 << 20)
    for dtype in (torch.float32, torch.bfloat16):
        found = ceilings([(16, 32), (32, 16)], 8, dtype, torch.device("cpu"))
        assert found.rows == 8
        assert min(found.reading, found.copying) > 1e8
        assert found.product == max(found.products.values()) > 1e5


def test_no_dtype_is_slower_than_the_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor without products of bfloat16, which torch multiplies slowly, is measured by what it is fast at."""
    rates = {torch.float32: 170e9, torch.bfloat16: 20e9, torch.int8: 90e9}
    monkeypatch.setattr(measured, "_most_bytes", lambda device: 1 << 20)  # smaller than caches: speeds do not matter
    monkeypatch.setattr(measured, "rate", lambda shapes, rows, dtype, device: rates[dtype])
    found = ceilings([(16, 32)], 8, torch.bfloat16, torch.device("cpu"))
    assert (found.products, found.fastest, found.product) == ({"float32": 170e9, "int8": 90e9}, "float32", 170e9)
    better = found.best(Ceilings(1.0, 2.0, {"int8": 180e9}, 8))
    assert (better.fastest, better.reading) == ("int8", found.reading)


def test_what_is_read_is_larger_than_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes = []
    monkeypatch.setattr(measured, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(measured, "LEAST_BYTES", 1 << 20)
    monkeypatch.setattr(measured, "shortest", lambda work, device: sizes.append(work.__self__.nbytes) or 1.0)
    for text in ("512K", "2048K"):
        (tmp_path / "size").write_text(f"{text}\n")
        monkeypatch.setattr(measured, "L3_SIZE", tmp_path / "size")
        assert measured.reading_speed(torch.device("cpu")) == sizes[-1]
    assert sizes[::2] == [2 << 20, 8 << 20]


def test_products_are_products() -> None:
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    for product in products(torch.float32, torch.device("cpu")):
        torch.testing.assert_close(product(x, weight), x @ weight.T)
    assert len(products(torch.bfloat16, torch.device("cpu"))) == 1
    x, weight = (torch.randint(-128, 128, (n, 24), dtype=torch.int8) for n in (3, 8))
    for product in products(torch.int8, torch.device("cpu")):
        assert product(x, weight).tolist() == (x.double() @ weight.double().T).tolist()


def test_the_first_run_does_not_count() -> None:
    naps = iter([0.0, 0.02, 0.01, 0.03])
    assert 0.01 <= shortest(lambda: time.sleep(next(naps)), torch.device("cpu"), runs=3) < 0.02


def test_the_machine_has_a_name() -> None:
    assert f"torch {torch.__version__} with {torch.get_num_threads()} threads" in machine()
