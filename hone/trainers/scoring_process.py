"""The process that serves one reward model: `python -m hone.trainers.scoring_process PARENT_PID`.

It speaks as the processes of reward functions do (`hone.rewards.frames`), with answers as items; all items of a batch
are scored in one go. It ends when its input does, and is killed by the kernel when its parent dies.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import torch

from hone.rewards.base import describe
from hone.rewards.frames import encode, write_all
from hone.rewards.model import Answer
from hone.rewards.pool import Outcome
from hone.rewards.settings import RewardModelConfig
from hone.rewards.worker import connect
from hone.trainers.scoring import AnswerScorer, reward_model_spec
from hone.workers.train import TrainWorker


def main() -> None:
    """Load the model that the first message names, then serve until the parent closes the pipe or is gone."""
    sink, messages = connect()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    ((name, spec),) = next(messages)["components"].items()
    try:
        scorer = _load(spec)
    except Exception as error:  # noqa: BLE001  told to the parent, which raises it
        write_all(sink, encode({"error": f"reward.components.{name}.model: {describe(error)}"}))
        return
    write_all(sink, encode({"ready": True, "concurrent": [name]}))
    for batch in messages:
        for message in _serve(scorer, batch):
            write_all(sink, encode(message))


def _load(spec: Mapping[str, Any]) -> AnswerScorer:
    config = RewardModelConfig(**spec["model"])
    worker = TrainWorker(reward_model_spec(config))
    worker.initialize()
    return AnswerScorer(config, spec["vocabulary"], worker.infer_batch)


def _serve(scorer: AnswerScorer, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    began = time.perf_counter()
    try:
        outcomes = scorer([Answer.decode(item) for item in batch["items"]])
    except Exception as error:  # noqa: BLE001  reported for every answer of the batch, never scored
        outcomes = [Outcome(error=describe(error))] * len(batch["items"])
    seconds = time.perf_counter() - began
    return [_message(index, outcome) | {"seconds": seconds} for index, outcome in enumerate(outcomes)]


def _message(index: int, outcome: Outcome) -> dict[str, Any]:
    if outcome.error:
        return {"item": index, "error": outcome.error}
    return {"item": index, "value": outcome.value, "parts": dict(outcome.parts)}


if __name__ == "__main__":
    main()
