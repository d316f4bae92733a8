"""Recordings of a real model equal what the engine chooses, and refuse what cannot be recorded."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import lce
from lce.errors import CapacityError, UsageError
from lce.methods import LongHeads, make
from lce_lab.study.recording import Recorder, RecordingRequest, record, record_after, spans_of_marks, token_texts
from lce_lab.study.run_observer import RunObserver
from tests.checkpoints import tokens
from tests.lce_lab.study.recorded import always_of, choices_of

METHOD = LongHeads(chunk_size=4, chunks=6)
METHODS = [METHOD, make("esa", {"compress": "none", "sinks": 4, "top_k": 8}), "dca"]
TEXT = "The old miller took the bread out of the oven and the children ate it. " * 4


@pytest.fixture(scope="module")
def recorded(tiny_model: Path) -> dict[str, Any]:
    return record(tiny_model, METHODS, TEXT, max_tokens=3, marks=["the bread out"], spread=5, last=4, block=32)


def test_choices_are_those_of_the_engine(recorded: dict[str, Any], tiny_model: Path) -> None:
    for run, method in zip(recorded["runs"], METHODS, strict=True):
        engine = lce.load(tiny_model, method, block=32)
        ids = engine.tokenizer.encode(TEXT)
        trace = engine.trace(ids)
        if not run["choosing"]:
            assert all(chosen.shape[-1] == 0 for chosen in trace.chosen)
            continue
        found = torch.from_numpy(choices_of(run))[: len(ids)]  # [N, layers, C, K]
        repeat = len(trace.chosen[0]) // run["choosers"]
        for layer, chosen in enumerate(trace.chosen):
            own = found[:, layer].transpose(0, 1).repeat_interleave(repeat, 0)
            assert torch.equal(own, chosen)
        looks = {int(query): look for segment in run["segments"] for query, look in segment["looks"].items()}
        for query in (query for query in looks if query < len(ids)):
            for layer, each in enumerate(looks[query]["layers"]):
                for head, chosen in enumerate(each["chosen"]):
                    at = head * len(trace.chosen[0]) // len(each["chosen"])
                    row, ranks = trace.chosen[layer][at, query], trace.ranks[layer][at, query]
                    assert (chosen, each["ranks"][head]) == (row[row >= 0].tolist(), ranks[row >= 0].tolist())


def test_a_recording_is_what_was_run(recorded: dict[str, Any], tiny_model: Path) -> None:
    engine = lce.load(tiny_model, METHOD, block=32)
    ids = engine.tokenizer.encode(TEXT)
    result = engine.generate(ids, max_tokens=3, logprobs=5)
    run = recorded["runs"][0]
    assert "".join(each["text"] for each in run["generated"]) == result.text
    assert [each["logprob"] for each in run["generated"]] == [round(x.logprob, 4) for x in result.logprobs or []]
    assert "".join(recorded["tokens"]).endswith(TEXT)
    assert len(recorded["tokens"]) == len(ids)
    n = len(ids) + len(result.token_ids) - 1  # the last one is not read
    assert run["blocks"] == [*([a, min(a + 32, len(ids))] for a in range(0, len(ids), 32)), [n - 2, n - 1], [n - 1, n]]
    assert [run["segments"][0]["start"], run["segments"][-1]["stop"]] == [0, n]
    assert set(range(len(ids) - 4, n)) <= set(run["looked"])
    assert {int(query) for segment in run["segments"] for query in segment["looks"]} == set(run["looked"])
    assert all(always_of(run, 1, query) == [[query // 4 * 4, query + 1]] for query in range(n))
    assert (run["knobs"]["chunk_size"], run["label"]) == (4, "longheads(chunk_size=4, chunks=6, local=4)")
    assert (run["first"], run["chunk_size"], run["choosers"], run["k"]) == (0, 4, 2, 5)
    assert (run["window"], run["placement"]) == (64, "side_by_side")
    assert json.loads(json.dumps(recorded, allow_nan=False)) == recorded
    for mark in recorded["marks"]:
        assert "the bread out" in "".join(recorded["tokens"][mark["start"] : mark["stop"]])
    assert len(recorded["marks"]) == 4


def test_generated_tokens_have_the_attention_that_the_method_gives(recorded: dict[str, Any]) -> None:
    for run in recorded["runs"][:2]:
        look = run["segments"][-1]["looks"][str(run["looked"][-1])]
        for layer in look["layers"]:
            for found in layer["heads"]:
                assert len(found["given"]) == len(found["mass"])
                assert 0 <= sum(found["given"]) <= 1.001


def test_marks_are_tokens_that_have_a_part_of_them() -> None:
    texts = ["<s>", "ab", "", "c", "de", "abc"]
    assert spans_of_marks(texts, ["bc", "e"]) == [(1, 4, "bc"), (4, 5, "e"), (5, 6, "bc")]
    for mark in ("xyz", ""):
        with pytest.raises(UsageError, match=f"the mark '{mark}' is not in the prompt"):
            spans_of_marks(texts, [mark])
    with pytest.raises(UsageError, match="more than 32 times"):
        spans_of_marks(["a"] * 40, ["a"])


def test_what_is_looked_at() -> None:
    assert RecordingRequest("x", spread=4, last=2).looked(10) == [0, 2, 4, 6, 8, 9]
    assert RecordingRequest("x", spread=0, last=1).looked(10) == [9]
    assert RecordingRequest("x").looked(3) == [0, 1, 2]
    assert len(RecordingRequest("x").looked(30_000)) == 264


def test_what_cannot_be_recorded(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(tiny_model, block=16)
    with pytest.raises(UsageError, match="no method is given"):
        recorder.record(RecordingRequest("text"), [])
    with pytest.raises(UsageError, match="the prompt is empty"):
        recorder.record(RecordingRequest(""), ["full"])
    with pytest.raises(UsageError, match="layer 2 has no head 0; expected layers 0 to 1 and heads 0 to 3"):
        recorder.record(RecordingRequest("text", off=[(2, 0)]), ["full"])
    with pytest.raises(UsageError, match=r"max_tokens is 5000; expected 4096 or less"):
        RecordingRequest("text", max_tokens=5000)
    monkeypatch.setattr(RunObserver, "expected_bytes", lambda *_: 0)  # of a method that tells no cost
    with pytest.raises(CapacityError, match="the choices of"):
        Recorder(tiny_model, most_bytes=100).record(RecordingRequest(TEXT, max_tokens=0), [METHOD])


def test_a_model_without_a_tokenizer(tiny_model: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(tiny_model / name)
    found = record(tmp_path, [METHOD], [5, 6, 7], max_tokens=2)
    assert (found["tokens"], len(found["runs"][0]["generated"])) == (["5 ", "6 ", "7 "], 2)
    assert token_texts(lce.load(tiny_model), lce.load(tiny_model).tokenizer.encode("the dogs"))[-1]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_the_size_is_estimated_before_the_work(tiny_model: Path, method: Any) -> None:
    told: list[int] = []
    how: dict[str, Any] = {
        "max_tokens": 3,
        "spread": 50,
        "last": 4,
        "check": lambda: told[0],
        "expect": lambda *each: told.append(each[0]),
    }
    found = len(json.dumps(record(tiny_model, [method], 3 * TEXT, **how)["runs"][0]["segments"]))
    assert 0.5 * found < told[0] < 2 * found, (told, found)
    few = Recorder(tiny_model, most_bytes=told[0] // 3)
    with pytest.raises(CapacityError, match=r"a recording would have about .* smaller spread"):
        few.record(RecordingRequest(3 * TEXT, 3, spread=50, last=4), [method], check=lambda: 1 / 0)


def test_a_recording_behind_a_context_is_the_end_of_the_whole_one(tiny_model: Path) -> None:
    engine, n = lce.load(tiny_model, METHOD, block=16), 16
    ids = engine.tokenizer.encode(TEXT)
    request = RecordingRequest(ids[-n:], 4, spread=0, last=n)
    found = record_after(engine.prefill(ids[:-n]), engine, request, "tiny")
    whole = record(tiny_model, [METHOD], ids, max_tokens=4, spread=0, last=n, block=16)
    assert found["tokens"] == whole["tokens"]
    run, full = found["runs"][0], whole["runs"][0]
    assert (run["generated"], run["looked"]) == (full["generated"], full["looked"])
    assert run["blocks"][0] == [len(ids) - n, len(ids)]
    assert (choices_of(run) == choices_of(full)[len(ids) - n :]).all()
    assert always_of(run, 0, len(ids)) == always_of(full, 0, len(ids))
    with pytest.raises(CapacityError, match="a recording would have about"):
        record_after(engine.prefill(ids[:-n]), engine, request, "tiny", most_bytes=100)
    drawn = RecordingRequest(ids, 6, sampling={"temperature": 1.0, "seed": 3})
    generated = record_after(None, engine, drawn, "tiny")["runs"][0]["generated"]
    expected = engine.generate(ids, max_tokens=6, temperature=1.0, seed=3, logprobs=0)
    assert [each["logprob"] for each in generated] == [round(x.logprob, 4) for x in expected.logprobs or []]


def test_the_time_of_a_long_text_is_estimated_before_the_work(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lce_lab.study.recording.PIECE", 16)
    monkeypatch.setattr("lce_lab.study.recording.MOST_SHORT", 64)
    told: list[float] = []
    for n_tokens in (60, 80):
        how: dict[str, Any] = {"expect": lambda n_bytes, seconds: told.append(seconds), "max_tokens": 1}
        record(tiny_model, ["longheads"], tokens(n_tokens), **how)
    assert told[0] == 0 < told[1]
