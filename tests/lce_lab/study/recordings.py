"""Made-up recordings for tests of the page: of any length at once, and with every verdict in it."""

import base64
from typing import Any

import numpy as np

ALWAYS = 8  # tokens at the end that every query attends


def recording(
    tokens: int = 400,
    layers: int = 2,
    heads: int = 4,
    size: int = 8,
    k: int = 5,
    window: int = 64,
    looked: int = 24,
    segment: int = 150,
    seed: int = 0,
) -> dict[str, Any]:
    """Two runs: one that chooses, and one that attends everything. The answer is the tokens 40 to 43."""
    words = ["the ", "grey ", "ring ", "was ", "not ", "there. ", "A ", "key ", "<b>", "&amp;", "\n", "“so” "]
    text = [words[i] for i in np.random.default_rng(seed).integers(0, len(words), tokens)]
    text[40:44] = ["4", "8", "2", "9"]
    runs = [
        _choosing(tokens, layers, heads, size, k, looked, segment, seed),
        _full(tokens, layers, heads, size, looked),
    ]
    return {
        "format": 1,
        "lce": "0",
        "judge": "constant",
        "tokens": text,
        "runs": runs,
        "model": {"name": "made up", "layers": layers, "heads": heads, "kv_heads": heads, "window": window},
        "marks": [{"start": 40, "stop": 44, "label": "4829"}],
    }


def choices(made: dict[str, Any], query: int, layer: int, head: int) -> list[int]:
    """What a head of the first run chose, read from the packed data."""
    run = made["runs"][0]
    part = next(each for each in run["segments"] if each["start"] <= query < each["stop"])
    shape = (part["rows"], len(run["choosing"]), run["choosers"], run["k"])
    numbers = np.frombuffer(base64.b64decode(part["data"]), "<u2").reshape(shape)
    return [int(c) for c in numbers[query - part["start"], layer, head] if c != 0xFFFF]


def _choosing(
    tokens: int, layers: int, heads: int, size: int, k: int, looked: int, segment: int, seed: int
) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    queries = tokens + 3
    complete = np.maximum(1, np.arange(queries) // size)[:, None, None, None]
    # k different chunks of those before, ascending: one in each of k equal parts
    parts = (np.arange(k) + draw.random((queries, layers, heads, k))) / k
    chosen = np.floor(parts * complete).astype("<u2")
    chosen[..., 1:][chosen[..., 1:] == chosen[..., :-1]] = 0xFFFF
    chosen.sort(axis=-1)
    looks = {query: _look(query, chosen[query], size, heads) for query in _looked(tokens, queries, looked)}
    segments = [
        {
            "start": start,
            "stop": min(queries, start + segment),
            "rows": len(chosen[start : start + segment]),
            "data": base64.b64encode(chosen[start : start + segment].tobytes()).decode(),
            "looks": {str(query): look for query, look in looks.items() if start <= query < start + segment},
        }
        for start in range(0, queries, segment)
    ]
    return _run("choosing", tokens, queries, size) | {
        "layers": [{"chooses": True}] * layers,
        "choosing": list(range(layers)),
        "choosers": heads,
        "k": k,
        "looked": sorted(looks),
        "segments": segments,
        "always": [
            {
                "layers": list(range(layers)),
                "runs": [[0, ALWAYS, [[0, 0, 1, 1]]], [ALWAYS, queries, [[1, 1, ALWAYS + 1, 1]]]],
            }
        ],
    }


def _full(tokens: int, layers: int, heads: int, size: int, looked: int) -> dict[str, Any]:
    queries = tokens + 3
    chosen = np.zeros((layers, heads, 0), "<u2")
    looks = {str(query): _look(query, chosen, size, heads) for query in _looked(tokens, queries, looked)}
    return _run("everything", tokens, queries, size) | {
        "layers": [{"chooses": False}] * layers,
        "choosing": [],
        "choosers": 1,
        "k": 0,
        "looked": [int(q) for q in looks],
        "segments": [{"start": 0, "stop": queries, "rows": 1, "data": "", "looks": looks}],
        "always": [{"layers": list(range(layers)), "runs": [[0, queries, [[0, 0, 1, 1]]]]}],
    }


def _run(label: str, tokens: int, queries: int, size: int) -> dict[str, Any]:
    blocks = [[start, min(tokens, start + 128)] for start in range(0, tokens, 128)]
    return {
        "label": f"{label}(chunk_size={size})",
        "method": label,
        "knobs": {"chunk_size": size},
        "window": 64,
        "chunk_size": size,
        "first": 0,
        "placement": None,
        "bits": 16,
        "off": [],
        "stats": {},
        "blocks": blocks + [[at, at + 1] for at in range(tokens, queries)],
        "warning": "400 tokens are more than it can read" if label == "everything" else None,
        "generated": [{"text": text, "logprob": -0.25, "top": [[text, -0.25]]} for text in (" 4", "8", "2", "9")],
    }


def _looked(tokens: int, queries: int, looked: int) -> list[int]:
    spread = {int(x) for x in np.linspace(0, tokens - 2, looked)}
    return sorted(spread | {*range(tokens - 2, queries)})


def _look(query: int, chosen: np.ndarray[Any, Any], size: int, heads: int) -> dict[str, Any]:
    """A look in which head 0 has what matters, and heads 1, 2, 3 miss it by selection, budget and placement."""
    layers = []
    whys = [None, "selection", "budget", "placement"]
    for rows in chosen:
        lists = [[int(c) for c in row if c != 0xFFFF] for row in rows]
        own = [
            {
                "given": [0.7 if not i else 0.0 for i in range(len(lists[head]))],
                "distances": head if lists[head] else None,
                "mass": [0.5 if not i else 0.01 for i in range(len(lists[head]))],
                "best": [[5, 0.4, 6, int(5 in lists[head])], [query // size, 0.05, -1, 0]] if query >= 48 else [],
                "marked": [[0, 0.4, 6, float(5 in lists[head])]] if query >= 48 else [],
                "recall": 0.6,
                "always_mass": 0.1,
                "reachable": 0.9,
                "why": whys[head % 4] if lists[head] else None,
            }
            for head in range(heads)
        ]
        ranks = [list(range(len(row))) for row in lists]
        scores = [[9.5 - i for i in range(len(row))] for row in lists]
        facts = {"always": 0, "scores": scores, "ranks": ranks, "heads": own}
        layers.append({"chosen": lists if any(lists) else [[]], **facts})
    patterns = [[[20 + 8 * i, 27 + 8 * i] for i in range(len(row))] for row in layers[0]["chosen"]]
    always = [[[max(0, query + 1 - ALWAYS), query + 1, 0, min(query, ALWAYS - 1)]]]
    counts = {"read": 1000, "scored": 24, "full": 4096}
    return {"bytes": counts, "always": always, "distances": patterns, "layers": layers}
