"""Contexts as files: what is opened is what was saved, or a clear error; whatever fails, and whenever."""

import errno
import json
import math
import os
import random
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

import lce
from lce.cache.disk import Disk
from lce.cache.layout import FileLayout
from lce.cache.limits import Limits
from lce.cache.manifest import KINDS, signed, tensor_entries
from lce.engine.info import describe
from lce.engine.saving import text_hash
from lce.errors import CapacityError, DataError, UsageError
from lce.methods import LongHeads
from lce.methods.base import promises_of
from lce.methods.run import Block
from lce.weights.safetensors_file import read_header
from tests.checkpoints import save_tiny, tokens
from tests.command import start, until
from tests.depth import pairs
from tests.interrupts import interrupted, places
from tests.late import LateDevice, disks_of, no_gpu
from tests.running import as_knobs

BLOCK = 64
NEEDS: dict[str, dict[str, object]] = {
    "esa": {"compress": "pca", "sinks": 16, "low_dim": 8},
    "infllm": {"block_size": 16, "sinks": 16, "repr_tokens": 2, "top_k": 3},
    "longheads": {"chunk_size": 8, "chunks": 4},
    "pages": as_knobs("select=lowdim select.compress=pca select.low_dim=8 placement=grouped page=8 budget=48"),
    "quest": {"page": 8, "budget": 48, "dense_layers": 1},
    "self_extend, auto": {"group": "auto"},
}


def manifest_of(path: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads(read_header(path)[1]["lce"])
    return manifest


KV_DTYPES = pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]  # of a manifest and small tensors
SMALL = "least"  # a budget of the least bytes that are legal, and a folder for the rest
# The methods for analysis keep what other selectors keep, or nothing.
SERVING = [name for name in lce.methods.available() if "analysis" not in promises_of(lce.methods.find(name))]
SLOW_IN_TIERS = pytest.param("longheads", marks=pytest.mark.slow)  # each head reads chunks of its own
ALIKE = ("reattention", "streaming", "dca", "rerope")  # no state, as `full`, and the last one as `lm_infinite`
IN_TIERS = [pytest.param(x, marks=[pytest.mark.slow] * (x in ALIKE)) for x in [*SERVING, "self_extend, auto"]]


def load(
    model: Path, name: str = "longheads", spill_dir: Path | None = None, kv_dtype: str = "auto", **changes: object
) -> lce.Engine:
    """An engine of the method; with `spill_dir`, of the smallest budget there is."""
    method = lce.methods.make(name.partition(",")[0], {**NEEDS.get(name, {}), **changes})
    engine = lce.load(model, method, block=BLOCK, kv_dtype=kv_dtype)
    least = {"kv_host_budget": Limits(engine.setup.layout).least_budget, "spill_dir": spill_dir}
    return engine if spill_dir is None else lce.load(model, method, block=BLOCK, kv_dtype=kv_dtype, **least)


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> lce.Engine:
    return load(tiny_model)


@pytest.fixture(scope="module")
def document(engine: lce.Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "document.lce"
    engine.prefill(tokens(300)).save(path)
    return path


@pytest.fixture
def one_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give all files one identity: equal contexts are then equal files."""
    monkeypatch.setattr(secrets, "token_hex", lambda n: "7" * 2 * n)


def answer(engine: lce.Engine, context: lce.Context) -> list[int]:
    return engine.generate(tokens(9, 1), context=context, max_tokens=12).token_ids


def go_on(straight: tuple[lce.Engine, lce.Context], saved: tuple[lce.Engine, lce.Context], path: Path) -> lce.Context:
    """Save and open a context twice, and go on with it as with one that never stopped; return it."""
    (engine, context), (_, truth) = saved, straight
    for seed in (1, 2):
        context.save(path, force=True)
        context = engine.open_context(path)
        assert context.token_ids == truth.token_ids
        for each, asked in (straight, (engine, context)):
            each.prefill(tokens(70, seed), context=asked)
        assert torch.equal(context.logits, truth.logits)
        ours, theirs = (each.generate("", context=asked, max_tokens=5) for each, asked in ((engine, context), straight))
        assert (ours.token_ids, context.uncached) == (theirs.token_ids, truth.uncached)
    return context


@pytest.mark.parametrize(("name", "budget", "kv_dtype"), pairs(IN_TIERS, [None, SMALL], ["auto", "int8"]), ids=str)
@pytest.mark.covering("name")
def test_saving_opening_and_going_on_equals_never_having_stopped(
    name: str, budget: str | None, kv_dtype: str, tiny_model: Path, tmp_path: Path
) -> None:
    """To the bit, at three stops: after a document, after a question, and with a token that is not read yet."""
    straight = load(tiny_model, name, kv_dtype=kv_dtype)
    engine = load(tiny_model, name, tmp_path if budget else None, kv_dtype)
    truth, context, path = straight.prefill(tokens(300)), engine.prefill(tokens(300)), tmp_path / "context.lce"
    go_on((straight, truth), (engine, context), path)


@pytest.mark.parametrize(("name", "budget"), [("longheads", SMALL), ("esa", None)])
def test_8_bits_on_the_device_go_on(name: str, budget: str | None, tiny_model: Path, tmp_path: Path) -> None:
    test_saving_opening_and_going_on_equals_never_having_stopped(name, budget, "int8-device", tiny_model, tmp_path)
    path, refusal = tmp_path / "context.lce", "another kv_dtype, int8-device; this engine has int8: give --kv-dtype"
    with pytest.raises(DataError, match=refusal):
        load(tiny_model, name, kv_dtype="int8").open_context(path)


@pytest.mark.parametrize(
    ("name", "options", "kv_dtype"),
    [
        pytest.param(name, options, kv_dtype, marks=[pytest.mark.slow] * (i % 2 != j))
        for i, (name, options) in enumerate(
            [("full", {}), ("self_extend", {}), ("longheads", {"chunks": 32}), ("pages", {"page": 8, "budget": 256})]
        )
        for j, kv_dtype in enumerate(("auto", "int8"))
    ],
    ids=str,
)
def test_a_context_that_is_used_for_long_leaves_its_file(
    name: str, options: Any, kv_dtype: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the eighth token, with the bits of one in memory; not if memory is short, and a fork goes on alike."""
    engine, file, ids = load(tiny_model, name, kv_dtype=kv_dtype, **options), tmp_path / "a.lce", tokens(700)
    prefilled = engine.prefill(ids)
    prefilled.save(file)
    expected = engine.generate([7], context=prefilled, max_tokens=16, logprobs=2)
    opened = engine.open_context(file)
    assert opened.cache.in_file >= 512
    engine.generate([7], context=opened, max_tokens=8)
    fork = opened.fork()
    for each in (opened, fork):
        assert engine.generate([], context=each, max_tokens=8).token_ids == expected.token_ids[8:]
        assert not each.cache.stacks
    opened.save(file)
    assert engine.open_context(file).token_ids == opened.token_ids
    monkeypatch.setattr("lce.cache.layer.free_memory", lambda device: 1 << 10)
    stays = engine.open_context(file)
    engine.generate([7], context=stays, max_tokens=8)
    assert stays.cache.in_file >= 512


@KV_DTYPES
@pytest.mark.parametrize("budget", [None, SMALL])
@pytest.mark.covering
def test_a_context_opens_in_another_budget(budget: str | None, kv_dtype: str, tiny_model: Path, tmp_path: Path) -> None:
    roomy, tight = (load(tiny_model, spill_dir=folder, kv_dtype=kv_dtype) for folder in (None, tmp_path))
    writer, reader = (roomy, tight) if budget else (tight, roomy)
    context = writer.prefill(tokens(500))
    context.save(tmp_path / "c.lce")
    assert answer(reader, reader.open_context(tmp_path / "c.lce")) == answer(writer, context)


@pytest.mark.parametrize("more", [0, 5000, 100_000])
def test_an_opened_context_grows_within_its_budget_or_is_refused_before_work(
    more: int, document: Path, engine: lce.Engine, tiny_model: Path
) -> None:
    """Without a folder for the rest."""
    budget, answers = Limits(engine.setup.layout).least_budget + more, list[bool]()
    bounded = lce.load(tiny_model, engine.method, block=BLOCK, kv_host_budget=budget)
    context, truth = bounded.open_context(document), engine.open_context(document)
    for seed in range(12):
        question, before = tokens(40, seed), list(context.token_ids)
        try:
            found = bounded.generate(question, context=context, max_tokens=10).token_ids
        except CapacityError:
            assert context.token_ids == before
            answers.append(False)
            continue
        answers.append(True)
        assert found == engine.generate(question, context=truth, max_tokens=10).token_ids
        state = sum(state.n_bytes for layer in context.cache.layers for state in layer.state.values())
        assert context.cache.bytes_by_tier["device"] - state <= budget
    assert answers == sorted(answers, reverse=True), "it only grows"
    assert len({*answers}) == 2


def test_forks_of_an_opened_context_go_their_own_ways(document: Path, engine: lce.Engine) -> None:
    context = engine.open_context(document)
    (disk,) = disks_of(context.cache.tiers)
    assert disk.file.bytes_read < disk.file.n_bytes / 8, "no more than the recent tokens"
    fork, first = context.fork(), answer(engine, context)
    assert (answer(engine, fork), answer(engine, engine.open_context(document))) == (first, first)


def test_an_empty_context_is_not_saved(engine: lce.Engine, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="empty"):
        engine.new_context(10).save(tmp_path / "c.lce")
    with pytest.raises(UsageError, match="is not a folder that can be written"):
        engine.prefill(tokens(9)).save(tmp_path / "no" / "c.lce")


def test_what_was_made_otherwise_is_refused(document: Path, tiny_model: Path, tmp_path: Path) -> None:
    method = lce.methods.make("longheads", NEEDS["longheads"])
    others = {
        "another model": lce.load(save_tiny(tmp_path, seed=1), method),
        "another method Full": load(tiny_model, "full"),
        "another method": load(tiny_model, chunks=5),
        "another window 64": lce.load(tiny_model, method, window=32),
        "another rope": lce.load(tiny_model, method, rope="linear", rope_factor=2),
        "another dtype": lce.load(tiny_model, method, dtype="bfloat16"),
        "another kv_dtype, auto; this engine has int8: give --kv-dtype auto": load(tiny_model, kv_dtype="int8"),
    }
    for words, other in others.items():
        with pytest.raises(DataError, match=words.removesuffix(" Full").replace(" 64", "")):
            other.open_context(document)


def test_a_file_of_8_bits_is_for_an_engine_of_8_bits(tiny_model: Path, tmp_path: Path) -> None:
    for kv_dtype in ("auto", "int8"):
        load(tiny_model, "full", kv_dtype=kv_dtype).prefill(tokens(20 * 256)).save(tmp_path / kv_dtype)
        assert describe(tmp_path / kv_dtype).kv_dtype == kv_dtype
    assert (tmp_path / "int8").stat().st_size < 0.4 * (tmp_path / "auto").stat().st_size, "of 32 bits 8, and scales"
    with pytest.raises(DataError, match="another kv_dtype, int8; this engine has auto: give --kv-dtype int8, or"):
        load(tiny_model, "full").open_context(tmp_path / "int8")


@contextmanager
def changed(document: Path, tmp_path: Path) -> Iterator[tuple[Path, bytearray]]:
    path, data = tmp_path / "changed.lce", bytearray(document.read_bytes())
    yield path, data
    path.write_bytes(data)


def test_a_file_that_is_cut_short_is_refused(document: Path, engine: lce.Engine, tmp_path: Path) -> None:
    size = document.stat().st_size
    for n in (0, 7, 8, 100, 70_000, size // 2, size - 4096, size - 1):
        with changed(document, tmp_path) as (path, data):
            del data[n:]
        with pytest.raises(DataError, match="prefill the text again"):
            engine.open_context(path)


@pytest.mark.slow
def test_an_altered_byte_is_an_error_or_not_needed(document: Path, engine: lce.Engine, tmp_path: Path) -> None:
    """Wherever it is: never another token. One bit of any byte of the manifest is an error."""
    expected, data = answer(engine, engine.open_context(document)), document.read_bytes()
    draw, refused = random.Random(0), 0
    text = json.dumps(json.dumps(manifest_of(document))).encode()[1:-1]  # as it stands in the header
    manifest = range(data.index(text), data.index(text) + len(text))
    places = [draw.randrange(len(data)) for _ in range(60)] + [len(data) - 1 - draw.randrange(4000) for _ in range(20)]
    for place in [*places, *manifest]:
        with changed(document, tmp_path) as (path, altered):
            altered[place] ^= 1 << draw.randrange(8)
        try:
            assert answer(engine, engine.open_context(path)) == expected
            assert place not in manifest
        except DataError:
            refused += 1
    assert refused > 20 + len(manifest)


@KV_DTYPES
def test_every_key_and_value_is_guarded(kv_dtype: str, tiny_model: Path, tmp_path: Path) -> None:
    """Full attention reads all of them, and all scales."""
    engine = load(tiny_model, "full", kv_dtype=kv_dtype)
    engine.prefill(tokens(300)).save(tmp_path / "full.lce")
    file, draw = FileLayout(engine.setup.layout, 300), random.Random(1)
    for _ in range(12):
        with changed(tmp_path / "full.lce", tmp_path) as (path, data):
            data[draw.randrange(file.rows_start, file.checks_start)] ^= 1
        with pytest.raises(DataError, match="altered"):
            answer(engine, engine.open_context(path))


def test_other_files_are_refused(engine: lce.Engine, tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a context"):
        engine.open_context(tiny_model / "model.safetensors")
    with pytest.raises(DataError, match="No such file"):
        engine.open_context(tmp_path / "nowhere.lce")


HOWS = pytest.mark.parametrize("how", ["ENOSPC", *(pytest.param(x, marks=pytest.mark.slow) for x in ("EIO", "short"))])


@contextmanager
def failing(k: int, how: str) -> Iterator[list[str]]:
    """Let the k-th call of the functions of `os` that write fail; yields the names of those that were called."""
    calls: list[str] = []

    def wrapped(name: str, real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: Any) -> object:
            calls.append(name)
            if len(calls) != k or (how == "short" and name != "pwrite"):
                return real(*args)
            if how == "short":
                descriptor, data, offset = args
                return real(descriptor, memoryview(data)[: len(data) // 2], offset)
            code = getattr(errno, how)
            raise OSError(code, os.strerror(code))

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("pwrite", "fsync", "posix_fallocate", "ftruncate", "replace"):
            patch.setattr(os, name, wrapped(name, getattr(os, name)))
        yield calls


@HOWS
def test_the_old_file_or_the_new_one_whatever_write_fails(how: str, engine: lce.Engine, tmp_path: Path) -> None:
    old, new, path = engine.prefill(tokens(80)), engine.prefill(tokens(90)), tmp_path / "c.lce"
    k, done = 0, False
    while not done:
        k, said = k + 1, {80, 90}
        old.save(path, force=True)
        with failing(k, how) as calls, suppress(CapacityError):
            new.save(path, force=True)
            done, said = len(calls) < k, {90}
        assert os.listdir(tmp_path) == ["c.lce"]
        assert len(engine.open_context(path)) in said
    assert k > 10


@pytest.mark.slow
@HOWS
@pytest.mark.usefixtures("one_id")
def test_a_prefill_into_a_file_goes_on_whatever_write_fails(how: str, tiny_model: Path, tmp_path: Path) -> None:
    engine = load(tiny_model, spill_dir=tmp_path)
    engine.prefill_file(tokens(300), tmp_path / "truth")
    k, done = 0, False
    while not done:
        k += 1 + k // 3  # every one of the first, and some of the later, which are much alike
        with failing(k, how) as calls, suppress(CapacityError):
            engine.prefill_file(tokens(300), tmp_path / "c.lce", checkpoint_every=BLOCK)
            done = len(calls) < k
        engine.prefill_file(tokens(300), tmp_path / "c.lce", checkpoint_every=BLOCK, force=True)
        assert (tmp_path / "c.lce").read_bytes() == (tmp_path / "truth").read_bytes()
        assert sorted(os.listdir(tmp_path)) == ["c.lce", "truth"]
        (tmp_path / "c.lce").unlink()


def test_a_spill_that_fails_loses_nothing(tiny_model: Path, tmp_path: Path) -> None:
    engine, roomy = load(tiny_model, spill_dir=tmp_path), load(tiny_model)
    expected, context = answer(roomy, roomy.prefill(tokens(400))), engine.prefill(tokens(200))
    with failing(3, "EIO"), pytest.raises(CapacityError):
        engine.prefill(tokens(400)[200:], context=context)
    engine.prefill(tokens(400)[len(context) :], context=context)
    assert answer(engine, context) == expected


# For each line that it reads, a child that saves until it is killed: one start of Python for all of them.
SAVER = """
import os, signal, sys, lce, torch
torch.set_num_threads(1)
engine = lce.load({model!r}, lce.methods.make("longheads", {knobs!r}), block=64)
contexts = [engine.prefill(list(range(2, 2 + n))) for n in (250, 290)]
for _ in sys.stdin:
    child = os.fork()
    signal.alarm(0 if child else 60)  # it ends by itself if nobody is left to kill it
    while not child:
        for context in contexts:
            context.save({path!r}, force=True)
    print(child, flush=True)
    os.waitpid(child, 0)
    print("gone", flush=True)
"""


@pytest.mark.slow
def test_killed_at_any_moment_of_a_save(engine: lce.Engine, tiny_model: Path, tmp_path: Path) -> None:
    path, draw = tmp_path / "c.lce", random.Random(0)
    truth = {n: answer(engine, engine.prefill(list(range(2, 2 + n)))) for n in (250, 290)}
    script = SAVER.format(model=str(tiny_model), knobs=NEEDS["longheads"], path=str(path))
    leftovers = kills = 0
    with start(script, stdin=subprocess.PIPE, bufsize=1) as process:
        while kills < 4 or (not leftovers and kills < 40):  # until one of them came in the middle of a save
            kills += 1
            process.stdin.write("\n")
            child = int(process.line())
            until(path.exists)  # the first save of all may take longer
            time.sleep(0.05 + draw.random() * 0.1)
            os.kill(child, signal.SIGKILL)
            assert process.line() == "gone\n"
            leftovers += len(os.listdir(tmp_path)) - 1
            context = engine.open_context(path)
            n = len(context)
            assert (answer(engine, context), os.listdir(tmp_path)) == (truth[n], ["c.lce"])
    assert leftovers


def test_a_prefill_that_another_process_has_begun_is_left_to_it(engine: lce.Engine, tmp_path: Path) -> None:
    def progress(done: int, total: int) -> None:
        if done <= BLOCK:
            with pytest.raises(DataError, match="another process"):
                engine.prefill_file(tokens(300, 1), tmp_path / "c.lce")

    engine.prefill_file(tokens(300), tmp_path / "c.lce", progress=progress)
    assert (engine.open_context(tmp_path / "c.lce").token_ids, os.listdir(tmp_path)) == (tokens(300), ["c.lce"])


class Interrupted(Exception):
    pass


def stop_at(n_tokens: int) -> Callable[[int, int], None]:
    """A progress that interrupts a prefill once it has read so many tokens, unless they are all."""

    def progress(done: int, total: int) -> None:
        if n_tokens <= done < total:
            raise Interrupted

    return progress


@pytest.mark.parametrize(("name", "budget", "kv_dtype"), pairs(IN_TIERS, [None, SMALL], ["auto", "int8"]), ids=str)
@pytest.mark.covering("name")
@pytest.mark.usefixtures("one_id")
def test_an_interrupted_prefill(name: str, budget: str | None, kv_dtype: str, tiny_model: Path, tmp_path: Path) -> None:
    engine = load(tiny_model, name, tmp_path if budget else None, kv_dtype)
    ids = tokens(10 * BLOCK - 24)  # a part of a block at the end
    engine.prefill(ids).save(tmp_path / "truth")
    read: list[int] = []
    for last in (3, 4, 9, 99):

        def progress(done: int, total: int, last: int = last) -> None:
            assert total == len(ids)
            read.append(done)
            stop_at(last * BLOCK)(done, total)

        try:
            engine.prefill_file(ids, tmp_path / "c.lce", checkpoint_every=2 * BLOCK, progress=progress)
        except Interrupted:
            assert sorted(os.listdir(tmp_path))[:2] == ["c.lce.part", "c.lce.part.state"]
    assert (tmp_path / "c.lce").read_bytes() == (tmp_path / "truth").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["c.lce", "truth"]
    assert len(read) < 10 + 4 * 2, "it began anew"
    assert engine.open_context(tmp_path / "c.lce").token_ids == ids


def test_without_checkpoints_nothing_is_left(engine: lce.Engine, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        engine.prefill_file(tokens(300), tmp_path / "c.lce", progress=stop_at(1))
    assert os.listdir(tmp_path) == []


def test_a_prefill_under_work_is_not_another(engine: lce.Engine, tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        engine.prefill_file(tokens(300), tmp_path / "c.lce", checkpoint_every=BLOCK, progress=stop_at(4 * BLOCK))
    info = describe(tmp_path / "c.lce")
    assert (info.complete, info.tokens, info.cached) == (False, 300, 3 * BLOCK)
    assert info.file_bytes == (tmp_path / "c.lce.part").stat().st_size
    with pytest.raises(DataError, match="another text"):
        engine.prefill_file(tokens(300, 1), tmp_path / "c.lce", checkpoint_every=BLOCK)
    with pytest.raises(DataError, match="was begun with a length of 300; give --length 300, or remove it"):
        engine.prefill_file(tokens(300), tmp_path / "c.lce", length=512)  # keys may be rotated for a length
    with pytest.raises(DataError, match="another method"):
        load(tiny_model, chunks=5).prefill_file(tokens(300), tmp_path / "c.lce", checkpoint_every=BLOCK)
    state = tmp_path / "c.lce.part.state"
    state.write_bytes(state.read_bytes()[:-1])
    with pytest.raises(DataError, match="remove it"):
        engine.prefill_file(tokens(300), tmp_path / "c.lce", checkpoint_every=BLOCK)
    state.unlink()
    engine.prefill_file(tokens(300), tmp_path / "c.lce")
    assert os.listdir(tmp_path) == ["c.lce"]


# Forged files: whoever changes them makes the digest anew. Another answer can come of another text alone.
def forged(document: Path, path: Path, change: Change) -> None:
    """Write `document` to `path` with a changed manifest and changed small tensors, signed anew."""
    raw = document.read_bytes()
    data_start = 8 + int.from_bytes(raw[:8], "little")
    entries = json.loads(raw[8:data_start])
    manifest = json.loads(entries.pop("__metadata__")["lce"])
    rows = {name: entry for name, entry in entries.items() if name.startswith("layers.")}
    rows_bytes = max(entry["data_offsets"][1] for entry in rows.values())
    small = {name: x for name, x in load_file(document).items() if name not in rows}
    del manifest["digest"]
    change(manifest, small)
    if "tokens" in small and isinstance(manifest.get("text"), str):
        manifest["text"] = text_hash(small["tokens"].tolist())
    header = json.dumps({"__metadata__": {"lce": signed(manifest, small)}, **rows, **tensor_entries(small, rows_bytes)})
    with path.open("wb") as file:
        file.write(raw[:8] + header.encode().ljust(data_start - 8) + raw[data_start : data_start + rows_bytes])
        for _, x in sorted(small.items()):
            file.write(x.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


EVIL = [None, -1, 0, 3, 2**40, 10**17, 1.5, math.nan, math.inf, True, "x" * 300, "\0\x1b[2J\n", [], {"a": [[[]]]}]


def evil_tensors(x: torch.Tensor) -> Iterator[torch.Tensor]:
    yield x[None]
    yield x.reshape(-1)[:0]
    for axis in range(x.ndim):
        yield x.narrow(axis, 0, x.shape[axis] - 1)
        yield x.narrow(axis, 0, 1)  # which broadcasts
    if x.ndim > 1:
        yield from (x.transpose(0, 1), x.transpose(-1, -2), x.reshape(-1))
    yield from (x.to(kind) for kind in KINDS.values() if kind != x.dtype)
    values = [math.nan, math.inf] if x.is_floating_point() else [-1, 10**9, 300]
    yield from (torch.full_like(x, value) for value in values)


def evil_cases(document: Path) -> Iterator[tuple[str, Change]]:
    def entry(place: tuple[str, ...], value: Any) -> Change:
        return lambda manifest, _: (manifest[place[0]] if len(place) > 1 else manifest).update({place[-1]: value})

    def tensors(*names: str, to: torch.Tensor | None = None) -> Change:
        def change(_: object, small: dict[str, torch.Tensor]) -> None:
            for name in names:
                small.pop(name)
                small.update({} if to is None else {name: to})

        return change

    def renamed(name: str, to: str) -> Change:
        return lambda _, small: small.update({to: small.pop(name)})

    manifest, kept = manifest_of(document), load_file(document)
    inner = [(name, key) for name, value in manifest.items() if isinstance(value, dict) for key in value]
    for place in [*((name,) for name in manifest if name != "digest"), *inner]:
        yield from ((f"{place}: {value!r}", entry(place, value)) for value in EVIL)
    for name in (name for name in kept if not name.startswith(("layers.", "layers/0/"))):
        x = kept[name]
        yield f"{name}: gone", tensors(name)
        state = name.rpartition("/")[0]
        for other in (-1, 0, 10**9, 300, 333) if name.startswith("layers/") else ():
            yield f"{name}: {other}", renamed(name, f"{state}/{other}")
        for other in evil_tensors(x):
            plausible = (other.dtype, other.shape) == (x.dtype, x.shape) and bool(other.isfinite().all())
            if not (plausible and name.startswith("unrounded/")):  # other keys, as good
                yield f"{name}: {other.dtype} {tuple(other.shape)}", tensors(name, to=other)


@pytest.mark.parametrize(
    "name", [SLOW_IN_TIERS, "esa", pytest.param("infllm", marks=pytest.mark.slow), "quest", "longheads, int8"]
)
def test_a_forged_file_is_an_error_or_changes_nothing(name: str, tiny_model: Path, tmp_path: Path) -> None:
    name, _, kv_dtype = name.partition(", ")
    engine, document = load(tiny_model, name, kv_dtype=kv_dtype or "auto"), tmp_path / "document.lce"
    path = tmp_path / "forged.lce"
    engine.prefill(tokens(333)).save(document)
    truth, refused = answer(engine, engine.open_context(document)), 0
    for what, change in evil_cases(document):
        if name != "longheads" and not what.startswith("layers/"):
            continue  # what does not depend on the method
        if kv_dtype and not what.startswith(("unrounded", "('identity'", "('pages'", "('read'", "('capacity'")):
            continue  # what does not depend on it
        forged(document, path, change)
        try:
            assert answer(engine, engine.open_context(path)) == truth, what
        except DataError as error:
            text, refused = str(error), refused + 1
            assert text.isprintable(), what
            assert len(text.replace(str(path), "")) < 500, what
    assert refused > 20


READER = """
import lce, torch
torch.set_num_threads(1)
engine = lce.load({model!r}, lce.methods.make("longheads", {knobs!r}), block=64)
context = engine.open_context({path!r})
print("ready", flush=True)
for seed in range(1000):
    try:
        print(engine.generate([5, 6, 7], context=context.fork(), max_tokens=12).token_ids, flush=True)
    except lce.DataError as error:
        print("refused", flush=True)
        break
"""


@pytest.mark.parametrize("how", ["cut", pytest.param("overwritten", marks=pytest.mark.slow)])
def test_a_file_that_changes_while_it_is_read_is_an_error(
    how: str, document: Path, engine: lce.Engine, tiny_model: Path, tmp_path: Path
) -> None:
    """At once, or when a row of it is read again: never a signal, never another token."""
    path = tmp_path / "c.lce"
    truth = engine.generate([5, 6, 7], context=engine.open_context(document), max_tokens=12).token_ids
    script = READER.format(model=str(tiny_model), knobs=NEEDS["longheads"], path=str(path))
    rows = FileLayout(engine.setup.layout, 300)
    shutil.copy(document, path)
    with start(script) as process:
        assert (process.line(), process.line()) == ("ready\n", f"{truth}\n")
        with path.open("r+b") as file:
            if how == "cut":
                file.truncate(rows.rows_start + 100)
            else:
                file.seek(rows.rows_start)
                file.write(bytes(rows.checks_start - rows.rows_start))
        *answers, last = process.communicate()[0].splitlines()
    assert (process.returncode, last) == (0, "refused")
    assert set(answers) <= {str(truth)}


@KV_DTYPES
@pytest.mark.parametrize("name", [SLOW_IN_TIERS, "esa", "full"])
def test_a_damaged_spill_file_is_an_error(name: str, kv_dtype: str, tiny_model: Path, tmp_path: Path) -> None:
    engine, truths, refused = load(tiny_model, name, tmp_path, kv_dtype), set(), []
    for seed in range(4):
        context = engine.prefill(tokens(400 if name == "longheads" else 1100))
        (disk,) = (tier for tier in context.cache.tiers if isinstance(tier, Disk))
        if seed:
            byte = random.Random(seed).randrange(disk.file.n_bytes)
            old = os.pread(disk.file._descriptor, 1, byte)
            os.pwrite(disk.file._descriptor, bytes([old[0] ^ 1 << seed]), byte)
        try:
            truths.add(tuple(answer(engine, context)))
        except DataError as error:
            refused.append(str(error))
    assert len(truths) == 1, "the first one is of a file that is whole"
    assert len(refused) == 3 or name != "full", "full attention reads everything"
    said = f"the spill file in {tmp_path} was altered since it was written; prefill the text again"
    assert set(refused) <= {said}


@pytest.mark.parametrize(("name", "budget"), pairs([SLOW_IN_TIERS, "esa", "infllm", "full"], [None, SMALL]))
@pytest.mark.usefixtures("one_id")
def test_a_context_goes_on_into_a_file(name: str, budget: str | None, tiny_model: Path, tmp_path: Path) -> None:
    """Another one or its own; interrupted in between or not. It is the file that one prefill of all would have made."""
    engine, ids = load(tiny_model, name, tmp_path / "spill" if budget else None), tokens(900)
    cut = 6 * BLOCK
    engine.prefill_file(ids, tmp_path / "truth", length=900)
    engine.prefill_file(ids[:cut], tmp_path / "old", length=900)
    context = engine.open_context(tmp_path / "old")
    how: dict[str, Any] = {"checkpoint_every": BLOCK, "progress": stop_at(11 * BLOCK)}
    with pytest.raises(Interrupted):
        engine.prefill_file(ids[cut:], tmp_path / "new", context=context, **how)
    for target in ("new", "old"):
        context = engine.open_context(tmp_path / "old")
        stats = engine.prefill_file(ids[cut:], tmp_path / target, context=context, checkpoint_every=BLOCK)
        assert stats.prompt_tokens == (900 - 10 * BLOCK if target == "new" else 900 - cut)
        assert len(context) == cut, "it stays as it is"
        assert (tmp_path / target).read_bytes() == (tmp_path / "truth").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["new", "old", "truth"]


def test_a_context_with_an_answer_goes_on_into_a_file(document: Path, engine: lce.Engine, tmp_path: Path) -> None:
    """The last token of the answer is not in its cache yet."""
    context = engine.open_context(document)
    said = answer(engine, context)
    assert context.uncached
    engine.prefill_file(tokens(40, 2), tmp_path / "c.lce", context=context)
    ids = [*tokens(300), *tokens(9, 1), *said, *tokens(40, 2)]
    found = engine.open_context(tmp_path / "c.lce")
    assert found.token_ids == ids
    engine.prefill(tokens(40, 2), context=context)
    assert answer(engine, found) == answer(engine, context)


@pytest.mark.parametrize("kind", ["folder", "FIFO", "link", "loop"])
@pytest.mark.parametrize("suffix", ["", ".part", ".part.state"])
def test_what_is_no_file_is_refused(suffix: str, kind: str, document: Path, engine: lce.Engine, tmp_path: Path) -> None:
    """Nothing is waited for, nothing is written through a link, and an opening does not need what is beside a file."""
    path, beside, victim = tmp_path / "c.lce", tmp_path / f"c.lce{suffix}", tmp_path / "victim"
    victim.write_text("mine")
    make: dict[str, Callable[[], None]] = {"folder": beside.mkdir, "FIFO": lambda: os.mkfifo(beside)}
    make.get(kind, lambda: beside.symlink_to(victim if kind == "link" else beside))()
    said = f"a {kind}" if kind in make else "a symbolic link"
    with pytest.raises(UsageError, match=f"is {said}; expected a regular file, or a name that is free"):
        engine.prefill_file(tokens(300), path, checkpoint_every=BLOCK)
    if suffix:
        shutil.copy(document, path)
        assert len(engine.open_context(path)) == 300
        assert describe(path).complete
    else:
        for call in (engine.open_context, describe):
            with pytest.raises(DataError, match=f"is {said}"):
                call(path)
        with pytest.raises(UsageError, match=f"is {said}; expected a regular file"):
            engine.prefill(tokens(9)).save(path)
    assert os.path.lexists(beside)
    assert victim.read_text() == "mine"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a file that was opened, and no more
@pytest.mark.parametrize(("what", "every"), [("save", 67), ("open", 101), ("prefill_file", 503)])
@KV_DTYPES
@pytest.mark.covering
def test_an_interruption_leaves_no_file(what: str, every: int, kv_dtype: str, tiny_model: Path, tmp_path: Path) -> None:
    engine = lce.load(tiny_model, LongHeads(chunk_size=8, chunks=4), block=32, kv_dtype=kv_dtype)
    context, text, path = engine.prefill(tokens(45)), tokens(120, seed=1), tmp_path / "new" / "c.lce"
    context.save(tmp_path / "saved.lce")
    answer = engine.generate([], max_tokens=3, context=context.fork()).token_ids
    path.parent.mkdir()
    call: Callable[[], object] = {
        "save": lambda: context.save(path),
        "open": lambda: engine.open_context(tmp_path / "saved.lce"),
        "prefill_file": lambda: engine.prefill_file(text, path, checkpoint_every=64, force=True),
    }[what]
    allowed = [set(), {"c.lce"}, {"c.lce.part", "c.lce.part.state"}, {"c.lce", "c.lce.part.state"}]
    call()
    path.unlink(missing_ok=True)
    before, errors = len(os.listdir("/proc/self/fd")), []
    for place, nth in places(call, every + (kv_dtype == "int8") * every // 2):
        path.unlink(missing_ok=True)
        try:
            interrupted(call, place, nth)
        except BaseException as error:  # a traceback that is kept
            errors.append(error)
        assert {file.name for file in path.parent.iterdir()} in allowed[: 4 if what == "prefill_file" else 2], place
        assert engine.generate([], max_tokens=3, context=context.fork()).token_ids == answer
        if what == "prefill_file":
            call()
            assert engine.open_context(path).token_ids == text
            assert {file.name for file in path.parent.iterdir()} == {"c.lce"}
    errors.clear()
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # an interruption right behind `open` loses its descriptor


@pytest.mark.parametrize("spill", [False, True])
def test_an_opened_context_goes_on_beside_a_gpu_and_is_saved_again(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spill: bool
) -> None:
    """Its pools grow while it generates; it is forked, saved and opened, with the tokens of a context in memory."""
    no_gpu(monkeypatch, "last first", slab=2048)
    method = lce.methods.LongHeads(chunks=32)
    plain = lce.load(tiny_model, method, attention="torch", block=16)
    with monkeypatch.context() as patch:
        patch.setattr("lce.engine.sizing.CacheLayout", LateDevice)
        budgets = {"kv_device_budget": 80_000, **({"spill_dir": tmp_path, "kv_host_budget": 20_000} if spill else {})}
        late = lce.load(tiny_model, method, attention="torch", block=16, **budgets)
    found = []
    for engine in (plain, late):
        engine.prefill(tokens(250)).save(tmp_path / "first.lce", force=True)
        context = engine.open_context(tmp_path / "first.lce")
        ids = list(engine.generate(tokens(5), context=context, max_tokens=20).token_ids)
        ids += engine.generate(tokens(3), context=context.fork(), max_tokens=4).token_ids
        context.save(tmp_path / "second.lce", force=True)
        again = engine.open_context(tmp_path / "second.lce")
        found.append([*ids, *engine.generate(tokens(4), context=again, max_tokens=4).token_ids])
    assert found[0] == found[1]
    assert context.cache.traffic["device"].early > 0
    assert context.cache.traffic["host"].bytes_in > 0


def test_files_are_blamed_for_their_faults(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = lce.load(tiny_model)
    engine.prefill(tokens(20)).save(tmp_path / "x.lce")
    context = engine.open_context(tmp_path / "x.lce")
    for error, said in {ValueError("odd"): "holds what does not fit the method", UsageError("me"): "^me$"}.items():
        monkeypatch.setattr(Block, "__call__", Mock(side_effect=error))
        with pytest.raises(lce.LceError, match=said):
            engine.generate(tokens(2), context=context)
