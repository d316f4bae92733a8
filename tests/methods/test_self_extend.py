"""Self-Extend with `group=auto`: what the comparison with the oracle does not cover."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import lce
from lce.attention import Attention
from lce.cache.kv import KVCache
from lce.cache.layout import Budgets
from lce.cache.limits import Limits
from lce.methods import Driver, Full, Rope, RopeConfig, SelfExtend, turned_keys
from tests import oracle
from tests.checkpoints import tokens
from tests.running import cut, layout_for, run, vectors

WINDOW = 32
AUTO = SelfExtend(group="auto")


@given(local=st.integers(1, 60), more=st.integers(0, 60), start=st.integers(0, 5000))
def test_a_group_is_the_smallest_that_fits(local: int, more: int, start: int) -> None:
    far, i = local + more, torch.arange(start, start + 50)
    method = SelfExtend(local=local, group="auto", far=far).resolve(WINDOW)
    for index, group in zip(i.tolist(), method.groups(i).tolist(), strict=True):
        longest = [index // size + local - local // size for size in range(1, group + 1)]
        assert longest[-1] <= far
        assert all(distance > far for distance in longest[:-1])
        assert group == 1 or index > far


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("blocks", [[WINDOW], cut(WINDOW, 7), cut(WINDOW, 1)], ids=str)
def test_a_text_within_the_window_has_full_attention_to_the_bit(blocks: list[int], dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in vectors(0, 4, 2, WINDOW, 16))
    for backend in ("torch", "compiled"):
        out, full = (run(each, q, k, v, blocks, window=WINDOW, backend=backend) for each in (AUTO, Full()))
        assert torch.equal(out, full)


def test_half_precision_is_as_close_as_with_a_fixed_group() -> None:
    """Though far keys are rounded twice."""
    n, errors = 5 * WINDOW, []
    q, k, v = (x.bfloat16() for x in vectors(1, 8, 2, n, 64))
    wide, setting = [x.double() for x in (q, k, v)], oracle.Setting(WINDOW)
    for group in ("auto", 8):
        truth = oracle.attention(*wide, oracle.self_extend(*wide, setting, group=group), setting)
        out = run(SelfExtend(group=group), q, k, v, cut(n, 50), window=WINDOW)  # type: ignore[arg-type]
        errors.append((out.double() - truth).abs().mean())
    assert errors[0] <= 1.25 * errors[1]


def reader(budgets: Budgets | None = None, kv_dtype: str = "auto", block: int = 40) -> tuple[Driver, KVCache, Rope]:
    method = AUTO.resolve(WINDOW)
    layout = layout_for(method, 4, torch.zeros(2, 0, 16), block, budgets or Budgets())
    layout = replace(layout, kv_dtype=kv_dtype)
    driver = Driver(method, Attention.choose("torch"), WINDOW, 2)
    return driver, KVCache.empty(layout), Rope(RopeConfig(), 16, WINDOW, 1000)


def kept(cache: KVCache) -> int:
    return sum(state.n_bytes for state in cache.layers[0].state.values())


@pytest.mark.parametrize("block", [1, 7, 64])
def test_what_is_kept_is_bounded_before_it_is_read(block: int) -> None:
    (driver, cache, rope), start, most = reader(block=max(block, 40)), 0, 0
    q, k, v = vectors(0, 4, 2, 300, 16)
    for size in (WINDOW, *cut(300 - WINDOW, block)):
        driver.attend(cache, rope, *(x[:, start : start + size] for x in (q, k, v)))
        start += size
        assert kept(cache) <= Limits(cache.layout).state_bytes(start)
        most = max(most, kept(cache))
        if start == WINDOW:
            assert kept(cache) == Limits(cache.layout).state_bytes(start) == 0
    assert Limits(cache.layout).state_bytes(300) <= 2 * most


def test_a_key_is_rotated_once_for_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    moved, rotated = turned_keys.moved, list[int]()

    def counted(k: Tensor, *rest: Any) -> Tensor:
        rotated.append(k.shape[1])
        return moved(k, *rest)

    monkeypatch.setattr(turned_keys, "moved", counted)
    n, method = 6 * WINDOW, AUTO.resolve(WINDOW)
    run(AUTO, *vectors(0, 4, 2, n, 16), [20, *cut(n - 20, 1)], window=WINDOW)
    groups = method.groups(torch.arange(n))
    last = [int((groups == group).nonzero().max()) for group in groups.unique().tolist() if group > 1]
    assert sum(rotated) == sum(index + 1 - method.n_local for index in last)


@pytest.mark.parametrize("tight", [False, True], ids=["8 bits", "budget"])
def test_nothing_is_kept_where_memory_is_bounded(tight: bool, tmp_path: Path) -> None:
    layout = reader()[1].layout
    budgets = Budgets(host=Limits(layout).least_budget, spill_dir=tmp_path) if tight else Budgets()
    driver, cache, rope = reader(budgets, "auto" if tight else "int8-device")
    q, k, v = vectors(0, 4, 2, 1000, 16)
    for x in zip(*(x.split(40, dim=1) for x in (q, k, v)), strict=True):
        driver.attend(cache, rope, *x)
    assert (cache.layers[0].stack is not None) == tight
    assert kept(cache) == 0
    assert Limits(cache.layout).state_bytes(1000) <= (Limits(cache.layout).budget if tight else 0)


def test_a_decode_step_reads_as_much_as_with_a_fixed_group(tiny_model: Path) -> None:
    found = []
    for method in (AUTO, SelfExtend(group=8)):
        engine = lce.load(tiny_model, method, block=32)
        found.append(lce.profiled_step(engine, engine.prefill(tokens(300))).read_bytes)
    assert found[0] == found[1] > 0


def test_a_text_that_grows_token_by_token_is_as_one_read_at_once(tiny_model: Path) -> None:
    engine = lce.load(tiny_model, AUTO, block=32)
    context = engine.prefill(tokens(60))
    for token in tokens(100, seed=2):
        engine.prefill([token], context=context)
    assert (context.logits - engine.logits(context.token_ids)[-1]).abs().max() <= 1e-4
