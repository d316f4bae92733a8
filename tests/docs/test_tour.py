"""The tour: its code runs and prints what the pages show, and what the pages name exists."""

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.command import Process
from tests.docs.scripts import DOCS, ROOT, load

TOUR = DOCS / "tour"
tour = load("tour/tour.py")
PAGES = tour.chapters()
by_page = pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder for pictures, where the pages' `drawing` can be imported."""
    (tmp_path / "pictures").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(TOUR))
    return tmp_path


@pytest.mark.slow
@by_page
def test_a_chapter_prints_what_it_shows_and_draws_its_pictures(page: Path, folder: Path) -> None:
    tour.run(page)
    drawn = {file.name for file in (folder / "pictures").iterdir()}
    assert drawn
    assert drawn == set(re.findall(r"\]\(pictures/([\w.]+)\)", page.read_text(encoding="utf-8")))
    assert all((TOUR / "pictures" / name).stat().st_size < 200_000 for name in drawn)


def test_every_picture_is_on_a_page() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert {file.name for file in (TOUR / "pictures").iterdir()} == set(re.findall(r"\]\(pictures/([\w.]+)\)", text))


@by_page
def test_a_chapter_has_its_parts(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# {page.name[0]}. ")
    assert "At the end of this chapter you will" in text
    exercises = re.findall(r"^\*\*(\d)\.\*\* ", text, re.MULTILINE)
    assert 2 <= len(exercises) <= 4
    solutions = text.split(tour.FOLD)[1:]
    assert len(solutions) == len(exercises)
    assert all("```python" in solution.partition(tour.UNFOLD)[0] for solution in solutions)
    assert f"]({page.name})" in (TOUR / "README.md").read_text(encoding="utf-8")


def rows_to_open() -> Iterator[Any]:
    for page in PAGES:
        _, heading, table = page.read_text(encoding="utf-8").partition("| open | and read | for |\n")
        assert heading, page.name
        for row in table.partition("\n\n")[0].splitlines()[1:]:
            cells = row.split("|")
            names = re.findall(r"`([\w.]+)`", cells[2])
            yield pytest.param(cells[1].strip(" `"), names, id=f"{page.name[0]} {cells[1]}")


@pytest.mark.parametrize(("file", "names"), list(rows_to_open()))
def test_what_a_page_says_to_open_exists(file: str, names: list[str]) -> None:
    defined = re.findall(r"^ *(?:class|def|async def) (\w+)", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    assert names
    assert {part for name in names for part in name.split(".")} - set(defined) == set()


@by_page
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(r"`((?:lce|tests|examples|benchmarks|tools)/[\w./]+)`", page.read_text(encoding="utf-8"))
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_chapter_five_gives_file_and_line_of_the_four_steps() -> None:
    page = next(page for page in PAGES if page.name.startswith("5"))
    shown = next(block for block in tour.blocks(page) if block.mark == "lines")
    rows = re.findall(r"^(.*?) +([\w/]+\.py):(\d+)  \w+\.(\w+)$", shown.text, re.MULTILINE)
    assert len(rows) == shown.text.count("\n") + 1
    assert [step for step, *_ in rows if step] == ["summarise", "score", "select", "place", "all four"]
    for _, file, line, name in rows:
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8").splitlines()[int(line) - 1]


def test_a_page_that_is_wrong_is_found(tmp_path: Path) -> None:
    page = tmp_path / "1-wrong.md"
    text = "```python\nprint(2, 2.5, 'a')\n```\n```text\n3 2.5 a\n```\n"
    page.write_text(text)
    with pytest.raises(tour.Difference, match=r"line 2 prints\n2 2\.5 a"):
        tour.run(page)
    page.write_text(text.replace("```text", "```text varies"))
    assert tour.run(page)  # the numbers may differ,
    for mark, shown in (("varies", "2.5 b"), ("lines", "2.5 a")):  # and nothing else; lines of files may not
        page.write_text(text.replace("```text", f"```text {mark}").replace("2.5 a\n```\n", f"{shown}\n```\n"))
        with pytest.raises(tour.Difference):
            tour.run(page)
    page.write_text("```python\nassert False\n```\n")
    with pytest.raises(AssertionError):
        tour.run(page)


@by_page
def test_a_notebook_has_the_code_of_its_page(page: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="notebooks need nbformat: pip install 'lce[tour]'")
    made = tour.notebook(page)
    nbformat.validate(made)
    cells = [cell.source for cell in made.cells if cell.cell_type == "code"]
    assert cells == [block.text for block, _ in tour.code(page)]
    assert not any(tour.FOLD in cell.source or "```python" in cell.source for cell in made.cells)


@pytest.mark.slow
@by_page
def test_its_commands_run(page: Path, tmp_path: Path) -> None:
    here = tmp_path / "docs" / "tour"
    shutil.copytree(TOUR, here)
    for name in ("lce", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    command = f'lce() {{ "{sys.executable}" -m lce "$@"; }}\n'
    for block in tour.blocks(page):
        if block.kind == "bash":
            process = Process(["bash", "-euc", command + block.text], cwd=here, env={**os.environ, "PYTHONPATH": ROOT})
            out, err = process.communicate(timeout=300)
            assert process.returncode == 0, err
            assert out
