"""Map files: what they give back, and that any other file is refused before it is believed."""

import json
import os
import tracemalloc
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from lce.errors import CapacityError, DataError, UsageError
from lce.methods import RopeConfig
from lce.methods.lowdim import LearnedFor, LowDimMap, LowDimMaps
from lce.methods.map_file import FORMAT, open_maps, read_sealed, save_maps, sealed, unsealed
from tests.checkpoints import raw_safetensors, tensor_entry
from tests.running import low_dim_map

HERE = LearnedFor("this model", low_dim=3, far=16, window=32, rope=RopeConfig("yarn", factor=4.0))
SHAPES = LowDimMap.shapes(n_heads=4, n_kv_heads=2, head_dim=4, low_dim=3)
COMMAND = (
    "lce calibrate --model M --text FILE --out maps.safetensors --low-dim 3 --far 16 --window 32 "
    "--rope yarn --rope-factor 4.0"
)


def maps(n_layers: int = 2) -> LowDimMaps:
    return LowDimMaps([low_dim_map(4, 2, 4, 3, seed=layer) for layer in range(n_layers)])


def opened(file: Path, here: LearnedFor = HERE, n_layers: int = 2) -> LowDimMaps:
    return open_maps(file, here, SHAPES, range(n_layers))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_maps(maps(), tmp_path / "maps.safetensors", HERE)
    return tmp_path / "maps.safetensors"


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    made, file = maps(), tmp_path / "maps.safetensors"
    save_maps(made, file, HERE)
    found = opened(file)
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(CapacityError, match="cannot write"):
        save_maps(made, tmp_path / "none" / "maps.safetensors", HERE)
    assert (found.low_dim, found.learned_for, found.digest) == (3, HERE, made.digest)
    for ours, theirs in zip(made.layers.values(), found.layers.values(), strict=True):
        assert all(torch.equal(x, theirs.tensors()[name]) for name, x in ours.tensors().items())
    assert found.layer(1, torch.zeros(1, dtype=torch.bfloat16)).key_bias.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"fingerprint": "another"}, DataError, "another model's weights; learn its own by `" + COMMAND),
        ({"far": 15}, UsageError, "learned for far=16, and here far=15; ask for what it was learned for"),
        ({"low_dim": 2}, UsageError, "learned for low_dim=3, and here low_dim=2;"),
        ({"rope": RopeConfig()}, UsageError, "for rope.kind=yarn, rope.factor=4.0, and here rope.kind=none, rope.fact"),
        ({"rope": replace(HERE.rope, theta=5e5)}, UsageError, "rope.theta=10000.0, and here rope.theta=500000.0;"),
        ({"rope": replace(HERE.rope, original_window=8)}, UsageError, "rope.original_window=None, and here"),
    ],
    ids=str,
)
def test_maps_for_something_else_are_refused(
    file: Path, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    here = replace(HERE, **changes)
    with pytest.raises(error) as caught:
        opened(file, here)
    for word in (*words.split("`"), here.command(), str(file)):
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_command_spells_every_option() -> None:
    assert HERE.command() == COMMAND
    plain = replace(HERE, rope=RopeConfig())
    assert plain.command("a folder").endswith("--window 32 --rope none")
    assert "--model 'a folder'" in plain.command("a folder")


FACTS = {"format": FORMAT, "learned_for": json.dumps(asdict(HERE))}
ZEROS = {f"layers.{i}.{name}": torch.zeros(shape) for i in range(2) for name, shape in SHAPES.items()}


def damaged(tensors: dict[str, Any] | None = None, **metadata: str) -> bytes:
    """A sealed file whose digest is right and whose content is not."""
    return sealed(ZEROS | (tensors or {}), FACTS | metadata)


BAD: dict[str, bytes] = {
    "empty": b"",
    "text": b"lce",
    "a header longer than the file": (1 << 15).to_bytes(8, "little") + b"{}",
    "a huge header": (1 << 40).to_bytes(8, "little") + b"{" * 100,
    "deep": raw_safetensors(b"[" * 60_000),
    "a list": raw_safetensors(b"[1, 2]"),
    "metadata is a list": raw_safetensors({"__metadata__": [1]}),
    "entry is a number": raw_safetensors({"__metadata__": FACTS, "layers.0.key": 3}),
    "not UTF-8": raw_safetensors(b'{"\xff": 1}'),
    "control characters": save({"x": torch.zeros(1)}, {"format": "\x1b[2J" + "x" * 5000}),
    "no facts": damaged(learned_for="null"),
    "facts nested": damaged(learned_for="[" * 30_000),
    "a number of 9,999 digits": damaged(learned_for="9" * 9999),
    "one tensor more": damaged({"layers.2.key": torch.zeros(8, 3)}),
    "other shape": damaged({"layers.1.key": torch.zeros(9, 3)}),
    "other dtype": damaged({"layers.1.key": torch.zeros(8, 3, dtype=torch.float16)}),
    "not a number": damaged({"layers.1.key_bias": torch.tensor([0.0, torch.nan, 0.0])}),
    "infinite": damaged({"layers.0.query": torch.full((16, 3), torch.inf)}),
    "cut short": damaged()[:-1],
    "too long": damaged() + b"\0",
    "unsealed": save(ZEROS, FACTS),
    "entries of gigabytes": raw_safetensors(
        {"__metadata__": FACTS, "layers.0.key": tensor_entry("F32", [1 << 31, 3], 0, 12 << 31)}
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_cannot_be_trusted_is_one_line(tmp_path: Path, name: str) -> None:
    file = tmp_path / "maps.safetensors"
    file.write_bytes(BAD[name])
    with pytest.raises(DataError) as caught:
        opened(file)
    text = str(caught.value)
    assert text.isprintable()
    assert len(text) < 900
    assert COMMAND in text


def test_every_changed_byte_is_refused(tmp_path: Path) -> None:
    """Of those that are tried, which are most of the header's and some of the numbers'."""
    file = tmp_path / "maps.safetensors"
    save_maps(maps(1), file, HERE)
    data = file.read_bytes()
    opened(file, n_layers=1)
    header = 8 + int.from_bytes(data[:8], "little")
    for at in [*range(0, header, 3), *range(header, len(data), 17)]:
        changed = bytearray(data)
        changed[at] ^= 1 << (at % 8)
        file.write_bytes(changed)
        with pytest.raises((DataError, UsageError)):
            opened(file, n_layers=1)
    for length in range(0, len(data), 29):
        file.write_bytes(data[:length])
        with pytest.raises(DataError):
            opened(file, n_layers=1)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_a_seal_covers_every_byte(data: st.DataObject) -> None:
    raw = sealed({"x": torch.arange(5.0)}, {"a": '"digest":"', "b": "0" * 64})
    at, value = data.draw(st.integers(0, len(raw) - 1)), data.draw(st.integers(0, 255))
    changed = raw[:at] + bytes([value]) + raw[at + 1 :]
    tensors, metadata = unsealed(raw)
    assert torch.equal(tensors["x"], torch.arange(5.0))
    assert (metadata["a"], metadata["b"]) == ('"digest":"', "0" * 64)
    if changed != raw:
        with pytest.raises(ValueError, match=r"digest"):
            unsealed(changed)


def test_a_sparse_file_is_not_read(file: Path) -> None:
    os.truncate(file, 8 << 30)
    tracemalloc.start()
    with pytest.raises(DataError, match="cut short, or too long"):
        opened(file)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "fifo")
    for name in ("fifo", "folder", "link", "none", "x" * 300, "a\0b"):
        with pytest.raises(DataError):
            opened(tmp_path / name)
        with pytest.raises(DataError):
            read_sealed(tmp_path / name, 1000)
    save_file({"x": torch.zeros(9)}, tmp_path / "long")
    with pytest.raises(ValueError, match="longer than 20 bytes"):
        read_sealed(tmp_path / "long", 20)
