"""Plans promise no less than is held; what does not fit is refused before any work; contexts admitted fit together."""

import gc
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import lce
from lce import system
from lce.cache.disk import Disk
from lce.cache.kv import KVCache
from lce.cache.layout import AccessPattern, Budgets, CacheLayout
from lce.cache.limits import Limits
from lce.cache.pool import Device
from lce.engine.planning import ALLOWANCE, Planner
from lce.errors import CapacityError
from lce.methods import Driver, LongHeads
from tests.checkpoints import TINY, tokens

WINDOW = TINY["max_position_embeddings"]
TOKEN = 2 * 2 * 2 * 16 * 4  # bytes of keys and values in the tiny model
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("dca", "full", "infllm", "longheads", "quest", "rerope", "self_extend", "streaming")),
    ("lm_infinite", {"top_k": 3}),
    ("self_extend", {"group": "auto"}),
    ("longheads", {"placement": "constant"}),
    ("quest", {"dense_layers": 0}),
    ("esa", {"compress": "pca", "low_dim": 16}),
    ("esa", {"compress": "none"}),
    ("oracle", {"chunk_size": 8}),
    ("random", {"chunk_size": 8, "placement": "constant"}),
    ("pages", {"select": "summary", "placement": "dual"}),
    ("pages", {"select": "lowdim", "select.compress": "pca", "select.low_dim": 16, "placement": "grouped"}),
    ("pages", {"select": "oracle", "placement": "constant"}),
    ("reattention", {}),
]
SMALL = {"longheads": {"chunk_size": 8}, "infllm": {"block_size": 8, "top_k": 3, "sinks": 4}, "esa": {"sinks": 4}}


def method_of(name: str, knobs: dict[str, Any]) -> lce.Method:
    return lce.methods.make(name, SMALL.get(name, {}) | knobs)


def buffers(cache: KVCache) -> int:
    """Bytes of the keys and values that are in no tier."""
    return sum(layer.buffer.n_bytes for layer in cache.layers)


def at_most(monkeypatch: pytest.MonkeyPatch, memory: int | None = None, disk: int | None = None) -> None:
    """A machine with so much room left, whatever is taken."""
    monkeypatch.setattr(system, "free_memory", lambda device: memory)
    monkeypatch.setattr(system, "free_disk", lambda folder: disk)


def test_every_method_is_planned() -> None:
    own = {name for name in lce.methods.available() if lce.methods.find(name).__module__.startswith("lce")}
    assert {name for name, _ in CASES} == own


@pytest.mark.parametrize("n", [40, 330])
@pytest.mark.parametrize(("name", "knobs"), CASES, ids=str)
@pytest.mark.covering
def test_a_plan_promises_what_is_held_in_memory(name: str, knobs: dict[str, Any], n: int, tiny_model: Path) -> None:
    method = method_of(name, knobs)
    cache = lce.load(tiny_model, method).prefill(tokens(n)).cache
    tiers = lce.plan(tiny_model, method, tokens=n).tiers
    assert list(tiers) == ["device"]
    assert tiers["device"].keys_and_values == buffers(cache)
    held, promised = cache.bytes_by_tier["device"], tiers["device"].keys_and_values + tiers["device"].besides
    assert held <= promised <= held * 1.6 + 20_000


@pytest.mark.parametrize("n", [330, 900])
@pytest.mark.parametrize(("name", "knobs"), CASES, ids=str)
@pytest.mark.covering("name")
def test_a_plan_promises_what_is_held_below(
    name: str, knobs: dict[str, Any], n: int, tiny_model: Path, tmp_path: Path
) -> None:
    method, options = method_of(name, knobs), {"block": 64, "spill_dir": tmp_path}
    resolved = method.resolve(WINDOW)
    layout = CacheLayout(2, 4, 2, 16, torch.float32, torch.device("cpu"), resolved.access, block=64)
    options["kv_host_budget"] = Limits(layout).least_budget + 5000
    cache = lce.load(tiny_model, method, **options).prefill(tokens(n)).cache
    tiers = lce.plan(tiny_model, method, tokens=n, **options).tiers
    pool = sum(tier.n_bytes for tier in cache.tiers if isinstance(tier, Device))
    held, device = cache.bytes_by_tier, tiers["device"]
    assert device.keys_and_values == buffers(cache) + pool <= options["kv_host_budget"]
    checks = [tier.file.checks for tier in cache.tiers if isinstance(tier, Disk)]
    taken = held["device"] + sum(block.nbytes for each in checks for block in each._blocks.values())
    assert taken <= device.keys_and_values + device.besides <= taken * 1.6 + 20_000
    assert held["disk"] <= tiers["disk"].needed <= held["disk"] + held["device"]
    if n == 900:
        assert [type(tier) for tier in cache.tiers] == [Device, Disk]
        assert cache.bytes_reserved == tiers["disk"].needed, "it is reserved"


@pytest.mark.parametrize("options", [{}, {"kv_host_budget": 200_000}, {"kv_host_budget": 200_000, "spill_dir": "/"}])
@pytest.mark.parametrize(("name", "knobs"), CASES, ids=str)
@pytest.mark.covering
def test_one_token_more_than_the_longest_does_not_fit(
    name: str, knobs: dict[str, Any], options: dict[str, Any], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_most(monkeypatch, memory=1_000_000, disk=3_000_000)
    ask = partial(lce.plan, tiny_model, method_of(name, knobs), block=16, **options)
    longest = ask(tokens=1).longest
    assert longest > 100
    assert ask(tokens=longest).fits
    assert ask(tokens=longest).longest == ask(tokens=longest + 1).longest == longest
    assert not ask(tokens=longest + 1).fits
    assert f"the longest that fits is {longest:,} tokens" in (ask(tokens=longest + 1).refusal or "")


def no_work(*_: object, **__: object) -> Any:
    raise AssertionError("work was begun")


def test_what_cannot_fit_is_refused_before_any_work(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = lce.load(tiny_model)
    monkeypatch.setattr(Driver, "begin", no_work)
    at_most(monkeypatch, memory=256 * TOKEN + 100)
    told = "need 256.0 KiB of memory, and 128.1 KiB is available; the longest that fits is 256 tokens; .*--spill-dir"
    for work in (
        lambda: engine.generate(tokens(7), max_tokens=250),
        lambda: next(engine.stream(tokens(250), max_tokens=7)),
        lambda: engine.prefill(tokens(257)),
        lambda: engine.prefill(tokens(7), length=257),
        lambda: engine.logits(tokens(257)),
        lambda: engine.trace(tokens(257)),
    ):
        with pytest.raises(CapacityError, match=rf"^257 tokens {told}$"):
            work()
    with pytest.raises(AssertionError, match="begun"):
        engine.prefill(tokens(256))


def test_a_plan_counts_activations_of_a_block(tiny_model: Path) -> None:
    """Of the tiny model: 3 · 64 + 192 + 2 · 128 numbers of a token, or some more."""
    few, many = (lce.plan(tiny_model, tokens=n, block=64).tiers["device"] for n in (1, 10_000))
    assert few.activations * 64 == many.activations
    assert 4 * 300 < few.activations < 4 * 3000
    assert many.needed == many.keys_and_values + many.besides + many.weights + many.activations


def test_a_plan_says_what_the_method_can_read() -> None:
    plan, engine = lce.plan("demo", tokens="20k"), lce.load("demo")
    assert (plan.fits, plan.readable, plan.warning) == (True, 512, engine.setup.beyond(20480))
    assert lce.plan("demo", tokens=512).warning is None
    stretched = lce.plan("demo", tokens="20k", rope="linear", rope_factor=64)
    assert (stretched.readable, stretched.warning) == (512 * 64, None)
    assert lce.plan("demo", "dca", tokens="20k").readable is None
    assert lce.plan("demo", tokens="20k", rope="linear").readable == 20480


def test_a_context_may_grow_into_what_it_has(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = lce.load(tiny_model)
    context = engine.prefill(tokens(20), length=256)
    at_most(monkeypatch, memory=100)
    engine.generate(tokens(30), max_tokens=10, context=context)
    before = list(context.token_ids)
    for work in (
        lambda: engine.generate(tokens(7), max_tokens=250, context=context),
        lambda: engine.prefill(tokens(200), context=context),
        lambda: engine.prefill(tokens(2), context=context, length=257),
    ):
        with pytest.raises(CapacityError, match=r"the longest that fits is 256 tokens"):
            work()
        assert context.token_ids == before
    at_most(monkeypatch, memory=256 * TOKEN + 200)
    assert len(engine.prefill(tokens(200), context=context)) == len(before) + 200


@pytest.mark.parametrize("options", [{}, {"kv_host_budget": 400_000, "spill_dir": "."}])
def test_a_token_costs_no_look(
    options: dict[str, Any], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    engine = lce.load(tiny_model, LongHeads(chunk_size=8), block=32, **options)
    looks = []
    monkeypatch.setattr(system, "free_memory", lambda device: looks.append(device))
    engine.generate(tokens(500), max_tokens=40)
    assert len(looks) == 1


@pytest.fixture
def _small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lce.cache.pool.SLAB", 16 * 1024)


def on_a_gpu(free_bytes: dict[str, int | None], **budgets: Any) -> Planner:
    """A planner for a GPU, which need not be there: 8 KiB a chunk, all heads of a chunk in a page."""
    access, device = AccessPattern(16), torch.device("cuda")
    layout = CacheLayout(2, 4, 2, 16, torch.float32, device, access, Budgets(**budgets), block=16)
    unbounded: dict[str, int | None] = {"disk": None, "host": None, "device": None}
    return Planner(layout, unbounded | free_bytes)


@pytest.mark.usefixtures("_small_slabs")
def test_three_tiers() -> None:
    kib, n = 1024, 1600  # 800 KiB
    needs = on_a_gpu({}, device=100 * kib, host=81 * kib, spill_dir=Path("/")).needs(n)
    assert {tier: x.keys_and_values // kib for tier, x in needs.items()} == {"device": 100, "host": 80, "disk": 800}
    assert [need.besides for need in needs.values()] == [0, 4096 * 4, 0], "checks of 3,200 rows: one block"
    free = on_a_gpu({}, device=100 * kib).needs(n - 16)  # a host without bounds takes whole slabs
    assert {tier: need.keys_and_values // kib for tier, need in free.items()} == {"device": 100, "host": 792 + 8}
    whole = on_a_gpu({}, host=81 * kib, spill_dir=Path("/")).needs(n)
    assert {tier: need.keys_and_values // kib for tier, need in whole.items()} == {"device": 800, "host": 0, "disk": 0}


@pytest.mark.parametrize(
    ("free_bytes", "budgets", "message"),
    [
        ({"device": 5000}, {}, "device memory, and 4.9 KiB is available; no text fits; give a --kv-device-budget$"),
        ({"device": 9000}, {"device": 100_000}, "device memory.* is 16 tokens; .* give a smaller --kv-device-budget$"),
        ({"host": 90_000}, {"device": 90_000}, "host memory, .* give a --kv-host-budget and a --spill-dir$"),
        ({"host": 90_000}, {"device": 90_000, "host": 99_000, "spill_dir": Path("/")}, "a smaller --kv-host-budget$"),
        ({}, {"device": 90_000, "host": 99_000}, "host memory for keys and values, and the budget is 96.7 KiB; .* 192"),
        ({}, {"device": 1}, "in blocks of 16 with 1 B for .*; give --kv-device-budget 20KiB or more"),
        ({"disk": 1}, {"device": 90_000, "host": 1, "spill_dir": Path("/")}, "disk for /, .* 160 tokens; .* free some"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("_small_slabs")
def test_each_tiers_refusal(free_bytes: dict[str, int | None], budgets: dict[str, Any], message: str) -> None:
    with pytest.raises(CapacityError, match=message):
        on_a_gpu(free_bytes, **budgets).check(1600)


@pytest.mark.parametrize("budgets", [{}, {"kv_host_budget": 20_000}], ids=str)
def test_what_lies_in_an_opened_file_needs_no_memory(
    budgets: dict[str, Any], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = LongHeads(chunk_size=8, chunks=4)
    lce.load(tiny_model, method).prefill(tokens(400)).save(tmp_path / "saved.lce")
    engine = lce.load(tiny_model, method, block=8, **budgets)
    context = engine.open_context(tmp_path / "saved.lce")
    at_most(monkeypatch, memory=100 * TOKEN)
    engine.generate(tokens(10), max_tokens=5, context=context)
    with pytest.raises(CapacityError, match=r"the longest that fits is [45][0-9][0-9] tokens; .*--spill-dir"):
        engine.generate(tokens(10), max_tokens=500, context=context)


def test_a_file_holds_what_memory_cannot(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method, path = LongHeads(chunk_size=8, chunks=4), tmp_path / "read.lce"
    bounded = lce.load(tiny_model, method, block=8, kv_host_budget=20_000)
    unbounded = lce.load(tiny_model, method, block=8)
    at_most(monkeypatch, memory=60_000, disk=0)  # the file reserves its own place
    bounded.prefill_file(tokens(100), path)
    with pytest.raises(CapacityError, match=r"^400 tokens need .* give a --kv-host-budget$"):
        unbounded.prefill_file(tokens(400), tmp_path / "more.lce")
    assert list(tmp_path.iterdir()) == [path]


CHUNK = 256 * TOKEN  # what memory is counted in


@pytest.fixture
def engine(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> lce.Engine:
    """An engine where memory for three chunks and a half is free, whatever is used."""
    gc.collect()  # contexts of other tests
    monkeypatch.setattr(system, "free_memory", lambda device: 3 * CHUNK + CHUNK // 2)
    return lce.load(tiny_model)


def test_two_contexts_that_do_not_fit_together(engine: lce.Engine, tiny_model: Path) -> None:
    first = engine.new_context(512)
    told = "^512 tokens need 256.0 KiB of memory, and 192.0 KiB is available; the longest that fits is 256 tokens;"
    with pytest.raises(CapacityError, match=told):
        engine.new_context(512)
    with pytest.raises(CapacityError, match=told):
        lce.load(tiny_model, "streaming", window=4096).new_context(512)
    second = engine.new_context(256)
    first.close()
    third = engine.new_context(512)
    with pytest.raises(CapacityError, match="no text fits"):
        engine.generate(tokens(3), max_tokens=3)
    del second, third
    engine.generate(tokens(300), max_tokens=3)
    engine.new_context(768).close()


def test_what_a_context_was_promised_stays_its_own(engine: lce.Engine) -> None:
    context = engine.prefill(tokens(20), length=768)
    with pytest.raises(CapacityError, match="the longest that fits is 256 tokens"):
        engine.new_context(300)
    engine.prefill(tokens(700), context=context)
    assert ALLOWANCE.promised(context.cache) == 768
    with pytest.raises(CapacityError, match=r"the longest that fits is 1,[0-9]* tokens"):
        engine.prefill(tokens(2000), context=context)
    assert (len(context), ALLOWANCE.promised(context.cache)) == (720, 768)


def test_a_call_that_fails_gives_back(engine: lce.Engine) -> None:
    context = engine.prefill(tokens(20))

    def fails(done: int, total: int) -> None:
        raise ArithmeticError

    for call in (
        lambda: engine.prefill(tokens(600), context=context, progress=fails),
        lambda: engine.generate(tokens(500), max_tokens=100, context=context, progress=fails),
        lambda: engine.prefill(tokens(600), progress=fails),
    ):
        with pytest.raises(ArithmeticError):
            call()
        gc.collect()
        assert ALLOWANCE.promised(context.cache) == 20
        engine.new_context(768).close()


def test_a_fork_counts_what_it_adds(engine: lce.Engine) -> None:
    context = engine.prefill(tokens(700))
    forks = [context.fork() for _ in range(4)]
    for fork in forks[:3]:
        engine.prefill(tokens(2), context=fork, length=1000)  # one chunk more than the fork has
    with pytest.raises(CapacityError, match="the longest that fits is 768 tokens"):
        engine.prefill(tokens(2), context=forks[3], length=1000)
    forks[0].close()
    engine.prefill(tokens(2), context=forks[3], length=1000)


def test_reserved_bytes_count_once(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "free_disk", lambda folder: 9 * CHUNK)
    method = lce.methods.LongHeads(chunk_size=8)
    options: dict[str, Any] = {"block": 16, "kv_host_budget": 100_000, "spill_dir": tmp_path}
    spilling = lce.load(tiny_model, method, **options)
    contexts = [spilling.new_context(2000) for _ in range(2)]
    assert all(context.cache.bytes_reserved > 1000 * TOKEN for context in contexts)


def test_many_threads_ask_at_once(engine: lce.Engine) -> None:
    def ask(_: int) -> lce.Context | None:
        try:
            return engine.new_context(256)
        except CapacityError:
            return None

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(32), timeout=60))
    assert sum(context is not None for context in found) == 3
