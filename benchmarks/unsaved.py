"""A training command of hone that writes no checkpoint and no export: `python unsaved.py train RUN.yaml key=value ...`.

For runs whose steps are measured: a checkpoint of a large model would be written while they run.
"""

from __future__ import annotations

import sys

from hone.cli.main import main
from hone.trainers.policy.trainer import PolicyTrainer
from hone.trainers.run.loop import Trainer
from hone.trainers.supervised.trainer import SupervisedTrainer


def save_nothing(trainer: type[Trainer]) -> None:
    """Leave out the checkpoints and the export of a trainer's runs in this process."""
    trainer.save = lambda self, step: None  # type: ignore[method-assign]
    trainer._finish = lambda self, step: None  # type: ignore[method-assign]


if __name__ == "__main__":
    save_nothing(PolicyTrainer)
    save_nothing(SupervisedTrainer)
    sys.exit(main(sys.argv[1:]))
