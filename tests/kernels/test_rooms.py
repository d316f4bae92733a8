"""Each operation has a folder that says what it computes, and a row in the table of all."""

import re
from importlib import import_module
from pathlib import Path

import pytest

import lce.kernels

ROOT = Path(str(lce.kernels.__file__)).parent
FOLDERS = sorted(file.parent.name for file in ROOT.glob("*/__init__.py") if file.parent.name != "runtime")
TABLE = str(lce.kernels.__doc__)


def test_the_table_has_a_row_for_each_operation() -> None:
    assert sorted(re.findall(r"^\| `(\w+)` ", TABLE, re.MULTILINE)) == FOLDERS


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_says_what_is_computed_from_what(folder: str) -> None:
    said = str(import_module(f"lce.kernels.{folder}").__doc__)
    assert re.search(r"\[(\w|\.\.\.), .*\]", said), "shapes"
    assert re.search("Multiplications|read once|Bytes moved", said), "cost"


def test_the_table_names_files() -> None:
    files = {file.stem for file in ROOT.glob("*/*.py")} | {file.stem.rpartition("_")[0] for file in ROOT.glob("*/*.py")}
    assert {*re.findall(r"`(\w+)`", TABLE.partition("|--")[2].partition("\n\n")[0])} <= files | {*FOLDERS}
