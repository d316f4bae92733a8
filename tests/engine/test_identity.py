"""What engine a context fits: it is written down as JSON, and a mismatch says what differs and which option helps."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lce
from lce.engine.identity import Identity, knobs_of
from lce.errors import DataError
from lce.methods import Full, LongHeads
from lce.methods.lowdim import LowDimMap, LowDimMaps
from lce.methods.registry import make
from lce.models.config import RopeConfig

ONE = Identity(lambda: "abc", LongHeads(chunk_size=16, chunks=4), 512, RopeConfig(), torch.float32, 300)
PATH = Path("document.lce")


@dataclass(frozen=True)
class WithMaps(Full):
    maps: Any = None


def said(theirs: object, ours: Identity = ONE) -> str:
    with pytest.raises(DataError) as caught:
        ours.check(PATH, theirs)
    return str(caught.value)


def test_the_same_engine_is_accepted_and_its_facts_are_json() -> None:
    facts = json.loads(json.dumps(ONE.facts))
    assert facts == ONE.facts
    ONE.check(PATH, facts)
    replace(ONE, method=LongHeads(chunk_size=16, chunks=4)).check(PATH, facts)


@pytest.mark.parametrize("name", lce.methods.available())
def test_knobs_make_the_method_again(name: str) -> None:
    needs = {"esa": {"compress": "pca"}}.get(name, {})
    method = make(name, needs).resolve(256)
    facts = replace(ONE, method=method).facts
    assert make(facts["method"], knobs_of(json.loads(json.dumps(facts)))) == method


def test_a_mismatch_says_what_differs_and_which_option_helps() -> None:
    cases = {
        "another model: load that one, or prefill the text again": replace(ONE, fingerprint=lambda: "other"),
        "another method, full; this engine has longheads: give --method full, or": replace(ONE, method=Full()),
        "longheads chunk_size=32 chunks=8; this engine has chunk_size=16 chunks=4: give -o chunk_size=32 -o chunks=8": (
            replace(ONE, method=LongHeads(chunk_size=32, chunks=8))
        ),
        "another window, 256; this engine has 512: give --window 256": replace(ONE, window=256),
        "kind=linear factor=2.0; this engine has kind=none factor=1.0: give --rope linear --rope-factor 2.0": (
            replace(ONE, rope=RopeConfig("linear", factor=2.0))
        ),
        "theta=5.0; this engine has theta=10000.0: load the model with": replace(ONE, rope=RopeConfig(theta=5.0)),
        "another dtype, bfloat16; this engine has float32: give --dtype bfloat16": replace(ONE, dtype=torch.bfloat16),
    }
    for words, other in cases.items():
        assert words in said(other.facts), words
    rope = RopeConfig("linear", factor=2.0)
    assert "give --rope none, or" in said(ONE.facts, replace(ONE, rope=rope))
    assert said(ONE.facts | {"window": 1}, ONE).startswith("document.lce was made with another window")


def test_other_numbers_of_the_same_value_differ() -> None:
    """So that nothing is compared loosely: a file says exactly what an engine would write."""
    for changed in ({"chunk_size": 16.0}, {"chunk_size": True}, {"chunk_size": "16"}, {"keep_first": 1}):
        assert "another method" in said(ONE.facts | {"knobs": ONE.facts["knobs"] | changed})


def test_a_knob_from_a_file_is_its_contents(tmp_path: Path) -> None:
    """The file may have moved; its path is only where to look for it."""
    here = tmp_path / "maps.safetensors"
    here.touch()
    layers = [[LowDimMap.unbiased(torch.full((2, 3), x), torch.ones(2, 3))] for x in (1.0, 2.0)]
    sources = ((0, str(here)), (0, "gone"), (1, str(here)))
    one, moved, other = (replace(ONE, method=WithMaps(maps=LowDimMaps(layers[i], at))) for i, at in sources)
    moved.check(PATH, one.facts)
    one.check(PATH, moved.facts)
    assert f"give -o maps={here}" in said(other.facts, moved) or "maps=" in said(other.facts, moved)
    assert knobs_of(one.facts) == {"maps": str(here)}
    assert knobs_of(moved.facts) == {}, "no text can give it"
    assert knobs_of({}) == knobs_of({"knobs": 3}) == {}


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
TREES = st.recursive(LEAVES, lambda x: st.lists(x) | st.dictionaries(st.text(), x))


@given(theirs=TREES | st.dictionaries(st.sampled_from(sorted(ONE.facts)), TREES).map(lambda some: ONE.facts | some))
@settings(max_examples=60, deadline=None)
def test_any_other_identity_is_refused_in_a_line(theirs: object) -> None:
    if theirs == ONE.facts:
        return
    try:
        ONE.check(PATH, theirs)
    except DataError as error:
        text = str(error)
        assert text.isprintable()
        assert len(text) < 600
    else:
        assert isinstance(theirs, dict)
        assert {name: theirs.get(name) for name in ONE.facts} == ONE.facts
