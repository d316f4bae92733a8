"""benchmarks/RESULTS.md is what the records make of it, and short; every figure has a machine and a command."""

import re
from pathlib import Path

import pytest
import results

ROOT = Path(__file__).parents[2]
TABLES = {path.stem for path in (ROOT / "benchmarks" / "record" / "tables").glob("*.toml")} - {"machines"}
MOST_WORDS, MOST_PROSE = 6000, 3000


@pytest.mark.slow  # it reads all records, 26,000 lines
def test_the_page_is_what_the_records_make() -> None:
    assert results.PAGE.read_text(encoding="utf-8") == results.page(), "run python benchmarks/results.py"


def test_the_page_is_short() -> None:
    page = results.PAGE.read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$|^\|.*?$|`[^`]*`", "", page, flags=re.MULTILINE | re.DOTALL)
    assert len(page.split()) <= MOST_WORDS
    assert len(prose.split()) <= MOST_PROSE


def test_every_table_is_on_the_page() -> None:
    named = re.findall(r"^\{\{(\w+)\}\}$", results.PROSE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(named) == sorted([*TABLES, *results.MADE])


@pytest.mark.parametrize("name", sorted(TABLES))
def test_every_run_has_a_machine_and_a_command_that_exists(name: str) -> None:
    runs = results.runs(name)
    assert [run.date for run in runs] == sorted((run.date for run in runs), reverse=True)
    for run in runs:
        assert run.machine in results.MACHINES
        assert {len(row) for row in run.rows} == {len(run.columns)}
        for command in run.command.splitlines():
            script = re.search(r"\bpython (\S+\.py)|^(?:lce|make) ", command)
            assert script is not None, command
            assert script[1] is None or (ROOT / script[1]).is_file(), command


def test_intervals_stay_out_of_a_column() -> None:
    table = results.Table(["name", "share"], [["x", "0.50 (0.20–0.80)"]])
    assert table.column("share") == {"x": "0.50"}
    assert table.column("share", intervals=True) == {"x": "0.50 (0.20–0.80)"}
