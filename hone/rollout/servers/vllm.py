"""Adapter for a vLLM server, which runs in its own process and Python environment.

    VllmServer --HTTP over a unix socket, the run's token--> guard --> vLLM's API server --> its engine and workers
         `-- Process: starts it, watches it, ends it               (hone/workers/inside/vllm.py runs inside these)

    generate          POST /inference/v1/generate: tokens in; tokens, log-probs and spans of weight versions out
    score             the same path: log-probs of the prompt; vLLM must generate one token, which is discarded
    receive_weights   pause keep, start, update (the offer), finish, receipts, drop every KV, resume

Does not import vLLM. Tested with vLLM 0.32.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hone.config import ConfigError
from hone.data.routes import routes_of_text
from hone.models.attention.support import carries_state
from hone.models.vision.model import sees_images
from hone.platforms.base import current_platform
from hone.rollout.adapters import AdapterKind
from hone.rollout.base import ServerSpec, WeightReceipt
from hone.rollout.images import PlacedImages
from hone.rollout.servers.adapter import with_routes
from hone.rollout.servers.connection import CONTROL_S
from hone.rollout.servers.engine import EngineDefaults, EngineServer, command_arguments
from hone.rollout.servers.host import SOCKET, Site
from hone.rollout.servers.shape import ServerMachines, ServerRanks, size_option
from hone.rollout.servers.vllm_images import features_of
from hone.rollout.servers.vllm_kernels import check_fits
from hone.rollout.settings import RolloutConfig
from hone.types import Completion, GenerationRequest, PauseMode, Scored, StopReason

HOW_TO_INSTALL = (
    "`make .venv-vllm` makes one for CPUs; for NVIDIA GPUs: python3 -m venv .venv-vllm && "
    ".venv-vllm/bin/pip install vllm==0.32.0 xxhash; or name the interpreter of another one in rollout.python"
)

RESERVED = {
    **dict.fromkeys(("model", "revision", "tokenizer", "tokenizer_revision"), "the model is model.path"),
    **dict.fromkeys(("host", "port", "uds", "api_key", "root_path"), "the server listens where only hone finds it"),
    **dict.fromkeys(("middleware", "worker_extension_cls", "weight_transfer_config"), "hone puts its own there"),
    **dict.fromkeys(("served_model_name", "enable_scale_out", "tokens_only"), "hone speaks to the server by these"),
    "trust_remote_code": "it is model.trust_remote_code",
    "enable_return_routed_experts": "it is actor.moe.routing_replay: rollout",
    "tensor_parallel_size": "it is rollout.tensor_parallel",
    "prefill_context_parallel_size": "hone counts tensor, pipeline and data parallel ranks only",
    **dict.fromkeys(
        ("nnodes", "node_rank", "master_addr", "master_port", "headless", "distributed_executor_backend"),
        "hone starts the ranks, on the machines of runtime.backend",
    ),
    **dict.fromkeys(
        ("data_parallel_rank", "data_parallel_start_rank", "data_parallel_size_local", "data_parallel_address"),
        "one server has all data parallel ranks; set data_parallel_size",
    ),
    **dict.fromkeys(
        ("data_parallel_backend", "data_parallel_external_lb", "data_parallel_hybrid_lb", "api_server_count"),
        "hone speaks to one server process",
    ),
    "logprobs_mode": "the trainer needs log-probs of the distribution that was sampled (processed_logprobs)",
    "mm_device_do_normalize": "hone sends patches that are normalised",
    "seed": "every request has its own",
    "override_generation_config": "every request has its own sampling parameters",
}
OWN_OPTIONS: Mapping[str, Any] = {
    "logprobs_mode": "processed_logprobs",
    "enable_scale_out": True,
    "middleware": "hone.workers.inside.vllm.ControlGuard",
    "worker_extension_cls": "hone.workers.inside.vllm.HoneWorker",
    "weight_transfer_config": {"backend": "hone"},
}
DEFAULTS: Mapping[str, Any] = {
    "load_format": "dummy",  # the first sync brings the weights
    "max_logprobs": 64,  # upper limit of top-k log-probs per position, for teachers
    "enable_prompt_tokens_details": True,  # how much of a prompt came from the prefix cache
    "disable_uvicorn_access_log": True,
}
CPU_DEFAULTS: Mapping[str, Any] = {
    "enforce_eager": True,
    "enable_chunked_prefill": False,  # chunks rewind the random generator, which CPU generators cannot do
    "kv_cache_memory_bytes": 512 * 2**20,
    "block_size": 32,
    "max_model_len": -1,  # the model's context, or less if its KV does not fit
    "skip_mm_profiling": True,  # `kv_cache_memory_bytes` already sets the KV cache
    "attention_backend": "CPU_MLA",  # latent attention (DeepSeek) only; AMX_MLA supports bfloat16 only
}
ACCELERATOR_DEFAULTS: Mapping[str, Any] = {
    "enable_sleep_mode": True,
    "gpu_memory_utilization": 0.5,  # the rest is for a trainer on the same device
}
VISION_OPTIONS: Mapping[str, Any] = {  # for models that take images
    "limit_mm_per_prompt": {"video": 0},
    "mm_device_do_normalize": False,  # hone's patches are already normalised
    "mm_processor_cache_gb": 0,  # and processed
}
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # enables the control paths; the guard checks their token
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
}
CPU_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # with one worker, run it in the same process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",
}
FURTHER_PACKAGES: Mapping[str, tuple[str, ...]] = dict.fromkeys(
    ("qwen3_5_moe_text", "qwen3_5_text"),
    ("torchvision",),  # vLLM's module for these has images too
)
SEEDS = 2**63  # vLLM takes seeds below this
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # ranks that vLLM supports for LoRA buffers
NAMED = 5  # most layers in a message
FINISH = {"stop": StopReason.STOP, "length": StopReason.LENGTH, "abort": StopReason.ABORTED}


class VllmServer(EngineServer):
    """vLLM. It applies min-p before top-k and top-p."""

    returns_experts = True
    takes_images = True
    no_schema = ""
    positional_seed = False  # the random stream restarts with each request
    snapshot_server = "hone.rollout.servers.vllm_snapshots:VllmSnapshots"
    health = "/health"
    package = "vllm"
    how_to_install = HOW_TO_INSTALL
    memory_option = "gpu_memory_utilization"
    rope_option = "max_model_len"
    defaults = EngineDefaults(
        RESERVED, DEFAULTS, CPU_DEFAULTS, ACCELERATOR_DEFAULTS, ENVIRONMENT, cpu_environment=CPU_ENVIRONMENT
    )

    def __init__(self, spec: ServerSpec) -> None:
        super().__init__(spec)
        self._shape = self.shape_of(spec.settings)
        check_fits(self._shape, self._config, self._options, spec.model)
        self._packages = FURTHER_PACKAGES.get(self._config.model_type, ())
        if spec.routed_layers and self._shape.pipeline * self._shape.data > 1:
            raise ConfigError(
                f"actor.moe.routing_replay: rollout with {self._shape}: vLLM's stages and data parallel ranks know "
                "the experts of a part only; use rollout.tensor_parallel, or set routing_replay=old_logprobs"
            )

    @staticmethod
    def shape_of(settings: RolloutConfig) -> ServerRanks:
        """The ranks of one server. Raises ConfigError for sizes that are none."""
        sizes = (size_option(settings.engine, f"{name}_parallel_size") for name in ("pipeline", "data"))
        return ServerRanks(settings.tensor_parallel, *sizes)

    @classmethod
    def why_one_machine(cls, settings: RolloutConfig) -> str:
        """Why the ranks of a server have to be on one machine; empty: they may be on several."""
        if cls.shape_of(settings).data > 1:
            return "with data_parallel_size hone starts vLLM on one machine only"
        return ""

    def _reset(self) -> None:
        super()._reset()
        self._adapter: str | None = None  # model name of requests
        self._adapters: dict[str, tuple[int, str]] = {}  # name -> vLLM's number and the folder of the files

    def _launch(self, site: Site) -> tuple[list[str], dict[str, str]]:
        vision = VISION_OPTIONS if sees_images(self._limits.config) else {}
        spread = {} if site.span is None else spread_options(site.span)
        options = {**server_options(self._spec, site.folder), **vision, **self._options, **spread}
        module = "vllm_follower" if "headless" in spread else "vllm_server"
        command = [str(self._python), "-m", f"hone.workers.inside.{module}", *command_arguments(options)]
        # only vLLM's newer model runner returns routed experts
        routed = {"VLLM_USE_V2_MODEL_RUNNER": "1"} if self._spec.routed_layers else {}
        own = {} if site.span is None else {"VLLM_HOST_IP": site.span.addresses[site.span.number]}
        return command, {**self.defaults.server_environment(self._spec, site.folder), **routed, **own}

    @staticmethod
    def unfit_for_adapter(kind: AdapterKind) -> str:
        """Return why vLLM cannot serve an adapter of this kind; empty if it can."""
        if kind.dora:
            return "vLLM has no DoRA"
        if kind.whole_modules:
            return "vLLM cannot load an adapter with modules that were trained whole (modules_to_save)"
        if kind.experts:
            return "it is on the weights of experts"
        return f"vLLM takes ranks up to {RANKS[-1]}, this one has {kind.rank}" if kind.rank > RANKS[-1] else ""

    @classmethod
    def _adapter_options(cls, spec: ServerSpec, config: Any) -> dict[str, Any]:
        every = cls._adapter_kinds(spec, config.model_type)
        if not every:
            return {}
        if cls.shape_of(spec.settings).data > 1:
            raise ConfigError(
                "rollout.engine.data_parallel_size with a LoRA adapter that is sent or served by itself: vLLM reports "
                "of the first data parallel rank only whether it took the adapter; set actor.lora.sync=merged, or "
                "remove data_parallel_size"
            )
        largest = max(kind.rank for kind in every)
        room = next(rank for rank in RANKS if rank >= largest)
        # On a CPU, vLLM's kernels compute requests without an adapter with the last adapter slot
        # (vllm/lora/ops/torch_ops/lora_ops.py, index -1), so that slot stays empty if there can be such requests.
        spare = bool(spec.adapters) or spec.frozen
        return {"enable_lora": True, "max_lora_rank": room, "max_loras": len(every) + spare}

    @classmethod
    def _model_options(cls, config: Any) -> dict[str, Any]:
        """Options for layers with a state on a CPU, for Gemma 3n, and for Llama 4.

        vLLM caches prefixes of states with chunked prefill only. What `give_layers_their_embeddings` computes is in new
        memory, which graphs of an accelerator would not read. vLLM reads whether to scale Llama 4's queries by their
        position from the generation config; without an entry it scales them in long contexts only.
        """
        if config.model_type == "llama4_text":
            return {"override_generation_config": {"attn_temperature_tuning": bool(config.attn_temperature_tuning)}}
        if config.model_type == "gemma3n_text":
            return {"enforce_eager": True}
        without_cache = current_platform().device == "cpu" and carries_state(config)
        return {"enable_prefix_caching": False} if without_cache else {}

    async def start(self) -> None:
        """Start the server. A frozen model starts with the weights of its folder, as version 0."""
        await super().start()
        if self._shape.pipeline > 1:
            await self._call_workers("hone_enter_pipeline")
        if self._spec.frozen:  # vLLM calls them "default"
            await self.connection.post("/update_weight_version", {"new_version": "0"})

    async def _longest_sequence(self) -> int:
        models = await self.connection.get("/v1/models")
        return int(models["data"][0]["max_model_len"])

    # ---------------------------------------------------------------------------------------------- generating

    async def _generate(self, request: GenerationRequest, images: PlacedImages) -> tuple[Completion, int, int]:
        body = _generate_body(request, int(self._limits.longest), request.sampling.adapter or self._adapter)
        if images:
            body["features"] = features_of(images)
        reply = await self.connection.post("/inference/v1/generate", body, self._request_timeout_s)
        usage = reply.get("usage") or {}
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        found = _completion(request.id, reply)
        if request.sampling.routed_experts:
            routes = routes_of_text(reply["choices"][0].get("routed_experts"))
            found = with_routes(found, routes, len(request.tokens), self._spec)
        return found, usage.get("prompt_tokens", 0), cached

    async def _score(self, request_id: str, token_ids: Sequence[int], top_k: int) -> Scored | None:
        body = {
            "request_id": request_id,
            "token_ids": list(token_ids),
            "sampling_params": {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": top_k, "detokenize": False},
            "model": self._scored_adapter(request_id),
        }
        reply = await self.connection.post("/inference/v1/generate", body, self._request_timeout_s)
        if FINISH[reply["choices"][0]["finish_reason"]] is StopReason.ABORTED:
            return None
        return _scored(token_ids, reply.get("prompt_logprobs") or [], top_k)

    def _scored_adapter(self, request_id: str) -> str | None:
        """Return the adapter with which a sequence is scored."""
        return self._adapter

    async def _computed(self) -> int | None:
        """vLLM counts tokens in its engine's process, which can hang while the server answers the health route."""
        with suppress(RuntimeError):  # no such page: its health route counts alone
            return tokens_of((await self.connection.get("/metrics"))["text"])
        return None

    async def _abort_open(self) -> None:
        await self.connection.post("/abort_requests", {})

    async def _hold(self, mode: PauseMode) -> None:
        waits = self._request_timeout_s if mode == "wait" else CONTROL_S
        await self.connection.post(f"/pause?mode={mode}&clear_cache=false", timeout_s=waits)

    async def _go_on(self) -> None:
        await self.connection.post("/resume")

    # ------------------------------------------------------------------------------------------------- weights

    async def _receive(self, offer: dict[str, Any]) -> list[WeightReceipt]:
        await self._hold("keep")
        timeout_s = float(offer["timeout_s"]) + CONTROL_S
        take = self._receive_adapter if offer["payload"]["kind"] == "adapter" else self._receive_full
        receipts = await take(offer, timeout_s)
        await self._drop_caches()
        return receipts

    async def _receive_full(self, offer: dict[str, Any], timeout_s: float) -> list[WeightReceipt]:
        await self._call_workers("hone_abandon")
        await self.connection.post("/start_weight_update", {})
        await self.connection.post("/update_weights", {"update_info": {"offer": offer}}, timeout_s)
        receipts = _read_receipts(self.name, await self._receipts())
        await self.connection.post("/finish_weight_update", {"weight_version": str(offer["version"])})
        if self._options.get("quantization"):  # layers were compared with what came after they were quantised
            receipts = _read_receipts(self.name, await self._receipts())
        self._adapter = None
        for name, files in self._spec.adapters.items():
            await self._load_adapter(name, str(files.folder), timeout_s)
        return receipts

    async def _receipts(self) -> list[dict[str, Any]]:
        """The receipt or error of every worker, in the order of ranks."""
        if self._shape.data == 1:
            return await self._call_workers("hone_receipt")
        await self._call_workers("hone_note_receipt")  # returns when every data parallel rank has done it
        by_worker: Any = await self._call_workers("hone_noted_receipts")
        return [receipt for of_one_rank in zip(*by_worker, strict=True) for receipt in of_one_rank]

    async def _unload(self, name: str, number: int) -> None:
        await self.connection.post("/v1/unload_lora_adapter", {"lora_name": name})
        await self._call_workers("hone_forget_adapter", number)

    async def _load_adapter(self, name: str, folder: str, timeout_s: float) -> str:
        """Load an adapter, in place of one of the same name, and check that every tensor is used; its digest."""
        number = self._adapters.get(name, (0, ""))[0]
        tried = await self._call_workers("hone_try_adapter", folder)
        _read_errors(self.name, tried)
        if number:
            _read_errors(self.name, await self._call_workers("hone_reload_adapter", number, folder))
        else:
            await self.connection.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder}, timeout_s)
        checks = _with_unbound(await self._call_workers("hone_check_adapter", number))
        if not number and any("error" in check for check in checks):
            await self._unload(name, checks[0]["number"])
        _read_errors(self.name, checks)
        self._adapters[name] = checks[0]["number"], folder
        return " and ".join(sorted({str(reply["digest"]) for reply in tried}))

    async def _receive_adapter(self, offer: dict[str, Any], timeout_s: float) -> list[WeightReceipt]:
        assert self.connection.folder is not None
        name = str(offer["payload"]["name"])
        _, folder = self._adapters.get(name, (0, str(self.connection.folder / f"adapter-{offer['version']}")))
        replies = await self._call_workers("hone_receive_adapter", offer, folder, timeout_s=timeout_s)
        receipts = _read_receipts(self.name, replies)
        await self._load_adapter(name, folder, timeout_s)
        await self.connection.post("/update_weight_version", {"new_version": str(offer["version"])})
        self._adapter = name
        return receipts

    async def _drop_caches(self) -> None:
        reply = await self.connection.post("/reset_prefix_cache?reset_running_requests=true&reset_external=true")
        if not reply.get("success"):
            raise RuntimeError(f"{self.name} kept KV of older weights: its prefix cache was not reset")
        if sees_images(self._limits.config):
            await self.connection.post("/reset_encoder_cache")  # its image features come from the old weights

    async def _call_workers(self, method: str, *arguments: Any, timeout_s: float = CONTROL_S) -> list[dict[str, Any]]:
        """Call a method on every worker; return the replies in the order of ranks."""
        body = {"method": method, "args": list(arguments), "timeout": timeout_s}
        found: list[dict[str, Any]] = (await self.connection.post("/collective_rpc", body, timeout_s + 5.0))["results"]
        return found

    # ------------------------------------------------------------------------------------------- sleep and wake

    async def _give_back(self, level: int) -> None:
        """Free GPU memory; level 1 moves the weights to host memory."""
        await self._hold("keep")
        await self._drop_caches()
        await self.connection.post(f"/sleep?level={level}&mode=keep")

    async def _take_again(self, tags: list[str]) -> None:
        """Wake the given parts. vLLM resumes computing when everything is awake."""
        await self.connection.post("/wake_up?" + "&".join(f"tags={tag}" for tag in tags))


# --------------------------------------------------------------------------------------------- vLLM's JSON, and ours


def _generate_body(request: GenerationRequest, longest: int, adapter: str | None) -> dict[str, Any]:
    sampling, prompt = request.sampling, list(request.tokens)
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
    if sampling.json_schema:
        wanted["structured_outputs"] = {"json": sampling.json_schema}
    salt = {"cache_salt": sampling.cache_owner} if sampling.cache_owner else {}
    return {"request_id": request.id, "token_ids": prompt, "sampling_params": wanted, "model": adapter, **salt}


def tokens_of(page: str) -> int | None:
    """Tokens of prompts and completions that vLLM has computed, by its metrics page; None if it does not count."""
    counters = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
    found = [float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(counters)]
    return int(sum(found)) if found else None


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


def _scored(token_ids: Sequence[int], places: Sequence[Mapping[str, Any] | None], top_k: int) -> Scored:
    """Read prompt log-probs. Each place holds the sequence's token and the most likely tokens, with their ranks."""
    logprobs = tuple(
        float(place[str(token)]["logprob"]) if place else 0.0 for token, place in zip(token_ids, places, strict=False)
    )
    if not top_k:
        return Scored(logprobs)
    top = [
        sorted((entry["rank"], int(token), float(entry["logprob"])) for token, entry in (place or {}).items())[:top_k]
        for place in places
    ]
    ids = tuple(tuple(token for _, token, _ in place) for place in top)
    return Scored(logprobs, ids, tuple(tuple(logprob for _, _, logprob in place) for place in top))


def _with_unbound(checks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The workers' checks of an adapter, with an error in each if no worker has some of its layers."""
    unbound = [set(check.get("unbound", ())) for check in checks]
    nowhere = sorted(set.intersection(*unbound))
    if not nowhere:
        return checks
    more = f" and {len(nowhere) - NAMED} more" if len(nowhere) > NAMED else ""
    are = "is" if len(nowhere) == 1 else "are"
    error = f"the adapter's {', '.join(nowhere[:NAMED])}{more} {are} not in the model"
    return [{"error": error, **check} for check in checks]


def _read_errors(name: str, replies: list[dict[str, Any]]) -> None:
    errors = [f"worker {rank}: {reply['error']}" for rank, reply in enumerate(replies) if "error" in reply]
    if errors:
        raise RuntimeError(f"replica {name}: {'; '.join(errors)}")


def _read_receipts(name: str, replies: list[dict[str, Any]]) -> list[WeightReceipt]:
    _read_errors(name, replies)
    wanted = ("version", "digest", "tensors", "bytes")
    return [WeightReceipt(name, **{key: reply[key] for key in wanted}) for reply in replies]


def spread_options(span: ServerMachines) -> dict[str, Any]:
    """Return the options of vLLM on one of several machines; those after the first have workers only."""
    return {
        "distributed_executor_backend": "mp",
        "nnodes": len(span.addresses),
        "node_rank": span.number,
        "master_addr": span.addresses[0],
        "master_port": span.port,
        **({} if span.is_first else {"headless": True}),
    }


def server_options(spec: ServerSpec, folder: Path) -> dict[str, Any]:
    """Return the options that hone sets itself; the server's socket is in `folder`."""
    return {
        "model": spec.model,
        "uds": str(folder / SOCKET),
        "tensor_parallel_size": spec.settings.tensor_parallel,
        **OWN_OPTIONS,
        "tokenizer": spec.tokenizer or None,
        "trust_remote_code": spec.trust_remote_code or None,
        "enable_return_routed_experts": bool(spec.routed_layers) or None,
    }


__all__ = ["VllmServer"]
