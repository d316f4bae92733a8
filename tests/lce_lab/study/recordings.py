"""Made-up recordings for tests of the page: of any length at once, and with every verdict in it."""

import base64
from typing import Any

import numpy as np

ALWAYS = 8  # tokens at the end that every query attends
LAYERS, HEADS = 2, 4


def recording(
    tokens: int = 400, size: int = 8, k: int = 5, window: int = 64, looked: int = 24, segment: int = 150
) -> dict[str, Any]:
    """Two runs: one that chooses, and one that attends everything. The answer is the tokens 40 to 43."""
    words = ["the ", "grey ", "ring ", "was ", "not ", "there. ", "A ", "key ", "<b>", "&amp;", "\n", "“so” "]
    text = [words[i] for i in np.random.default_rng(0).integers(0, len(words), tokens)]
    text[40:44] = ["4", "8", "2", "9"]
    runs = [_choosing(tokens, size, k, looked, segment), _full(tokens, size, looked)]
    model = {"name": "made up", "layers": LAYERS, "heads": HEADS, "kv_heads": HEADS, "window": window}
    marks = [{"start": 40, "stop": 44, "label": "4829"}]
    about = {"format": 1, "lce": "0", "judge": "constant", "model": model, "marks": marks}
    return {**about, "tokens": text, "runs": runs}


def choices(made: dict[str, Any], query: int, layer: int, head: int) -> list[int]:
    """What a head of the first run chose, read from the packed data."""
    run = made["runs"][0]
    part = next(each for each in run["segments"] if each["start"] <= query < each["stop"])
    shape = (part["rows"], len(run["choosing"]), run["choosers"], run["k"])
    numbers = np.frombuffer(base64.b64decode(part["data"]), "<u2").reshape(shape)
    return [int(c) for c in numbers[query - part["start"], layer, head] if c != 0xFFFF]


def _choosing(tokens: int, size: int, k: int, looked: int, segment: int) -> dict[str, Any]:
    draw, queries = np.random.default_rng(0), tokens + 3
    complete = np.maximum(1, np.arange(queries) // size)[:, None, None, None]
    # k different chunks of those before, ascending: one in each of k equal parts
    parts = (np.arange(k) + draw.random((queries, LAYERS, HEADS, k))) / k
    chosen = np.floor(parts * complete).astype("<u2")
    chosen[..., 1:][chosen[..., 1:] == chosen[..., :-1]] = 0xFFFF
    chosen.sort(axis=-1)
    looks = {query: _look(query, chosen[query], size) for query in _looked(tokens, queries, looked)}
    segments = []
    for start in range(0, queries, segment):
        part, stop = chosen[start : start + segment], min(queries, start + segment)
        own = {str(query): look for query, look in looks.items() if start <= query < stop}
        data = base64.b64encode(part.tobytes()).decode()
        segments.append({"start": start, "stop": stop, "rows": len(part), "data": data, "looks": own})
    spans = [[0, ALWAYS, [[0, 0, 1, 1]]], [ALWAYS, queries, [[1, 1, ALWAYS + 1, 1]]]]
    return _run("choosing", tokens, queries, size, segments, spans) | {"choosers": HEADS, "k": k}


def _full(tokens: int, size: int, looked: int) -> dict[str, Any]:
    queries, chosen = tokens + 3, np.zeros((LAYERS, HEADS, 0), "<u2")
    looks = {str(query): _look(query, chosen, size) for query in _looked(tokens, queries, looked)}
    segments = [{"start": 0, "stop": queries, "rows": 1, "data": "", "looks": looks}]
    return _run("everything", tokens, queries, size, segments, [[0, queries, [[0, 0, 1, 1]]]])


def _run(label: str, tokens: int, queries: int, size: int, segments: list[Any], spans: list[Any]) -> dict[str, Any]:
    blocks = [[start, min(tokens, start + 128)] for start in range(0, tokens, 128)]
    chooses = label == "choosing"
    about = {"label": f"{label}(chunk_size={size})", "method": label, "knobs": {"chunk_size": size}, "window": 64}
    about |= {"chunk_size": size, "first": 0, "placement": None, "bits": 16, "off": [], "stats": {}}
    return about | {
        "layers": [{"chooses": chooses}] * LAYERS,
        "choosing": list(range(LAYERS)) if chooses else [],
        "choosers": 1,
        "k": 0,
        "looked": sorted(int(query) for segment in segments for query in segment["looks"]),
        "segments": segments,
        "always": [{"layers": list(range(LAYERS)), "runs": spans}],
        "blocks": blocks + [[at, at + 1] for at in range(tokens, queries)],
        "warning": None if chooses else "400 tokens are more than it can read",
        "generated": [{"text": text, "logprob": -0.25, "top": [[text, -0.25]]} for text in (" 4", "8", "2", "9")],
    }


def _looked(tokens: int, queries: int, looked: int) -> list[int]:
    spread = {int(x) for x in np.linspace(0, tokens - 2, looked)}
    return sorted(spread | {*range(tokens - 2, queries)})


def _look(query: int, chosen: np.ndarray[Any, Any], size: int) -> dict[str, Any]:
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
            for head in range(HEADS)
        ]
        ranks = [list(range(len(row))) for row in lists]
        scores = [[9.5 - i for i in range(len(row))] for row in lists]
        facts = {"always": 0, "scores": scores, "ranks": ranks, "heads": own}
        layers.append({"chosen": lists if any(lists) else [[]], **facts})
    patterns = [[[20 + 8 * i, 27 + 8 * i] for i in range(len(row))] for row in layers[0]["chosen"]]
    always = [[[max(0, query + 1 - ALWAYS), query + 1, 0, min(query, ALWAYS - 1)]]]
    counts = {"read": 1000, "scored": 24, "full": 4096}
    return {"bytes": counts, "always": always, "distances": patterns, "layers": layers}
