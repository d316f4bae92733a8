"""Endless simple English prose from a seed: the filler of haystacks and the demo model's training text.

The prose comes in small scenes. A scene picks a place, a few people and a few things, and tells four to nine
sentences about them, so names and nouns recur nearby as in real text. No sentence states a fact that
`lce.lab.eval.tasks` could ask about.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

NAMES = (
    "Anna Ben Clara David Emma Felix Grace Henry Ida Jack Karen Leo Maria Nora Oscar Paul Rosa Sam Tom Vera "
    "Walter Alice Peter Lucy Martin Julia George Helen Simon Laura"
).split()
THINGS = (
    "box lamp book chair cup table door clock basket bottle coat hat ring drum letter map blanket bell "
    "candle mirror ladder wagon kite rope knife spoon plate pillow shovel bucket umbrella wallet violin"
).split()
COLOURS = "red blue green yellow white black brown grey silver golden pink purple orange".split()
PLACES = (
    "garden kitchen market forest harbour village school library station cellar attic barn mill church park "
    "bridge castle valley meadow island bakery tower workshop theatre"
).split()
ANIMALS = "dog cat horse bird cow sheep fox rabbit goose duck owl mouse bee frog goat".split()
FOODS = "bread soup cheese apples plums cake honey rice beans tea milk pears nuts fish cherries carrots".split()
ADJECTIVES = (
    "old small large quiet warm cold bright dark narrow wide heavy light strange simple kind tired happy slow "
    "quick gentle careful clever empty broken new"
).split()
WEATHER = (
    "It rained all morning.|The sun was warm and low.|A cold wind came from the north.|The sky was clear.|"
    "Clouds moved slowly over the hills.|Snow lay on the roofs.|The air smelled of wet grass.|"
    "By noon the fog was gone.|The evening was calm and mild.|Thunder rolled far away."
).split("|")
TIMES = (
    "In the morning|In the evening|At noon|Later that day|Before dinner|After a while|On Sunday|Last winter|"
    "Every spring|One day|At night|The next day"
).split("|")

_TEMPLATES = (
    "{time} {name} walked to the {place}.",
    "{name} sat down by the {thing} and waited.",
    "The {animal} slept near the {thing}.",
    "{name} carried a {adj} {thing} across the {place}.",
    "{time} the {place} was {adj} and {adj2}.",
    "{name} and {name2} talked about the {adj} {animal}.",
    "There was a {colour} {thing} beside the {place}.",
    "{name2} bought some {food} at the market.",
    "They ate {food} and {food2} together.",
    "{name} looked at the {colour} {thing} for a long time.",
    '"Have you seen my {thing}?" asked {name}.',
    '"It is too {adj} for me," said {name2}.',
    "The road to the {place} was {adj}.",
    "A {colour} {animal} ran past the {place}.",
    "{name} wanted to learn how to mend a {thing}.",
    "{time} they went home through the {place}.",
    "Nobody knew why the {thing} was so {adj}.",
    "{name2} laughed and gave the {animal} some {food}.",
    "The people of the {place} were {adj} and {adj2}.",
    "{name} wrote a {adj} letter to {name2}.",
    "Behind the {place} stood a {adj} tree.",
    "{time} {name2} cleaned the {thing} with care.",
    "The {animal} did not like the {adj} {place}.",
    "{name} thought about it and then smiled.",
    "He opened the {thing}, but it was empty.",
    "She closed the door and went to the {place}.",
    "They found a {adj} path that led to the {place}.",
    "{name} told {name2} a {adj} story.",
)


def scene(rng: Random) -> list[str]:
    """Return four to nine sentences about one place, two people and two things."""
    place, places = rng.choice(PLACES), rng.sample(PLACES, 2)
    people, things, animal = rng.sample(NAMES, 2), rng.sample(THINGS, 2), rng.choice(ANIMALS)
    sentences = []
    for template in rng.sample(_TEMPLATES, rng.randint(4, 9)):
        first, second = rng.sample(people, 2)
        adjectives, foods = rng.sample(ADJECTIVES, 2), rng.sample(FOODS, 2)
        words = {"time": rng.choice(TIMES), "name": first, "name2": second}
        words["place"] = place if rng.random() < 0.6 else rng.choice(places)
        words |= {"thing": rng.choice(things), "animal": animal, "adj": adjectives[0], "adj2": adjectives[1]}
        words |= {"colour": rng.choice(COLOURS), "food": foods[0], "food2": foods[1]}
        sentences.append(template.format(**words))
    if rng.random() < 0.4:
        sentences.insert(rng.randrange(len(sentences)), rng.choice(WEATHER))
    return sentences


def sentences(rng: Random) -> Iterator[str]:
    """Yield endless prose, a sentence at a time."""
    while True:
        yield from scene(rng)
