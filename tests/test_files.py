"""Files that appear whole or not at all, whatever fails and whichever process writes at the same time."""

import errno
import os
import socket
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

import lce
from lce import files
from lce.errors import CapacityError, DataError, ModelError, UsageError
from lce.terminal.reading import read_text
from lce_lab.calibrate import calibrate
from lce_lab.eval.record import Record
from lce_lab.eval.report import Report
from lce_lab.study.web_page import write_page


def test_a_file_is_written_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for data in (b"first", b"", b"third" * 100_000):
        files.write_whole(path, data)
        assert (path.read_bytes(), os.listdir(tmp_path)) == (data, ["file"])


@pytest.mark.parametrize("step", ["fsync", "replace", "unlink"])
def test_a_failure_leaves_the_earlier_contents(tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    files.write_whole(path, b"before")

    fail = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(os, step, fail)
    if step == "unlink":  # a read-only file system, where nothing is made
        monkeypatch.setattr("builtins.open", fail)
    with pytest.raises(CapacityError, match=r"^cannot write .*/file: No space left on device; free some space"):
        files.write_whole(path, b"after")
    monkeypatch.undo()
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"before", ["file"])


def test_a_file_that_is_not_locked_yet_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by two processes that write to one target at once: one sweeps when the other has just begun."""
    target, lock = tmp_path / "file", files.lock
    sweeping = threading.Thread(target=files.sweep, args=(target,))

    def lock_late(descriptor: int, path: Path) -> None:
        sweeping.start()
        time.sleep(0.01)
        lock(descriptor, path)

    monkeypatch.setattr(files, "lock", lock_late)
    files.write_whole(target, b"whole")
    sweeping.join(10)
    assert target.read_bytes() == b"whole"


def test_what_a_crash_left_is_removed_and_what_is_locked_stays(tmp_path: Path) -> None:
    target = tmp_path / "file"
    left, locked = files.draft_path(target), files.draft_path(target)
    other = files.draft_path(tmp_path / "other")
    for draft in (left, locked, other):
        draft.write_bytes(b"half")
    os.mkfifo(files.draft_path(target))
    files.draft_path(target).symlink_to(other)
    with locked.open("rb") as file:
        files.lock(file.fileno(), locked)
        files.sweep(target)
        assert not left.exists()
        assert locked.exists()
        assert other.read_bytes() == b"half", "a draft of another target, not written through the link"
    files.sweep(target)
    assert not locked.exists()
    files.sweep(tmp_path / "none" / "file")


@pytest.mark.parametrize("name", ["a" * 255, "é" * 127])
def test_every_name_that_a_file_can_have_is_written(tmp_path: Path, name: str) -> None:
    target = tmp_path / name
    left = files.draft_path(target)
    left.write_bytes(b"half")
    files.check_folder(target)
    files.write_whole(target, b"whole")
    assert os.listdir(tmp_path) == [name], "what a crash left is removed"


@pytest.mark.parametrize("name", ["a" * 256, "é" * 128, "d/" * 2100])
def test_too_long_a_name_is_refused_by_all_that_take_a_path(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    engine, options = lce.load("demo"), {"device": "cpu"}
    for call in (
        lambda: engine.prefill([2]).save(path),
        lambda: engine.open_context(path),
        lambda: lce.info(path),
        lambda: engine.prefill_file([2], path),
        lambda: lce.load(path, **options),
        lambda: lce.plan(path, tokens=5),
        lambda: lce.quantize("demo", path),
        lambda: lce.load("demo", spill_dir=path),
        lambda: Record(path),
        lambda: Report.read([path]),
        lambda: lce.load("demo", lce.methods.ESA(maps=str(path))),
        lambda: calibrate("demo", "text", path),
        lambda: write_page({}, path),
        lambda: read_text(str(path)),
    ):
        with pytest.raises(UsageError, match="which is too long; expected names of 255 bytes at most"):
            call()


def special(folder: Path, kind: str) -> Path:
    path = folder / kind
    if kind == "folder":
        path.mkdir()
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/zero")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(path))
    return path


@pytest.mark.parametrize("kind", ["folder", "FIFO", "device", "socket"])
def test_only_regular_files_are_opened_or_replaced(tmp_path: Path, kind: str) -> None:
    path = special(tmp_path, kind)
    with pytest.raises(ModelError, match=f"is a {kind}; expected a regular file$"):
        files.open_regular(path, ModelError)
    with pytest.raises(DataError, match=f"is a {kind}; expected a regular file, or a name that is free$"):
        files.write_whole(path, b"data")
    assert not path.is_file()


def test_a_regular_file_is_opened_through_a_link_unless_that_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"data")
    (tmp_path / "link").symlink_to("file")
    descriptor = files.open_regular(tmp_path / "link")
    assert os.read(descriptor, 9) == b"data"
    os.close(descriptor)
    with pytest.raises(DataError, match=r"link is a symbolic link; expected a regular file$"):
        files.open_regular(tmp_path / "link", follow=False)


@pytest.mark.parametrize("name", ["none", "a\0b", "x" * 300, "line\nbreak\x1b[2J"])
def test_what_cannot_be_opened_is_one_printable_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"^cannot read ") as caught:
        files.open_regular(tmp_path / name)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["line\nbreak\x1b[2J", "\u202edlof", "x" * 600])
def test_what_cannot_be_written_is_one_printable_line(name: str, tmp_path: Path) -> None:
    path, full = tmp_path / name, OSError(errno.ENOSPC, "No space left on device")
    (tmp_path / "file").touch()
    said = [str(files.unwritable(x, full)) for x in (path, str(path), files.named(path))]
    with open(tmp_path / "file") as held, open(tmp_path / "file") as second:
        files.lock(held.fileno(), path)
        with pytest.raises(DataError, match="another process") as caught:
            files.lock(second.fileno(), path)
    assert said[0] == said[1] == said[2]
    assert all(text.isprintable() and len(text) < 600 for text in (*said, str(caught.value)))
