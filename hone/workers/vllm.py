"""What runs inside vLLM's own processes: the guard of its doors, and the receiving end of the weight sync.

    API server   `--middleware hone.workers.vllm.ControlGuard`       no path without the run's token
    each worker  `--worker-extension-cls hone.workers.vllm.HoneWorker`
                 `--weight-transfer-config {"backend": "hone"}`      -> HoneTransferEngine
                     start: layers go back to the form of a checkpoint
                     update: offer --> hone.weights.door --> (name, tensor)* --> model.load_weights, layer by layer
                     finish: layers are packed again for the kernels
                     receipt: digest of what came in; refused unless every parameter of the model was filled

Imported by vLLM's Python, which has hone's package folder on its path and nothing else of hone's environment.
Tested with vLLM 0.32.0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler

from hone.models.checkpoint_names import as_in_files
from hone.rollout.guard import App, TokenGuard, same_token
from hone.rollout.keeper import die_with_parent
from hone.weights.base import Adapter, WeightSyncError
from hone.weights.door import Delivery, receive
from hone.workers.inside import (
    TOKEN_VARIABLE,
    checkpoint_shapes,
    listing,
    lost_biases,
    one_line,
    receipt,
    variable,
    watched,
)
from hone.workers.vllm_patches import as_loaders_want, expand_batch_to_tokens, pack_cpu_experts_again

BACKEND = "hone"
TRIAL = 2**30  # a number that no adapter has


class ControlGuard(TokenGuard):
    """ASGI middleware in front of every path of vLLM's server, `/v1`, `/health` and `/metrics` included.

    vLLM's own `--api-key` leaves the weight, pause and RPC paths open.
    """

    def __init__(self, app: App) -> None:
        token = variable(TOKEN_VARIABLE)
        super().__init__(app, lambda shown: same_token(shown, token))


# ------------------------------------------------------------------------------------------------- weight transfer


@dataclass
class HoneInit(WeightTransferInitInfo):
    """Nothing is agreed on beforehand: each offer says all."""


@dataclass
class HoneUpdate(WeightTransferUpdateInfo):
    """One sync: what `hone.weights.base.Offer.to_json` gave."""

    offer: dict[str, Any]


class HoneTransferEngine(WeightTransferEngine[HoneInit, HoneUpdate]):
    """vLLM's weight-transfer backend "hone", one in each worker."""

    init_info_cls = HoneInit
    update_info_cls = HoneUpdate
    supports_draft_weight_update = False

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        die_with_parent()
        if current_platform.is_cpu():
            rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
        self.receipt: dict[str, Any] = {"error": "no weights were received"}

    def init_transfer_engine(self, init_info: HoneInit) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        self.receipt = {"error": "the update was begun, and no weights came"}
        pack_cpu_experts_again(self.model)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: HoneUpdate) -> None:
        """Take in everything that the offer's sender sends; what goes wrong is in the receipt, which the caller reads.

        Nothing is raised: of several workers that raise, vLLM's executor reads the first reply only, and takes the
        others for replies to later calls.
        """
        try:
            self.receipt = self._take_in(update_info.offer)
        except Exception as error:  # noqa: BLE001  whatever it is, the receipt says it
            self.receipt = {"error": one_line(error)}
            put_back(self.model, self.model_config)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing is kept between two syncs."""

    def _take_in(self, offer: Mapping[str, Any]) -> dict[str, Any]:
        rank, config = self.parallel_config.rank, config_in_files(self.model_config)
        with receive(offer, rank, variable(TOKEN_VARIABLE)) as delivery:
            if isinstance(delivery.payload, Adapter):
                raise WeightSyncError("an adapter was offered where whole weights are taken in")
            names: list[str] = []
            read: dict[str, bool] = {}
            try:
                with disable_mtp_completeness_check():
                    weights = as_in_files(config, _noting(delivery, names))
                    self.model.load_weights(watched(as_loaders_want(self.model, config, weights, rank), read))
            except (ValueError, KeyError, AssertionError, RuntimeError, AttributeError, IndexError) as error:
                if isinstance(error, WeightSyncError) or not names:
                    raise
                raise WeightSyncError(f"{names[-1]!r} does not fit the model: {one_line(error)}") from error
            if gaps := unfilled(self.model):
                raise WeightSyncError(_not_sent(gaps, names, config))
            if lost := lost_biases(read):
                raise WeightSyncError(f"vLLM's model has no place for {listing(lost)}, which its loader left out")
        return receipt(delivery, rank)


def config_in_files(model_config: Any) -> Any:
    """The model's transformers config as its files have it: vLLM changes its own copy (DeepSeek's positions)."""
    trusted = model_config.trust_remote_code
    return AutoConfig.from_pretrained(model_config.model, revision=model_config.revision, trust_remote_code=trusted)


def _noting(delivery: Delivery, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The delivery's tensors; `names` says which were asked for. vLLM keeps them until their layer is whole, so each
    owns its memory."""
    for name, tensor in delivery:
        names.append(name)
        yield name, tensor


def unfilled(model: torch.nn.Module) -> list[str]:
    """Modules with a parameter that got too few elements since `initialize_layerwise_reload`, by their name in vLLM.

    vLLM itself puts the old weights back in such a case: a tied head that was not sent, for example, stays stale.
    """
    found = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load() or is_deferred_attention_layer(layer):
            continue  # whole, and packed already; or scales of an attention layer, which no checkpoint has to have
        if info.load_numel < _loadable(layer):
            found.append(name)
    return found


def put_back(model: torch.nn.Module, config: Any) -> None:
    """End an update that failed: layers that are not whole get their old tensors again.

    The model is then partly new, so it serves nothing; but it can begin the next update.
    """
    for layer in model.modules():
        info = get_layerwise_info(layer)
        info.loaded_weights.clear()  # what does not fit would fail again
        info.load_numel = 0
    finalize_layerwise_reload(model, config)


def _loadable(layer: torch.nn.Module) -> int:
    """Elements of a layer's parameters that a checkpoint has: vocabularies are padded, and sharded over ranks."""
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
    """Which tensors were missing: by their names in Hugging Face's model, where it has one."""
    known = set(checkpoint_shapes(config))
    missing = sorted(known - set(names)) if set(names) <= known else []
    if missing:
        return f"not sent: {listing(missing)}"
    return f"not sent, or not in full: weights of vLLM's {listing(gaps)}"


# ------------------------------------------------------------------------------------------------------- adapters


class HoneWorker:
    """Methods that vLLM adds to its workers, for `/collective_rpc`. JSON values in and out."""

    rank: int
    model_runner: Any
    weight_transfer_engine: Any
    _weight_update_active: bool

    def hone_abandon(self) -> None:
        """End an update that was begun and never finished (its caller went away), so that another can begin."""
        if self._weight_update_active:
            put_back(self.model_runner.get_model(), self.model_runner.model_config)
            self._weight_update_active = False

    def hone_receipt(self) -> dict[str, Any]:
        """What the last update brought to this worker, or its error."""
        receipt: dict[str, Any] = self.weight_transfer_engine.receipt
        return receipt

    def hone_receive_adapter(self, offer: dict[str, Any], folder: str) -> dict[str, Any]:
        """Take in a LoRA adapter; the first worker writes it to `folder`, from where vLLM loads it."""
        try:
            with receive(offer, self.rank, variable(TOKEN_VARIABLE)) as delivery:
                if not isinstance(delivery.payload, Adapter):
                    raise WeightSyncError("whole weights were offered where an adapter is taken in")
                tensors = {name: tensor.cpu().contiguous() for name, tensor in delivery}
                if self.rank == 0:
                    _write_adapter(Path(folder), tensors, delivery.payload.config)
            return receipt(delivery, self.rank)
        except (WeightSyncError, OSError, ValueError, TypeError) as error:
            return {"error": one_line(error)}

    def hone_try_adapter(self, folder: str) -> dict[str, Any]:
        """Whether vLLM would load the adapter in `folder`: the right modules, a rank it has room for."""
        request = LoRARequest("trial", TRIAL, folder)
        try:
            self.model_runner.lora_manager._load_adapter(request)
        except Exception as error:  # noqa: BLE001  see HoneTransferEngine.receive_weights
            return {"error": one_line(error)}
        return {}

    def hone_reload_adapter(self, number: int, folder: str) -> dict[str, Any]:
        """Put the adapter in `folder` in the place of adapter `number`, for running requests too.

        vLLM's own `load_inplace` path would read the files again at every step of every request.
        """
        try:
            self.model_runner.add_lora(LoRARequest(f"adapter {number}", number, folder, load_inplace=True))
        except Exception as error:  # noqa: BLE001  see HoneTransferEngine.receive_weights
            return {"error": one_line(error)}
        return {}

    def hone_check_adapter(self, number: int) -> dict[str, Any]:
        """Whether every tensor of an adapter (0: of the newest) belongs to a layer of this model: vLLM drops the others
        in silence."""
        manager = self.model_runner.lora_manager._adapter_manager
        number = number or max(manager.list_adapters(), default=0)
        adapter = manager.get_adapter(number)
        layers = [] if adapter is None else sorted(adapter.loras)
        unbound = [name for name in layers if name not in manager.modules]
        if unbound:
            are = "is" if len(unbound) == 1 else "are"
            return {"error": f"the adapter's {listing(unbound)} {are} not in the model"}
        if not layers:
            return {"error": "the adapter is bound to no layer of the model"}
        return {"number": number, "layers": len(layers)}


def _write_adapter(folder: Path, tensors: dict[str, torch.Tensor], config: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(dict(config)), encoding="utf-8")


WeightTransferEngineFactory.register_engine(BACKEND, HoneTransferEngine)
