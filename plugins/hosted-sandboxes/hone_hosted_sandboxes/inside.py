"""The part of hone that runs inside a sandbox of a service: one program, watched by an attendant.

    hone --a zip: hone's code and a request--> service --runs `python3 ZIP`--> main --> attendant --> program
         <------------- one line on standard output: MARK WORD REPLY -----------/

The same attendant as on hone's machine holds the limits, ends what the program leaves behind and replies. It has the
standard library only, and needs Python 3.10.
"""

from __future__ import annotations

import functools
import io
import json
import os
import socket
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hone
from hone.processes.frames import FrameReader, Kind, encode
from hone.sandboxes.attendant import attend
from hone.sandboxes.warm import count_threads

MARK = "hone-reply"
REQUEST = "request.json"
CARRIED = (
    "machine.py",
    *(f"processes/{name}.py" for name in ("frames", "leftovers", "supervisor")),
    *(f"sandboxes/{name}.py" for name in ("attendant", "base", "bubblewrap", "confinement", "warm")),
    *(f"sandboxes/kernel/{name}.py" for name in ("cgroups", "landlock", "mounts", "socket_memory", "system_calls")),
)
# A Python that cannot run hone is a loss; without a reply it would count as the program's doing.
BOOT = """
import json, sys, zipfile
lost = None
if sys.version_info < (3, 10):
    lost = "its python3 is %d.%d, and hone needs 3.10 or newer there" % sys.version_info[:2]
else:
    try:
        from inside import main
    except ImportError as error:
        lost = "its python3 cannot run hone: %s" % error
if lost is None:
    main()
else:
    with zipfile.ZipFile(sys.argv[0]) as bundle:
        word = json.loads(bundle.read("request.json"))["word"]
    print("\\nhone-reply", word, json.dumps({"lost": lost}))
"""


def bundle_of(request: Mapping[str, Any]) -> bytes:
    """The file that runs `request`: `word`, the secret at the beginning of the reply; `folder`, a name; and the rest.

    The rest is an attendant's request without `backend`.
    """
    held = io.BytesIO(_code())
    with zipfile.ZipFile(held, "a", zipfile.ZIP_DEFLATED) as bundle:
        bundle.writestr(REQUEST, json.dumps(request))
    return held.getvalue()


@functools.cache
def _code() -> bytes:
    """The zip of what runs there, without a request."""
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as bundle:
        bundle.writestr("__main__.py", BOOT)
        for package in ("hone", "hone/processes", "hone/sandboxes", "hone/sandboxes/kernel"):
            bundle.writestr(f"{package}/__init__.py", "")
        for path in CARRIED:
            bundle.writestr(f"hone/{path}", (Path(hone.__file__).parent / path).read_text(encoding="utf-8"))
        bundle.writestr("inside.py", Path(__file__).read_text(encoding="utf-8"))
    return held.getvalue()


def reply_in(output: str, word: str) -> dict[str, Any] | None:
    """The reply in what `main` printed; None if it printed none."""
    start = f"{MARK} {word} "
    for line in output.splitlines():
        if line.startswith(start):
            found = json.loads(line.removeprefix(start))
            return found if isinstance(found, dict) else None
    return None


def main() -> None:
    """Run the request of this zip and print the reply. Without a reply, something here has killed the attendant."""
    with zipfile.ZipFile(sys.argv[0]) as bundle:
        request: dict[str, Any] = json.loads(bundle.read(REQUEST))
    os.unlink(sys.argv[0])  # the program must not read the word
    word = request.pop("word")
    request |= {"backend": "machine", "folder": str(Path(tempfile.gettempdir(), request["folder"]))}
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        attend(theirs, 0 if os.geteuid() == 0 else count_threads(os.geteuid()))
    theirs.close()
    ours.sendall(encode(Kind.REQUEST, 0, request))
    reader = FrameReader()
    while data := ours.recv(1 << 20):  # the attendant ends at its deadline, and the service ends this process
        for frame in reader.feed(data):
            sys.stdout.write(f"\n{MARK} {word} {json.dumps(frame.body)}\n")
            return


__all__ = ["bundle_of", "main", "reply_in"]
