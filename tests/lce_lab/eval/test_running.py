"""The runner: ways to ask, records, shards, and what is interrupted."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tokenizers import normalizers, processors

import lce
from lce.errors import DataError
from lce_lab.eval.record import Answer, Record
from lce_lab.eval.running import Asking, Shard, answers, evaluate, is_decided
from lce_lab.eval.sample import Sample
from lce_lab.eval.suite import MadeSuite, make_tasks
from tests.checkpoints import save_tiny
from tests.vocabularies import byte_level_library

SETTING = {"task": "made", "length": 50, "seed": 0}


def made(n: int = 3, questions: int = 2) -> list[Sample]:
    found = []
    for i, q in product(range(n), range(questions)):
        document, question = f"Here is document {i}. It says {i}{i}{i}. ", f" Question {q}: which number is it? It is"
        found.append(Sample(document, question, (f"{i} the tin",), "similarity", f"{i}{i}{i} the tin", depth=i / n))
    return found


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> lce.Engine:
    return lce.load(tiny_model, lce.methods.make("longheads", {"chunk_size": 8, "chunks": 4}))


def replies(engine: lce.Engine, samples: list[Sample], record: Record | None = None, **asking: Any) -> list[Answer]:
    how: dict[str, Any] = {"setting": SETTING, "asking": Asking(**asking), "record": record}
    return [answer for _, answer in answers(engine, samples, **how)]


def lines(file: Path) -> list[dict[str, Any]]:
    """The lines of a record in the order of the samples, without times."""
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert all(line.pop("prefill_s", 1) > 0 for line in found)
    return sorted(found, key=lambda line: line["index"])


@pytest.mark.parametrize("mode", ["single", "shared", "turns"])
def test_stops_and_shards_change_nothing(mode: str, engine: lce.Engine, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    score = evaluate(engine, made(), setting=SETTING, asking=Asking(mode), record=Record(whole))
    assert (score.samples, score.interval) == (6, "bootstrap")
    assert [line["document"] for line in lines(whole)] == [0, 0, 1, 1, 2, 2]

    def interrupt(done: int, total: int) -> None:
        assert total == 6
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(engine, made(), setting=SETTING, asking=Asking(mode), record=Record(cut), progress=interrupt)
    cut.write_bytes(cut.read_bytes()[:-9])  # the process was killed while it wrote its last line
    assert 2 <= len(cut.read_text().splitlines()) <= 4
    assert evaluate(engine, made(), setting=SETTING, asking=Asking(mode), record=Record(cut)) == score
    assert lines(cut) == lines(whole)
    half = tmp_path / "half"
    for index in (1, 0):
        evaluate(engine, made(), setting=SETTING, asking=Asking(mode, Shard(index, 2)), record=Record(half))
    assert lines(half) == lines(whole)


@pytest.mark.parametrize("mode", ["single", "shared"])
@pytest.mark.parametrize("brief", [False, True])
@pytest.mark.slow
def test_the_number_of_lanes_changes_nothing(mode: str, brief: bool, engine: lce.Engine) -> None:
    found = [replies(engine, made(3, 2), mode=mode, brief=brief, lanes=n) for n in (1, 3, 8)]
    assert found[0] == found[1] == found[2]
    assert all(answer.read_bytes for answer in found[0])


def test_nothing_recorded_is_asked_again(engine: lce.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record(tmp_path / "record")
    score = evaluate(engine, made(), setting=SETTING, record=record)
    for name in ("generate", "prefill", "new_context"):
        monkeypatch.delattr(lce.Engine, name)
    monkeypatch.delattr(lce.Batch, "stream")
    assert evaluate(engine, made(), setting=SETTING, record=record) == score
    assert evaluate(engine, made(), setting=SETTING, record=Record(record.path)) == score
    with pytest.raises(AttributeError):  # another setting is other samples
        evaluate(engine, made(), setting={**SETTING, "seed": 1}, record=record)


def test_a_line_tells_what_was_asked_of_whom(engine: lce.Engine, tmp_path: Path) -> None:
    record = Record(tmp_path / "record")
    evaluate(engine, made(1, 1), setting=SETTING, record=record, about={"checkpoint": "tiny"})
    (line,) = lines(record.path)
    assert line.pop("knobs")["chunk_size"] == 8
    expected = {"task": "made", "seed": 0, "index": 0, "method": "longheads", "window": 64, "checkpoint": "tiny"}
    expected |= {"version": lce.__version__, "prompt_tokens": len(engine.tokenizer.encode(made(1, 1)[0].prompt))}
    assert {name: line[name] for name in expected} == expected
    assert line["read_bytes"] > 0
    assert 0 <= line["score"] <= 1


def test_every_mode_gives_full_attention_the_same_answers(tiny_model: Path) -> None:
    """But for turns after the first, whose context has the answers before."""
    engine = lce.load(tiny_model)
    asked = [[x.answer for x in replies(engine, made(), mode=mode)] for mode in ("single", "shared", "turns")]
    assert (asked[0], asked[0][::2]) == (asked[1], asked[2][::2])
    assert asked[0][1::2] != asked[2][1::2]


def test_brief_answers_have_the_same_scores() -> None:
    suite, (task,), engine = MadeSuite(samples=3), make_tasks(["code"]), lce.load("demo", "longheads")
    samples = suite.make(engine, task, 400)
    whole, brief = (replies(engine, samples, brief=each) for each in (False, True))
    assert [answer.score for answer in whole] == [answer.score for answer in brief]
    pairs = [(str(some.answer), str(all_.answer)) for some, all_ in zip(brief, whole, strict=True)]
    assert all(full.startswith(cut) for cut, full in pairs)
    assert any(len(cut) < len(full) for cut, full in pairs)


def test_when_a_score_is_certain() -> None:
    sample = Sample("", "", ("red fox", "owl"))
    certain = {"": False, " red": False, " red ": False, " red fo": False, " red fox.": True, "rat": True, "owls": True}
    assert {text: is_decided(sample, text) for text in certain} == certain
    assert not is_decided(Sample("", "", ("owl",), metric="recall"), "fox")


@pytest.fixture
def prefilled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the texts that are prefilled."""
    prefill, read = lce.Engine.prefill, []

    def noted(self: lce.Engine, document: Any, **options: Any) -> lce.Context:
        read.append(len(document))
        return prefill(self, document, **options)

    monkeypatch.setattr(lce.Engine, "prefill", noted)
    return read


def test_saved_contexts_are_opened(engine: lce.Engine, tiny_model: Path, tmp_path: Path, prefilled: list[int]) -> None:
    ask: dict[str, Any] = {"mode": "shared", "contexts": tmp_path / "contexts"}
    first = replies(engine, made(), **ask)
    assert len(list((tmp_path / "contexts").iterdir())) == 3
    replies(lce.load(tiny_model), made(), **ask)
    assert len(list((tmp_path / "contexts").iterdir())) == 6, "another method has its own"
    prefilled.clear()
    assert replies(engine, made(), **ask) == first
    assert max(prefilled, default=0) <= 1, "no document is read again"


def test_a_context_of_another_document_is_refused(engine: lce.Engine, tmp_path: Path) -> None:
    ask: dict[str, Any] = {"mode": "shared", "contexts": tmp_path}
    replies(engine, made(), **ask)
    one, other = sorted(tmp_path.iterdir())[:2]
    one.write_bytes(other.read_bytes())
    with pytest.raises(DataError, match=f"{one.name} holds another document than its name says; remove it"):
        replies(engine, made(), **ask)


def test_turns_continue_saved_contexts(engine: lce.Engine, tmp_path: Path, prefilled: list[int]) -> None:
    folder = tmp_path / "contexts"
    turns: dict[str, Any] = {"mode": "turns"}
    saved, plain = turns | {"contexts": folder}, replies(engine, made(), **turns)
    assert replies(engine, made(2), **saved) == replies(engine, made(2), **turns)
    replies(engine, made(), mode="shared", contexts=folder)
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert len(files) == 3, "both modes have the same documents"
    prefilled.clear()
    record = Record(tmp_path / "record")
    assert replies(engine, made(), record, **saved) == plain
    assert max(prefilled, default=0) <= 1, "no document is read again"
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == files, "no turn changes a file"
    lines = record.path.read_text().splitlines(keepends=True)
    record.path.write_text("".join(lines[:3]))  # stopped after the first question of the second document
    assert replies(engine, made(), Record(record.path), **saved) == plain
    assert record.path.read_text().splitlines(keepends=True) == lines


def test_chance_is_what_another_samples_answer_scores(engine: lce.Engine) -> None:
    samples = [Sample(f"{i}", " So", (x,), answer=x, max_tokens=1) for i, x in enumerate(("1", "2", "12"))]
    assert [x.chance for x in replies(engine, samples)] == [1.0, 0.0, 0.0], "12 begins with 1"


def test_bytes_read_are_those_of_the_method_that_writes(tiny_model: Path) -> None:
    method = lce.methods.make("pages", {"page": 4, "budget": 24})
    ids = [5 + i % 90 for i in range(301)]
    found = []
    for before in (None, "self_extend"):
        engine = lce.load(tiny_model, method, prefill_method=before)
        found.append(lce.profiled_step(engine, engine.prefill(ids)).read_bytes)
    full = lce.load(tiny_model)
    assert abs(found[0] - found[1]) < found[0] // 5, "other values in the second layer choose other pages"
    assert found[1] < lce.profiled_step(full, full.prefill(ids)).read_bytes // 2


def test_what_cannot_be_asked_is_refused(engine: lce.Engine, tmp_path: Path) -> None:
    for text in ("2/2", "x", "1", "-1/2", "0/0"):
        with pytest.raises(lce.UsageError, match="expected i/n"):
            Shard.parse(text)
    assert Shard.parse("1/3") == Shard(1, 3)
    with pytest.raises(lce.UsageError, match="did you mean 'shared'"):
        Asking("shard")
    with pytest.raises(lce.UsageError, match="contexts are for the modes shared and turns"):
        Asking(contexts=tmp_path)
    with pytest.raises(lce.UsageError, match="first name is task"):
        answers(engine, made(), setting={"length": 3})
    with pytest.raises(lce.UsageError, match="no answers to score"):
        evaluate(engine, made(), setting=SETTING, asking=Asking(shard=Shard(5, 6)))
    with pytest.raises(lce.UsageError, match="unknown metric 'recal'; did you mean 'recall'"):
        answers(engine, [Sample("a", " b", ("c",), "recal")], setting=SETTING)
    with pytest.raises(lce.UsageError, match="there are no samples"):
        answers(engine, [], setting=SETTING)


def test_every_mode_reads_the_tokens_of_the_prompts(tmp_path: Path) -> None:
    """This tokenizer puts `_` before every text and an end behind it: neither comes between document and question."""
    library = byte_level_library()
    library.normalizer = normalizers.Prepend("_")
    library.post_processor = processors.TemplateProcessing(single="$A <|end|>", special_tokens=[("<|end|>", 1)])
    save_tiny(tmp_path, vocab_size=404)
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").unlink()
    engine = lce.load(tmp_path, rope="dynamic", rope_factor=2.0)
    single, turns = replies(engine, made(2)), replies(engine, made(2), mode="turns")
    assert [a.prompt_tokens for a in turns[::2]] == [a.prompt_tokens for a in single[::2]]
    file = tmp_path / "record"
    for _ in range(2):
        shared = replies(engine, made(2), mode="shared", contexts=tmp_path / "contexts")
        assert [a.prompt_tokens for a in shared] == [a.prompt_tokens for a in single]
    for _ in range(2):
        assert replies(engine, made(2), Record(file), mode="shared") == shared
        kept = [line for line in file.read_text().splitlines(keepends=True) if '"index": 0' not in line]
        file.write_text("".join(kept))  # what is missing is announced as the whole was
