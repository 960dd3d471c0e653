"""Holes: parts of a script's text that only running it would tell, such as `$(date)` or an unset `$HOME`.

A hole stands in a value between two characters of Unicode's private use area, which are removed from a script before it
is read. Its name is the text of the script.
"""

from __future__ import annotations

import re

_OPEN, _CLOSE = "\ue000", "\ue001"
_HOLE = re.compile(f"{_OPEN}([^{_OPEN}{_CLOSE}]*){_CLOSE}")
_ATOM = re.compile(f"(?:{_OPEN}[^{_OPEN}{_CLOSE}]*{_CLOSE}|[^\\s{_OPEN}{_CLOSE}])+")


def hole(text: str) -> str:
    """Return a hole whose name is the script's `text`."""
    return f"{_OPEN}{shown(text)}{_CLOSE}"


def holes(value: str) -> list[str]:
    """Return the names of the holes in a value."""
    return _HOLE.findall(value)


def shown(value: str) -> str:
    """Return a value with its holes as the script spells them."""
    return value.replace(_OPEN, "").replace(_CLOSE, "")


def split(value: str) -> list[str]:
    """Split at white space, but not inside a hole, as bash splits an unquoted variable."""
    return _ATOM.findall(value)
