"""Write the tasks of a `verifiers` taskset as JSON lines: a program for the Python that has this package, not hone's.

python rows.py '{"taskset": "my_env", "options": {}, "size": null}' rows.jsonl
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any


def row_of(data: Any, taskset: str) -> dict[str, Any]:
    """A task as a row. `task` is all of it; the environment, not hone, makes the policy's prompt from that."""
    shown = data.prompt_text or data.description or data.name or "(the environment opens the conversation)"
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    messages = [*system, {"role": "user", "content": shown}]
    return {"messages": messages, "task": data.model_dump(mode="json"), "data_source": taskset}


def main(settings: dict[str, Any], target: str) -> None:
    """Write the rows of the taskset that the settings name."""
    vf = importlib.import_module("verifiers.v1")
    name, size = settings["taskset"], settings["size"]
    config = vf.taskset_config_type(name).model_validate({**settings["options"], "id": name})
    tasks = vf.load_taskset(config)
    if size is not None:
        tasks = tasks.take(size)
    elif not tasks.bounded:
        sys.exit(f"the taskset {name} has no end; set source.size to the number of rows to use")
    with open(target, "w", encoding="utf-8") as rows:
        for task in tasks:
            rows.write(json.dumps(row_of(task.data, name)) + "\n")


if __name__ == "__main__":
    sys.path[:1] = []  # this folder, whose modules are hone's
    sys.path.append(os.getcwd())  # a taskset may be a module in the working folder
    main(json.loads(sys.argv[1]), sys.argv[2])
