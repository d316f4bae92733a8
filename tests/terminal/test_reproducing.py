"""`lce reproduce`: the list, what it prints of an entry, and what it refuses before any work."""

import json
from pathlib import Path

from lce.lab.papers import ENTRIES
from tests.command import assert_error, run


def test_without_an_id_all_are_listed() -> None:
    listed = run("reproduce")
    assert listed.exit_code == 0
    assert all(f"  {id} " in listed.stdout for id in ENTRIES)
    assert [entry["id"] for entry in json.loads(run("reproduce", "--json").stdout)] == list(ENTRIES)


def test_an_entry_as_a_table(tiny_model: Path) -> None:
    result = run("reproduce", "dca:table1", "--model", tiny_model, "--lengths", "64,128", "--samples", "2", "--quiet")
    assert result.exit_code == 0, result.stderr
    head, _, table = result.stdout.partition("\n\n")
    assert head.startswith("dca:table1: perplexity by length")
    assert "the paper (DCA, arXiv:2402.17463): PG19" in head
    assert "  lce eval perplexity --text FILE --lengths 64,128 --windows 2 --scored all" in head
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert rows[0] == ["row", "measured", "length", "the paper", "here", "95% interval", "of"]
    assert [row[:4] for row in rows[2:4]] == [
        ["RoPE", "perplexity", "64", "7.87"],
        ["RoPE", "perplexity", "128", ">100"],
    ]
    assert len(rows) == 2 + 6 * 2


def test_a_dry_run_measures_nothing(tiny_model: Path) -> None:
    found = json.loads(run("reproduce", "esa:table5", "--model", tiny_model, "--dry-run", "--json").stdout)
    assert found["cells"] is None
    assert found["commands"][0].startswith("lce eval run --task pairs,several_queries --lengths 256,1024 --samples 20")
    assert not found["same_measurement"]
    text = run("reproduce", "dca:table4", "--model", tiny_model, "--dry-run").stdout
    assert "its numbers, ChunkLlama: tpo 57.62, quality 35.14, coursera 32.12, sci_fi 61.72" in text
    assert "another measurement than the paper's: tasks made here; --data takes your copy of L-Eval" in text


def test_what_cannot_run_is_refused_before_any_output(tiny_model: Path, tmp_path: Path) -> None:
    table = ("reproduce", "longheads:table4", "--model", tiny_model)
    assert_error(run("reproduce", "longheads:table44"), 2, "did you mean 'longheads:table4'?")
    assert_error(run(*table, "-o", "sinks=3"), 2, "no row of longheads:table4 has this knob")
    assert_error(run("reproduce", "dca:figure5", "--model", tiny_model, "--data", "x"), 2, "reads no data")
    assert_error(run(*table, "--lengths", "20"), 2, "length is 20; expected at least")
    assert_error(run(*table, "--lengths", "4k", "--kv-host-budget", "128KiB"), 4, "tokens need")
    assert_error(run("reproduce", "esa:table5", "--model", tiny_model), 2, "lce calibrate --model")
    assert_error(run("reproduce", "dca:table1", "--model", tiny_model, "--data", "missing.txt"), 3, "missing.txt")
    for entry in ("longheads:table1", "longheads:table3", "longheads:table4"):
        kind = {"longheads:table1": ".perplexity", "longheads:table3": ".looks"}.get(entry, "")
        (tmp_path / f"{entry}{kind}").mkdir()
        args = ("reproduce", entry, "--model", tiny_model, "--lengths", "256", "--record", tmp_path / entry)
        assert_error(run(*args), 3, f"{entry}{kind} is a folder")


def test_what_does_not_fit_is_refused_before_texts_are_made(tiny_model: Path) -> None:
    result = run("reproduce", "dca:figure4", "--model", tiny_model, "--lengths", "1000000m", "--quiet")
    assert_error(result, 4, "the longest that fits")
