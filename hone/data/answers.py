"""Find the answer in a response, for rewards and environments."""

from __future__ import annotations


def between_tags(text: str, tag: str) -> str | None:
    """The text between the last `<tag>` and the next `</tag>`; None if there is no such pair.

    >>> between_tags("<a>1</a> no: <a>2</a>", "a")
    '2'
    """
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, end) if end >= 0 else -1
    return text[start + len(tag) + 2 : end] if start >= 0 else None
