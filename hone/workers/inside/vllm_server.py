"""vLLM's API server, in processes that look for garbage rarely: they start faster by a tenth.

    python -m hone.workers.inside.vllm_server <options of vLLM's server>

The engine and its workers, which vLLM spawns, import this module again before anything else.
"""

from __future__ import annotations

import runpy

from hone.processes.garbage import collect_rarely

collect_rarely()

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
