"""Rankings: reach, quality, ties, costs, what counts, and that the order of files and lines changes nothing."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from lce.errors import LceError
from lce_lab.board.ranking import Board, read_boards
from lce_lab.eval.naming import fitted
from tests.lce_lab.eval.test_report import FULL, QUEST, ROPE, file, line

DCA = "Engine(DualChunk(chunk_size=384), window=512, block=512, cpu, torch.float32)"
ENGINES = {"full": FULL, "quest": QUEST, "dca": DCA}
YARN = ROPE.replace("none", "yarn")


def answers(method: str, length: int, *scores: float, task: str = "made", **more: Any) -> list[dict[str, Any]]:
    """Answers to the same questions, whoever is asked."""
    engine = {"engine": ENGINES[method], "method": method, "length": length, "task": task}
    return [
        line(i, score, **{"document": i, "prompt": f"{task} {length} {i}", **engine, **more})
        for i, score in enumerate(scores)
    ]


def at(share: float, n: int = 20) -> list[float]:
    return [float(i < share * n) for i in range(n)]


def shares(**of: dict[int, float]) -> list[dict[str, Any]]:
    """Twenty answers of some methods, of which a share is right at each length."""
    return [
        each
        for method, by in of.items()
        for length, share in by.items()
        for each in answers(method, length, *at(share))
    ]


CEILING = answers("full", 500, *at(1), ceiling=True)


def board(folder: Path, *lines: dict[str, Any]) -> Board:
    folder.mkdir(exist_ok=True)
    file(folder / "a.jsonl", *lines)
    (found,) = read_boards(folder)
    return found


def test_methods_are_ranked_by_reach_then_by_quality(tmp_path: Path) -> None:
    dca, quest = {1024: 0.95, 2048: 0.5}, {1024: 0.6, 2048: 0.1}
    found = board(tmp_path, *CEILING, *shares(dca=dca, quest=quest, full={1024: 0.2, 2048: 0}))
    assert found.length == 2048
    assert [(x.method, x.rank, x.tied, x.reach, x.first) for x in found.standings] == [
        ("dca", 1, False, 1024, 1024),
        ("quest", 2, False, 0, 1024),
        ("full", 3, False, 0, 1024),
    ]
    assert found.standings[0].quality[1024][0] == pytest.approx(0.95)


def test_methods_that_may_be_equal_are_tied(tmp_path: Path) -> None:
    """19 of 20 and 18 of 20: one question tells too little; but full attention answers none."""
    found = board(tmp_path, *CEILING, *shares(dca={1024: 0.95}, quest={1024: 0.9}, full={1024: 0}))
    ranks = [(x.method, x.rank, x.tied) for x in found.standings]
    assert ranks == [("dca", 1, True), ("quest", 1, True), ("full", 3, False)]


def test_one_question_ranks_no_method_above_another(tmp_path: Path) -> None:
    """A bootstrap of one difference has no spread, and neither has one of equal differences."""
    for n, tied in ((1, True), (3, True), (20, False)):
        found = board(tmp_path, *CEILING, *answers("dca", 1024, *at(1, n)), *answers("quest", 1024, *at(0, n)))
        assert [(x.method, x.tied) for x in found.standings] == [("dca", tied), ("quest", tied)], n


def test_methods_are_not_tied_where_all_of_them_fail(tmp_path: Path) -> None:
    """At 4096 the best fails as `full` does. `quest` is better than `full` at each length."""
    scores = {"dca": (0.9, 0.9, 0.05), "quest": (1, 0.5, 0.5), "full": (0.1, 0, 0)}
    made = {method: dict(zip((1024, 2048, 4096), some, strict=True)) for method, some in scores.items()}
    ranks = [(x.method, x.rank, x.reach) for x in board(tmp_path, *CEILING, *shares(**made)).standings]
    assert ranks == [("dca", 1, 2048), ("quest", 2, 1024), ("full", 3, 0)]


def test_the_order_of_files_and_lines_changes_nothing(tmp_path: Path) -> None:
    lines = [
        *CEILING,
        *answers("full", 1024, *at(0.1), prefill_s=2.0),
        *answers("dca", 1024, *at(0.9), prefill_s=3.0),
        *answers("quest", 1024, *at(0.3), checkpoint="other/name", read_bytes=7),
        *answers("dca", 1024, 0.5, task="b"),
        *answers("full", 2048, *at(0.4), rope=YARN),
    ]
    whole = board(tmp_path / "whole", *lines)
    for seed in range(5):
        folder = tmp_path / str(seed)
        folder.mkdir()
        rng = random.Random(seed)
        rng.shuffle(lines)
        cut = rng.randrange(len(lines))
        file(folder / "b.jsonl", *lines[cut:], *lines[:3])  # some lines twice
        assert (board(folder, *lines[:cut]).standings, read_boards(folder)[0].model) == (whole.standings, whole.model)


def test_tasks_that_do_not_tell_methods_apart_do_not_count(tmp_path: Path) -> None:
    """`hard` fails within the window, and every method can do `easy`."""
    made = [*CEILING, *shares(dca={1024: 0.8}, quest={1024: 0.2})]
    alone = board(tmp_path, *made)
    hard = [*answers("full", 500, *at(0.2), task="hard", ceiling=True), *answers("quest", 1024, *at(1), task="hard")]
    hard += answers("dca", 1024, *at(0), task="hard")
    easy = [*answers("full", 500, *at(1), task="easy", ceiling=True)]
    easy += [each for method in ("dca", "quest") for each in answers(method, 1024, *at(1), task="easy")]
    found = board(tmp_path, *made, *hard, *easy)
    assert [table.task for table in found.counted(1024)] == ["made"]
    assert [table.task for table in found.counted(1024, telling=False)] == ["easy", "made"]
    assert [x.quality for x in found.standings] == [x.quality for x in alone.standings]


def test_a_task_that_few_were_asked_does_not_count(tmp_path: Path) -> None:
    more = [*answers("full", 500, *at(1), task="more", ceiling=True), *answers("dca", 1024, *at(0), task="more")]
    made = shares(**{method: {1024: 0.5} for method in ENGINES})
    assert [table.task for table in board(tmp_path, *CEILING, *made, *more).counted(1024)] == ["made"]
    only = answers("dca", 1024, *at(0.5), engine=DCA.replace("384", "128"), task="more")
    assert board(tmp_path, *CEILING, *made, *more, *only).standings[-1].rank is None, "it was not asked what counts"


def test_rope_scaling_is_a_row_by_kind_whatever_the_factor(tmp_path: Path) -> None:
    scaled = [
        each
        for factor, length in ((2, 1024), (4, 2048))
        for each in answers("full", length, *at(1), rope=YARN.replace("1.0)", f"{factor}.0)"))
    ]
    odd = {"engine": FULL.replace("512", "700"), "rope": YARN.replace("1.0)", f"{1700 / 700})")}
    assert fitted(answers("full", 1700, 1, **odd)[0])["rope"] != odd["rope"], "a quotient with a rounding error"
    plain = shares(full={1024: 0, 2048: 0})
    found = board(tmp_path / "a", *CEILING, *scaled, *plain)
    assert [(x.method, x.reach) for x in found.standings] == [("full rope=yarn", 2048), ("full", 0)]
    other = answers("full", 1024, *at(0.5), rope=YARN.replace("1.0)", "8.0)"))
    found = board(tmp_path / "b", *CEILING, *scaled, *plain, *other)
    reaches = [(x.method, x.reach) for x in found.standings]
    assert reaches == [("full rope=yarn", 2048), ("full rope=yarn rope_factor=8", 0), ("full", 0)]


def test_failing_at_the_first_length_asked_is_no_less_than_failing_later(tmp_path: Path) -> None:
    """Yarn is not asked within the window, where it would be full attention."""
    plain = shares(full={500: 1, 1024: 0.1}, quest={500: 1, 1024: 0.2})
    found = board(tmp_path, *CEILING, *plain, *answers("full", 1024, *at(0.7), rope=YARN))
    assert [(x.method, x.reach) for x in found.standings] == [("full rope=yarn", 0), ("quest", 500), ("full", 500)]


def test_costs_are_those_at_the_length_of_the_board(tmp_path: Path) -> None:
    """Prefill times of a document count once, and one odd time does not matter."""
    times = [{"document": i // 2, "prefill_s": (2.0, 3.0, 50.0)[i // 2]} for i in range(6)]
    full, dca = (
        [{**each, **time} for each, time in zip(answers(m, 1024, *at(x, 6)), times, strict=True)]
        for m, x in (("full", 0), ("dca", 1))
    )
    dca = [{**each, "prefill_s": each["prefill_s"] * 1.5, "read_bytes": 1000} for each in dca]
    found = board(tmp_path, *CEILING, *full, *dca)
    assert [(x.method, x.prefill, x.read_bytes) for x in found.standings] == [("dca", 1.5, 1000), ("full", 1.0, None)]
    assert [x.prefill for x in board(tmp_path, *CEILING, *dca).standings] == [None], "full was not asked there"


def test_no_ceiling_no_rank(tmp_path: Path) -> None:
    (only,) = board(tmp_path, *answers("quest", 1024, *at(1))).standings
    assert (only.rank, only.reach, only.quality) == (None, None, {})


def test_what_is_no_leaderboard_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LceError, match=r"has no record, \*.jsonl; lce leaderboard add"):
        read_boards(tmp_path)
    (tmp_path / "a.jsonl").write_text("{}\n")
    with pytest.raises(LceError, match="is no record"):
        read_boards(tmp_path)
    (tmp_path / "a.jsonl").write_text(json.dumps({**answers("quest", 1024, 1)[0], "again": True}) + "\n")
    with pytest.raises(LceError, match="have no answers to tasks"):
        read_boards(tmp_path)
