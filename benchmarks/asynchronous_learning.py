"""Effect of staleness on learning: steps until a policy reverses three characters.

    python benchmarks/asynchronous_learning.py [--seeds 0 1 2] [--staleness 1 2 4]

A row is `hone train recipes/reverse/four_letters.yaml` with a server in a process of its own and `new_weights: finish`,
so it does not depend on load: random weights, exact match as the only reward, evaluated every five steps on 256
held-out prompts by greedy answers. It ends when 99 % of them are right. The remedies are those of docs/asynchronous.md;
`uncorrected` has neither: two mini-batches, whose ratios compare with the trainer's own older weights. The learning
rate is a fifth of the recipe's, whose single updates change the policy too much for answers of the one before.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import learning_table

BASE = {
    "rollout.builtin.process": "separate",
    "update.minibatches": 2,
    "actor.optimizer.lr": 2.0e-4,
    "evaluation.every_steps": 5,
}
REMEDIES: dict[str, dict[str, Any]] = {
    "clipped": {"algorithm.correction.old": "rollout"},
    "weighted": {"algorithm.correction.weights": "token", "algorithm.correction.truncate": 2},
    "uncorrected": {},
}


@dataclass(frozen=True)
class Row:
    """One run; it has what `learning_table.learn` needs."""

    staleness: int
    remedy: str
    seed: int

    @property
    def name(self) -> str:
        return f"staleness {self.staleness}, {self.remedy}, seed {self.seed}"

    def overrides(self) -> dict[str, Any]:
        """Everything that is set on the command line but the run folder."""
        ahead = {"asynchrony.staleness": self.staleness} if self.staleness else {}
        return {**learning_table.EVERY_ROW, **BASE, **REMEDIES[self.remedy], **ahead, "run.seed": self.seed}


def rows(staleness: list[int]) -> list[tuple[int, str]]:
    """(staleness, remedy) of each line: both remedies everywhere, and no remedy at the greatest staleness."""
    remedied = [(age, remedy) for age in (0, *staleness) for remedy in ("clipped", "weighted")]
    return [*remedied, (max(staleness), "uncorrected")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 2, 4])
    given = parser.parse_args()
    lines = dict.fromkeys(rows(given.staleness), "")
    for seed in given.seeds:  # every line has its first seed before any has its second
        for staleness, remedy in lines:
            with tempfile.TemporaryDirectory(prefix="learning-") as folder:
                found = learning_table.learn(Row(staleness, remedy, seed), Path(folder))
            reached = f"{found.steps}" if found.steps else f"not in {found.overrides['run.steps']}"
            lines[staleness, remedy] += f" {reached} ({found.exact_match:.3f}) |"
            print(f"staleness {staleness}, {remedy}, seed {seed}: {reached}, {found.exact_match}", flush=True)
    print(f"| staleness | remedy |{''.join(f' seed {seed} |' for seed in given.seeds)}")
    print(f"|---|---|{'---|' * len(given.seeds)}")
    for (staleness, remedy), cells in lines.items():
        print(f"| {staleness} | {remedy} |{cells}")


if __name__ == "__main__":
    main()
