"""The house stays as light as it is: lines, words, members and the way of a plain command, from one table.

Whoever raises a number says in the table why. Whoever makes something lighter lowers its number.
"""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("lce", "lce_serve", "lce_lab")
MOST = {  # the number that is held, and why it is no smaller
    "lce": (
        35_500,
        "lines; a fifth are kernels; advice takes 405, factors that follow the text 88, kept beginnings 60, "
        "order of sums 470, lanes in one call 245, windows and AMX in attention 55, tiles of eight keys 95, "
        "GPUs 850, lanes there 350, less 440 of two methods that are gone",
    ),
    "lce_serve": (
        4_514,
        "lines; three APIs and what their clients send, a page, replicas and the door in front of servers",
    ),
    "lce_lab": (12_500, "lines; commands, tasks, benchmarks, records and pages"),
    "tests": (45_600, "lines: the slow truth and the stand-ins for GPUs are 3,400, advice and factors 350"),
    "words": (60_000, "in README, CONTRIBUTING, docs and benchmarks, the tour's code included"),
    "README": (120, "lines: the first screen, a document asked, methods and figures, what next"),
    "minimal": (400, "lines of examples/minimal.py: the whole idea in one file"),
    "path lines": (
        5_201,
        "of functions that `generate` with longheads enters, docstrings included; order of sums is 130, huge pages 25, "
        "heads that choose together 50, summaries of keys 45",
    ),
    "path files": (70, "of these functions; 68 are wanted: some files are entered for a few lines each"),
    "Engine": (18, "members: the verbs, and the setup behind them"),
    "Method": (25, "members: parts, what is kept, and what a method says of itself"),
    "own": (32, "members that a class declares; a layer's cache is also asked by recorded steps"),
    "all": (46, "members with those that a class inherits; LongHeads has its paper's ablations, and a summary"),
}


def sources(folder: str) -> Iterator[Path]:
    return (file for file in sorted((ROOT / folder).rglob("*.py")) if "__pycache__" not in file.parts)


def n_lines(*files: Path) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def held(name: str, found: int) -> None:
    most, why = MOST[name]
    assert found <= most, f"{name}: {found:,} instead of at most {most:,} {why}"


@pytest.mark.parametrize("folder", [*PACKAGES, "tests"])
def test_lines_of_packages(folder: str) -> None:
    held(folder, n_lines(*sources(folder)))


def test_words_of_pages() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    pages += [page for folder in ("docs", "benchmarks") for page in sorted((ROOT / folder).rglob("*.md"))]
    held("words", sum(len(page.read_text(encoding="utf-8").split()) for page in pages))
    held("README", n_lines(ROOT / "README.md"))
    held("minimal", n_lines(ROOT / "examples" / "minimal.py"))


def test_no_line_keeps_its_format() -> None:
    kept = re.compile(r"# *fmt: *(skip|off)")
    assert [file for folder in PACKAGES for file in sources(folder) if kept.search(file.read_text("utf-8"))] == []


@functools.cache
def members(tree: ast.ClassDef) -> set[str]:
    """The public methods, fields and attributes of a class, those that its methods assign to self included."""
    found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    for node in tree.body:
        for target in targets_of(node):
            found |= {target.id} if isinstance(target, ast.Name) else set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if isinstance(node.value, ast.Name) and node.value.id == "self" else set()
    return {name for name in found if not name.startswith("_")}


def targets_of(node: ast.stmt) -> list[ast.expr]:
    return [node.target] if isinstance(node, ast.AnnAssign) else node.targets if isinstance(node, ast.Assign) else []


def test_members_of_classes() -> None:
    classes: dict[str, list[tuple[Path, ast.ClassDef]]] = {}
    for file in (file for folder in PACKAGES for file in sources(folder)):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append((file, node))

    def inherited(file: Path, node: ast.ClassDef) -> set[str]:
        found = set(members(node))
        for base in node.bases:
            same = classes.get(ast.unparse(base).partition("[")[0].rpartition(".")[2], [])
            for each in [one for one in same if one[0] == file] or same[:1]:
                found |= inherited(*each) if each[1] is not node else set()
        return found

    for name, found in classes.items():
        for file, node in found:
            held("own", len(members(node)))
            held("all", len(inherited(file, node)))
            if name in MOST:
                held(name, len(members(node)))


@pytest.mark.slow
def test_the_way_of_a_plain_command() -> None:
    words = "generate -m demo --method longheads -f examples/haystack.txt -n 2 --quiet".split()
    command = [sys.executable, "-m", "tools.count_path", *words]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    found = re.search(r"^([\d,]+) lines of functions in (\d+) files$", run.stdout, re.MULTILINE)
    assert found
    held("path lines", int(found[1].replace(",", "")))
    held("path files", int(found[2]))
