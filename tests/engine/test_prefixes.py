"""Contexts that a batch keeps as files: found by other processes, never a wrong token, and within their budget."""

import errno
import json
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lce
from lce.engine import kept_entries, kept_files, prefixes
from lce.engine.kept_entries import Entries, Entry, common
from lce.engine.planning import Planner
from lce.engine.prefixes import PrefixCache
from lce.errors import CapacityError
from tests.checkpoints import tokens
from tests.command import Process, output, start, until, within

BLOCK = 32


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> lce.Engine:
    return lce.load(tiny_model, "longheads", block=BLOCK)


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_files, "LEAST_IDLE_S", 0.0)


def listed(folder: Path, kind: str = "lce") -> list[Path]:
    return sorted(folder.glob(f"*/*.{kind}"))


def asked(engine: lce.Engine, folder: Path, *prompts: list[int], **options: Any) -> list[lce.Generation]:
    """The answers of a new batch, one after another, as a server that was started anew gives them."""
    with engine.batch(cache_dir=folder, **options) as batch:
        return [within(batch.stream(ids, max_tokens=6).finish) for ids in prompts]


def ask(engine: lce.Engine, folder: Path, ids: list[int]) -> lce.Generation:
    return asked(engine, folder, ids)[0]


def alone(engine: lce.Engine, ids: list[int], n_before: int) -> list[int]:
    """The answer to a prompt of which the first tokens were read before the others."""
    context = engine.prefill(ids[:n_before])
    return engine.generate(ids[n_before:], context=context, max_tokens=6).token_ids


def test_a_prefix_is_found_after_a_restart(engine: lce.Engine, tmp_path: Path) -> None:
    ids = tokens(150)
    first = ask(engine, tmp_path, ids)
    assert (first.stats.read_before, len(listed(tmp_path))) == (0, 1)
    more = [*ids, *first.token_ids, 5, 6, 7]
    again = ask(engine, tmp_path, more)
    assert again.stats.read_before == len(ids) + len(first.token_ids) - 1
    context = engine.prefill(ids)
    engine.generate([], context=context, max_tokens=6)
    assert again.token_ids == engine.generate([5, 6, 7], context=context, max_tokens=6).token_ids
    assert len(listed(tmp_path)) == 1  # the longer context took the place of the one that it continues
    branch = ask(engine, tmp_path, [*ids[:100], 9, 9])
    assert (branch.stats.read_before, branch.token_ids) == (100, alone(engine, [*ids[:100], 9, 9], 100))


def test_each_method_has_contexts_of_its_own(engine: lce.Engine, tmp_path: Path) -> None:
    ids = tokens(120)
    ask(engine, tmp_path, ids)
    other = lce.Engine(engine.setup.using("dca"))
    found = ask(other, tmp_path, ids)
    assert (found.stats.read_before, found.token_ids) == (0, other.generate(ids, max_tokens=6).token_ids)
    assert len(listed(tmp_path)) == 2


def test_a_question_makes_no_long_copy(engine: lce.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "ALWAYS_SAVED", 100)
    ids = tokens(200)
    ask(engine, tmp_path, ids)
    for seed in range(3):
        assert ask(engine, tmp_path, [*ids, *tokens(5, seed=seed)]).stats.read_before >= 200
    assert len(listed(tmp_path)) == 1
    ask(engine, tmp_path, [*ids, *tokens(50, seed=9)])
    assert len(listed(tmp_path)) == 2
    assert ask(engine, tmp_path, [*ids, *tokens(50, seed=9), 7]).stats.read_before >= 250


def test_what_memory_lacks_is_in_a_file(engine: lce.Engine, tmp_path: Path) -> None:
    with engine.batch(cache_dir=tmp_path) as batch:
        batch._prefixes.memory = 0
        for seed in range(4):
            batch.stream(tokens(100, seed=seed), max_tokens=1).finish()
        until(lambda: len(listed(tmp_path)) == 4 and batch.gauges()["kept_bytes"] == 0)
        assert batch.stream(tokens(100, seed=0), max_tokens=1).finish().stats.read_before >= 99


def test_a_folder_that_cannot_be_written(engine: lce.Engine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(lce.UsageError, match="cache_dir"):
        engine.batch(cache_dir=tmp_path / "file")


KILLS = int(os.environ.get("LCE_KILLS", "16"))  # a kill takes one to two seconds
TEXTS = [tokens(120 + 9 * seed, seed=seed) for seed in range(8)]
_CHILD = """
import json, sys, warnings
import lce
from lce.engine import kept_files
warnings.simplefilter("ignore")
kept_files.LEAST_IDLE_S = 0.0
folder, model, budget, texts = json.load(sys.stdin)
engine = lce.load(model, "longheads", block=32)
with engine.batch(cache_dir=folder, cache_budget=budget) as batch:
    print("ready", flush=True)
    while True:
        for ids in texts:
            found = batch.stream(ids, max_tokens=6).finish()
            print(json.dumps(found.token_ids), flush=True)
"""


def child(folder: Path, model: Path, budget: int, texts: list[list[int]]) -> Process:
    process = start(_CHILD, stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(json.dumps([str(folder), str(model), budget, texts]))
    process.stdin.close()
    process.stdin = None
    assert process.line() == "ready\n"
    return process


def killed(process: Process) -> list[str]:
    """The whole lines that a process wrote before it is killed."""
    with process:
        process.send_signal(signal.SIGKILL)
        return process.communicate()[0].split("\n")[:-1]


def ways(engine: lce.Engine, ids: list[int]) -> set[str]:
    """The answers to a text that is read as one or behind a prefix: blocks that begin elsewhere may round otherwise."""
    answers = [alone(engine, ids, cut) for cut in (99, 100, len(ids) - 1)]
    return {json.dumps(each) for each in (*answers, engine.generate(ids, max_tokens=6).token_ids)}


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, KILLS])
@pytest.mark.timeout(1500)
def test_a_killed_process_leaves_no_wrong_token_and_no_waste(
    n: int, engine: lce.Engine, tiny_model: Path, tmp_path: Path
) -> None:
    rng, folder, budget = random.Random(n), tmp_path / "kept", 400 << 10
    texts = [*TEXTS, *([*ids[:100], 3, 4, 5] for ids in TEXTS)]
    answers: dict[int, set[str]] = {}
    for _ in range(n):
        process = child(folder, tiny_model, budget, texts)
        time.sleep(rng.random() * 0.3)
        for i, line in enumerate(killed(process)):
            answers.setdefault(i % len(texts), set()).add(line)
    with engine.batch(cache_dir=folder, cache_budget=budget) as batch:
        for ids in texts:
            batch.stream(ids, max_tokens=1).finish()
    for i, found in answers.items():
        assert found <= ways(engine, texts[i]), i
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert not [path for path in files if path.suffix == ".tmp"]
    assert {path.stem for path in files if path.suffix == ".lce"} == {
        path.stem for path in files if path.suffix == ".ids" and path.with_suffix(".lce").exists()
    }
    assert sum(path.stat().st_size for path in files if path.suffix == ".lce") <= budget


@pytest.mark.slow
def test_processes_share_a_folder_while_some_are_killed(engine: lce.Engine, tiny_model: Path, tmp_path: Path) -> None:
    rng, folder, lines, texts = random.Random(0), tmp_path / "kept", list[list[str]](), TEXTS
    lasting = child(folder, tiny_model, 1 << 30, texts)
    for _ in range(6):
        other = child(folder, tiny_model, 1 << 30, texts)
        time.sleep(rng.random())
        lines.append(killed(other))
        assert lasting.poll() is None
    lines.append(killed(lasting))
    assert len(lines[-1]) > len(texts)
    for i, ids in enumerate(texts):
        assert {line for found in lines for line in found[i :: len(texts)]} <= ways(engine, ids), i
    kept = [np.frombuffer(path.read_bytes(), np.int32).tolist() for path in folder.rglob("*.ids")]
    assert [i for i, ids in enumerate(texts) if not any(found[: len(ids)] == ids for found in kept)] == []
    assert {path.stem for path in folder.rglob("*.lce")} <= {path.stem for path in folder.rglob("*.ids")}


@pytest.fixture(scope="module")
def full(tiny_model: Path) -> lce.Engine:
    return lce.load(tiny_model, block=BLOCK)


TEXT = tokens(200)


@pytest.fixture(scope="module")
def truth(full: lce.Engine) -> list[int]:
    return full.generate([*TEXT, 5], max_tokens=6).token_ids


@pytest.fixture
def folder(full: lce.Engine, tmp_path: Path) -> Path:
    asked(full, tmp_path, TEXT)
    assert len(listed(tmp_path)) == 1
    return tmp_path


ASK = """
import sys, warnings, lce
warnings.simplefilter("ignore")
engine = lce.load(sys.argv[1], block=32)
with engine.batch(cache_dir=sys.argv[2]) as batch:
    result = batch.stream(eval(sys.argv[3]), max_tokens=6).finish()
print(result.stats.read_before, *result.token_ids)
"""


@pytest.mark.slow
def test_another_process_finds_a_kept_context(tiny_model: Path, folder: Path, truth: list[int]) -> None:
    n_before, *ids = map(int, output(ASK, tiny_model, folder, repr([*TEXT, 5])).split())
    assert n_before >= 199
    assert ids == truth


def test_a_conversation_leaves_one_file(full: lce.Engine, tmp_path: Path) -> None:
    with full.batch(cache_dir=tmp_path) as batch:
        ids = tokens(60)
        for turn in range(4):
            result = within(batch.stream(ids, max_tokens=6).finish)
            until(lambda: all(each.path for each in batch._prefixes._entries))
            ids = [*ids, *result.token_ids, *tokens(9, seed=turn)]
    assert len(listed(tmp_path)) == len(listed(tmp_path, "ids")) == 1
    assert len(listed(tmp_path)[0].with_suffix(".ids").read_bytes()) == 4 * (len(ids) - 9)


DAMAGES: dict[str, Any] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "odd": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "noise": lambda path: path.write_bytes(random.Random(0).randbytes(path.stat().st_size)),
    "others": lambda path: path.write_bytes(path.read_bytes()[:400] + np.array([7], np.int32).tobytes() * 50),
    "longer": lambda path: path.write_bytes(path.read_bytes() * 2),
    "fifo": lambda path: (path.unlink(), os.mkfifo(path)),
    "folder": lambda path: (path.unlink(), path.mkdir()),
    "dangling": lambda path: (path.unlink(), path.symlink_to("/nowhere")),
}


@pytest.mark.parametrize("kind", ["lce", "ids"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_a_miss(
    damage: str, kind: str, full: lce.Engine, folder: Path, truth: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    """The second prompt has what the changed file of tokens would promise."""
    (path,) = listed(folder, kind)
    DAMAGES[damage](path)
    claimed = [*TEXT[:100], *[7] * 50]
    found = asked(full, folder, [*TEXT, 5], claimed)
    assert (found[0].token_ids, found[0].stats.read_before) == (truth, 0)
    assert found[1].token_ids == full.generate(claimed, max_tokens=6).token_ids
    said = capfd.readouterr().err
    if (damage, kind) in {("missing", "lce"), ("missing", "ids"), ("dangling", "lce"), ("noise", "ids")}:
        return
    assert said.count("a kept context") + said.count("does not hold") >= 1, said
    assert "Traceback" not in said


def test_a_flipped_bit_never_changes_a_token(full: lce.Engine, folder: Path, truth: list[int]) -> None:
    (path,) = listed(folder)
    raw, ids = path.read_bytes(), path.with_suffix(".ids").read_bytes()
    generator = random.Random(1)
    places = [generator.randrange(len(raw)) for _ in range(12)] + [9, 40, len(raw) - 1]
    for place in places:
        damaged = bytearray(raw)
        damaged[place] ^= 1 << generator.randrange(8)
        for each in (*listed(folder), *listed(folder, "ids")):
            each.unlink()
        path.write_bytes(damaged)
        path.with_suffix(".ids").write_bytes(ids)
        (found,) = asked(full, folder, [*TEXT, 5])
        assert found.token_ids == truth, place


@pytest.mark.slow
def test_hundreds_of_damaged_files_are_one_miss(full: lce.Engine, folder: Path, truth: list[int]) -> None:
    (path,) = listed(folder)
    ids = path.with_suffix(".ids").read_bytes()
    for i in range(1200):
        path.with_name(f"{i:016x}.lce").write_bytes(b"not a context")
        path.with_name(f"{i:016x}.ids").write_bytes(ids)
    path.write_bytes(b"neither")
    (found,) = asked(full, folder, [*TEXT, 5])
    assert (found.token_ids, len(listed(folder))) == (truth, 1)


def test_what_is_not_the_caches_stays(full: lce.Engine, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    own = [tmp_path / "mine" / name for name in (".draft.tmp", "a.ids", "a.lce", "b.ids", ".a.lce.1-2.tmp")]
    for path in own:
        path.write_bytes(b"abcd")
        os.utime(path, (0, 0))
    asked(full, tmp_path, *(tokens(60, seed=i) for i in range(3)), cache_budget=60_000)
    assert all(path.exists() for path in own)


def test_a_folder_that_vanishes_is_made_again(full: lce.Engine, tmp_path: Path) -> None:
    place = tmp_path / "cache"
    with full.batch(cache_dir=place) as batch:
        within(batch.stream(TEXT, max_tokens=6).finish)
        until(lambda: listed(place))
        for path in place.rglob("*.*"):
            path.unlink()
        next(iter(place.iterdir())).rmdir()
        place.rmdir()
        assert within(batch.stream([*TEXT, 5], max_tokens=6).finish).token_ids
        until(lambda: listed(place))


def taken(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_the_budget_is_kept_and_the_least_recently_used_file_goes(full: lce.Engine, tmp_path: Path) -> None:
    texts = [tokens(100, seed=i) for i in range(6)]
    asked(full, tmp_path, texts[0])
    size = taken(tmp_path)
    budget = 7 * size // 2
    with full.batch(cache_dir=tmp_path, cache_budget=budget) as batch:
        for i, text in enumerate(texts[1:]):
            within(batch.stream(text, max_tokens=6).finish)
            until(lambda: not any(each.is_unsaved or each.busy for each in batch._prefixes._entries))
            assert taken(tmp_path) <= budget
            if i < 4:
                within(batch.stream([*texts[0], 9], max_tokens=1).finish)  # the oldest is used again and again
    with full.batch(cache_dir=tmp_path, cache_budget=budget) as batch:
        assert within(batch.stream([*texts[0], 9, 9], max_tokens=1).finish).stats.read_before >= 100
        assert within(batch.stream([*texts[1], 9, 9], max_tokens=1).finish).stats.read_before == 0


def test_a_full_disk_gives_up_what_was_used_least_recently(
    full: lce.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, texts = lce.Context.save, [tokens(100, seed=i) for i in range(4)]

    def limited(context: lce.Context, path: Path) -> None:
        if len(listed(tmp_path)) > 1:
            raise CapacityError("no space is left")
        save(context, path)

    monkeypatch.setattr(lce.Context, "save", limited)
    asked(full, tmp_path, *texts)
    assert len(listed(tmp_path)) == len(listed(tmp_path, "ids")) == 2
    (found,) = asked(full, tmp_path, [*texts[3], 9])
    assert found.stats.read_before >= 100, "the last one is kept"


def test_tokens_without_a_context_go_when_they_are_seen(full: lce.Engine, folder: Path) -> None:
    (kept,) = listed(folder)
    left = kept.with_name("0123456789abcdef.ids")
    left.write_bytes(b"abcd")
    os.utime(left, (0, 0))
    asked(full, folder, [*TEXT, 5])
    assert not left.exists()


def test_a_context_larger_than_the_budget_is_not_saved(full: lce.Engine, tmp_path: Path) -> None:
    with full.batch(cache_dir=tmp_path, cache_budget=1000) as batch:
        within(batch.stream(TEXT, max_tokens=6).finish)
        until(lambda: any(each.unsavable for each in batch._prefixes._entries))
        assert within(batch.stream([*TEXT, 5], max_tokens=6).finish).stats.read_before >= 199
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_two_caches_use_one_folder(full: lce.Engine, tmp_path: Path) -> None:
    texts = [tokens(80, seed=i) for i in range(4)]
    with full.batch(cache_dir=tmp_path) as one, full.batch(cache_dir=tmp_path) as two:
        for i, text in enumerate(texts):
            first, second = (one, two) if i % 2 else (two, one)
            within(first.stream(text, max_tokens=2).finish)
            until(lambda first=first: not any(each.is_unsaved or each.busy for each in first._prefixes._entries))
            found = within(second.stream([*text, 5], max_tokens=4).finish)
            assert found.stats.read_before >= 79
            assert found.token_ids == full.generate([*text, 5], max_tokens=4).token_ids
        for path in (*listed(tmp_path), *listed(tmp_path, "ids")):
            path.unlink(missing_ok=True)  # as the budget of the other would
        for text in texts:
            found = within(one.stream([*text, 6], max_tokens=4).finish)
            assert found.token_ids == full.generate([*text, 6], max_tokens=4).token_ids


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), ValueError("ours")], ids=repr)
@pytest.mark.parametrize("call", ["os.fsync", "os.replace", "os.pwrite"])
def test_a_save_that_fails_leaves_the_context_in_memory(
    call: str, error: Exception, full: lce.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with full.batch(cache_dir=tmp_path) as batch:
        monkeypatch.setattr(call, Mock(side_effect=error))
        within(batch.stream(TEXT, max_tokens=6).finish)
        until(lambda: any(each.unsavable or each.path for each in batch._prefixes._entries))
        monkeypatch.undo()
        assert within(batch.stream([*TEXT, 5], max_tokens=6).finish).stats.read_before >= 199
        within(batch.stream(tokens(99, seed=1), max_tokens=6).finish)
    assert not list(tmp_path.rglob("*.tmp"))
    assert len(listed(tmp_path)) >= 1


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[PrefixCache]:
    made = PrefixCache(tmp_path, 1 << 30, 1 << 30)
    yield made
    within(lambda: made.close(save=False))


def test_prefixes_are_found_by_their_pieces(full: lce.Engine, cache: PrefixCache) -> None:
    for n in (10, 63, 64, 65, 128, 200):
        cache._entries.add(Entry(np.array(tokens(n), np.int32), "g"))
    cache._entries.add(Entry(np.array([*tokens(100), *tokens(100, seed=1)], np.int32), "g"))
    for n_asked in range(1, 260, 7):
        asked = np.array(tokens(n_asked) if n_asked <= 200 else [*TEXT, *tokens(n_asked - 200, seed=3)], np.int32)
        entry, n = cache._entries.best("g", asked)
        assert entry is not None
        assert n == max(common(each.ids, asked) for each in cache._entries)
    assert cache._entries.best("h", np.array(TEXT, np.int32)) == (None, 0)


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=5)
MOCK = Mock(**{"cache.n_tokens": 99, "cache.nearest": lambda n: n})
KEPT = st.tuples(TOKENS, st.sampled_from("gh"), st.booleans(), st.booleans(), st.booleans(), st.booleans())


@given(st.lists(KEPT, max_size=12), TOKENS)
def test_an_entry_is_found_as_if_all_were_compared(kept: list[Any], wanted: list[int]) -> None:
    entries, here, ids = Entries(), list[Entry](), np.array(wanted, np.int32)
    for own, group, in_memory, on_disk, is_odd, stays in kept:
        entry = Entry(np.array(own, np.int32), group, path=Path("x") if on_disk else None)
        entry.context, entry.busy, entry.unopenable = MOCK if in_memory else None, is_odd, is_odd
        entries.add(entry)
        here += [entry] if stays else []
    for entry in {*entries} - {*here}:
        entries.discard(entry)
        entries.discard(entry)
    assert len(entries) == len(here)
    assert {*entries} == {*here}
    usable = [each for each in here if each.group == "g" and not each.unopenable]
    n = max((common(each.ids, ids) for each in usable), default=0)
    equal = [each for each in usable if n and common(each.ids, ids) == n]
    best, n_found = entries.best("g", ids)
    assert n_found == n
    assert (best in equal) if equal else best is None
    if best is not None:
        assert (best.context is not None) == any(each.context is not None for each in equal)
    filed = [common(each.ids, ids) for each in here if each.group == "g" and each.path]
    assert entries.longest("g", ids, lambda each: each.path is not None) == max(filed, default=0)
    for one in here:
        others = [each for each in here if each.group == one.group and each is not one and not each.busy]
        expected = {each for each in others if common(each.ids, one.ids) == len(each.ids)}
        assert {*entries.prefixes(one.group, one.ids, one)} == expected
        assert len(entries.prefixes(one.group, one.ids, one)) == len(expected)


def test_many_kept_contexts_cost_a_request_little(full: lce.Engine) -> None:
    """Per request, only a few of the entries are compared, and no memory is counted anew."""
    n_compared, compare, weighed = [0], kept_entries.common, Mock(wraps=Planner.bytes_needed)

    def counted(one: Any, other: Any) -> int:
        n_compared[0] += 1
        return compare(one, other)

    with full.batch(max_lanes=1) as batch, pytest.MonkeyPatch.context() as patch:
        for seed in range(40):
            within(batch.stream(tokens(20, seed=seed), max_tokens=1).finish)
        patch.setattr(kept_entries, "common", counted)
        patch.setattr(Planner, "bytes_needed", lambda *given: weighed(*given))
        found = within(batch.stream([*tokens(20, seed=7), 5], max_tokens=2).finish)
        assert found.stats.read_before == 20
    assert n_compared[0] < 10
    assert weighed.call_count < 10


def test_contexts_that_wait_to_be_saved_have_a_bound(
    full: lce.Engine, cache: PrefixCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefixes, "LEAST_UNSAVED", 0)
    cache._files.wake = lambda: None  # type: ignore[union-attr, method-assign]  # a disk that is never ready
    with full.batch() as batch:
        batch._prefixes = batch._scheduler.prefixes = cache
        within(batch.stream(tokens(40), max_tokens=1).finish)
        cache.memory = 3 * cache.memory_bytes
        for seed in range(1, 20):
            within(batch.stream(tokens(40, seed=seed), max_tokens=1).finish)
        assert cache.memory <= cache.memory_bytes <= 2 * cache.memory + cache.memory // 3


def test_a_new_batch_knows_the_files_at_once(full: lce.Engine, tmp_path: Path) -> None:
    with full.batch(cache_dir=tmp_path) as batch:
        for seed in range(3):
            within(batch.stream(tokens(200, seed=seed), max_tokens=2).finish)
    with full.batch(cache_dir=tmp_path) as batch:
        assert batch.gauges()["contexts"] == 3


def test_common_lengths() -> None:
    one, other = np.arange(130, dtype=np.int32), np.arange(130, dtype=np.int32)
    other[100] = 7
    assert (common(one, other), common(one[:50], other), common(one[:0], other)) == (100, 50, 0)


def test_a_context_under_way_is_waited_for(full: lce.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    going, begun, save = threading.Event(), threading.Event(), lce.Context.save

    def slowly(self: lce.Context, path: Path, **how: Any) -> None:
        begun.set()
        assert going.wait(30)
        save(self, path, **how)

    monkeypatch.setattr(lce.Context, "save", slowly)
    with full.batch(cache_dir=tmp_path) as batch:
        within(batch.stream(TEXT, max_tokens=6).finish)
        assert begun.wait(30)
        stream = batch.stream([*TEXT, 5], max_tokens=6)
        assert within(batch.stream(tokens(40, seed=4), max_tokens=6).finish).finish_reason
        assert stream.state == "waiting"
        going.set()
        assert within(stream.finish).stats.read_before >= 199


def test_a_new_file_is_of_its_entry_alone(full: lce.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request may look for files between the moment when a file appears and that when its entry knows the file."""
    save = lce.Context.save
    with full.batch(cache_dir=tmp_path) as batch:

        def looked_for(self: lce.Context, path: Path, **how: Any) -> None:
            save(self, path, **how)
            batch._prefixes._files.scan(path.parent.name)

        monkeypatch.setattr(lce.Context, "save", looked_for)
        within(batch.stream(TEXT, max_tokens=6).finish)
        until(lambda: all(each.path for each in batch._prefixes._entries))
        assert len(listed(tmp_path)) == batch._prefixes.n_contexts == 1


def test_a_file_for_which_a_budget_is_too_small_stays(
    full: lce.Engine, folder: Path, truth: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(setup: lce.Setup, path: Path) -> lce.Context:
        raise lce.CapacityError("memory is short")

    with monkeypatch.context() as patch:
        patch.setattr(kept_files, "open_context", refused)
        (found,) = asked(full, folder, [*TEXT[:150], 5])
        assert (found.stats.read_before, len(listed(folder))) == (0, 2)
    (found,) = asked(full, folder, [*TEXT, 5])
    assert found.stats.read_before >= 199
    assert found.token_ids == truth


def test_a_batch_says_how_many_contexts_are_yet_to_be_saved(full: lce.Engine, tmp_path: Path) -> None:
    for folder, expected in ((None, 0), (tmp_path, 1)):
        with full.batch(cache_dir=folder) as batch:
            within(batch.stream(tokens(100), max_tokens=2).finish)
            found = batch.gauges()
            assert (found["unsaved"], found["unsaved_bytes"] > 0) == (expected, expected > 0)
            until(lambda: batch.gauges()["unsaved"] == 0)
