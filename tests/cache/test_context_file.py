"""A context as a file: where everything is in it, what is refused, and the cache that is made of it again."""

import errno
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from lce.cache.context_file import Draft, Snapshot, open_snapshot, restored, row_entries, write_rows
from lce.cache.kv import KVCache
from lce.cache.layout import AccessPattern, Budgets, CacheLayout, FileLayout
from lce.cache.limits import Limits
from lce.cache.manifest import FORMAT, digest, page_facts
from lce.cache.method_state import MethodState, OpenChunk, RecentRows, Staged, Summaries, TokenRows
from lce.errors import CapacityError, DataError
from tests.depth import pairs
from tests.late import disks_of
from tests.running import assert_are, keys_of

N = 77  # tokens, the last chunk incomplete


def states(layout: CacheLayout) -> Mapping[str, MethodState]:
    """One of each kind; what `append` keeps in them."""
    return {
        "rows": TokenRows(4 * layout.dtype.itemsize),
        "summaries": Summaries(layout.key_bytes, layout.chunk_size),
        "recent": RecentRows(6, layout.key_bytes),
        "open": OpenChunk(layout.chunk_size, layout.key_bytes),
        "staged": Staged(lambda n_tokens, block: 8),
    }


CPU = torch.device("cpu")
LAYOUT = CacheLayout(3, 4, 2, 4, torch.float32, CPU, AccessPattern(8, 3, 9), block=10, make_state=states)


def append(cache: KVCache, stop: int, *, commit: bool = True, n_layers: int | None = None) -> None:
    """Append keys from the cache's length on in blocks of 10; `n_layers` of the last block, or all."""
    k, size = keys_of(cache.layout, stop), cache.layout.chunk_size
    for start in range(cache.length, stop, 10):
        end = min(start + 10, stop)
        cache.reserve(end)
        for layer in cache.layers[:n_layers] if end == stop else cache.layers:
            new = k[layer.index][:, start:end]
            layer.write(new, -new)
            layer.kept(TokenRows, "rows").write(new[0], start)
            layer.kept(RecentRows, "recent").write(new, start)
            layer.kept(Staged, "staged").stage(torch.tensor([end]))
            first, complete = start // size, end // size
            if complete > first:
                chunks = k[layer.index][:, first * size : complete * size].unflatten(1, (-1, size))
                layer.kept(Summaries, "summaries").write(chunks.amax(dim=2), first)
            if (opened := max(start, complete * size)) < end:
                layer.kept(OpenChunk, "open").write(k[layer.index][:, opened:end], opened)
        if end < stop or commit:
            cache.commit()


def check(cache: KVCache, n: int) -> None:
    assert cache.length == n
    k, size = keys_of(cache.layout, n), cache.layout.chunk_size
    for layer in cache.layers:
        ours = k[layer.index]
        assert_are(layer.span(0, n), ours)
        assert torch.equal(layer.kept(TokenRows, "rows").span(0, n), ours[0])
        assert torch.equal(layer.kept(RecentRows, "recent").span(max(0, n - 6), n), ours[:, max(0, n - 6) :])
        chunks = ours[:, : n // size * size].unflatten(1, (-1, size)).amax(dim=2)
        if n >= size:
            assert torch.equal(layer.kept(Summaries, "summaries").span(0, n // size), chunks)
        if n % size:
            assert torch.equal(layer.kept(OpenChunk, "open").span(n // size * size, n), ours[:, n // size * size :])
        assert layer.kept(Staged, "staged").value == torch.tensor([n])


def cache_of(n: int, layout: CacheLayout = LAYOUT) -> KVCache:
    cache = KVCache.empty(layout)
    append(cache, n)
    return cache


def finish(draft: Draft, path: Path, cache: KVCache, n: int, **more: object) -> None:
    facts = {"format": FORMAT, "file_id": draft.file_id, "lce": "", "identity": {}, "text": ""}
    numbers = {"capacity": n, "read": n, "announced": n, "pages": page_facts(cache.layout)}
    draft.finish(path, cache.tensors(), {**facts, **numbers, **more}, lambda _: None)


def saved(cache: KVCache, path: Path, **more: object) -> Path:
    layout = FileLayout(cache.layout, cache.length)
    draft = Draft.create(path.with_name(path.name + ".tmp"), layout)
    write_rows(cache, draft.rows)
    finish(draft, path, cache, cache.length, **more)
    return path


def opened(path: Path, layout: CacheLayout = LAYOUT) -> Snapshot:
    return open_snapshot(path, layout, lambda manifest: None, lambda manifest, small: None)


def again(path: Path, layout: CacheLayout = LAYOUT, n: int = N) -> KVCache:
    snapshot = opened(path, layout)
    return restored(layout, snapshot.rows, n, snapshot.small, own=False)


APART = replace(LAYOUT, access=replace(LAYOUT.access, per_head=True))
LAYOUTS = {"heads together": LAYOUT, "heads apart": APART, "bfloat16": replace(APART, dtype=torch.bfloat16)}
PACKED = {f"{name}, 8 bits": replace(layout, kv_dtype="int8") for name, layout in LAYOUTS.items()}


@pytest.mark.parametrize("layout", (LAYOUTS | PACKED).values(), ids=LAYOUTS | PACKED)
def test_it_is_an_ordinary_safetensors_file(layout: CacheLayout, tmp_path: Path) -> None:
    cache = cache_of(N, layout)
    tensors = load_file(saved(cache, tmp_path / "c.lce"))
    shape = (layout.n_groups, FileLayout(layout, N).group_rows, *layout.format.row_shape)
    for layer in range(3):
        kv = tensors.pop(f"layers.{layer}.kv")
        assert kv.shape == shape
        if layout.format.rounds:
            pages = kv.unflatten(1, (-1, layout.format.page_rows)).flatten(0, 1)
            keys = layout.format.unpack(pages)[0].unflatten(0, (layout.n_groups, -1)).transpose(1, 2)
            assert torch.equal(keys.flatten(0, 1).flatten(1, 2), keys_of(layout, layout.old(N))[layer])
            assert torch.equal(tensors[f"unrounded/{layer}"][0], keys_of(layout, N)[layer][:, layout.old(N) :])
        else:
            assert torch.equal(kv[:, :, 0].transpose(1, 2).flatten(0, 1), keys_of(layout, N)[layer])
        assert tensors.pop(f"layers.{layer}.checks").shape == shape[:2]
    assert tensors.keys() == cache.tensors().keys()
    assert all(torch.equal(x, tensors[name]) for name, x in cache.tensors().items())


def test_a_header_has_ample_space() -> None:
    for n_layers in (1, 200):
        file = FileLayout(replace(LAYOUT, n_layers=n_layers), 10_000_000)
        names = [f"layers/{i}/{name}/{part}" for i in range(n_layers) for name in "abcdef" for part in ("rows", "at")]
        small = {name: {"dtype": "BF16", "shape": [10**6] * 4, "data_offsets": [10**13] * 2} for name in names}
        assert len(json.dumps({**row_entries(file), **small})) < file.rows_start // 2


@pytest.mark.parametrize(
    ("called", "n", "budget"), pairs(LAYOUTS | PACKED, [1, 8, 9, 17, 72, N], [False, True]), ids=str
)
@pytest.mark.covering
def test_a_restored_cache_goes_on_like_the_original(called: str, n: int, budget: bool, tmp_path: Path) -> None:
    layout = (LAYOUTS | PACKED)[called]
    path = saved(cache_of(n, layout), tmp_path / "c.lce")
    if budget:
        layout = replace(layout, budgets=Budgets(host=Limits(layout).least_budget, spill_dir=tmp_path / "spill"))
    cache = again(path, layout, n)
    assert (cache.growing, cache.in_file) == (budget, 0 if budget else layout.old(n))
    check(cache, n)
    append(cache, 150)
    fork = cache.fork()
    append(fork, 170)
    check(fork, 170)
    check(cache, 150)
    *spill, file = (disk.file for disk in disks_of(cache.stacks[0]))
    assert (len(spill), file.bytes_written) == (budget, 0)
    assert all(x.n_bytes for x in spill)
    assert cache.bytes_by_tier["disk"] == sum(x.n_bytes for x in (*spill, file))
    check(again(saved(cache, tmp_path / "next.lce"), layout, 150), 150)
    check(again(path, layout, n), n)


def into_file(folder: Path, n: int, layout: CacheLayout) -> tuple[KVCache, Draft]:
    draft = Draft.create(folder / "c.lce.part", FileLayout(layout, n))
    return KVCache.empty(layout, n, draft.rows), draft


@pytest.mark.parametrize("layout", (LAYOUTS | PACKED).values(), ids=LAYOUTS | PACKED)
def test_pages_of_a_file_are_written_once(layout: CacheLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda n: "7" * 2 * n)  # both files have one identity
    layout = replace(layout, budgets=Budgets(host=Limits(layout).least_budget))
    cache, draft = into_file(tmp_path, N, layout)
    assert cache.growing
    append(cache, N)
    write_rows(cache, draft.rows)
    assert draft.rows.bytes_written == FileLayout(layout, N).n_rows * layout.format.row_bytes
    finish(draft, tmp_path / "c.lce", cache, N)
    other = saved(cache_of(N, replace(layout, budgets=Budgets())), tmp_path / "d.lce")
    assert (tmp_path / "c.lce").read_bytes() == other.read_bytes()
    check(again(tmp_path / "c.lce", layout), N)


def test_a_file_under_work_is_taken_up_again(tmp_path: Path) -> None:
    layout = replace(LAYOUT, budgets=Budgets(host=Limits(LAYOUT).least_budget))
    cache, draft = into_file(tmp_path, N, layout)
    append(cache, 50)
    write_rows(cache, draft.rows)
    draft.rows.flush()
    tensors = {name: x.clone() for name, x in cache.tensors().items()}
    append(cache, 70)
    path, file_id = draft.path, draft.file_id
    del cache, draft
    draft = Draft(path, FileLayout(layout, N), file_id)
    cache = restored(layout, draft.rows, 50, tensors, own=True)
    assert cache.growing
    assert [disk.file for disk in disks_of(cache.stacks[0])] == [draft.rows]
    check(cache, 50)
    append(cache, N)
    write_rows(cache, draft.rows, 50)
    finish(draft, tmp_path / "c.lce", cache, N)
    check(again(tmp_path / "c.lce"), N)


@pytest.mark.parametrize("n_layers", [1, 2])
def test_every_layer_is_written_where_an_interrupted_pass_moved_some_of_them(n_layers: int, tmp_path: Path) -> None:
    """Each layer has its own border between buffer and tiers, once a pass ended between two layers."""
    layout = replace(LAYOUT, budgets=Budgets(host=Limits(LAYOUT).least_budget))
    for stop in range(41, 71):
        cache, draft = into_file(tmp_path, N, layout)
        cache.begin()
        append(cache, stop, commit=False, n_layers=n_layers)
        n = cache.length
        cache.settle()
        write_rows(cache, draft.rows)
        finish(draft, tmp_path / "c.lce", cache, N, read=n)
        check(again(tmp_path / "c.lce", n=n), n)


def test_a_checkpoint_writes_new_rows_alone(tmp_path: Path) -> None:
    cache, draft = KVCache.empty(LAYOUT), Draft.create(tmp_path / "draft", FileLayout(LAYOUT, N))
    append(cache, 50)
    write_rows(cache, draft.rows)
    append(cache, N)
    write_rows(cache, draft.rows, 50)
    assert draft.rows.bytes_written == FileLayout(LAYOUT, N).n_rows * LAYOUT.format.row_bytes
    draft.discard()


def test_a_file_under_work_is_held(tmp_path: Path) -> None:
    draft = Draft.create(tmp_path / "draft", FileLayout(LAYOUT, N))
    with pytest.raises(DataError, match="is being written by another process"):
        Draft(tmp_path / "draft", FileLayout(LAYOUT, N), draft.file_id)
    with pytest.raises(CapacityError, match="File exists"):
        Draft.create(tmp_path / "draft", FileLayout(LAYOUT, N))
    assert (tmp_path / "draft").stat().st_size == FileLayout(LAYOUT, N).small_start, "its space is reserved"
    draft.discard()
    draft.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_the_space_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CapacityError, match=r"^cannot write .*draft: No space left on device; free some space or n"):
        Draft.create(tmp_path / "draft", FileLayout(LAYOUT, N))
    assert (list(tmp_path.iterdir()), len(os.listdir("/proc/self/fd"))) == ([], before)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return saved(cache_of(N), tmp_path / "c.lce")


def test_rows_of_another_shape_are_refused(file: Path) -> None:
    others: dict[str, Any] = {"n_layers": 2, "n_kv_heads": 4, "head_dim": 8, "dtype": torch.float16}
    small_chunks = replace(LAYOUT, access=replace(LAYOUT.access, chunk_size=4))
    for layout in (APART, small_chunks, *(replace(LAYOUT, **{name: other}) for name, other in others.items())):
        with pytest.raises(DataError, match="its header contradicts its contents; prefill the text again"):
            opened(file, layout)


def test_a_digest_is_of_names_kinds_shapes_and_numbers() -> None:
    x = torch.arange(6.0)
    others = ({"b": x}, {"a": x.double()}, {"a": x.view(2, 3)}, {"a": x + 1}, {"a": x, "b": x}, {})
    assert (digest({"a": x}), digest({"a": x, "b": -x})) == (digest({"a": x.clone()}), digest({"b": -x, "a": x}))
    assert len({digest(other) for other in ({"a": x}, *others)}) == 7
    assert digest({"a": torch.zeros(2, 3).T}) == digest({"a": torch.zeros(3, 2)})


@pytest.mark.parametrize("spill", [False, True])
def test_a_fork_does_not_write_to_a_file_under_work(spill: bool, tmp_path: Path) -> None:
    """Each row of the file is of one context; the fork's own go elsewhere, or are refused."""
    budgets = Budgets(host=Limits(LAYOUT).least_budget, spill_dir=tmp_path / "spill" if spill else None)
    layout = replace(LAYOUT, budgets=budgets)
    cache, draft = into_file(tmp_path, 150, layout)
    append(cache, 80)
    fork, written = cache.fork(), draft.rows.bytes_written
    if spill:
        append(fork, 140)
        check(fork, 140)
    else:
        with pytest.raises(CapacityError, match="the cache of keys and values is full"):
            append(fork, 140)
    assert draft.rows.bytes_written == written
    append(cache, 150)
    check(cache, 150)
    write_rows(cache, draft.rows)
    finish(draft, tmp_path / "c.lce", cache, 150)
    del cache, draft
    assert fork.layers[0].span(0, 80)[0].shape == (2, 80, 4), "it has a descriptor of its own"
    check(again(tmp_path / "c.lce", n=150), 150)
