"""DCA (An et al., 2024, arXiv:2402.17463), "Training-Free Long-Context Scaling of Large Language Models".

Numbers are those of Llama 2 7B (window 4,096) unless a row says otherwise. Tables and figures are numbered as in the
paper's first version, which the authors' repository has (github.com/HKUNLP/ChunkLlama).
"""

from __future__ import annotations

from lce.lab.papers.benchmark import Published
from lce.lab.papers.entry import Arm, Entry, by_length
from lce.lab.papers.measures import PASS_KEYS, Answers, Distances, Matrix, Perplexity, Speed

PERPLEXITY = "perplexity"
PG19 = "PG19, validation split, windows that begin every 256 tokens"
UP_TO_16 = (1, 2, 4, 8, 16)
UP_TO_48 = (1, 8, 16, 24, 32, 40, 48)

_ROPE_7B = by_length(PERPLEXITY, UP_TO_16, 7.87, ">100", ">100", ">100", ">100")
_DCA_7B = by_length(PERPLEXITY, UP_TO_16, 7.87, 7.67, 7.64, 7.89, 15.87)

TABLE_1 = Entry(
    "dca:table1",
    "perplexity by length, training-free methods",
    f"{PG19}, Llama 2 7B",
    (
        Arm("RoPE", "full", paper=_ROPE_7B),
        Arm("ReRoPE", "rerope", paper=by_length(PERPLEXITY, UP_TO_16, 7.94, 7.75, "OOM", "OOM", "OOM")),
        Arm("PI", "full", rope="linear", paper=by_length(PERPLEXITY, UP_TO_16, 7.87, 9.19, 15.11, ">100", ">100")),
        Arm("NTK", "full", rope="ntk", paper=by_length(PERPLEXITY, UP_TO_16, 7.87, 11.98, 26.12, 58.91, ">100")),
        Arm("NTK-YaRN", "full", rope="yarn", paper=by_length(PERPLEXITY, UP_TO_16, 7.87, 8.06, 9.82, 11.74, 41.57)),
        Arm("ChunkLlama", "dca", paper=_DCA_7B),
    ),
    (Perplexity(),),
    UP_TO_16,
    claim="the model's own RoPE fails past its window; DCA holds to 8 windows, with 0.02 more perplexity than in one",
    same=True,
    note="DCA with Llama 2 13B: 7.15, 6.95, 6.99, 7.90, 15.14; with 70B: 5.24, 5.18, 5.21, 5.30, 5.59",
)

TABLE_2 = Entry(
    "dca:table2",
    "perplexity at up to 48 windows",
    f"{PG19}, Llama 2 7B; also models of 16k (NTK) and 32k (PI), and Llama 2 70B",
    (
        Arm("RoPE", "full", paper=by_length(PERPLEXITY, UP_TO_48, 7.87, *[">100"] * 6)),
        Arm(
            "ChunkLlama", "dca", paper=by_length(PERPLEXITY, UP_TO_48, 7.87, 7.89, 15.87, 43.57, 96.21, ">100", ">100")
        ),
    ),
    (Perplexity(),),
    UP_TO_48,
    claim="7B fails from 16 windows on; 70B and models that were trained on longer texts do not",
    samples=4,
    same=True,
    note="at 4k, 32k, 64k, 96k, 128k, 160k, 192k: DCA with Llama 2 70B 5.24, 5.30, 5.59, 5.80, 6.12, 6.52, 7.05; with "
    "CodeLlama 7B 8.93, 8.36, 8.13, 8.33, 8.66, 9.30, 9.83; with Together 7B 8.21, 7.64, 7.59, 7.64, 7.67, 7.74, 7.83",
)

TABLE_3 = Entry(
    "dca:table3",
    "few-shot questions and summaries",
    "NarrativeQA (0-shot), Qasper and QuALITY (2-shot), QMSum (1-shot), at most 16,384 tokens, Llama 2 7B",
    (
        Arm("RoPE", "full"),
        Arm(
            "ChunkLlama",
            "dca",
            paper={("NarrativeQA", 0): 20.0, ("Qasper", 0): 28.2, ("QuALITY", 0): 35.6, ("QMSum", 0): 14.7},
        ),
    ),
    (Answers(("several_keys", "whereabouts")),),
    (1, 4),
    claim="without training, within 3 points of Llama 2 Long; 8 points above Llama 2 70B",
    note="its few-shot prompts are not read; averages: ChunkLlama 7B 24.6, 13B 29.7, 70B 37.8; "
    "Llama 2 70B 29.5, Longlora 70B 37.2, Llama 2 Long 70B 40.7",
)

TABLE_4 = Entry(
    "dca:table4",
    "closed questions on long documents",
    "L-Eval: TOEFL, QuALITY, Coursera, SFiction; Llama 2 7B chat",
    (
        Arm(
            "RoPE",
            "full",
            paper={("tpo", 0): 51.67, ("quality", 0): 37.62, ("coursera", 0): 29.21, ("sci_fi", 0): 60.15},
        ),
        Arm(
            "ChunkLlama",
            "dca",
            paper={("tpo", 0): 57.62, ("quality", 0): 35.14, ("coursera", 0): 32.12, ("sci_fi", 0): 61.72},
        ),
    ),
    (Answers(("several_keys", "whereabouts")),),
    (1, 4),
    suite=Published("l-eval", ("tpo", "quality", "coursera", "sci_fi")),
    claim="70B reaches 94% of gpt-3.5-turbo-16k (63.20 of 67.03 on average)",
    note="averages: ChunkLlama chat 7B 46.64, 13B 52.04, 70B 63.20",
)

# The positions that Figures 1 and 2 print beside their cells: of keys, and of queries that see keys of other chunks.
_KEYS = [0, 1, 2, 3, 4, 5] * 2
_QUERIES = {"intra and inter": [9] * 12, "with successive": [6, 7, 8, 9, 9, 9] * 2}


def _printed(row: str) -> Matrix:
    """The distances of a figure, None in empty cells."""

    def cell(i: int, j: int) -> int | None:
        if j > i or (row == "intra" and i // 6 != j // 6):
            return None
        if row == "RoPE":
            return i - j
        return (_KEYS if i // 6 == j // 6 else _QUERIES[row])[i] - _KEYS[j]

    return [[cell(i, j) for j in range(12)] for i in range(12)]


FIGURE_1 = Entry(
    "dca:figure1",
    "the distances of RoPE beyond its window",
    "12 tokens, window 6",
    (Arm("RoPE", "full", paper={("equal cells", 0): 1.0}),),
    (Distances(12, 6, _printed),),
    same=True,
)

FIGURE_2 = Entry(
    "dca:figure2",
    "the distances of DCA, part by part",
    "12 tokens, chunks of 6, window 10, local window 4",
    tuple(
        Arm(name, "dca", {"chunk_size": 6, "parts": parts}, paper={("equal cells", 0): 1.0})
        for name, parts in (("intra", "intra"), ("intra and inter", "intra+inter"), ("with successive", "all"))
    ),
    (Distances(12, 10, _printed),),
    same=True,
    claim="no distance exceeds 9, and across a chunk's border the nearest keys keep theirs",
)

FIGURE_3 = Entry(
    "dca:figure3",
    "time and memory of attention",
    "Llama 2 7B on one A100 of 80 GB, prompts of NarrativeQA, 20 runs",
    (Arm("attention", "full"), Arm("DCA", "dca")),
    (Speed(),),
    (1, 2, 4, 8),
    samples=3,
    claim="beside flash attention, DCA takes about as much time and memory",
    note="plotted, and not read; lce bench has the machine's own limits beside its figures",
)

FROM_PLOT = "the paper's numbers are read off its plot"

_FIGURE_4 = (2, 3, 4, 8)
FIGURE_4 = Entry(
    "dca:figure4",
    "the three parts of DCA",
    "PG19 and pass keys at 8k, 12k, 16k and 32k; Llama 2 13B",
    (
        Arm(
            "intra",
            "dca",
            {"parts": "intra"},
            paper=by_length(PERPLEXITY, _FIGURE_4, 7.87, 8.10, 7.84, 7.85)
            | by_length("pass keys", _FIGURE_4, 0.45, 0.3, 0.2, 0.1),
        ),
        Arm(
            "intra and inter",
            "dca",
            {"parts": "intra+inter"},
            paper=by_length(PERPLEXITY, _FIGURE_4, 12.1, 16.3, 21.3, 40.2)
            | by_length("pass keys", _FIGURE_4, 0.4, 0.5, 0.1, 0.0),
        ),
        Arm(
            "with successive",
            "dca",
            {"parts": "all"},
            paper=by_length(PERPLEXITY, _FIGURE_4, 6.95, 6.97, 6.99, 7.90)
            | by_length("pass keys", _FIGURE_4, 1.0, 1.0, 1.0, 0.8),
        ),
    ),
    (Perplexity(), PASS_KEYS),
    _FIGURE_4,
    claim="intra alone: low perplexity, and pass keys of other chunks are lost; with inter: high perplexity, some "
    "more pass keys; all three: low perplexity, and pass keys are found",
    same=True,
    note=f"{FROM_PLOT}; the model is told by Table 1, which has the same perplexities for 13B",
)

FIGURE_5 = Entry(
    "dca:figure5",
    "pass keys by depth and length",
    "pass keys at 4k to 24k tokens and 16 even depths, 20 runs each; Llama 2 13B",
    (
        Arm("PI", "full", rope="linear", paper={}),
        Arm("NTK", "full", rope="ntk", paper={}),
        Arm("ChunkLlama", "dca", paper=by_length("pass keys", (1, 2, 3, 4), 1.0, 1.0, 1.0, 1.0)),
    ),
    (PASS_KEYS,),
    (1, 2, 3, 4, 5, 6),
    claim="DCA finds all within 18k tokens; NTK 40 to 80% of those in the middle; DCA fails first at the beginning",
    same=True,
    note="a heat map in the paper; lce eval report --plots draws ours by depth from a --record",
)

_FIGURE_6 = (0.5, 1, 2, 4, 8, 16, 32, 48)
FIGURE_6 = Entry(
    "dca:figure6",
    "pass keys at up to 48 windows",
    "pass keys at 2k to 192k tokens, 20 runs each; Llama 2 13B and Together 7B (32k)",
    (
        Arm("RoPE", "full", paper=by_length("pass keys", _FIGURE_6, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)),
        Arm("ChunkLlama", "dca", paper=by_length("pass keys", _FIGURE_6, 1.0, 1.0, 1.0, 1.0, 0.8, 0.1, 0.0, 0.0)),
    ),
    (PASS_KEYS,),
    _FIGURE_6,
    claim="with Llama 2, DCA holds to 32k tokens (8 windows); with Together's model, 90% at 192k (6 of its windows)",
    same=True,
    note=f"{FROM_PLOT}; Together 7B: 1.0 to 32k and 0 beyond, with DCA 1.0 to 128k and 0.9 at 192k",
)

ENTRIES = (TABLE_1, TABLE_2, TABLE_3, TABLE_4, FIGURE_1, FIGURE_2, FIGURE_3, FIGURE_4, FIGURE_5, FIGURE_6)
