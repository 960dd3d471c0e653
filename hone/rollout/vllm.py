"""vLLM as a server in a process and Python environment of its own, seen from the trainer's process.

    VllmServer --HTTP over a unix socket, the run's token--> guard --> vLLM's API server --> its engine and workers
         `-- ServerProcess: starts it, watches it, ends it               (hone/workers/vllm.py runs inside these)

    generate          POST /inference/v1/generate: tokens in; tokens, log-probs and spans of weight versions out
    score             the same path: log-probs of the prompt; one token more is generated and left
    receive_weights   pause keep, start, update (the offer), finish, receipts, drop every KV, resume

Nothing of vLLM is imported here. Tested with vLLM 0.32.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hone.data.routes import routes_of_text
from hone.models.vision import sees_images
from hone.rollout.adapters import AdapterKind
from hone.rollout.base import PauseMode, Scored, ServerSpec, WeightReceipt
from hone.rollout.engine_options import EngineDefaults, command_arguments
from hone.rollout.served import CONTROL_S, SOCKET, ServedEngine
from hone.rollout.shown import Shown
from hone.rollout.vllm_images import features_of
from hone.types import Completion, SamplingParams, StopReason

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
    "data_parallel_size": "it is rollout.replicas",
    "pipeline_parallel_size": "each rank must hold a part of every layer; use rollout.tensor_parallel",
    "logprobs_mode": "the trainer needs log-probs of the distribution that was sampled (processed_logprobs)",
    "mm_device_do_normalize": "hone sends patches that are normalised",
    "seed": "every request has its own",
}
OWN_OPTIONS: Mapping[str, Any] = {
    "logprobs_mode": "processed_logprobs",
    "enable_scale_out": True,
    "middleware": "hone.workers.vllm.ControlGuard",
    "worker_extension_cls": "hone.workers.vllm.HoneWorker",
    "weight_transfer_config": {"backend": "hone"},
}
DEFAULTS: Mapping[str, Any] = {
    "load_format": "dummy",  # the first sync brings the weights
    "max_logprobs": 64,  # most likely tokens at each place that a teacher may be asked for
    "enable_prompt_tokens_details": True,  # how much of a prompt came from the prefix cache
    "disable_uvicorn_access_log": True,
}
CPU_DEFAULTS: Mapping[str, Any] = {
    "enforce_eager": True,
    "enable_chunked_prefill": False,  # of half a prompt it takes back a random number, which no CPU generator can
    "kv_cache_memory_bytes": 512 * 2**20,
    "block_size": 32,
    "max_model_len": -1,  # as long as the model can, if that much KV fits
    "skip_mm_profiling": True,  # the size of its KV cache is given
    "attention_backend": "CPU_MLA",  # of latent attention (DeepSeek): AMX_MLA knows bfloat16 only; others have one
}
ACCELERATOR_DEFAULTS: Mapping[str, Any] = {
    "enable_sleep_mode": True,
    "gpu_memory_utilization": 0.5,  # the rest is for a trainer on the same device
}
VISION_OPTIONS: Mapping[str, Any] = {  # of a model that sees images
    "limit_mm_per_prompt": {"video": 0},
    "mm_device_do_normalize": False,  # the patches that hone sends are normalised
    "mm_processor_cache_gb": 0,  # and need no processor
}
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # opens the control paths, which the guard stands before
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
}
CPU_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process less, where there is one worker
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",
}
SEEDS = 2**63  # vLLM takes seeds below this
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # for which its LoRA buffers can be made
FINISH = {"stop": StopReason.STOP, "length": StopReason.LENGTH, "abort": StopReason.ABORTED}


class VllmServer(ServedEngine):
    """vLLM. It applies min-p before top-k and top-p."""

    returns_routes = True
    takes_images = True
    positional_seed = False  # a request's random stream begins anew with each request
    health = "/health"
    package = "vllm"
    how_to_install = HOW_TO_INSTALL
    defaults = EngineDefaults(
        RESERVED, DEFAULTS, CPU_DEFAULTS, ACCELERATOR_DEFAULTS, ENVIRONMENT, cpu_environment=CPU_ENVIRONMENT
    )

    def _reset(self) -> None:
        super()._reset()
        self._adapter: str | None = None  # what requests name as their model
        self._adapters: dict[str, tuple[int, str]] = {}  # loaded ones: vLLM's number, folder with the files

    def _command(self, folder: Path) -> list[str]:
        vision = VISION_OPTIONS if sees_images(self._whole_config) else {}
        options = {**server_options(self._spec, folder), **vision, **self._options}
        return [str(self._python), "-m", "vllm.entrypoints.openai.api_server", *command_arguments(options)]

    def _environment(self, folder: Path) -> dict[str, str]:
        """Only vLLM's newer model runner tells the experts of its tokens."""
        routed = {"VLLM_USE_V2_MODEL_RUNNER": "1"} if self._spec.routed_layers else {}
        return {**super()._environment(folder), **routed}

    @staticmethod
    def unfit_for_adapter(kind: AdapterKind) -> str:
        """Why vLLM cannot take an adapter of this kind; empty: it can."""
        if kind.dora:
            return "vLLM has no DoRA"
        if kind.whole_modules:
            return "vLLM takes no modules that are trained whole beside an adapter"
        if kind.experts:
            return "it is on the weights of experts"
        return f"vLLM takes ranks up to {RANKS[-1]}, this one has {kind.rank}" if kind.rank > RANKS[-1] else ""

    @classmethod
    def _adapter_options(cls, spec: ServerSpec, config: Any) -> dict[str, Any]:
        every = cls._adapter_kinds(spec, config.model_type)
        if not every:
            return {}
        largest = max(kind.rank for kind in every)
        room = next(rank for rank in RANKS if rank >= largest)
        # vLLM's kernels for CPUs give a request without an adapter the last slot, beside one that has an adapter
        # (vllm/lora/ops/torch_ops/lora_ops.py, index -1): so that slot stays empty where the two meet.
        return {"enable_lora": True, "max_lora_rank": room, "max_loras": len(every) + bool(spec.adapters)}

    async def start(self) -> None:
        """Start the server; the weights of the model's folder, if it serves those, are version 0."""
        await super().start()
        if self._spec.frozen:  # vLLM calls them "default"
            await self._request("POST", "/update_weight_version", {"new_version": "0"})

    async def _longest_sequence(self) -> int:
        models = await self._request("GET", "/v1/models")
        return int(models["data"][0]["max_model_len"])

    # ---------------------------------------------------------------------------------------------- generating

    async def _generate(
        self, request_id: str, token_ids: Sequence[int], sampling: SamplingParams, shown: Shown
    ) -> tuple[Completion, int, int]:
        body = _generate_body(request_id, token_ids, sampling, self._longest, sampling.adapter or self._adapter)
        if shown:
            body["features"] = features_of(shown)
        reply = await self._request("POST", "/inference/v1/generate", body, self._request_timeout_s)
        usage = reply.get("usage") or {}
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        found = _completion(request_id, reply)
        if sampling.routed_experts:
            found = self._with_routes(found, routes_of_text(reply["choices"][0].get("routed_experts")), len(token_ids))
        return found, usage.get("prompt_tokens", 0), cached

    async def _score(self, request_id: str, token_ids: Sequence[int], top_k: int) -> Scored:
        body = {
            "request_id": request_id,
            "token_ids": list(token_ids),
            "sampling_params": {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": top_k, "detokenize": False},
            "model": self._adapter,
        }
        reply = await self._request("POST", "/inference/v1/generate", body, self._request_timeout_s)
        return _scored(token_ids, reply.get("prompt_logprobs") or [], top_k)

    async def _abort_open(self) -> None:
        await self._request("POST", "/abort_requests", {})

    async def _hold(self, mode: PauseMode) -> None:
        waits = self._request_timeout_s if mode == "wait" else CONTROL_S
        await self._request("POST", f"/pause?mode={mode}&clear_cache=false", timeout_s=waits)

    async def _go_on(self) -> None:
        await self._request("POST", "/resume")

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
        await self._request("POST", "/start_weight_update", {})
        await self._request("POST", "/update_weights", {"update_info": {"offer": offer}}, timeout_s)
        receipts = _read_receipts(self.name, await self._call_workers("hone_receipt"))
        await self._request("POST", "/finish_weight_update", {"weight_version": str(offer["version"])})
        self._adapter = None
        for name, files in self._spec.adapters.items():
            await self._load_adapter(name, str(files.folder), timeout_s)
        return receipts

    async def _load_adapter(self, name: str, folder: str, timeout_s: float) -> None:
        """Have vLLM read an adapter from files, in place of one of this name, and prove that all of it is bound."""
        number = self._adapters.get(name, (0, ""))[0]
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

    async def _receive_adapter(self, offer: dict[str, Any], timeout_s: float) -> list[WeightReceipt]:
        assert self._folder is not None
        name = str(offer["payload"]["name"])
        _, folder = self._adapters.get(name, (0, str(self._folder / f"adapter-{offer['version']}")))
        replies = await self._call_workers("hone_receive_adapter", offer, folder, timeout_s=timeout_s)
        receipts = _read_receipts(self.name, replies)
        await self._load_adapter(name, folder, timeout_s)
        await self._request("POST", "/update_weight_version", {"new_version": str(offer["version"])})
        self._adapter = name
        return receipts

    async def _drop_caches(self) -> None:
        reply = await self._request("POST", "/reset_prefix_cache?reset_running_requests=true&reset_external=true")
        if not reply.get("success"):
            raise RuntimeError(f"{self.name} kept KV of older weights: its prefix cache was not reset")
        if sees_images(self._whole_config):
            await self._request("POST", "/reset_encoder_cache")  # images, as the vision tower saw them before

    async def _call_workers(self, method: str, *arguments: Any, timeout_s: float = CONTROL_S) -> list[dict[str, Any]]:
        """One reply per worker, in the order of ranks."""
        body = {"method": method, "args": list(arguments), "timeout": timeout_s}
        found: list[dict[str, Any]] = (await self._request("POST", "/collective_rpc", body, timeout_s + 5.0))["results"]
        return found

    # ------------------------------------------------------------------------------------------- sleep and wake

    async def _give_back(self, level: int) -> None:
        """Level 1 moves the weights to host memory."""
        await self._hold("keep")
        await self._drop_caches()
        await self._request("POST", f"/sleep?level={level}&mode=keep")

    async def _take_again(self, tags: list[str]) -> None:
        """vLLM goes on computing as soon as all of it is awake."""
        await self._request("POST", "/wake_up?" + "&".join(f"tags={tag}" for tag in tags))


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


def _scored(token_ids: Sequence[int], places: Sequence[Mapping[str, Any] | None], top_k: int) -> Scored:
    """Each place has the token of the sequence and, if they are others, the most likely ones, with their ranks."""
    logprobs = tuple(
        float(place[str(token)]["logprob"]) if place else 0.0 for token, place in zip(token_ids, places, strict=False)
    )
    if not top_k:
        return Scored(logprobs)
    top = [
        sorted((entry["rank"], int(token), float(entry["logprob"])) for token, entry in (place or {}).items())[:top_k]
        for place in places
    ]
    ids, likely = (tuple(tuple(entry[at] for entry in place) for place in top) for at in (1, 2))
    return Scored(logprobs, ids, likely)


def _read_errors(name: str, replies: list[dict[str, Any]]) -> None:
    errors = [f"worker {rank}: {reply['error']}" for rank, reply in enumerate(replies) if "error" in reply]
    if errors:
        raise RuntimeError(f"replica {name}: {'; '.join(errors)}")


def _read_receipts(name: str, replies: list[dict[str, Any]]) -> list[WeightReceipt]:
    _read_errors(name, replies)
    wanted = ("version", "digest", "tensors", "bytes")
    return [WeightReceipt(name, **{key: reply[key] for key in wanted}) for reply in replies]


def server_options(spec: ServerSpec, folder: Path) -> dict[str, Any]:
    """Options that hone sets itself; the server's socket is in `folder`."""
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
