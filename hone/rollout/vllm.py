"""vLLM as a server in a process and Python environment of its own, seen from the trainer's process.

    VllmServer --HTTP over a unix socket, the run's token--> guard --> vLLM's API server --> its engine and workers
         `-- ServerProcess: starts it, watches it, ends it               (hone/workers/vllm.py runs inside these)

    generate          POST /inference/v1/generate: tokens in; tokens, log-probs and spans of weight versions out
    receive_weights   pause keep, start, update (the offer), finish, receipts, drop every KV, resume

Nothing of vLLM is imported here. Tested with vLLM 0.32.0.
"""

from __future__ import annotations

import asyncio
import math
import re
import shutil
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import torch

from hone.config import count_as_read
from hone.rollout.base import PauseMode, ReplicaLost, ServerSpec, WeightReceipt
from hone.rollout.engine_options import command_arguments
from hone.rollout.keeper import FOLDER
from hone.rollout.requests import check_prompt, check_sampling
from hone.rollout.server import ServerFailed, ServerProcess
from hone.rollout.vllm_start import (
    SOCKET,
    engine_options,
    interpreter,
    private_folder,
    refuse_own_code,
    served_dtype,
    server_environment,
    server_options,
    vocabulary,
)
from hone.types import Completion, Metric, Metrics, SamplingParams, StopReason

WAKE_TAGS = ("weights", "kv_cache")
CONTROL_S = 60.0  # deadline of a control request that has nothing to wait for
DYING_S = 5.0  # after a failure of the engine, vLLM's API server ends within this time
AGAIN_S = 0.02  # between two looks whether aborted requests have ended
LOG_LINES = 500  # of vLLM's log, searched for what began its end
CAUSE = re.compile(r"(?:^|\] |\) )((?:[\w.]*(?:Error|Exception)|[\w.]+: error): .+)$", re.MULTILINE)
SEEDS = 2**63  # vLLM takes seeds below this
FINISH = {"stop": StopReason.STOP, "length": StopReason.LENGTH, "abort": StopReason.ABORTED}


@dataclass
class _Counted:
    """What happened since the last look."""

    tokens: int = 0
    requests: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    busy_s: float = 0.0  # with at least one request open


class VllmServer:
    """A `ServerAdapter`; constructing it checks model, options and interpreter, `start` starts the server."""

    positional_seed = False  # a request's random stream begins anew with each request

    def __init__(self, spec: ServerSpec) -> None:
        settings = spec.settings
        count_as_read(settings.builtin)
        self.name = spec.name
        self._spec = spec
        self._options = engine_options(spec)
        self._dtype = served_dtype(self._options["dtype"])
        self._python = interpreter(settings.python)
        self._ranks = settings.tensor_parallel
        self._start_timeout_s = settings.start_timeout_s
        self._request_timeout_s = settings.request_timeout_s
        refuse_own_code(spec)
        self._vocabulary = vocabulary(spec)
        self._has_tokenizer = not self._options.get("skip_tokenizer_init", False)
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
        self._has_base = self._options.get("load_format") != "dummy"
        self._awake = set(WAKE_TAGS)
        self._paused = False
        self._adapter: str | None = None  # what requests name as their model
        self._adapters: dict[str, tuple[int, str]] = {}  # loaded ones: vLLM's number, folder with the files

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
    def weight_version(self) -> int:
        """The version that the next token will be sampled from; -1 while there is none."""
        return self._version

    async def start(self) -> None:
        """Start the server and wait until it answers; it serves nothing (version -1) before it received weights.

        Raises ServerFailed with vLLM's last lines: an option that its parser refuses, a model it cannot load ...
        """
        self._reset()
        self._folder = private_folder()
        command = [str(self._python), "-m", "vllm.entrypoints.openai.api_server", *self._arguments(self._folder)]
        log = self._spec.logs / f"{self.name}.log"
        environment = {**server_environment(self._spec, self._folder), FOLDER: str(self._folder)}
        self._server = ServerProcess(self.name, command, environment, log)
        try:
            await self._server.start(self._answers, self._start_timeout_s)
            await self._check_guard()
            models = await self._request("GET", "/v1/models")
        except ServerFailed as error:
            cause = _cause(self._server.last_lines(LOG_LINES))
            await self.close()
            raise ServerFailed(f"{cause}{error}") from error
        except BaseException:
            await self.close()
            raise
        self._longest = int(models["data"][0]["max_model_len"])

    def _arguments(self, folder: Path) -> list[str]:
        return command_arguments({**server_options(self._spec, folder), **self._options})

    async def _answers(self) -> bool:
        try:
            await self._request("GET", "/health", timeout_s=5.0)
        except (ReplicaLost, RuntimeError) as error:
            raise ConnectionError(str(error)) from error
        return True

    async def _check_guard(self) -> None:
        """A server that answers without the token is not used."""
        async with self._open_session().get("http://vllm/health", headers={"Authorization": ""}) as reply:
            if reply.status not in (401, 403):
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
        """Continue `token_ids`. Min-p is applied before top-k and top-p, as vLLM does; log-probs are of the result.

        Raises ValueError for a request that cannot be served; ReplicaLost if the server died; TimeoutError after
        `rollout.request_timeout_s`; RuntimeError if it sleeps, has no weights, or loses them meanwhile.
        """
        check_prompt(request_id, tuple(token_ids), self._vocabulary, self._longest or math.inf)
        check_sampling(request_id, sampling, self._vocabulary, self._has_tokenizer)
        if request_id in self._open:
            raise ValueError(f"request {request_id!r} is already running on {self.name}")
        self._check_serving()
        self._begin(request_id)
        try:
            reply = await self._request(
                "POST",
                "/inference/v1/generate",
                _generate_body(request_id, token_ids, sampling, self._longest, self._adapter),
                timeout_s=self._request_timeout_s,
            )
        finally:
            self._end(request_id)
        completion = _completion(request_id, reply)
        self._count(completion, reply)
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

    def _begin(self, request_id: str) -> None:
        if not self._open:
            self._busy_since = time.perf_counter()
        self._open.add(request_id)

    def _end(self, request_id: str) -> None:
        self._open.discard(request_id)
        if not self._open:
            self._counted.busy_s += time.perf_counter() - self._busy_since

    def _count(self, completion: Completion, reply: Mapping[str, Any]) -> None:
        usage = reply.get("usage") or {}
        self._counted.requests += 1
        self._counted.tokens += len(completion.token_ids)
        self._counted.aborted += completion.stop_reason is StopReason.ABORTED
        self._counted.prompt_tokens += usage.get("prompt_tokens", 0)
        self._counted.cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

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
                await self._request("POST", "/abort_requests", {})
                await asyncio.sleep(AGAIN_S)

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop producing tokens; running requests end now (`abort`), are let end (`wait`), or stand still (`keep`)."""
        running = set(self._open)
        self._paused = True
        waits = self._request_timeout_s if mode == "wait" else CONTROL_S
        await self._request("POST", f"/pause?mode={mode}&clear_cache=false", timeout_s=waits)
        if mode == "abort":
            await self._abort(running)

    async def resume(self) -> None:
        """Produce tokens again; a server that sleeps does so when it is awake."""
        self._paused = False
        if self._awake == set(WAKE_TAGS):  # else it would compute with a KV cache that is not there
            await self._request("POST", "/resume")

    # ------------------------------------------------------------------------------------------------- weights

    async def receive_weights(self, offer: Mapping[str, Any]) -> list[WeightReceipt]:
        """Let every worker take in what `offer` announces; requests that run stand still meanwhile and go on with it.

        Every KV of older weights is dropped and computed anew before the next token. Raises RuntimeError if a worker
        did not take in everything: then requests fail, and nothing is served until whole weights were received.
        """
        if "weights" not in self._awake:
            raise RuntimeError(f"rollout replica {self.name} has no room for weights: wake_up(('weights',)) first")
        version = int(offer["version"])
        adapter = offer["payload"]["kind"] == "adapter"
        timeout_s = float(offer["timeout_s"]) + CONTROL_S
        was_paused = self._paused
        if not was_paused:
            await self.pause("keep")
        try:
            self._version = -1
            receipts = await (self._receive_adapter if adapter else self._receive_full)(dict(offer), timeout_s)
            await self._drop_caches()
        except BaseException as error:
            with suppress(ReplicaLost):
                await self.stop(f"the update to weights version {version} did not complete: {error}")
            raise
        finally:
            if not was_paused and self.alive:
                await self.resume()
        self._version, self._not_serving = version, ""
        return receipts

    async def _receive_full(self, offer: dict[str, Any], timeout_s: float) -> list[WeightReceipt]:
        await self._call_workers("hone_abandon")
        await self._request("POST", "/start_weight_update", {})
        await self._request("POST", "/update_weights", {"update_info": {"offer": offer}}, timeout_s)
        receipts = _read_receipts(self.name, await self._call_workers("hone_receipt"))
        await self._request("POST", "/finish_weight_update", {"weight_version": str(offer["version"])})
        self._adapter, self._has_base = None, True
        return receipts

    async def _receive_adapter(self, offer: dict[str, Any], timeout_s: float) -> list[WeightReceipt]:
        if not self._options.get("enable_lora"):
            raise RuntimeError(
                f"{self.name} was started without room for an adapter: set rollout.engine.enable_lora=true"
            )
        if not self._has_base:
            raise RuntimeError(f"{self.name} has no base weights yet: whole weights come before an adapter")
        assert self._folder is not None
        name = str(offer["payload"]["name"])
        number, folder = self._adapters.get(name, (0, str(self._folder / f"adapter-{offer['version']}")))
        replies = await self._call_workers("hone_receive_adapter", offer, folder, timeout_s=timeout_s)
        receipts = _read_receipts(self.name, replies)
        _read_errors(self.name, await self._call_workers("hone_try_adapter", folder))
        if number:
            _read_errors(self.name, await self._call_workers("hone_reload_adapter", number, folder))
        else:
            await self._request("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder}, timeout_s)
        checks = await self._call_workers("hone_check_adapter", number)
        if not number and any("error" in check for check in checks):
            await self._request("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        _read_errors(self.name, checks)
        self._adapters[name] = checks[0]["number"], folder
        await self._request("POST", "/update_weight_version", {"new_version": str(offer["version"])})
        self._adapter = name
        return receipts

    async def _drop_caches(self) -> None:
        reply = await self._request("POST", "/reset_prefix_cache?reset_running_requests=true&reset_external=true")
        if not reply.get("success"):
            raise RuntimeError(f"{self.name} kept KV of older weights: its prefix cache was not reset")

    async def _call_workers(self, method: str, *arguments: Any, timeout_s: float = CONTROL_S) -> list[dict[str, Any]]:
        """One reply per worker, in the order of ranks."""
        body = {"method": method, "args": list(arguments), "timeout": timeout_s}
        found: list[dict[str, Any]] = (await self._request("POST", "/collective_rpc", body, timeout_s + 5.0))["results"]
        return found

    async def stop(self, reason: str) -> None:
        """Serve nothing more (version -1) until whole weights were received; requests that run fail."""
        self._version, self._not_serving, self._has_base = -1, reason or "it was stopped", False
        if self.alive:
            await self.abort_all()

    # ------------------------------------------------------------------------------------------- sleep and wake

    async def sleep(self, level: int) -> None:
        """Give memory back: 1 the KV cache (weights wait in host memory), 2 the weights too. Running requests wait.

        On a CPU vLLM keeps the memory; everything else is the same.
        """
        if level not in (1, 2):
            raise ValueError(f"sleep level should be 1 or 2, found {level}")
        self._awake = set()
        if level == 2:
            self._version, self._has_base = -1, False
            self._not_serving = "its weights were given back by sleep(2)"
        await self._request("POST", "/pause?mode=keep&clear_cache=false")
        await self._drop_caches()
        await self._request("POST", f"/sleep?level={level}&mode=keep")

    async def wake_up(self, tags: tuple[str, ...] = WAKE_TAGS) -> None:
        """Take memory again for the parts named. After level 2, weights must be sent before anything is generated."""
        if unknown := set(tags) - set(WAKE_TAGS):
            raise ValueError(f"wake_up knows the tags {', '.join(WAKE_TAGS)}; found {', '.join(sorted(unknown))}")
        wanted = [tag for tag in WAKE_TAGS if tag in tags and tag not in self._awake]
        if not wanted:
            return
        await self._request("POST", "/wake_up?" + "&".join(f"tags={tag}" for tag in wanted))
        self._awake |= set(wanted)
        if self._awake == set(WAKE_TAGS) and self._paused:  # vLLM goes on as soon as it is awake
            await self._request("POST", "/pause?mode=keep&clear_cache=false")

    # ------------------------------------------------------------------------------------------------ requests

    async def _request(self, method: str, path: str, body: Any = None, timeout_s: float = CONTROL_S) -> dict[str, Any]:
        """One request and its reply. Raises ReplicaLost, TimeoutError, ValueError (400), RuntimeError (others)."""
        server = self._server  # whose reply it is: by the time it comes, another may have taken its place
        try:
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            async with self._open_session().request(method, f"http://vllm{path}", json=body, timeout=timeout) as reply:
                status, text = reply.status, await reply.text()
                found = await reply.json() if "json" in reply.headers.get("content-type", "") else {}
        except TimeoutError as error:
            raise TimeoutError(f"replica {self.name} did not answer {path} within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            why = f"{path}: {error!r}{self._last_words()}"
            raise ReplicaLost(f"replica {self.name} was lost during {why}") from error
        if status == 200:
            return found if isinstance(found, dict) else {}
        message = f"replica {self.name} refused {path} (status {status}): {_message(found, text)}"
        if status == 400:
            raise ValueError(message)
        if status >= 500 and (server is None or await self._dies(server)):
            raise ReplicaLost(f"{message}{self._last_words()}")
        raise RuntimeError(message)

    async def _dies(self, server: ServerProcess) -> bool:
        """Whether the server ends within a moment: its engine has died, and that was the last thing it said."""
        timeout = aiohttp.ClientTimeout(total=DYING_S)
        with suppress(aiohttp.ClientError, OSError, ReplicaLost):
            async with self._open_session().get("http://vllm/health", timeout=timeout) as reply:
                if reply.status == 200 and self._server is server:
                    return False
        with suppress(TimeoutError):
            await asyncio.wait_for(server.wait_dead(), DYING_S)
        return not server.alive

    def _last_words(self) -> str:
        """How a server ended, and the first error in the end of its log."""
        if self._server is None or self._server.alive:
            return ""
        cause = _cause(self._server.last_lines(LOG_LINES))
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


# --------------------------------------------------------------------------------------------- vLLM's JSON, and ours


def _generate_body(
    request_id: str, token_ids: Iterable[int], sampling: SamplingParams, longest: int, adapter: str | None
) -> dict[str, Any]:
    prompt = list(token_ids)
    wanted = {
        "max_tokens": min(sampling.max_tokens, longest - len(prompt)),
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "seed": sampling.seed % SEEDS,
        "logprobs": 0,  # of the sampled token alone
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "include_stop_str_in_output": True,
        "detokenize": bool(sampling.stop),
    }
    return {"request_id": request_id, "token_ids": prompt, "sampling_params": wanted, "model": adapter}


def _completion(request_id: str, reply: Mapping[str, Any]) -> Completion:
    (choice,) = reply["choices"]
    tokens = tuple(choice["token_ids"])
    content = (choice.get("logprobs") or {}).get("content") or []
    logprobs = tuple(float(entry["logprob"]) for entry in content)
    versions: list[int] = []
    for span in choice.get("weight_versions") or []:
        versions += [int(span["version"])] * (span["end"] - span["start"])
    if not len(tokens) == len(logprobs) == len(versions):
        raise RuntimeError(
            f"request {request_id!r}: vLLM gave {len(tokens)} tokens, {len(logprobs)} log-probs and "
            f"{len(versions)} weight versions"
        )
    return Completion(request_id, tokens, logprobs, tuple(versions), FINISH[choice["finish_reason"]])


def _cause(log: str) -> str:
    """The first error in vLLM's log, as a sentence before what follows: its last lines tell the consequences."""
    found = CAUSE.search(log)
    return f"{found[1]}\n" if found else ""


def _read_errors(name: str, replies: list[dict[str, Any]]) -> None:
    errors = [f"worker {rank}: {reply['error']}" for rank, reply in enumerate(replies) if "error" in reply]
    if errors:
        raise RuntimeError(f"replica {name}: {'; '.join(errors)}")


def _read_receipts(name: str, replies: list[dict[str, Any]]) -> list[WeightReceipt]:
    _read_errors(name, replies)
    wanted = ("version", "digest", "tensors", "bytes")
    return [WeightReceipt(name, **{key: reply[key] for key in wanted}) for reply in replies]


def _message(found: Any, text: str) -> str:
    error = found.get("error") if isinstance(found, dict) else None
    if isinstance(error, dict):
        error = error.get("message")
    return " ".join(str(error or (found.get("detail") if isinstance(found, dict) else "") or text).split())[:2000]


__all__ = ["VllmServer"]
