"""The metrics of RULER, of NeedleBench V2 (Li et al., 2025) and of Counting-Stars (Song et al., 2025)."""

from __future__ import annotations

import json
import re
from typing import Any

from lce_lab.eval.metrics import libraries

# The names of the list of counts in an answer's JSON.
_NAMES = ("little_penguin", "小企鹅")
# (whether the answer lists the right star count, whether it lists the wrong one) -> the answer's points
_POINTS = {(True, False): 1.0, (True, True): 0.5, (False, True): 0.25, (False, False): 0.0}


def match_all(prediction: str, references: tuple[str, ...]) -> float:
    """Return the share of the references that the answer contains, ignoring case (RULER's string_match_all)."""
    return sum(_contains(prediction, reference) for reference in references) / len(references)


def match_part(prediction: str, references: tuple[str, ...]) -> float:
    """Return 1 if the answer contains one of the references, ignoring case (RULER's string_match_part)."""
    return float(any(_contains(prediction, reference) for reference in references))


def _contains(prediction: str, reference: str) -> bool:
    return reference.lower() in re.sub(r"[\x00-\x1f]", "\n", prediction.strip()).strip().lower()


def keywords(prediction: str, references: tuple[str, ...]) -> float:
    """Return the share of the key words that the answer contains (NeedleBench V2's retrieval)."""
    return sum(reference in prediction for reference in references) / len(references)


def boxed(prediction: str, references: tuple[str, ...]) -> float:
    r"""Return 1 if the last `\boxed{...}` of the answer has the right name (NeedleBench V2's reasoning)."""
    text = _last_box(prediction) or "None"
    text = re.sub(r"\\boxed\{([^}]+)\}", r"\1", re.sub(r"\\text\{([^}]+)\}", r"\1", text))
    text = re.sub(r"\s+", " ", re.sub(r"\\[\[\]]", "", text).replace("\\", "")).strip()
    text = re.sub("[\"']", "", text).replace("~", " ").strip()
    return float(text in [reference.strip() for reference in references])


def _last_box(text: str) -> str:
    r"""Return the content of the last `\boxed{...}`, without outer braces; "" if the box is not closed."""
    start = text.rfind("\\boxed")
    if start < 0 or not text.startswith("{", start + len("\\boxed")):
        return ""
    depth = 0
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if text[at] == "}" and depth == 0:
            return re.sub(r"^\{(.*)\}$", r"\1", text[start + len("\\boxed{") : at])
    return ""


def stars(prediction: str, references: tuple[str, ...]) -> float:
    """Return the share of the right star counts that the answer lists (Counting-Stars' acquisition)."""
    listed = _listed(prediction, len(references))
    return sum(int(reference) in listed for reference in references) / len(references)


def corrected_stars(prediction: str, references: tuple[str, ...]) -> float:
    """Return the mean points of the corrected counts (Counting-Stars' reasoning).

    A reference such as `5/6` has the right and the wrong count. The answer gets 1 point if it lists only the right
    count, 1/2 for both counts, and 1/4 for only the wrong count.
    """
    listed = _listed(prediction, len(references))
    pairs = [reference.split("/") for reference in references]
    return sum(_POINTS[int(right) in listed, int(wrong) in listed] for right, wrong in pairs) / len(pairs)


def _listed(answer: str, most: int) -> list[Any]:
    """Return the first `most` values of the list of counts in the answer's JSON; [] if there is no such list."""
    text = answer.replace("```", "").replace("json", "").strip() if "```" in answer else answer
    if "[" not in text:
        return []
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = libraries.library("json_repair").loads(text)
    found: Any = next((content[name] for name in _NAMES if name in content), []) if isinstance(content, dict) else []
    return found[:most] if isinstance(found, list) else []
