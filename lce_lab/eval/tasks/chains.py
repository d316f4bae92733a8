"""Tasks whose answers follow from several statements, each of which leads to the next."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from random import Random

from lce_lab.eval.prose import NAMES, PLACES, THINGS
from lce_lab.eval.tasks.base import MadeTask, Puzzle, Question, digits, distinct, names

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def _name(rng: Random) -> str:
    return rng.choice(LETTERS) + digits(rng, 1)


@dataclass(frozen=True)
class Variables(MadeTask):
    """Numbers copied between variables; the question asks for all variables with a number (RULER's variable tracking).

    The answer lists the copies one by one, so each step of the answer follows from one copy.
    """

    name = "variables"
    metrics = ("recall",)
    hops: int = 2
    chains: int = 2

    def puzzle(self, rng: Random, n: int = 0) -> Puzzle:
        length = self.hops + 1
        names = distinct(rng, length * self.chains, _name)
        values = distinct(rng, self.chains, lambda rng: digits(rng, 3))
        chains = [names[i * length : (i + 1) * length] for i in range(self.chains)]
        order = [i for i in range(self.chains) for _ in range(length)]
        rng.shuffle(order)
        seen = [0] * self.chains
        statements: list[str] = []
        facts: list[list[int]] = [[] for _ in chains]
        for chain in order:
            at = seen[chain]
            source = chains[chain][at - 1] if at else values[chain]
            facts[chain].append(len(statements))
            statements.append(f"Copy {source} to {chains[chain][at]}.")
            seen[chain] += 1
        questions = []
        for value, copies, where in zip(values, chains, facts, strict=True):
            answer = ", ".join([copies[0], *(f"{one} to {next_one}" for one, next_one in pairwise(copies))])
            text = f"Which names have {value}? Copy {value} to"
            questions.append(Question(text, answer, tuple(copies), tuple(where)))
        return Puzzle(tuple(statements), tuple(questions))


@dataclass(frozen=True)
class Walk(MadeTask):
    """A list of directed edges, one from each node. The question asks for the edges of a walk from a given node."""

    name = "walk"
    metrics = ("recall",)
    fills = True
    least = 4
    steps: int = 3

    def puzzle(self, rng: Random, n: int = 0) -> Puzzle:
        n = max(n, self.steps + 1)
        nodes = names(rng, n)
        after = {node: nodes[(i + 1) % n] for i, node in enumerate(nodes)}
        order = rng.sample(nodes, n)
        number = {node: i for i, node in enumerate(order)}
        questions = []
        for start in rng.sample(nodes, min(n, 8)):
            path = [start]
            for _ in range(self.steps):
                path.append(after[path[-1]])
            facts = tuple(number[node] for node in path[:-1])
            answer = ", ".join([path[1], *(f"{node} leads to {end}" for node, end in pairwise(path[1:]))])
            text = f"Walk {self.steps} steps from {start}. {start} leads to"
            questions.append(Question(text, answer, tuple(path[1:]), facts))
        return Puzzle(tuple(f"{node} leads to {after[node]}." for node in order), tuple(questions))


@dataclass(frozen=True)
class Whereabouts(MadeTask):
    """People carry things about; the question asks who had a thing last, and where it is (bAbI, arXiv:1502.05698)."""

    name = "whereabouts"
    metrics = ("recall",)
    people: int = 3
    things: int = 3
    events: int = 12

    def puzzle(self, rng: Random, n: int = 0) -> Puzzle:
        names, things = rng.sample(NAMES, self.people), rng.sample(THINGS, self.things)
        at: dict[str, tuple[str, int]] = {}  # a person's place, and the index of the statement about it
        holder: dict[str, tuple[str, int]] = {}  # a thing's holder, and the index of the statement about it
        lying: dict[str, tuple[str, str, tuple[int, ...]]] = {}  # a thing's last holder, place, and statement indices
        statements: list[str] = []

        def move(name: str) -> None:
            place = rng.choice([place for place in PLACES if place != at.get(name, ("", 0))[0]])
            at[name] = (place, len(statements))
            statements.append(f"{name} moved to the {place}.")

        for name in names[: max(1, self.events // 3)]:
            move(name)
        while len(statements) < self.events or not (holder or lying):
            name, draw = rng.choice([name for name in names if name in at]), rng.random()
            here = [thing for thing in things if thing not in lying or lying[thing][1] == at[name][0]]
            free = [thing for thing in here if thing not in holder]
            held = [thing for thing, (who, _) in holder.items() if who == name]
            if draw < 0.35 and free:
                thing = rng.choice(free)
                lying.pop(thing, None)
                holder[thing] = (name, len(statements))
                statements.append(f"{name} picked up the {thing}.")
            elif draw < 0.5 and held:
                thing = rng.choice(held)
                name, taken = holder.pop(thing)
                place, moved = at[name]
                lying[thing] = (name, place, (taken, moved, len(statements)))
                statements.append(f"{name} put down the {thing}.")
            else:
                move(name)
        for thing, (name, taken) in holder.items():
            place, moved = at[name]
            lying[thing] = (name, place, (taken, moved))
        questions = []
        for thing in rng.sample(sorted(lying), len(lying)):
            name, place, facts = lying[thing]
            text = f"Where is the {thing}, and who had it last? The {thing} was with"
            answer = f"{name} in the {place}"
            questions.append(Question(text, answer, (name, place), tuple(sorted(set(facts)))))
        return Puzzle(tuple(statements), tuple(questions))
