"""Prints tables of what study.py recorded: what each row found by length and by kind, what it read, and perplexities.

    python benchmarks/study_tables.py benchmarks/record/study/smollm2
    python benchmarks/study_tables.py benchmarks/record/study/smollm2 --kinds many_facts,similar

The first table has, for each length, the questions answered of those asked, and the 95% interval of that share in
percent; for the length with most rows, the bytes that a token reads, and their share of all keys and values; and
perplexities of what was scored of the second half of each length. Then each length has a table by kind, the rows from
the best to the worst. Its last column is the p of McNemar's exact test, one-sided, of each row against the best: how
likely the best answers so many more of the same questions if it is no better. The test takes questions of one document
as independent.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lce.methods.measured import sign_test
from lce.sizes import size_text
from lce.terminal.output import markdown
from lce_lab.eval.naming import engine_key, engine_parts, fitted, method_names, model_names
from lce_lab.eval.perplexity import Perplexity
from lce_lab.eval.record import Answer, Loss, Record
from lce_lab.eval.scores import Score, mean_of

Place = tuple[str, int]  # a row's name and a length


@dataclass
class Study:
    """The measurements of one model."""

    answers: dict[Place, dict[str, Answer]] = field(default_factory=lambda: defaultdict(dict))  # by prompt
    losses: dict[Place, list[Loss]] = field(default_factory=lambda: defaultdict(list))  # of the second half

    @property
    def lengths(self) -> list[int]:
        return sorted({length for _, length in self.answers})

    def cache_bytes(self) -> float:
        """Return the bytes of keys and values of a token: `full` reads those of all tokens."""
        full = [x for own in self.answers.values() for x in own.values() if x.method == "full"]
        return mean_of(x.read_bytes / x.prompt_tokens for x in full if x.read_bytes and x.prompt_tokens) or 0.0

    def ranked(self, length: int) -> list[str]:
        """Return the rows asked at a length, the best first; rows with fewer answers are behind the others."""
        rows = {name: answers for (name, own), answers in self.answers.items() if own == length}
        return sorted(rows, key=lambda name: (-len(rows[name]), -Score.of(rows[name].values()).mean))


def read(folder: Path, kinds: Sequence[str] = ()) -> dict[str, Study]:
    """Return the study of each model in the records of a folder, by the model's name."""
    lines = [(fitted(x), line) for file in sorted(folder.glob("*.jsonl")) for _, x, line in Record(file).items()]
    lines = [(sample, line) for sample, line in lines if "again" not in sample]
    models, names = model_names(lines), method_names(lines)
    found: dict[str, Study] = defaultdict(Study)
    for sample, line in lines:
        rope = engine_parts(sample)[1].get("rope")
        name = names[engine_key(sample)]
        name += f" rope={rope}" if rope and " rope=" not in name else ""  # also where other knobs tell rows apart
        if (reader := sample.get("read_by", name)) != name:  # the RoPE scaling of both is that of the reader
            name = f"{name.replace(f' rope={rope}', '')} read={reader}"
        study, place = found[models[str(sample["model"])]], (name, sample["length"])
        if isinstance(line, Answer) and (not kinds or line.kind in kinds):
            study.answers[place][str(line.prompt)] = line
        elif isinstance(line, Loss) and sample["first"] >= sample["length"] // 2:
            study.losses[place].append(line)
    return found


def by_length(study: Study) -> list[str]:
    """Return the table of all lengths."""
    borders = sorted({length for _, length in study.losses})
    spans = [f"perplexity, {length // 2:,}–{length:,}" for length in borders]
    longest = max(study.lengths, key=lambda n: (sum(own == n for _, own in study.answers), n))
    order = list(dict.fromkeys(x for n in (longest, *study.lengths) for x in study.ranked(n)))
    order += [name for name in dict.fromkeys(name for name, _ in study.losses) if name not in order]
    rows = []
    for name in order:
        cells = [found(study.answers.get((name, length))) for length in study.lengths]
        losses = [study.losses.get((name, length)) for length in borders]
        means = ["" if x is None else f"{Perplexity.of(name, 'stream', 0, 0, x).perplexity:.2f}" for x in losses]
        rows.append([f"`{name}`", *cells, *reading(study, name, longest), *means])
    head = ["row", *(f"{length:,} tokens" for length in study.lengths), f"read a token at {longest:,}", "of the cache"]
    return markdown([*head, *spans], rows)


def found(answers: dict[str, Answer] | None) -> str:
    """Return the questions answered / those asked, and the 95% interval of the share in percent."""
    if not answers:
        return ""
    score = Score.of(answers[key] for key in sorted(answers))
    return f"{points(answers)}/{len(answers)} ({100 * score.low:.0f}–{100 * score.high:.0f})"


def points(answers: dict[str, Answer]) -> str:
    """Return the sum of the scores, which is the number of right answers if no score is a fraction."""
    return f"{round(sum(x.value for x in answers.values()), 1):g}"


def reading(study: Study, name: str, length: int) -> tuple[str, str]:
    """Return what a token reads, and which share of the cache it is."""
    known = [x for x in study.answers.get((name, length), {}).values() if x.read_bytes and x.prompt_tokens]
    if not known:
        return "", ""
    n_bytes, held = (sum(x) / len(known) for x in zip(*((x.read_bytes, x.prompt_tokens) for x in known), strict=True))
    cache = held * study.cache_bytes()
    return size_text(round(n_bytes)), f"{n_bytes / cache:.0%}" if cache else ""


def by_kind(study: Study, length: int) -> list[str]:
    """Return the table of one length: right answers of each kind, and each row beside the best."""
    order = study.ranked(length)
    kinds = sorted({x.kind for name in order for x in study.answers[name, length].values() if x.kind})
    best, rows = study.answers[order[0], length], []
    for name in order:
        own = study.answers[name, length]
        parts = [{key: x for key, x in own.items() if x.kind == kind} for kind in kinds]
        both = sorted(own.keys() & best.keys())
        p = sign_test([best[key].value for key in both], [own[key].value for key in both])
        cells = [f"{points(part)} of {len(part)}" if part else "" for part in parts]
        behind = "" if own is best else f"{p:.3f}" if p >= 0.001 else "< 0.001"
        rows.append([f"`{name}`", *cells, found(own), *reading(study, name, length), behind])
    return markdown(["row", *kinds, "all", "read a token", "of the cache", f"p: `{order[0]}` is no better"], rows)


def pages(studies: dict[str, Study]) -> Iterator[str]:
    """Yield the lines of all tables."""
    for model, study in studies.items():
        if study.answers:
            yield from (f"## {model}", "", *by_length(study), "")
            for length in study.lengths:
                yield from (f"### {model} at {length:,} tokens", "", *by_kind(study, length), "")


def main(argv: Sequence[Any] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kinds", default="", help="the questions that count, such as many_facts,similar")
    args = parser.parse_args(argv)
    print("\n".join(pages(read(args.folder, [kind for kind in args.kinds.split(",") if kind]))).rstrip())


if __name__ == "__main__":
    main()
