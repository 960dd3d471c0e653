"""Starts vLLM's API server. Python's garbage collector runs rarely: a start takes about a tenth less CPU time.

    python -m hone.workers.inside.vllm_server <options of vLLM's server>

The engine and its workers, which vLLM spawns, import this module again before anything else.
"""

from __future__ import annotations

import runpy

from hone.processes.garbage import collect_rarely

collect_rarely()

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
