"""The example's haystack is what its tool writes."""

from pathlib import Path

import pytest

from tools import make_haystack

HAYSTACK = Path(__file__).parents[2] / "examples" / "haystack.txt"


def test_the_shipped_haystack_is_the_tools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").mkdir()
    make_haystack.main()
    assert (tmp_path / "examples" / "haystack.txt").read_text(encoding="utf-8") == HAYSTACK.read_text(encoding="utf-8")
    n_tokens, key = (int(word) for word in capsys.readouterr().out.replace(";", "").split() if word.isdecimal())
    assert 31_000 < n_tokens <= 32_000
    assert str(key) in HAYSTACK.read_text(encoding="utf-8")
