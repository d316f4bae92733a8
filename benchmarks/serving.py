"""Measures `lce serve` over HTTP, beside llama.cpp's server if its program is given.

    python benchmarks/serving.py -m smollm2
    python benchmarks/serving.py -m smollm2 --llama-server PATH/llama-server --gguf SmolLM2-135M-Instruct.Q4_1.gguf
    python benchmarks/serving.py -m smollm2 --method self_extend --long 32000 --only beside

`lanes`: 1, 4 and 8 streams at once, each with a prompt of its own of 512 tokens. Prints the tokens a second of all
streams together while all of them are written, the median of the repeats, and its ratio to one stream.
`beside`: the time between tokens of a stream while a prompt of `--long` tokens is read, and of the same tokens of the
stream alone: each reads the tokens before it, so later ones take longer.
`turns`: the time to the first token of a short chat of 60 tokens, alone and while 1 and 4 prompts of `--long` tokens
are read, and how much longer the first of the long ones takes for it.
`restart`: a prompt of `--known` tokens is read and kept, the server is started anew, and the prompt is asked again.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import lce
from lce_lab.bench import machine

PROMPT, ANSWER, CHAT, N_CHATS = 512, 96, 60, 4  # tokens; chats beside each long prompt
ENDS: list[int] = []  # the model's end tokens, which are never drawn
START_S = 300  # seconds in which a server must start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("--method", default="full", help='with its knobs: "longheads -o chunks=8"')
    parser.add_argument("--llama-server", help="the program of llama.cpp")
    parser.add_argument("--gguf", help="the same weights for llama.cpp")
    parser.add_argument("--threads", type=int, default=2, help="of llama.cpp")
    parser.add_argument("--lanes", default="1,4,8")
    parser.add_argument("--long", type=int, default=32_000)
    parser.add_argument("--known", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=["lanes", "beside", "turns", "restart"])
    args = parser.parse_args()
    print(f"{machine()}; {args.model}, {args.method}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        known, ENDS[:] = known_ids(
            args.model, max(args.long, args.known if args.only in (None, "restart") else 0) + 20_000
        )
        if args.only != "restart":
            with lce_server(args.model, args.method) as port:
                measure(args, "lce", port, known)
            if args.llama_server:
                counts = [int(n) for n in args.lanes.split(",")]
                with llama_server(args, max(counts)) as port:
                    measure(args, "llama.cpp", port, known)
        if args.only in (None, "restart"):
            restart(args, Path(folder), known[: args.known])


def known_ids(model: str, n_tokens: int) -> tuple[list[int], list[int]]:
    """Return real text as tokens of a model, Python's own language reference again and again, and its end tokens."""
    from pydoc_data.topics import topics

    engine = lce.load(model)
    ids = engine.tokenizer.encode("\n".join(topics.values()), bos=False)
    return (ids * (n_tokens // len(ids) + 1))[:n_tokens], sorted(engine.setup.eos_ids)


@contextmanager
def running(command: Sequence[str]) -> Iterator[int]:
    """Start a server, wait until it is healthy, yield its port, and stop it."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    process = subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + START_S
        while not healthy(port):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"the server does not start: {' '.join(command)}")
            time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait(120)


def lce_server(model: str, method: str, *more: str) -> Any:
    code = "from lce.cli import main; main()"
    return running([sys.executable, "-c", code, "serve", "-m", model, "--method", *shlex.split(method), *more])


def llama_server(args: argparse.Namespace, slots: int) -> Any:
    length = args.long + 5000 if args.only != "lanes" else 2 * (PROMPT + ANSWER)
    return running([
        args.llama_server, "-m", args.gguf, "-np", str(slots), "-c", str(length * slots), "-t", str(args.threads),
        "--no-webui", "--log-disable",
    ])  # fmt: skip


def healthy(port: int) -> bool:
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False


def streamed(
    port: int, prompt: Sequence[int], max_tokens: int, times: list[float], ended: threading.Event | None = None
) -> dict[str, Any]:
    """Stream an answer until `ended`; append the time of each event with text to `times`, and return the last usage."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    body = {
        "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "stream": True,
        "cache_prompt": True, "logit_bias": {str(token_id): -100 for token_id in ENDS},
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer, usage = connection.getresponse(), {}
    assert answer.status == 200, answer.read()
    for line in answer:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            if event.get("choices") and event["choices"][0].get("text"):
                times.append(time.perf_counter())
        if ended is not None and ended.is_set():
            break
    connection.close()
    return usage


def at_once(port: int, prompts: Sequence[Sequence[int]]) -> float:
    """Stream the answers to all prompts at once; return tokens a second while all of them are written.

    The prompts were read before, so that all answers begin at the same time.
    """
    for prompt in prompts:
        streamed(port, prompt, 1, [])
    times: list[list[float]] = [[] for _ in prompts]
    usages: list[dict[str, Any]] = [{} for _ in prompts]

    def ask(i: int) -> None:
        usages[i] = streamed(port, prompts[i], ANSWER, times[i])

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    begin, end = max(each[0] for each in times), min(each[-1] for each in times)
    found = 0.0
    for each, usage in zip(times, usages, strict=True):
        inside = sum(begin < at <= end for at in each)
        found += inside * usage["completion_tokens"] / len(each)  # an event may have the text of several tokens
    return found / (end - begin)


def measure(args: argparse.Namespace, name: str, port: int, known: list[int]) -> None:
    at_once(port, [known[:PROMPT]])  # compiles, and warms up
    if args.only in (None, "lanes"):
        one = 0.0
        for n in (int(n) for n in args.lanes.split(",")):
            speeds = []
            for repeat in range(args.repeats):
                starts = [1000 * repeat + 10_000 * (n > 1) + 700 * i + 7 * n for i in range(n)]
                speeds.append(at_once(port, [known[start : start + PROMPT] for start in starts]))
            speed = statistics.median(speeds)
            one = one or speed
            print(f"{name}: {n} at once: {speed:.1f} tokens/s, {speed / one:.2f} of one", flush=True)
    if args.only in (None, "beside"):
        beside(args, name, port, known)
    if args.only in (None, "turns"):
        turns(args, name, port, known)


def turns(args: argparse.Namespace, name: str, port: int, known: list[int]) -> None:
    """Print how long short chats wait for their first token beside long prompts, and how much the long ones lose."""
    starts = iter(range(3, len(known), 211))  # no two prompts begin with the same tokens

    def ask(n_tokens: int) -> float:
        """Return the seconds that the first token of a new prompt takes."""
        start, began = next(starts) % (len(known) - n_tokens), time.perf_counter()
        streamed(port, known[start : start + n_tokens], 1, [])
        return time.perf_counter() - began

    own = statistics.median(ask(CHAT) for _ in range(5))
    alone = statistics.median(ask(args.long) for _ in range(args.repeats))
    block = lce.load(args.model).setup.block
    print(
        f"{name}: alone: a chat {own:.3f} s; {args.long:,} tokens {alone:.1f} s, {alone * block / args.long:.2f} s for "
        f"each block of {block:,}",
        flush=True,
    )
    for n in (1, 4):
        chats, longs = list[float](), list[float]()
        for _ in range(args.repeats):
            with ThreadPoolExecutor(n) as pool:
                asked = [pool.submit(ask, args.long) for _ in range(n)]
                for _ in range(N_CHATS):
                    time.sleep(alone / (N_CHATS + 1))
                    chats.append(ask(CHAT))
                longs.append(asked[0].result())
        ratio = f"; the first long one {statistics.median(longs) / alone:.2f} of alone" if n == 1 else ""
        print(
            f"{name}: behind {n} of {args.long:,} tokens: a chat's first token after {statistics.median(chats):.2f} s, "
            f"at most {max(chats):.2f} s{ratio}",
            flush=True,
        )


def beside(args: argparse.Namespace, name: str, port: int, known: list[int]) -> None:
    """Print the time between tokens of a stream while a long prompt is read, and of the same tokens alone."""
    times, finished = list[float](), threading.Event()
    most = 20_000 if name == "lce" else 4000
    thread = threading.Thread(target=lambda: streamed(port, known[:PROMPT], most, times, finished), daemon=True)
    thread.start()
    while len(times) < 200:
        assert thread.is_alive(), "the stream has ended"
        time.sleep(0.01)
    before = statistics.median(gaps(times[50:]))
    began = time.perf_counter()
    long: list[float] = []
    streamed(port, known[700 : 700 + args.long], 1, long)
    ended = time.perf_counter()
    finished.set()
    here = [i for i, at in enumerate(times) if began <= at <= ended]
    during = sorted(gaps([times[i] for i in here]))
    thread.join()
    alone: list[float] = []
    streamed(port, known[:PROMPT], here[-1] + 2, alone)
    normal = statistics.median(gaps(alone[here[0] : here[-1] + 1]))
    middle, late = statistics.median(during), during[int(0.99 * len(during))]
    print(
        f"{name}: between tokens {1e3 * before:.2f} ms before; while {args.long:,} tokens are read "
        f"({ended - began:.1f} s): median {1e3 * middle:.2f}, 99% {1e3 * late:.2f}, most {1e3 * during[-1]:.2f} ms; "
        f"the same tokens alone {1e3 * normal:.2f} ms; {middle / normal:.2f} times, {middle / before:.2f} of before"
    )


def gaps(times: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


def restart(args: argparse.Namespace, folder: Path, prompt: list[int]) -> None:
    """Print how long a known prompt takes in a server that has just been started."""
    kept = ("--cache-dir", str(folder))
    states = ("new", "known, after a restart", "known, after a restart, its file not in memory")
    for n, state in enumerate(states):
        if n:
            files = [path for path in folder.rglob("*") if path.is_file()]
            size = sum(path.stat().st_size for path in files)
            print(f"{len(files)} kept files, {size / 1e9:.2f} GB", flush=True)
        if n == 2:
            for path in files:
                forget(path)
        with lce_server(args.model, args.method, *kept) as port:
            at_once(port, [prompt[-PROMPT:]])
            times: list[float] = []
            began = time.perf_counter()
            usage = streamed(port, [*prompt, *prompt[: 10 * n + 10]], 8, times)
            cached = usage.get("prompt_tokens_details", {}).get("cached_tokens")
            print(
                f"lce: {len(prompt):,} tokens, {state}: first token after {times[0] - began:.3f} s, "
                f"{cached} tokens were cached",
                flush=True,
            )


def forget(path: Path) -> None:
    """Ask the system to drop its copy of a file from memory."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
