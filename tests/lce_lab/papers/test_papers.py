"""Every table and figure: its rows, its commands, what it makes of their results, and that it runs at toy size."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

import lce
from lce.errors import UsageError
from lce.methods import make
from lce.methods.lowdim import LearnedFor, LowDimMap, LowDimMaps
from lce.methods.map_file import save_maps
from lce_lab.papers import ENTRIES, Cell, Entry, Printed, Row, Setting, find
from lce_lab.papers.entry import verdict
from lce_lab.papers.measures import WITHIN, Answers, Choices, Perplexity, Published
from tests.checkpoints import save_tiny
from tests.command import ran, run
from tests.lce_lab.eval.published.layouts import write

# One of each kind of measure; the others have the same with other rows, and dca:figure3 measures the machine.
QUICK = ("longheads:table3", "longheads:reach", "dca:table5", "dca:figure2", "dca:figure4", "esa:table5", "esa:figure2")
LENGTHS = {"dca:figure3": "64", "dca:table2": "80"}
TIMED = {"longheads:table5"}  # left out: it measures as dca:figure3 and longheads:figure6 do, in a minute
# Rows of ours whose cells the paper plots alone, has in another table, or does not have.
UNPRINTED = {"longheads:table3": {"random"}, "longheads:figure4": {"LongHeads"}}
UNPRINTED |= {"dca:figure5": {"NTK"}, "dca:figure6": {"RoPE"}}
CHUNKS = Row("chunks", "longheads", {"chunk_size": "W/16", "chunks": 8})
SCALED = Row("scaled", "full", rope="linear")
PRINTED = Printed.read(
    """
    row    | 4k | 10k  | y 4k | z | Avg
    chunks | 64 | >100 | 3.0  | - | 7
    scaled | 65 | 20   | ?    | 1 | 8
    """,
    of="a model",
    window=4096,
    label="x",
)
MEASURE = Answers(("pairs",), called=("x",))
ENTRY = Entry("dca:table0", "", "", (CHUNKS, SCALED), (MEASURE,), (PRINTED,), "scaled", "Avg", (1, 2.5))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer, with maps for `esa`."""
    folder = save_tiny(tmp_path_factory.mktemp("one-layer"), num_hidden_layers=1)
    engine = lce.load(folder)
    maps = LowDimMaps([LowDimMap.unbiased(torch.randn(64, 16), torch.randn(32, 16))])
    learned_for = LearnedFor(engine.setup.fingerprint, 16, 32, engine.window, engine.setup.rope)
    save_maps(maps, folder / "esa_maps.safetensors", learned_for)
    return folder


def reproduced(id: str, model: Path, *options: object) -> dict[str, Any]:
    result = ran("reproduce", id, "--model", model, "--samples", "1", "--quiet", "--json", *options)
    return dict(json.loads(result.stdout))


@pytest.mark.parametrize(
    "id", [pytest.param(id, marks=[pytest.mark.slow] * (id not in QUICK)) for id in ENTRIES if id not in TIMED]
)
def test_every_entry_runs(id: str, model: Path) -> None:
    entry = ENTRIES[id]
    own = ["-o", "low_dim=16"] if any(row.method == "esa" for row in entry.rows) else []
    lengths = ["--lengths", LENGTHS.get(id, "300")] if entry.multiples else []
    found = reproduced(id, model, *lengths, *own)
    assert found["id"] == id
    assert all(command.startswith("lce ") for command in found["commands"])
    assert {row.name for row in entry.rows} <= {cell["row"] for cell in found["cells"]}
    for cell in found["cells"]:
        assert cell["value"] is not None or cell["note"]
        assert cell["low"] is None or cell["low"] <= cell["value"] <= cell["high"]


def test_the_papers_numbers_stand_beside_ours() -> None:
    """A column is a label, a length, or both; `-` and `?` are no numbers."""
    assert [PRINTED.number("chunks", "x", multiple) for multiple in (1, 2.5, 3)] == [64, ">100", None]
    assert [PRINTED.number("chunks", *at) for at in (("y", 1), ("y", 2), ("z", 0), ("Avg", 5))] == [3, None, None, 7]
    assert (PRINTED.number("scaled", "z", 0), PRINTED.number("others", "x", 1)) == (1, None)
    for id in ("dca:figure1", "dca:figure2"):
        cells = reproduced(id, Path("demo"))["cells"]
        assert [(cell["value"], cell["n"]) for cell in cells] == [(1.0, 144)] * len(cells)


def test_verdicts_follow_from_the_papers_cells_and_our_intervals(tiny_model: Path) -> None:
    def judged(label: str, length: int, ours: tuple[float, float, float], base: tuple[float, float, float]) -> str:
        spans = {"chunks": ours, "scaled": base}
        cells = [Cell(name, label, length, mean, low, high) for name, (low, mean, high) in spans.items()]
        return ENTRY.judged(cells, Setting(str(tiny_model)))[0].verdict

    low, high = (0.1, 0.2, 0.3), (0.6, 0.7, 0.8)
    assert [judged("x", 64, *pair) for pair in ((low, high), (high, low))] == ["same direction", "opposite"]
    assert judged("x", 160, high, low) == "same direction", "more than 100 is more than 20"
    assert judged("x", 64, (0.1, 0.2, 0.75), high) == "cannot tell", "the difference may be 0"
    assert judged("x", 128, low, high) == "", "the paper has no such length"
    assert judged("pairs", 160, low, high) == "same direction", "beside the paper's average"
    assert judged("pairs", 64, low, high) == "", "within the window an average of long texts says nothing"


def test_hit_rates_have_intervals_for_a_verdict(tiny_model: Path) -> None:
    """A mean of one text has none, so nothing can be told of it."""

    def hit(mean: float, *span: float) -> Cell:
        one = {"hit1": mean, "hit5": None, "cover": 0.5, "gini": 0.5, "length": 64, "samples": 5}
        found = {**one, "intervals": {"hit1": span} if span else {}}
        cell, missing, *_ = Choices().cells(CHUNKS, [found], Setting(str(tiny_model)))
        assert (cell.label, cell.value, cell.n, missing.value, missing.low) == ("hit@1", mean, 5, None, None)
        return cell

    base = hit(0.2, 0.1, 0.3)
    assert (base.low, base.high, verdict(1, hit(0.9, 0.8, 0.95), base)) == (0.1, 0.3, "same direction")
    assert verdict(1, hit(0.9), base) == "cannot tell"


def test_perplexities_are_compared_window_by_window(tiny_model: Path) -> None:
    """Windows differ by far more than rows do. What three digits do not show is no difference."""

    def row(*losses: float) -> Cell:
        found = {"length": 64, "perplexity": 9.0, "low": 2.0, "high": 40.0, "samples": len(losses), "losses": losses}
        (cell,) = Perplexity().cells(CHUNKS, [found], Setting(str(tiny_model)))
        return cell

    base = row(1.0, 3.0, 2.0)
    cases = {"same direction": row(1.2, 3.25, 2.15), "opposite": row(0.8, 2.75, 1.85)}
    cases["cannot tell"] = row(1.3, 2.9, 2.0)
    assert {verdict(1, cell, base): cell for cell in cases.values()} == cases
    assert verdict(1, row(1.0005, 3.0006, 2.0005), base) == "cannot tell"
    assert verdict(1, row(1.2, 3.25), base) == "cannot tell", "of other windows the wide intervals speak"


def test_printed_averages_are_the_means_of_their_cells() -> None:
    """But for those that the papers print otherwise, which the entries' notes name."""
    others = set()
    for entry in ENTRIES.values():
        for table in entry.printed:
            for name in {"Avg", "Avg.", "Average"} & set(table.columns[1:]):
                for row, cells in table.rows.items():
                    numbers = [x for x in cells if isinstance(x, float)]
                    if len(numbers) == len(cells) and abs(sum(numbers[:-1]) / (len(cells) - 1) - numbers[-1]) > 0.06:
                        others.add((entry.id, table.of, row))
                        assert f"{numbers[-1]:.2f}" in entry.note, (entry.id, name, row)
    assert len(others) == 6


def test_every_row_of_a_table_has_its_cells() -> None:
    """All cells are numbers, bounds, or marks; a row that lce runs and compares stands in a table of the paper."""
    for entry in ENTRIES.values():
        names = {row.name for row in entry.rows}
        assert entry.baseline in names | {""}
        for table in entry.printed:
            assert len({table.of for table in entry.printed}) == len(entry.printed), entry.id
            for cells in table.rows.values():
                assert len(cells) == len(table.columns)
                odd = [x for x in cells if not (isinstance(x, float) or re.fullmatch(r"[<>][\d.]+|OOM|[-?]", x))]
                assert odd == [], entry.id
        printed = {row for table in entry.printed for row in table.rows}
        assert not printed or names - printed <= UNPRINTED.get(entry.id, set()), entry.id


def test_knobs_follow_the_window_and_the_users_fill_in_the_rest(tiny_model: Path) -> None:
    setting = Setting(str(tiny_model), knobs={"chunks": "4", "longheads.share": "group", "eps": "1"})
    assert setting.method(CHUNKS) == make("longheads", {"chunk_size": 4, "chunks": 8, "share": "group"})
    wide = Setting(str(tiny_model), loading={"device": "auto", "window": 256, "spill_dir": "a b"}, record="a b")
    knobs, loading = "-o chunk_size=16 -o chunks=8", "--window 256 --spill-dir 'a b'"
    assert " ".join(wide.options(CHUNKS, 300)) == f"--model {tiny_model} --method longheads {knobs} {loading}"
    assert wide.recorded(".looks") == ["--record", "'a b.looks'"]


def test_rows_that_scale_rope_have_a_command_a_length(tiny_model: Path) -> None:
    setting = Setting(str(tiny_model), samples=2)
    assert setting.scaling(SCALED, 64) == {}
    made = "lce eval run --task pairs --lengths {} --samples 2 --seed 0 --model {} --method {}"
    assert ENTRY.commands(setting) == [
        made.format("64,160", tiny_model, "longheads -o chunk_size=4 -o chunks=8"),
        made.format("64", tiny_model, "full"),
        made.format("160", tiny_model, "full --rope linear --rope-factor 2.5"),
    ]
    assert all("--longest 160" in command for command in Perplexity().commands(SCALED, [64, 160], setting))
    (command,) = MEASURE.commands(Row("fixed", "full", rope="yarn", factor=4.0), [64, 160], setting)
    assert command == made.format("64,160", tiny_model, "full --rope yarn --rope-factor 4.0")


def test_what_full_attention_reaches_is_asked_once(tiny_model: Path) -> None:
    asked = []
    cell = {"task": "pairs", "length": 64, "samples": 2, "mean": 0.5, "low": 0.1, "high": 0.9, "interval": "Wilson"}
    cell |= {"read_bytes": None, "prompt_tokens": None, "chance": 0.5, "ceiling": False}

    def answer(command: str, _: int) -> list[dict[str, Any]]:
        asked.append(command)
        return [{**cell, "ceiling": len(asked) == 1}, cell]

    cells = list(ENTRY.run(Setting(str(tiny_model)), answer))
    assert ["--no-ceiling" in command for command in asked] == [False, True, True]
    assert [(x.row, x.label, x.paper) for x in cells[:2]] == [(WITHIN, "x", {}), ("chunks", "x", {"a model": 64})]
    assert cells[0].note.startswith("tells methods apart nowhere: `full` scores 0.50")


def test_the_users_data_takes_the_place_of_the_nearest_measure(model: Path, tmp_path: Path) -> None:
    """Prompts are cut to the paper's lengths, if it has any, or to the user's; a row's scaling is the paper's."""
    entry, theirs = find("esa:table5"), Setting(str(model), data=[str(tmp_path)], limit=1)
    assert (entry.is_same(Setting(str(model))), entry.is_same(theirs)) == (False, True)
    assert entry.difference(theirs) == f"the paper's data, in {tmp_path}"
    for task in ("math_find", "passkey"):
        write(tmp_path, "infinitebench", task)
    measure = Published("infinitebench", ("passkey", "math_find"))
    (command,) = measure.commands(CHUNKS, [0], theirs)
    made = f"lce eval published infinitebench --data {tmp_path} --samples 1 --task passkey,math_find --model {model} "
    assert command.startswith(made)
    found = json.loads(run(*shlex.split(command)[1:], "--json", "--quiet").stdout)
    cells = list(measure.cells(CHUNKS, found, theirs))
    assert [(cell.label, cell.value) for cell in cells] == [(each["task"], each["score"]) for each in found]
    cut = Published("infinitebench", ("passkey",), cuts=(4, 8), variant="gpt4")
    assert [command.count("--prompts gpt4") for command in cut.commands(CHUNKS, [0], theirs)] == [1, 1]
    assert "--max-length 512" in cut.commands(CHUNKS, [0], theirs)[1]
    needles = find("esa:table4")
    assert not needles.is_same(theirs)
    assert "another measurement than the paper's: NeedleBench V2" in needles.difference(theirs)
    scaled = find("esa:table2").commands(Setting(str(model), data=[str(tmp_path)]))
    factors = [command.partition("--rope")[2] for command in scaled[1:3]]
    assert factors == [" ntk --rope-factor 25.0", " yarn --rope-factor 25.0"]
    (command,) = measure.commands(CHUNKS, [0], Setting(str(model), data=["x"], lengths=(40,)))
    assert "--max-length 40" in command


def test_a_record_is_resumed(tiny_model: Path, tmp_path: Path) -> None:
    args = ("dca:figure4", tiny_model, "--lengths", "300", "--record", tmp_path / "answers")
    first = reproduced(*args)
    (ceiling,) = (cell for cell in first["cells"] if cell["row"] == WITHIN)
    note = "not within the window: passkey_published: "
    assert (ceiling["value"], ceiling["note"][: len(note)]) == (None, note), "it has no room"
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert (set(files), reproduced(*args)) == ({"answers", "answers.perplexity"}, first)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files


def test_what_no_row_can_use_is_refused(tiny_model: Path) -> None:
    ENTRY.check(Setting(str(tiny_model), knobs={"placement": "true", "longheads.rank": "last"}))
    wrong = {"esa.eps": "does not run 'esa'", "longheads.rnak": "did you mean 'rank'", "rank": "rank=best"}
    for knobs, words in (({knob: "best"}, words) for knob, words in wrong.items()):
        with pytest.raises(UsageError, match=words):
            ENTRY.check(Setting(str(tiny_model), knobs=knobs))
    with pytest.raises(UsageError, match="has no lengths"):
        find("dca:figure1").check(Setting(str(tiny_model), lengths=[64]))
