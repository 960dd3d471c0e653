"""Code inside vLLM's processes: token check of HTTP paths, and receiver of the weight sync.

    API server   `--middleware hone.workers.inside.vllm.ControlGuard`       no path without the run's token
    each worker  `--worker-extension-cls hone.workers.inside.vllm.HoneWorker`
                 `--weight-transfer-config {"backend": "hone"}`      -> HoneTransferEngine
                     start: layers go back to the form of a checkpoint
                     update: offer --> hone.weights.delivery --> (name, tensor)* --> model.load_weights, layer by layer
                     finish: layers are packed again for the kernels
                     receipt: checksum of what was received; refused unless every parameter of the model was filled

vLLM's Python imports it, with hone's package folder on its path and nothing else of hone's environment.
Tested with vLLM 0.32.0.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from vllm import _custom_ops
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler

from hone.models.checkpoint_names import as_in_files
from hone.processes.guard import App, TokenGuard, same_token
from hone.processes.supervisor import FOLDER, die_with_parent
from hone.weights.base import AdapterTensors, WeightSyncError
from hone.weights.delivery import receive
from hone.weights.digests.digest import digest_tensors
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
from hone.workers.inside.vllm_patches import (
    add_bias_to_choice,
    allow_amx,
    as_loaders_want,
    copy_convolutions,
    expand_batch_to_tokens,
    gather_rows,
    give_layers_their_embeddings,
    lay_out_single_tokens,
    leave_prompts_without_head_adapters,
    make_room_between_stages,
    name_loaders,
    pack_cpu_experts_again,
    put_cpu_kernels_back,
    rotate_by_token,
    scatter_rows,
)
from hone.workers.inside.vllm_quantised import QuantisedLayers

BACKEND = "hone"
TRIAL = 2**30  # a number that no adapter has
ADAPTER_FILE = "adapter_model.safetensors"  # PEFT's name


class ControlGuard(TokenGuard):
    """ASGI middleware in front of every path of vLLM's server, `/v1`, `/health` and `/metrics` included.

    vLLM's own `--api-key` leaves the weight, pause and RPC paths open.
    """

    def __init__(self, app: App) -> None:
        token = variable(TOKEN_VARIABLE)
        super().__init__(app, lambda given: same_token(given, token))


# ------------------------------------------------------------------------------------------------- weight transfer


@dataclass
class HoneInit(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not installed here
    """Empty: each offer contains everything."""


@dataclass
class HoneUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]  # vLLM is not installed here
    """One sync: the result of `hone.weights.base.Offer.to_json`."""

    offer: dict[str, Any]


class HoneTransferEngine(WeightTransferEngine[HoneInit, HoneUpdate]):  # type: ignore[misc]  # vLLM is not installed here
    """vLLM's weight-transfer backend "hone", one in each worker."""

    init_info_cls = HoneInit
    update_info_cls = HoneUpdate
    supports_draft_weight_update = False

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        die_with_parent()
        give_layers_their_embeddings(self.model)
        if current_platform.is_cpu():
            allow_amx()
            CPURouter._compute_routing = add_bias_to_choice(CPURouter._compute_routing)
            _custom_ops.rotary_embedding = rotate_by_token(_custom_ops.rotary_embedding)
            PunicaWrapperCPU.add_lora_logits = leave_prompts_without_head_adapters(PunicaWrapperCPU.add_lora_logits)
            _custom_ops.causal_conv1d_fwd_cpu = lay_out_single_tokens(_custom_ops.causal_conv1d_fwd_cpu)
            rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
            CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = gather_rows, scatter_rows
        self.receipt: dict[str, Any] = {"error": "no weights were received"}
        self._wants = Wants()
        self._quantised: QuantisedLayers | None = None  # during an update

    def init_transfer_engine(self, init_info: HoneInit) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        self.receipt = {"error": "the update was begun, and no weights came"}
        pack_cpu_experts_again(self.model)
        name_loaders(self.model)
        initialize_layerwise_reload(self.model)
        self._leave_quantised()  # of an update that was abandoned
        self._quantised = QuantisedLayers(quantised_layers(self.model), LinearMethodBase)
        self._quantised.follow()

    def receive_weights(self, update_info: HoneUpdate) -> None:
        """Receive all tensors of the offer's sender. An error goes into the receipt, which the caller reads.

        Never raises: if several workers raise, vLLM's executor reads only the first reply and takes the others for
        replies to later calls.
        """
        try:
            self.receipt = self._take_in(update_info.offer)
        except Exception as error:  # noqa: BLE001  reported in the receipt
            self.receipt = {"error": one_line(error)}
            self._leave_quantised()
            put_back(self.model, self.model_config)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        copy_convolutions(self.model)
        if self._quantised is not None and "error" not in self.receipt:
            try:
                self._quantised.check()
            except WeightSyncError as error:
                self.receipt = {"error": one_line(error)}
        self._leave_quantised()

    def _leave_quantised(self) -> None:
        if self._quantised is not None:
            self._quantised.leave()
            self._quantised = None

    def shutdown(self) -> None:
        """Do nothing; no state is kept between syncs."""

    def _take_in(self, offer: Mapping[str, Any]) -> dict[str, Any]:
        rank, config = rank_in_server(self.parallel_config), config_in_files(self.model_config)
        part = get_tp_group().rank_in_group
        if self.parallel_config.enable_eplb:  # experts move between ranks, so no rank needs the same ones twice
            self._wants.forget()
        with self._wants.learning(offer, rank, variable(TOKEN_VARIABLE)) as (delivery, reads):
            if isinstance(delivery.payload, AdapterTensors):
                raise WeightSyncError("an adapter was offered where whole weights are taken in")
            names: list[str] = []
            try:
                with disable_mtp_completeness_check():
                    weights = _noting(as_in_files(config, watched(delivery, reads)), names)
                    self.model.load_weights(as_loaders_want(self.model, config, weights, part))
            except (ValueError, KeyError, AssertionError, RuntimeError, AttributeError, IndexError) as error:
                if isinstance(error, WeightSyncError) or not names:
                    raise
                raise WeightSyncError(f"{names[-1]!r} does not fit the model: {one_line(error)}") from error
            if gaps := unfilled(self.model):
                raise WeightSyncError(_not_sent(gaps, names, config))
            if lost := lost_biases(reads):
                raise WeightSyncError(f"vLLM's model has no place for {listing(lost)}, which its loader left out")
        return receipt(delivery, rank)


def quantised_layers(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the layers that vLLM quantises when their weights are complete, with their names."""
    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, QuantizeMethodBase) and not type(method).__name__.startswith("Unquantized"):
            yield name, layer


def rank_in_server(parallel: Any) -> int:
    """This worker's number in the whole server; vLLM's own numbers begin at 0 in each data parallel rank."""
    return int(parallel.data_parallel_rank * parallel.world_size + parallel.rank)


def config_in_files(model_config: Any) -> Any:
    """Return the model's config as its files have it: vLLM changes its own copy (DeepSeek's positions)."""
    trusted = model_config.trust_remote_code
    return AutoConfig.from_pretrained(model_config.model, revision=model_config.revision, trust_remote_code=trusted)


def _noting(weights: Iterable[tuple[str, torch.Tensor]], names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors and collect `names`. vLLM keeps tensors until their layer is complete, so each owns its memory."""
    for name, tensor in weights:
        names.append(name)
        yield name, tensor


def unfilled(model: torch.nn.Module) -> list[str]:
    """List modules whose parameters got too few elements since `initialize_layerwise_reload`, by vLLM's names.

    In such a case vLLM silently restores the old weights, for example of a tied head that was not sent.
    """
    found = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load() or is_deferred_attention_layer(layer):
            continue  # complete and packed; or attention scales, which checkpoints may omit
        if info.load_numel < _loadable(layer):
            found.append(name)
    return found


def put_back(model: torch.nn.Module, config: Any) -> None:
    """End a failed update: incomplete layers get their old tensors back.

    The model is then partly new and must not serve, but it can begin the next update.
    """
    for layer in model.modules():
        info = get_layerwise_info(layer)
        info.loaded_weights.clear()  # tensors that do not fit would fail again
        info.load_numel = 0
    finalize_layerwise_reload(model, config)
    put_cpu_kernels_back(model)


def _loadable(layer: torch.nn.Module) -> int:
    """Count the elements of a layer's parameters that a checkpoint has: vLLM pads vocabularies and shards layers."""
    total = 0
    for name, parameter in layer._parameters.items():
        if parameter is None or name in SKIP_LOAD_TENSORS:
            continue
        elements = get_tensor_load_numel(parameter)
        if isinstance(layer, VocabParallelEmbedding) and parameter.dim() > 0:
            shard = layer.shard_indices
            rows = shard.num_org_elements + shard.num_added_elements
            elements = parameter[0].numel() * rows
        total += elements
    return total


def _not_sent(gaps: list[str], names: list[str], config: Any) -> str:
    """Name the missing tensors, by the names in the files if transformers has the model."""
    known = set(checkpoint_shapes(config))
    missing = sorted(known - set(names)) if set(names) <= known else []
    if missing:
        return f"not sent: {listing(missing)}"
    return f"not sent, or not in full: weights of vLLM's {listing(gaps)}"


# ------------------------------------------------------------------------------------------------------- adapters


class HoneWorker:
    """Methods that vLLM adds to its workers, for `/collective_rpc`. Arguments and results are JSON values."""

    rank: int
    vllm_config: Any
    model_runner: Any
    weight_transfer_engine: Any
    _weight_update_active: bool

    def hone_enter_pipeline(self) -> None:
        """Prepare this worker for requests if it is a later stage of a pipeline."""
        if current_platform.is_cpu() and not get_pp_group().is_first_rank:
            make_room_between_stages(self.model_runner)

    def hone_abandon(self) -> None:
        """End an update whose caller went away, so that another can begin."""
        if self._weight_update_active:
            put_back(self.model_runner.get_model(), self.model_runner.model_config)
            self._weight_update_active = False

    def hone_receipt(self) -> dict[str, Any]:
        """Return the receipt of this worker's last update, or its error."""
        receipt: dict[str, Any] = self.weight_transfer_engine.receipt
        return receipt

    def hone_note_receipt(self) -> None:
        """Write this worker's receipt into the server's folder: vLLM returns only one data parallel rank's receipts."""
        number = rank_in_server(self.vllm_config.parallel_config)
        _noted_receipt(number).write_text(json.dumps(self.hone_receipt()), encoding="utf-8")

    def hone_noted_receipts(self) -> list[dict[str, Any]]:
        """Return what this worker and the same-numbered workers of the other data parallel ranks have written."""
        parallel = self.vllm_config.parallel_config
        numbers = [self.rank + data * parallel.world_size for data in range(parallel.data_parallel_size)]
        return [json.loads(_noted_receipt(number).read_text(encoding="utf-8")) for number in numbers]

    def hone_receive_adapter(self, offer: dict[str, Any], folder: str) -> dict[str, Any]:
        """Receive a LoRA adapter; the first worker writes it to `folder`, from where vLLM loads it."""
        try:
            with receive(offer, self.rank, variable(TOKEN_VARIABLE)) as delivery:
                if not isinstance(delivery.payload, AdapterTensors):
                    raise WeightSyncError("whole weights were offered where an adapter is taken in")
                tensors = {name: tensor.cpu().contiguous() for name, tensor in delivery}
                if self.rank == 0:
                    _write_adapter(Path(folder), tensors, delivery.payload.config)
            return receipt(delivery, self.rank)
        except (WeightSyncError, OSError, ValueError, TypeError) as error:
            return {"error": one_line(error)}

    def hone_try_adapter(self, folder: str) -> dict[str, Any]:
        """Check that vLLM would load the adapter in `folder`: known modules, and a rank that fits. Returns its digest.

        The digest is of the tensors as this worker reads them.
        """
        request = LoRARequest("trial", TRIAL, folder)
        try:
            self.model_runner.lora_manager._load_adapter(request)
            return {"digest": digest_tensors(load_file(Path(folder) / ADAPTER_FILE).items())}
        except Exception as error:  # noqa: BLE001  see HoneTransferEngine.receive_weights
            return {"error": one_line(error)}

    def hone_reload_adapter(self, number: int, folder: str) -> dict[str, Any]:
        """Replace adapter `number` by the one in `folder`, for running requests too.

        vLLM's own `load_inplace` would read the files again at every step of every request.
        """
        try:
            self.model_runner.add_lora(LoRARequest(f"adapter {number}", number, folder, load_inplace=True))
        except Exception as error:  # noqa: BLE001  see HoneTransferEngine.receive_weights
            return {"error": one_line(error)}
        return {}

    def hone_forget_adapter(self, number: int) -> None:
        """Free the place of an adapter; vLLM's own way takes it from the names that requests may use only."""
        self.model_runner.remove_lora(number)

    def hone_check_adapter(self, number: int) -> dict[str, Any]:
        """Find the layers of an adapter (0: the newest) that this worker does not have: vLLM silently drops them.

        A worker of a pipeline has the layers of its stage only.
        """
        manager = self.model_runner.lora_manager._adapter_manager
        number = number or max(manager.list_adapters(), default=0)
        adapter = manager.get_adapter(number)
        layers = [] if adapter is None else sorted(adapter.loras)
        if not layers:
            return {"number": number, "error": "the adapter is bound to no layer of the model"}
        return {"number": number, "unbound": [name for name in layers if name not in manager.modules]}


def _noted_receipt(number: int) -> Path:
    return Path(variable(FOLDER)) / f"receipt-{number}"


def _write_adapter(folder: Path, tensors: dict[str, torch.Tensor], config: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / ADAPTER_FILE)
    (folder / "adapter_config.json").write_text(json.dumps(dict(config)), encoding="utf-8")


WeightTransferEngineFactory.register_engine(BACKEND, HoneTransferEngine)
