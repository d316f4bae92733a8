"""Pictures of reports: which there are, and what they show."""

import sys
from itertools import product
from pathlib import Path

import pytest

from lce.errors import LceError
from lce_lab.eval.plots import COLOURS, draw_all, figures
from lce_lab.eval.report import Report
from tests.lce_lab.eval.test_report import QUEST, file, line
from tests.lce_lab.eval.test_selection import engine, look


@pytest.fixture
def report(tmp_path: Path) -> Report:
    pytest.importorskip("matplotlib")
    lines = []
    for n, who, i in product((512, 1024), ({"engine": QUEST, "method": "quest"}, {}), range(4)):
        lines.append(line(i, float(i % 2 or n < 999), length=n, depth=i % 2, depths=[0, 1], read_bytes=n * 100, **who))
    lines += [line(0, task="other", method="|" * 200 + "$\\no_formula$")]
    return Report.read([file(tmp_path / "record", *lines)])


@pytest.mark.slow
def test_pictures_are_files_of_their_own(report: Report, tmp_path: Path) -> None:
    paths = draw_all(report, tmp_path / "made" / "here")
    names, kinds = [path.name for path in paths], "made-length made-bytes made-depth other-length methods"
    assert names == [f"tiny-abcdef01-{kind}.png" for kind in kinds.split()]
    assert all(path.read_bytes().startswith(b"\x89PNG\r\n") for path in paths)
    assert sorted(path.name for path in paths[0].parent.iterdir()) == sorted(names)


@pytest.mark.slow
def test_pictures_show_the_scores(report: Report) -> None:
    by_length, by_bytes, depths, _, methods = [figure for _, figure in figures(report)]
    (axes,) = by_length.axes
    first, second = (container.lines[0] for container in axes.containers)
    assert (first.get_color(), second.get_color(), list(first.get_ydata())) == (*COLOURS[:2], [1.0, 0.5])
    assert first.get_marker() != second.get_marker()
    assert [text.get_text() for text in by_length.legends[0].get_texts()] == ["ceiling", "quest", "full"]
    assert list(by_bytes.axes[0].containers[0].lines[0].get_xdata()) == [51200 / 2**20, 102400 / 2**20]
    assert [axes.get_title() for axes in depths.axes] == ["512 tokens", "1,024 tokens"]
    assert [label.get_text() for label in depths.axes[1].get_yticklabels()] == ["quest", "full"]
    assert depths.axes[1].images[0].get_array().tolist() == [[0.0, 1.0], [0.0, 1.0]], "a row per method"
    assert [text.get_text() for text in depths.axes[0].texts] == ["1.00"] * 4
    assert [axes.get_title() for axes in methods.axes] == ["made, 1k tokens", "other, 512 tokens"]
    assert [figure.get_size_inches()[0] for figure in (by_length, by_bytes, depths, methods)] == [5, 5, 5, 2 * 5]


@pytest.mark.slow
def test_recall_by_bytes_has_a_panel_a_length_and_a_line_a_method(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cells = product((512, 1024), ("side_by_side", "constant"), (8, 4))
    lines = [look(0, n / 10, length=length, engine=engine(n, how), read_bytes=n << 20) for length, how, n in cells]
    ((name, figure),) = figures(Report.read([file(tmp_path / "record", *lines)]))
    assert name == "tiny-abcdef01-selection-made"
    assert [axes.get_title() for axes in figure.axes] == ["512 tokens", "1k tokens"]
    drawn = [container.lines[0] for container in figure.axes[0].containers]
    assert [(list(x.get_xdata()), list(x.get_ydata())) for x in drawn] == [([4.0, 8.0], [0.4, 0.8])] * 2
    assert [text.get_text().split("=")[1] for text in figure.legends[0].get_texts()] == ["side_by_side", "constant"]
    assert draw_all(Report.read([tmp_path / "record"]), tmp_path)[0].stat().st_size > 10_000


def test_what_cannot_be_drawn_is_refused(report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "taken").touch()
    for folder in (tmp_path / "taken", "\0"):
        with pytest.raises(LceError, match="no folder for pictures"):
            draw_all(report, folder)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(LceError, match=r"pip install 'lce\[plot\]'"):
        draw_all(report, tmp_path)
