"""Selections measured on samples and texts, on a hand-made model that answers what it attends."""

from pathlib import Path
from typing import Any

import pytest

import lce
from lce.methods import make
from lce_lab.eval.record import Attended, Record
from lce_lab.eval.report import Report
from lce_lab.eval.sample import Sample
from lce_lab.eval.scores import interval, wilson
from lce_lab.eval.selection import Selection, fact_spans, measure, measure_text
from lce_lab.eval.suite import MadeSuite, make_tasks
from tests.lce_lab.eval.test_report import file, line
from tests.lookup import save_lookup, text

pytestmark = pytest.mark.filterwarnings("ignore::lce.WindowWarning")
DOCUMENT = text(50, "7", 150)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_lookup(tmp_path_factory.mktemp("lookup")))


def samples(_: object) -> list[Sample]:
    return [Sample(DOCUMENT, "?", ("7",), answer="7", facts=("7",), max_tokens=1)] * 2


def test_what_finds_the_fact_answers(model: str) -> None:
    """The question's one query has all its attention on the fact, 150 tokens away."""
    told, right = [], make("oracle", {"chunk_size": 8, "chunks": 4})
    found = measure(model, right, samples, length=202, progress=lambda *said: told.append(said))
    assert (found.method, found.length, found.samples, found.queries) == ("oracle", 202, 2, 2)
    assert (found.right, found.hit1, found.hit5, found.fact) == (1.0, 1.0, 1.0, 1.0)
    assert (found.recall, found.tokens, told) == (pytest.approx(1.0, abs=1e-4), 3 * 8 + 202 % 8 + 1, [(1, 2), (2, 2)])
    wrong = measure(model, make("longheads", {"chunk_size": 8, "chunks": 4, "rank": "last"}), samples, length=202)
    assert (wrong.right, wrong.hit1, wrong.fact) == (0.0, 0.0, 0.0)
    assert wrong.recall <= 1e-3
    assert wrong.by_layer["recall"] == [[pytest.approx(wrong.recall)]]


def test_a_judge_at_true_distances_sees_what_full_attention_does(model: str) -> None:
    """At 150 positions the logit is reversed, so full attention does not look at the fact."""
    knobs = {"chunk_size": 8, "chunks": 4}
    found = measure(model, make("oracle", {**knobs, "judge": "true"}), samples, length=202, judge="true")
    assert (found.right, found.fact) == (0.0, 0.0)
    assert measure(model, make("full"), samples, length=202, judge="true").recall == pytest.approx(1.0)


def test_states_of_the_judge_answer_whatever_is_selected(model: str) -> None:
    wrong = make("longheads", {"chunk_size": 8, "chunks": 4, "rank": "last"})
    assert measure(model, wrong, samples, length=202, states="judge").right == 1.0


def test_queries_of_a_text_are_spread_over_its_second_half(model: str) -> None:
    found = measure_text(model, make("streaming", {"sinks": 2, "local": 10}), DOCUMENT, length=101, queries=5)
    assert (found.length, found.queries, found.tokens, found.right) == (101, 5, 12.0, None)
    assert found.full_bytes == sum(i + 1 for i in (50, 62, 75, 87, 100)) / 5 * 2 * 16 * 4
    assert (found.hit1, found.cover, found.fact) == (None, None, None)


def test_a_text_is_not_measured_again(model: str, tmp_path: Path) -> None:
    """By another process; another number of queries is another matter."""
    method, path = make("streaming", {"sinks": 2, "local": 10}), tmp_path / "record"
    for queries, n_lines in ((5, 1), (5, 1), (6, 2)):
        found = measure_text(model, method, DOCUMENT, length=101, queries=queries, record=Record(path))
        assert (found.queries, len(path.read_text().splitlines())) == (queries, n_lines)


def test_what_was_measured_is_not_measured_again(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an interruption, and by another process; another judge or another text is another matter."""
    method, path = make("longheads", {"chunk_size": 8, "chunks": 4}), tmp_path / "record"
    whole = measure(model, method, samples, length=202)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(model, method, samples, length=202, record=Record(path), progress=stop)
    assert path.read_bytes().count(b"\n") == 1
    assert measure(model, method, samples, length=202, record=Record(path)) == whole
    assert path.read_bytes().count(b"\n") == 2
    monkeypatch.setattr(lce.Engine, "generate", None)
    assert measure(model, method, samples, length=202, record=Record(path)) == whole
    for other in ({"judge": "true"}, {"setting": {"task": "other"}}):
        with pytest.raises(TypeError):
            measure(model, method, samples, length=202, record=Record(path), **other)  # type: ignore[arg-type]


def test_means_are_by_layer_and_head() -> None:
    """Two texts; in the second, layer 0 had no fact to choose."""
    ours = {"queries": 1, "tokens": [[1.0, 2.0], [3.0, 4.0]], "scored_bytes": 0.0, "full_bytes": 8.0}
    first = Attended(recall=[[0.5, 1], [0, 0]], read_bytes=2.0, hit1=[[1, 0], [1, 1]], found=[0.5, 1], **ours)
    other = Attended(recall=[[0.5, 0.0], [1.0, 1.0]], read_bytes=4.0, hit1=[[], [0.0, 1.0]], found=[0.7, 0.8], **ours)
    both = Selection.of("esa", 100, [first, other], "true", "own")
    assert (both.by_layer["recall"], both.by_layer["hit1"]) == ([[0.5, 0.5], [0.5, 0.5]], [[1.0, 0.0], [0.5, 1.0]])
    assert both.by_layer["found"] == [[pytest.approx(0.6)], [0.9]]
    assert (both.recall, both.hit1, both.found, both.read_bytes) == (0.5, 0.625, pytest.approx(0.75), 3.0)
    assert (both.queries, both.samples, both.right, both.hit5, both.cover) == (2, 2, None, None, None)


def test_means_over_texts_have_intervals() -> None:
    """Those of `scores.interval`, each text a document. A text that lacks a mean does not count for that mean."""
    ours = {"queries": 1, "tokens": [[1.0]], "read_bytes": 0.0, "scored_bytes": 0.0, "full_bytes": 8.0}
    hits: list[list[list[float]] | None] = [[[1.0, 0.0], []], [[0.0, 0.0], []], [[1.0, 1.0], []], [[], []], None]
    texts = [
        Attended(recall=[[0.5]], hit1=hit, gini=n / 10, found=[n / 10, n / 5], score=n % 2, **ours)
        for n, hit in enumerate(hits)
    ]
    found = Selection.of("esa", 100, texts, "true", "own")
    assert found.intervals["hit1"] == interval({0: [0.5], 1: [0.0], 2: [1.0]})[1:]
    assert found.intervals["found"] == pytest.approx(interval({n: [n * 0.15] for n in range(5)})[1:])
    assert found.intervals["recall"] == interval({n: [0.5] for n in range(5)})[1:], "all alike, so Wilson's"
    assert found.intervals["score"] == wilson(2, 5)
    assert found.intervals["gini"][0] < found.gini < found.intervals["gini"][1]
    assert not {"hit5", "fact", "cover"} & found.intervals.keys(), "not measured"
    assert Selection.of("esa", 100, texts[:1], "true", "own").intervals == {}, "one text tells nothing of others"


def test_facts_are_spans_of_tokens(model: str) -> None:
    engine, sample = lce.load(model), Sample("~~ 12 ~~ 345", " ?", ("12",), facts=("12", "345", "absent"))
    ids = engine.tokenizer.encode(sample.prompt)
    assert [engine.tokenizer.decode(ids[a:b]).strip() for a, b in fact_spans(engine, sample)] == ["12", "345"]


def test_the_span_of_a_fact_begins_with_its_first_word() -> None:
    engine, fact = lce.load("demo"), "The pass key is 12345."
    sample = Sample(f"One is two. {fact}", " What is it?", ("12345",), facts=(fact,))
    (span,) = fact_spans(engine, sample)
    assert engine.tokenizer.decode(engine.tokenizer.encode(sample.prompt)[slice(*span)]).strip() == fact


def engine(chunks: int, placement: str = "side_by_side") -> str:
    method = f"LongHeads(chunk_size=8, chunks={chunks}, placement='{placement}')"
    return f"Engine(Watched(inner={method}), window=64, block=512, cpu, torch.float32)"


def look(index: int = 0, recall: float = 0.5, **more: Any) -> dict[str, Any]:
    """A line as `lce eval selection --record` writes it."""
    sample = {"task": "made", "filler": "prose", "length": 512, "samples": 2, "seed": 0, "index": index}
    sample |= {"judge": "constant", "states": "own", "model": "abcdef0123", "engine": engine(4), "rope": "kind='none'"}
    seen = {"queries": 3, "recall": [[recall, recall]], "tokens": [[32.0, 32.0]], "hit1": [[1.0, 0.0]], "score": 1.0}
    seen |= {"read_bytes": 2**20, "scored_bytes": 0, "full_bytes": 2**22, "prompt": f"{index}"}
    return sample | seen | {"method": "longheads", "checkpoint": "m/tiny"} | more


def test_rows_are_methods_with_their_knobs_and_lengths(tmp_path: Path) -> None:
    lines = [look(i, i / 2, length=length) for length in (1024, 512) for i in (0, 1)]
    lines += [look(0, 0.9, engine=engine(8), read_bytes=2**21), look(0, 0.3, engine=engine(4, "constant"))]
    lines += [look(0, judge="true"), look(0, task="text", text="abc", queries=7)]
    first, again = file(tmp_path / "a", *lines[:5]), file(tmp_path / "b", *lines[3:])
    report = Report.read([file(tmp_path / "answers", line(0)), first, again])
    assert len(report.tables) == 1, "answers are beside"
    table, judged, text = report.selections
    assert (table.model, table.title) == ("tiny abcdef01", "selection, made")
    assert (judged.title, text.title) == ("selection, made, judge=true", "selection, text")
    plain, wide, constant = (
        f"longheads chunks={n} placement={p}" for n, p in ((4, "side_by_side"), (8, "side_by_side"), (4, "constant"))
    )
    rows = [(row.method, row.length, row.recall) for row in table.rows]
    assert rows == [(plain, 512, 0.25), (wide, 512, 0.9), (constant, 512, 0.3), (plain, 1024, 0.25)]
    assert table.rows[0].samples == 2, "a text that is in both files counts once"
    assert [len(line) for line in table.lines.values()] == [3, 1]
    assert next(iter(table.lines)) == "longheads placement=side_by_side"
    assert table.notes == ["At 512 tokens the methods were not watched at the same texts."]


def test_a_record_says_what_its_measurement_said(tiny_model: Path, tmp_path: Path) -> None:
    (task,) = make_tasks(["passkey"])
    suite, record = MadeSuite(samples=1), Record(tmp_path / "record")
    method = lce.methods.LongHeads(chunk_size=8, chunks=4)
    how = {"length": 300, "setting": suite.setting(task, 300), "record": record}
    found = measure(str(tiny_model), method, lambda engine: suite.make(engine, task, 300), **how)
    (table,) = Report.read([record.path]).selections
    assert table.rows == [found]
    assert table.model.startswith(tiny_model.name)
