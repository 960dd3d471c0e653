"""Images in vLLM's JSON: the patches that the trainer sees, where they stand in the prompt, and a name for each.

    Image --patches, grid--> msgpack --base64--> `features` of POST /inference/v1/generate

vLLM's own image processor is not asked: what it would make of an image might be something else than the trainer's
patches, and the placeholders are in the tokens already. The format is that of vLLM 0.32.0, `vllm/v1/serial_utils.py`,
for models of the Qwen-VL kind.
"""

from __future__ import annotations

import base64
import hashlib
import struct
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hone.rollout.shown import Shown
from hone.types import Image

RAW = 3  # the number of vLLM's msgpack extension for the bytes of a tensor
KEPT = 4  # images whose JSON is kept: the samples of one prompt are asked for together


def features_of(shown: Shown) -> dict[str, Any]:
    """What a request says of its images, (first placeholder, image) each."""
    items = [_item(image) for _, image in shown]
    return {
        "mm_hashes": {"image": [name for name, _ in items]},
        "mm_placeholders": {"image": [{"offset": start, "length": image.tokens} for start, image in shown]},
        "kwargs_data": {"image": [data for _, data in items]},
    }


@lru_cache(maxsize=KEPT)
def _item(image: Image) -> tuple[str, str]:
    """A name that no other image has, and what vLLM gives its vision tower."""
    patches = np.asarray(image.patches(), np.float32)
    whole = [[0, len(patches), None]]
    packed = _packed(
        {
            "pixel_values": {"data": _tensor(patches), "field": ["flat", {"slices": whole, "dim": 0}]},
            "image_grid_thw": {
                "data": _tensor(np.array(image.grid, np.int64)),
                "field": ["batched", {"keep_on_cpu": True}],
            },
        }
    )
    return hashlib.sha256(packed).hexdigest(), base64.b64encode(packed).decode("ascii")


def _tensor(array: NDArray[Any]) -> list[Any]:
    """dtype, shape, bytes (little-endian, as the machine has them)."""
    return [str(array.dtype), list(array.shape), array.tobytes()]


def _packed(value: Any) -> bytes:
    """`value` as msgpack; bytes are vLLM's extension for tensors. https://github.com/msgpack/msgpack/blob/master/spec.md"""
    if value is None:
        return b"\xc0"
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    if isinstance(value, int):
        return struct.pack(">Bq", 0xD3, value)
    if isinstance(value, str):
        text = value.encode()
        return struct.pack(">BI", 0xDB, len(text)) + text
    if isinstance(value, bytes):
        return struct.pack(">BIb", 0xC9, len(value), RAW) + value
    if isinstance(value, list):
        return struct.pack(">BI", 0xDD, len(value)) + b"".join(map(_packed, value))
    pairs = (part for pair in value.items() for part in pair)
    return struct.pack(">BI", 0xDF, len(value)) + b"".join(map(_packed, pairs))


__all__ = ["features_of"]
