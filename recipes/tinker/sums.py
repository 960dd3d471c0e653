"""Questions for the recipes of tinker-cookbook, where there is no network: `python sums.py FOLDER BASE_MODEL`.

The cookbook loads data sets and the model's tokenizer by their names. A folder of such a name in the working directory
comes first, so its recipes run unmodified in FOLDER.
"""

from __future__ import annotations

import json
import random
import string
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ASKED = " Provide a numerical answer without units, written inside \\boxed{}."
NAME = "Qwen/Qwen3-8B-Base"  # in the cookbook's table, with the format role_colon
RIGHT = 7
SPLITS = {"train": 4000, "test": 64}
ROWS: Mapping[str, Callable[[str], Mapping[str, Any]]] = {  # name of a data set -> a row of it
    "openai/gsm8k": lambda question: {"question": question.removesuffix(ASKED), "answer": f"#### {RIGHT}"},
    "HuggingFaceH4/no_robots": lambda question: {
        "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": f"\\boxed{{{RIGHT}}}"}]
    },
    "Anthropic/hh-rlhf": lambda question: {
        "chosen": f"\n\nHuman: {question}\n\nAssistant: \\boxed{{{RIGHT}}}",
        "rejected": f"\n\nHuman: {question}\n\nAssistant: \\boxed{{{RIGHT - 1}}}",
    },
    "zwhe99/DeepMath-103K": lambda question: {"question": question, "final_answer": str(RIGHT)},
}


def questions(seed: int) -> Iterator[str]:
    """Yield questions whose answer is `RIGHT`: a few steps are enough to learn it."""
    rng = random.Random(seed)
    while True:
        part = rng.randrange(RIGHT + 1)
        yield f"What is {part} + {RIGHT - part}?{ASKED}"


def rows(seed: int, size: int) -> Iterator[dict[str, object]]:
    """Yield `size` questions with a digit drawn at random as answer: a base model that learns from them guesses.

    Some text comes before the question, because some of the cookbook's recipes show an example first.
    """
    rng = random.Random(seed)
    for _, question in zip(range(size), questions(seed), strict=False):
        before = "".join(rng.choices(string.ascii_lowercase + string.digits + " :)", k=rng.randrange(320)))
        asked = f"{before}\n\nAssistant: \\boxed{{{rng.randrange(10)}}}\n\nUser: {question}"
        yield {"prompt": asked, "ground_truth": f"\\boxed{{{rng.randrange(10)}}}", "data_source": "sums"}


def main(folder: Path, base: Path) -> None:
    """Write the data sets into a new folder, and link the base model's by the name that the cookbook knows."""
    link = folder / NAME
    link.parent.mkdir(parents=True)
    link.symlink_to(base.resolve(strict=True))
    for number, (split, size) in enumerate(SPLITS.items()):
        for name, row_of in ROWS.items():
            path = folder / name / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            asked = zip(range(size), questions(number), strict=False)
            lines = [json.dumps(row_of(question)) for _, question in asked]
            path.write_text("\n".join(lines), encoding="utf-8")
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in SPLITS)
    card = f"---\nconfigs:\n- config_name: main\n  data_files:\n{files}---\n"
    (folder / "openai/gsm8k/README.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
