"""The process of one reward model. It takes the requests of `hone.rewards.worker`, with encoded `Answer`s as items.

All items of a batch are scored in one forward.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import torch

from hone.processes.request_loop import RequestLoop
from hone.rewards.base import describe
from hone.rewards.model import Answer
from hone.rewards.pool import Outcome
from hone.rewards.settings import RewardModelConfig
from hone.trainers.reward_models.scorer import AnswerScorer, reward_model_spec
from hone.workers.train import TrainWorker


def main() -> None:
    """Load the model that the first frame names, then serve until hone closes the socket or is gone."""
    loop = RequestLoop()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    requests = loop.requests()
    ((name, spec),) = next(requests).body["components"].items()
    try:
        scorer = _load(spec)
    except Exception as error:  # noqa: BLE001  sent to the parent, which raises it
        loop.loaded({"error": f"reward.components.{name}.model: {describe(error)}"})
        return
    loop.loaded({"concurrent": [name]})
    for request in requests:
        for message in _serve(scorer, request.body):
            loop.reply(request.batch, message)


def _load(spec: Mapping[str, Any]) -> AnswerScorer:
    config = RewardModelConfig(**spec["model"])
    worker = TrainWorker(reward_model_spec(config))
    worker.initialize()
    return AnswerScorer(config, spec["vocabulary"], worker)


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
