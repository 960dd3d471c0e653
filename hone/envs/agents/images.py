"""Images in the messages of a request, from the form of each protocol to what the renderer reads.

    image_url (Chat Completions), input_image (Responses), image (Messages)  --parts-->  {"type": "image_url", ...}
    "data:image/png;base64,..."  --with_bytes-->  {"type": "image", "image": bytes}  --Renderer.with_images-->  Image

Nothing is fetched and no file is read: an image is in the request itself.
"""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from PIL import Image as Pillow

from hone.config import ConfigError
from hone.data.images import as_png, data_of_url, images_in, is_image, parts_of, source_of, with_sources
from hone.envs.agents.protocol import BadRequest
from hone.types import Image, Message, Prompt

LARGEST_IMAGE = 8 << 20  # bytes of an image's file
MOST_PIXELS = 1 << 25  # of one image, which takes 96 MiB when it is decoded
MOST_IMAGES = 64  # of one request
MOST_PIXELS_TOGETHER = 1 << 27  # of one request; decoding them takes about a second
LONGEST_URLS = 15 << 20  # bytes of the images of a data set's prompt; with the rest, a request is at most 16 MiB
MOST_KEPT = 16 << 20  # bytes of the files that a session keeps decoded; a request has fewer
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


def content_of(content: Any, role: Any, texts: Collection[str], image: str) -> str | list[dict[str, Any]]:
    """The content of a role's message in the form of Chat Completions: a text, or a list of parts if it has images.

    `texts` and `image` are the protocol's names of the parts; only the user has images. Raises BadRequest for others.
    """
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in texts and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        elif kind == image and role == "user":
            parts.append({"type": "image_url", "image_url": {"url": _url_of(part)}})
        else:
            takes = "text and images" if role == "user" else "text only"
            raise BadRequest(f"a message of the role {role!r:.40} takes {takes}, found {part!r:.80}", "unsupported")
    return parts if any(map(is_image, parts)) else "".join(part["text"] for part in parts)


def _url_of(part: Mapping[str, Any]) -> Any:
    """The data URL of an image part: in `image_url` (Responses), within it (Chat Completions), or in `source`."""
    source = part.get("source") or part.get("image_url")
    if isinstance(source, dict) and source.get("type") == "base64":
        return f"data:{source.get('media_type', '')};base64,{source.get('data', '')}"
    if isinstance(source, dict):
        return source.get("url")
    return source


def has_images(messages: Sequence[Any]) -> bool:
    return any(map(is_image, parts_of(messages)))


def with_bytes(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages with the file of each image in place of its data URL.

    Raises BadRequest for what is no such URL, and for more images or pixels than a request may have.
    """
    sources = [source_of(part) for part in parts_of(messages) if is_image(part)]
    if len(sources) > MOST_IMAGES:
        raise BadRequest(f"the request has {len(sources)} images; at most {MOST_IMAGES} are taken")
    files, pixels = [], 0
    for source in sources:
        files.append(_data_of(source))
        pixels += _pixels_of(files[-1])
        if pixels > MOST_PIXELS_TOGETHER:
            raise BadRequest(f"the request's images have over {MOST_PIXELS_TOGETHER} pixels; at most so many are taken")
    left = iter(files)
    return with_sources(messages, lambda part: {"image": next(left)})


DecodeFn = Callable[[Sequence[Message]], Sequence[Message]]


class DecodedImages:
    """The decoded images of a session by their files, because each request repeats the images of its history.

    Keeps files of `MOST_KEPT` bytes and forgets the oldest. Threads may share it.
    """

    def __init__(self) -> None:
        self._images: dict[bytes, Image] = {}
        self._bytes = 0
        self._changing = threading.Lock()

    def in_place(self, messages: Sequence[Message], decode: DecodeFn) -> Sequence[Message]:
        """The messages with an `Image` in place of each file; `decode` reads those that are not kept."""
        known = with_sources(messages, lambda part: {"image": self._images.get(part["image"], part["image"])})
        shown = decode(known)
        with self._changing:
            for image in images_in(shown):
                if image.data not in self._images:
                    self._images[image.data] = image
                    self._bytes += len(image.data)
            while self._bytes > MOST_KEPT:
                oldest = next(iter(self._images))
                del self._images[oldest]
                self._bytes -= len(oldest)
        return shown


def _data_of(source: Any) -> bytes:
    if not isinstance(source, str) or not source.startswith("data:"):
        raise BadRequest(
            f"an image should be a data URL (data:image/png;base64,...), found {source!r:.80}; hone fetches none",
            "unsupported",
        )
    data = data_of_url(source)
    if len(data) > LARGEST_IMAGE:
        raise BadRequest(f"an image has {len(data)} bytes; at most {LARGEST_IMAGE} are taken")
    return data


def _pixels_of(data: bytes) -> int:
    """The number of pixels of an image. Raises BadRequest for other formats, and for too many pixels."""
    try:
        width, height = Pillow.open(io.BytesIO(data), formats=FORMATS).size  # reads the head of the file only
    except Pillow.DecompressionBombWarning as error:  # where warnings are errors; the limit below is lower
        raise BadRequest(f"an image is too large: {error}; at most {MOST_PIXELS} are taken") from error
    except (OSError, SyntaxError, ValueError, Pillow.DecompressionBombError) as error:
        raise BadRequest(f"an image of {len(data)} bytes is none of {', '.join(FORMATS)}: {error!s:.200}") from error
    if width * height > MOST_PIXELS:
        raise BadRequest(f"an image has {width} x {height} pixels; at most {MOST_PIXELS} are taken")
    return int(width * height)


def told_to_agents(prompt: Prompt) -> Prompt:
    """The prompt as an agent program gets it: its images are data URLs in the messages, as the endpoint takes them.

    Raises ConfigError naming a prompt whose images the endpoint would refuse.
    """
    left = iter(prompt.images)

    def told(part: Any) -> Any:
        return {"type": "image_url", "image_url": {"url": _data_url(next(left).data)}} if is_image(part) else part

    messages = [
        message
        if isinstance(content := message.get("content"), str) or content is None
        else Message(**{**message, "content": [told(part) for part in content]})
        for message in prompt.messages
    ]
    try:
        with_bytes(messages)
    except BadRequest as error:
        raise ConfigError(f"{prompt.prompt_id} cannot be given to an agent program: {error}") from error
    urls = [source_of(part) for part in parts_of(messages) if is_image(part)]
    if sum(map(len, urls)) > LONGEST_URLS:
        raise ConfigError(
            f"{prompt.prompt_id} cannot be given to an agent program: its images are {sum(map(len, urls))} bytes as "
            f"data URLs, and a request has at most {LONGEST_URLS} for the images of its prompt"
        )
    return replace(prompt, messages=tuple(messages))


def _data_url(data: bytes) -> str:
    """The image as it is, or as PNG without loss if the endpoint does not take its format."""
    opened = Pillow.open(io.BytesIO(data))
    kind = opened.format or ""
    if kind not in FORMATS:
        data, kind = as_png(opened), "PNG"
    return f"data:image/{kind.lower()};base64,{base64.b64encode(data).decode()}"


__all__ = ["DecodedImages", "content_of", "has_images", "told_to_agents", "with_bytes"]
