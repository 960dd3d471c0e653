"""What all engines have in common that run as an HTTP server on a private unix socket: `ServedEngine`.

start, close            a folder of its own for the socket, the process, the question whether its guard is there
generate                checks, what is open, what is counted; an engine adds `_generate`
_request                one request with the run's token, and what its failure means: lost, late, refused
"""

from __future__ import annotations

import asyncio
import math
import re
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import torch

import hone
from hone.config import ConfigError, count_as_read
from hone.models.source import check_source
from hone.rollout.base import ReplicaLost, ServerSpec
from hone.rollout.keeper import FOLDER
from hone.rollout.requests import check_prompt, check_sampling
from hone.rollout.server import ServerFailed, ServerProcess
from hone.types import Completion, Metric, Metrics, SamplingParams, StopReason

SOCKET = "s"  # its name; a socket's whole path has to be short
WAKE_TAGS = ("weights", "kv_cache")
CONTROL_S = 60.0  # deadline of a control request that has nothing to wait for
DYING_S = 5.0  # a server whose engine has failed ends within this time
AGAIN_S = 0.02  # between two looks whether aborted requests have ended
LOG_LINES = 500  # of the server's log, searched for what began its end
CAUSE = re.compile(r"(?:^|\] |\) )((?:[\w.]*(?:Error|Exception)|[\w. ]+: error): .+)$", re.MULTILINE)


@dataclass
class _Counted:
    """What happened since the last look."""

    tokens: int = 0
    requests: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    busy_s: float = 0.0  # with at least one request open


class ServedEngine(ABC):
    """The trainer's side of one server; an engine says how it is started and in which words it is spoken to."""

    health: str  # a path that answers 200 when the server is ready

    def __init__(self, spec: ServerSpec, python: Path, options: dict[str, Any], vocabulary: int) -> None:
        count_as_read(spec.settings.builtin)
        self.name = spec.name
        self._spec = spec
        self._python = python
        self._options = options
        self._vocabulary = vocabulary
        self._ranks = spec.settings.tensor_parallel
        self._start_timeout_s = spec.settings.start_timeout_s
        self._request_timeout_s = spec.settings.request_timeout_s
        self._has_tokenizer = not options.get("skip_tokenizer_init", False)
        self._longest = 0  # known when the server runs
        self._folder: Path | None = None
        self._server: ServerProcess | None = None
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # whose the session is
        self._open: set[str] = set()
        self._counted = _Counted()
        self._busy_since = 0.0
        self._reset()

    def _reset(self) -> None:
        """What is true of a server that has just started."""
        self._version = -1
        self._not_serving = "it has no weights yet"
        self._awake = set(WAKE_TAGS)
        self._paused = False

    # ----------------------------------------------------------------------------------------- what an engine adds

    @abstractmethod
    def _command(self, folder: Path) -> list[str]:
        """What starts the server, with its socket in `folder`. Nothing secret stands in it."""

    @abstractmethod
    def _environment(self, folder: Path) -> dict[str, str]:
        """Variables of its process, the token among them."""

    @abstractmethod
    async def _longest_sequence(self) -> int:
        """Ask the running server how many tokens prompt and completion may have."""

    @abstractmethod
    async def _generate(
        self, request_id: str, token_ids: Sequence[int], sampling: SamplingParams
    ) -> tuple[Completion, int, int]:
        """Send one request that was checked: what came, and how many tokens its prompt had and the cache knew."""

    @abstractmethod
    async def _abort_open(self) -> None:
        """Tell the server to end every request it has."""

    # --------------------------------------------------------------------------------------------- its process

    @property
    def ranks(self) -> int:
        return self._ranks

    @property
    def alive(self) -> bool:
        return self._server is not None and self._server.alive

    @property
    def weight_version(self) -> int:
        """The version that the next token will be sampled from; -1 while there is none."""
        return self._version

    async def start(self) -> None:
        """Start the server and wait until it answers; it serves nothing (version -1) before it received weights.

        Raises ServerFailed with its last lines: an option that its parser refuses, a model it cannot load ...
        """
        self._reset()
        self._folder = private_folder()
        log = self._spec.logs / f"{self.name}.log"
        environment = {**self._environment(self._folder), FOLDER: str(self._folder)}
        self._server = ServerProcess(self.name, self._command(self._folder), environment, log)
        try:
            await self._server.start(self._answers, self._start_timeout_s)
            await self._check_guard()
            self._longest = await self._longest_sequence()
        except ServerFailed as error:
            cause = first_error(self._server.last_lines(LOG_LINES))
            await self.close()
            raise ServerFailed(f"{cause}{error}") from error
        except BaseException:
            await self.close()
            raise

    async def _answers(self) -> bool:
        try:
            await self._request("GET", self.health, timeout_s=5.0)
        except (ReplicaLost, RuntimeError) as error:
            raise ConnectionError(str(error)) from error
        return True

    async def _check_guard(self) -> None:
        """A server that answers without the token is not used."""
        async with self._open_session().get(f"http://server{self.health}", headers={"Authorization": ""}) as reply:
            if reply.status != 401:
                raise RuntimeError(f"server {self.name} answers without the run's token (status {reply.status})")

    async def close(self) -> None:
        """End the server with everything it started; again is fine."""
        if self._session is not None and not self._session.closed:
            await self._session.close()
        self._session = None
        if self._server is not None:
            await self._server.stop()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        self._version = -1

    # ---------------------------------------------------------------------------------------------- generating

    async def generate(self, request_id: str, token_ids: tuple[int, ...], sampling: SamplingParams) -> Completion:
        """Continue `token_ids`; log-probs are of the distribution that was sampled.

        Raises ValueError for a request that cannot be served; ReplicaLost if the server died; TimeoutError after
        `rollout.request_timeout_s`; RuntimeError if it sleeps, has no weights, or loses them meanwhile.
        """
        check_prompt(request_id, tuple(token_ids), self._vocabulary, self._longest or math.inf)
        check_sampling(request_id, sampling, self._vocabulary, self._has_tokenizer)
        if request_id in self._open:
            raise ValueError(f"request {request_id!r} is already running on {self.name}")
        self._check_serving()
        if not self._open:
            self._busy_since = time.perf_counter()
        self._open.add(request_id)
        try:
            completion, prompt_tokens, cached_tokens = await self._generate(request_id, token_ids, sampling)
        finally:
            self._open.discard(request_id)
            if not self._open:
                self._counted.busy_s += time.perf_counter() - self._busy_since
        self._count(completion, prompt_tokens, cached_tokens)
        if completion.stop_reason is StopReason.ABORTED and self._not_serving:
            raise RuntimeError(
                f"request {request_id!r}: rollout replica {self.name} lost its weights: {self._not_serving}"
            )
        return completion

    def _check_serving(self) -> None:
        asleep = sorted(set(WAKE_TAGS) - self._awake)
        if asleep:
            raise RuntimeError(f"rollout replica {self.name} is asleep ({', '.join(asleep)}); call wake_up first")
        if self._not_serving:
            raise RuntimeError(
                f"rollout replica {self.name} cannot generate before update_weights: {self._not_serving}"
            )

    def _count(self, completion: Completion, prompt_tokens: int, cached_tokens: int) -> None:
        self._counted.requests += 1
        self._counted.tokens += len(completion.token_ids)
        self._counted.aborted += completion.stop_reason is StopReason.ABORTED
        self._counted.prompt_tokens += prompt_tokens
        self._counted.cached_tokens += cached_tokens

    def metrics(self) -> Metrics:
        """What ended since the last call."""
        if self._open:
            now = time.perf_counter()
            self._counted.busy_s += now - self._busy_since
            self._busy_since = now
        counted, self._counted = self._counted, _Counted()
        found = {
            "rollout/tokens": Metric.sum(counted.tokens),
            "rollout/prefill_tokens": Metric.sum(counted.prompt_tokens - counted.cached_tokens),
            "rollout/cached_prompt_tokens": Metric.sum(counted.cached_tokens),
            "rollout/requests": Metric.sum(counted.requests),
            "rollout/aborted": Metric.sum(counted.aborted),
            "perf/rollout_busy_seconds": Metric.sum(counted.busy_s),
        }
        if counted.busy_s and counted.tokens:
            found["perf/rollout_tokens_per_s"] = Metric.mean(counted.tokens / counted.busy_s, counted.busy_s)
        return found

    async def abort_all(self) -> None:
        """End every request that is open now; each `generate` returns the tokens it has."""
        await self._abort(set(self._open))

    async def _abort(self, ids: set[str]) -> None:
        """Abort until all of `ids` have ended: one that is still on its way to the server is not seen by it."""
        async with asyncio.timeout(CONTROL_S):
            while ids & self._open:
                await self._abort_open()
                await asyncio.sleep(AGAIN_S)

    async def stop(self, reason: str) -> None:
        """Serve nothing more (version -1) until whole weights were received; requests that run fail."""
        self._version, self._not_serving = -1, reason or "it was stopped"
        if self.alive:
            await self.abort_all()

    # ------------------------------------------------------------------------------------------------ requests

    async def _request(self, method: str, path: str, body: Any = None, timeout_s: float = CONTROL_S) -> dict[str, Any]:
        """One request and its reply. Raises ReplicaLost, TimeoutError, ValueError (400), RuntimeError (others)."""
        server = self._server  # whose reply it is: by the time it comes, another may have taken its place
        try:
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            url = f"http://server{path}"
            async with self._open_session().request(method, url, json=body, timeout=timeout) as reply:
                status, text = reply.status, await reply.text()
                found = await reply.json() if "json" in reply.headers.get("content-type", "") else {}
        except TimeoutError as error:
            raise TimeoutError(f"replica {self.name} did not answer {path} within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            why = f"{path}: {error!r}{self._last_words()}"
            raise ReplicaLost(f"replica {self.name} was lost during {why}") from error
        if status == 200:
            return found if isinstance(found, dict) else {}
        message = f"replica {self.name} refused {path} (status {status}): {said(found, text)}"
        if status == 400:
            raise ValueError(message)
        if status >= 500 and (server is None or await self._dies(server)):
            raise ReplicaLost(f"{message}{self._last_words()}")
        raise RuntimeError(message)

    async def _dies(self, server: ServerProcess) -> bool:
        """Whether the server ends within a moment: its engine has died, and that was the last thing it said."""
        timeout = aiohttp.ClientTimeout(total=DYING_S)
        with suppress(aiohttp.ClientError, OSError, ReplicaLost):
            async with self._open_session().get(f"http://server{self.health}", timeout=timeout) as reply:
                if reply.status == 200 and self._server is server:
                    return False
        with suppress(TimeoutError):
            await asyncio.wait_for(server.wait_dead(), DYING_S)
        return not server.alive

    def _last_words(self) -> str:
        """How a server ended, and the first error in the end of its log."""
        if self._server is None or self._server.alive:
            return ""
        cause = first_error(self._server.last_lines(LOG_LINES))
        return f"; it ended with {self._server.ended}" + (f", after {cause.strip()}" if cause else "")

    def _open_session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if self._session is None or self._session.closed or self._loop is not loop:
            if self._folder is None:
                raise ReplicaLost(f"replica {self.name} does not run")
            self._loop = loop
            # A connection per request: one that is kept can be closed by the server just when it is used again.
            connector = aiohttp.UnixConnector(str(self._folder / SOCKET), limit=0, force_close=True)
            headers = {"Authorization": f"Bearer {self._spec.token}"}
            self._session = aiohttp.ClientSession(headers=headers, connector=connector)
        return self._session


# ---------------------------------------------------------------------------------------------- before it is started


def environment_python(backend: str, python: str, how_to_install: str) -> Path:
    """The Python that has the engine: `python`, else `.venv-<backend>`. Raises ConfigError that says how to make it."""
    if python:
        found = Path(python).expanduser()
        if not found.is_file():
            raise ConfigError(f"rollout.python: there is no interpreter {python}; {how_to_install}")
        return found.absolute()
    for place in (Path.cwd(), Path(hone.__file__).parents[1]):
        if (found := place / f".venv-{backend}" / "bin" / "python").is_file():
            return found
    raise ConfigError(
        f"rollout.backend={backend} needs a Python environment of its own, and .venv-{backend} is not there: "
        f"{how_to_install}"
    )


def private_folder() -> Path:
    """A folder that only this user can enter: the server's socket, and a path with hone's package and nothing else.

    A socket's path has to be short; and the folder that holds `hone` may hold a torch that is not the server's.
    """
    folder = Path(tempfile.mkdtemp(prefix="hone-"))
    (folder / "path").mkdir()
    (folder / "path" / "hone").symlink_to(Path(hone.__file__).parent.absolute(), target_is_directory=True)
    return folder


def refuse_own_code(spec: ServerSpec) -> None:
    """Raises ModelError for a model or tokenizer that brings code of its own, unless that was allowed."""
    check_source(spec.model, "model.path", "config.json", spec.trust_remote_code, spec.revision or None)
    tokenizer = Path(spec.tokenizer or spec.model).expanduser()
    if (tokenizer / "tokenizer_config.json").is_file():
        check_source(str(tokenizer), "the tokenizer", "tokenizer_config.json", spec.trust_remote_code, None)


def has_tokenizer(spec: ServerSpec) -> bool:
    folder = Path(spec.tokenizer or spec.model).expanduser()
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    return not folder.is_dir() or any((folder / name).is_file() for name in names)


def named_dtype(name: Any) -> torch.dtype:
    found = getattr(torch, str(name), None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"rollout.engine.dtype should be a dtype such as bfloat16, found {name!r}")
    return found


def first_error(log: str) -> str:
    """The first error in a log, as a sentence before what follows: its last lines tell the consequences."""
    found = CAUSE.search(log)
    return f"{found[1]}\n" if found else ""


def said(found: Any, text: str) -> str:
    """What an error's reply says, in one line."""
    error = found.get("error") or found.get("message") if isinstance(found, dict) else None
    if isinstance(error, dict):
        error = error.get("message")
    return " ".join(str(error or (found.get("detail") if isinstance(found, dict) else "") or text).split())[:2000]


__all__ = [
    "AGAIN_S",
    "CONTROL_S",
    "SOCKET",
    "WAKE_TAGS",
    "ServedEngine",
    "environment_python",
    "first_error",
    "has_tokenizer",
    "named_dtype",
    "private_folder",
    "refuse_own_code",
    "said",
]
