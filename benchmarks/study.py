"""Asks a model for facts in essays with many methods, placements and RoPE scalings, from half a window to four windows.

    python benchmarks/study.py --model smollm2 --essays ESSAYS --texts TEXTS
    python benchmarks/study.py --model ~/.cache/lce/Qwen2.5-Coder-1.5B-Instruct-Q4_K_M.gguf --essays ESSAYS \
        --parts answers --lengths 2,0.94 --documents 0 --methods "full;full rope=yarn;pages budget=8192" --dry-run
    python benchmarks/study_tables.py benchmarks/record/study/smollm2

Runs `lce` commands, one for each length, document and row in this order, so that a run that is cut off has the most
important cells first. As many commands run at once as `--workers` says; each is printed before it begins. The same
command continues where it was interrupted: a record has each answer, and `done.txt` beside it each command that ended
well, so remove `done.txt` after a change of the code. Rows are in study.toml.

`answers`: the task `facts_medley`, 44 questions of a document, which is read once. `perplexity`: of the second half of
each length beyond the window, in one pass over each of the .txt files in TEXTS. `why`: causes of what was missed.
Lengths below 100 are windows, others tokens. Within the window 0.94 leaves space for questions and answers.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
ROWS: dict[str, list[str]] = tomllib.loads((HERE / "study.toml").read_text(encoding="utf-8"))
ENGINE = ("window", "rope")  # what a row may have beside the method's knobs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--essays", required=True, help="a folder of .txt files, in which facts are hidden")
    parser.add_argument("--texts", help="a folder of .txt files for perplexity, each as long as the largest length")
    parser.add_argument("--record", metavar="FOLDER", help="[default: benchmarks/record/study/MODEL]")
    parser.add_argument("--parts", default="answers,perplexity", help="of answers, why and perplexity")
    parser.add_argument("--lengths", default="2,0.94,4,0.47", help="the most important first")
    parser.add_argument("--documents", default="0,1,2", help="numbers below --samples")
    parser.add_argument("--samples", type=int, default=12, help="of a cell; documents depend on how many")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--task", default="facts_medley")
    parser.add_argument("--questions", default="44", help="of a document")
    parser.add_argument("--kind", default="many_facts", help="the questions of the part why")
    parser.add_argument("--rows", default="axes", choices=ROWS)
    parser.add_argument("--methods", help="rows separated by ';', instead of those that --rows names")
    parser.add_argument("--more", default="", help="further options of each lce command, such as '--kv-dtype int8'")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dry-run", action="store_true", help="print the commands alone")
    args = parser.parse_args()
    args.record = Path(args.record or HERE / "record" / "study" / Path(args.model).stem)
    if "perplexity" in args.parts.split(",") and not (args.texts and any(Path(args.texts).glob("*.txt"))):
        parser.error("the part perplexity needs --texts, a folder of .txt files; or give --parts answers")
    info = subprocess.run([sys.executable, "-m", "lce", "info", args.model, "--json"], stdout=subprocess.PIPE)
    if info.returncode:
        sys.exit(info.returncode)
    asked = list(commands(args, json.loads(info.stdout)["window"]))
    if args.dry_run:
        return print("\n".join(map(shlex.join, asked)))
    args.record.mkdir(parents=True, exist_ok=True)
    done = args.record / "done.txt"
    ended = set(done.read_text(encoding="utf-8").splitlines() if done.exists() else [])
    with ThreadPoolExecutor(args.workers) as pool:
        codes = list(
            pool.map(lambda command: run(command, args, done), (x for x in asked if shlex.join(x) not in ended))
        )
    sys.exit(max(codes, default=0))


def run(command: list[str], args: argparse.Namespace, done: Path) -> int:
    """Print a command, run it, print its output, and add it to the file `done` if it ended well. Return its status."""
    print(shlex.join(command) + "\n", end="", flush=True)  # in one piece, whatever another worker prints
    threads = ["--threads", str(max(1, (os.cpu_count() or 1) // args.workers)), "--quiet"]
    ran = subprocess.run([sys.executable, "-m", *command, *threads], stdout=subprocess.PIPE, text=True)
    print(ran.stdout, end="", flush=True)
    if ran.returncode == 0:
        with done.open("a", encoding="utf-8") as file:
            file.write(shlex.join(command) + "\n")
    return ran.returncode


def commands(args: argparse.Namespace, window: int) -> Iterator[list[str]]:
    """Yield the commands of all lengths, the parts of a length one after the other."""
    given = [row.strip() for row in args.methods.split(";")] if args.methods else ROWS[args.rows]
    common = ["-m", args.model, "--dtype", args.dtype, *shlex.split(args.more)]
    suite = [
        "--task",
        args.task,
        "--mode",
        "shared",
        "--questions",
        args.questions,
        "--filler",
        f"essays:{args.essays}",
    ]
    suite += ["--samples", str(args.samples), "--seed", args.seed, "--record", str(args.record / "answers.jsonl")]
    asking = {"answers": ("run", ["--no-ceiling"]), "why": ("why", ["--kind", args.kind, "--each"])}
    for length in (tokens(text, window) for text in args.lengths.split(",")):
        rows = [row for row in (options(text, length, window) for text in given) if row]
        for part in args.parts.split(","):
            if part in asking and (part == "answers" or length > window):
                name, own = asking[part]
                for document in args.documents.split(","):
                    shard = ["--lengths", str(length), "--shard", f"{document}/{args.samples}"]
                    yield from (["lce", "eval", name, *common, *row, *shard, *suite, *own] for row in rows)
            if part == "perplexity" and length > window:
                for file in sorted(Path(args.texts).glob("*.txt")):
                    what = ["--lengths", f"{length // 2},{length}", "--stream", "--text", str(file)]
                    what += ["--record", str(args.record / "perplexity.jsonl")]
                    yield from (["lce", "eval", "perplexity", *common, *row, *what] for row in rows)


def tokens(text: str, window: int) -> int:
    """Return a length in tokens. `text` has a number of windows, if it is below 100, or of tokens."""
    return int(float(text) * window) if float(text) < 100 else int(text)


def options(row: str, length: int, window: int) -> list[str]:
    """Return a row's options of `lce`, [] if the row is not for the length.

    RoPE is scaled by the length over the window, so not within the window. A budget below the length is needed, and one
    below the window if pages are seen elsewhere than at their true positions.
    """
    name, *words = row.split()
    knobs = dict(word.split("=", 1) for word in words)
    own = {key: knobs.pop(key) for key in ENGINE if key in knobs}
    window = int(own.get("window", window))
    most = length if knobs.get("placement") == "true" or name != "pages" else min(length, window)
    if ("rope" in own and length <= window) or int(knobs.get("budget", 0)) >= most:
        return []
    found = ["--method", name, *(flag for key, value in knobs.items() for flag in ("-o", f"{key}={value}"))]
    if "rope" in own:
        found += ["--rope", own["rope"], "--rope-factor", f"{length / window:g}"]
    return [*found, *(["--window", own["window"]] if "window" in own else [])]


if __name__ == "__main__":
    main()
