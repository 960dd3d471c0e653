"""Small hubs on loopback: what the clients of Hugging Face and ModelScope ask of theirs, for one repository.

A repository is a list of commits, each a folder; `main` is the last one. Whoever asks for a file of `CUT` for the first
time loses the connection half-way.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

NAME = "acme/tiny"


@dataclass
class Hub:
    """One repository, and what was asked of it."""

    commits: dict[str, Path] = field(default_factory=dict)  # in order; the last one is `main`
    cut: set[str] = field(default_factory=set)  # files whose first download breaks off
    asked: list[str] = field(default_factory=list)  # "<method> <path> <range>"
    endpoint: str = ""

    def add(self, folder: Path) -> str:
        """A new commit with the files of `folder`; its id, 40 hexadecimal digits."""
        commit = hashlib.sha1(str(folder).encode()).hexdigest()
        self.commits[commit] = folder
        return commit

    def folder(self, revision: str) -> tuple[str, Path] | None:
        if revision in ("main", "master"):
            revision = list(self.commits)[-1]
        return (revision, self.commits[revision]) if revision in self.commits else None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *arguments: Any) -> None:
        """Nothing is printed."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        url = urlparse(self.path)
        path, query = unquote(url.path), {key: one[0] for key, one in parse_qs(url.query).items()}
        self.hub.asked.append(f"{self.command} {self.path} {self.headers.get('Range', '')}".strip())
        if found := re.fullmatch(rf"/api/models/{NAME}/(revision|tree)/(.+)", path):
            self._facts(found[1], found[2])
        elif found := re.fullmatch(rf"/{NAME}/resolve/([^/]+)/(.+)", path):
            self._file(found[1], found[2], body)
        elif path == f"/api/v1/models/{NAME}/repo/files":
            self._listing(query["Revision"])
        elif path == f"/api/v1/models/{NAME}/repo":
            self._file(query["Revision"], query["FilePath"], body)
        else:
            self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})

    def _facts(self, kind: str, revision: str) -> None:
        found = self.hub.folder(revision)
        if found is None:
            self._json({"error": f"Invalid rev id: {revision}"}, 404, {"X-Error-Code": "RevisionNotFound"})
        elif kind == "revision":
            self._json({"id": NAME, "modelId": NAME, "sha": found[0], "siblings": [], "tags": [], "private": False})
        else:
            self._json(
                [
                    {"type": "file", "path": one.name, "size": one.stat().st_size, "oid": _digest(one)[:40]}
                    for one in sorted(found[1].iterdir())
                ]
            )

    def _listing(self, revision: str) -> None:
        found = self.hub.folder(revision)
        if found is None:
            self._json({"Code": 10010205001, "Message": f"no revision {revision}", "Success": False}, 404)
            return
        files = [
            {"Name": one.name, "Path": one.name, "Type": "blob", "Size": one.stat().st_size, "Sha256": _digest(one)}
            for one in sorted(found[1].iterdir())
        ]
        self._json({"Code": 200, "Success": True, "Message": "", "Data": {"Files": files, "TotalCount": len(files)}})

    def _file(self, revision: str, name: str, body: bool) -> None:
        found = self.hub.folder(revision)
        if found is None or not (found[1] / name).is_file():
            self._json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        content = (found[1] / name).read_bytes()
        start = int(re.findall(r"\d+", self.headers.get("Range", "0"))[0])
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("ETag", f'"{_digest(found[1] / name)[:40]}"')
        self.send_header("X-Repo-Commit", found[0])
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content) - start))
        if "Range" in self.headers:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if body and name in self.hub.cut:
            self.hub.cut.discard(name)
            self.wfile.write(content[start : len(content) // 2])
            self.wfile.flush()
            self.close_connection = True
            self.connection.close()
        elif body:
            self.wfile.write(content[start:])

    def _json(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        for key, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def serve() -> Iterator[Hub]:
    """A hub without commits, on a free port of loopback."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
