"""What methods keep besides keys and values: found again as it was written, and only what was committed stays."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lce.cache.method_state import Held, MethodState, OpenChunk, RecentRows, Staged, Summaries, TokenRows
from lce.cache.shared import MemoryFile


def counted(n: int, start: int = 0) -> Tensor:
    """`[2, n, 3]`, the rows of tokens, or of chunks, from `start` on: each filled with its number."""
    return torch.arange(start, start + n).float()[None, :, None].expand(2, n, 3)


def same(ours: MethodState, theirs: MethodState, n_tokens: int) -> bool:
    (mine, number), (its, other) = ours.committed(n_tokens), theirs.committed(n_tokens)
    return number == other and (mine is its if mine is None or its is None else torch.equal(mine, its))


def copied(state: MethodState, n_tokens: int) -> Held:
    tensor, number = state.committed(n_tokens)
    return None if tensor is None else tensor.clone(), number


PASS = st.tuples(st.integers(1, 25), st.booleans(), st.sampled_from(["", "copy", "restore"]))


@given(size=st.integers(1, 9), passes=st.lists(PASS, max_size=20))
@settings(max_examples=80, deadline=None)
def test_an_open_chunk_has_the_committed_tokens_of_its_chunk(size: int, passes: list[tuple[int, bool, str]]) -> None:
    """Driven as a selector does: a pass writes the tokens that it leaves in an incomplete chunk."""
    kept, length = OpenChunk(size, 24), 0
    for n, keep, then in passes:
        stop = length + n
        opened = max(length, stop // size * size)
        if stop // size > length // size and length % size:  # it completes the open chunk, and so reads it
            assert torch.equal(kept.span(length // size * size, length), counted(length % size, length - length % size))
        if opened < stop:
            kept.write(counted(stop - opened, opened + (0 if keep else 1000)), opened)
            assert kept.n_bytes <= kept.most_bytes(stop, n)
        if keep:
            kept.commit()
            length = stop
        else:
            kept.discard()
        if then:
            copy = kept.fork(length, MemoryFile.for_fork) if then == "copy" else OpenChunk(size, 24)
            if then == "restore":
                copy.restore(copied(kept, length))
            assert same(copy, kept, length)
            kept.write(torch.full((2, 1, 3), -1.0), length)  # the one no longer reaches the other
            kept.commit()
            kept = copy
        if length % size:
            assert torch.equal(kept.span(length // size * size, length), counted(length % size, length - length % size))


def test_the_row_of_a_token_whose_index_the_device_knows() -> None:
    """The next chunk takes the memory of a complete one, which a mark keeps as it is."""
    kept = OpenChunk(4, 24)
    assert not kept.has_space(0)
    kept.write(counted(3), 0)
    kept.write_on_device(counted(1, 3), torch.tensor([3]))
    assert torch.equal(kept.span(0, 4), counted(4))
    for start, marked in ((4, False), (8, True)):
        before, mark = kept.memory, kept.mark(start) if marked else None
        rows = kept.span(start - 4, start).clone()
        assert not kept.has_space(start)
        kept.make_space(start)
        assert kept.has_space(start)
        assert (kept.memory is before) == (not marked)
        for i in range(start, start + 4):
            kept.write_on_device(counted(1, i), torch.tensor([i - start]))
        assert torch.equal(kept.span(start, start + 4), counted(4, start))
        if mark is not None:
            assert torch.equal(kept.as_of(mark).span(start - 4, start), rows)
    recent = RecentRows(3, 24)
    assert not recent.has_space(0)
    recent.make_space(0)
    assert not recent.has_space(0), "nothing is known of the rows yet"
    recent.write(counted(2), 0)
    for i in range(2, 12):
        recent.make_space(i)
        assert recent.has_space(i)
        recent.write_on_device(counted(1, i), torch.tensor([i]))
        assert torch.equal(recent.span(max(0, i - 3), i + 1), counted(min(4, i + 1), max(0, i - 3)))
    summaries = Summaries(24, 4)
    summaries.write(counted(5), 0)
    assert (summaries.allocated(9).shape, summaries.allocated(999).shape) == ((2, 9, 3), (2, 16, 3))


@given(data=st.data())
@settings(deadline=None)
def test_a_state_goes_back_to_a_mark(data: st.DataObject) -> None:
    """What it has of the marked tokens is as it was, whatever was written since; `nearest` says how far it can go."""
    size, n_kept = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    text = torch.randn(2, 60, 3)
    kept: dict[str, MethodState] = {
        "rows": TokenRows(12),
        "recent": RecentRows(n_kept, 24),
        "open": OpenChunk(size, 24),
        "staged": Staged(lambda n_tokens, block: 8),
    }

    def read(start: int, stop: int, x: Tensor) -> None:
        for name, state in kept.items():
            if isinstance(state, TokenRows):
                state.write(x[0, start:stop], start)
            elif isinstance(state, RecentRows):
                state.write(x[:, start:stop], start)
            elif isinstance(state, OpenChunk) and (opened := max(start, stop // size * size)) < stop:
                state.write(x[:, opened:stop], opened)
            elif isinstance(state, Staged):
                state.stage(x[0, :stop].sum(dim=0))
            kept[name].commit(stop)

    def has(n: int) -> None:
        assert torch.equal(kept["rows"].committed(n)[0], text[0, :n])
        assert torch.equal(kept["recent"].committed(n)[0][:, -min(n, n_kept) :], text[:, max(0, n - n_kept) : n])
        if n % size:
            assert torch.equal(kept["open"].committed(n)[0][:, : n % size], text[:, n // size * size : n])
        assert torch.equal(kept["staged"].committed(n)[0], text[0, :n].sum(dim=0))

    n = 0
    while n < 40:
        read(n, n := min(40, n + data.draw(st.integers(1, 20))), text)
        marks, stop, wrong = {name: state.mark(n) for name, state in kept.items()}, n, torch.randn(2, 60, 3)
        for _ in range(data.draw(st.integers(0, 3))):
            read(stop, stop := min(60, stop + data.draw(st.integers(1, 15))), wrong)
        kept = {name: state.as_of(marks[name]) for name, state in kept.items()}
        has(n)
        back = data.draw(st.integers(0, n))
        for name, state in kept.items():
            nearest = state.nearest(back, n)
            assert nearest == (n if back == n else nearest) <= back
            assert state.nearest(0, n) == 0
            if nearest and (name == "rows" or (name == "open" and nearest % size)):
                found = state.as_of(state.mark(nearest)).committed(nearest)[0]
                whole = text[0, :nearest] if name == "rows" else text[:, nearest // size * size : nearest]
                assert torch.equal(found if name == "rows" else found[:, : nearest % size], whole)


def test_recent_rows_that_are_made_again_are_named() -> None:
    recent = RecentRows(4, 24, remade=True)
    assert list(recent.missing(0)) == []
    recent.write(torch.zeros(2, 9, 3), 0)
    recent.write(torch.zeros(2, 9, 3), 9)
    assert (list(recent.missing(18)), recent.nearest(5, 18)) == ([], 5)
    back = recent.as_of(recent.mark(5))
    assert (list(back.missing(5)), RecentRows(4, 24).nearest(5, 18)) == ([1, 2, 3, 4], 0)
