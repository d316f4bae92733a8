"""Single kernels of decode and prefill, at the sizes of Llama-2-7B, beside PyTorch's own operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_stages.setup import Setup, seconds_of
from lce.attention import Attention, Runs, SlotTurns, Tiles, Turn
from lce.kernels.runtime import launching
from lce.methods.decoding import Span, runs_of

Work = Callable[[], object]
PRODUCTS = {"qkv": (12288, 4096), "out": (4096, 4096), "gate and up": (22016, 4096), "down": (4096, 11008)}
ROWS = (1, 4)
HEADS = {"multi-head": (32, 32), "grouped by 8": (32, 4)}
LENGTHS = (4096, 32768, 131072)
CHUNKS, CHUNK = 16, 256  # of longheads
QUERIES, SEEN = 2048, 32768  # of prefill
BEYOND_CACHE = 1 << 28  # bytes that a measurement reads, too many for the GPU's cache


def run(setup: Setup) -> None:
    for name, measure in (("products", products), ("decode", decode), ("prefill", prefill)):
        with setup.record.attempt(f"kernels: {name}") as cell, torch.inference_mode():
            for label, figures in measure(setup):
                cell[label] = figures
                setup.record.write()


def seconds_each(setup: Setup, works: list[Work]) -> float:
    """Return the seconds of each work; on a GPU from a graph of all, so that launch time does not count."""
    if not setup.cuda:
        return seconds_of(setup, lambda: [work() for work in works], 1) / len(works)
    for work in works[:2]:
        work()
    setup.synchronize()
    graph = torch.cuda.CUDAGraph()
    # The outer `with` restores the current stream, which `torch.cuda.graph` does not after a failed capture.
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
        for work in works:
            work()
    return seconds_of(setup, graph.replay) / len(works)


def beside(setup: Setup, makers: dict[str, Callable[[int], Work]], amount: float, copies: int) -> dict[str, Any]:
    """Return the rate of each maker's works, in `amount` a second; maker(i) gives the work on memory copy i."""
    found: dict[str, Any] = {}
    for name, make in makers.items():
        try:
            seconds = seconds_each(setup, [make(i) for i in range(copies)])
            found |= {f"{name} us": seconds * 1e6, f"{name} per s": amount / seconds}
        except Exception as error:  # measure the others all the same
            found[f"{name} error"] = f"{type(error).__name__}: {str(error).strip()[:200]}"
    return found


def drawn(setup: Setup, *shape: int) -> Tensor:
    return torch.randn(shape, device=setup.device, dtype=torch.bfloat16)


def products(setup: Setup) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measure products, in bytes of weights a second."""
    for name, (n_out, n_in) in ({"tiny": (64, 32)} if setup.tiny else PRODUCTS).items():
        copies = 2 if setup.tiny else -(-BEYOND_CACHE // (n_out * n_in * 2))
        weights = [drawn(setup, n_out, n_in) for _ in range(copies)]
        for rows in ROWS:
            x = drawn(setup, rows, n_in)
            makers: dict[str, Callable[[int], Work]] = {"cublas": lambda i, x=x, w=weights: lambda: F.linear(x, w[i])}
            if launching.runs_on(x):
                from lce.kernels.product.products_triton import product

                makers["lce"] = lambda i, x=x, w=weights: lambda: product(x, w[i])
            yield f"{name}, {rows} rows", beside(setup, makers, weights[0].nbytes, copies)


def still(setup: Setup, *shape: int) -> Turn:
    """Return turns by angle 0."""
    ones, zeros = (torch.full(shape, x, device=setup.device, dtype=torch.bfloat16) for x in (1.0, 0.0))
    return Turn(ones, zeros)


def decode(setup: Setup) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measure decode, in bytes of attended keys and values a second."""
    dim, chunk = (16, 8) if setup.tiny else (128, CHUNK)
    ours, torchs = Attention.choose("auto"), Attention.choose("torch")
    for called, (n_heads, n_groups) in ({"tiny": (4, 2)} if setup.tiny else HEADS).items():
        for length in (256,) if setup.tiny else LENGTHS:
            a_token = 2 * dim * 2
            copies = 2 if setup.tiny else -(-BEYOND_CACHE // (n_groups * length * a_token))
            keys, values = ([drawn(setup, n_groups, length, dim) for _ in range(copies)] for _ in range(2))
            q = drawn(setup, n_heads, 1, dim)
            zero = torch.zeros(1, dtype=torch.int64, device=setup.device)
            all_of = runs_of([Span(zero, zero + length, length, still(setup, 1, dim // 2))])
            ids = torch.rand(n_heads, length // chunk, device=setup.device).topk(CHUNKS, dim=1).indices
            slots = torch.arange(CHUNKS, device=setup.device)
            first = (ids * chunk)[:, None]
            some = Runs(first, torch.full_like(first, chunk), slots, still(setup, 1, CHUNKS, dim // 2), chunk)

            def over(runs: Runs, q: Tensor = q, k: list[Tensor] = keys, v: list[Tensor] = values) -> Any:
                return lambda i: lambda: ours.decode(q, k[i], v[i], runs)

            def torch_over(i: int, q: Tensor = q, k: list[Tensor] = keys, v: list[Tensor] = values) -> Work:
                return lambda: torchs.dense(q, k[i], v[i], causal=False)

            makers = {"lce": over(all_of), "torch": torch_over}
            yield f"full, {called}, {length}", beside(setup, makers, n_groups * length * a_token, copies)
            amount = n_heads * CHUNKS * chunk * a_token
            yield f"longheads, {called}, {length}", beside(setup, {"lce": over(some)}, amount, copies)


def prefill(setup: Setup) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measure prefill in floating-point operations a second: causal, and every query over its own chunks."""
    dim, n, seen, chunk = (16, 5, 256, 8) if setup.tiny else (128, QUERIES, SEEN, CHUNK)
    backends = {"lce": Attention.choose("auto"), "torch": Attention.choose("torch")}
    for called, (n_heads, n_groups) in ({"tiny": (4, 2)} if setup.tiny else HEADS).items():
        q, k, v = drawn(setup, n_heads, n, dim), drawn(setup, n_groups, seen, dim), drawn(setup, n_groups, seen, dim)

        def dense(attention: Attention, q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Any:
            return lambda _: lambda: attention.dense(q, k, v, causal=True)

        flops = 4.0 * n_heads * dim * n * (seen - n / 2)
        yield f"causal, {called}", beside(setup, {name: dense(x) for name, x in backends.items()}, flops, 1)
        tiles = [Tiles.of_chunks(*(x.unflatten(1, (-1, chunk)) for x in (k, v)))]
        scores = torch.rand(n_heads, n, seen // chunk, device=setup.device)
        ids, rows = scores.topk(CHUNKS, dim=-1).indices, torch.arange(n * CHUNKS, device=setup.device).view(n, CHUNKS)
        turns = SlotTurns(still(setup, n * CHUNKS, dim // 2), rows)

        def routed(
            attention: Attention, q: Tensor = q, ids: Tensor = ids, tiles: Any = tiles, by: SlotTurns = turns
        ) -> Any:
            return lambda _: lambda: attention.routed(q, by, ids, tiles)

        flops = 4.0 * n_heads * dim * n * CHUNKS * chunk
        yield f"chunks, {called}", beside(setup, {name: routed(x) for name, x in backends.items()}, flops, 1)
