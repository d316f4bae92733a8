"""Of files put together of two, nothing of another file or place is read; and no file appears that does not open."""

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from lce.cache.disk import Disk
from lce.cache.kv import KVCache
from lce.cache.layout import CacheLayout, FileLayout
from lce.cache.method_state import GrowingRows, MethodState
from lce.errors import DataError, LceError, UsageError
from tests.checkpoints import tokens
from tests.engine.test_saving import BLOCK, SERVING, Interrupted, answer, load, stop_at

N = 300
CONTRADICTION = ": its header contradicts its contents; prefill the text again"
CASES = [("full", "auto"), ("infllm", "int8")]  # one reads every row, one what it chooses
MORE = pytest.param("longheads", "int8", marks=pytest.mark.slow)  # each head chooses for itself, which takes long
EVERY = [  # without `reattention`, which reads all keys for each choice and so takes longest in tiers
    pytest.param(name, ("auto", "int8")[i % 2], marks=pytest.mark.slow)
    for i, name in enumerate(SERVING)
    if name != "reattention"
]
EVERY_DAY = ("full", "longheads", "infllm", "esa", "self_extend")  # each keeps something else, or nothing
SPLICED = pytest.mark.parametrize(("name", "kv_dtype"), [*CASES, MORE, *EVERY])


def refusal(work: Callable[[], object]) -> str:
    try:
        work()
    except DataError as error:
        return "; ".join([str(error), *getattr(error, "__notes__", [])])
    return ""


def borders(layout: CacheLayout, size: int) -> list[int]:
    file = FileLayout(layout, N)
    spans = (file.rows_start, file.checks_start), (file.checks_start, file.small_start)
    inner = [a + (b - a) * layer // layout.n_layers for a, b in spans for layer in range(layout.n_layers)]
    return [0, *inner, file.small_start, size]


def spliced(one: bytes, other: bytes, cuts: list[int]) -> Iterator[bytes]:
    """`one` with every span between two cuts from `other`, where that is another file than either."""
    for a, b in itertools.combinations(cuts, 2):
        data = one[:a] + other[a:b] + one[b:]
        if data not in (one, other):
            yield data


@SPLICED
def test_a_context_of_two_files_is_refused(name: str, kv_dtype: str, tiny_model: Path, tmp_path: Path) -> None:
    engine, path, truths, refused = load(tiny_model, name, kv_dtype=kv_dtype), tmp_path / "c.lce", [], []
    for file, text in {"one": tokens(N), "other": tokens(N, 7), "again": tokens(N)}.items():
        engine.prefill(text).save(tmp_path / file)
        truths.append(answer(engine, engine.open_context(tmp_path / file)))
    one, n_read = (tmp_path / "one").read_bytes(), 0
    for other in ("other", "again"):
        for data in spliced(one, (tmp_path / other).read_bytes(), borders(engine.setup.layout, len(one))):
            path.write_bytes(data)
            try:
                assert answer(engine, engine.open_context(path)) in truths
                n_read += 1
            except DataError as error:
                refused.append(str(error).removeprefix(str(path)))
    assert n_read == 0 or name != "full"
    assert len(refused) > 8 * n_read
    assert set(refused) <= {" was altered since it was written; prefill the text again", CONTRADICTION}


@SPLICED
def test_a_prefill_goes_on_from_its_own_files_alone(name: str, kv_dtype: str, tiny_model: Path, tmp_path: Path) -> None:
    """`.part` of one prefill, `.part.state` of another one, of the same text or not: refused now or when it is read."""
    engine = load(tiny_model, name, tmp_path / "spill", kv_dtype)
    for file, text in {"one": tokens(900), "other": tokens(900, 7), "again": tokens(900)}.items():
        with pytest.raises(Interrupted):
            engine.prefill_file(text, tmp_path / file, checkpoint_every=BLOCK, progress=stop_at(12 * BLOCK))
    truth = answer(engine, engine.prefill(tokens(900)))
    for other in ("other", "again"):
        shutil.copy(tmp_path / f"{other}.part", tmp_path / "c.lce.part")
        shutil.copy(tmp_path / "one.part.state", tmp_path / "c.lce.part.state")
        said = refusal(lambda: engine.prefill_file(tokens(900), tmp_path / "c.lce"))
        assert (name == "full") <= ("c.lce.part was altered since it was written" in said)
        assert ("c.lce.part.state to begin again" in said) == bool(said)
        if not said:
            opened = lambda: answer(engine, engine.open_context(tmp_path / "c.lce"))  # noqa: E731
            assert refusal(opened) or opened() == truth, "it chose no row of the other"
            (tmp_path / "c.lce").unlink()


@SPLICED
def test_a_spill_file_of_another_context_is_refused(name: str, kv_dtype: str, tiny_model: Path, tmp_path: Path) -> None:
    engine = load(tiny_model, name, tmp_path, kv_dtype)
    context, other = engine.prefill(tokens(900)), engine.prefill(tokens(900, 7))
    truth = answer(engine, context.fork())
    files = [tier.file for each in (context, other) for tier in each.cache.tiers if isinstance(tier, Disk)]
    os.pwrite(files[0]._descriptor, os.pread(files[1]._descriptor, files[1].n_bytes, 0), 0)
    found: list[int] = []
    said = refusal(lambda: found.extend(answer(engine, context)))
    assert "was altered since it was written; prefill the text again" in said or name != "full"
    assert said or found == truth, "it chose none of them"


def test_a_file_is_replaced_by_its_own_context_or_by_force(tiny_model: Path, tmp_path: Path) -> None:
    """Whatever its name is by then. Neither by a fork, nor by a context that another one has overtaken."""
    engine, path, text = load(tiny_model), tmp_path / "c.lce", tmp_path / "text"
    text.write_text("precious")
    context, other = engine.prefill(tokens(N)), engine.prefill(tokens(N, 7))
    context.save(path)
    earlier, first, second = path.read_bytes(), engine.open_context(path), engine.open_context(path)

    def refused(*saves: Callable[[], object]) -> None:
        for save in saves:
            with pytest.raises(UsageError, match=r"exists; name another file, or give --force .*, force=True\)$"):
                save()

    refused(lambda: context.save(text), lambda: engine.prefill_file(tokens(N), text))
    refused(lambda: other.save(path), lambda: engine.prefill_file(tokens(9), path, context=other))
    refused(lambda: context.fork().save(path), lambda: engine.prefill_file(tokens(N), path))
    assert (path.read_bytes(), text.read_text()) == (earlier, "precious")
    for own in (context, first, first):
        path = path.rename(tmp_path / f"{path.name}.moved")
        if own is first:
            path.write_bytes(earlier)  # a copy of the file that it was opened from
        engine.prefill(tokens(9), context=own)
        own.save(path)
    refused(lambda: context.save(path), lambda: second.save(path))
    engine.prefill_file(tokens(9), path, context=first)
    assert len(engine.open_context(path)) == N + 27
    refused(lambda: first.save(path))
    with pytest.raises(UsageError, match="force is 'yes'; expected True or False"):
        second.save(path, force="yes")  # type: ignore[arg-type]
    second.save(path, force=True)
    engine.prefill_file(tokens(N), text, force=True)
    assert len(engine.open_context(path)) == len(engine.open_context(text)) == N


def test_a_file_that_appears_during_a_prefill_stays(tiny_model: Path, tmp_path: Path) -> None:
    """And so does the work: the same call with `force` has nothing left to read."""
    engine, path = load(tiny_model), tmp_path / "c.lce"
    with pytest.raises(UsageError, match="exists; name another file") as caught:
        engine.prefill_file(tokens(N), path, progress=lambda *_: path.write_text("precious") and None)
    assert (path.read_text(), caught.value.__notes__) == ("precious", [f"the same command goes on from {N} tokens"])
    assert engine.prefill_file(tokens(N), path, force=True).read_before == N
    assert answer(engine, engine.open_context(path)) == answer(engine, engine.prefill(tokens(N)))
    assert os.listdir(tmp_path) == ["c.lce"]


def an_unknown_tensor(patch: pytest.MonkeyPatch) -> None:
    real = KVCache.tensors
    patch.setattr(KVCache, "tensors", lambda cache: {**real(cache), "layers/0/nothing/0": torch.zeros(1)})


def a_wrong_shape(patch: pytest.MonkeyPatch) -> None:
    real = KVCache.tensors
    patch.setattr(KVCache, "tensors", lambda cache: {name: x[None] for name, x in real(cache).items()})


def a_state_that_is_not_restored(patch: pytest.MonkeyPatch) -> None:
    for kind in (MethodState, GrowingRows):
        patch.setattr(kind, "restore", Mock(side_effect=IndexError("no such row")))


def other_bytes(patch: pytest.MonkeyPatch) -> None:
    """A disk that accepts the token ids and holds zeros."""
    real, ids = os.pwrite, torch.tensor(tokens(N), dtype=torch.int32).numpy().tobytes()
    patch.setattr(os, "pwrite", lambda fd, data, at: real(fd, bytes(len(data)) if data == ids else data, at))


FAULTS = [an_unknown_tensor, a_wrong_shape, a_state_that_is_not_restored, other_bytes]


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] * (x not in EVERY_DAY)) for x in SERVING])
def test_a_file_that_does_not_open_replaces_no_other(name: str, tiny_model: Path, tmp_path: Path) -> None:
    engine, path = load(tiny_model, name), tmp_path / "c.lce"
    context = engine.prefill(tokens(N))
    context.save(path)
    earlier, has_state = path.read_bytes(), bool(context.cache.tensors())
    for fault in FAULTS if has_state else (an_unknown_tensor, other_bytes):
        for write in (lambda: context.save(path), lambda: engine.prefill_file(tokens(N), path, force=True)):
            with pytest.MonkeyPatch.context() as patch:
                fault(patch)
                with pytest.raises(LceError, match=r"^internal error: .*c\.lce was not written, because"):
                    write()
            assert os.listdir(tmp_path) == ["c.lce"], fault
            assert path.read_bytes() == earlier
    context.save(path)
    assert answer(engine, engine.open_context(path)) == answer(engine, context)
