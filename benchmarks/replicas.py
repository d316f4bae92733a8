"""Measures replicas on this machine: two with half of the threads each, beside one with all of them.

    python benchmarks/replicas.py -m smollm2
    python benchmarks/replicas.py -m smollm2 --sessions 16 --turns 8

Sessions run at once. Each turn sends the whole text so far, `--read` tokens longer than before, and asks for `--write`
tokens. Prints for each number of replicas the tokens a second that all sessions together read and get, without those
that were cached; the ratio; and the share of later turns that found the text before them in a replica's memory.
`killed`: one of two replicas is killed while the sessions run. Prints the answers that failed or differ from those of
before, the longest time that an answer took, and the time until there are two replicas again. Needs lce[ray], psutil.
"""

from __future__ import annotations

import argparse
import http.client
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import psutil
from serving import known_ids, lce_server

from lce_lab.bench import machine


@dataclass
class Turn:
    """An answer: its tokens' text, the tokens that were read and written for it, and what was cached."""

    text: str
    read: int
    written: int
    cached: int
    seconds: float
    replica: str | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("--method", default="full")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--read", type=int, default=256)
    parser.add_argument("--write", type=int, default=32)
    args = parser.parse_args()
    print(f"{machine()}; {args.model}, {args.method}; {args.sessions} sessions of {args.turns} turns", flush=True)
    texts, _ = known_ids(args.model, args.sessions * args.turns * args.read)
    speeds = []
    for n in (1, 2):
        with lce_server(args.model, args.method, "--replicas", str(n)) as port:
            run(port, args, texts[::-1])  # compiles, and warms up
            began = time.perf_counter()
            sessions = run(port, args, texts)
            took = time.perf_counter() - began
            turns = [turn for session in sessions for turn in session]
            speeds.append(sum(turn.read + turn.written - turn.cached for turn in turns) / took)
            later = [turn for session in sessions for turn in session[1:]]
            hits = sum(turn.cached >= turn.read - args.read - 64 for turn in later)
            print(f"{n} replicas: {speeds[-1]:.1f} tokens/s, {hits} of {len(later)} later turns hit", flush=True)
            if n == 2:
                print(f"2 replicas to 1: {speeds[1] / speeds[0]:.2f}; hits {hits / len(later):.3f}", flush=True)
                kill(port, args, texts, sessions)


def run(
    port: int, args: argparse.Namespace, texts: Sequence[int], then: Callable[[], Any] | None = None
) -> list[list[Turn]]:
    """Run all sessions at once; return the turns of each. `then` is called when half of the first session is done."""

    def session(number: int) -> list[Turn]:
        size, turns = args.turns * args.read, []
        for turn in range(1, args.turns + 1):
            start = number * size
            turns.append(ask(port, texts[start : start + turn * args.read], args.write, f"session {number}"))
            if then is not None and number == 0 and turn == args.turns // 2:
                then()
        return turns

    with ThreadPoolExecutor(args.sessions) as pool:
        return list(pool.map(session, range(args.sessions)))


def ask(port: int, prompt: Sequence[int], n: int, session: str) -> Turn:
    """Ask once. A request that fails counts as an answer without tokens."""
    body = {"prompt": list(prompt), "max_tokens": n, "temperature": 0}
    headers = {"Content-Type": "application/json", "x-session-id": session}
    connection, began = http.client.HTTPConnection("127.0.0.1", port, timeout=600), time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    found, took = json.loads(answer.read()), time.perf_counter() - began
    connection.close()
    if answer.status != 200:
        return Turn("", 0, 0, 0, took, None)
    usage = found["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    tokens = usage["prompt_tokens"], usage["completion_tokens"], cached
    return Turn(found["choices"][0]["text"], *tokens, took, answer.getheader("x-lce-replica"))


def kill(port: int, args: argparse.Namespace, texts: Sequence[int], before: list[list[Turn]]) -> None:
    """Kill a replica while the sessions run again, and print what that did."""
    killed: list[float] = []

    def strike() -> None:
        found = [each for each in psutil.Process().children(recursive=True) if is_replica(each)]
        found[0].kill()
        killed.append(time.perf_counter())

    after = run(port, args, texts, strike)
    pairs = [pair for one, other in zip(before, after, strict=True) for pair in zip(one, other, strict=True)]
    failed, differing = sum(not new.replica for _, new in pairs), sum(old.text != new.text for old, new in pairs)
    print(f"killed: {failed} of {len(pairs)} answers failed, {differing} differ; "
          f"the longest took {max(new.seconds for _, new in pairs):.2f} s", flush=True)  # fmt: skip
    while figures(port) < 2:
        time.sleep(0.05)
    print(f"killed: two replicas again after {time.perf_counter() - killed[0]:.2f} s", flush=True)


def is_replica(process: psutil.Process) -> bool:
    try:
        return "ServeReplica:default:Replica" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def figures(port: int) -> int:
    """Return how many replicas tell their figures."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/metrics")
    return connection.getresponse().read().count(b"vllm:num_requests_running{")


if __name__ == "__main__":
    main()
