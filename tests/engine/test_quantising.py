"""What `lce.quantize` writes: checksums that find any damage, and after an error or a kill nothing in the way."""

import errno
import fcntl
import os
import random
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import lce


@pytest.fixture(scope="module")
def quantised(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lce.quantize(tiny_model, tmp_path_factory.mktemp("quantised") / "out", "int8")


@pytest.mark.slow
def test_a_flip_in_any_of_16_places_is_refused(quantised: Path, tmp_path: Path) -> None:
    out = shutil.copytree(quantised, tmp_path / "out")
    file = out / "model.safetensors"
    raw, number = file.read_bytes(), random.Random(0)
    for place in range(16):
        damaged = bytearray(raw)
        damaged[number.randrange(len(raw) * place // 16, len(raw) * (place + 1) // 16)] ^= 1 << number.randrange(8)
        file.write_bytes(damaged)
        for read in (lambda: lce.info(out, check=True), lambda: lce.load(out)):
            with pytest.raises(
                lce.ModelError, match=r"model\.safetensors.*(quantize the checkpoint|download it) again"
            ):
                read()
    file.write_bytes(raw[:-4100] + raw[-4:] + raw[-4096:-4] + raw[-4100:-4096])  # two words exchanged
    with pytest.raises(lce.ModelError, match=r"model\.safetensors: tensor 'model\.\S+' disagrees with its checksum"):
        lce.load(out)


def test_the_files_beside_the_weights_are_checked_too(quantised: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        out = shutil.copytree(quantised, tmp_path / name)
        (out / name).write_text((out / name).read_text() + " ")
        assert lce.info(out) == lce.info(out)
        with pytest.raises(lce.ModelError, match=f"{name}: the file is not as `lce quantize` wrote it; quantize"):
            lce.info(out, check=True)


def test_a_whole_folder_and_one_that_is_not_ours(quantised: Path, tiny_model: Path, tmp_path: Path) -> None:
    before, done = contents(tiny_model), list[tuple[int, int]]()
    found = [lce.info(path, check=True, progress=lambda *n: done.append(n)) for path in (quantised, tiny_model)]
    assert [getattr(each, "checked", None) for each in (*found, lce.info(quantised))] == [True, False, None]
    assert done[-1][0] == done[-1][1] > 0
    assert contents(tiny_model) == before
    lce.load(tiny_model).prefill([2, 3]).save(tmp_path / "c.lce")
    with pytest.raises(lce.UsageError, match="check is for a model's folder"):
        lce.info(tmp_path / "c.lce", check=True)
    out = shutil.copytree(tiny_model, tmp_path / "out")
    raw = (out / "model.safetensors").read_bytes()
    for damaged, fault in ((raw[:-4] + b"\xff" * 4, "NaN"), (raw.replace(b"layers.1.", b"layers.7."), "missing")):
        (out / "model.safetensors").write_bytes(damaged)
        assert lce.info(out)
        with pytest.raises(lce.ModelError, match=fault):
            lce.info(out, check=True)


@pytest.mark.slow
def test_a_full_disk_leaves_nothing(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full at the k-th file, for all k."""
    sync, left = os.fsync, 0

    def fail(descriptor: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    (tmp_path / "empty").mkdir()
    for out in (tmp_path / "new" / "out", tmp_path / "empty"):
        for k in range(100):
            left = k
            with suppress(lce.CapacityError):
                lce.quantize(tiny_model, out)
                break
            assert [*tmp_path.rglob("*")] == [tmp_path / "empty"]
        assert 3 <= k < 99
        shutil.rmtree(out if out.name == "empty" else out.parent)


def test_what_a_killed_call_left_is_removed(quantised: Path, tiny_model: Path, tmp_path: Path) -> None:
    out = shutil.copytree(quantised, tmp_path / "out")
    draft = (out / "config.json").rename(out / ".config.json.1-0a.tmp")
    (out / ".model.safetensors.1-0b.tmp").touch()
    (out / "mine.txt").touch()
    before = {*out.iterdir()}
    with pytest.raises(lce.UsageError, match=r"no empty folder \(it has '.config.json.1-0a.tmp'\)"):
        lce.quantize(tiny_model, out, "int8")
    assert {*out.iterdir()} == before, "somebody else's file is among them"
    (out / "mine.txt").unlink()
    with draft.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(lce.UsageError, match="being written by another process"):
            lce.quantize(tiny_model, out, "int8")
    lce.quantize(tiny_model, out, "int8")
    assert contents(out) == contents(quantised)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
import lce, torch
torch.set_num_threads(1)
model, scratch, n_kills, n_left = sys.argv[1], Path(sys.argv[2]), 0, 0

def start(out):
    child = os.fork()
    if child == 0:
        lce.quantize(model, out, "int8")
        os._exit(0)
    return child

lce.quantize(model, scratch / "first", "int8")  # what kernels need is ready in all children
begun = time.perf_counter()
os.waitpid(start(scratch / "whole"), 0)
took = time.perf_counter() - begun
files = lambda out: {path.name: path.read_bytes() for path in out.glob("*")}
while n_kills < 50:
    out = scratch / str(time.time_ns())
    child = start(out)
    time.sleep(took * random.random())
    os.kill(child, signal.SIGKILL)
    if os.WIFSIGNALED(os.waitpid(child, 0)[1]):  # else it was done before
        n_kills, n_left, done = n_kills + 1, n_left + bool(files(out)), "config.json" in files(out)
        assert done or os.waitpid(start(out), 0)[1] == 0, files(out).keys()
        assert files(out) == files(scratch / "whole")
print(n_left)
"""


@pytest.mark.slow
def test_50_kills(tiny_model: Path, tmp_path: Path) -> None:
    """After each the same call writes the same files. The kills are spread over the time of a call."""
    arguments = [sys.executable, "-c", KILLED, str(tiny_model), str(tmp_path)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=300)
    assert int(done.stdout) >= 10, "kills that left files"
