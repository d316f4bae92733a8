"""`lce reproduce`: the list, what it prints of an entry, and what it refuses before any work."""

import json
from pathlib import Path

from lce_lab.papers import ENTRIES
from tests.command import assert_error, ran, run


def test_without_an_id_all_are_listed() -> None:
    listed = ran("reproduce").stdout
    assert all(f"  {id} " in listed for id in ENTRIES)
    assert [entry["id"] for entry in json.loads(run("reproduce", "--json").stdout)] == list(ENTRIES)


def test_an_entry_as_a_table(tiny_model: Path) -> None:
    result = ran("reproduce", "dca:table1", "--model", tiny_model, "--lengths", "64,128", "--samples", "2", "--quiet")
    head, _, rest = result.stdout.partition("| row | measured |")
    table, _, verdicts = f"| row | measured |{rest}".partition("\nBeside RoPE, is the difference that of the paper?\n")
    assert head.startswith("dca:table1: perplexity by length")
    assert "the paper (DCA, arXiv:2402.17463): PG19" in head
    assert "| the paper: Llama 3 8B | perplexity 4k | perplexity 8k |" in head
    assert "| CLEX-16k 7B | 8.84 | 7.66 | 7.43 | 7.57 | 8.73 |" in head
    assert "  lce eval perplexity --text FILE --lengths 64,128 --windows 2 --scored all" in head
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert rows[0] == ["row", "measured", "length", "the paper", "here", "95% interval", "of"]
    assert [row[:4] for row in rows[2:4]] == [
        ["RoPE", "perplexity", "64", "Llama 2 7B 7.87; Llama 3 8B 8.71; Llama 3 70B 5.16"],
        ["RoPE", "perplexity", "128", "Llama 2 7B >100; Llama 3 8B 78.88; Llama 3 70B >100"],
    ]
    assert len(rows) == 2 + 6 * 2
    assert [line.split(" | ")[0] for line in verdicts.splitlines()[3:]] == [
        f"| {name}" for name in ("ReRoPE", "PI", "NTK", "NTK-YaRN", "ChunkLlama")
    ]


def test_a_dry_run_measures_nothing(tiny_model: Path) -> None:
    found = json.loads(run("reproduce", "esa:table5", "--model", tiny_model, "--dry-run", "--json").stdout)
    assert found["cells"] is None
    assert found["commands"][0].startswith("lce eval run --task pairs,several_queries --lengths 256,1024 --samples 20")
    assert not found["same_measurement"]
    text = run("reproduce", "dca:table4", "--model", tiny_model, "--dry-run").stdout
    assert "| ChunkLlama | 57.62 | 35.14 | 32.12 | 61.72 | 46.64 |" in text
    assert "another measurement than the paper's: tasks made here; --data takes your copy of L-Eval" in text


def test_sizes_are_a_paper_s_whatever_the_window(tiny_model: Path) -> None:
    """ESA attends 128, 2,048 and 4,096 tokens with every model."""
    args = ("reproduce", "esa:table1", "--model", tiny_model, "--sizes", "8k", "--dry-run", "--json")
    commands = json.loads(run(*args).stdout)["commands"]
    assert commands[-1].endswith("--method esa -o local=4096 -o top_k=2048")
    assert commands[3].endswith("--method lm_infinite -o sinks=128 -o local=6144")


def test_a_table_that_is_not_measured_is_printed() -> None:
    found = run("reproduce", "dca:table5")
    assert (found.exit_code, "commands:" in found.stdout) == (0, False)
    assert "| ChunkLlama2 7B, worst (BM25) | 28.4 | 35.9 | 14.3 |" in found.stdout


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
