"""Reports: several files as one, what cells are called, ceilings, and what does not discriminate."""

import json
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from lce.errors import LceError
from lce_lab.eval.report import Report

FULL = "Engine(Full(), window=512, block=2048, cpu, torch.float32)"
QUEST = "Engine(Quest(page=16, budget=128), window=512, block=512, cpu, torch.float32)"
ROPE = "RopeConfig(kind='none', theta=10000.0, factor=1.0)"


def line(index: int, score: float = 1, **more: Any) -> dict[str, Any]:
    sample = {"task": "made", "filler": "prose", "length": 512, "samples": 4, "seed": 0, "model": "abcdef0123"}
    told = {"right": score == 1, "score": score, "method": "full", "window": 512, "document": index}
    return {**sample, "engine": FULL, "rope": ROPE, "index": index, **told, "checkpoint": "m/tiny", **more}


def file(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


def test_shards_make_the_report_of_one_file_in_any_order(tmp_path: Path) -> None:
    cells = list(product(range(8), (512, 1024), ((FULL, "full"), (QUEST, "quest"))))
    lines = [line(i, i / 7, length=n, engine=engine, method=method) for i, n, (engine, method) in cells]
    whole = Report.read([file(tmp_path / "whole", *lines)])
    first, second = (file(tmp_path / str(n), *(each for each in lines if each["index"] % 2 == n)) for n in (0, 1))
    parts = Report.read([second, first, second])
    assert parts.conflicts == 0
    (table,), (other,) = whole.tables, parts.tables
    scores, others = ({place: cell.score for place, cell in each.cells.items()} for each in (table, other))
    assert scores == others
    assert (table.model, table.lengths, len(table.cells)) == ("tiny abcdef01", [512, 1024], 4)
    changed = Report.read([first, file(tmp_path / "changed", {**lines[0], "score": 0.5, "right": False})])
    assert changed.conflicts == 1
    own = [x["score"] for x in lines if (x["engine"], x["length"], x["index"] % 2) == (FULL, 512, 0)]
    assert changed.tables[0].cells["full", 512].score.mean == pytest.approx(fmean(own)), "the first file counts"


def test_a_document_with_questions_of_several_tasks_has_a_table_for_each(tmp_path: Path) -> None:
    lines = [line(i, i % 2, kind=("keys", "pairs")[i % 2]) for i in range(4)]
    keys, pairs = Report.read([file(tmp_path / "record", *lines)]).tables
    assert [keys.title, pairs.title] == ["made: keys", "made: pairs"]
    assert [table.cells["full", 512].score.mean for table in (keys, pairs)] == [0, 1]


def test_a_window_is_named_where_it_is_not_the_largest(tmp_path: Path) -> None:
    smaller = QUEST.replace("budget=128", "budget=96").replace("window=512", "window=384")
    lines = [
        line(0),
        line(0, engine=QUEST, method="quest"),
        line(0, engine=smaller, method="quest", window=384),
        line(0, engine=smaller.replace("Quest(page=16, budget=96)", "ReRope(local=8)"), method="rerope", window=384),
    ]
    (table,) = Report.read([file(tmp_path / "record", *lines)]).tables
    assert table.methods == ["full", "quest", "quest window=384", "rerope"]


def test_engines_are_told_apart_by_what_differs(tmp_path: Path) -> None:
    one = "Engine(LongHeads(chunk_size=16, placement='side_by_side'), window=512, block=512, cpu, torch.float32)"
    engines = [one, one.replace("side_by_side", "true"), FULL]
    lines = [line(i, engine=x, method="full" if x == FULL else "longheads") for i, x in enumerate(engines)]
    scaled = line(9, rope="RopeConfig(kind='linear', theta=10000.0, factor=4.0)", weights="int8")
    (table,) = Report.read([file(tmp_path / "record", *lines, scaled)]).tables
    placed = ["longheads placement=side_by_side", "longheads placement=true"]
    assert table.methods == [*placed, "full", "full rope=linear"]


def test_tasks_that_do_not_discriminate_say_why(tmp_path: Path) -> None:
    def table(*scores: float, **more: Any) -> Any:
        ceiling = [line(i, score, length=500, ceiling=True, **more) for i, score in enumerate(scores)]
        cells = ((1024, QUEST, "quest"), (1024, FULL, "full"), (2048, QUEST, "quest"))
        asked = [line(i, 1, length=n, engine=engine, method=method) for i in range(20) for n, engine, method in cells]
        return Report.read([file(tmp_path / "record", *ceiling, *asked)]).tables[0]

    assert (fine := table(*[1.0] * 19, 0.0)).discriminates
    assert fine.ceiling == (500, fine.ceilings["full", 500].score)
    assert fine.notes == [
        "At 1,024 tokens it cannot rank methods: no method is measurably below `full` within the window."
    ]
    assert "not clearly above chance (0.00)" in table(*[0.0] * 20).notes[0]
    assert "not clearly above chance (0.60)" in table(*[0.65] * 20, chance=0.6).notes[0]
    assert "`full` fails itself, with 0.40" in table(*[1.0] * 8, *[0.0] * 12).notes[0]


def test_lengths_within_the_window_have_their_own_ceiling(tmp_path: Path) -> None:
    """The model can do the task at 256 tokens, but not at 500."""
    ceiling = [line(i, float(n == 256), length=n, ceiling=True) for n in (256, 500) for i in range(20)]
    asked = [line(i, 0.5, length=n, engine=QUEST, method="quest") for n in (256, 1024) for i in range(20)]
    (table,) = Report.read([file(tmp_path / "record", *ceiling, *asked)]).tables
    assert (table.ceiling[0], [table.ceiling_at(n).mean for n in (256, 500, 1024)]) == (500, [1.0, 0.0, 0.0])
    assert [table.tells(n) for n in (256, 1024)] == [True, False]
    (note,) = table.notes
    assert note.startswith("The task cannot rank methods beyond 256 tokens: `full` scores 0.00, ")


def test_a_method_holds_to_the_last_length_before_it_first_fails(tmp_path: Path) -> None:
    scores = {256: 1.0, 512: 0.95, 1024: 0.5, 2048: 1.0}  # of a ceiling of 1
    quest = {"engine": QUEST, "method": "quest"}
    asked = [line(i, float(i < 20 * x), length=n, **quest) for n, x in scores.items() for i in range(20)]
    ceiling = [line(i, 1, length=500, ceiling=True) for i in range(20)]
    (table,) = Report.read([file(tmp_path / "record", *ceiling, *asked)]).tables
    assert (table.holds_to("quest"), table.holds_to("other")) == (512, 0)
    assert [table.tells(length) for length in table.lengths] == [True] * 4
    (table,) = Report.read([file(tmp_path / "record", *asked)]).tables
    assert table.holds_to("quest") is None


def test_a_ceiling_may_be_a_score_of_full_within_the_window(tmp_path: Path) -> None:
    lines = [line(i, length=length) for i in range(3) for length in (256, 512, 1024)]
    scaled = [line(3, length=400, rope=ROPE.replace("none", "linear"))]
    (table,) = Report.read([file(tmp_path / "record", *lines, *scaled)]).tables
    assert (table.ceiling[0], table.ceiling[1].samples) == (512, 3)
    (table,) = Report.read([file(tmp_path / "record", line(0, length=513))]).tables
    assert table.notes == ["The ceiling is not measured: `full` was not asked within the window."]


def test_samples_of_the_ceiling_are_samples_of_full_too(tmp_path: Path) -> None:
    before, ceiling = [line(i, i) for i in range(2)], [line(i, ceiling=True) for i in range(2, 4)]
    for lines in (before + ceiling, ceiling + before):  # shards, the first of them asked without a ceiling
        (table,) = Report.read([file(tmp_path / "record", *lines)]).tables
        assert table.ceiling[1].samples == table.cells["full", 512].score.samples == 4
    shorter = [line(i, length=256) for i in range(2)]
    (table,) = Report.read([file(tmp_path / "record", *ceiling, *shorter)]).tables
    assert table.lengths == [256, 512]  # `full` was asked at both lengths
    (table,) = Report.read([file(tmp_path / "record", *ceiling, line(0, length=1024))]).tables
    assert table.lengths == [1024]


@pytest.mark.parametrize("changed", [{"length": "x"}, {"length": 0}, {"task": 3}, {"score": "high"}, {"right": None}])
def test_damaged_lines_are_refused(changed: dict[str, Any], tmp_path: Path) -> None:
    wrong = {name: value for name, value in line(1, **changed).items() if value is not None}
    with pytest.raises(LceError, match="correct the line") as caught:
        Report.read([file(tmp_path / "record", line(0), wrong)])
    assert str(caught.value).isprintable()


def test_names_stay_on_their_line_and_are_no_markup(tmp_path: Path) -> None:
    odd = "<b onclick='x'> ![a](http://b) $\\frac$ a|b`\n" * 99
    names = {"task": odd, "method": odd, "checkpoint": odd.replace("/", ""), "other": odd}
    names |= {"engine": "Engine((", "rope": "x"}
    (table,) = Report.read([file(tmp_path / "record", line(0, **names))]).tables
    for name in (table.model, table.title, *table.methods):
        assert name.isprintable()
        assert not any(sign in name for sign in ("<", ">", "](", "$", "|"))
        assert len(name) < 400


def test_what_why_asked_again_is_one_table_of_its_own(tmp_path: Path) -> None:
    again = [line(0, document=0, again=[number]) for number in (3, 5)]
    first, second = Report.read([file(tmp_path / "record", line(0), line(1), *again)]).tables
    assert [first.title, second.title] == ["made", "made, asked again by lce eval why"]
    assert second.cells["full", 512].score.samples == 2
