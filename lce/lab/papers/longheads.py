"""LongHeads (Lu et al., 2024, arXiv:2402.10685), "Multi-Head Attention is Secretly a Long Context Processor".

The paper's model is Llama 2 7B (window 4,096, chunks of 256, 16 of them). Of its numbers only two sources are at hand:
the abstract, and the plot of pass keys in the authors' repository (github.com/LuLuLuyi/LongHeads).
"""

from __future__ import annotations

from typing import Any

from lce.lab.papers.benchmark import Published
from lce.lab.papers.choices import Chosen
from lce.lab.papers.entry import NOT_AT_HAND, Arm, Entry, OfWindow, by_length
from lce.lab.papers.measures import PASS_KEYS, Answers, Operations, Perplexity

_LONGBENCH = Published("longbench")
_SCALED = (Arm("PI", "full", rope="linear"), Arm("NTK", "full", rope="ntk"), Arm("LM-Infinite", "lm_infinite"))
_METHODS = (Arm("RoPE", "full"), *_SCALED, Arm("LongHeads", "longheads"))
_UNREAD = "which rows and numbers the paper has here is not at hand: these are our own"


def _sized(parts: int, chunks: int) -> dict[str, Any]:
    """Chunks of a part of the window, and how many of them."""
    return {"chunk_size": OfWindow(parts), "chunks": chunks}


_PLOTTED = (1, 4, 8, 16, 32)
PASSKEY = Entry(
    "longheads:passkey",
    "pass keys by length",
    "pass keys at 4k to 128k tokens, 50 each, Llama 2 7B",
    (
        Arm("RoPE", "full", paper=by_length("pass keys", _PLOTTED, 1.0, 0.0, 0.0, 0.0, 0.0)),
        *_SCALED,
        Arm("LongHeads", "longheads", paper=by_length("pass keys", _PLOTTED, 1.0, 0.94, 0.98, 0.96, 1.0)),
    ),
    (PASS_KEYS,),
    _PLOTTED,
    claim="100% at 128k (abstract)",
    same=True,
    note="the numbers are read off the plot in the authors' repository",
)

TABLE_1 = Entry(
    "longheads:table1",
    "perplexity by length",
    "sliding windows of PG19, Llama 2 7B",
    _METHODS,
    (Perplexity("last"),),
    (1, 4, 8),
    same=True,
    note="the paper's numbers are not at hand; its rows NTK init and PI init scale RoPE while the prompt is read alone",
)

TABLE_2 = Entry(
    "longheads:table2",
    "methods on LongBench",
    "LongBench, Llama 2 7B",
    _METHODS,
    (Answers(("several_keys", "variables", "whereabouts")),),
    (1, 4, 8),
    suite=_LONGBENCH,
    note="the paper's numbers are not at hand",
)

TABLE_3 = Entry(
    "longheads:table3",
    "which chunks heads choose: hit@1, hit@5, cover, Gini",
    "hit@1, hit@5, cover and Gini of the chosen chunks, Llama 2 7B",
    (Arm("LongHeads", "longheads"), Arm("random", "longheads", {"rank": "random"})),
    (Chosen(),),
    (4, 16),
    same=True,
    note="the paper's numbers are not at hand",
)

TABLE_4 = Entry(
    "longheads:table4",
    "LongHeads with one thing changed",
    "random chunks, the last ones, no first or last chunk, one choice for heads or layers; Llama 2 7B",
    (
        Arm("LongHeads", "longheads"),
        Arm("random chunks", "longheads", {"rank": "random", "keep_first": False, "keep_last": False}),
        Arm("random between", "longheads", {"rank": "random"}),
        Arm("the worst chunks", "longheads", {"rank": "last"}),
        Arm("without the first chunk", "longheads", {"keep_first": False}),
        Arm("without the last chunk", "longheads", {"keep_last": False}),
        Arm("one choice a layer", "longheads", {"fix_head": True}),
        Arm("one choice for all layers", "longheads", {"fix_layer": True}),
        Arm("one choice in all", "longheads", {"fix_head": True, "fix_layer": True}),
    ),
    (Answers(("passkey", "several_keys")),),
    (4, 16),
    suite=_LONGBENCH,
    note="the paper's numbers are not at hand",
)

FIGURE_5 = Entry(
    "longheads:figure5",
    "how many chunks a head attends",
    NOT_AT_HAND,
    tuple(Arm(f"{n} chunks of W/16", "longheads", _sized(16, n)) for n in (4, 6, 8, 12, 16)),
    (Answers(("passkey", "several_keys")),),
    (4, 16),
    suite=_LONGBENCH,
    note=_UNREAD,
)

TABLE_6 = Entry(
    "longheads:table6",
    "the size of a chunk, the window full",
    NOT_AT_HAND,
    tuple(Arm(f"{n} chunks of W/{n}", "longheads", _sized(n, n)) for n in (8, 16, 32, 64)),
    (Answers(("passkey", "several_keys")),),
    (4, 16),
    suite=_LONGBENCH,
    note=_UNREAD,
)

REACH = Entry(
    "longheads:reach",
    "how many tokens all heads can see together",
    "chunks of a head × heads × layers",
    (Arm("LongHeads", "longheads", paper={}),),
    (Operations(("chunks", "tokens")),),
    same=True,
)

ENTRIES = (PASSKEY, TABLE_1, TABLE_2, TABLE_3, TABLE_4, FIGURE_5, TABLE_6, REACH)
