"""What all engines have in common that run as an HTTP server on a private unix socket: `ServedEngine`.

start, close            a folder of its own for the socket, the process, the question whether its guard is there
generate, abort_all     checks, what is open, what is counted
pause, resume, sleep    what of it is awake and may go on
receive_weights, stop   what it serves, and that a failed update is never served
_request                one request with the run's token, and what its failure means: lost, late, refused

An engine's own file has the words in which its server is told these things, and nothing else.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import torch
from transformers import AutoConfig

from hone.config import ConfigError, count_as_read
from hone.data.routes import Routes, mixture_rows
from hone.models.source import check_source
from hone.rollout.adapters import AdapterKind, check_adapter
from hone.rollout.base import PauseMode, ReplicaLost, Scored, ServerSpec, WeightReceipt
from hone.rollout.engine_options import EngineDefaults
from hone.rollout.host import SOCKET
from hone.rollout.interpreter import check_packages, environment_python
from hone.rollout.requests import check_prompt, check_sampling
from hone.rollout.server import SILENT_S, Process, ServerFailed
from hone.rollout.shown import Shown, place_images
from hone.types import Completion, Image, Metric, Metrics, SamplingParams, StopReason

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
    """A `ServerAdapter`; constructing it checks model, options and interpreter, `start` starts the server."""

    package: str  # of the engine, in its Python
    health: str  # a path that answers 200 when the server is ready
    defaults: EngineDefaults
    how_to_install: str
    takes_images = False  # a prompt may show some

    def __init__(self, spec: ServerSpec) -> None:
        count_as_read(spec.settings.builtin)
        self.name = spec.name
        self._spec = spec
        refuse_own_code(spec)
        config = AutoConfig.from_pretrained(spec.model, trust_remote_code=spec.trust_remote_code)
        self._config = config.get_text_config()
        self._options = self.defaults.engine_options(spec, self._adapter_options(spec, self._config))
        self._dtype = named_dtype(self._options["dtype"])
        self._python = environment_python(spec.settings.backend, spec.settings.python, self.how_to_install)
        self._whole_config = config  # that of the vision tower too, if there is one
        self._vocabulary = int(self._config.vocab_size)
        self._ranks = spec.settings.tensor_parallel
        self._start_timeout_s = spec.settings.start_timeout_s
        self._request_timeout_s = spec.settings.request_timeout_s
        self._has_tokenizer = not self._options.get("skip_tokenizer_init", False)
        self._longest = 0  # known when the server runs
        self._folder: Path | None = None
        self._server: Process | None = None
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # whose the session is
        self._open: set[str] = set()
        self._counted = _Counted()
        self._busy_since = 0.0
        self._reset()

    @classmethod
    def _adapter_options(cls, spec: ServerSpec, config: Any) -> dict[str, Any]:
        """Options of the engine for the adapters that it will serve on a model of this configuration.

        Raises ConfigError if it can serve none.
        """
        if spec.adapters:
            raise ConfigError(f"rollout.backend={spec.settings.backend} serves no adapters beside the policy")
        return {}

    @classmethod
    def _adapter_kinds(cls, spec: ServerSpec, model: str) -> list[AdapterKind]:
        """Of the adapters beside the policy, and of the policy's own. Raises ConfigError for one it cannot take."""
        kinds = {name: AdapterKind.of(files.config, model) for name, files in spec.adapters.items()}
        for name, kind in kinds.items():
            if reason := cls.unfit_for_adapter(kind):
                raise ConfigError(f"adapter {name} ({spec.adapters[name].folder}): {reason}")
        return [*kinds.values(), *([spec.adapter] if spec.adapter else [])]

    def _reset(self) -> None:
        """What is true of a server that has just started."""
        self._version, self._not_serving = (0, "") if self._spec.frozen else (-1, "it has no weights yet")
        self._has_base = False  # whole weights, of whatever version, that came by a sync
        self._awake = set(WAKE_TAGS)
        self._paused = False
        self._updating = False

    # ----------------------------------------------------------------------------------------- what an engine adds

    @abstractmethod
    def _command(self, folder: Path) -> list[str]:
        """What starts the server, with its socket in `folder`. Nothing secret stands in it."""

    def _environment(self, folder: Path) -> dict[str, str]:
        """Variables of its process, the token among them."""
        return self.defaults.server_environment(self._spec, folder)

    @abstractmethod
    async def _longest_sequence(self) -> int:
        """Ask the running server how many tokens prompt and completion may have."""

    @abstractmethod
    async def _generate(
        self, request_id: str, token_ids: Sequence[int], sampling: SamplingParams, shown: Shown
    ) -> tuple[Completion, int, int]:
        """Send one request that was checked, with the images of its prompt.

        Gives what came, and how many tokens its prompt had and the cache knew.
        """

    @abstractmethod
    async def _score(self, request_id: str, token_ids: Sequence[int], top_k: int) -> Scored:
        """Send one sequence that was checked, and read how likely each of its tokens is."""

    @abstractmethod
    async def _abort_open(self) -> None:
        """Tell the server to end every request it has."""

    @abstractmethod
    async def _hold(self, mode: PauseMode) -> None:
        """Tell the server to produce no tokens; it may hold already."""

    @abstractmethod
    async def _go_on(self) -> None:
        """Tell the server to produce tokens again; it may do so already."""

    @abstractmethod
    async def _receive(self, offer: dict[str, Any]) -> list[WeightReceipt]:
        """Let every rank take in what `offer` announces, and drop every KV of older weights, while nothing is computed.

        Raises RuntimeError with what each rank says if one did not take in everything.
        """

    @abstractmethod
    async def _give_back(self, level: int) -> None:
        """Tell the server to hold, and to give memory back: 1 the KV cache, 2 the weights too."""

    @abstractmethod
    async def _take_again(self, tags: list[str]) -> None:
        """Tell the server to take memory again for some of `WAKE_TAGS` that were given back."""

    # --------------------------------------------------------------------------------------------- its process

    @property
    def ranks(self) -> int:
        return self._ranks

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point dtype of weights and computation."""
        return self._dtype

    @property
    def alive(self) -> bool:
        return self._server is not None and self._server.alive

    @property
    def has_base(self) -> bool:
        """Whether it holds whole weights that came by a sync, which an adapter can be put on."""
        return self._has_base

    @staticmethod
    @abstractmethod
    def unfit_for_adapter(kind: AdapterKind) -> str:
        """Why an adapter of this kind cannot be sent to it by itself; empty: it can."""

    @property
    def weight_version(self) -> int:
        """The version that the next token will be sampled from; -1 while there is none."""
        return self._version

    async def start(self) -> None:
        """Start the server and wait until it answers; it serves nothing (version -1) before it received weights.

        Raises ServerFailed with its last lines: an option that its parser refuses, a model it cannot load ...; and
        ConfigError for a Python that lacks a package.
        """
        if not self._spec.host.machine:  # elsewhere the server's log says what is missing
            await asyncio.to_thread(check_packages, self._python, self.package, self.how_to_install)
        self._reset()
        self._server = None
        log = self._spec.logs / f"{self.name}.log"
        try:
            self._folder = folder = (await self._spec.host.open()).folder
            self._server = self._spec.host.process(self.name, self._command(folder), self._environment(folder), log)
            await self._server.start(self._answers, self._start_timeout_s)
            await self._check_guard()
            self._longest = await self._longest_sequence()
        except ServerFailed as error:
            cause = first_error(self._server.last_lines(LOG_LINES)) if self._server is not None else ""
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
        self._version = -1
        try:
            if self._server is not None:
                await self._server.stop()
        finally:
            if self._folder is not None:
                self._folder = None
                await self._spec.host.close()

    # ---------------------------------------------------------------------------------------------- generating

    async def generate(
        self, request_id: str, token_ids: tuple[int, ...], sampling: SamplingParams, images: tuple[Image, ...] = ()
    ) -> Completion:
        """Continue `token_ids`; log-probs are of the distribution that was sampled.

        Raises ValueError for a request that cannot be served; ReplicaLost if the server died; TimeoutError after
        `rollout.request_timeout_s`; RuntimeError if it sleeps, has no weights, or loses them meanwhile.
        """
        if images and not self.takes_images:
            raise ValueError(f"request {request_id!r} shows images, and {self.name} serves text only")
        check_prompt(request_id, tuple(token_ids), self._vocabulary, self._longest or math.inf)
        check_sampling(request_id, sampling, self._vocabulary, self._has_tokenizer)
        check_adapter(sampling.adapter, self._spec.adapters)
        shown, _ = place_images(request_id, tuple(token_ids), images, self._whole_config)
        if sampling.routed_experts and not self._spec.routed_layers:
            raise ValueError(
                f"request {request_id!r} asks for the experts of its tokens, and {self.name} was started without them"
            )
        if request_id in self._open:
            raise ValueError(f"request {request_id!r} is already running on {self.name}")
        self._check_serving()
        if not self._open:
            self._busy_since = time.perf_counter()
        self._open.add(request_id)
        try:
            completion, prompt_tokens, cached_tokens = await self._generate(request_id, token_ids, sampling, shown)
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

    def _with_routes(self, completion: Completion, found: Routes | None, prompt: int) -> Completion:
        """The completion with the experts of all its tokens but the last; an aborted one may have none.

        Raises RuntimeError if the server did not say them.
        """
        if found is None and completion.stop_reason is StopReason.ABORTED:
            return completion
        try:
            rows = mixture_rows(found, self._spec.routed_layers, prompt + len(completion.token_ids) - 1)
        except ValueError as error:
            raise RuntimeError(f"request {completion.request_id!r} at {self.name}: {error}") from error
        return replace(completion, routed_experts=rows)

    async def score(self, request_id: str, token_ids: tuple[int, ...], top_k: int = 0) -> Scored:
        """How likely each token is given those before it, at temperature 1; raises as `generate` does."""
        check_prompt(request_id, tuple(token_ids), self._vocabulary, self._longest or math.inf)
        self._check_serving()
        scored = await self._score(request_id, token_ids, top_k)
        found = [scored.logprobs, *([scored.top_ids, scored.top_logprobs] if top_k else [])]
        if any(len(one) != len(token_ids) for one in found):
            lengths = ", ".join(str(len(one)) for one in found)
            raise RuntimeError(f"request {request_id!r}: {self.name} scored {lengths} of {len(token_ids)} tokens")
        return scored

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

    # ------------------------------------------------------------------------------------------ abort and pause

    async def abort_all(self) -> None:
        """End every request that is open now; each `generate` returns the tokens it has."""
        await self._abort(set(self._open))

    async def _abort(self, ids: set[str]) -> None:
        """Abort until all of `ids` have ended: one that is still on its way to the server is not seen by it."""
        async with asyncio.timeout(CONTROL_S):
            while ids & self._open:
                await self._abort_open()
                await asyncio.sleep(AGAIN_S)

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop producing tokens; running requests end now (`abort`), are let end (`wait`), or stand still (`keep`)."""
        running = set(self._open)
        self._paused = True
        await self._hold(mode)
        if mode == "abort":
            await self._abort(running)

    async def resume(self) -> None:
        """Produce tokens again; a server that sleeps does so when it is awake."""
        self._paused = False
        if self._awake == set(WAKE_TAGS):  # else it would compute with a KV cache that is not there
            await self._go_on()

    # ------------------------------------------------------------------------------------------------- weights

    async def receive_weights(self, offer: Mapping[str, Any]) -> list[WeightReceipt]:
        """Let every rank take in what `offer` announces; requests that run stand still meanwhile and go on with it.

        Every KV of older weights is dropped and computed anew before the next token. Raises RuntimeError if a rank
        did not take in everything: then requests fail, and nothing is served until whole weights were received.
        """
        if "weights" not in self._awake:
            raise RuntimeError(f"rollout replica {self.name} has no room for weights: wake_up(('weights',)) first")
        version = int(offer["version"])
        self._check_payload(str(offer["payload"]["kind"]))
        self._updating = True
        try:
            self._version = -1
            receipts = await self._receive(dict(offer))
        except BaseException as error:
            with suppress(ReplicaLost):
                await self.stop(f"the update to weights version {version} did not complete: {error}")
            raise
        finally:
            self._updating = False
            if not self._paused and self.alive:
                await self.resume()
        self._version, self._not_serving, self._has_base = version, "", True
        return receipts

    def _check_payload(self, kind: str) -> None:
        """Raise RuntimeError for what cannot be taken in, before anything changes."""
        if kind == "adapter" and not self._options.get("enable_lora"):
            raise RuntimeError(
                f"{self.name} was started without room for an adapter, which it has if the run trains or names one"
            )
        if kind == "adapter" and not self._has_base:
            raise RuntimeError(f"{self.name} has no base weights yet: whole weights come before an adapter")

    async def stop(self, reason: str) -> None:
        """Serve nothing more (version -1) until whole weights were received; requests that run fail."""
        self._version, self._not_serving, self._has_base = -1, reason or "it was stopped", False
        if self.alive:
            await self.abort_all()

    # ------------------------------------------------------------------------------------------- sleep and wake

    async def sleep(self, level: int) -> None:
        """Give memory back: 1 the KV cache, 2 the weights too. Running requests wait. On a CPU the memory is kept."""
        if level not in (1, 2):
            raise ValueError(f"sleep level should be 1 or 2, found {level}")
        self._awake = set()
        if level == 2:
            self._version, self._has_base = -1, False
            self._not_serving = "its weights were given back by sleep(2)"
        await self._give_back(level)

    async def wake_up(self, tags: tuple[str, ...] = WAKE_TAGS) -> None:
        """Take memory again for the parts named. After level 2, weights must be sent before anything is generated."""
        if unknown := set(tags) - set(WAKE_TAGS):
            raise ValueError(f"wake_up knows the tags {', '.join(WAKE_TAGS)}; found {', '.join(sorted(unknown))}")
        wanted = [tag for tag in WAKE_TAGS if tag in tags and tag not in self._awake]
        if not wanted:
            return
        await self._take_again(wanted)
        self._awake |= set(wanted)
        if self._awake == set(WAKE_TAGS):
            await (self._hold("keep") if self._paused else self._go_on())

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
            message = f"replica {self.name} did not answer {path} within {timeout_s:g} s"
            if self._spec.host.machine and server is not None and await server.ends_within(SILENT_S):
                raise ReplicaLost(f"{message}{self._last_words()}") from error
            raise TimeoutError(message) from error
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

    async def _dies(self, server: Process) -> bool:
        """Whether the server ends within a moment: its engine has died, and that was the last thing it said."""
        timeout = aiohttp.ClientTimeout(total=DYING_S)
        with suppress(aiohttp.ClientError, OSError, ReplicaLost):
            async with self._open_session().get(f"http://server{self.health}", timeout=timeout) as reply:
                if reply.status == 200 and self._server is server:
                    return False
        return await server.ends_within(DYING_S)

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
            connector = self._spec.host.connector(limit=0, force_close=True)
            headers = {"Authorization": f"Bearer {self._spec.token}"}
            self._session = aiohttp.ClientSession(headers=headers, connector=connector)
        return self._session


# ---------------------------------------------------------------------------------------------- before it is started


def refuse_own_code(spec: ServerSpec) -> None:
    """Raises ModelError for a model or tokenizer that brings code of its own, unless that was allowed."""
    check_source(spec.model, "model.path", "config.json", spec.trust_remote_code, None)
    tokenizer = Path(spec.tokenizer or spec.model).expanduser()
    if (tokenizer / "tokenizer_config.json").is_file():
        check_source(str(tokenizer), "the tokenizer", "tokenizer_config.json", spec.trust_remote_code, None)


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
]
