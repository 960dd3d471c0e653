"""Run the Python blocks of pages: a JSON list of [page, [block, ...]] in, one JSON line for each page out.

Each page runs in a process forked from this one, which has imported what is slow, so pages do not see one another's
registrations, and one start pays for all. The blocks of a page share their names, as a reader who pastes them in order.
"""

import contextlib
import io
import json
import linecache
import os
import sys
import traceback
import types

import torch
import transformers.models.qwen3.modeling_qwen3  # noqa: F401  (this and the next lines: for the pages)

import hone.api
import hone.engines.fsdp2.engine
import hone.rollout.builtin.engine
import hone.trainers.policy.trainer
import hone.workers.train  # noqa: F401


def run_page(page: str, blocks: list[str]) -> dict[str, object]:
    """What each block printed, and the error of the one that failed."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    printed: list[str] = []
    for number, text in enumerate(blocks):
        name, out = f"{page}[{number}]", io.StringIO()
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        try:
            with contextlib.redirect_stdout(out):
                exec(compile(text, name, "exec"), module.__dict__)
        except Exception:  # noqa: BLE001 (the test shows it)
            return {"page": page, "printed": printed, "error": traceback.format_exc()}
        printed.append(out.getvalue())
    return {"page": page, "printed": printed, "error": ""}


def main() -> None:
    """Fork for each page, and wait for it."""
    torch.set_num_threads(1)
    for page, blocks in json.load(sys.stdin):
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            print(json.dumps(run_page(page, blocks)), flush=True)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
