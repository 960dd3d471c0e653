"""Generation, its servers, weight sync and evaluation's sampling of a verl run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hone.migration.migration import Migration, number

BASE = "actor_rollout_ref.rollout"
BACKENDS: Mapping[str, str] = {"vllm": "vllm", "sglang": "sglang", "hf": "builtin"}

SGLANG: Mapping[str, str] = {
    "gpu_memory_utilization": "mem_fraction_static",
    "max_num_seqs": "max_running_requests",
    "max_model_len": "context_length",
    "enforce_eager": "disable_cuda_graph",
}
"""Options of a server under verl's names, which are vLLM's -> SGLang's names."""

OPTIONS = (
    "gpu_memory_utilization",
    "max_num_seqs",
    "max_model_len",
    "max_num_batched_tokens",
    "enforce_eager",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "dtype",
    "cudagraph_capture_sizes",
)
TRANSPORTS: Mapping[str, str] = {
    "naive": "",
    "nccl": "collective",
    "hccl": "collective",
    "nixl": "nixl",
    "delta_sharded": "delta",
}


def read(migration: Migration) -> None:
    """Read how answers are generated."""
    said = migration.text(f"{BASE}.name", default="vllm")
    backend = BACKENDS.get(said, "vllm")
    if said not in BACKENDS:
        migration.decide(f"{BASE}.name={said} has no counterpart ({', '.join(BACKENDS)}); the file takes vllm")
    migration.put("rollout.backend", backend, f"rollout.name={said}")
    length = int(migration.number(f"{BASE}.response_length", "data.max_response_length", default=512))
    migration.put("rollout.sampling.max_response_tokens", length, f"data.max_response_length={length}")
    for name, convert in (("temperature", number), ("top_p", number), ("top_k", _top_k)):
        migration.copy(f"{BASE}.{name}", f"rollout.sampling.{name}", convert)
    _places(migration)
    if backend in ("vllm", "sglang"):
        _engine(migration, backend, said)
    if not migration.truth(f"{BASE}.free_cache_engine", default=True):
        migration.put("rollout.sleep_while_training", "none", f"{BASE}.free_cache_engine=False")
    _sync(migration)
    _evaluation(migration)


def _top_k(value: Any) -> int:
    return max(0, int(number(value)))


def _places(migration: Migration) -> None:
    """Set how many servers there are, and whether they have devices of their own."""
    tensor = migration.count(f"{BASE}.tensor_model_parallel_size", default=2)
    migration.put("rollout.tensor_parallel", tensor, f"rollout.tensor_model_parallel_size={tensor}")
    settings = migration.settings
    world = 1
    if "runtime.backend.devices" in settings:
        world = int(settings["runtime.backend.devices"].value) * int(settings["runtime.backend.nodes"].value)
    apart = not migration.truth("actor_rollout_ref.hybrid_engine", default=True)
    own_nodes = migration.number("rollout.nnodes", f"{BASE}.nnodes")
    here = migration.number("rollout.n_gpus_per_node", f"{BASE}.n_gpus_per_node", default=8)
    if apart or own_nodes:
        nodes = int(own_nodes or 1)
        world = nodes * int(here)
        migration.put("runtime.backend.name", "ray", "servers on devices of their own")
        settings.setdefault("runtime.backend.devices", type(settings["run.dir"])(1, "trainer.n_gpus_per_node"))
        settings.setdefault("runtime.backend.nodes", type(settings["run.dir"])(1, "trainer.nnodes"))
        migration.put("runtime.backend.pools.rollout.devices", int(here), f"rollout.n_gpus_per_node={here}")
        migration.put("runtime.backend.pools.rollout.nodes", nodes, f"rollout.nnodes={nodes}")
    parts = migration.count(f"{BASE}.data_parallel_size", default=1)
    stages = migration.count(f"{BASE}.pipeline_model_parallel_size", default=1)
    width = tensor * parts * stages
    migration.put("rollout.replicas", max(1, world // width), f"{world} devices / {width} of each server")
    if parts > 1:
        migration.put("rollout.engine.data_parallel_size", parts, f"rollout.data_parallel_size={parts}")
    if stages > 1:
        migration.put("rollout.engine.pipeline_parallel_size", stages, f"pipeline_model_parallel_size={stages}")


def _engine(migration: Migration, backend: str, said: str) -> None:
    """Set options of the servers under their own names."""
    for name in OPTIONS:
        option = f"{BASE}.{name}"
        ours = SGLANG.get(name) if backend == "sglang" else name
        value = migration.options.get(option)
        if ours is None or value in (None, "null", "None", "auto"):
            migration.drop(option, f"{backend} has no such option" if ours is None else "the engine's own value")
            continue
        migration.copy(option, f"rollout.engine.{ours}")
    if f"{BASE}.gpu_memory_utilization" not in migration:
        name = SGLANG["gpu_memory_utilization"] if backend == "sglang" else "gpu_memory_utilization"
        migration.put(f"rollout.engine.{name}", 0.5, "gpu_memory_utilization (verl default)")
    experts = int(migration.number(f"{BASE}.expert_parallel_size", default=1))
    if experts > 1:
        key, value = ("enable_expert_parallel", True) if backend == "vllm" else ("ep_size", experts)
        migration.put(f"rollout.engine.{key}", value, f"rollout.expert_parallel_size={experts}")
    if migration.text(f"{BASE}.quantization", default="null") not in ("null", "None"):
        migration.put("rollout.engine.quantization", migration.text(f"{BASE}.quantization"), f"{BASE}.quantization")
    for option in [name for name in migration.options if name.startswith(f"{BASE}.engine_kwargs.")]:
        engine, _, key = option.removeprefix(f"{BASE}.engine_kwargs.").partition(".")
        if engine == backend and said in BACKENDS and key:
            migration.copy(option, f"rollout.engine.{key}")
        else:
            migration.drop(option, f"an option of {engine}, which this run does not use")


def _sync(migration: Migration) -> None:
    name = f"{BASE}.checkpoint_engine"
    migration.copy(f"{name}.update_weights_bucket_megabytes", "weights.bucket_mib", int)
    migration.copy(f"{BASE}.update_weights_bucket_megabytes", "weights.bucket_mib", int)
    said = migration.text(f"{name}.backend", default="naive")
    if said not in TRANSPORTS:
        migration.decide(f"{name}.backend={said} has no counterpart (weights.transport: ipc, collective, delta, nixl)")
    elif TRANSPORTS[said]:
        migration.put("weights.transport.name", TRANSPORTS[said], f"checkpoint_engine.backend={said}")


def _evaluation(migration: Migration) -> None:
    """Read sampling of held-out answers: verl's default is greedy."""
    base = f"{BASE}.val_kwargs"
    samples = int(migration.number(f"{base}.n", default=1))
    temperature = float(migration.number(f"{base}.temperature", default=0.0))
    draws = migration.truth(f"{base}.do_sample", default=False) and temperature > 0
    if draws:
        migration.put("evaluation.sampling.temperature", temperature, f"val_kwargs.temperature={temperature}")
        migration.copy(f"{base}.top_p", "evaluation.sampling.top_p", number)
        migration.copy(f"{base}.top_k", "evaluation.sampling.top_k", _top_k)
        if samples > 1:
            migration.put("evaluation.samples", samples, f"val_kwargs.n={samples}")
    elif samples > 1:
        migration.decide(
            f"{base}.n={samples} with greedy answers: all would be the same. Set evaluation.sampling.temperature and "
            "evaluation.samples"
        )
    for name in ("top_p", "top_k", "temperature", "n", "do_sample"):
        migration.drop(f"{base}.{name}", "held-out answers are greedy")
