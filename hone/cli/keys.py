"""Keys of a run file as flags: `--run.steps 10` is `run.steps=10`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hone.composition import ConfigError


def keys_of(arguments: Sequence[str]) -> list[str]:
    """The arguments with each flag that is a key of a run file as `key=value`.

    >>> keys_of(["train", "--update.samples_per_prompt", "4", "--run.dir=runs/x", "--data", "rows.jsonl"])
    ['train', 'update.samples_per_prompt=4', 'run.dir=runs/x', '--data', 'rows.jsonl']
    """
    found, rest = [], list(arguments)
    while rest:
        argument = rest.pop(0)
        name, separator, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or not re.fullmatch(r"[a-z]\w*([._]\w+)+", name):
            found.append(argument)
            continue
        if not separator and (not rest or rest[0].startswith("--")):
            raise ConfigError(f"{argument} is a key of the run file and needs a value: {argument} VALUE")
        found.append(f"{name}={value if separator else rest.pop(0)}")
    return found
