"""A benchmark of a tiny model: every row is there, and its work is what the formulas say."""

from dataclasses import replace
from pathlib import Path

import pytest

import lce
from lce.errors import CapacityError, UsageError
from lce_lab.bench import Bench, Ceilings, Subject, bench, measure
from tests.checkpoints import VOCAB, save_tiny

WEIGHTS = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96  # of the products of one layer of the tiny model
NORMS = 64


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose ceilings are known."""
    found = iter([Ceilings(1e9, 2e9, {"float32": 1e12}, 8), Ceilings(5e8, 3e9, {"float32": 2e12}, 8)] * 9)
    monkeypatch.setattr(measure, "ceilings", lambda *_: next(found))


def test_every_method_and_length(tiny_model: Path) -> None:
    told: list[tuple[int, int]] = []
    method = lce.methods.LongHeads(chunk_size=8, chunks=4, local=8)
    tell = lambda done, total: told.append((done, total))  # noqa: E731
    how = {"lengths": [16, "40"], "repeats": 2, "new_tokens": 3, "profile": True}
    report = bench(tiny_model, ["full", method], progress=tell, **how)
    assert told == [(done, 12) for done in range(13)]
    rows = [(length, name) for length in (16, 40) for name in ("full", "longheads")]
    assert [(row.length, row.method) for row in report.rows] == rows
    assert (report.ceilings, report.methods["longheads"]) == (Ceilings(1e9, 3e9, {"float32": 2e12}, 40), repr(method))
    assert (report.dtype, report.window, report.repeats, report.new_tokens) == ("float32", 64, 2, 3)
    for row in report.rows:
        assert row.weight_bytes == 4 * (2 * WEIGHTS + 5 * NORMS + VOCAB * 64 + 64)  # and a row of the embedding
        assert row.first_token.median >= 16 / row.prefill.high
        for spread in (row.prefill, row.decode, row.first_token):
            assert 0 < spread.low <= spread.median <= spread.high
        assert row.decode_share == pytest.approx((row.weight_bytes + row.cache_bytes) * row.decode.median / 1e9)
        assert row.prefill_share == pytest.approx(row.prefill_flops / row.length * row.prefill.median / 2e12)
    full = report.rows[2]
    assert full.cache_bytes == 2 * 2 * 2 * 16 * 4 * (40 + 3 + 1)  # K and V, layers, heads, tokens; see `Bench._count`
    assert full.prefill_flops == 2 * (40 * 2 * WEIGHTS + 64 * VOCAB) + 2 * 4 * 4 * 16 * 40 * 41 / 2
    assert full.warning is None
    steps = [(times.length, times.method, times.step) for times in report.profile]
    assert steps == [(row.length, row.method, step) for row in report.rows for step in ("decode", "prefill")]
    assert all(times.total_s > 0 and times.seconds["products"] > 0 for times in report.profile)
    assert [times.tokens for times in report.profile[:4]] == [1, 2048, 1, 512]


def test_weights_are_shared_with_the_same_model_alone(tiny_model: Path, tmp_path: Path) -> None:
    engine, other = lce.load(tiny_model), save_tiny(tmp_path, seed=1)
    shared = lce.load(tiny_model, "longheads", sharing=engine)
    assert shared.setup.model is engine.setup.model
    assert shared.generate([5, 6], max_tokens=4).token_ids == engine.generate([5, 6], max_tokens=4).token_ids
    with pytest.raises(UsageError, match="another model"):
        lce.load(other, sharing=engine)
    with pytest.raises(UsageError, match=r"in torch\.float32 on cpu; expected torch\.bfloat16"):
        lce.load(tiny_model, sharing=engine, dtype="bfloat16")
    with pytest.raises(UsageError, match="sharing is 'demo'"):
        lce.load(tiny_model, sharing="demo")  # type: ignore[arg-type]


def test_an_end_token_ends_no_measurement(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that ends its text at every other token, as many steps are timed as of any other."""
    engine = lce.load(tiny_model)
    subject, generate, calls = Subject(engine), engine.generate, []
    context, first = subject.prefill(8, 60)
    plain = engine.generate([], context=context.fork(), max_tokens=20).token_ids
    engine.setup = replace(engine.setup, eos_ids=frozenset(plain[3::2]))
    monkeypatch.setattr(engine, "generate", lambda *args, **how: calls.append(generate(*args, **how)) or calls[-1])
    context, first = subject.prefill(8, 60)
    assert subject.decode(context, 20, first) > 0
    assert sum(call.stats.generated_tokens - (call.finish_reason != "stop") for call in calls[1:]) == 20
    assert len(calls) > 2


def test_what_cannot_be_measured(tiny_model: Path) -> None:
    with pytest.raises(CapacityError, match=r"need 256\.0 KiB of memory") as error:
        Bench(tiny_model, lengths=[300], new_tokens=4, kv_host_budget="128KiB")
    assert error.value.__notes__ == ["this is what full is measured with at a length of 300"]
    with pytest.raises(UsageError, match="did you mean 'longheads'"):
        Bench(tiny_model, ["longhead"])
    with pytest.raises(UsageError, match="nothing to measure"):
        Bench(tiny_model, [])
    lengths = [("lengths", value) for value in ([0], "8,16", None, {8})]
    others = ("repeats", 0), ("new_tokens", "many"), ("seed", -1), ("seed", "x"), ("methods", 5), ("methods", [None])
    for name, value in (*lengths, *others):
        with pytest.raises(UsageError, match="expected"):
            Bench(tiny_model, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="progress is 3"):
        bench(tiny_model, lengths=8, progress=3)  # type: ignore[arg-type]
