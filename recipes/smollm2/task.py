"""Write one short sentence with two given words: prompts, and the rewards that judge the answer.

Held-out prompts use words that no training prompt has.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any, Literal

WORDS = re.findall(
    r"\w+",
    "apple river winter guitar doctor window garden mountain teacher bicycle kitchen forest letter planet camera "
    "coffee bridge market island blanket candle engine farmer harbor jacket ladder museum needle ocean pencil "
    "rabbit school tailor umbrella village wallet zebra bottle castle desert elephant flower grandmother hammer "
    "insect jungle kitten lemon mirror nurse orange piano queen robot shadow tiger uncle violin wagon yogurt "
    "airport basket circus dragon",
)
HELD_OUT = WORDS[::4]  # one word in four
SMALL = {"a", "an", "the", "and", "of", "in", "on", "to", "is", "are", "was", "were", "with", "by", "for", "at", "as"}
SMALL |= {"it", "its", "his", "her", "their", "my", "that", "this", "from"}
SHORTEST, LONGEST = 8, 16  # words of a sentence


def rows(seed: int, size: int, split: Literal["train", "held_out"] = "train") -> Iterator[dict[str, Any]]:
    """Yield prompts that ask for a sentence with two words; `ground_truth` has the two words."""
    chance = random.Random(f"{seed}-{split}")
    known = HELD_OUT if split == "held_out" else [word for word in WORDS if word not in HELD_OUT]
    for _ in range(size):
        first, second = chance.sample(known, 2)
        prompt = f"Write one short sentence with the words {first} and {second}."
        yield {"prompt": prompt, "ground_truth": f"{first} {second}"}


SENTENCES = (
    "The {a} was so old that nobody could see the {b}.",
    "My sister found a {a} right next to a big {b}.",
    "Everybody in our town knows the {a} and the {b}.",
    "After a long day the {a} came back without its {b}.",
)


def pairs(seed: int, size: int, split: Literal["train", "held_out"] = "train") -> Iterator[dict[str, Any]]:
    """Yield preferences: a sentence with both words, and the same one with a third word in place of the second."""
    chance = random.Random(f"{seed}-{split}-pairs")
    for row in rows(seed, size, split):
        first, second = row["ground_truth"].split()
        other = chance.choice([word for word in WORDS if word not in (first, second)])
        sentence = chance.choice(SENTENCES)
        chosen, rejected = (sentence.format(a=first, b=word) for word in (second, other))
        yield {"prompt": row["prompt"], "chosen": chosen, "rejected": rejected}


def words(response: str, ground_truth: str) -> float:
    """The share of the two words that the answer contains, in singular or plural."""
    text = response.lower()
    return sum(re.search(rf"\b{word}s?\b", text) is not None for word in ground_truth.split()) / 2


def one_sentence(response: str, ground_truth: str) -> float:
    """1 for one sentence of 8 to 16 words that uses no content word twice.

    Without a shortest length and the ban on repetitions, the cheapest answer is "A doctor and a letter."
    """
    text = response.strip().lower()
    if not re.fullmatch(r"[^.!?\n]+[.!?]", text):
        return 0.0
    found = re.findall(r"[a-z']+", text)
    content = [word.removesuffix("s") for word in found if word not in SMALL]
    return float(SHORTEST <= len(found) <= LONGEST and len(content) == len(set(content)) >= 4)


def any_sentence(response: str, ground_truth: str) -> float:
    """1 for one sentence of any length: an easier reward, which the policy exploits."""
    return float(re.fullmatch(r"[^.!?\n]+[.!?]", response.strip()) is not None)


def solved(response: str, ground_truth: str) -> float:
    """1 for a sentence as `one_sentence` wants it that contains both words."""
    return float(words(response, ground_truth) == 1.0 and one_sentence(response, ground_truth) == 1.0)
