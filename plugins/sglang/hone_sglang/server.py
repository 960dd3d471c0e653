"""Adapter for an SGLang server, which runs in its own process and Python environment.

    SglangServer --HTTP over a unix socket, the run's token--> guard --> SGLang's API process --> its schedulers
         `-- Process: starts it, watches it, ends it             (hone_sglang/inside/process.py runs inside these)

    generate          POST /generate: tokens in; tokens, log-probs and spans of weight versions out
    score             the same path, with nothing to generate: log-probs of the prompt
    receive_weights   pause retract (KV dropped), POST /update_weights_from_ipc (the offer; the cache is flushed),
                      receipts, resume

Does not import SGLang. Tested with SGLang 0.5.23, on CPUs.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from hone.config import ConfigError
from hone.data.routes import Routes
from hone.models.attention.support import carries_state
from hone.platforms.base import current_platform
from hone.rollout.adapters import BROUGHT, AdapterKind
from hone.rollout.base import ReplicaLost, ServerSpec, WeightReceipt
from hone.rollout.images import PlacedImages
from hone.rollout.servers.adapter import AGAIN_S, with_routes
from hone.rollout.servers.connection import CONTROL_S
from hone.rollout.servers.engine import EngineDefaults, EngineServer, command_arguments
from hone.rollout.servers.host import SOCKET, Site
from hone.rollout.servers.shape import ServerMachines, size_option
from hone.rollout.settings import RolloutConfig
from hone.types import Completion, GenerationRequest, PauseMode, SamplingParams, Scored, StopReason

HOW_TO_INSTALL = (
    "`make .venv-sglang` makes one for CPUs; for NVIDIA GPUs: python3 -m venv .venv-sglang && "
    ".venv-sglang/bin/pip install sglang==0.5.23 xxhash; or name the interpreter of another one in rollout.python"
)
RESERVED = {
    **dict.fromkeys(("model", "model_path", "revision", "tokenizer_path"), "the model is model.path"),
    **dict.fromkeys(("host", "port", "api_key", "admin_api_key", "grpc_port"), "the server listens only for hone"),
    **dict.fromkeys(("enable_http2", "tokenizer_worker_num", "use_ray"), "hone guards one server process"),
    **dict.fromkeys(("weight_version", "skip_server_warmup", "sampling_mask_max_tokens"), "hone sets it"),
    "enable_custom_logit_processor": "it would unpickle what requests bring",
    "trust_remote_code": "it is model.trust_remote_code",
    **dict.fromkeys(("tp_size", "tensor_parallel_size", "tp"), "it is rollout.tensor_parallel"),
    **dict.fromkeys(
        ("dp_size", "data_parallel_size", "dp", "enable_dp_attention"),
        "servers are rollout.replicas; for data parallel attention set attn_dp_size",
    ),
    **dict.fromkeys(
        ("pp_size", "pipeline_parallel_size"),
        "SGLang's stages take weights one after the other, and hone sends them to all ranks at once; use "
        "rollout.tensor_parallel",
    ),
    **dict.fromkeys(
        ("nnodes", "node_rank", "dist_init_addr"), "hone starts the ranks, on the machines of runtime.backend"
    ),
    **dict.fromkeys(("random_seed", "sampling_backend"), "every request has its own seed"),
    **dict.fromkeys(
        ("quantization", "quantize_and_serve", "torchao_config"),
        "SGLang would take the weights of a sync into quantised layers without quantising them; rollout.backend=vllm "
        "quantises at each sync",
    ),
    "enable_return_routed_experts": "it is actor.moe.routing_replay: rollout",
    **dict.fromkeys(("lora_paths", "enable_lora_overlap_loading", "max_loaded_loras"), "hone loads adapters itself"),
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
    "grammar_backend": "xgrammar",  # the one that masks logits on a CPU and reads every tokenizer
    "disable_overlap_schedule": True,
    "disable_prefill_cuda_graph": True,
    "disable_decode_cuda_graph": True,
    "max_total_tokens": 16_384,  # in the KV cache; by default SGLang takes most of the machine's memory
}
ACCELERATOR_DEFAULTS: Mapping[str, Any] = {
    "enable_memory_saver": True,
    "mem_fraction_static": 0.5,  # the rest is for a trainer on the same device
}
ENVIRONMENT = {
    # end at once when one process has died; the others' dumps take 5 to 65 s
    "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
    "SGLANG_FORCE_STREAM_INTERVAL": "1",  # so an aborted request returns all its tokens
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # see MARGIN
}
ADAPTED = ("llama", "mistral", "qwen2", "qwen3")  # model types whose adapters are tested to equal PEFT's
ADAPTABLE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # their layers
CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
EXPERT_OPTIONS = ("ep_size", "expert_parallel_size", "ep")
MARGIN = 6  # SGLang rejects prompts within this distance of its context, so hone sets a longer one
ABORTED = "Aborted by AbortReq."  # SGLang's refusal of a request that is aborted while its schema is compiled
SEEDS = 2**63  # SGLang takes seeds below this
FINISH = {"stop": StopReason.STOP, "length": StopReason.LENGTH, "abort": StopReason.ABORTED}


class SglangServer(EngineServer):
    """SGLang. With top-k, top-p or min-p, log-probs are normalised over the tokens that the filters keep."""

    returns_experts = True
    no_schema = ""  # log-probs are of the tokens that the schema leaves
    positional_seed = True  # random numbers are a hash of seed and position
    health = "/ready"
    package = "sglang"
    how_to_install = HOW_TO_INSTALL
    memory_option = "mem_fraction_static"
    defaults = EngineDefaults(
        RESERVED, DEFAULTS, CPU_DEFAULTS, ACCELERATOR_DEFAULTS, ENVIRONMENT, cpu_environment=CPU_ENVIRONMENT
    )

    def __init__(self, spec: ServerSpec) -> None:
        super().__init__(spec)
        if self._options.get("speculative_algorithm") and current_platform().device == "cpu":
            raise ConfigError(
                f"rollout.engine.speculative_algorithm={self._options['speculative_algorithm']}: on a CPU SGLang takes "
                "the likeliest token wherever something was proposed, whatever the temperature, so what it gives is no "
                "sample of the policy; leave it out"
            )
        if self._options.get("grammar_backend") == "none":
            self._limits = replace(self._limits, no_schema="was started with rollout.engine.grammar_backend=none")
        elif not self._limits.has_tokenizer:
            self._limits = replace(self._limits, no_schema="was started without a tokenizer, which it needs for that")
        experts = next((name for name in EXPERT_OPTIONS if (self._options.get(name) or 1) != 1), "")
        if experts and current_platform().device == "cpu":
            raise ConfigError(
                f"rollout.engine.{experts}: on a CPU SGLang computes a mixture in plain torch, which fails for experts "
                "that a rank does not have; leave it out"
            )
        if current_platform().device == "cpu":
            _check_layers(self._config, spec.model)
        self._context = int(self._options.get("context_length") or self._config.max_position_embeddings)
        self._numbers = itertools.count()
        self._gates: dict[str, asyncio.Future[bool]] = {}

    def _reset(self) -> None:
        super()._reset()
        self._released: set[str] = set()
        self._adapter: str | None = None  # used by requests that name no adapter

    def _launch(self, site: Site) -> tuple[list[str], dict[str, str]]:
        context = {"context_length": self._context + MARGIN}
        spread = {} if site.span is None else spread_options(site.span)
        options = {**server_options(self._spec, self._limits.vocabulary), **self._options, **context, **spread}
        flags = {name: value for name, value in options.items() if value is not False}  # switches have no `--no-` form
        command = [str(self._python), "-P", "-m", "hone_sglang.inside.process", *command_arguments(flags)]
        sockets = {"HONE_SOCKET": str(site.folder / SOCKET), "TMPDIR": str(site.folder)}  # for its own sockets
        return command, {**self.defaults.server_environment(self._spec, site.folder), **sockets}

    @staticmethod
    def why_one_machine(settings: RolloutConfig) -> str:
        """Why the ranks of a server have to be on one machine; empty: they may be on several."""
        if size_option(settings.engine, "attn_dp_size") > 1:
            return "with attn_dp_size hone starts SGLang on one machine only"
        return ""

    @staticmethod
    def unfit_for_adapter(kind: AdapterKind) -> str:
        """Return why SGLang cannot serve an adapter of this kind; empty if it can."""
        if kind.dora:
            return "SGLang has no DoRA"
        if kind.whole_modules:
            return "SGLang cannot load an adapter with modules that were trained whole (modules_to_save)"
        if kind.experts:
            return "it is on the weights of experts"
        if kind.model not in ADAPTED:
            return f"hone has tried adapters in SGLang on {', '.join(ADAPTED)}, and not on {kind.model or 'others'}"
        others = sorted(kind.modules - set(ADAPTABLE))
        return f"it is on {', '.join(others)}; SGLang takes those on {', '.join(ADAPTABLE)}" if others else ""

    @classmethod
    def _adapter_options(cls, spec: ServerSpec, config: Any) -> dict[str, Any]:
        every = cls._adapter_kinds(spec, config.model_type)
        if not every:
            return {}
        named = set().union(*(kind.modules or ADAPTABLE for kind in every))
        return {
            "enable_lora": True,
            "max_lora_rank": max(kind.rank for kind in every),
            "max_loras_per_batch": len(every) + 1,  # plus the base without an adapter
            "lora_target_modules": [name for name in ADAPTABLE if name in named],
            **({"lora_backend": "torch_native"} if current_platform().device == "cpu" else {}),
        }

    async def _longest_sequence(self) -> int:
        info = await self.connection.get("/server_info")
        return min(self._context, int(info["max_total_num_tokens"]) - MARGIN)

    # ---------------------------------------------------------------------------------------------- generating

    async def _generate(self, request: GenerationRequest, images: PlacedImages) -> tuple[Completion, int, int]:
        sampling = request.sampling
        if not await self._may_begin(request.id):
            return Completion(request.id, (), (), (), StopReason.ABORTED), 0, 0
        rid = f"{next(self._numbers)}:{request.id}"  # a unique prefix: SGLang aborts by prefix
        adapter = sampling.adapter or self._adapter
        body = _generate_body(rid, request.tokens, sampling, int(self._limits.longest), adapter)
        try:
            reply = await self.connection.post("/generate", body, self._request_timeout_s)
        except ValueError as error:
            if sampling.json_schema and ABORTED in str(error):
                return Completion(request.id, (), (), (), StopReason.ABORTED), 0, 0
            raise
        except (asyncio.CancelledError, TimeoutError):
            with suppress(ReplicaLost, TimeoutError, RuntimeError):  # frees its slot at once
                await asyncio.shield(self.connection.post("/abort_request", {"rid": rid}))
            raise
        meta = reply["meta_info"]
        found = _completion(request.id, reply, bool(body.get("return_sampling_mask")))
        if sampling.routed_experts:
            sizes = self._config.num_hidden_layers, self._config.num_experts_per_tok
            routes = _routes(meta.get("routed_experts"), *sizes)
            found = with_routes(found, routes, len(request.tokens), self._spec)
        return found, len(request.tokens), int(meta.get("cached_tokens") or 0)

    async def _score(self, request_id: str, token_ids: Sequence[int], top_k: int) -> Scored | None:
        if not await self._may_begin(request_id):
            return None
        body = {
            "rid": f"{next(self._numbers)}:{request_id}",
            "input_ids": list(token_ids),
            "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": top_k,
            "lora_path": self._adapter,
        }
        meta = (await self.connection.post("/generate", body, self._request_timeout_s))["meta_info"]
        return None if FINISH[meta["finish_reason"]["type"]] is StopReason.ABORTED else _scored(meta, top_k)

    async def _abort_open(self) -> None:
        """Abort all requests. A paused scheduler aborts only queued requests, so running ones are queued first."""
        self._open_gates(begin=False)
        if self._state.paused or self._updating or not self._state.is_awake:
            await self.connection.post("/pause_generation", {"mode": "retract"})
        await self.connection.post("/abort_request", {"abort_all": True})

    async def _hold(self, mode: PauseMode) -> None:
        if mode == "wait":
            await self._let_end(self._requests.ids - set(self._gates))
        await self.connection.post("/pause_generation", {"mode": "in_place"})

    async def _go_on(self) -> None:
        self._open_gates(begin=True)
        await self.connection.post("/continue_generation", {})

    # ------------------------------------------------------------------------------------- weights, sleep and wake

    async def _receive(self, offer: dict[str, Any]) -> list[WeightReceipt]:
        await self.connection.post("/pause_generation", {"mode": "retract"})
        version, timeout_s = str(offer["version"]), float(offer["timeout_s"]) + CONTROL_S
        body = {"zmq_handles": {"offer": json.dumps(offer)}, "flush_cache": True, "weight_version": version}
        reply = await self._change("/update_weights_from_ipc", body, timeout_s)
        payload = offer["payload"]
        self._adapter = str(payload["name"]) if payload["kind"] == "adapter" else None
        wanted = {name: str(files.folder) for name, files in self._spec.adapters.items()}
        if self._adapter:
            wanted[self._adapter] = BROUGHT
        receipts, loaded = _read_receipts(self.name, str(reply["message"]))
        for name in sorted(wanted.keys() - loaded):
            await self._change("/load_lora_adapter", {"lora_name": name, "lora_path": wanted[name]}, timeout_s)
        return receipts

    async def _change(self, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a weight update; status 400 means that the weights did not fit or did not arrive completely."""
        try:
            return await self.connection.post(path, body, timeout_s)
        except ValueError as error:
            raise RuntimeError(str(error)) from error

    async def _give_back(self, level: int) -> None:
        await self.connection.post("/pause_generation", {"mode": "retract"})
        tags = ["kv_cache"] if level == 1 else ["kv_cache", "weights"]
        await self.connection.post("/release_memory_occupation", {"tags": tags})
        self._released = set(tags)

    async def _take_again(self, tags: list[str]) -> None:
        if released := [tag for tag in tags if tag in self._released]:
            await self.connection.post("/resume_memory_occupation", {"tags": released})
            self._released -= set(released)

    # ------------------------------------------------------------------------------- requests that may not begin yet

    async def _may_begin(self, request_id: str) -> bool:
        """Wait while requests may not begin; return False if this one was aborted meanwhile.

        Requests wait here, because SGLang cannot abort a request that has not reached its scheduler.
        """
        if not (self._state.paused or self._updating):
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
            while running & self._requests.ids:
                await asyncio.sleep(AGAIN_S)


def _check_layers(config: Any, model: str) -> None:
    """Raise ConfigError for layers that were not run with SGLang on a CPU."""
    kinds = {
        "layers that carry a state": carries_state(config),
        "sparse attention with an indexer": getattr(config.get_text_config(), "index_topk", None),
    }
    for kind in (kind for kind, has in kinds.items() if has):
        raise ConfigError(
            f"rollout.backend=sglang: on a CPU hone has not run SGLang with {kind}, which {model} (model.path) has: "
            "set rollout.backend=builtin, or run it on a GPU"
        )


# ------------------------------------------------------------------------------------------- SGLang's JSON, and ours


def _generate_body(
    request_id: str, token_ids: Sequence[int], sampling: SamplingParams, longest: int, adapter: str | None = None
) -> dict[str, Any]:
    greedy = sampling.temperature == 0
    filtered = not greedy and (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0)
    wanted: dict[str, Any] = {
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
    if sampling.json_schema:
        wanted["json_schema"] = sampling.json_schema
    body = {"rid": request_id, "input_ids": list(token_ids), "sampling_params": wanted, "return_logprob": True}
    if adapter:
        body["lora_path"] = adapter
    if sampling.routed_experts:
        body["return_routed_experts"] = True
    return {**body, "return_sampling_mask": True} if filtered else body


def _completion(request_id: str, reply: Mapping[str, Any], filtered: bool) -> Completion:
    """Read a completion. `filtered`: log-probs are normalised over the tokens that top-k, top-p and min-p keep."""
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


def _routes(text: str | None, layers: int, choices: int) -> Routes | None:
    """Decode the experts of each token in every layer; SGLang sends int32 bytes as base64."""
    if text is None:
        return None
    return np.frombuffer(base64.b64decode(text), np.int32).reshape(-1, layers, choices).astype(np.int16)


def _scored(meta: Mapping[str, Any], top_k: int) -> Scored:
    """Read prompt log-probs: entries are (log-prob, token, text), and null for the first token."""
    logprobs = tuple(float(entry[0]) if entry[0] is not None else 0.0 for entry in meta["input_token_logprobs"])
    if not top_k:
        return Scored(logprobs)
    places = [place or () for place in meta["input_top_logprobs"]]
    ids = tuple(tuple(int(entry[1]) for entry in place) for place in places)
    return Scored(logprobs, ids, tuple(tuple(float(entry[0]) for entry in place) for place in places))


def _read_receipts(name: str, message: str) -> tuple[list[WeightReceipt], set[str]]:
    """Parse SGLang's reply to an update, JSON followed by text: receipts, and names of loaded adapters."""
    receipts, _ = json.JSONDecoder().raw_decode(message)
    wanted = ("version", "digest", "tensors", "bytes")
    found = [WeightReceipt(name, **{key: receipt[key] for key in wanted}) for receipt in receipts]
    return found, set(receipts[0]["adapters"])


def spread_options(span: ServerMachines) -> dict[str, Any]:
    """Return the options of SGLang on one of several machines; those after the first have schedulers only."""
    return {
        "nnodes": len(span.addresses),
        "node_rank": span.number,
        "dist_init_addr": f"{span.addresses[0]}:{span.port}",
    }


def server_options(spec: ServerSpec, vocabulary: int) -> dict[str, Any]:
    """Return the options that hone sets itself."""
    return {
        "model_path": spec.model,
        "tp_size": spec.settings.tensor_parallel,
        "sampling_backend": "pytorch",  # the only one with seeds
        "sampling_mask_max_tokens": vocabulary,  # large enough for any filter
        "skip_server_warmup": True,
        "weight_version": "0" if spec.frozen else "-1",
        "tokenizer_path": spec.tokenizer or None,
        "trust_remote_code": spec.trust_remote_code or None,
        "enable_return_routed_experts": bool(spec.routed_layers) or None,
    }


__all__ = ["SglangServer"]
