"""Processes of tests are forked from one that has imported everything they need: 0.1 s each instead of 5.

Python has one such process, so this is the one list of what it imports. It has no threads, and a name that it cannot
import is an error here: there, Python would leave it out.
"""

import importlib.util
import multiprocessing

CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = [
    *("tests.ranks", "tests.weights.receiving", "pytest"),
    *("hone.engines.fsdp2.engine", "hone.engines.lora.adapter", "hone.runtime.local"),
    *(f"hone.weights.transports.{name}" for name in ("collective", "delta", "ipc")),
    *(f"transformers.models.{name}.modeling_{name}" for name in ("qwen3", "llama", "qwen3_moe")),
    *(["hone.engines.megatron.engine"] if importlib.util.find_spec("megatron") else []),
    "tests.frozen",  # the last
]
missing = [name for name in PRELOADED if importlib.util.find_spec(name) is None]
assert not missing, missing
CONTEXT.set_forkserver_preload(PRELOADED)
