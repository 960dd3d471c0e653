"""A model's image processor, which turns encoded images into patches for the vision tower.

It uses transformers' processor for PIL images (resize, rescale, normalise, cut into patches), which needs no
torchvision. An image's number of tokens depends only on its size.
"""

from __future__ import annotations

import io
import struct
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, UnidentifiedImageError
from PIL import Image as Pillow
from transformers import AutoConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from hone.full_disk import system_error, until_room
from hone.models.errors import ModelError
from hone.models.settings import ModelConfig, VisionBuildConfig, VisionConfig
from hone.models.source import check_source, locate
from hone.models.tokenizer import IMAGE, SPECIAL_TOKENS, VISION_TOKENS, load_tokenizer
from hone.models.vision.model import FAMILIES
from hone.types import Image

_TURNS = dict(  # EXIF's orientation -> what brings the picture upright
    enumerate(
        (
            Pillow.Transpose.FLIP_LEFT_RIGHT,
            Pillow.Transpose.ROTATE_180,
            Pillow.Transpose.FLIP_TOP_BOTTOM,
            Pillow.Transpose.TRANSPOSE,
            Pillow.Transpose.ROTATE_270,
            Pillow.Transpose.TRANSVERSE,
            Pillow.Transpose.ROTATE_90,
        ),
        start=2,
    )
)
KNOWN = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
"""Names of the one processor in `preprocessor_config.json`: by whether it was saved with torchvision."""


class ImageProcessor:
    """Reads images for one model; a `hone.data.images.ImageReader`."""

    def __init__(self, processor: Any, token_id: int) -> None:
        """`processor` is transformers' processor for PIL images, `token_id` the placeholder token of images."""
        self.token_id = token_id
        self._processor = processor

    def image(self, data: bytes) -> Image:
        """Read an image and its number of tokens. Raises ValueError if it cannot be decoded or used."""
        opened, processor = _decoded(data), self._processor
        height, width = smart_resize(
            opened.height,
            opened.width,
            factor=processor.patch_size * processor.merge_size,
            min_pixels=processor.size["shortest_edge"],
            max_pixels=processor.size["longest_edge"],
        )
        grid = (1, height // processor.patch_size, width // processor.patch_size)
        return Image(data, grid, grid[1] * grid[2] // processor.merge_size**2, self.token_id, self.patches)

    def patches(self, data: bytes) -> NDArray[np.float32]:
        """Patches of an image, [patches, values of a patch]."""
        made = self._processor(images=[_decoded(data)], return_tensors="np")["pixel_values"]
        return np.ascontiguousarray(made, dtype=np.float32)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write preprocessor_config.json, as the model's own processor reads it."""
        self._processor.save_pretrained(folder)


def _decoded(data: bytes) -> Pillow.Image:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Pillow.DecompressionBombWarning)
            opened = Pillow.open(io.BytesIO(data))
            opened.load()
            return _as_seen(opened)
    except UnidentifiedImageError as error:
        raise ValueError(f"its {len(data)} bytes are no image of a known format") from error
    except (OSError, SyntaxError, Pillow.DecompressionBombWarning, Pillow.DecompressionBombError) as error:
        raise ValueError(f"it cannot be decoded: {error}") from error


def _as_seen(opened: Pillow.Image) -> Pillow.Image:
    """The picture as people see it, in RGB: turned as its EXIF data say, and on white where it is transparent.

    Qwen's own preprocessing and vLLM's put transparent pictures on white too. Raises ValueError.
    """
    opened = _upright(opened)
    if opened.mode in ("I", "F"):
        raise ValueError("its pixels are 32-bit numbers without a range; save it as PNG with 8 or 16 bits a channel")
    if opened.mode.startswith("I;16"):  # Pillow would cut off what is brighter than 255
        opened = Pillow.fromarray((np.asarray(opened) >> 8).astype(np.uint8))
    if not opened.has_transparency_data:
        return opened.convert("RGB")
    seen = opened.convert("RGBA")
    return Pillow.alpha_composite(Pillow.new("RGBA", seen.size, "white"), seen).convert("RGB")


def _upright(opened: Pillow.Image) -> Pillow.Image:
    """The picture turned as its EXIF data say; EXIF data that cannot be read say nothing.

    Pillow's `exif_transpose` writes all of the EXIF data again, and raises where a tag is not as the standard has it.
    """
    try:
        turn = _TURNS.get(opened.getexif().get(ExifTags.Base.Orientation, 1))
    except (OSError, SyntaxError, TypeError, ValueError, struct.error):
        return opened
    return opened if turn is None else opened.transpose(turn)


def load_image_processor(model: ModelConfig) -> ImageProcessor | None:
    """Load the image processor of a model; None for a model of text only.

    Raises ModelError if a vision model has no usable processor, or if `model.use.vision` is set for a model of text.
    """
    if model.build is not None:
        vision = model.build.vision
        processor = None if vision is None else _limited(build_image_processor(vision), model.used.vision)
        if processor is None:
            _refuse_vision(model)
            return None
        return ImageProcessor(processor, (*SPECIAL_TOKENS, *VISION_TOKENS).index(IMAGE))
    assert model.path is not None
    key = model.key_of("path")
    config = check_source(model.path, key, "config.json", model.trust_remote_code, model.revision)
    if config.get("model_type") not in FAMILIES:
        _refuse_vision(model)
        return None
    settings = check_source(model.path, key, "preprocessor_config.json", model.trust_remote_code, model.revision)
    name = settings.get("image_processor_type")
    if name not in KNOWN:
        raise ModelError(f"{key} {model.path!r} has the image processor {name}; hone knows {KNOWN[0]} only")
    folder = locate(model.path, key, model.revision, weights=False).folder
    try:
        # by its class, because the general one needs torchvision in transformers 5.17
        loaded = Qwen2VLImageProcessorPil.from_pretrained(folder)
        full = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, ImportError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{key} {model.path!r} has no usable image processor: {reason}") from error
    return ImageProcessor(_limited(loaded, model.used.vision), full.image_token_id)


def save_language(model: ModelConfig, folder: str | Path) -> None:
    """Save a model's tokenizer, and its image processor if it has one, into a folder. Raises OSError."""
    for one in (load_tokenizer(model), load_image_processor(model)):
        if one is not None:
            until_room(partial(_save, one, folder))


def _save(one: Any, folder: str | Path) -> None:
    try:
        one.save_pretrained(folder)
    except Exception as error:
        known = system_error(error, str(folder))  # of the library tokenizers, which has one class for all errors
        if isinstance(error, OSError) or known is None:
            raise
        raise known from error


def build_image_processor(vision: VisionBuildConfig) -> Qwen2VLImageProcessorPil:
    """Make the processor of a model from `model.build`; the smallest image is one token."""
    side = vision.patch_size * vision.merge_size
    return Qwen2VLImageProcessorPil(
        patch_size=vision.patch_size,
        merge_size=vision.merge_size,
        temporal_patch_size=vision.temporal_patch_size,
        min_pixels=side * side,
        max_pixels=vision.max_pixels,
    )


def _limited(processor: Qwen2VLImageProcessorPil, vision: VisionConfig | None) -> Qwen2VLImageProcessorPil:
    if vision is None:
        return processor
    size = processor.size
    least = vision.min_pixels or size["shortest_edge"]
    most = vision.max_pixels or size["longest_edge"]
    if least > most:
        raise ModelError(f"model.use.vision.min_pixels={least} should be at most max_pixels={most}")
    limits = {"shortest_edge": least, "longest_edge": most}
    return type(processor)(**{**processor.to_dict(), "size": limits})


def _refuse_vision(model: ModelConfig) -> None:
    if model.used.vision is not None:
        raise ModelError(
            f"model.use.vision is set, but the model takes no images; those that do here: {', '.join(FAMILIES)}"
        )


__all__ = ["ImageProcessor", "build_image_processor", "load_image_processor", "save_language"]
