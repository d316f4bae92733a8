"""Asks a published model seven tasks in real prose with every method, from a quarter of its window to four windows.

    python benchmarks/smollm2/study.py --essays ESSAYS --books BOOKS
    python benchmarks/smollm2/study.py --essays ESSAYS --parts answers --lengths 16384 --documents 0,1 --dry-run

Runs `lce` commands, as many at once as `--workers` says, and prints each before it begins. What the record folder has
is not asked again, so the same command continues where it was interrupted. ESSAYS is a folder of .txt files, the text
that statements are hidden in; BOOKS is another, whose texts perplexity is measured on.

`answers`: the task `medley`. A document has the statements of all seven tasks and is read once; forks of its context
are asked. `sweep`: other knobs of the methods whose defaults fail, recorded in a folder of their own. `why`: the causes
of what the defaults miss in facts, the one task that the model can do. `perplexity`: by position, one pass over each
text.
`lce eval report FOLDER/*.jsonl` makes the tables, `lce leaderboard show FOLDER` the ranking.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

WINDOW = 8192
DOCUMENTS = 6  # of a cell, numbered; a document's facts depend on how many there are
LENGTHS = "16384,7680,32768,2048"
PARTS = "answers,why,perplexity"
DEFAULTS = (
    "full", "dca", "self_extend", "rerope", "longheads", "pages", "quest", "infllm", "esa compress=pca", "reattention",
    "streaming", "lm_infinite", "delta", "xattention",
)  # fmt: skip
METHODS = (
    *DEFAULTS, "longheads preset=paper", "infllm preset=paper", "full rope=ntk", "full rope=yarn", "full rope=dynamic",
    "full rope=linear",
)  # fmt: skip
SWEEP = (
    "infllm preset=paper repr_tokens=16", "infllm block_size=32 top_k=64", "esa compress=pca top_k=4096 local=2048",
    "quest dense_layers=0 budget=4096", "pages budget=8192", "pages placement=grouped", "longheads chunk_size=16",
    "longheads chunk_size=16 chunks=256", "longheads chunks=128", "longheads chunks=64", "delta method=longheads",
    "lm_infinite top_k=5 from_layer=4",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--essays", required=True)
    parser.add_argument("--books", help="for perplexity")
    parser.add_argument("--record", default="benchmarks/record/smollm2", metavar="FOLDER")
    parser.add_argument("--parts", default=PARTS, help="of answers, sweep, why and perplexity")
    parser.add_argument("--lengths", default=LENGTHS)
    parser.add_argument("--documents", default="0,1", help=f"numbers below {DOCUMENTS}")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--methods", help="separated by ';', each with its knobs, instead of all")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dry-run", action="store_true", help="print the commands alone")
    args = parser.parse_args()
    if "perplexity" in args.parts.split(",") and not (args.books and any(Path(args.books).glob("*.txt"))):
        parser.error("the part perplexity needs --books, a folder of .txt files; or give --parts answers,why")
    Path(args.record, "sweep").mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.workers) as pool:
        codes = list(pool.map(lambda command: run(command, args.dry_run), commands(args)))
    sys.exit(max(codes, default=0))


def run(command: list[str], is_dry: bool) -> int:
    """Print a command, run it, and print its output; return its exit status."""
    print(shlex.join(command) + "\n", end="", flush=True)  # in one piece, whatever another worker prints
    if is_dry:
        return 0
    done = subprocess.run([sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True)
    print(done.stdout, end="", flush=True)
    return done.returncode


def commands(args: argparse.Namespace) -> Iterator[list[str]]:
    """Yield the commands of the parts asked for."""
    threads = max(1, (os.cpu_count() or 1) // args.workers)
    common = ["-m", args.model, "--dtype", args.dtype, "--threads", str(threads), "--quiet"]
    parts, lengths = args.parts.split(","), args.lengths.split(",")
    given = tuple(args.methods.split(";")) if args.methods else ()
    if "answers" in parts:
        yield from answers(args, lengths, given or METHODS, common)
    if "sweep" in parts:
        yield from answers(args, lengths, given or SWEEP, common, folder="/sweep")
    if "why" in parts:
        beyond = [length for length in lengths if int(length) > WINDOW]
        yield from answers(args, beyond, given or DEFAULTS, common, "why")
    if "perplexity" in parts:
        texts = [flag for file in sorted(Path(args.books).glob("*.txt")) for flag in ("--text", str(file))]
        record, longest = ["--record", f"{args.record}/perplexity.jsonl"], max(map(int, lengths))
        positions = ",".join(str(2**n) for n in range(11, longest.bit_length()))
        for row in rows(given or METHODS, longest):
            yield ["lce", "eval", "perplexity", *common, *row, "--lengths", positions, *texts, "--stream", *record]


def answers(
    args: argparse.Namespace, lengths: list[str], methods: tuple[str, ...], common: list[str], command: str = "run",
    folder: str = "",
) -> Iterator[list[str]]:  # fmt: skip
    """Yield the commands that ask one document each, or with the command `why` ask again what was missed in it."""
    suite = ["--task", "medley", "--mode", "shared", "--questions", "40", "--filler", f"essays:{args.essays}"]
    suite += ["--samples", str(DOCUMENTS), "--seed", args.seed, "--record", f"{args.record}{folder}/answers.jsonl"]
    suite += ["--no-ceiling"] if command == "run" else ["--kind", "several_facts", "--each"]
    for length in lengths:
        for document in args.documents.split(","):
            for row in rows(methods, int(length)):
                shard = ["--lengths", length, "--shard", f"{document}/{DOCUMENTS}"]
                yield ["lce", "eval", command, *common, *row, *shard, *suite]


def rows(methods: tuple[str, ...], length: int) -> Iterator[list[str]]:
    """Yield the options of each method. RoPE is scaled by the length over the window, and not within the window.

    `window=` and `rope=` among the knobs are options of the engine.
    """
    for each in methods:
        name, *knobs = each.split()
        engine = dict(knob.split("=") for knob in knobs if knob.startswith(("window=", "rope=")))
        window = int(engine.get("window", WINDOW))
        if "rope" not in engine or length > window:
            options = [flag for knob in knobs if knob.split("=")[0] not in engine for flag in ("-o", knob)]
            if "rope" in engine:
                options += ["--rope", engine["rope"], "--rope-factor", f"{length / window:g}"]
            yield ["--method", name, *options, *(["--window", str(window)] * ("window" in engine))]


if __name__ == "__main__":
    main()
