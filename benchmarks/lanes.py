"""Measures decoding 1, 2, 4 and 8 lanes in one pass: the speed, and whether each lane has the bits it has alone.

    python benchmarks/lanes.py
    python benchmarks/lanes.py --lengths 512 --method longheads --dtype bfloat16
    python benchmarks/lanes.py --shape tinyllama --dtype bfloat16 --peer llama/bin/python    # beside llama.cpp

Weights are random, of a named shape. Each lane has its own context and text. Prints, for each length and number of
lanes, tokens a second of all lanes together, beside one lane, and whether each lane's logits equal, to the bit, its
logits in the same steps alone. Figures are medians of the repeats, of steps in turn.

`--peer` names a Python with llama-cpp-python, which decodes as many sequences in one batch, with the better setting of
flash attention, from the same weights in bfloat16; its time is that of `llama_decode`. vs_llama_cpp.py says how to
build it. Needs the gguf package.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from models import SHAPES, make_checkpoint, token_ids, write_gguf
from workers import Remote, serve


class Batched:
    """llama.cpp, as a worker, which decodes several sequences at a time."""

    def load(self, path: str, n_lanes: int, n_ctx: int, threads: int, flash: bool) -> None:
        import llama_cpp
        from vs_llama_cpp import silence

        silence()
        self.api, self.n_ctx = llama_cpp, n_ctx
        self.model = self.api.llama_model_load_from_file(path.encode(), self.api.llama_model_default_params())
        params = self.api.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.n_batch, params.n_ubatch = n_lanes * n_ctx, n_lanes, 2048, 512
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = int(flash)
        self.context = self.api.llama_init_from_model(self.model, params)

    def run(self, length: int, n_lanes: int, n_steps: int) -> float:
        """Read a text in each sequence; return the median seconds of a step of all of them."""
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        for lane in range(n_lanes):
            ids = token_ids(length + lane)[lane:]
            self.decode([(id_, i, lane) for i, id_ in enumerate(ids)])
        return statistics.median(
            self.decode([(7 + step, length + step, lane) for lane in range(n_lanes)]) for step in range(n_steps)
        )

    def decode(self, tokens: list[tuple[int, int, int]]) -> float:
        """Run tokens with positions and sequences; return the seconds. Logits are those of the last tokens."""
        batch = self.api.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, (id_, position, lane) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = id_, position, 1, lane
            batch.logits[i] = len(tokens) <= 8
        started = time.perf_counter()
        code = self.api.llama_decode(self.context, batch)
        self.api.llama_synchronize(self.context)
        seconds = time.perf_counter() - started
        self.api.llama_batch_free(batch)
        assert code == 0, f"llama_decode returned {code}"
        return seconds


def beside(python: str, path: Path, threads: int, lengths: list[int], counts: list[int], n_steps: int) -> Any:
    """Return llama.cpp's tokens a second by length and number of lanes, with its better setting of flash attention."""
    found: dict[tuple[int, int], float] = {}
    for flash in (True, False):
        peer, n_ctx = Remote(__file__, "llama.cpp", python), max(lengths) + n_steps + 32
        peer.ask("load", path=str(path), n_lanes=max(counts), n_ctx=n_ctx, threads=threads, flash=flash)
        for length in lengths:
            for n in counts:
                speed = n / peer.ask("run", length=length, n_lanes=n, n_steps=n_steps)
                found[length, n] = max(speed, found.get((length, n), 0.0))
        peer.close()
    return found


def main() -> None:
    warnings.filterwarnings("ignore", message=".* that the method full can read")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lanes", default="1,2,4,8")
    parser.add_argument("--lengths", default="512,4096")
    parser.add_argument("--method", default="full")
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--peer", metavar="PYTHON", help="has llama.cpp built for this processor")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(Batched())
    import torch

    import lce
    from lce_lab.bench import machine

    lengths, peer = [int(n) for n in args.lengths.split(",")], {}
    counts = [int(n) for n in args.lanes.split(",")]
    print(f"{machine()}; {args.shape}, {args.dtype}, {args.method}; medians of {args.steps} steps", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), SHAPES[args.shape], args.dtype)
        if args.peer:
            write_gguf(Path(folder), Path(folder) / "model.gguf")
            peer = beside(args.peer, Path(folder) / "model.gguf", torch.get_num_threads(), lengths, counts, args.steps)
        engine = lce.load(folder, args.method, dtype=args.dtype)
        for length in lengths:
            compare(engine, length, counts, args.steps, peer)


def compare(engine: Any, length: int, counts: list[int], n_steps: int, peer: dict[tuple[int, int], float]) -> None:
    import torch

    columns = "| lanes | tokens/s | of one lane | bits of its own | of llama.cpp |"
    print(f"\n### {length:,} tokens\n\n{columns}\n|---:|---:|---:|---|---:|")
    ids = token_ids(length + max(counts))
    contexts = [engine.prefill(ids[i : i + length], length=length + 2 * n_steps) for i in range(max(counts))]
    truth = [steps(engine, [context.fork()], n_steps)[1] for context in contexts]
    one = 0.0
    for n in counts:
        seconds, logits = steps(engine, [context.fork() for context in contexts[:n]], n_steps)
        same = all(torch.equal(row[i], truth[i][k][0]) for k, row in enumerate(logits) for i in range(n))
        speed = n / statistics.median(seconds)
        one = one or speed / n
        ratio = f"{speed / peer[length, n]:.2f}" if peer else ""
        print(f"| {n} | {speed:.4g} | {speed / one:.2f} | {'yes' if same else 'NO'} | {ratio} |", flush=True)


def steps(engine: Any, contexts: list[Any], n_steps: int) -> tuple[list[float], list[Any]]:
    """Decode the same tokens in every context; return each step's seconds and logits `[B, vocab]`."""
    import torch

    from lce.engine.lanes import forward
    from lce.engine.running import lane_of

    seconds, found = [], []
    for step in range(n_steps):
        lanes = [lane_of(engine.setup, context, [7 + step], decoding=True) for context in contexts]
        started = time.perf_counter()
        found.append(torch.stack(forward(engine.setup.model, lanes, engine.setup.recorder)))
        seconds.append(time.perf_counter() - started)
        for lane in lanes:
            lane.check()
    return seconds, found


if __name__ == "__main__":
    main()
