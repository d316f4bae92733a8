"""Streams of pretended GPUs work as late as CUDA's may, and what nothing orders is found."""

from __future__ import annotations

import pytest
import torch

from tests.pretended import Gpus, pretended_gpus

MODES = pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])


@MODES
def test_work_is_done_when_something_waits_for_it(gpus: Gpus, mode: type) -> None:
    with mode():
        side, x = torch.cuda.Stream(), torch.zeros(4, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x[1:3] += 5
            y = x + 1
            done = side.record_event()
            x.mul_(2)
        assert x.inner.tolist() == [0, 0, 0, 0]
        assert y.inner.isnan().all()
        torch.cuda.current_stream().wait_event(done)
        assert y.tolist() == [1, 6, 6, 1]
        assert x.inner.tolist() == [0, 5, 5, 0], "what was queued after the event"
        torch.cuda.synchronize()
        assert x.tolist() == [0, 10, 10, 0]
        torch.cuda.current_stream().wait_stream(side)


def test_streams_wait_for_each_other(gpus: Gpus) -> None:
    one, two, x = torch.cuda.Stream(), torch.cuda.Stream(), torch.zeros(1, device="cuda")
    with torch.cuda.stream(one):
        x.add_(1)
    two.wait_stream(one)
    with torch.cuda.stream(two):
        x.mul_(10)
    two.synchronize()
    assert x.tolist() == [10]
    torch.cuda.current_stream().wait_stream(two)


def test_numbers_come_to_pinned_memory_when_the_cpu_waits(gpus: Gpus) -> None:
    x, target = torch.ones(2, device="cuda"), torch.empty(2, pin_memory=True)
    with gpus.counting() as counts:
        target.copy_(x, non_blocking=True)
        event = torch.cuda.current_stream().record_event()
    assert counts.syncs == 0
    x.add_(1)
    assert target.isnan().all()
    event.synchronize()
    assert target.tolist() == [1, 1]


def test_pinned_memory_must_not_change_under_a_copy() -> None:
    def copy(wait: bool) -> None:
        with pretended_gpus():
            source = torch.ones(2).pin_memory()
            x = source.to("cuda", non_blocking=True)
            if wait:
                torch.cuda.synchronize()
            source.zero_()
            assert x.tolist() == [1, 1]

    copy(wait=True)
    with pytest.raises(AssertionError, match="pinned memory was written"):
        copy(wait=False)


@pytest.mark.parametrize("careful", [None, "record", "wait"])
def test_memory_that_another_stream_uses_must_be_recorded(careful: str | None) -> None:
    def drop() -> None:
        with pretended_gpus():
            side, x = torch.cuda.Stream(), torch.ones(2, device="cuda")
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                y = x + 1
            if careful == "record":
                x.record_stream(side)
            elif careful == "wait":
                torch.cuda.current_stream().wait_stream(side)
            del x
            torch.cuda.current_stream().wait_stream(side)
            assert y.tolist() == [2, 2] or careful is None
            torch.cuda.synchronize()

    if careful is None:
        with pytest.raises(AssertionError, match="record_stream"):
            drop()
    else:
        drop()
