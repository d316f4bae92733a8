"""GGUF headers: read as the gguf package wrote them, and refused where anything in them is wrong."""

import os
import shutil
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from struct import pack
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from lce.errors import ModelError
from lce.weights import gguf_file
from lce.weights.gguf_file import MOST_KEYS, MOST_VALUES, read_gguf
from lce.weights.gguf_types import TYPES
from lce.weights.safetensors_file import MOST_TENSORS, stamp_of
from tests.checkpoints import save_tiny
from tests.command import Process
from tests.gguf_files import write_gguf
from tests.gguf_models import as_saved, save_gguf
from tests.mutated_gguf import as_others_read

U8, I8, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 1, 4, 6, 7, 8, 9, 10
ONES = {"i8": np.int8(-7), "u8": np.uint8(200), "i16": np.int16(-300), "u16": np.uint16(60000), "i32": np.int32(-70000)}
ONES |= {"u64": np.uint64(1 << 63), "i64": np.int64(-1 << 40), "f32": 0.25, "f64": np.float64(1e-300), "bool": False}
LISTS = {"tokens": ["<s>", "", "Ġthe", "日本"], "numbers": [1, 1 << 31], "scores": [-1e4, -np.inf], "bools": [True]}
METADATA = ONES | LISTS | {"general.architecture": "llama", "text": "Längere\nKöpfe 😀 \0", "empty": ""}
SHAPES = {"a": (3, 64), "b": (5,), "c": (2, 3, 32), "d": (1, 1, 1, 1), "e": (2, 256)}
WEIGHTS = {name: np.random.default_rng(0).standard_normal(shape) for name, shape in SHAPES.items()}
KINDS = {"a": "Q4_1", "c": "Q8_0", "e": "Q4_K"}


def read_mutated(*arguments: object) -> list[int]:
    """The numbers of damaged copies that were refused, and read: see `tests.mutated_gguf`, which has the limits."""
    with Process([sys.executable, "-m", "tests.mutated_gguf", *map(str, arguments)]) as process:
        out, errors = process.communicate(timeout=400)
    assert process.returncode == 0, errors[-2000:]
    return [int(number) for number in out.split()]


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return pack("<Q", len(raw)) + raw


def array(kind: int, count: int, raw: bytes = b"", name: str = "k") -> bytes:
    return text(name) + pack("<IIQ", ARRAY, kind, count) + raw


def tensor(name: str | bytes = "w", sizes: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def made(keys: Sequence[bytes] = (), tensors: Sequence[bytes] = (), data: int = 0, **claims: int) -> bytes:
    """A file with `data` bytes of data. It claims its numbers of tensors and keys, unless `claims` says otherwise."""
    n_tensors, n_keys = claims.get("n_tensors", len(tensors)), claims.get("n_keys", len(keys))
    head = b"GGUF" + pack("<IQQ", claims.get("version", 3), n_tensors, n_keys) + b"".join([*keys, *tensors])
    return head + bytes(-len(head) % 32 + data)


def keyed(kind: int, raw: bytes, name: str | bytes = "k") -> bytes:
    return made([text(name) + pack("<I", kind) + raw])


def one(data: int = 32, **description: Any) -> bytes:
    return made((), [tensor(**description)], data)


def two(data: int, offset: int, name: str = "v", **claims: int) -> bytes:
    return made((), [tensor(), tensor(name, offset=offset)], data, **claims)


def aligned(value: int, kind: str = "II") -> bytes:
    return made([text("general.alignment") + pack(f"<{kind}", {"II": U32, "IQ": U64}[kind], value)], [tensor()], 32)


DAMAGED: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "begins with b''; expected GGUF"),
    "a page": (b"<!DOCTYPE html>\n<html>", "begins with b'<!DOCTYP'; expected GGUF: download the file again"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a Git LFS pointer.*git lfs pull"),
    "the magic alone": (b"GGUF", "the header has 24 bytes at 0, but the file has 4"),
    "version 0": (made(version=0), "is GGUF of version 0; expected little-endian version 2 or 3"),
    "version 1": (made(version=1), "is GGUF of version 1; expected .*: download a newer file"),
    "version 4": (made(version=4), "is GGUF of version 4;"),
    "big-endian": (b"GGUF" + pack(">IQQ", 3, 0, 0), "is a big-endian GGUF file; .*: download a little-endian one"),
    "tensors beyond the file": (made(n_tensors=4), "4 tensors in a file of 32 bytes, expected at most 1;"),
    "2^63 tensors": (made(n_tensors=1 << 63), "9223372036854775808 tensors in a file"),
    "2^64 - 1 keys": (made(n_keys=2**64 - 1), "18446744073709551615 keys in a file of 32 bytes, expected at most 2;"),
    "too many tensors": (made(n_tensors=50_001, data=3 << 20), "50001 tensors .* expected at most 50000;"),
    "too many keys": (made(n_keys=10_001, data=3 << 20), "10001 keys .* expected at most 10000;"),
    "a string of 2^64 - 1": (keyed(STRING, pack("<Q", 2**64 - 1)), "has 18446744073709551623 bytes at 37, but the"),
    "a key of 2^62": (made([pack("<QI", 2**62, 0)], data=9), "has 4611686018427387912 bytes at 24, but the file has"),
    "a key of 70,000": (keyed(U8, b"\0", "k" * 70_000), "key 0 has a name of 70000 characters"),
    "a key without name": (keyed(U8, b"\0", ""), "key 0 has a name of 0 characters"),
    "a key twice": (made([array(U8, 0), array(STRING, 0)]), "key 'k' appears twice"),
    "a key with a newline": (keyed(U8, b"\0", "k\n\0"), r"key 'k\\n\\x00' has characters that cannot be printed"),
    "a key not UTF-8": (keyed(U8, b"\0", b"k\xff"), "the name of key 0: byte 1 of string 0 is not UTF-8"),
    "a value not UTF-8": (keyed(STRING, text(b"\xed\xa0\x80")), "key 'k': byte 0 of string 0 is not UTF-8"),
    "tokens not UTF-8": (made([array(STRING, 2, text("a") + text(b"\xc3"))]), "byte 0 of string 1 is not UTF-8"),
    "an unknown type": (keyed(13, bytes(8)), "key 'k' has the unknown type 13"),
    "an unknown type in an array": (made([array(99, 1, bytes(8))]), "key 'k' has the unknown type 99"),
    "arrays in an array": (made([array(ARRAY, 1, pack("<IQ", U8, 1))]), "key 'k' has arrays in an array"),
    "2^63 numbers": (made([array(U8, 1 << 63)]), "than 2097152 elements in arrays, with 9223372036854775808 here"),
    "the end in an array": (made([array(U8, 1 << 63)])[:43], "but the file has 43"),
    "numbers beyond the file": (made([array(U32, 40)]), "the header has 160 bytes at 49, but the file has 64"),
    "strings beyond the file": (made([array(STRING, 8)]), "the header has 64 bytes at 49, but the file has 64"),
    "a bool of 2": (keyed(BOOL, b"\2"), "key 'k' has the bool 2, expected 0 or 1"),
    "a bool of 255": (made([array(BOOL, 3, b"\1\0\xff")]), "key 'k' has the bool 255"),
    "NaN": (keyed(F32, pack("<f", float("nan"))), "key 'k' has NaN"),
    "NaN in an array": (made([array(F32, 2, pack("<ff", 1, float("nan")))]), "key 'k' has NaN"),
    "an alignment of 0": (aligned(0), "general.alignment is 0, expected a power of two from 8 to 1048576"),
    "an alignment of 4": (aligned(4), "general.alignment is 4,"),
    "an alignment of 24": (aligned(24), "general.alignment is 24,"),
    "an alignment of 2^31": (aligned(1 << 31), "general.alignment is 2147483648,"),
    "an alignment beyond the file": (aligned(1 << 20), "the file is cut short: 128 bytes, expected 1048608"),
    "an alignment of another type": (aligned(32, "IQ"), "key 'general.alignment' has the type 10, expected 4"),
    "a name twice": (two(64, 32, "w"), "tensor 'w' appears twice"),
    "a tensor without name": (one(name=""), "tensor 0 has a name of 0 characters"),
    "a long name": (one(name="w" * 64), "has a name of 64 characters, expected 1 to 63"),
    "a name not UTF-8": (one(name=b"\x80"), "the name of tensor 0: byte 0 of string 0 is not"),
    "a name with a newline": (one(name="w\n\0\x1b[2J"), r"tensor 'w\\n\\x00\\x1b\[2J' has characters that cannot be"),
    "an unknown tensor type": (one(kind=43), "tensor 'w' has the unknown type 43"),
    "5 dimensions": (one(sizes=(1,) * 5), "tensor 'w' has 5 dimensions, expected at most 4"),
    "a size of 2^63": (one(sizes=(8, 1 << 63)), r"impossible shape \(9223372036854775808, 8\)"),
    "no rows of 2^62": (one(sizes=(0, 1 << 62)), r"impossible shape \(4611686018427387904, 0\)"),
    "a row of 31": (one(34, sizes=(31,), kind=8), r"the shape \(31,\), but Q8_0 has blocks of 32"),
    "a block of one": (one(34, sizes=(), kind=8), r"the shape \(\), but Q8_0 has blocks of 32"),
    "a product of 2^64": (one(0, sizes=(1 << 32, 1 << 32)), "is cut short: 96 bytes, expected 73786976294838206560;"),
    "an offset of 2^64 - 64": (one(offset=2**64 - 64), "'w' has the offset 18446744073709551552, expected 0"),
    "an overlap": (two(64, 0), "'v' has the offset 0, expected 32"),
    "a hole": (two(96, 64), "'v' has the offset 64, expected 32"),
    "a hole at the front": (one(64, offset=32), "'w' has the offset 32, expected 0"),
    "an end cut off": (one(35, sizes=(9,)), "the file is cut short: 99 bytes, expected 100;"),
    "bytes behind the padding": (one(65, sizes=(9,)), "has bytes that belong to no tensor: 129 bytes, expected 100"),
    "a tensor less": (two(64, 32, n_tensors=1), "has bytes that belong to no tensor"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_files_are_refused(tmp_path: Path, kind: str) -> None:
    raw, message = DAMAGED[kind]
    (tmp_path / "a.gguf").write_bytes(raw)
    with pytest.raises(ModelError, match=message) as caught:
        read_gguf(tmp_path / "a.gguf")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("kind", [kind for kind in Type if kind not in TYPES], ids=lambda kind: kind.name)
def test_types_that_are_not_read_are_named(tmp_path: Path, kind: Type) -> None:
    (tmp_path / "a.gguf").write_bytes(one(2048, sizes=(256,), kind=kind))
    with pytest.raises(ModelError, match=rf"'w' is {kind.name}, which lce does not read; .* Q4_K_M or Q8_0"):
        read_gguf(tmp_path / "a.gguf")


@pytest.mark.parametrize("how", [(2, 8, 1), (2, 32, 64), (3, 64, 1), (3, 1 << 20, 1 << 20)])
def test_files_are_read_as_they_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Any) -> None:
    version, alignment, piece = how
    monkeypatch.setattr(gguf_file, "PIECE", piece)
    path, values = write_gguf(tmp_path / "a.gguf", WEIGHTS, KINDS, METADATA | {"general.alignment": alignment})
    raw = bytearray(path.read_bytes())
    raw[4] = version
    path.write_bytes(raw)
    found = read_gguf(path)
    metadata = dict(found.metadata)
    assert (metadata, metadata["bool"] is False) == (METADATA | {"general.alignment": alignment}, True)
    assert {name: info.shape for name, info in found.tensors.items()} == {k: v.shape for k, v in WEIGHTS.items()}
    for name, info in found.tensors.items():
        stored = np.frombuffer(raw, np.uint8)[info.start : info.stop]
        weights = gguf.quants.dequantize(stored, Type[info.dtype]).reshape(info.shape)
        np.testing.assert_array_equal(weights, values[name])
    as_others_read(found)


def test_tensors_without_dimensions_or_weights(tmp_path: Path) -> None:
    tensors = tensor("one", ()), tensor("none", (0, 3), offset=32), tensor("last", (1,), offset=32)
    (tmp_path / "a.gguf").write_bytes(made((), tensors, 36))
    found = read_gguf(tmp_path / "a.gguf").tensors
    assert [(x.shape, x.stop - x.start) for x in found.values()] == [((), 4), ((3, 0), 0), ((1,), 4)]


def test_a_file_cut_off_or_lengthened_anywhere(tmp_path: Path) -> None:
    path, _ = write_gguf(tmp_path / "a.gguf", {"v": np.ones((2, 32)), "w": np.ones(5)}, "Q8_0", {"tokens": ["a", "b"]})
    raw = path.read_bytes()
    end = max(info.stop for info in read_gguf(path).tensors.values())
    assert len(raw) == end + 12
    for size in [len(raw) + 1, *range(len(raw), -1, -1)]:
        os.truncate(path, size)
        if end <= size <= end + 12:
            assert list(read_gguf(path).tensors) == ["v", "w"]
        else:
            with pytest.raises(ModelError, match=r"header has|begins with|cut short|to no tensor|expected at most"):
                read_gguf(path)


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.gguf")
    for path, kind in ((tmp_path / "a.gguf", "a FIFO"), (tmp_path, "a folder"), (Path("/dev/zero"), "a device")):
        with pytest.raises(ModelError, match=f"is {kind}; expected a regular file"):
            read_gguf(path)
    with pytest.raises(ModelError, match="No such file"):
        read_gguf(tmp_path / "b.gguf")


SPARSE: dict[str, tuple[bytes, str]] = {
    "empty strings": (made([array(STRING, 1 << 27)]), "more than 2097152 elements"),
    "bytes": (made([array(U8, 1_000_000_000)]), "more than 2097152 elements"),
    "several arrays": (made([array(U8, 800_000, bytes(800_000), x) for x in "abc"]), "key 'c': more than 2097152 elem"),
    "one string": (keyed(STRING, pack("<Q", 1 << 30)), "headers have more than 67108864 bytes"),
    "keys": (made(n_keys=MOST_KEYS), "key 0 has a name of 0 characters"),
    "tensors": (made(n_tensors=MOST_TENSORS), "tensor 0 has a name of 0 characters"),
    "an alignment": (aligned(1 << 20), "has bytes that belong to no tensor"),
}


@pytest.mark.parametrize("kind", SPARSE)
def test_holes_that_lie_about_the_size(tmp_path: Path, kind: str) -> None:
    """A file of 2 GiB, of which only the beginning is there. Refused in a moment and in little memory."""
    raw, message = SPARSE[kind]
    (tmp_path / "a.gguf").write_bytes(raw)
    os.truncate(tmp_path / "a.gguf", 2 << 30)
    tracemalloc.start()
    started = time.process_time()
    with pytest.raises(ModelError, match=message):
        read_gguf(tmp_path / "a.gguf")
    assert time.process_time() - started < 1
    assert tracemalloc.get_traced_memory()[1] < 32 << 20
    tracemalloc.stop()


FULL: dict[str, Callable[[], bytes]] = {
    "strings": lambda: array(STRING, MOST_VALUES, text("ab") * MOST_VALUES),
    "one string": lambda: text("k") + pack("<I", STRING) + text("😀" + "x" * (60 << 20)),
    "bytes": lambda: array(I8, MOST_VALUES, b"\x80" * MOST_VALUES),
    "numbers": lambda: array(U64, MOST_VALUES, b"\xff" * 8 * MOST_VALUES),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FULL)
def test_the_largest_headers_take_less_than_half_a_gigabyte(tmp_path: Path, kind: str) -> None:
    (tmp_path / "a.gguf").write_bytes(made([FULL[kind]()]))
    assert read_mutated(0, 0, tmp_path) == [0, 0]


@pytest.mark.slow
def test_a_vocabulary_of_256k_is_read_in_a_second(tmp_path: Path) -> None:
    words = {"tokens": [f"token{i}" for i in range(256_000)], "merges": [f"tok en{i}" for i in range(500_000)]}
    arrays = [array(STRING, len(found), b"".join(map(text, found)), name) for name, found in words.items()]
    (tmp_path / "a.gguf").write_bytes(made([*arrays, array(F32, 256_000, bytes(1_024_000), "scores")]))
    started = time.process_time()
    found = read_gguf(tmp_path / "a.gguf").metadata
    took = time.process_time() - started
    print(f"{took:.2f} s")
    assert found == words | {"scores": [0.0] * 256_000}
    assert took < 1.5


def test_a_change_while_the_header_is_read_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = write_gguf(tmp_path / "a.gguf", {"w": np.ones(8)})
    before = stamp_of(os.open(path, os.O_RDONLY))
    assert read_gguf(path).stamps == {path: before}
    real = gguf_file.pread

    def pread(*args: object) -> bytes:
        path.write_bytes(path.read_bytes())
        return real(*args)

    monkeypatch.setattr(gguf_file, "pread", pread)
    assert read_gguf(path).stamps == {path: before}
    assert stamp_of(os.open(path, os.O_RDONLY)) != before


def split(folder: Path, empty_first: bool = False) -> list[Path]:
    """A model of five tensors in three files; the first has no tensors if `empty_first`."""
    tensors, most = {f"t{i}": np.full((4, 8), i) for i in range(5)}, 3 if empty_first else 2
    write_gguf(folder / "m.gguf", tensors, "F32", {"general.name": "M"}, most, small_first_shard=empty_first)
    return sorted(folder.glob("*.gguf"))


@pytest.mark.parametrize("empty_first", [False, True])
def test_any_shard_stands_for_the_whole(tmp_path: Path, empty_first: bool) -> None:
    shards = split(tmp_path, empty_first)
    assert [path.name for path in shards] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for path in shards:
        found = read_gguf(path)
        assert (found.path, list(found.stamps), list(found.tensors)) == (shards[0], shards, [f"t{i}" for i in range(5)])
        assert found.metadata["general.name"] == "M"
        as_others_read(found)
    for i, info in enumerate(found.tensors.values()):
        assert (np.frombuffer(info.file.read_bytes()[info.start : info.stop], "<f4") == i).all()


def patch(path: Path, key: str, kind: str, value: int) -> None:
    raw = path.read_bytes()
    at = raw.index(key.encode()) + len(key) + 4
    new = pack(f"<{kind}", value)
    path.write_bytes(raw[:at] + new + raw[at + len(new) :])


def count_six(*shards: Path) -> None:
    for path in shards:
        patch(path, "split.tensors.count", "i", 6)


SPLITS: dict[str, tuple[Callable[[Path, Path, Path], object], str]] = {
    "one is missing": (lambda a, b, c: c.unlink(), r"1 of 3 shards are missing \(.m-00003-of-00003.gguf.\); download"),
    "one is another": (lambda a, b, c: shutil.copy(b, c), "00003.gguf: split.no is 1, expected 2 by the file's name"),
    "the first is another": (lambda a, b, c: shutil.copy(c, a), "split.no is 2, expected 0"),
    "one is of another count": (lambda a, b, c: patch(c, "split.count", "H", 4), "'split.count' is not as in the"),
    "one is not split": (lambda a, b, c: write_gguf(c, {"t4": np.ones(8)}), "split.no is None, expected 2"),
    "one counts wrongly": (lambda a, b, c: count_six(c), "is not as in the first shard, so it is of another model"),
    "all count wrongly": (count_six, "the shards have 5 tensors, expected 6 by split.tensors.count"),
    "a tensor twice": (lambda a, b, c: c.write_bytes(c.read_bytes().replace(b"t4", b"t1")), "'t1' is in another shard"),
    "damage": (lambda a, b, c: os.truncate(c, c.stat().st_size - 32), "00003.gguf: the file is cut short"),
    "a FIFO": (lambda a, b, c: (c.unlink(), os.mkfifo(c)), "is a FIFO; expected a regular file"),
    "a link to nothing": (lambda a, b, c: (c.unlink(), c.symlink_to("none")), "00003.gguf: No such file"),
}


@pytest.mark.parametrize("kind", SPLITS)
def test_shards_that_do_not_belong_together(tmp_path: Path, kind: str) -> None:
    shards, (damage, message) = split(tmp_path), SPLITS[kind]
    damage(*shards)
    with pytest.raises(ModelError, match=message) as caught:
        read_gguf(shards[1])
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(("limit", "most"), [("MOST_TENSORS", 4), ("LARGEST_HEADER", 600)])
def test_shards_too_large_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, most: int) -> None:
    monkeypatch.setattr(gguf_file, limit, most)
    with pytest.raises(ModelError, match=f"have more than {most} (tensors|bytes)"):
        read_gguf(split(tmp_path)[0])


def test_a_shard_by_another_name(tmp_path: Path) -> None:
    shards = split(tmp_path)
    for name in ("m.gguf", "m-00002-of-00004.gguf", "m-2-of-3.gguf", "\n"):
        path = shards[1].rename(tmp_path / name)
        with pytest.raises(ModelError, match=r"is one of 3 shards; expected a name that ends in -00002-of-00003.gguf"):
            read_gguf(path)
        path.rename(shards[1])


def test_files_that_were_merged_or_never_split_stand_alone(tmp_path: Path) -> None:
    for count, name in enumerate(("a.gguf", "a-00001-of-00003.gguf")):
        path, _ = write_gguf(tmp_path / name, {"w": np.ones(8)}, "F32", {"split.count": np.uint16(count)})
        assert list(read_gguf(path).stamps) == [path]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "count"), [(0, 50), (50, 950)])
def test_random_damage_is_refused_or_read_as_others_read_it(tmp_path: Path, first: int, count: int) -> None:
    folders = tmp_path / "one", tmp_path / "split", tmp_path / "tiny"
    for folder in folders:
        folder.mkdir()
    write_gguf(folders[0] / "a.gguf", WEIGHTS, KINDS, METADATA)
    split(folders[1])
    save_gguf(folders[2] / "tiny.gguf", as_saved(save_tiny(folders[2])), "Q8_0")
    found = read_mutated(first, count, *folders)
    assert len(found) == 6
    assert min(found) > count / 20
