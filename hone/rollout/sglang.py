"""SGLang as a server in a process and Python environment of its own, seen from the trainer's process.

    SglangServer --HTTP over a unix socket, the run's token--> guard --> SGLang's API process --> its schedulers
         `-- ServerProcess: starts it, watches it, ends it             (hone/workers/sglang.py runs inside these)

    generate          POST /generate: tokens in; tokens, log-probs and spans of weight versions out
    receive_weights   pause retract (KV dropped), POST /update_weights_from_ipc (the offer; the cache is flushed),
                      receipts, resume

Nothing of SGLang is imported here. Tested with SGLang 0.5.23, on CPUs.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from hone.platforms.base import current_platform
from hone.rollout.base import PauseMode, ReplicaLost, ServerSpec, WeightReceipt
from hone.rollout.engine_options import check_reserved, command_arguments
from hone.rollout.served import (
    AGAIN_S,
    CONTROL_S,
    SOCKET,
    WAKE_TAGS,
    ServedEngine,
    environment_python,
    has_tokenizer,
    named_dtype,
    refuse_own_code,
)
from hone.types import Completion, SamplingParams, StopReason

HOW_TO_INSTALL = (
    "`make test-sglang` makes one for CPUs; for NVIDIA GPUs: python3 -m venv .venv-sglang && "
    ".venv-sglang/bin/pip install sglang==0.5.23; or name the interpreter of another one in rollout.python"
)
RESERVED = {
    **dict.fromkeys(("model", "model_path", "revision", "tokenizer_path"), "the model is model.path"),
    **dict.fromkeys(("host", "port", "api_key", "admin_api_key", "grpc_port"), "the server listens only for hone"),
    **dict.fromkeys(("enable_http2", "tokenizer_worker_num", "use_ray"), "hone guards one server process"),
    **dict.fromkeys(("weight_version", "skip_server_warmup", "sampling_mask_max_tokens"), "hone sets it"),
    "enable_custom_logit_processor": "it would unpickle what requests bring",
    "trust_remote_code": "it is model.trust_remote_code",
    **dict.fromkeys(("tp_size", "tensor_parallel_size", "tp"), "it is rollout.tensor_parallel"),
    **dict.fromkeys(("dp_size", "data_parallel_size", "dp"), "it is rollout.replicas"),
    **dict.fromkeys(("pp_size", "pipeline_parallel_size"), "use rollout.tensor_parallel"),
    **dict.fromkeys(("random_seed", "sampling_backend"), "every request has its own seed"),
    "config": "options stand in rollout.engine",
}
DEFAULTS: Mapping[str, Any] = {
    "load_format": "dummy",  # the first sync brings the weights
    "enable_cache_report": True,  # how much of a prompt came from the prefix cache
    "sampling_defaults": "openai",  # nothing from the model's generation_config.json
    "watchdog_timeout": 3600,
    "log_level": "warning",
}
CPU_DEFAULTS: Mapping[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "grammar_backend": "none",
    "disable_overlap_schedule": True,
    "disable_prefill_cuda_graph": True,
    "disable_decode_cuda_graph": True,
    "max_total_tokens": 16_384,  # of KV; without it SGLang takes most of the machine's memory
}
ACCELERATOR_DEFAULTS: Mapping[str, Any] = {
    "enable_memory_saver": True,
    "mem_fraction_static": 0.5,  # the rest is for a trainer on the same device
}
ENVIRONMENT = {
    "SGLANG_FORCE_STREAM_INTERVAL": "1",  # an aborted request gives back all its tokens, queued or not
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # see MARGIN
}
CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
MARGIN = 6  # SGLang takes prompts this much shorter than its context; it is told of a longer one, and never fills it
SEEDS = 2**63  # it takes seeds below this
FINISH = {"stop": StopReason.STOP, "length": StopReason.LENGTH, "abort": StopReason.ABORTED}


class SglangServer(ServedEngine):
    """A `ServerAdapter`; constructing it checks model, options and interpreter, `start` starts the server."""

    positional_seed = True  # a token's random number is a hash of the request's seed and the token's position
    health = "/ready"

    def __init__(self, spec: ServerSpec) -> None:
        options = engine_options(spec)
        python = environment_python("sglang", spec.settings.python, HOW_TO_INSTALL)
        refuse_own_code(spec)
        revision = spec.revision or "main"
        config = AutoConfig.from_pretrained(spec.model, revision=revision, trust_remote_code=spec.trust_remote_code)
        text = config.get_text_config()
        self._context = int(options.get("context_length") or text.max_position_embeddings)
        self._dtype = named_dtype(options["dtype"])
        self._numbers = itertools.count()
        self._gates: dict[str, asyncio.Future[bool]] = {}
        super().__init__(spec, python, options, text.vocab_size)

    def _reset(self) -> None:
        super()._reset()
        self._updating = False
        self._released: set[str] = set()

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point dtype of weights and computation."""
        return self._dtype

    def _command(self, folder: Path) -> list[str]:
        context = {"context_length": self._context + MARGIN}
        options = {**server_options(self._spec, self._vocabulary), **self._options, **context}
        flags = {name: value for name, value in options.items() if value is not False}  # its switches have no `--no-`
        return [str(self._python), "-P", "-m", "hone.workers.sglang", *command_arguments(flags)]

    def _environment(self, folder: Path) -> dict[str, str]:
        return server_environment(self._spec, folder)

    async def _longest_sequence(self) -> int:
        info = await self._request("GET", "/server_info")
        return min(self._context, int(info["max_total_num_tokens"]) - MARGIN)

    # ---------------------------------------------------------------------------------------------- generating

    async def _generate(
        self, request_id: str, token_ids: Sequence[int], sampling: SamplingParams
    ) -> tuple[Completion, int, int]:
        if not await self._may_begin(request_id):
            return Completion(request_id, (), (), (), StopReason.ABORTED), 0, 0
        rid = f"{next(self._numbers)}:{request_id}"  # no other begins like it: SGLang aborts by the beginning of an id
        body = _generate_body(rid, token_ids, sampling, self._longest)
        try:
            reply = await self._request("POST", "/generate", body, self._request_timeout_s)
        except (asyncio.CancelledError, TimeoutError):
            with suppress(ReplicaLost, TimeoutError, RuntimeError):  # its place is free at once, not in some seconds
                await asyncio.shield(self._request("POST", "/abort_request", {"rid": rid}))
            raise
        meta = reply["meta_info"]
        return (
            _completion(request_id, reply, bool(body.get("return_sampling_mask"))),
            len(token_ids),
            int(meta.get("cached_tokens") or 0),
        )

    async def _abort_open(self) -> None:
        """A scheduler that stands still aborts only what waits in its queue, so what runs is sent there first."""
        self._open_gates(begin=False)
        if self._paused or self._updating or self._awake != set(WAKE_TAGS):
            await self._request("POST", "/pause_generation", {"mode": "retract"})
        await self._request("POST", "/abort_request", {"abort_all": True})

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop producing tokens; running requests end now (`abort`), are let end (`wait`), or stand still (`keep`)."""
        running = set(self._open)
        self._paused = True
        if mode == "wait":
            await self._let_end(running - set(self._gates))
        await self._request("POST", "/pause_generation", {"mode": "in_place"})
        if mode == "abort":
            await self._abort(running)

    async def resume(self) -> None:
        """Produce tokens again; a server that sleeps does so when it is awake."""
        self._paused = False
        self._open_gates(begin=True)
        if self._awake == set(WAKE_TAGS):  # else it would compute with a KV cache that is not there
            await self._request("POST", "/continue_generation", {})

    # ------------------------------------------------------------------------------------------------- weights

    async def receive_weights(self, offer: Mapping[str, Any]) -> list[WeightReceipt]:
        """Let every rank take in what `offer` announces; requests that run stand still meanwhile and go on with it.

        Every KV of older weights is dropped and computed anew before the next token. Raises RuntimeError if a rank
        did not take in everything: then requests fail, and nothing is served until whole weights were received.
        """
        if "weights" not in self._awake:
            raise RuntimeError(f"rollout replica {self.name} has no room for weights: wake_up(('weights',)) first")
        if offer["payload"]["kind"] == "adapter":
            raise RuntimeError(f"{self.name}: SGLang takes whole weights here; train without LoRA, or merge it")
        version = int(offer["version"])
        self._updating = True
        try:
            self._version = -1
            await self._request("POST", "/pause_generation", {"mode": "retract"})
            receipts = await self._receive(offer, version)
        except BaseException as error:
            with suppress(ReplicaLost):
                await self.stop(f"the update to weights version {version} did not complete: {error}")
            raise
        finally:
            self._updating = False
            if not self._paused and self.alive:
                await self.resume()
        self._version, self._not_serving = version, ""
        return receipts

    async def _receive(self, offer: Mapping[str, Any], version: int) -> list[WeightReceipt]:
        body = {"zmq_handles": {"offer": json.dumps(dict(offer))}, "flush_cache": True, "weight_version": str(version)}
        path = "/update_weights_from_ipc"
        try:
            reply = await self._request("POST", path, body, float(offer["timeout_s"]) + CONTROL_S)
        except ValueError as error:  # its status 400 means that the update failed
            raise RuntimeError(str(error)) from error
        return _read_receipts(self.name, str(reply["message"]))

    # ------------------------------------------------------------------------------------------- sleep and wake

    async def sleep(self, level: int) -> None:
        """Give memory back: 1 the KV cache, 2 the weights too. Running requests wait. On a CPU the memory is kept."""
        if level not in (1, 2):
            raise ValueError(f"sleep level should be 1 or 2, found {level}")
        self._awake = set()
        if level == 2:
            self._version = -1
            self._not_serving = "its weights were given back by sleep(2)"
        await self._request("POST", "/pause_generation", {"mode": "retract"})
        tags = ["kv_cache"] if level == 1 else ["kv_cache", "weights"]
        await self._request("POST", "/release_memory_occupation", {"tags": tags})
        self._released = set(tags)

    async def wake_up(self, tags: tuple[str, ...] = WAKE_TAGS) -> None:
        """Take memory again for the parts named. After level 2, weights must be sent before anything is generated."""
        if unknown := set(tags) - set(WAKE_TAGS):
            raise ValueError(f"wake_up knows the tags {', '.join(WAKE_TAGS)}; found {', '.join(sorted(unknown))}")
        wanted = [tag for tag in WAKE_TAGS if tag in tags and tag not in self._awake]
        if not wanted:
            return
        if released := [tag for tag in wanted if tag in self._released]:
            await self._request("POST", "/resume_memory_occupation", {"tags": released})
            self._released -= set(released)
        self._awake |= set(wanted)
        if self._awake == set(WAKE_TAGS) and not self._paused:
            await self.resume()

    # ------------------------------------------------------------------------------- requests that may not begin yet

    async def _may_begin(self, request_id: str) -> bool:
        """Wait while no request may begin; False if it was aborted meanwhile.

        They wait here: one that waits in SGLang's API process, before its scheduler, cannot be aborted.
        """
        if not (self._paused or self._updating):
            return True
        gate: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._gates[request_id] = gate
        try:
            return await asyncio.wait_for(gate, self._request_timeout_s)
        except TimeoutError as error:
            waited = f"{self._request_timeout_s:g} s"
            raise TimeoutError(f"request {request_id!r}: {self.name} stayed paused for {waited}") from error
        finally:
            self._gates.pop(request_id, None)

    def _open_gates(self, begin: bool) -> None:
        for gate in self._gates.values():
            if not gate.done():
                gate.set_result(begin)

    async def _let_end(self, running: set[str]) -> None:
        async with asyncio.timeout(self._request_timeout_s):
            while running & self._open:
                await asyncio.sleep(AGAIN_S)


# ------------------------------------------------------------------------------------------- SGLang's JSON, and ours


def _generate_body(request_id: str, token_ids: Sequence[int], sampling: SamplingParams, longest: int) -> dict[str, Any]:
    greedy = sampling.temperature == 0
    filtered = not greedy and (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0)
    wanted = {
        "max_new_tokens": min(sampling.max_tokens, longest - len(token_ids)),
        "temperature": sampling.temperature,
        "top_k": sampling.top_k if sampling.top_k > 0 else -1,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "stop": list(sampling.stop) or None,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        "ignore_eos": sampling.ignore_eos,
        "sampling_seed": sampling.seed % SEEDS,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }
    body = {"rid": request_id, "input_ids": list(token_ids), "sampling_params": wanted, "return_logprob": True}
    return {**body, "return_sampling_mask": True} if filtered else body


def _completion(request_id: str, reply: Mapping[str, Any], filtered: bool) -> Completion:
    """`filtered`: log-probs are those among the tokens that top-k, top-p and min-p left."""
    meta = reply["meta_info"]
    tokens = tuple(reply["output_ids"])
    if filtered:
        logprobs = tuple(float(value) for value in meta.get("output_token_sampling_logprobs") or ())
    else:
        logprobs = tuple(float(entry[0]) for entry in meta.get("output_token_logprobs") or ())
    versions: list[int] = []
    for span in meta.get("weight_versions") or []:
        versions += [int(span["version"])] * (span["end"] - span["start"])
    if not len(tokens) == len(logprobs) == len(versions):
        raise RuntimeError(
            f"request {request_id!r}: SGLang gave {len(tokens)} tokens, {len(logprobs)} log-probs and "
            f"{len(versions)} weight versions"
        )
    return Completion(request_id, tokens, logprobs, tuple(versions), FINISH[meta["finish_reason"]["type"]])


def _read_receipts(name: str, message: str) -> list[WeightReceipt]:
    """From what SGLang says of an update: the receipts as JSON, then words of its own."""
    receipts, _ = json.JSONDecoder().raw_decode(message)
    wanted = ("version", "digest", "tensors", "bytes")
    return [WeightReceipt(name, **{key: receipt[key] for key in wanted}) for receipt in receipts]


# ---------------------------------------------------------------------------------------------- before it is started


def engine_options(spec: ServerSpec) -> dict[str, Any]:
    """SGLang's options: ours for this platform, overridden by `rollout.engine`."""
    given = {name.replace("-", "_"): value for name, value in spec.settings.engine.items()}
    check_reserved(given, RESERVED)
    platform = CPU_DEFAULTS if current_platform().device == "cpu" else ACCELERATOR_DEFAULTS
    found = {**DEFAULTS, **platform, "dtype": spec.dtype, **given}
    if "skip_tokenizer_init" not in found and not has_tokenizer(spec):
        found["skip_tokenizer_init"] = True
    return found


def server_options(spec: ServerSpec, vocabulary: int) -> dict[str, Any]:
    """Options that hone sets itself."""
    return {
        "model_path": spec.model,
        "tp_size": spec.settings.tensor_parallel,
        "sampling_backend": "pytorch",  # the one that knows seeds
        "sampling_mask_max_tokens": vocabulary,  # whatever the filters leave, its log-probs are known
        "skip_server_warmup": True,
        "weight_version": "-1",
        "revision": spec.revision or None,
        "tokenizer_path": spec.tokenizer or None,
        "trust_remote_code": spec.trust_remote_code or None,
    }


def server_environment(spec: ServerSpec, folder: Path) -> dict[str, str]:
    """Environment variables of the server; what the user has set of SGLang's stays."""
    ours = {**ENVIRONMENT, **(CPU_ENVIRONMENT if current_platform().device == "cpu" else {})}
    given = {name: os.environ[name] for name in ours if name in os.environ and name != "OMP_NUM_THREADS"}
    path = [str(folder / "path"), spec.environment.get("PYTHONPATH", "")]
    return {
        **ours,
        **given,
        **spec.environment,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "TMPDIR": str(folder),  # where SGLang puts the sockets between its processes
        "HONE_SOCKET": str(folder / SOCKET),
        "HONE_TOKEN": spec.token,
    }


__all__ = ["SglangServer"]
