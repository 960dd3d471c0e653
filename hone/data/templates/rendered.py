"""A notice of rows that were rendered already, by the template of this model or of another one."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

from hone.data.columns import RowReader

LOG = logging.getLogger("hone")
_DEEPEST = 4  # a row, a list of messages, a message, its content
_FRAMES = re.compile(  # what begins or ends a message in the templates of common models
    r"<\|(?:im_start|im_end|start_header_id|end_header_id|eot_id|begin_of_text|user|assistant|system|observation|end"
    r"|start|message|turn)\|?>|<(?:start|end)_of_turn>|\[/?INST\]|<<SYS>>|<｜(?:User|Assistant|begin▁of▁sentence)｜>"
    r"|<\|(?:START|END)_OF_TURN_TOKEN\|>"
)


def tell_rendered(reader: RowReader, expected: bool) -> None:
    """Warn if the first row holds two different marks of messages.

    `expected`: `data.chat.special_tokens_in_rows` is set.
    """
    if expected:
        return
    found = sorted({mark for text in _texts(reader.row(reader.first), _DEEPEST) for mark in _FRAMES.findall(text)})
    if len(found) > 1:
        LOG.warning(
            "%s holds %s, as if a chat template had rendered it. hone reads these marks as plain text and renders the "
            "row once more; give messages instead, or set data.chat.special_tokens_in_rows=true if they are tokens "
            "of this model",
            reader.key, " and ".join(found[:3]),
        )  # fmt: skip


def _texts(value: Any, levels: int) -> Iterator[str]:
    """The texts in a row."""
    if isinstance(value, str):
        yield value
    elif levels and isinstance(value, Mapping | list):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(one, levels - 1)


__all__ = ["tell_rendered"]
