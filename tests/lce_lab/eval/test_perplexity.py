"""Perplexity: a slow loop over transformers' logits, streams and windows, records, and intervals."""

import json
import math
from pathlib import Path

import pytest
import torch

import lce
from lce.methods import LongHeads
from lce_lab.eval.perplexity import Column, LossTable, Perplexity, ends, stream, student, windows
from lce_lab.eval.record import Loss, Record
from lce_lab.eval.report import Report
from tests.checkpoints import save_by_transformers, tokens

IDS = tokens(300)


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> lce.Engine:
    return lce.load(tiny_model, LongHeads(chunk_size=8, chunks=4), block=32)


def slow(engine: lce.Engine, ids: list[int], first: int) -> list[float]:
    """Negative log-likelihoods of the tokens from `first` on, from the logits of them all."""
    logprobs = engine.logits(ids).double().log_softmax(-1)
    return [-float(logprobs[i - 1, ids[i]]) for i in range(first, len(ids))]


@pytest.mark.parametrize("scored", ["last", "all"])
def test_windows_are_a_slow_loop_over_transformers(tmp_path: Path, scored: str) -> None:
    from transformers import LlamaConfig

    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 128}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, **heads, bos_token_id=0, eos_token_id=1)
    model, total, n = save_by_transformers(tmp_path, config), 0.0, 0
    for start in range(0, 300 - 100 + 1, 40):
        window = torch.tensor(IDS[start : start + 100])
        with torch.no_grad():
            logprobs = model(window[None]).logits[0].double().log_softmax(-1)
        for i in range(60 if scored == "last" else 1, 100):
            total, n = total - float(logprobs[i - 1, window[i]]), n + 1
    found = windows(lce.load(tmp_path, dtype="float32"), [IDS], length=100, stride=40, scored=scored)
    assert (found.samples, found.tokens, found.perplexity) == (6, n, pytest.approx(math.exp(total / n), rel=1e-4))


def test_windows_of_all_lengths_end_at_the_same_tokens(engine: lce.Engine) -> None:
    found = [windows(engine, [IDS], length=n, longest=200, stride=20) for n in (50, 200)]
    assert [(each.length, each.samples, each.tokens) for each in found] == [(50, 6, 120), (200, 6, 120)]
    for each in found:
        nll = [x for end in range(200, 301, 20) for x in slow(engine, IDS[end - each.length : end], each.length - 20)]
        assert math.log(each.perplexity) == pytest.approx(sum(nll) / len(nll), abs=1e-5)


def test_a_stream_is_the_whole_text_by_position(engine: lce.Engine) -> None:
    """Of two texts, one of them shorter than the last border."""
    texts = [IDS, tokens(130, seed=2)]
    found = stream(engine, texts, lengths=[200, 64, 100], stride=30)
    assert [(each.first, each.length) for each in found] == [(0, 64), (64, 100), (100, 200)]
    nll = [slow(engine, text[:200], 1) for text in texts]
    for each in found:
        part = [x for text in nll for x in text[max(0, each.first - 1) : each.length - 1]]
        assert (each.tokens, math.log(each.perplexity)) == (len(part), pytest.approx(sum(part) / len(part), abs=1e-5))
    assert found[0].samples == 2 * 3  # runs up to 30, 60 and 64


def test_resumes(engine: lce.Engine, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped after two windows: the others are read when it goes on, and the figures are those of one run."""
    path, stops = tmp_path / "losses.jsonl", True

    def tell(done: int, total: int) -> None:
        if done == 2 and stops:
            raise KeyboardInterrupt

    def run(record: Record | None) -> tuple[Perplexity, list[Perplexity]]:
        whole = windows(engine, [IDS], length=100, stride=50, record=record, progress=tell)
        return whole, stream(engine, [IDS], lengths=[50, 100], stride=25, record=record)

    with pytest.raises(KeyboardInterrupt):
        run(Record(path))
    assert len(path.read_text().splitlines()) == 2
    stops = False
    expected = run(None)
    assert (run(Record(path)), len(path.read_text().splitlines())) == (expected, 5 + 4)
    monkeypatch.setattr(engine, "score", None)  # nothing is read again
    assert run(Record(path)) == expected
    other = [*IDS[:-1], 5]
    with pytest.raises(TypeError):
        windows(engine, [other], length=100, stride=50, record=Record(path))
    rounded = lce.load(tiny_model, engine.method, block=32, weights="int8")
    assert windows(rounded, [IDS], length=100, stride=50, record=Record(path)) != expected[0]


def test_a_record_tells_what_a_loss_depends_on(tiny_model: Path, tmp_path: Path) -> None:
    record = Record(tmp_path / "losses.jsonl")
    for kv_dtype in ("auto", "int8"):
        rounded = lce.load(tiny_model, kv_dtype=kv_dtype)
        windows(rounded, [IDS], length=300, record=record, about={"checkpoint": "tiny"})
    plain, other = (json.loads(line) for line in record.path.read_text().splitlines())
    assert (plain.get("kv_dtype"), other["kv_dtype"]) == (None, "int8")
    told = [plain[name] for name in ("method", "knobs", "window", "checkpoint", "version")]
    assert told == ["full", {}, 64, "tiny", lce.__version__]


def test_windows_are_spread_evenly() -> None:
    texts = [IDS, IDS[:90], two := IDS[:200]]
    assert [end for text, end in ends(texts, 100, 50) if text is IDS] == [100, 150, 200, 250, 300]
    assert ends(texts, 100, 50, most=4) == [(IDS, 150), (IDS, 250), (two, 100), (two, 200)]
    with pytest.raises(lce.UsageError, match="no text has 301 tokens, the longest has 300"):
        ends(texts, 301, 50)


def test_intervals() -> None:
    """Student's over windows of one size; of several sizes, a mean of all tokens."""
    assert [student(n) for n in (1, 4, 5, 10, 1000)] == pytest.approx([12.706, 2.776, 2.571, 2.228, 1.962], rel=2e-3)
    even = Perplexity.of("full", "windows", 0, 9, [Loss(x * 10.0, 10) for x in (1.0, 2.0, 3.0)])
    assert even.perplexity == pytest.approx(math.exp(2))
    assert even.high == pytest.approx(math.exp(2 + student(2) * math.sqrt(1 / 3)))
    uneven = Perplexity.of("full", "stream", 0, 9, [Loss(20.0, 10), Loss(4.0, 2)])
    assert (uneven.perplexity, uneven.low) == (pytest.approx(math.exp(2)), pytest.approx(math.exp(2)))
    assert Perplexity.of("full", "windows", 0, 9, [Loss(20.0, 10)]).low is None


def test_what_cannot_be_measured_is_refused(engine: lce.Engine) -> None:
    with pytest.raises(lce.UsageError, match="stride is 0"):
        windows(engine, [IDS], length=100, stride=0)
    with pytest.raises(lce.UsageError, match="two tokens"):
        stream(engine, [[3]], lengths=[10])


BOTH = [IDS, IDS[129::-1]]


@pytest.fixture(scope="module")
def engines(tiny_model: Path) -> list[lce.Engine]:
    full = lce.load(tiny_model, block=32)
    return [full, lce.load(tiny_model, LongHeads(chunk_size=8, chunks=4), block=32, sharing=full)]


def tables(*files: Path) -> dict[str, LossTable]:
    return {table.setting: table for table in Report.read(files).perplexities}


def test_tables_have_the_figures_that_were_measured(engines: list[lce.Engine], tmp_path: Path) -> None:
    record = Record(tmp_path / "losses.jsonl")
    expected: dict[str, list[float]] = {}
    for engine in engines:
        for scored in ("last", "all"):
            how = {"longest": 120, "stride": 40, "scored": scored, "record": record}
            for length in (40, 120):  # of 40 tokens, both settings score the same
                found = windows(engine, BOTH, length=length, about={"checkpoint": "m/tiny"}, **how)  # type: ignore[arg-type]
                expected.setdefault(scored, []).append(found.perplexity)
        runs = stream(engine, BOTH, lengths=[32, 64, 128], stride=32, record=record)
        expected.setdefault("stream", []).extend(run.perplexity for run in runs)
    found = tables(record.path, record.path)
    last, whole, by_position = found.values()
    assert list(found) == ["the last 40 tokens of windows", "all tokens of windows", "by position in a stream"]
    for table, setting in ((last, "last"), (whole, "all"), (by_position, "stream")):
        assert (table.methods, table.windows, table.notes) == (["full", "longheads"], (64,), [])
        assert table.model.startswith("tiny ")
        values = [table.cells[method, column].perplexity for method in table.methods for column in table.columns]
        assert values == pytest.approx(expected[setting])
    assert by_position.columns == [Column(0, 32), Column(32, 64), Column(64, 128)]


def test_methods_that_read_other_texts_are_told(engines: list[lce.Engine], tmp_path: Path) -> None:
    record = Record(tmp_path / "losses.jsonl")
    for engine, most in zip(engines, (2, 3), strict=True):
        windows(engine, BOTH, length=40, stride=20, most=most, record=record)
    (table,) = tables(record.path).values()
    assert table.notes == ["At 40 tokens the methods were not asked the same texts."]
