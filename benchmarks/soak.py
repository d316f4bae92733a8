"""Keeps many clients at a server for a while, and then asks each question again alone.

    python benchmarks/soak.py -m smollm2 --minutes 30 --clients 16

Each client asks, one after the other, questions that no other asks: texts of 20 to 3,000 tokens, streamed or not, with
samplings, seeds and methods of their own. One request of eight is broken off while it is answered, one of eight is
wrong in some way, and one of eight goes on where an earlier one ended. Afterwards an engine in this process answers the
questions alone, as many as `--check` minutes allow, and the answers must be equal. Prints the server's memory and open
files over time, and exits with 1 after a wrong answer, a status of 500 or more, or a request that did not end. The
script also exits with 1 if the server's memory grows although the memory for kept contexts is full: if the median of
the last third of the time is more than a tenth above that of the middle third.
"""

from __future__ import annotations

import argparse
import collections
import http.client
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving import known_ids, running

import lce
from lce_lab.bench import machine

FULL, GROWTH = 0.5, 1.1  # the share that counts as full; the factor by which memory may grow in the last third
METHODS: list[tuple[str | None, dict[str, Any]]] = [
    (None, {}), ("longheads", {"chunk_size": 64, "chunks": 16}), ("dca", {}), ("self_extend", {}),
]  # fmt: skip
FAULTS = [
    b"{", b"\xff\xfe", b"[]", b'{"prompt": 3}', b'{"prompt": "a", "max_tokens": -2}',
    b'{"prompt": "a", "method": "no"}', b'{"prompt": [99999999]}', b'{"messages": []}',
    b'{"prompt": "a", "temperature": "hot"}', b"[" * 5000,
]  # fmt: skip


@dataclass
class Soak:
    """What all clients share: the server's port, texts, the end of time, and what happened."""

    port: int
    known: list[int]
    ends: list[int]
    until: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    asked: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    number: int = 0
    own: list[int] = field(init=False)  # the tokens with which questions begin, each in another order

    def __post_init__(self) -> None:
        self.own = sorted(set(self.known))[:997]

    def question(self, rng: random.Random) -> dict[str, Any]:
        """Return the body of a request that begins like no other."""
        with self.lock:
            self.number += 1
            number = self.number
        size, start = int(20 * 150 ** rng.random()), rng.randrange(len(self.known) - 3000)
        own = [self.own[number // len(self.own) ** i % len(self.own)] for i in range(4)]
        method, options = rng.choice(METHODS)
        body = {
            "prompt": [*own, *self.known[start : start + size]], "max_tokens": rng.choice([1, 8, 24, 48]),
            "temperature": rng.choice([0, 0.8]), "seed": number, "top_p": rng.choice([1, 0.9]),
            "logit_bias": {str(token_id): -100 for token_id in self.ends},
        }  # fmt: skip
        return body if method is None else body | {"method": method, "method_options": options}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--check", type=float, default=10, help="minutes of asking again")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--cache-memory", default="512MiB", help="the memory for kept contexts")
    args = parser.parse_args()
    known, ends = known_ids(args.model, 200_000)
    print(f"{machine()}; {args.model}, {args.clients} clients, {args.minutes:g} minutes", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", "from lce.cli import main; main()", "serve", "-m", args.model]
        with running(
            [*command, "--cache-dir", folder, "--cache-budget", "2GiB", "--cache-memory", args.cache_memory]
        ) as port:
            soak = Soak(port, known, ends, time.monotonic() + 60 * args.minutes)
            threads = [threading.Thread(target=client, args=(soak, i), daemon=True) for i in range(args.clients)]
            for thread in threads:
                thread.start()
            grows = watch(soak, Path(folder), args.minutes)
            for thread in threads:
                thread.join(300)
            hanging = sum(thread.is_alive() for thread in threads)
    n_checked, n_wrong = check(args.model, soak, 60 * args.check)
    print(f"{dict(soak.counts)}; {hanging} requests did not end; {len(soak.wrong)} answers of 500 or more")
    print(f"{n_checked} of {len(soak.asked)} answers were compared with the same question alone: {n_wrong} differ")
    for line in soak.wrong[:10]:
        print(line)
    sys.exit(bool(n_wrong or hanging or soak.wrong or grows))


def client(soak: Soak, number: int) -> None:
    rng, last = random.Random(number), None
    while time.monotonic() < soak.until:
        kind = rng.choice(["fault", "break", "more", *["ask"] * 5])
        try:
            if kind == "fault":
                status, _ = post(soak.port, rng.choice(FAULTS))
                if not 400 <= status < 500:
                    soak.wrong.append(f"a wrong request was answered by {status}")
            elif kind == "break":
                post(soak.port, json.dumps(soak.question(rng) | {"max_tokens": 400, "stream": True}).encode(), rng)
            elif kind == "more" and last is not None:
                body, _ = last
                status, answer = post(
                    soak.port, json.dumps(body | {"prompt": [*body["prompt"], *soak.known[:3]]}).encode()
                )
                cached = answer.get("usage", {}).get("prompt_tokens_details", {}).get("cached_tokens", 0)
                soak.counts["read on" if cached else "read anew"] += 1
                last = None
            else:
                last = ask(soak, soak.question(rng), streams=rng.random() < 0.5)
            soak.counts[kind] += 1
        except (OSError, http.client.HTTPException) as error:
            soak.counts[type(error).__name__] += 1


def ask(soak: Soak, body: dict[str, Any], *, streams: bool) -> tuple[dict[str, Any], str] | None:
    """Ask a question, and record the answer, unless the server is busy."""
    if streams:
        status, text = post_stream(soak.port, json.dumps(body | {"stream": True}).encode())
    else:
        status, answer = post(soak.port, json.dumps(body).encode())
        text = answer["choices"][0]["text"] if status == 200 else ""
    if status == 200:
        with soak.lock:
            soak.asked.append((body, text))
        return body, text
    soak.counts[f"status {status}"] += 1
    if status >= 500 or status == 400:
        soak.wrong.append(f"a right request was answered by {status}")
    return None


def post(port: int, raw: bytes, breaks: random.Random | None = None) -> tuple[int, dict[str, Any]]:
    """Send a body and return the status and the answer; with `breaks`, close the connection during the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        connection.request("POST", "/v1/completions", raw, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if breaks is not None:
            for _ in range(breaks.randrange(6)):
                answer.readline()
            return answer.status, {}
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def post_stream(port: int, raw: bytes) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        connection.request("POST", "/v1/completions", raw, {"Content-Type": "application/json"})
        answer, text = connection.getresponse(), ""
        if answer.status != 200:
            return answer.status, ""
        for line in answer:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    return 500, str(event)
                text += "".join(choice.get("text") or "" for choice in event.get("choices", []))
        return 200, text
    finally:
        connection.close()


def watch(soak: Soak, folder: Path, minutes: float) -> bool:
    """Print the server's memory, open files and kept contexts from time to time. Return whether memory grows."""
    found = subprocess.run(["pgrep", "-f", f"serve.*--port {soak.port}"], capture_output=True, text=True).stdout.split()
    process = Path("/proc") / found[0]
    began, sizes, shares = time.monotonic(), list[int](), list[float]()
    while time.monotonic() < soak.until:
        time.sleep(max(0.0, min(60 * minutes / 15, soak.until - time.monotonic())))
        memory = next(int(x.split()[1]) for x in (process / "status").read_text().splitlines() if x.startswith("VmRSS"))
        n_files, kept = len(list((process / "fd").iterdir())), list(folder.rglob("*"))
        size = sum(path.stat().st_size for path in kept if path.is_file() and path.exists())
        sizes.append(memory)
        shares.append(share_of_cache(soak.port))
        print(
            f"{(time.monotonic() - began) / 60:5.1f} min: {memory >> 10:,} MiB, {n_files} open files, {len(kept)} kept "
            f"files of {size >> 20:,} MiB, {len(soak.asked)} answers, "
            f"{shares[-1]:.0%} of the memory for kept contexts",
            flush=True,
        )
    third = len(sizes) // 3
    if not third or statistics.median(shares[third:]) < FULL:  # a moment may show less: what is full makes room
        print("whether memory grows is not known, because the memory for kept contexts was not full")
        return False
    middle, last = statistics.median(sizes[third:-third]), statistics.median(sizes[-third:])
    print(f"memory {'grows' if last > GROWTH * middle else 'is level'}: {last / middle - 1:+.1%} in the last third")
    return last > GROWTH * middle


def share_of_cache(port: int) -> float:
    """Return the share of the memory for kept contexts that is taken."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    finally:
        connection.close()
    found = dict(line.rsplit(" ", 1) for line in lines if line.startswith("lce:kept_bytes"))
    return float(found["lce:kept_bytes"]) / float(found["lce:kept_bytes_limit"])


def check(model: str, soak: Soak, seconds: float) -> tuple[int, int]:
    """Ask questions again, alone; return how many were asked, and how many answers differ."""
    engine, until, n, n_wrong = lce.load(model), time.monotonic() + seconds, 0, 0
    engines: dict[str, lce.Engine] = {}
    for body, text in random.Random(0).sample(soak.asked, len(soak.asked)):
        if time.monotonic() > until:
            break
        name = f"{body.get('method')} {body.get('method_options')}"
        if name not in engines:
            own = (
                engine
                if "method" not in body
                else lce.Engine(engine.setup.using(lce.methods.make(body["method"], body["method_options"])))
            )
            engines[name] = own
        bias = {int(token_id): float(x) for token_id, x in body["logit_bias"].items()}
        how = {key: body[key] for key in ("max_tokens", "temperature", "seed", "top_p")}
        alone = engines[name].generate(body["prompt"], logit_bias=bias, **how).text
        n += 1
        if alone != text:
            n_wrong += 1
            soak.wrong.append(f"{name}, {len(body['prompt'])} tokens, {how}: {text[:60]!r} is {alone[:60]!r} alone")
    return n, n_wrong


if __name__ == "__main__":
    main()
