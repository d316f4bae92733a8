"""What --json and --quiet let through; progress bars: drawn on a terminal, silent elsewhere, and never left behind."""

import io
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr, suppress

import pytest

from lce.engine.stream import CancelFlag, Generation, Piece, Stream
from lce.errors import WindowWarning
from lce.terminal.output import FIRST_LINE_S, Output, ProgressLines
from lce.tokenizer.thinking import Thinking
from lce_lab.stages import bars, stages


def pieces(n: int, *, broken: bool = False) -> Stream:
    def drawn() -> Iterator[Piece]:
        for number in range(n):
            yield Piece(f"{number} ")
        if broken:
            raise KeyboardInterrupt

    return Stream(drawn(), Generation(), CancelFlag())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("thought", ["Two", ""])
def test_a_thought_is_dim_at_a_terminal_and_as_written_elsewhere(
    is_open: bool, thought: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"{'' if is_open else '<think>'}\n{thought}\n</think>\n\nFour"
    for stdout, shown in (
        (io.StringIO(), text),
        (Terminal(), f"\x1b[2m{thought}\x1b[0m\n\nFour" if thought else "Four"),
    ):
        monkeypatch.setattr(sys, "stdout", stdout)
        Output().generation(spoken(text), Thinking("<think>", "</think>", is_open))
        assert stdout.getvalue() == shown + "\n"


def spoken(text: str) -> Stream:
    said = text.partition("Two")
    return Stream((Piece(each) for each in said if each), Generation(), CancelFlag())


@pytest.mark.parametrize(
    ("output", "out", "err"),
    [
        (Output(), "a\nb\n0 1 \n", "figures\n"),
        (Output(quiet=True), "a\nb\n0 1 \n", ""),
        (Output(json=True), '{"a": 1}\n', "figures\n"),
        (Output(json=True, quiet=True), '{"a": 1}\n', ""),
    ],
)
def test_what_goes_where(output: Output, out: str, err: str, capsys: pytest.CaptureFixture[str]) -> None:
    output.object({"a": 1})
    output.text("a", "b")
    output.text()
    output.generation(pieces(2))
    output.figures("figures")
    assert capsys.readouterr() == (out, err)


def test_an_interrupted_text_ends_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        Output().generation(pieces(2, broken=True))
    assert capsys.readouterr().out == "0 1 \n"
    with pytest.raises(KeyboardInterrupt):
        Output().generation(pieces(0, broken=True))
    assert capsys.readouterr().out == ""


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_shows_what_is_done_and_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Screen())  # not in a fixture: pytest sets stderr after those
    with suppress(KeyboardInterrupt), bars(Output().bar) as advance:
        advance("prefill", 0, 100)
        time.sleep(0.15)  # a bar is drawn ten times a second at most
        advance("prefill", 60, 100)
        advance("learn", 1, 3)
        raise KeyboardInterrupt
    assert "prefill:  60%" in screen.getvalue()
    assert "60/100" in screen.getvalue()
    assert screen.getvalue().index("prefill") < screen.getvalue().index("learn")
    assert screen.getvalue().rpartition("\r")[2].strip() == ""
    before = screen.getvalue()
    with Output(quiet=True).bar("prefill", " tok") as advance_one:
        advance_one(5, 10)
    assert screen.getvalue() == before


def test_stages_are_reported_as_the_caller_asks(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[tuple[str, int, int]] = []
    for progress in (True, None, lambda *units: told.append(units)):
        with stages(progress) as tell:
            tell("reading", 3, 3)
    assert (told, capsys.readouterr().err.count("3/3")) == ([("reading", 3, 3)], 1)


def test_short_work_writes_nothing_where_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Output().bar("prefill", " tok") as advance, bars(Output().bar) as advance_stage:
        advance(5, 10)
        advance_stage("read", 5, 10)
    assert capsys.readouterr().err == ""


def told(label: str, unit: str, calls: list[tuple[float, int]], total: int) -> list[tuple[float, str]]:
    """The lines of work that calls at these seconds, with these units done, and when each was written."""
    now, said = [0.0], []
    lines = ProgressLines(label, unit, lambda: now[0], FIRST_LINE_S)
    for second, done in calls:
        now[0] = second
        with redirect_stderr(io.StringIO()) as stderr:
            lines(done, total)
        said += [(second, line) for line in stderr.getvalue().splitlines()]
    return said


def test_long_work_writes_a_line_now_and_then() -> None:
    assert told("prefill", " tok", [(second, second * 1500) for second in range(1, 22)], 32_000) == [
        (5, "prefill 7,500 of 32,000, 1,500 tok/s, 16 s left"),
        (15, "prefill 22,500 of 32,000, 1,500 tok/s, 6 s left"),
    ]
    line = "prefill 10,100 of 20,000, 20 tok/s, 495 s left"
    assert told("prefill", " tok", [(1, 10_000), (6, 10_100)], 20_000) == [(6, line)], "from the first call on"
    assert told("samples", " a", [(7.0, 1), (18.0, 1), (28.0, 2)], 50) == [
        (7.0, "samples 1 of 50"),
        (18.0, "samples 1 of 50"),
        (28.0, "samples 2 of 50, 0.048 a/s, 1,008 s left"),
    ]
    assert told("reading", "", [(1.0, 1), (6.0, 2), (7.0, 3)], 3) == [(6.0, "reading 2 of 3, 5 s left")]


def test_warnings_are_notes_said_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        other = io.StringIO()
        monkeypatch.setattr(warnings, "showwarning", lambda message, *_, **__: print(message, file=other))
        for _ in range(2):  # each time anew
            with Output(quiet=True).noting() as notes:
                for n in (3, 4):
                    warnings.warn(f"{n} tokens are too many", WindowWarning, stacklevel=1)
                warnings.warn("of another package", DeprecationWarning, stacklevel=1)
            assert notes == ["3 tokens are too many"]
            assert capsys.readouterr().err == "lce: note: 3 tokens are too many\n"
        with Output().noting(WindowWarning) as notes:
            warnings.warn("6 tokens are too many", WindowWarning, stacklevel=1)
        assert (notes, capsys.readouterr().err) == ([], "")
        assert other.getvalue() == "of another package\n" * 2
