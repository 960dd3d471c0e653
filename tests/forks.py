"""Processes of tests are forked from one that has imported everything they need: 0.1 s each instead of 5.

Python has one such process, without threads, and so one list of what it imports. It would skip a module that it cannot
import; `tests.frozen`, the last of the list, makes that an error.
"""

import importlib.util
import multiprocessing

CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = [
    *("tests.ranks", "tests.weights.receiving", "pytest"),
    *("hone.engines.fsdp2.engine", "hone.engines.lora.adapter", "hone.runtime.local"),
    *(f"hone.weights.transports.{name}" for name in ("collective", "delta", "ipc")),
    *(f"transformers.models.{name}.modeling_{name}" for name in ("qwen3", "llama", "qwen3_moe")),
    *(["hone_megatron.engine"] if all(map(importlib.util.find_spec, ("hone_megatron", "megatron"))) else []),
    "tests.frozen",
]
CONTEXT.set_forkserver_preload(PRELOADED)
