"""A promise holds until a subclass overrides a hook on which it stands, and again where the subclass gives it."""

from typing import Any

from torch import Tensor

from lce.methods import Full, LongHeads, promises_of


class Attends(Full):
    def attend(self, q: Tensor, cache: Any, step: Any) -> Tensor:
        return super().attend(q, cache, step)


class AttendsAsBefore(Full, promises={"recorded": ("attend",)}):
    def attend(self, q: Tensor, cache: Any, step: Any) -> Tensor:
        return super().attend(q, cache, step)


class After(AttendsAsBefore):
    def keep(self, *args: Any) -> None:
        super().keep(*args)


class Again(After):
    def attend(self, q: Tensor, cache: Any, step: Any) -> Tensor:
        return q


class Block(LongHeads):
    """Overrides nothing that a promise stands on."""

    @property
    def block(self) -> int:
        return 64


class Mixin(Block):
    def choose(self, *args: Any) -> Tensor | None:
        return super().choose(*args)


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
