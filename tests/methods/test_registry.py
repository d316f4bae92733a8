"""Methods by name, knobs from text, and methods of other packages."""

import re
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

import lce
from lce.errors import USER_MODULE
from lce.methods import ESA, Full, LongHeads, Method, SelfExtend, available, find, from_file, make, register, registry
from lce.methods.registry import as_method
from tests.methods.user_file import TEXT, mine

__all__ = ["mine"]


@dataclass(frozen=True)
class Knobbed(Full):
    """A knob of every type."""

    count: int = 3
    share: float = 0.5
    flag: bool = False
    maybe: int | None = None
    word: str = "a"
    level: Literal[1, 2] = 1


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Offers classes of this file through the entry-point group, as an installed package would."""

    def offer(**classes: str) -> None:
        def plugins(group: str) -> dict[str, EntryPoint]:
            assert group == registry.ENTRY_POINTS
            return {name: EntryPoint(name, f"{__name__}:{value}", group) for name, value in classes.items()}

        monkeypatch.setattr(registry, "plugins", plugins)
        monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))

    return offer


def test_knobs_may_be_text_or_values() -> None:
    assert make("longheads", {"chunk_size": "128", "keep_first": "no", "share": "group"}) == make(
        "longheads", {"chunk_size": 128, "keep_first": False, "share": "group"}
    )
    assert make("longheads") == LongHeads()
    assert make("longheads", {"chunks": "none"}).chunks is None


def test_a_package_may_bring_a_method(offered: Any) -> None:
    offered(knobbed="Knobbed")
    assert "knobbed" in lce.methods.available()
    knobs = {"count": "7", "share": "0.25", "flag": "true", "maybe": "2", "word": "b", "level": "2"}
    assert make("knobbed", knobs) == find("knobbed")(count=7, share=0.25, flag=True, maybe=2, word="b", level=2)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"chunksize": 3}, "no option 'chunksize'; valid, with defaults: chunk_size=none, chunks=none, placement=side"),
        ({"chunk_size": "many"}, "chunk_size=many is not a whole number"),
        ({"chunk_size": 1.5}, "chunk_size=1.5 is not"),
        ({"chunk_size": True}, "chunk_size=True is not"),
        ({"keep_first": "perhaps"}, "keep_first=perhaps is not true or false"),
        ({"share": "all"}, "share=all is not one of head, group, layer"),
    ],
)
def test_wrong_knobs_are_explained(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(lce.UsageError, match=message):
        make("longheads", knobs)


def test_a_knob_may_be_a_number_or_a_word() -> None:
    assert make("self_extend", {"group": "auto"}) == SelfExtend(group="auto") == as_method(SelfExtend(group="auto"))
    assert make("self_extend", {"group": "4"}) == make("self_extend", {"group": 4}) == SelfExtend(group=4)
    for value in ("fewest", "none", None, 2.5, True):
        with pytest.raises(lce.UsageError, match=r"group=.* is not a .* or auto; default group=8"):
            make("self_extend", {"group": value})


@pytest.mark.parametrize("name", [name for name in available() if find(name).presets])
def test_a_preset_sets_knobs_that_others_override(name: str) -> None:
    cls = find(name)
    for preset, knobs in cls.presets.items():
        assert make(name, {"preset": preset}) == cls(**knobs)
        first = next(iter(knobs))
        assert make(name, {first: "7", "preset": preset}) == cls(**{**knobs, first: 7})


def test_an_unknown_preset_gets_the_nearest() -> None:
    with pytest.raises(lce.UsageError, match="'esa' has no preset 'papre'; did you mean 'paper'"):
        make("esa", {"preset": "papre"})
    for other in ("\x1b[2J" * 1000, 3):
        with pytest.raises(lce.UsageError, match="valid: paper") as caught:
            make("esa", {"preset": other})
        assert str(caught.value).isprintable()
    with pytest.raises(lce.UsageError, match="no option 'preset'"):
        make("full", {"preset": "paper"})


def test_names_that_are_wrong_or_taken_are_refused(offered: Any) -> None:
    offered(wrong="pytest", gone="Nothing")
    for name, message in (
        ("longhead", "did you mean 'longheads'"),
        ("wrong", r"expected a subclass of lce\.Method"),
        ("gone", "cannot be imported"),
    ):
        with pytest.raises(lce.UsageError, match=message):
            find(name)
    with pytest.raises(lce.UsageError, match="two methods are called 'full'"):
        register("full")(Knobbed)
    assert find("full") is Full


def test_methods_are_values() -> None:
    assert repr(LongHeads(chunk_size=8)).startswith("LongHeads(chunk_size=8")
    assert isinstance(LongHeads(), Method)
    with pytest.raises(AttributeError):
        LongHeads().chunk_size = 3  # type: ignore[misc]


@pytest.mark.parametrize("value", [10**400, "1e999", "nan", "half"])
def test_a_number_that_is_none_is_refused(offered: Any, value: object) -> None:
    offered(knobbed="Knobbed")
    with pytest.raises(lce.UsageError, match=r"share=.* is not a (finite )?number; default share=0.5"):
        make("knobbed", {"share": value})


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (LongHeads, "method is the class LongHeads; expected an instance: LongHeads()"),
        (3, "method is 3; expected a name, or an instance of lce.Method"),
        (LongHeads(placement="sideways"), "longheads: placement is 'sideways'; expected one of side_by_side, true"),  # type: ignore[arg-type]
        (LongHeads(share="Layer"), "share is 'Layer'; expected one of head, group, layer"),  # type: ignore[arg-type]
        (LongHeads(chunk_size=16.0), "chunk_size is 16.0; expected a value of type int"),  # type: ignore[arg-type]
        (LongHeads(chunk_size="16"), "chunk_size is the text '16'; expected int"),  # type: ignore[arg-type]
        (LongHeads(chunk_size=True), "chunk_size is True; expected a value of type int"),
        (SelfExtend(group="fewest"), "group is 'fewest'; expected a whole number or auto"),  # type: ignore[arg-type]
        (SelfExtend(group="8"), "group is the text '8'; expected int"),  # type: ignore[arg-type]
        (SelfExtend(group=None), "group is None; expected a value of type int or auto"),  # type: ignore[arg-type]
    ],
    ids=str,
)
def test_knobs_of_an_instance_are_checked(method: Any, message: str) -> None:
    with pytest.raises(lce.UsageError, match=re.escape(message)):
        as_method(method)


def test_instances_that_are_right_pass() -> None:
    for method in (LongHeads(chunk_size=8), ESA(maps="maps.safetensors"), ESA(maps=None), Knobbed(count=3, share=1)):
        assert as_method(method) is method
    assert as_method("full") == Full()
    checked: Any = as_method(LongHeads(keep_first=0, fix_layer=1))  # type: ignore[arg-type]
    assert (checked.keep_first, checked.fix_layer) == (False, True)
    assert type(checked.keep_first) is bool


class NoText:
    def __repr__(self) -> str:
        raise RuntimeError


LONG: list[Any] = ["x" * 5000, "a\nb", "\ud800", torch.zeros(3, 3), np.array([1, 2]), NoText(), {}]


def test_whole_numbers_have_a_limit() -> None:
    for number in (10**30, 1 << 40, -(1 << 40)):
        for call in (lambda n: make("longheads", {"chunks": n}), lambda n: as_method(LongHeads(chunks=n))):
            with pytest.raises(lce.UsageError, match="a whole number of 2147483648 or less"):
                call(number)


@pytest.mark.parametrize("name", ["count", "share", "flag", "maybe", "word", "level"])
@pytest.mark.parametrize("value", LONG, ids=lambda value: type(value).__name__)
def test_whatever_a_knob_is_given_is_told_in_a_line(offered: Any, name: str, value: Any) -> None:
    offered(knobbed="Knobbed")
    for call in (lambda: make("knobbed", {name: value}), lambda: as_method(Knobbed(**{name: value}))):
        if isinstance(value, str) and name == "word":
            call()
            continue
        with pytest.raises(lce.UsageError) as error:
            call()
        assert str(error.value).isprintable()
        assert len(str(error.value)) < 500


def test_a_method_without_a_record_of_its_knobs_is_refused() -> None:
    class Bare(Full):
        def __init__(self, knob: int) -> None:
            self.knob = knob

    with pytest.raises(lce.UsageError, match="method Bare has an __init__ of its own; expected a frozen dataclass"):
        as_method(Bare(3))


def test_a_file_is_a_method(mine: Path) -> None:
    q = torch.randn(2, 40, 4)
    out = lce.methods.run(str(mine), q, q, q, window=16)
    assert torch.equal(out, lce.methods.run(from_file(mine)(), q, q, q, window=16))
    assert from_file(mine) is find("mine") is type(lce.load("demo", str(mine)).method)
    assert make("mine", {"factor": "2"}) == from_file(str(mine))(factor=2.0)
    mine.write_text(TEXT.replace("1.0", "3.0"))
    assert from_file(mine)().factor == make("mine").factor == 3.0


@pytest.mark.parametrize(
    ("text", "message"),
    {
        "\nx = unknown": r"mine.py, line 2: NameError: name 'unknown' is not defined; correct the file",
        "def f(:": r"mine.py, line 1: SyntaxError: invalid syntax; correct",
        "import sys\nsys.exit(0)": "mine.py, line 2: SystemExit: 0; correct",
        "import no_such_module": "mine.py, line 1: ModuleNotFoundError: No module named 'no_such_module'; correct",
        "\0": "mine.py: source code string cannot contain null bytes; correct",
        "": r"mine.py registers no method; expected one class with @lce.methods.register\(NAME\)",
        TEXT + TEXT.partition("annotations")[2].replace('"mine"', '"two"'): "mine.py registers mine and two; expected",
        TEXT.replace('"mine"', '"full"'): "mine.py, line 6: UsageError: two methods are called 'full'",
    }.items(),
)
def test_a_file_that_fails_is_told_by_its_line_and_leaves_nothing(mine: Path, text: str, message: str) -> None:
    kept = from_file(mine)
    before = available(), {name for name in sys.modules if name.startswith(USER_MODULE)}
    mine.write_text(text)
    with pytest.raises(lce.UsageError, match=message):
        from_file(mine)
    assert (available(), {name for name in sys.modules if name.startswith(USER_MODULE)}) == before
    assert find("mine") is kept


def test_a_name_from_elsewhere_runs_no_file(mine: Path) -> None:
    """Names of context files and of requests come here."""
    mine.write_text("raise SystemExit('it was run')")
    for call in (find, make):
        with pytest.raises(lce.UsageError, match="a file of yours is run by lce"):
            call(str(mine))
