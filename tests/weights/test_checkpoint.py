"""Checkpoint: what safetensors and transformers write is loaded bit for bit; whatever is damaged is refused."""

import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from lce import system
from lce.errors import CapacityError, ModelError
from lce.weights.checkpoint import Checkpoint
from tests.checkpoints import raw_safetensors, tensor_entry

CPU = torch.device("cpu")
TENSORS = {"embed": torch.arange(12.0).view(4, 3), "norm": torch.tensor([1.5, -2.0]), "proj": torch.ones(2, 2, 2)}
ROWS = (("a", 2, torch.float32), ("m", 3, torch.float16), ("z", 4, torch.bfloat16))


def wanted_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {f"own.{name}": (name, tuple(tensor.shape)) for name, tensor in tensors.items()}


def load(folder: Path, tensors: Mapping[str, Tensor] = TENSORS, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    return Checkpoint.open(folder).load(wanted_of(tensors), dtype=dtype, device=CPU)


def assert_loads(folder: Path, tensors: Mapping[str, Tensor] = TENSORS) -> None:
    loaded = load(folder, tensors)
    assert list(loaded) == [f"own.{name}" for name in tensors]
    for name, tensor in tensors.items():
        assert loaded[f"own.{name}"].dtype == tensor.dtype
        assert torch.equal(loaded[f"own.{name}"], tensor)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_loads_what_safetensors_saved(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in TENSORS.items()} | {"empty": torch.empty(0, 3, dtype=dtype)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_loads(tmp_path, tensors)
    assert Checkpoint.open(tmp_path).dtype() == dtype


@pytest.mark.parametrize("max_shard_size", ["1GB", "20KB"])
def test_loads_what_transformers_saved(tmp_path: Path, max_shard_size: str) -> None:
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4))
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_size == "20KB")
    assert_loads(tmp_path, model.state_dict())


def test_model_safetensors_goes_before_all_others(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("not even JSON")
    save_file({"other": torch.zeros(1)}, folder / "consolidated.safetensors")
    assert_loads(folder)


@pytest.mark.parametrize("names", ["weights", "consolidated", "model.fp16 consolidated", "demo adapter_model"])
def test_a_single_other_file_serves(folder: Path, names: str) -> None:
    (folder / "model.safetensors").rename(folder / f"{names.split()[0]}.safetensors")
    for name in names.split()[1:]:
        save_file({"other": torch.zeros(1)}, folder / f"{name}.safetensors")
    assert_loads(folder)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_file_that_changes_after_loading_has_no_effect(folder: Path, dtype: torch.dtype | None) -> None:
    file = folder / "model.safetensors"
    checkpoint, before = Checkpoint.open(folder), file.read_bytes()
    loaded = checkpoint.load(wanted_of(TENSORS), dtype=dtype, device=CPU)
    if sys.platform == "linux":
        assert str(file) not in Path("/proc/self/maps").read_text()
    for raw in (bytes(len(before)), b""):
        file.write_bytes(raw)
        for name, tensor in TENSORS.items():
            assert torch.equal(loaded[f"own.{name}"], tensor.to(dtype or tensor.dtype))
    file.write_bytes(before)
    assert checkpoint.fingerprint() == Checkpoint.open(folder).fingerprint()
    for tensor in loaded.values():
        tensor.zero_()
    assert file.read_bytes() == before


def test_tensors_at_odd_places_are_copied(tmp_path: Path) -> None:
    data = torch.arange(5, dtype=torch.float32)
    text = json.dumps({"a": tensor_entry("F32", [5], 0, 20)}).encode()
    text += b" " * ((1 - len(text)) % 4)
    (tmp_path / "model.safetensors").write_bytes(raw_safetensors(text, data.numpy().tobytes()))
    assert Checkpoint.open(tmp_path).tensors["a"].start % 4 == 1
    loaded = load(tmp_path, {"a": data})["own.a"]
    assert torch.equal(loaded, data)
    assert loaded.data_ptr() % 4 == 0


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_joined_tensors_lie_beneath_each_other(tmp_path: Path, dtype: torch.dtype | None) -> None:
    """Whatever their order in the file, and however they are stored; they are read once, into one tensor."""
    tensors = {name: torch.full((n, 3), float(n), dtype=kind) for name, n, kind in ROWS}
    save_file(tensors, tmp_path / "model.safetensors")
    wanted, joined = wanted_of(tensors), {"whole": ("own.z", "own.a")}
    loaded = Checkpoint.open(tmp_path).load(wanted, dtype=dtype, device=CPU, joined=joined)
    assert sorted(loaded) == ["own.m", "whole"]
    assert loaded["whole"].is_contiguous()
    assert loaded["whole"].dtype == (dtype or torch.float32), "the wider of the two, or what was asked for"
    assert loaded["whole"].tolist() == [[4.0] * 3] * 4 + [[2.0] * 3] * 2


def test_names_are_checked_before_reading(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    (folder / "model.safetensors").unlink()
    specs = wanted_of({f"layer.{i}": torch.ones(1) for i in range(9)} | {"embed": TENSORS["embed"]})
    names = r"9 missing \('layer.0', 'layer.1', 'layer.2' and 6 more\) and 2 unexpected \('norm', 'proj'\)"
    with pytest.raises(ModelError, match=names):
        checkpoint.load(specs, dtype=None, device=CPU)
    with pytest.raises(ModelError, match=r"1 unexpected \('proj'\)"):
        checkpoint.load(wanted_of({"embed": TENSORS["embed"]}), dtype=None, device=CPU, ignore=["no*"])
    with pytest.raises(ModelError, match=r"wrong shapes: 'norm' is \[2\], expected \[3\]; "):
        checkpoint.load(wanted_of(TENSORS | {"norm": torch.ones(3)}), dtype=None, device=CPU)


def test_integers_are_refused_where_they_are_wanted(tmp_path: Path) -> None:
    tensors = {"weight": torch.ones(3), "position_ids": torch.arange(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"expected weights in F32, BF16, F16, got 'position_ids \(I64\)'"):
        load(tmp_path, tensors)
    wanted = wanted_of({"weight": tensors["weight"]})
    loaded = Checkpoint.open(tmp_path).load(wanted, dtype=None, device=CPU, ignore=["*_ids"])
    assert list(loaded) == ["own.weight"]
    save_file({"a": torch.arange(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="has no weights in F32, BF16, F16"):
        Checkpoint.open(tmp_path).dtype()


def test_a_checkpoints_dtype_is_that_of_most_bytes(tmp_path: Path) -> None:
    save_file({"norm": torch.ones(3), "proj": torch.ones(4, 4).bfloat16()}, tmp_path / "model.safetensors")
    assert Checkpoint.open(tmp_path).dtype() == torch.bfloat16


def test_a_file_that_changed_after_opening(folder: Path) -> None:
    """Its size, its contents, its name: the header that was checked is no longer that of the data."""
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    changes: list[Callable[[], object]] = [
        lambda: file.write_bytes(whole[:-8]),
        lambda: file.write_bytes(whole[:-8] + bytes(8)),
        lambda: (folder / "new").write_bytes(whole) and (folder / "new").replace(file),
        lambda: os.truncate(file, 0),
        file.unlink,
    ]
    for change in changes:
        checkpoint = Checkpoint.open(folder)
        time.sleep(0.02)  # longer than the clock of file systems ticks
        change()
        load_all = partial(checkpoint.load, wanted_of(TENSORS), dtype=None, device=CPU)
        for use in (load_all, checkpoint.fingerprint):
            with pytest.raises(ModelError, match=r"changed while it was loaded; load it again|No such file"):
                use()
        file.write_bytes(whole)


@pytest.mark.parametrize("cut", [True, False])
def test_a_file_that_changes_while_it_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch, cut: bool) -> None:
    file, preadv = folder / "model.safetensors", os.preadv
    checkpoint = Checkpoint.open(folder)

    def change_first(descriptor: int, buffers: Any, offset: int) -> int:
        time.sleep(0.02)
        if cut:
            os.truncate(file, 8)
        else:
            with file.open("r+b") as opened:
                opened.write(bytes(500))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", change_first)
    with pytest.raises(ModelError, match=r"changed while it was loaded; load it again"):
        checkpoint.load(wanted_of(TENSORS), dtype=None, device=CPU)


def test_weights_larger_than_the_free_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "free_memory", lambda device: 87)
    checkpoint = Checkpoint.open(folder)
    load(folder, dtype=torch.bfloat16)  # 44 bytes
    monkeypatch.setattr(os, "preadv", None)
    with pytest.raises(CapacityError, match=r"take 88 B of memory on cpu, and 87 B is available; free some, or use"):
        checkpoint.load(wanted_of(TENSORS), dtype=None, device=CPU)


def test_fingerprint_follows_the_weights_and_not_their_files(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(9000.0), "b": torch.ones(3), "c": torch.ones(3)}

    def fingerprint(tensors: Mapping[str, Tensor], *shards: list[str]) -> str:
        weight_map: dict[str, str] = {}
        for number, names in enumerate(shards):
            save_file({name: tensors[name] for name in names}, tmp_path / f"{number}.safetensors")
            weight_map |= dict.fromkeys(names, f"{number}.safetensors")
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return Checkpoint.open(tmp_path).fingerprint()

    whole = fingerprint(tensors, ["a", "b", "c"])
    assert re.fullmatch("[0-9a-f]{64}", whole)
    assert fingerprint(tensors, ["c", "b"], ["a"]) == whole
    last = tensors["a"].clone()
    last[-1] = 0
    others = (torch.ones(3) * 2, torch.ones(3, 1), torch.ones(6, dtype=torch.float16))
    changed = [tensors | {"a": last}, *(tensors | {"b": other} for other in others)]
    changed += [{"a": tensors["a"], "b": tensors["b"], "d": tensors["c"]}]
    assert len({whole, *(fingerprint(other, list(other)) for other in changed)}) == 6


def test_folders_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot be read \(No such file"):
        Checkpoint.open(tmp_path / "missing")
    with pytest.raises(ModelError, match=r"has no weights; expected model\.safetensors"):
        Checkpoint.open(tmp_path)
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(ModelError, match="is a folder; expected a regular file"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "last.ckpt", "consolidated.00.pth"])
def test_pickles_are_never_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04cos\nsystem\n.")
    text = f"only as '{name}'; lce reads safetensors and GGUF; convert .*save_pretrained"
    with pytest.raises(ModelError, match=text):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("names", ["a b", "model-00001-of-00002", "model-00001-of-00002 model-00002-of-00002"])
def test_shards_without_an_index(tmp_path: Path, names: str) -> None:
    for name in names.split():
        save_file(TENSORS, tmp_path / f"{name}.safetensors")
    with pytest.raises(ModelError, match=f"has '{names.split()[0]}.*but no index"):
        Checkpoint.open(tmp_path)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_file({"embed": TENSORS["embed"]}, tmp_path / "a.safetensors")
    save_file({"norm": TENSORS["norm"], "proj": TENSORS["proj"]}, tmp_path / "b.safetensors")
    return tmp_path


def open_index(folder: Path, **weight_map: object) -> Checkpoint:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return Checkpoint.open(folder)


GOOD_MAP = {"embed": "a.safetensors", "norm": "b.safetensors", "proj": "b.safetensors"}
PATHS = ("../a.safetensors", "/etc/a.safetensors", "x\\a.safetensors", "c:a.safetensors", "a\0.safetensors")


@pytest.mark.parametrize("shard", [*PATHS, "..", "", "a.bin"])
def test_a_shard_must_be_a_plain_name(sharded: Path, shard: str) -> None:
    with pytest.raises(ModelError, match=r"not a plain \*\.safetensors name"):
        open_index(sharded, **GOOD_MAP | {"embed": shard})


def test_indexes_that_do_not_fit_their_shards(sharded: Path) -> None:
    with pytest.raises(ModelError, match=r"lacks 1 of the index's shards \('c\.safetensors'\)"):
        open_index(sharded, **GOOD_MAP | {"embed": "c.safetensors"})
    with pytest.raises(ModelError, match=r"lack 1 of the tensors that it lists \('more'\)"):
        open_index(sharded, **GOOD_MAP, more="b.safetensors")
    with pytest.raises(ModelError, match=r"tensor 'embed' is in 'a\.safetensors' and in another shard"):
        open_index(sharded, **GOOD_MAP | {"embed": "b.safetensors", "x": "a.safetensors"})
    save_file(TENSORS, sharded / "b.safetensors")
    with pytest.raises(ModelError, match=r"tensor 'embed' is in 'b\.safetensors' and in another shard"):
        open_index(sharded, **GOOD_MAP)


def test_tensors_that_the_index_does_not_know(sharded: Path) -> None:
    checkpoint = open_index(sharded, embed="a.safetensors", norm="b.safetensors")
    assert_loads(sharded)
    wanted = {"norm": ("norm", (2,)), "embed": ("embed", (4, 3))}
    with pytest.raises(ModelError, match=r"1 unexpected \('proj'\)"):
        checkpoint.load(wanted, dtype=None, device=CPU)
    assert list(checkpoint.load(wanted, dtype=None, device=CPU, ignore=["proj"])) == ["norm", "embed"]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        *((b"", "not valid JSON"), (b"[]", "holds a list; expected a JSON object")),
        *((x, "weight_map is not an object") for x in (b"{}", b'{"weight_map": {}}', b'{"weight_map": {"embed": 3}}')),
        (b'{"weight_map": ["a.safetensors"]}', "weight_map is not an object"),
        (b'{"weight_map": {"a": "a.safetensors", "a": "b.safetensors"}}', "not valid JSON: a name appears twice"),
    ],
)
def test_indexes_that_are_no_indexes(sharded: Path, raw: bytes, message: str) -> None:
    (sharded / "model.safetensors.index.json").write_bytes(raw)
    with pytest.raises(ModelError, match=rf"index\.json:? {message}"):
        Checkpoint.open(sharded)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    save_file(TENSORS, folder / "good", metadata={"format": "pt"})
    return folder


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(0, 255), st.integers(1, 255)), max_size=3), st.none() | st.integers(0, 400))
def test_a_damaged_header_never_loads_other_tensors(good: Path, flips: list[tuple[int, int]], cut: int | None) -> None:
    raw = bytearray((good / "good").read_bytes())
    header_end = 8 + int.from_bytes(raw[:8], "little")
    for offset, mask in flips:
        raw[offset % header_end] ^= mask
    (good / "model.safetensors").write_bytes(raw[:cut])
    message = ""
    try:
        assert_loads(good)
    except ModelError as error:
        message = str(error)
    assert "\n" not in message
    message.encode()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_numbers_that_are_not_finite(folder: Path, value: float, dtype: torch.dtype | None) -> None:
    for place in range(12):
        embed = TENSORS["embed"].clone().to(torch.bfloat16)
        embed.view(-1)[place] = value
        save_file(TENSORS | {"embed": embed}, folder / "model.safetensors")
        with pytest.raises(ModelError, match=r"model\.safetensors: tensor 'embed' has NaN or infinite numbers; the"):
            load(folder, dtype=dtype)
