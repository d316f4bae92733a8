"""benchmarks/study_shared.py: what a row answers does not depend on who else listened to the reading."""

from pathlib import Path

import pytest
import study_shared

import lce
from lce.methods import knob_values
from lce_lab.eval.record import Answer, Loss, Record
from lce_lab.eval.running import Asking, Shard, answers
from lce_lab.eval.suite import MadeSuite, make_tasks

ROWS = "full;longheads placement=true;pages budget=64 budget.local=16;pages budget=128 budget.local=16"
HOW = "study_shared.py --model demo --dtype float32 --length 1.5 --questions 3 --samples 2 --documents 1 --tail 300"
READERS = [
    pytest.param("full", marks=pytest.mark.slow),
    pytest.param("longheads placement=true", marks=pytest.mark.slow),
    "pages budget=64 budget.local=16",
]


@pytest.mark.parametrize("reader", READERS)
def test_a_row_answers_as_if_it_had_read_alone(reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("A letter came before the rain, and nobody had asked for it. " * 100)
    words = [*HOW.split(), "--task", "several_facts", "--essays", str(tmp_path), "--record", str(tmp_path)]
    monkeypatch.setattr("sys.argv", [*words, "--read", reader, "--methods", ROWS])
    study_shared.main()
    kept = list(Record(tmp_path / "answers.jsonl").items())
    suite = MadeSuite(samples=2, questions=3, filler=f"essays:{tmp_path}", asking=Asking("shared", Shard(1, 2)))
    (task,) = make_tasks(["several_facts"])
    engine = lce.load("demo", study_shared.method_of(reader), dtype="float32")
    made, mine = suite.make(engine, task, 768), (engine.method.label, knob_values(engine.method))
    own = [line for _, _, line in kept if isinstance(line, Answer) and (line.method, line.knobs) == mine]
    alone = answers(engine, made, setting=suite.setting(task, 768), asking=suite.asking)
    assert [line.answer for line in own] == [answer.answer for _, answer in alone]
    assert len(kept) == 3 * len(ROWS.split(";"))
    losses = [line for _, _, line in Record(tmp_path / "perplexity.jsonl").items() if isinstance(line, Loss)]
    assert [loss.tokens for loss in losses] == [256, 44] * len(ROWS.split(";"))
    document = engine.tokenizer.encode(made[3].beginning)
    scores = engine.score(document, first=len(document) - 300).logprobs
    nll = sum(loss.nll for loss in losses if (loss.method, loss.knobs) == mine)
    assert nll == pytest.approx(-float(scores.sum()), rel=1e-4)
