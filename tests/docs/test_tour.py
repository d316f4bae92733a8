"""The tour: its code runs and prints what the pages show, and what the pages name exists."""

import ast
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.command import Process
from tests.docs.scripts import load

ROOT = Path(__file__).parent.parent.parent
TOUR = ROOT / "docs" / "tour"


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


def defined(file: Path) -> set[str]:
    """The names that a file defines, at any depth; those in classes also as `Class.name`."""
    found: set[str] = set()

    def visit(node: ast.AST, outer: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = outer
            if isinstance(child, ast.ClassDef | ast.FunctionDef):
                found.update((child.name, f"{outer}{child.name}"))
                inner = f"{child.name}." if isinstance(child, ast.ClassDef) else outer
            visit(child, inner)

    visit(ast.parse(file.read_text(encoding="utf-8")), "")
    return found


def rows_to_open() -> Iterator[Any]:
    for page in PAGES:
        _, heading, table = page.read_text(encoding="utf-8").partition("| open | and read | for |\n")
        assert heading, page.name
        for row in table.partition("\n\n")[0].splitlines()[1:]:
            cells = row.split("|")
            yield pytest.param(
                cells[1].strip(" `"), re.findall(r"`([\w.]+)`", cells[2]), id=f"{page.name[0]} {cells[1]}"
            )


@pytest.mark.parametrize(("file", "names"), list(rows_to_open()))
def test_what_a_page_says_to_open_exists(file: str, names: list[str]) -> None:
    assert names
    assert set(names) - defined(ROOT / file) == set()


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
    page.write_text("```python\nprint(2, 2.5, 'a')\n```\n```text\n3 2.5 a\n```\n")
    with pytest.raises(tour.Difference, match=r"line 2 prints\n2 2\.5 a"):
        tour.run(page)
    page.write_text(page.read_text().replace("```text", "```text varies"))
    assert tour.run(page)  # the numbers may differ,
    page.write_text(page.read_text().replace("2.5 a", "2.5 b"))
    with pytest.raises(tour.Difference):  # and nothing else
        tour.run(page)
    page.write_text(page.read_text().replace("2.5 b", "2.5 a").replace("varies", "lines"))
    with pytest.raises(tour.Difference):  # lines of files may not
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
@pytest.mark.parametrize("page", [PAGES[0], PAGES[-1]], ids=lambda page: page.stem)
def test_a_notebook_runs(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others have the code of their pages, which runs."""
    nbclient = pytest.importorskip("nbclient", reason="notebooks need nbclient and ipykernel: pip install 'lce[tour]'")
    pytest.importorskip("ipykernel", reason="notebooks need nbclient and ipykernel: pip install 'lce[tour]'")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(TOUR)]))
    made = tour.notebook(page)
    nbclient.NotebookClient(
        made, timeout=300, kernel_name="python3", resources={"metadata": {"path": folder}}
    ).execute()


@pytest.mark.slow
@by_page
def test_its_commands_run(page: Path, tmp_path: Path) -> None:
    here = tmp_path / "docs" / "tour"
    shutil.copytree(TOUR, here)
    for name in ("lce", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "lce").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m lce "$@"\n')
    (bin_folder / "lce").chmod(0o755)
    path = os.pathsep.join([str(bin_folder), os.environ["PATH"]])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path}
    for block in tour.blocks(page):
        if block.kind == "bash":
            process = Process(["bash", "-euc", block.text], cwd=here, env=environment)
            out, err = process.communicate(timeout=300)
            assert process.returncode == 0, err
            assert out
