"""Write images as vLLM's JSON: their patches, their positions in the prompt, and a name for each.

    Image --patches, grid--> msgpack --base64--> `features` of POST /inference/v1/generate

hone sends its own patches, because vLLM's image processor could produce others than the trainer sees. The format is the
one of vLLM 0.32.0 (`vllm/v1/serial_utils.py`), for Qwen-VL models.
"""

from __future__ import annotations

import base64
import hashlib
import struct
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hone.rollout.images import PlacedImages
from hone.types import Image

RAW = 3  # vLLM's msgpack extension type for tensor bytes
KEPT = 4  # images whose JSON is cached: all samples of a prompt use the same ones


def features_of(images: PlacedImages) -> dict[str, Any]:
    """Return the images of a request, with the positions of their placeholders, as vLLM's JSON."""
    items = [_item(image) for _, image in images]
    return {
        "mm_hashes": {"image": [name for name, _ in items]},
        "mm_placeholders": {"image": [{"offset": start, "length": image.tokens} for start, image in images]},
        "kwargs_data": {"image": [data for _, data in items]},
    }


@lru_cache(maxsize=KEPT)
def _item(image: Image) -> tuple[str, str]:
    """Return a unique name of the image, and its input for vLLM's vision tower."""
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
    """Return dtype, shape and bytes (in this machine's byte order: little-endian)."""
    return [str(array.dtype), list(array.shape), array.tobytes()]


def _packed(value: Any) -> bytes:
    """Encode `value` as msgpack; bytes become vLLM's tensor extension (https://github.com/msgpack/msgpack)."""
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
