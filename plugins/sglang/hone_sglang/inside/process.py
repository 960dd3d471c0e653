"""Code inside SGLang's processes: start, check of HTTP paths, and receiver of the weight sync.

    python -m hone_sglang.inside.process <options>
        API process   listens on a unix socket; no path without the run's token, and only the paths that hone uses:
                      others of SGLang unpickle what they are sent
        schedulers    (spawned, one per rank; they import this file first) take weights at
                      POST /update_weights_from_ipc {"zmq_handles": {"offer": <JSON>}}
                      offer --> hone.weights.delivery --> (name, tensor)* --> model.load_weights
                                                                      `-> a LoRA adapter: inside/adapters
                      receipt: checksum of what was received; refused unless every parameter of the model was filled

SGLang's Python imports it, with hone's package folder on its path and nothing else of hone's environment.
Tested with SGLang 0.5.23.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import hone_sglang.cpu_patches  # noqa: F401  before SGLang, which imports libraries that CPUs lack

# isort: split
import torch
import uvicorn
from sglang.srt.entrypoints import http_server
from sglang.srt.layers import sampler
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.managers import schedule_batch
from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.runtime_context import get_exec, get_lora
from sglang.srt.sampling import sampling_batch_info
from sglang.srt.server_args import prepare_server_args
from sglang.srt.utils import kill_process_tree

from hone.models.checkpoint_names import as_in_files
from hone.models.parts.views import Reads
from hone.processes.guard import App, Receive, Scope, Send, TokenGuard, same_token
from hone.processes.supervisor import die_with_parent
from hone.weights.base import AdapterTensors, WeightSyncError
from hone.weights.wants import Wants, watched
from hone.workers.inside.receiving import (
    TOKEN_VARIABLE,
    checkpoint_shapes,
    listing,
    lost_biases,
    one_line,
    receipt,
    variable,
)
from hone_sglang.inside.adapters import errors_of, forget_slots, gather, loaded, take

SOCKET_VARIABLE = "HONE_SOCKET"
PATHS = frozenset(
    {
        "/ready",
        "/server_info",
        "/v1/loads",  # how many requests are running: tests wait for it
        "/generate",
        "/abort_request",
        "/pause_generation",
        "/continue_generation",
        "/flush_cache",
        "/load_lora_adapter",
        "/update_weights_from_ipc",
        "/release_memory_occupation",
        "/resume_memory_occupation",
    }
)
WANTS = Wants()  # of the rank in this process
CORES = "SGLANG_CPU_OMP_THREADS_BIND"


# ------------------------------------------------------------------------------------------------- the HTTP paths


class KnownPaths:
    """ASGI middleware that answers 404 for all paths but `PATHS`."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in PATHS:
            await self._app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 404, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": b'{"error": {"message": "hone does not open this path"}}'})


class GuardedConfig(uvicorn.Config):
    """uvicorn's settings for SGLang's application: with token check, on a unix socket instead of a port."""

    def __init__(self, app: Any, **named: Any) -> None:
        token = variable(TOKEN_VARIABLE)
        guarded = TokenGuard(KnownPaths(app), lambda given: same_token(given, token))
        super().__init__(guarded, uds=variable(SOCKET_VARIABLE), access_log=False, **named)


def main(arguments: list[str]) -> None:
    """Run SGLang's server until it is ended."""
    uvicorn.Config = GuardedConfig  # type: ignore[misc, assignment]
    http_server._freeze_gc_after_server_warmup = lambda server_args: None  # it would request a port that is not open
    settings = prepare_server_args(arguments)
    if settings.device == "cpu" and settings.tp_size > 1:
        os.environ.setdefault(CORES, cores_of_ranks(settings.tp_size, sorted(os.sched_getaffinity(0))))
    try:
        http_server.launch_server(settings)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def cores_of_ranks(ranks: int, cores: list[int]) -> str:
    """Divide cores among ranks, in SGLang's notation: "0,2|1,3".

    By default SGLang gives each rank a NUMA node, and does not start with fewer nodes than ranks.
    """
    shares = [cores[rank::ranks] or [cores[rank % len(cores)]] for rank in range(ranks)]
    return "|".join(",".join(map(str, share)) for share in shares)


# --------------------------------------------------------------------------------------------- seeds, filters, ends


class _Seeded:
    """SGLang's execution settings, with seeds of requests switched on for one file.

    SGLang reads `sampling_seed` only in its deterministic mode, which also replaces attention and matrix products; in
    other modes it ignores seeds silently. Sampling with seeds also needs `sampling_backend=pytorch`.
    """

    deterministic = SimpleNamespace(enable_deterministic_inference=True)

    def __init__(self, settings: Any) -> None:
        self._settings = settings

    def __getattr__(self, name: str) -> Any:
        return getattr(self._settings, name)


_ENDS = schedule_batch.Req._check_token_based_finish
_FILTERS = sampler.top_k_top_p_min_p_sampling_from_probs_torch


def ends_at_a_token(request: Any, tokens: list[int]) -> bool:
    """Return whether a request ends at one of its new tokens; with `ignore_eos` its stop ids still count.

    SGLang's own function ignores the stop ids then.
    """
    wanted = request.sampling_params
    if not (wanted.ignore_eos and wanted.stop_token_ids):
        return bool(_ENDS(request, tokens))
    for place, token in enumerate(tokens):
        if token in wanted.stop_token_ids:
            request.finished_reason = schedule_batch.FINISH_MATCHED_TOKEN(matched=token)
            request.finished_len = len(request.output_ids) - len(tokens) + place + 1
            return True
    return False


def sample_filtered(
    probs: torch.Tensor, top_ks: Any, top_ps: Any, min_ps: torch.Tensor, need_min_p: bool, *others: Any, **named: Any
) -> Any:
    """Apply SGLang's top-k, top-p and min-p, with seeds for min-p too, where SGLang's scheduler would crash.

    Min-p removes the least likely tokens, by a fraction of the largest probability, so applying it first changes
    nothing.
    """
    if need_min_p:
        probs = probs.masked_fill(probs < probs.amax(-1, keepdim=True) * min_ps.view(-1, 1), 0.0)
    return _FILTERS(probs, top_ks, top_ps, min_ps, False, *others, **named)


# --------------------------------------------------------------------------------------------- experts of a mixture


def unregistered(dims: tuple[int, ...], dtype: torch.dtype, device: str, allocator: Any, **pinning: Any) -> Any:
    """Allocate host memory for the experts of all tokens. SGLang's own function registers it with CUDA."""
    return allocator.allocate(dims, dtype=dtype, device=device)


# -------------------------------------------------------------------------------------------- attention on a CPU


def padded_length(backend: TorchNativeAttnBackend) -> int:
    """Return the length of the sequences that pad a batch to that of other data parallel ranks.

    SGLang asks its attention on CPUs for it, and the one in plain torch has no answer.
    """
    return 1


# ------------------------------------------------------------------------------------------------- weight transfer


def update_weights_from_offer(updater: WeightUpdater, request: Any) -> tuple[bool, str]:
    """Replace `WeightUpdater.update_weights_from_ipc`: return success, and the receipts as JSON.

    Never raises, because an exception would end the scheduler.
    """
    rank = updater.tp_rank
    try:
        receipt = _take_in(updater, json.loads(request.zmq_handles["offer"]), rank)
    except Exception as error:  # noqa: BLE001  reported to the trainer
        receipt = {"error": one_line(error)}
    receipts = gather(receipt)
    errors = errors_of(receipts)
    return not errors, errors or json.dumps(receipts)


def _take_in(updater: WeightUpdater, offer: Mapping[str, Any], rank: int) -> dict[str, Any]:
    adapters = updater.get_model_runner().lora_manager if get_lora().enable_lora else None
    with WANTS.learning(offer, rank, variable(TOKEN_VARIABLE)) as (delivery, reads):
        if isinstance(delivery.payload, AdapterTensors):
            take(adapters, delivery.payload.name, dict(delivery), delivery.payload.config)
        else:
            _take_in_whole(updater, watched(delivery, reads), reads)
            forget_slots(adapters)  # their memory may have been freed during sleep
    return {**receipt(delivery, rank), "adapters": loaded(adapters)}


def _take_in_whole(updater: WeightUpdater, weights: Iterable[tuple[str, torch.Tensor]], reads: Reads) -> None:
    model = updater.get_model()
    config = updater.model_config.hf_config
    names: list[str] = []
    known = checkpoint_shapes(config)
    updater.begin_weight_update()
    hollow(model)
    try:
        model.load_weights(_noting(as_in_files(config, weights), names, known))
    except (ValueError, KeyError, AssertionError, RuntimeError, AttributeError, IndexError) as error:
        if isinstance(error, WeightSyncError) or not names:
            raise
        raise WeightSyncError(f"{names[-1]!r} does not fit the model: {one_line(error)}") from error
    if missing := sorted(set(known) - set(names)):
        raise WeightSyncError(f"not sent: {listing(missing)}")
    if gaps := unfilled(model):
        raise WeightSyncError(f"not sent in full, or NaN: weights of SGLang's {listing(gaps)}")
    if lost := lost_biases(reads):
        raise WeightSyncError(f"SGLang's model has no place for {listing(lost)}, which its loader left out")
    updater.end_weight_update(run_post_load=False)


def _noting(
    weights: Iterable[tuple[str, torch.Tensor]], names: list[str], known: Mapping[str, torch.Size]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors and collect `names`. Refuses another model's tensors, which SGLang would accept."""
    for name, tensor in weights:
        if known and name not in known:
            raise WeightSyncError(f"the model has no {name}")
        if known and tensor.shape != known[name]:
            raise WeightSyncError(f"{name} has shape {[*tensor.shape]}, the model's has {[*known[name]]}")
        names.append(name)
        yield name, tensor


def hollow(model: torch.nn.Module) -> None:
    """Fill every parameter with NaN to detect tensors that were not sent: SGLang's loaders report neither unknown nor
    missing ones."""
    for parameter in model.parameters():
        if parameter.dtype.is_floating_point:
            parameter.data.fill_(torch.nan)


def unfilled(model: torch.nn.Module) -> list[str]:
    """List parameters with a NaN: they were not sent completely, or the trainer's weights are NaN."""
    found = []
    for name, parameter in model.named_parameters():
        if parameter.dtype.is_floating_point and bool(parameter.data.isnan().any()):
            found.append(name)
    return found


ALLOC_MEMORY_FUNCS["cpu"] = unregistered
TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = padded_length
WeightUpdater.update_weights_from_ipc = update_weights_from_offer
schedule_batch.Req._check_token_based_finish = ends_at_a_token
sampler.top_k_top_p_min_p_sampling_from_probs_torch = sample_filtered
sampling_batch_info.get_exec = lambda: _Seeded(get_exec())

if __name__ == "__mp_main__":  # a scheduler, or the detokenizer
    die_with_parent()
if __name__ == "__main__":
    main(sys.argv[1:])
