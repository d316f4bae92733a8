"""What --json and --quiet let through."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from lce.engine.decode import Generation, Piece, Stream
from lce.terminal.output import Output


def pieces(n: int, *, broken: bool = False) -> Stream:
    def drawn() -> Iterator[Piece]:
        for number in range(n):
            yield Piece(f"{number} ")
        if broken:
            raise KeyboardInterrupt

    return Stream(drawn(), Generation())


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


def test_json_is_read_back(capsys: pytest.CaptureFixture[str]) -> None:
    content = {"text": "é\n😀", "none": None, "list": [1, 2.5]}
    Output(json=True).object(content)
    assert json.loads(capsys.readouterr().out) == content


def test_an_interrupted_text_ends_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        Output().generation(pieces(2, broken=True))
    assert capsys.readouterr().out == "0 1 \n"
    with pytest.raises(KeyboardInterrupt):
        Output().generation(pieces(0, broken=True))
    assert capsys.readouterr().out == ""


def test_json_runs_the_generation_to_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    stream = pieces(3)
    Output(json=True).generation(stream)
    assert list(stream) == []
    assert capsys.readouterr().out == ""
