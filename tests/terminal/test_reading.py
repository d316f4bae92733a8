"""The texts that commands read: where they come from, and what is refused."""

import os
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from lce.errors import DataError, UsageError
from lce.terminal import options, reading
from tests.command import assert_error, run


@pytest.mark.parametrize(
    ("args", "stdin", "expected"),
    [
        (["--prompt", "-"], "from stdin\n", "from stdin"),
        (["as an argument"], None, "as an argument"),
        (["-", "-f", "{file}"], "from stdin", "a file’s text\n\nfrom stdin"),
        ([], "from stdin", "from stdin"),
        (["-f", "-"], "from stdin\r\n", "from stdin"),
        (["-f", "{file}", "-p", "and a question"], None, "a file’s text\n\nand a question"),
    ],
)
def test_where_the_prompt_comes_from(args: list[str], stdin: str | None, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes("\ufeffa file’s text\n\n".encode())  # as some editors write it; one line break ends the file
    prompts: list[str] = []
    command = options.prompt_options(lambda prompt: prompts.append(prompt))
    result = CliRunner().invoke(click.command()(command), [arg.format(file=file) for arg in args], input=stdin)
    assert (result.exit_code, prompts) == (0, [expected])


def test_prompts_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    os.mkfifo(tmp_path / "pipe")
    generate = ("generate", "--model", "none")
    assert_error(run(*generate, "-f", tmp_path / "missing.txt"), 3, "missing.txt", "No such file")
    assert_error(run(*generate, "-f", tmp_path), 3, str(tmp_path), "is a folder; expected a regular file")
    assert_error(run(*generate, "-f", tmp_path / "empty.txt"), 3, "empty.txt", "is empty")
    assert_error(run(*generate, "-f", tmp_path / "latin.txt"), 3, "latin.txt", "not UTF-8", "byte 2")
    for begun, kind in ((b"%PDF-1.7 text", "is a PDF"), (b"PK\3\4", "a Word document"), (b"{\\rtf1", "is an RTF")):
        (tmp_path / "document").write_bytes(begun)
        assert_error(run(*generate, "-f", tmp_path / "document"), 3, kind, "save it as plain text")
    assert_error(run(*generate, "--prompt", "-", stdin=b"\xff"), 3, "stdin", "not UTF-8")
    assert_error(run(*generate), 3, "stdin is empty; expected some text: write it to stdin, or give it as an argument")
    assert_error(run(*generate, "--prompt", ""), 2, "--prompt is empty")
    assert_error(run(*generate, "-f", tmp_path / "pipe"), 3, "pipe is a pipe; expected a file, or - and")
    for twice in (
        ("--prompt", "-", "-f", "-"),
        *(("--messages", "-", *own) for own in (("-p", "-"), ("-f", "-"), ("-",))),
    ):
        assert_error(run(*generate, *twice, stdin="[]"), 2, "both stdin")


def test_a_text_larger_than_memory_is_refused_before_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(tmp_path / "sparse.txt", "wb") as file:
        file.truncate(1 << 40)
    assert_error(run("generate", "-m", "none", "-f", tmp_path / "sparse.txt"), 4, "1.0 TiB", "a shorter text")
    monkeypatch.setattr(reading, "free_host_memory", lambda: 16 << 20)
    assert_error(run("generate", "-m", "none", stdin=b"x" * (3 << 20)), 4, "stdin", "expected 1.0 MiB at most")
    monkeypatch.setattr(reading, "free_host_memory", lambda: None)
    assert_error(run("generate", "-m", "none", stdin=b"x" * (3 << 20)), 3, "none does not exist")


@pytest.mark.parametrize(
    "content", ["{}", "3", "[", '"\\ud800"', "NaN", "[" * 9999, "[" + "[]," * reading.MAX_MESSAGES_VALUES + "[]]"]
)
def test_messages_that_are_no_list(content: str, tmp_path: Path) -> None:
    (tmp_path / "messages.json").write_text(content)
    result = run("generate", "--model", "none", "--messages", tmp_path / "messages.json")
    assert_error(result, 3, "messages.json", "expected a list of")


def test_stdin_that_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python has no sys.stdin then."""
    monkeypatch.setattr(sys, "stdin", None)
    for read in (reading.read_text, reading.read_messages):
        with pytest.raises(DataError, match="stdin is closed; give a file"):
            read("-")
    with pytest.raises(UsageError, match="no prompt"):
        reading.read_prompt(None, None, None)
