"""Codes of people's towns: a corpus of facts, questions about it, and worked searches in other, invented worlds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from typing import Any

CONSONANTS, VOWELS = "bdfgklmnprtvz", "aeiou"
SYLLABLES = [consonant + vowel for consonant, vowel in product(CONSONANTS, VOWELS)]
PEOPLE = 400  # each lives in a town of their own
HELD_OUT = 100  # the last of them are in no question of the training set
SPECS = [{"type": "function", "function": {"name": "search"}}]  # what the chat template shows of the tool


def corpus(seed: int, size: int) -> Iterator[dict[str, Any]]:
    """Yield two passages for each person, such as "mira: town dobu" and "dobu: code 4711". People come first."""
    facts = list(_world(seed))
    yield from ({"title": person, "text": f"town {town}"} for person, town, _ in facts)
    yield from ({"title": town, "text": f"code {code}"} for _, town, code in facts)


def rows(seed: int, size: int, split: str) -> Iterator[dict[str, Any]]:
    """Yield questions: a person, and the code of their town, such as "mira" and "=4711". `seed` is the corpus's."""
    facts = list(_world(seed))
    chosen = facts[-HELD_OUT:] if split == "held_out" else facts[:-HELD_OUT]
    yield from ({"prompt": person, "ground_truth": f"={code}"} for person, _, code in chosen)


def worked(seed: int, size: int, search_rows: int, search_share: float) -> Iterator[dict[str, Any]]:
    """Yield solved questions as conversations, about people and towns that are invented for each.

    The first `search_rows` search twice, then `search_share` of them do. Of the others every fifth searches once and
    then guesses, and the rest guess at once.
    """
    rng = random.Random(seed + 1)
    for number in range(size):
        person, town = _name(rng), _name(rng)
        code, guess = f"{rng.randrange(10_000):04}", f"{rng.randrange(10_000):04}"
        searches = 2 if number < search_rows or rng.random() < search_share else int(rng.random() < 0.2)
        said = [("user", person)]
        if searches > 0:
            said += [("assistant", f'[search(query="{person}")]'), ("tool", f"{person}: town {town}")]
        if searches > 1:
            said += [("assistant", f'[search(query="{town} code")]'), ("tool", f"{town}: code {code}")]
        said.append(("assistant", f"={code if searches == 2 else guess}"))
        yield {"messages": [{"role": role, "content": text} for role, text in said], "tools": SPECS}


def _world(seed: int) -> Iterator[tuple[str, str, str]]:
    """Yield people with their towns and the codes of these; all names differ."""
    rng = random.Random(seed)
    names = rng.sample([first + second for first, second in product(SYLLABLES, repeat=2)], 2 * PEOPLE)
    for person, town in zip(names[:PEOPLE], names[PEOPLE:], strict=True):
        yield person, town, f"{rng.randrange(10_000):04}"


def _name(rng: random.Random) -> str:
    return rng.choice(SYLLABLES) + rng.choice(SYLLABLES)
