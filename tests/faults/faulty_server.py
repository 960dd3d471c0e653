"""The built-in engine's server, slowed down, with the fault that stands in the file named by HONE_TEST_FAULT.

It is planted in the engine itself, below everything that answers for it.
"""

import os
import sys
import time
from pathlib import Path

from hone.rollout.builtin.engine import EngineWeights
from hone.rollout.builtin.scheduler import Scheduler
from hone.workers.inside import builtin

step, load, requeue = Scheduler.step, EngineWeights.load, Scheduler.requeue_running
SKIPPED = "model.layers.1.mlp.up_proj.weight"


def fault():
    return Path(os.environ["HONE_TEST_FAULT"]).read_text()


def slow_step(scheduler):
    time.sleep(0.02)
    step(scheduler)


def keeping(weights, kept):
    """What the tensors that keep their old values have now."""
    names = {"skipped": [SKIPPED], "stale head": ["lm_head.weight"], "half": list(weights)[len(weights) // 2 :]}
    return {name: weights[name].clone() for name in names.get(kept, [])}


def faulty_load(weights, stream):
    old = keeping(weights.tensors, fault())
    load(weights, stream)
    for name, tensor in old.items():
        weights.tensors[name].copy_(tensor)


def faulty_requeue(scheduler):
    if fault() != "kept cache":
        requeue(scheduler)


Scheduler.step, Scheduler.requeue_running = slow_step, faulty_requeue
EngineWeights.load = faulty_load
builtin.main(sys.argv[1:])
