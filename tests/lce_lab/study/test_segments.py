"""Choices in few bytes come out as they went in, and spans as runs mean what they say."""

import numpy as np
import pytest
import torch

from lce_lab.study import segments
from lce_lab.study.segments import RunChoices, span_runs


def unpacked(choices: RunChoices) -> torch.Tensor:
    """`[queries, layers, choosers, K]`, -1 for none."""
    parts = []
    for start, stop, packed in choices.segments():
        x = np.where(packed == np.iinfo(packed.dtype).max, -1, packed.astype(np.int64))
        parts.append(np.broadcast_to(x, (stop - start, *x.shape[1:])))
    return torch.from_numpy(np.concatenate(parts))


def test_choices_come_out_as_they_went_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 100)  # several segments a block
    choices, found = RunChoices(), []
    for start, stop, k in ((0, 8, 0), (8, 40, 3), (40, 41, 3), (41, 42, 5)):
        choices.begin(start, stop)
        chosen = torch.randint(-1, 40, (4, stop - start, k))
        for layer in (1, 3):
            choices.add(layer, chosen + (chosen >= 0) * layer, None, 2)
        wide = torch.nn.functional.pad(chosen, (0, 5 - k), value=-1)
        found.append(torch.stack([wide + (wide >= 0) * layer for layer in (1, 3)]).permute(2, 0, 1, 3))
    assert (choices.layers, choices.sizes()) == ([1, 3], (4, 5, 16))
    assert torch.equal(unpacked(choices), torch.cat(found))
    stops = [(start, stop) for start, stop, _ in choices.segments()]
    assert (stops[0][0], stops[-1]) == (0, (41, 42))
    assert [a for a, _ in stops[1:]] == [b for _, b in stops[:-1]], "every query once, in order"
    assert max(packed.nbytes for _, _, packed in choices.segments()) <= 100


def test_what_is_shared_is_kept_once() -> None:
    choices = RunChoices()
    choices.begin(0, 6)
    choices.add(0, torch.tensor([[[3, 70_000]]]).expand(4, 6, 2), None, 2)
    assert choices.blocks[0].choices[0].shape == (1, 1, 2)
    choices.begin(6, 7)
    choices.add(0, torch.tensor([[[1, 2]], [[1, 2]], [[0, 5]], [[0, 5]]]), None, 2)
    assert choices.blocks[1].choices[0].shape == (1, 2, 2), "a chooser a KV head"
    assert choices.sizes() == (2, 2, 32)
    assert unpacked(choices)[-1, 0].tolist() == [[1, 2], [0, 5]]
    assert unpacked(choices)[0, 0].tolist() == [[3, 70_000]] * 2


def test_a_block_that_is_read_again_takes_the_place_of_the_first() -> None:
    choices = RunChoices()
    for start, stop in ((0, 4), (4, 8), (2, 6)):
        choices.begin(start, stop)
    assert [(block.start, block.stop) for block in choices.blocks] == [(2, 6)]


def test_runs_of_spans() -> None:
    own = [[[0, 2], [query // 4 * 4, query + 1]] for query in range(4, 9)]  # two sinks, and the own chunk of 4
    expected = [[4, 8, [[0, 0, 2, 0], [4, 0, 5, 1]]], [8, 9, [[0, 0, 2, 0], [8, 0, 9, 0]]]]
    assert span_runs([(4, own[:3]), (7, own[3:])]) == expected
    assert span_runs([(8, [*own[4:], [[5, 10]], [[6, 11]]])]) == [expected[1], [9, 11, [[5, 1, 10, 1]]]]


def test_layers_that_always_attend_the_same_are_together() -> None:
    choices = RunChoices()
    for start in (0, 2):
        choices.begin(start, start + 2)
        for layer, spans in enumerate(([[[0, 1]]] * 2, [[[0, 1 + start]]] * 2, [[[0, 1]]] * 2, None)):
            choices.add(layer, None, spans)
    assert choices.always() == [
        {"layers": [0, 2], "runs": [[0, 4, [[0, 0, 1, 0]]]]},
        {"layers": [1], "runs": [[0, 2, [[0, 0, 1, 0]]], [2, 4, [[0, 0, 3, 0]]]]},
    ]
