"""Exact match: compare the answer with the ground truth, after optional normalisation."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from typing import Any

from hone.data.answers import between_tags
from hone.rewards.extraction import spelled

PUNCTUATION = str.maketrans("", "", string.punctuation)


def exact_match(
    response: str,
    ground_truth: Any,
    row: Mapping[str, Any],
    tag: str = "",
    ignore_case: bool = False,
    ignore_punctuation: bool = False,
    collapse_spaces: bool = False,
) -> float:
    """1.0 if the response equals the ground truth (or one of a list of them), else 0.0. Outer spaces are ignored.

    A ground truth that is a float may be spelled without its exponent and point: 1e-05 is 0.00001, and 7.0 is 7.

    `tag`: the answer is the text between the last <tag> and </tag>; a response without them scores 0.0.

    >>> exact_match("So: <answer>The  Moon</answer>", "the moon", {}, "answer", ignore_case=True, collapse_spaces=True)
    1.0
    """
    accepted = ground_truth if isinstance(ground_truth, list) else [ground_truth]
    if not accepted or any(answer is None or isinstance(answer, list | dict) for answer in accepted):
        raise ValueError(f"the ground truth should be text, a number or a list of them, found {ground_truth!r}")
    answer = between_tags(response, tag) if tag else response
    if answer is None:
        return 0.0

    def normal(text: str) -> str:
        text = text.casefold() if ignore_case else text
        text = text.translate(PUNCTUATION) if ignore_punctuation else text
        text = re.sub(r"\s+", " ", text) if collapse_spaces else text
        return text.strip()

    return float(normal(answer) in {normal(text) for truth in accepted for text in (str(truth), spelled(truth))})
