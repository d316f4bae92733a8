"""Learning low-dim maps: what is learned, measured and refused, and work folders: resuming, and damage."""

import json
import os
import re
import shlex
import shutil
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import lce
from lce.errors import CapacityError, DataError, UsageError
from lce.methods import ESA, esa
from lce.methods.lowdim import LearnedFor
from lce.methods.map_file import read_sealed, sealed
from lce_lab.calibrate import Calibration, Recall, calibrate, learn, work_folder
from lce_lab.eval.prose import sentences
from lce_lab.eval.selection import measure_text
from lce_lab.terminal.commands import recall_lines
from tests.command import assert_error, ran, run

Patch, Maps = pytest.MonkeyPatch, dict[str, bytes]
TEXT = "the quick brown fox jumps over the lazy dog, and then over the moon. " * 120
SMALL = Calibration(low_dim=8, tokens=1024, epochs=2, batch=64, far=8)
TINY = Calibration(low_dim=4, tokens=512, epochs=1, batch=64)
KNOBS = {"sinks": 2, "local": 8, "top_k": 6}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "maps.safetensors"


def test_maps_are_learned_and_used(tiny_model: Path, tmp_path: Path, out: Path) -> None:
    stages: list[tuple[str, int, int]] = []
    recalls = calibrate(tiny_model, TEXT, out, SMALL, progress=lambda *stage: stages.append(stage))
    assert [recall.layer for recall in recalls] == [0, 1]
    assert all(0 < recall.calibrated <= 1 and 0 < recall.pca <= 1 for recall in recalls)
    assert (stages[-1], [path.name for path in tmp_path.iterdir()]) == (("learning", 4, 4), [out.name])
    engine = lce.load(tiny_model, method=ESA(maps=str(out), low_dim=8, **KNOBS))
    assert engine.generate(TEXT[:400], max_tokens=4).token_ids
    assert engine.method.maps.learned_for == LearnedFor(engine.setup.fingerprint, 8, 8, 64, engine.setup.rope)
    layers = engine.method.maps.layers
    assert all(bool(maps.query_bias.any()) and bool(maps.key_bias.any()) for maps in layers.values())


def test_as_many_dimensions_as_the_keys_lose_nothing(tiny_model: Path, out: Path) -> None:
    recalls = calibrate(tiny_model, TEXT, out, Calibration(low_dim=64, tokens=1024, epochs=1, lr=1e-9, far=8))
    assert [(recall.calibrated, recall.pca) for recall in recalls] == [(1.0, 1.0)] * 2
    exact = lce.load(tiny_model, method=ESA(compress="none", **KNOBS), block=50)
    ids = exact.tokenizer.encode(TEXT)[:150]
    for knobs in ({"maps": str(out), "low_dim": 32}, {"compress": "pca"}):  # keys have 32
        engine = lce.load(tiny_model, method=ESA(**knobs, **KNOBS), block=50)
        assert (engine.logits(ids) - exact.logits(ids)).abs().max() < 1e-4


def noted(monkeypatch: Patch, owner: Any, name: str) -> list[Any]:
    """The arguments of a function's calls from now on."""
    function, calls = getattr(owner, name), list[Any]()
    monkeypatch.setattr(owner, name, lambda *given: calls.append(given) or function(*given))
    return calls


@pytest.mark.parametrize("rope", [{}, {"rope": "yarn", "rope_factor": 2}], ids=["plain", "yarn"])
def test_queries_are_learned_as_placed(tiny_model: Path, out: Path, monkeypatch: Patch, rope: dict[str, Any]) -> None:
    learned, placed = noted(monkeypatch, learn.Calibrator, "learn"), noted(monkeypatch, esa, "scorer")
    calibrate(tiny_model, TEXT, out, Calibration(low_dim=4, tokens=512, epochs=1, far=5), **rope)
    method = ESA(maps=str(out), low_dim=4, sinks=1, local=2, top_k=2, far=5)
    engine = lce.load(tiny_model, method, block=8, **rope)
    engine.prefill(engine.tokenizer.encode(TEXT, bos=False)[:16])
    first = placed[0][1].transpose(0, 1).flatten(1)
    assert torch.allclose(first, learned[0][1][8:16], atol=1e-5)  # the first layer's, before choices differ


def test_long_pieces_are_read_by_exact_scores(tiny_model: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    """The queries that are learned from are those of `esa` with exact scores, in the layer above its choices too."""
    learned = noted(monkeypatch, learn.Calibrator, "learn")
    options = Calibration(low_dim=4, tokens=8 * 256, epochs=1, far=20, piece=256)
    calibrate(tiny_model, TEXT, tmp_path / "maps.safetensors", options)
    scored = noted(monkeypatch, esa, "scorer")
    engine = lce.load(tiny_model, ESA(compress="none", far=20))
    engine.prefill(engine.tokenizer.encode(TEXT, bos=False)[:256])
    assert [layer for *_, layer in learned] == [0, 1]
    for _, queries, *_, layer in learned:
        blocks = [q for _, q, cache, _ in scored if cache.index == layer]
        choosing = torch.cat(blocks, dim=1).transpose(0, 1).flatten(1)
        assert len(choosing) == 64, "the last four blocks of 16 tokens have more than `top_k` to choose from"
        assert torch.allclose(choosing, queries[192:256], atol=1e-5)


@pytest.mark.slow
def test_maps_of_long_pieces_find_as_much_of_a_long_text(tmp_path: Path) -> None:
    """Of the demo's best tokens in held-out text, four windows of it, no fewer than maps of single windows."""
    text, other = (" ".join(islice(sentences(Random(seed)), 2000)) for seed in (5, 6))

    def found(**knobs: Any) -> float:
        share = measure_text("demo", ESA(**knobs), other, length=2048, queries=64).found
        assert share is not None
        return share

    def learned(piece: int) -> float:
        out = tmp_path / f"{piece}.safetensors"
        calibrate("demo", text, out, Calibration(tokens=8 * 1024, epochs=3, piece=piece))
        return found(maps=str(out))

    long = learned(1024)
    assert long > learned(512) - 0.005
    assert long > found(compress="pca") + 0.01


def test_an_error_names_the_command_that_learns_the_right_maps(tiny_model: Path, tmp_path: Path) -> None:
    out, text = tmp_path / "maps.safetensors", tmp_path / "text.txt"
    text.write_text(TEXT)
    calibrate(tiny_model, TEXT, out, SMALL)
    with pytest.raises(UsageError, match="exists; name another file, or give --force"):
        calibrate(tiny_model, TEXT, out, SMALL)
    wanted = ESA(maps=str(out), low_dim=4, far=20, **KNOBS)
    loading = {"window": 48, "rope": "ntk", "rope_factor": 1.5}
    with pytest.raises(UsageError) as caught:
        lce.load(tiny_model, wanted, **loading)
    command = re.search("`lce (calibrate .*?)`", str(caught.value))
    words = {"FILE": str(text), "maps.safetensors": str(out)}
    args = [words.get(word, word) for word in shlex.split(command[1])]
    ran(*args, "--tokens", "1024", "--epochs", "1", "--force")
    lce.load(tiny_model, wanted, **loading)


def test_what_is_refused(tiny_model: Path, tmp_path: Path, out: Path, monkeypatch: Patch) -> None:
    with pytest.raises(DataError, match="expected 512 or more: give a longer one"):
        calibrate(tiny_model, TEXT[:300], out, SMALL)
    with pytest.raises(UsageError, match="tokens is 500; expected 512 or more, 8 pieces of 64"):
        calibrate(tiny_model, TEXT, out, Calibration(tokens=500))
    with pytest.raises(DataError, match="a folder that exists"):
        calibrate(tiny_model, TEXT, tmp_path / "none" / "maps", SMALL)
    with pytest.raises(UsageError, match=r"rotate by the length of each text, .* --rope ntk"):
        calibrate(tiny_model, TEXT, out, SMALL, rope="dynamic", rope_factor=2)
    wrong = [("lr", value) for value in (float("nan"), float("inf"), 0.0)]
    for knob, value in (*wrong, ("epochs", 0), ("far", -1), ("piece", 0)):
        with pytest.raises(UsageError, match=f"{knob} is {value}; expected"):
            Calibration(**{knob: value})
    monkeypatch.setattr(work_folder.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(CapacityError, match="1,000 are free; give fewer --tokens"):
        calibrate(tiny_model, TEXT, out, SMALL)
    assert list(tmp_path.iterdir()) == []


def test_the_command(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    common = ("--model", tiny_model, "--text", tmp_path / "text.txt", "--out", tmp_path / "maps.safetensors")
    small = ("--low-dim", "8", "--tokens", "1024", "--epochs", "1")
    shown = run("calibrate", *common, *small)
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert [line.split()[0] for line in shown.stdout.splitlines()] == ["layer", "0", "1", "mean"]
    told = json.loads(run("calibrate", *common, *small, "--json", "--force").stdout)
    assert [set(recall) for recall in told] == [{"layer", "top_k", "calibrated", "pca"}] * 2
    assert_error(run("calibrate", *common, "--far", "-1"), 2, "--far is '-1'")
    esa = ("generate", "--model", tiny_model, "--prompt", TEXT[:300], "--max-tokens", "2", "--method", "esa")
    assert_error(run(*esa), 2, "lce calibrate", "compress=pca", "compress=none")
    maps = ("-o", f"maps={tmp_path / 'maps.safetensors'}")
    assert_error(run(*esa, *maps), 2, "low_dim=8, and here low_dim=128")
    knobs = (*maps, "-o", "low_dim=8", "-o")
    assert_error(run(*esa, *knobs, "local=8"), 2, "far=32, and here far=8", "--far 8 --window 64")
    used = run(*esa, *knobs, "sinks=2", "--json")
    assert json.loads(used.stdout)["method"]["knobs"]["maps"].startswith("LowDimMaps('maps.safetensors', ")


def test_recalls_are_printed_with_their_mean() -> None:
    head, *rows = recall_lines([Recall(0, 32, 0.5, 0.25), Recall(1, 32, 1.0, 0.75)])
    assert head.endswith("recall of the best 32 tokens")
    assert [row.split() for row in rows] == [
        ["0", "50.0%", "25.0%"],
        ["1", "100.0%", "75.0%"],
        ["mean", "75.0%", "50.0%"],
    ]


def test_broken_numbers_are_refused(tiny_model: Path, tmp_path: Path, out: Path, monkeypatch: Patch) -> None:
    with pytest.raises(DataError, match="layer 0 are not finite; give a smaller --lr"):
        calibrate(tiny_model, TEXT, out, Calibration(low_dim=4, tokens=512, epochs=3, lr=1e30))
    assert not out.exists()

    def broken(self: learn.Collecting, k: torch.Tensor, *rest: Any) -> None:
        self.sink(f"k.{rest[1].index}", torch.full_like(k, torch.nan))
        super(learn.Collecting, self).keep(k, *rest)

    monkeypatch.setattr(learn.Collecting, "keep", broken)
    with pytest.raises(DataError, match="keys of layer 0 are not finite; check the model's weights"):
        calibrate(tiny_model, TEXT, tmp_path / "other", SMALL)


def bytes_of(out: Path) -> Maps:
    """The numbers of a map file, to the bit."""
    tensors, metadata = read_sealed(out, 1 << 20)
    return {name: x.numpy().tobytes() for name, x in tensors.items()} | {"for": metadata["learned_for"].encode()}


def test_a_calibration_goes_on(tiny_model: Path, tmp_path: Path, out: Path, whole: Maps, monkeypatch: Patch) -> None:
    """Each call is interrupted after its first write, until one has nothing left to write but the maps."""
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
def whole(tiny_model: Path, tmp_path: Path) -> Maps:
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
def test_a_damaged_file_changes_no_map(tiny_model: Path, begun: Path, whole: Maps, kind: str, tmp_path: Path) -> None:
    out, kept = tmp_path / "maps.safetensors", tmp_path / "kept"
    shutil.copytree(begun, kept)
    good = (begun / kind).read_bytes()
    flipped = [bytes([*good[:i], good[i] ^ 1 << i % 8, *good[i + 1 :]]) for i in (0, 41, 123, len(good) - 1)]
    for damage in (*flipped, b"", good[:-3], good + b"\0", b"[" * 60_000):
        shutil.rmtree(begun, ignore_errors=True)
        shutil.copytree(kept, begun)
        (begun / kind).write_bytes(damage)
        notes: list[str] = []
        calibrate(tiny_model, TEXT, out, TINY, force=True, note=notes.append)
        assert (bytes_of(out), begun.exists()) == (whole, False)
        (note,) = notes
        assert kind in note
        assert note.isprintable()


def test_a_file_of_another_plan_changes_no_map(tiny_model: Path, begun: Path, whole: Maps, tmp_path: Path) -> None:
    notes: list[str] = []
    place = begun / "piece-00003-001.safetensors"
    shutil.copy(begun / "piece-00004-001.safetensors", place)
    tensors, metadata = read_sealed(begun / "piece-00005-001.safetensors", 1 << 20)
    other = sealed({name: x + 1 for name, x in tensors.items()}, metadata | {"plan": "0" * 64})
    (begun / "piece-00005-001.safetensors").write_bytes(other)
    calibrate(tiny_model, TEXT, tmp_path / "maps.safetensors", TINY, note=notes.append)
    assert bytes_of(tmp_path / "maps.safetensors") == whole
    why = "it belongs to another calibration or place; it is computed again"
    assert [note.split(": ")[1] for note in notes] == [why] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_work_file_is_refused(tiny_model: Path, begun: Path, kind: str, tmp_path: Path) -> None:
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
