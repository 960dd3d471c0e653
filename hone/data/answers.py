"""Find the answer in a response, for rewards and environments."""

from __future__ import annotations

import re
from collections.abc import Iterator

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")
_LANGUAGE = re.compile(r"[ \t]*([\w+#.-]*)")


def between_tags(text: str, tag: str) -> str | None:
    """The text between the last `<tag>` and the next `</tag>`; None if there is no such pair.

    >>> between_tags("<a>1</a> no: <a>2</a>", "a")
    '2'
    """
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, end) if end >= 0 else -1
    return text[start + len(tag) + 2 : end] if start >= 0 else None


def fenced_blocks(text: str) -> Iterator[tuple[str, str]]:
    """Language and content of each fenced block of a Markdown text, in linear time.

    As in CommonMark, a block ends at a fence that is at least as long as its first. A block without an end is none.

    >>> list(fenced_blocks("so\\n```python\\nprint(1)\\n```\\n~~~\\n```\\n~~~"))
    [('python', 'print(1)\\n'), ('', '```\\n')]
    """
    lines = text.split("\n")
    fences = [_FENCE.fullmatch(line.rstrip("\r")) for line in lines]
    ends = [(found[1][0], len(found[1])) if found and not found[2].strip() else ("", 0) for found in fences]
    longest = _longest_from(ends)
    start, mark, length = -1, "", 0
    for number, (found, (end, size)) in enumerate(zip(fences, ends, strict=True)):
        if start >= 0:
            if end == mark and size >= length:
                language = _LANGUAGE.match(fences[start][2])[1]  # type: ignore[index]  # a fence, which always matches
                yield language, "".join(f"{line}\n" for line in lines[start + 1 : number])
                start = -1
        elif found is not None:
            mark, length = found[1][0], len(found[1])
            inline = mark == "`" and "`" in found[2]  # code within a line
            if not inline and longest[number + 1].get(mark, 0) >= length:
                start = number


def _longest_from(ends: list[tuple[str, int]]) -> list[dict[str, int]]:
    """For each line, and after the last: mark -> length of the longest fence from there on that can end a block."""
    longest: dict[str, int] = {}
    found = [longest]
    for mark, length in reversed(ends):
        if length > longest.get(mark, 0):
            longest = {**longest, mark: length}
        found.append(longest)
    return found[::-1]


__all__ = ["between_tags", "fenced_blocks"]
