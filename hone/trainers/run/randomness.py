"""The random states of the process, saved and restored with a checkpoint.

hone's own draws (data order, sampling, mini-batch order) come from seeds and counters, not from these; what draws from
them is dropout, fresh weights and users' own code.
"""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import numpy as np
from safetensors.torch import load_file

from hone.full_disk import until_room
from hone.models.files.tensors import save_tensors
from hone.platforms.base import current_platform


def draw_chance(seed: int, draw: int) -> float:
    """A number in [0, 1) for one draw of a run, the same in every launch of it.

    >>> draw_chance(0, 7) == draw_chance(0, 7) != draw_chance(1, 7)
    True
    """
    digest = hashlib.blake2b(f"skip/{seed}/{draw}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    current_platform().seed(seed)


def save_random_state(folder: Path) -> None:
    """Write the states of Python, NumPy, torch and the accelerator into `folder`."""
    save_tensors(current_platform().rng_state(), folder / "torch.safetensors")
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states = {
        "python": [version, list(internal), gauss],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
    }
    text = json.dumps(states)
    until_room(lambda: (folder / "python.json").write_text(text, encoding="utf-8"))


def load_random_state(folder: Path) -> None:
    """Restore what `save_random_state` wrote."""
    current_platform().set_rng_state(load_file(folder / "torch.safetensors"))
    states = json.loads((folder / "python.json").read_text(encoding="utf-8"))
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
