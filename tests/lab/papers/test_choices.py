"""What a method chooses is measured as `lce eval selection` measures it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from lce.errors import UsageError
from lce.lab.papers import Arm, Setting
from lce.lab.papers.choices import Chosen, TokenRecall
from tests.command import run


def selected(command: str) -> dict[str, Any]:
    """What the printed command measures, at one length."""
    result = run(*shlex.split(command)[1:], "--json", "--quiet")
    assert result.exit_code == 0, result.stderr
    (found,) = json.loads(result.stdout)
    return dict(found)


def test_chosen_chunks(tiny_model: Path) -> None:
    setting, arm = Setting(str(tiny_model), samples=2), Arm("LongHeads", "longheads", {"rank": "last"})
    cells = list(Chosen().cells(arm, [300], setting))
    found = selected(Chosen().command(arm, [300], setting))
    assert [cell.label for cell in cells] == ["hit@1", "hit@5", "cover", "Gini"]
    assert [cell.value for cell in cells] == [found[name] for name in ("hit1", "hit5", "cover", "gini")]


def test_tokens_by_low_dim_scores(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("The old miller took the bread out of the oven. " * 60, encoding="utf-8")
    read = {"read_text": lambda name: Path(name).read_text("utf-8").strip()}
    arm = Arm("PCA", "esa", {"compress": "pca", "low_dim": 4, "sinks": 4})
    setting = Setting(str(tiny_model), data=[str(tmp_path / "text")], tools=read)
    recall, layers = TokenRecall().cells(arm, [300], setting)
    assert recall.value == pytest.approx(selected(TokenRecall().command(arm, [300], setting))["found"])
    assert (layers.label, layers.n) == ("layers above 0.9", 2)
    kept = Setting(str(tiny_model), data=setting.data, tools=read, record=str(tmp_path / "kept"))
    assert list(TokenRecall().cells(arm, [300], kept)) == [recall, layers]
    assert len((tmp_path / "kept.looks").read_text().splitlines()) == 1
    with pytest.raises(UsageError, match="no text has 9,000 tokens"):
        TokenRecall().check([arm], [300, 9000], setting)
    (short,) = TokenRecall().cells(arm, [40], setting)
    assert (short.value, short.note) == (None, "all tokens are chosen; take a longer text")
