"""Every table and figure runs, at toy size, on a tiny random model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import lce
from lce.lab.papers import ENTRIES, Setting
from lce.methods.lowdim import LearnedFor, LowDimMap, LowDimMaps
from lce.methods.map_file import save_maps
from tests.checkpoints import save_tiny
from tests.command import run

# One of each kind of measure; the others have the same with other rows, and dca:figure3 measures the machine.
QUICK = (
    "longheads:table3", "longheads:table6", "longheads:reach", "dca:table3", "dca:figure2", "dca:figure4", "esa:table5",
    "esa:table6", "esa:figure2", "esa:equation9",
)  # fmt: skip
LENGTHS = {"dca:figure3": "64", "dca:table2": "80"}


def knobs(id: str) -> dict[str, str]:
    """Those that fit the model's maps."""
    return {"low_dim": "16"} if any(arm.method == "esa" for arm in ENTRIES[id].arms) else {}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer, with maps for `esa`."""
    folder = save_tiny(tmp_path_factory.mktemp("one-layer"), num_hidden_layers=1)
    engine = lce.load(folder)
    maps = LowDimMaps([LowDimMap.unbiased(torch.randn(64, 16), torch.randn(32, 16))])
    learned_for = LearnedFor(engine.fingerprint, 16, 32, engine.window, engine.rope)
    save_maps(maps, folder / "esa_maps.safetensors", learned_for)
    return folder


@pytest.mark.parametrize("id", sorted(ENTRIES))
def test_every_row_can_run(id: str, model: Path) -> None:
    """Its method is loaded, its samples are made; nothing is asked."""
    entry = ENTRIES[id]
    entry.check(Setting(str(model), lengths=(300,) if entry.multiples else (), samples=1, knobs=knobs(id)))


@pytest.mark.parametrize("id", [pytest.param(id, marks=[pytest.mark.slow] * (id not in QUICK)) for id in ENTRIES])
def test_every_entry_runs(id: str, model: Path) -> None:
    entry = ENTRIES[id]
    options = [word for key, value in knobs(id).items() for word in ("-o", f"{key}={value}")]
    lengths = ["--lengths", LENGTHS.get(id, "300")] if entry.multiples else []
    result = run("reproduce", id, "--model", model, *lengths, "--samples", "1", "--quiet", "--json", *options)
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["id"] == id
    assert all(command.startswith("lce ") for command in found["commands"])
    assert {arm.name for arm in entry.arms} <= {cell["row"] for cell in found["cells"]}
    for cell in found["cells"]:
        assert cell["label"] in {label for measure in entry.measures for label in measure.labels}
        assert cell["value"] is not None or cell["note"]
        assert cell["low"] is None or cell["low"] <= cell["value"] <= cell["high"]
