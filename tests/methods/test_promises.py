"""A promise holds until a subclass overrides a hook on which it stands, and again where the subclass gives it."""

from typing import Any

from lce.methods import Full, LongHeads, promises_of


def other(*args: Any) -> Any:
    """A hook of one's own."""


class Attends(Full):
    attend = other


class AttendsAsBefore(Full, promises={"recorded": ("attend",)}):
    attend = other


class After(AttendsAsBefore):
    keep = other


class Again(After):
    attend = other


class Block(LongHeads):
    """Overrides nothing that a promise stands on."""

    block = other


class Mixin(Block):
    choose = other


class Mixed(Mixin, LongHeads):
    pass


def test_what_is_overridden_is_not_promised() -> None:
    assert "counted" in promises_of(Full)
    assert not promises_of(Attends) & {"alike", "counted", "recorded", "noted", "kept", "by_head", "plain"}


def test_a_promise_stands_on_the_hooks_that_its_class_names() -> None:
    assert promises_of(AttendsAsBefore) == {"recorded"}
    assert promises_of(After) == {"recorded"}
    assert promises_of(Again) == set()


def test_other_hooks_and_bases_change_nothing() -> None:
    assert promises_of(Block) == promises_of(LongHeads)
    assert promises_of(Mixed) == promises_of(Mixin)
    assert "dense" in promises_of(LongHeads)
    assert "dense" not in promises_of(Mixin)
