"""Work folders: resuming after an interruption, damage, and what is no work folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from lce.calibrate import Calibration, calibrate, work_folder
from lce.errors import DataError, UsageError
from lce.methods.map_file import read_sealed, sealed
from tests.calibrate.texts import TEXT, TINY, bytes_of


def test_a_calibration_goes_on_after_every_write(
    tiny_model: Path, tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call is interrupted after its first write, until one has nothing left to write but the maps."""
    out = tmp_path / "maps.safetensors"
    write, calls = work_folder.write_whole, 0

    def write_once(path: Path, data: bytes) -> None:
        write(path, data)
        raise KeyboardInterrupt

    monkeypatch.setattr(work_folder, "write_whole", write_once)
    for _ in range(40):
        calls += 1
        try:
            calibrate(tiny_model, TEXT, out, TINY)
            break
        except KeyboardInterrupt:
            assert not out.exists()
        if calls == 3:
            with pytest.raises(UsageError, match=r"begun with other options, text or model \(low_dim\); finish"):
                calibrate(tiny_model, TEXT, out, Calibration(low_dim=9, tokens=512, epochs=1, batch=64))
            with pytest.raises(UsageError, match=r"\(far, window, rope, text\)"):
                calibrate(tiny_model, TEXT, out, TINY, window=48, rope="linear", rope_factor=2)
    assert calls == 1 + 8 * 2 + 2 + 1  # the plan, pieces, layers, and the call that ends
    assert bytes_of(out) == whole
    assert sorted(tmp_path.iterdir()) == [out, tmp_path / "whole.safetensors"]


@pytest.fixture
def whole(tiny_model: Path, tmp_path: Path) -> dict[str, bytes]:
    """The maps of an undisturbed calibration."""
    out = tmp_path / "whole.safetensors"
    calibrate(tiny_model, TEXT, out, TINY)
    return bytes_of(out)


@pytest.fixture
def begun(tiny_model: Path, tmp_path: Path) -> Path:
    """The work folder of a calibration that was interrupted when all pieces and one layer were finished."""

    def interrupt(what: str, done: int, total: int) -> None:
        if (what, done) == ("learning", 2):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(tiny_model, TEXT, tmp_path / "maps.safetensors", TINY, progress=interrupt)
    return tmp_path / "maps.safetensors.work"


KINDS = ["plan.safetensors", "piece-00003-001.safetensors", "layer-000.safetensors"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_work_file_changes_no_map(
    tiny_model: Path, begun: Path, whole: dict[str, bytes], kind: str, tmp_path: Path
) -> None:
    out, kept = tmp_path / "maps.safetensors", tmp_path / "kept"
    shutil.copytree(begun, kept)
    good = (begun / kind).read_bytes()
    flipped = [bytes([*good[:i], good[i] ^ 1 << i % 8, *good[i + 1 :]]) for i in (0, 41, 123, len(good) - 1)]
    for damage in (*flipped, b"", good[:-3], good + b"\0", b"[" * 60_000):
        shutil.rmtree(begun, ignore_errors=True)
        shutil.copytree(kept, begun)
        (begun / kind).write_bytes(damage)
        notes: list[str] = []
        calibrate(tiny_model, TEXT, out, TINY, note=notes.append)
        assert bytes_of(out) == whole
        assert len(notes) == 1
        assert kind in notes[0]
        assert notes[0].isprintable()
        assert not begun.exists()


def test_a_work_file_of_another_place_or_plan_changes_no_map(
    tiny_model: Path, begun: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    notes: list[str] = []
    place = begun / "piece-00003-001.safetensors"
    shutil.copy(begun / "piece-00004-001.safetensors", place)
    tensors, metadata = read_sealed(begun / "piece-00005-001.safetensors", 1 << 20)
    other = sealed({name: x + 1 for name, x in tensors.items()}, metadata | {"plan": "0" * 64})
    (begun / "piece-00005-001.safetensors").write_bytes(other)
    calibrate(tiny_model, TEXT, tmp_path / "maps.safetensors", TINY, note=notes.append)
    assert bytes_of(tmp_path / "maps.safetensors") == whole
    assert [note.split(": ")[1] for note in notes] == [
        "it belongs to another calibration or place; it is computed again"
    ] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_in_the_work_folder_is_refused(
    tiny_model: Path, begun: Path, kind: str, tmp_path: Path
) -> None:
    place, moved = begun / kind, tmp_path / "moved"
    place.rename(moved)
    for make in (lambda: os.mkfifo(place), place.mkdir, lambda: place.symlink_to(moved)):
        make()
        with pytest.raises(DataError, match=rf"{kind} is a .*; expected a regular file"):
            calibrate(tiny_model, TEXT, tmp_path / "maps.safetensors", TINY)
        place.rmdir() if place.is_dir() else place.unlink()


def test_what_is_no_work_folder_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    work, out = tmp_path / "maps.safetensors.work", tmp_path / "maps.safetensors"
    (tmp_path / "elsewhere").mkdir()
    for make in (work.touch, lambda: os.mkfifo(work), lambda: work.symlink_to(tmp_path / "elsewhere")):
        make()
        with pytest.raises(DataError, match=r"\.work is no folder; remove it"):
            calibrate(tiny_model, TEXT, out, TINY)
        work.unlink()
    for make in (lambda: os.mkfifo(out), out.mkdir, lambda: out.symlink_to("nowhere")):
        make()
        with pytest.raises(DataError, match=r"maps.safetensors is a .*; expected a regular file"):
            calibrate(tiny_model, TEXT, out, TINY)
        out.rmdir() if out.is_dir() else out.unlink()
    assert list(tmp_path.iterdir()) == [tmp_path / "elsewhere"]
