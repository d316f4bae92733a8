"""Runs the code of the tour's pages and compares what it prints with what they show; makes notebooks of the pages.

    python tour.py run          every chapter, in this folder: pictures are drawn anew
    python tour.py run 3 5      chapters 3 and 5
    python tour.py run --write  and put what is printed now into the pages' `text varies` and `text lines` blocks
    python tour.py notebooks    a notebook beside each page; needs the nbformat package

A page is Markdown. Its `python` blocks run in order, in one namespace. A `text` block right behind a `python` block is
what that block prints, where `...` stands for anything. Of a `text varies` block the numbers are not compared: another
model prints others. A `text lines` block names lines of files and is compared exactly. `bash` blocks are commands,
given in this folder.
"""

from __future__ import annotations

import argparse
import contextlib
import doctest
import io
import itertools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
SAME = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
FOLD, UNFOLD = "<details><summary>Solution</summary>", "</details>"


@dataclass(frozen=True)
class Block:
    """A stretch of a page: its kind (`python`, `text`, `bash`, or `prose`), its text, and the line where it begins."""

    kind: str
    text: str
    line: int
    folded: bool = False  # in a solution
    mark: str = ""  # `varies`: its numbers depend on the model; `lines`: they are lines of files


class Difference(AssertionError):
    """A block printed something else than its page shows."""


def chapters() -> list[Path]:
    """The pages in their order."""
    return sorted(FOLDER.glob("[0-9]-*.md"))


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page, prose between fences included."""
    kind, found, begin, folded, mark = "prose", [], 1, False, ""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = re.fullmatch(r"```(\w*)(?: (varies|lines))?", line)
        if fence is None:
            folded = line == FOLD or (folded and line != UNFOLD)
            found.append(line)
            continue
        if found:
            yield Block(kind, "\n".join(found), begin, folded, mark)
        kind = fence[1] or ("text" if kind == "prose" else "prose")
        mark = fence[2] or ""
        found, begin = [], number + 1
    if found:
        yield Block(kind, "\n".join(found), begin, folded)


def code(page: Path) -> Iterator[tuple[Block, Block | None]]:
    """The `python` blocks of a page, each with the block that shows what it prints, if there is one."""
    whole = [block for block in blocks(page) if block.kind != "prose" or block.text.strip()]
    for block, following in zip(whole, [*whole[1:], None], strict=True):
        if block.kind == "python":
            yield block, following if following and following.kind == "text" else None


def same(shown: Block, got: str) -> bool:
    """Whether a block prints what its page shows."""
    want = shown.text + "\n"
    if shown.mark == "varies":
        want, got = _shape(want), _shape(got)
    return doctest.OutputChecker().check_output(want, got, SAME)


def _shape(text: str) -> str:
    """Numbers as `#`, several in a row as one, and lines alike as one: a model may have more layers."""
    masked = re.sub(r"#([ \t]+#)+", "#", re.sub(r"-?\d[\d,]*(\.\d+)?%?", "#", text))
    return "".join(line + "\n" for line, _ in itertools.groupby(masked.splitlines()))


def run(page: Path, echo: bool = False, write: bool = False) -> dict[str, Any]:
    """Run a page's code in the current folder; returns its namespace. Raises `Difference`.

    With `write`, the page shows afterwards what its marked blocks print now.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    changed: list[tuple[Block, str]] = []
    for block, shown in code(page):
        printed = io.StringIO()
        source = "\n" * (block.line - 1) + block.text  # errors name the line of the page
        with contextlib.redirect_stdout(printed):
            exec(compile(source, str(page), "exec"), namespace)
        got = printed.getvalue()
        if echo:
            print(got, end="")
        if shown is not None and shown.mark and write:
            changed.append((shown, got))
        elif shown is not None and not same(shown, got):
            raise Difference(f"{page.name}, line {block.line} prints\n{got}\nand the page shows\n{shown.text}")
    lines = page.read_text(encoding="utf-8").split("\n")
    for shown, got in reversed(changed):
        first = shown.line - 1
        lines[first : first + shown.text.count("\n") + 1] = got.rstrip("\n").split("\n")
    if changed:
        page.write_text("\n".join(lines), encoding="utf-8")
    return namespace


def notebook(page: Path) -> Any:
    """A page as a notebook: a cell for each block of code, what is between as text; solutions are folded."""
    import nbformat.v4 as nb

    cells: list[Any] = []
    for block in blocks(page):
        text = block.text.replace(FOLD, "**Solution**").replace(UNFOLD, "").strip()
        if block.kind == "python":
            folded = {"jupyter": {"source_hidden": True}, "collapsed": True} if block.folded else {}
            cells.append(nb.new_code_cell(text, metadata=folded))
        elif block.kind in ("bash", "sh"):
            cells.append(nb.new_markdown_cell(f"In a terminal:\n```bash\n{text}\n```"))
        elif block.kind == "text" and cells and cells[-1].cell_type == "code":
            continue  # the cell prints it
        elif text:
            fenced = f"```\n{text}\n```" if block.kind == "text" else text
            cells.append(nb.new_markdown_cell(fenced))
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"  # the same page gives the same file
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return nb.new_notebook(cells=cells, metadata=kernel)


def write_notebooks() -> None:
    """A notebook beside each page."""
    try:
        import nbformat
    except ImportError:
        sys.exit("notebooks need the nbformat package: pip install 'lce[tour]'")
    for page in chapters():
        made = notebook(page)
        nbformat.validate(made)
        nbformat.write(made, page.with_suffix(".ipynb"))
        print(page.with_suffix(".ipynb").name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "notebooks"))
    parser.add_argument("chapter", nargs="*", type=int, help="numbers of chapters; all by default")
    parser.add_argument("--write", action="store_true", help="renew what the pages show of the model and of lines")
    given = parser.parse_args()
    if given.action == "notebooks":
        write_notebooks()
        return
    for page in chapters():
        if not given.chapter or int(page.name[0]) in given.chapter:
            print(f"== {page.stem}")
            try:
                run(page, echo=True, write=given.write)
            except Difference as error:
                sys.exit(str(error))


if __name__ == "__main__":
    main()
