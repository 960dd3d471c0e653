"""The built-in engine's server, slowed down, with the fault that stands in the file named by HONE_TEST_FAULT.

It is planted in the engine itself, below everything that answers for it.
"""

import os
import sys
import time
from pathlib import Path

from hone.rollout.builtin import BuiltinEngine
from hone.workers import serve

turn, copy, requeue = BuiltinEngine._turn, BuiltinEngine._copy_weights, BuiltinEngine._requeue_running
SKIPPED = "model.layers.1.mlp.up_proj.weight"


def fault():
    return Path(os.environ["HONE_TEST_FAULT"]).read_text()


def slow_turn(engine):
    time.sleep(0.02)
    turn(engine)


def keeping(engine, kept):
    """What the tensors that keep their old values have now."""
    weights = engine._decoder.weights()
    names = {"skipped": [SKIPPED], "stale head": ["lm_head.weight"], "half": list(weights)[len(weights) // 2 :]}
    return {name: weights[name].clone() for name in names.get(kept, [])}


def faulty_copy(engine, stream):
    old = keeping(engine, fault())
    copy(engine, stream)
    for name, tensor in old.items():
        engine._decoder.weights()[name].copy_(tensor)


def faulty_requeue(engine):
    if fault() != "kept cache":
        requeue(engine)


BuiltinEngine._turn, BuiltinEngine._copy_weights = slow_turn, faulty_copy
BuiltinEngine._requeue_running = faulty_requeue
serve.main(sys.argv[1:])
