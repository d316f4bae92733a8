"""Measures: the commands that an entry prints give its numbers, and figures of cost and distance are the papers'."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from lce.errors import UsageError
from lce.lab.papers import Arm, Setting, find
from lce.lab.papers.measures import Answers, Perplexity, Speed
from lce.lab.study.explain import explain
from tests.checkpoints import save_tiny
from tests.command import run


def commanded(measure: Answers | Perplexity, arm: Arm, setting: Setting) -> list[float]:
    """What the printed command measures."""
    command = shlex.split(measure.command(arm, setting.lengths, setting))
    result = run(*command[1:], "--json", "--quiet", *["--no-ceiling"] * (command[2] == "run"))
    assert result.exit_code == 0, result.stderr
    return [found.get("mean", found.get("perplexity")) for found in json.loads(result.stdout)]


@pytest.mark.parametrize("arm", [Arm("a", "longheads", {"rank": "last"}), Arm("b", "full", rope="ntk")])
def test_the_commands_measure_the_same(arm: Arm, tiny_model: Path, tmp_path: Path) -> None:
    lengths = [300] if arm.rope else [256, 300]
    (tmp_path / "text").write_text("The old miller took the bread out of the oven. " * 60, encoding="utf-8")
    for measure in (Answers(("pairs", "passkey_published"), "noise"), Perplexity(stride=256)):
        data = [str(tmp_path / "text")] if isinstance(measure, Perplexity) else []
        read = {"read_text": lambda name: Path(name).read_text("utf-8")}
        setting = Setting(str(tiny_model), lengths=lengths, samples=2, data=data, tools=read)
        assert [cell.value for cell in measure.cells(arm, lengths, setting)] == commanded(measure, arm, setting)


def test_a_record_is_resumed(tiny_model: Path, tmp_path: Path) -> None:
    setting = Setting(str(tiny_model), samples=2, record=str(tmp_path / "answers.jsonl"))
    arm = Arm("a", "streaming")
    for measure in (Answers(("pairs",)), Perplexity()):
        first = list(measure.cells(arm, [256], setting))
        files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        assert list(measure.cells(arm, [256], setting)) == first
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files
    assert set(files) == {"answers.jsonl", "answers.jsonl.perplexity"}


def test_the_ceiling_is_full_attention_within_the_window(tiny_model: Path) -> None:
    setting = Setting(str(tiny_model), samples=2, loading={"window": 256})
    (cell,) = Answers(("pairs",)).ceiling([512, 1024], setting)
    assert (cell.row, cell.length <= 256) == ("full, within the window", True)
    assert "tells methods apart nowhere: `full` scores 0.00" in cell.note  # the model is random
    (cell,) = Answers(("several_keys",)).ceiling([512], Setting(str(tiny_model), samples=2))
    assert cell.value is None
    assert cell.note.startswith("not within the window: several_keys: length is")


def test_the_printed_distances_are_ours(tiny_model: Path) -> None:
    for id in ("dca:figure1", "dca:figure2"):
        cells = list(find(id).run(Setting(str(tiny_model), tools={"explain": explain})))
        assert [(cell.value, cell.paper, cell.n) for cell in cells] == [(1.0, 1.0, 144)] * len(cells)
    with pytest.raises(UsageError, match="needs explain"):
        list(find("dca:figure1").run(Setting(str(tiny_model))))


def test_the_figures_of_cost_are_the_papers_for_its_sizes(tmp_path: Path) -> None:
    sizes = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 1}
    model = save_tiny(tmp_path, hidden_size=64, intermediate_size=64, **sizes)
    cells = list(find("esa:equation9").run(Setting(str(model))))
    assert [cell.value for cell in cells] == pytest.approx([cell.paper for cell in cells], abs=5e-5)
    reach = {cell.label: cell.value for cell in find("longheads:reach").run(Setting(str(model)))}
    assert reach == {"chunks": 32 * 32, "tokens": 32 * 32 * 2}  # 32 chunks of 2 tokens


def test_speed_is_seconds_of_a_prefill(tiny_model: Path) -> None:
    asked = []

    def bench(model: str, method: object, **options: object) -> object:
        asked.append((options["lengths"], options["repeats"]))
        return SimpleNamespace(rows=[SimpleNamespace(prefill=SimpleNamespace(median=100.0, low=50.0, high=200.0))])

    setting = Setting(str(tiny_model), samples=3, tools={"bench": bench})
    cells = list(Speed().cells(Arm("DCA", "dca"), [100, 200], setting))
    assert asked == [(100, 3), (200, 3)]
    assert [(cell.low, cell.value, cell.high) for cell in cells] == [(0.5, 1.0, 2.0), (1.0, 2.0, 4.0)]
