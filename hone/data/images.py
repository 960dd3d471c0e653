"""Images in messages: where they come from, and how they are passed to the model.

    {"type": "image", "image": SOURCE}         SOURCE: a path (relative to the data file), "data:image/png;base64,...",
    {"type": "image_url", "image_url": ...}            bytes, {"bytes": ..., "path": ...}, a PIL image
    column `images` of a row   --put_images--> parts without a source, `<image>` marks, or before the first question
    parts --encoded--> bytes --ImageReader--> Image

Nothing is fetched from the network: a data set that names images by URL is refused.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from PIL import ExifTags
from PIL import Image as Pillow

from hone.config import ConfigError
from hone.types import Image, Message

MARK = "<image>"  # marks an image of the column `images` in a text; many published data sets use it
_SOURCES = ("image", "path", "image_url", "url", "base64")
_DATA_URL = re.compile(r"data:[\w/+.-]*;base64,")
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16", "I;16B")
_REMOTE = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


class ImageError(ConfigError):
    """An image cannot be read, or has no place in the messages. The message names it."""


class ImageReader(Protocol):
    """Decodes images for one model (`hone.models.vision.image_processor.ImageProcessor`)."""

    @property
    def token_id(self) -> int:
        """The id of the placeholder; the rendered text has one for each image."""

    def image(self, data: bytes) -> Image:
        """Decode `data` (PNG, JPEG ...). Raises ValueError if that fails, or if the image is too narrow."""


# ------------------------------------------------------------------------------------------------------------- parts


def is_image(part: Any) -> bool:
    """Return whether a part of a message's content is an image."""
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def parts_of(messages: Sequence[Message]) -> Iterator[Any]:
    """All parts of messages whose content is a list of parts."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, Sequence) and not isinstance(content, str):
            yield from content


def source_of(part: Mapping[str, Any]) -> Any:
    """The source of an image part; None if it has none."""
    found = next((part[name] for name in _SOURCES if part.get(name) is not None), None)
    if isinstance(found, Mapping) and "url" in found:  # {"image_url": {"url": ...}}, as OpenAI's messages have it
        found = found["url"]
    return f"data:;base64,{found}" if found is not None and found is part.get("base64") else found


def images_in(messages: Sequence[Message]) -> tuple[Image, ...]:
    """The images in messages from `Renderer.with_images`, in order."""
    return tuple(one["image"] for one in parts_of(messages) if is_image(one) and isinstance(one.get("image"), Image))


def with_sources(messages: Sequence[Message], image_of: Any) -> tuple[Message, ...]:
    """The messages with each image part replaced by {"type": "image", **image_of(part)}."""
    changed: list[Message] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, Sequence) and not isinstance(content, str):
            parts = [{"type": "image", **image_of(part)} if is_image(part) else _present(part) for part in content]
            message = Message(**{**message, "content": parts})
        changed.append(message)
    return tuple(changed)


def without_images(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages with empty image parts, for rewards and chat templates."""
    return with_sources(messages, lambda part: {})


def _present(part: Any) -> Any:
    """A part without the nulls with which Parquet fills missing keys."""
    return {key: value for key, value in part.items() if value is not None} if isinstance(part, Mapping) else part


def put_images(messages: Sequence[Message], sources: Any) -> tuple[Message, ...]:
    """Put the images of a row's column into its messages.

    They fill, in order, the image parts without a source, or else the marks `<image>` in the text; without either they
    are put before the first user message. Raises ImageError if the numbers differ.
    """
    given = list(sources) if isinstance(sources, list | tuple) else [sources]
    blank = sum(is_image(part) and source_of(part) is None for part in parts_of(messages))
    marks = sum(text.count(MARK) for text in _texts(messages))
    if blank or marks:
        if len(given) != (blank or marks):
            what = f"{blank} image parts" if blank else f"{marks} marks {MARK}"
            raise ImageError(f"the column of images has {len(given)}, the messages have {what}")
        left = iter(given)
        if not blank:
            messages = tuple(_split_marks(message) for message in messages)
        return with_sources(messages, lambda part: {"image": s if (s := source_of(part)) is not None else next(left)})
    first = next((i for i, message in enumerate(messages) if message.get("role") == "user"), None)
    if first is None:
        raise ImageError(f"the column of images has {len(given)}, and no message of the user could show them")
    content = messages[first].get("content")
    texts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or [])
    parts = [*({"type": "image", "image": source} for source in given), *texts]
    shown = Message(**{**messages[first], "content": parts})
    return (*messages[:first], shown, *messages[first + 1 :])


def _texts(messages: Sequence[Message]) -> Iterator[str]:
    yield from (content for message in messages if isinstance(content := message.get("content"), str))
    yield from (part["text"] for part in parts_of(messages) if isinstance(part, Mapping) and part.get("text"))


def _split_marks(message: Message) -> Message:
    """The message with its `<image>` marks replaced by image parts."""
    content = message.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or [])
    split: list[Any] = []
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str) or MARK not in text:
            split.append(part)
            continue
        for number, piece in enumerate(text.split(MARK)):
            split += [{"type": "image"}] if number else []
            split += [{"type": "text", "text": piece}] if piece else []
    if isinstance(content, str) and len(split) == 1:
        return message
    return Message(**{**message, "content": split})


# ----------------------------------------------------------------------------------------------------------- reading


def encoded(source: Any, folder: Path) -> bytes:
    """Read the encoded image (PNG, JPEG ...) of a source; paths are relative to `folder`. Raises ImageError."""
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if isinstance(source, Pillow.Image):
        return as_png(source)
    if isinstance(source, Mapping):  # a column of images in a Parquet file
        if source.get("bytes") is not None:
            return encoded(source["bytes"], folder)
        source = source.get("path")
    if isinstance(source, str) and source.startswith("data:"):
        return data_of_url(source)
    if isinstance(source, str) and _REMOTE.match(source):
        raise ImageError(f"image {source:.200} is elsewhere: hone fetches none; save it to a file, and give its path")
    if isinstance(source, str | Path) and str(source):
        return _read(Path(folder, source))
    raise ImageError(
        f"an image should be a path, bytes, 'data:...;base64,...' or a PIL image, found {type(source).__name__}"
    )


def data_of_url(url: str) -> bytes:
    """The bytes in a data URL; reads no file. Raises ImageError for anything but "data:...;base64,..."."""
    head = _DATA_URL.match(url)
    if head is None:
        raise ImageError(f"a data URL of an image should begin with data:image/png;base64, found {url!r:.80}")
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"an image given as base64 is not valid: {error}") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise ImageError(f"image {path} cannot be read: {reason}") from error


def as_png(image: Pillow.Image) -> bytes:
    """Encode an image without loss, or with its colours as RGB where PNG has no such mode. Raises ImageError."""
    if image.mode in ("I", "F"):
        raise ImageError(f"a PIL image of mode {image.mode} has no range of brightness; convert it to L or RGB")
    orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    if image.mode not in _PNG_MODES:
        image = image.convert("RGBA" if image.has_transparency_data else "RGB")
    buffer = io.BytesIO()
    turned = Pillow.Exif()
    turned[ExifTags.Base.Orientation] = orientation
    image.save(buffer, "PNG", exif=turned)
    return buffer.getvalue()


__all__ = ["ImageError", "ImageReader", "as_png", "data_of_url", "encoded", "images_in", "put_images", "without_images"]
