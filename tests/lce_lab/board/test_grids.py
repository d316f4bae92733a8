"""The tables of a board: what is grey, what is unknown, and what the legend says."""

from pathlib import Path

from lce_lab.board.grids import UNKNOWN, legend, ranking, tasks
from tests.lce_lab.board.test_ranking import CEILING, answers, at, board


def test_cells_that_do_not_count_are_grey(tmp_path: Path) -> None:
    hard = [*answers("full", 500, *at(0.2), task="hard", ceiling=True), *answers("quest", 1024, *at(1), task="hard")]
    made = [*CEILING, *answers("dca", 1024, *at(0.8)), *answers("quest", 1024, *at(0.2))]
    (grid,) = tasks(board(tmp_path, *made, *hard))
    assert (grid.title, grid.head) == ("1,024 tokens", ["method", "hard", "made"])
    assert [[(cell.text, cell.grey) for cell in row] for row in grid.rows] == [
        [("dca", False), (UNKNOWN, False), ("0.80", False)],
        [("quest", False), ("1.00", True), ("0.20", False)],
        [("ceiling", False), ("0.20", False), ("1.00", False)],
    ]


def test_questions_of_one_text_share_a_title(tmp_path: Path) -> None:
    kinds = [
        each
        for kind in ("keys", "pairs")
        for each in answers("quest", 1024, 1, task="medley", kind=kind, mode="shared", filler="essays")
    ]
    (grid,) = tasks(board(tmp_path, *({**each, "index": i} for i, each in enumerate(kinds))))
    assert (grid.title, grid.head) == ("1,024 tokens, medley, essays, mode shared", ["method", "keys", "pairs"])


def test_the_ranking_has_a_column_for_each_length_that_counts(tmp_path: Path) -> None:
    lines = [each for m, x in (("dca", 0.8), ("quest", 0.2)) for each in answers(m, 1024, *at(x), read_bytes=2**20)]
    same = [each for method in ("dca", "quest") for each in answers(method, 500, *at(1))]
    found = board(tmp_path, *CEILING, *lines, *same)
    grid = ranking(found)
    assert grid.head == ["method", "rank", "reach", "quality at 1,024", "read a token", "prefill"]
    first, *rest, read, prefill = [cell.text for cell in grid.rows[0]]
    assert (first, *rest[:2], read, prefill) == ("dca", "1", "500", "1.0 MiB", UNKNOWN)
    assert rest[2].startswith("0.80 (0.")
    rank, reach, quality, _ = legend(found)
    assert "quality at 1,024 tokens, the longest length that most were asked at" in rank, (
        "full was asked within the window alone"
    )
    assert "that all were asked at" in legend(board(tmp_path / "all", *CEILING, *lines))[0]
    assert "at 500 tokens" in reach
    assert "A cell of a task has 20 answers." in quality


def test_the_legend_says_why_nothing_is_ranked(tmp_path: Path) -> None:
    assert legend(board(tmp_path, *answers("quest", 1024, *at(1)))) == [
        "Nothing is ranked: `full` was not asked within the window."
    ]
    hard = answers("full", 500, *at(0.1), ceiling=True)
    assert "`full` fails every task" in legend(board(tmp_path, *hard, *answers("quest", 1024, *at(1))))[0]
