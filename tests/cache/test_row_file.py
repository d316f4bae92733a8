"""Rows in a file: read back as they were written, whatever the disk does, or an error that says so."""

import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lce.cache import disk, row_file
from lce.cache.disk import SpillFile
from lce.cache.formats import KVFormat
from lce.cache.row_file import Checks, RowFile, fingerprints
from lce.errors import CapacityError, DataError
from tests.command import output, start

ROW = (2, 1, 4)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def format_of(dtype: torch.dtype = torch.float32) -> KVFormat:
    return KVFormat(ROW[1], 1, ROW[2], dtype)


def some(n: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, *ROW, generator=torch.Generator().manual_seed(seed)).to(dtype)


def put(file: RowFile, first: int, rows: Tensor) -> None:
    file.write_pages(np.array([first]), rows[None])


def add(file: RowFile, rows: Tensor) -> int:
    (first,) = file.allocate_pages(np.zeros(1, np.int64), np.zeros(1, np.int64), len(rows))
    put(file, first, rows)
    return first


def spill(folder: Path, n: int = 0, dtype: torch.dtype = torch.float32) -> SpillFile:
    file = SpillFile(folder, format_of(dtype))
    add(file, some(n, dtype=dtype))
    return file


def everything(file: RowFile) -> Tensor:
    return file.read(np.arange(file.n_rows))


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PER_CALL": 200, "GAP": 100, "AT_ONCE": 25, "CHECK_BLOCK": 8}.items():
        monkeypatch.setattr(row_file, name, value)
    monkeypatch.setattr(disk, "GROWTH", 100)


@given(data=st.data(), dtype=st.sampled_from(DTYPES))
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_read_in_any_order(data: st.DataObject, dtype: torch.dtype) -> None:
    with TemporaryDirectory() as folder:
        file, expected = SpillFile(Path(folder), format_of(dtype)), torch.zeros(0, *ROW, dtype=dtype)
        for seed in range(data.draw(st.integers(1, 8))):
            if data.draw(st.booleans()):  # more rows
                new = some(data.draw(st.integers(0, 30)), seed, dtype)
                assert add(file, new) == len(expected)
                expected = torch.cat((expected, new))
            elif len(expected):  # others in place of some
                first = data.draw(st.integers(0, len(expected) - 1))
                new = some(data.draw(st.integers(0, len(expected) - first)), seed, dtype)
                put(file, first, new)
                expected[first : first + len(new)] = new
            assert (file.n_rows, file.n_bytes) == (len(expected), expected.nbytes)
            if len(expected):
                which = st.lists(st.integers(0, len(expected) - 1), max_size=40)
                index = np.array(data.draw(which), np.int64)
                assert torch.equal(file.read(index), expected[torch.from_numpy(index)])


@given(data=st.data(), size=st.integers(1, 5), dtype=st.sampled_from(DTYPES))
@settings(max_examples=80, deadline=None)
def test_pages_are_the_rows_one_after_the_other(data: st.DataObject, size: int, dtype: torch.dtype) -> None:
    with TemporaryDirectory() as folder:
        file = checked(Path(folder) / "file", 60, dtype=dtype) if data.draw(st.booleans()) else None
        file = file or spill(Path(folder), 60, dtype)
        starts, some_pages = st.lists(st.integers(0, 60 - size), max_size=12), st.integers(1, 4)
        first = [at for start in data.draw(starts) for at in range(start, 61 - size, size)[: data.draw(some_pages)]]
        found = file.read_pages(np.array(first, np.int64), size)
        index = torch.tensor(first, dtype=torch.int64)[:, None] + torch.arange(size)
        assert torch.equal(found, some(60, dtype=dtype)[index])
        assert file.bytes_read == found.nbytes


def test_contexts_share_a_file_from_several_threads(tmp_path: Path) -> None:
    file = SpillFile(tmp_path, format_of())

    def work(seed: int) -> bool:
        mine = []
        for step in range(20):
            rows = some(5, seed * 100 + step)
            mine.append((add(file, rows), rows))
        index = np.concatenate([first + np.arange(5) for first, _ in mine])
        return torch.equal(file.read(index), torch.cat([rows for _, rows in mine]))

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(work, range(6)))
    assert file.n_rows == 600


WRITTEN = """import numpy, os, sys, time, torch
from pathlib import Path
from lce.cache.formats import KVFormat
from lce.cache.disk import SpillFile
file = SpillFile(Path(sys.argv[1]), KVFormat(1, 1, 4, torch.float32))
zero = numpy.zeros(1, int)
file.write_pages(file.allocate_pages(zero, zero, 1000), torch.ones(1, 1000, 2, 1, 4))
"""


@pytest.mark.slow
def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    code = "print(int(file.read(numpy.arange(1000)).sum()), flush=True)\ntime.sleep(60)\n"
    folder = tmp_path / "a" / "b"
    with start(WRITTEN + code, folder) as process:
        assert (process.line(), list(folder.iterdir())) == ("8000\n", [])
        process.kill()
    assert (process.returncode, list(folder.iterdir())) == (-9, [])


@pytest.mark.parametrize("what", ["a file", "below a file", "read-only"])
def test_a_folder_that_cannot_be_used(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    folder = {"a file": tmp_path / "file", "below a file": tmp_path / "file" / "spill"}.get(what, tmp_path / "spill")
    if what == "read-only":
        monkeypatch.setattr(disk.tempfile, "TemporaryFile", failing(errno.EROFS))
    with pytest.raises(CapacityError, match=f"^cannot write {folder}: .*; free some space or name another place$"):
        SpillFile(folder, format_of())


# Faults: what the disk refuses is an error, and what was there before it stays.
def failing(number: int) -> Mock:
    return Mock(side_effect=OSError(number, os.strerror(number)))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT], ids=errno.errorcode.get)
def test_a_write_that_fails_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    file = spill(tmp_path, 10)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing(number))
        with pytest.raises(CapacityError, match=rf"^cannot write the spill file in {tmp_path}: .*; free some .*\Z"):
            add(file, some(3, 1))
        assert torch.equal(file.read(np.arange(10)), some(10))
    assert file.bytes_written == 320
    put(file, 10, some(3, 1))
    assert torch.equal(everything(file), torch.cat((some(10), some(3, 1))))


@pytest.mark.parametrize("most", [1, 7, 32, 100])
def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    file, original = spill(tmp_path, 10), os.pwrite
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda descriptor, data, offset: original(descriptor, data[:most], offset))
        add(file, some(8, 1))
        put(file, 2, some(3, 2))
    expected = torch.cat((some(10), some(8, 1)))
    expected[2:5] = some(3, 2)
    assert torch.equal(everything(file), expected)


def test_a_disk_that_accepts_or_flushes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = spill(tmp_path, 10)
    file.flush()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda *_: 0)
        patch.setattr(os, "fsync", failing(errno.EIO))
        with pytest.raises(CapacityError, match="accepted no bytes"):
            put(file, 0, some(10, 1))
        with pytest.raises(CapacityError, match="Input/output error"):
            file.flush()
    assert torch.equal(everything(file), some(10))


@pytest.mark.parametrize("most", [1, 7, 32, 100])
def test_a_short_read_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    file, original = spill(tmp_path, 60), os.preadv
    monkeypatch.setattr(os, "preadv", lambda descriptor, to, *how: original(descriptor, [to[0][:most]], *how))
    assert torch.equal(file.read_pages(np.arange(0, 60, 3), 3).flatten(0, 1), some(60))


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EOPNOTSUPP], ids=errno.errorcode.get)
@pytest.mark.parametrize("n", [1, 3, 60])
def test_pages_on_disk_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n: int, number: int) -> None:
    file, original, pages = spill(tmp_path, n), os.preadv, np.arange(n)[::-1].copy()

    def disk(descriptor: int, to: list[memoryview], offset: int, flags: int = 0) -> int:
        if flags and offset % 3:
            raise OSError(number, os.strerror(number))
        return original(descriptor, to, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", disk)
        assert torch.equal(file.read_pages(pages, 1).squeeze(1), some(n).flip(0))


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_page_that_the_disk_does_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: bool) -> None:
    file, pages = spill(tmp_path, 60), np.arange(60)[::-1].copy()

    def disk(descriptor: int, to: list[memoryview], offset: int, flags: int = 0) -> int:
        raise OSError(errno.EAGAIN if flags and not in_memory else errno.EIO, "no")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", disk)
        said = rf"^cannot read the spill file in {tmp_path}: no; prefill the text again\Z"
        with pytest.raises(DataError, match=said):
            file.read_pages(pages, 1)
    assert torch.equal(file.read_pages(pages, 1).squeeze(1), some(60).flip(0))
    os.ftruncate(file._descriptor, 59 * 32)
    with pytest.raises(DataError, match="was cut short since it was opened; prefill the text again"):
        file.read_pages(pages, 1)


def test_pages_are_read_in_a_process_that_was_forked(tmp_path: Path) -> None:
    """Its parent's threads are not there."""
    script = (
        "pages = numpy.arange(0, 100, 2)\n"
        "original = os.preadv\n"
        "def disk(descriptor, to, offset, flags=0):\n"
        "    if flags: raise BlockingIOError(11, 'not in memory')\n"
        "    time.sleep(0.01)\n"  # so that every thread has work
        "    return original(descriptor, to, offset)\n"
        "os.preadv = disk\n"
        "def read(): return int(file.read_pages(pages, 1).sum())\n"
        "read(); child = os.fork()\n"
        "if child == 0: os._exit(0 if read() == 400 else 1)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    with start(WRITTEN + script, tmp_path) as process:
        assert process.wait() == 0


def test_without_space_to_spare_what_is_needed_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "GROWTH", 64 << 20)
    file, original = SpillFile(tmp_path, format_of()), os.posix_fallocate

    def small_disk(descriptor: int, offset: int, size: int) -> None:
        if offset + size > 100 * 32:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", small_disk)
    for seed in range(10):
        add(file, some(10, seed))
    with pytest.raises(CapacityError, match="No space left on device"):
        add(file, some(1))
    assert torch.equal(everything(file), torch.cat([some(10, seed) for seed in range(10)]))


# Rows with checks: what was altered since it was written is found when it is read.
BEFORE = 24  # bytes before the first row


def checked(path: Path, n: int, *, writable: bool = False, dtype: torch.dtype = torch.float32) -> RowFile:
    checks = Checks()
    path.write_bytes(bytes(BEFORE + some(n, dtype=dtype).nbytes))
    made = RowFile(os.open(path, os.O_RDWR), "it", format_of(dtype), checks, start=BEFORE, n_rows=n)
    put(made, 0, some(n, dtype=dtype))
    if writable:
        return made
    return RowFile(os.open(path, os.O_RDONLY), "it", format_of(dtype), checks, start=BEFORE, n_rows=n)


@given(
    row=st.integers(0, 9), at=st.integers(0, 31), change=st.integers(1, 255), late=st.booleans(), write=st.booleans()
)
@settings(max_examples=100, deadline=None)
def test_an_altered_byte_is_found(row: int, at: int, change: int, late: bool, write: bool) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        file = checked(path, 10, writable=write)
        if late:
            everything(file)
        with path.open("r+b") as raw:
            raw.seek(BEFORE + row * 32 + at)
            old = raw.read(1)[0]
            raw.seek(-1, os.SEEK_CUR)
            raw.write(bytes([old ^ change]))
        with pytest.raises(DataError, match=r"^it was altered since it was written; prefill the text again\Z"):
            everything(file)
        with pytest.raises(DataError):
            file.read(np.array([row]))
        with pytest.raises(DataError, match="was altered"):
            file.read_pages(np.array([0, row // 2 * 2]), 2)
        others = np.array([i for i in range(10) if i != row])
        assert torch.equal(file.read(others), some(10)[torch.from_numpy(others)])


@pytest.mark.parametrize("late", [False, True], ids=["before it was read", "after it was read"])
@pytest.mark.parametrize("size", [0, BEFORE, BEFORE + 1, BEFORE + 10 * 32 - 1])
def test_a_truncated_file_is_found(tmp_path: Path, size: int, late: bool) -> None:
    file = checked(tmp_path / "file", 10)
    if late:
        everything(file)
    os.truncate(tmp_path / "file", size)
    with pytest.raises(DataError, match=r"^it was cut short since it was opened; prefill the text again\Z"):
        everything(file)


def test_exchanged_rows_are_found(tmp_path: Path) -> None:
    file = checked(tmp_path / "file", 10)
    with (tmp_path / "file").open("r+b") as raw:
        raw.seek(BEFORE)
        raw.write(some(10)[[1, 0]].numpy().tobytes())
    with pytest.raises(DataError, match="was altered"):
        file.read(np.array([0]))


@pytest.mark.slow
def test_a_program_may_end_with_an_open_file(tmp_path: Path) -> None:
    """Objects die while the interpreter takes its modules apart."""
    program = (
        "import lce, sys\n"
        "engine = lce.load('demo', method='longheads')\n"
        "engine.prefill('One is one. ' * 9).save(sys.argv[1])\n"
        "context = engine.open_context(sys.argv[1])\n"
    )
    assert output(program, tmp_path / "context.lce") == ""


# Checks: in memory and in a file they are what was put there, and a damaged row has another one.
START, N_CHECKS = 10, 50  # bytes before the checks of a file, and how many there are


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    """Of a file whose check of row i is 1000 + i."""
    numbers = np.arange(1000, 1000 + N_CHECKS, dtype=np.int32)
    (tmp_path / "file").write_bytes(bytes(START) + numbers.tobytes())
    opened = os.open(tmp_path / "file", os.O_RDWR)
    yield opened
    os.close(opened)


def test_what_is_put_goes_to_the_file(descriptor: int) -> None:
    checks = Checks(descriptor, "it", START, N_CHECKS)
    assert checks.of(np.array([3, 40])).tolist() == [1003, 1040]
    rows = np.array([2, 3, 4, 20, 48, 49])
    checks.put(rows, torch.arange(6, dtype=torch.int32))
    for each in (checks, Checks(descriptor, "it", START, N_CHECKS)):
        assert each.of(rows).tolist() == [0, 1, 2, 3, 4, 5]
        assert each.of(np.array([1, 5, 19, 21, 47])).tolist() == [1001, 1005, 1019, 1021, 1047]


@given(data=st.data(), width=st.sampled_from([8, 16, 64]))
@settings(max_examples=80, deadline=None)
def test_a_fingerprint_is_of_every_byte_and_of_the_place(data: st.DataObject, width: int) -> None:
    rows = torch.randint(0, 256, (6, width), generator=torch.Generator().manual_seed(width)).to(torch.uint8)
    first = data.draw(st.integers(0, 1 << 40)) + np.arange(6)
    truth = fingerprints(rows, first)
    row, byte, change = (data.draw(st.integers(*span)) for span in ((0, 5), (0, width - 1), (1, 255)))
    rows[row, byte] ^= change
    assert (fingerprints(rows, first) != truth).tolist() == [at == row for at in range(6)]
    assert not (fingerprints(rows, first + 1) == truth).any(), "rows that changed places"


@pytest.mark.parametrize("bit", range(64))
def test_two_flips_of_the_same_bit_are_seen(bit: int) -> None:
    """Of a word's highest bits a product modulo 2^64 keeps little."""
    words = torch.randint(-(2**62), 2**62, (1, 16), generator=torch.Generator().manual_seed(bit))
    truth, flip = fingerprints(words, np.array([5])), torch.tensor(1).bitwise_left_shift(bit)
    pairs = torch.combinations(torch.arange(16))
    damaged = words.repeat(len(pairs), 1)
    damaged.scatter_(1, pairs, damaged.gather(1, pairs) ^ flip)
    assert (fingerprints(damaged, np.full(len(pairs), 5)) != truth).all()
