"""Patches on transformers (5.16 to 5.19), each with its purpose and when it can be removed."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel, masking_utils, modeling_utils
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.mixin import DistributedMixin

from hone.models.files.converted import convert_first

ShardFn = Callable[[Any], None]
"""Shards an empty model (on the meta device) in place."""

SearchFn = Callable[[Tensor], Tensor | None]


@contextmanager
def shard_while_loading(shard: ShardFn) -> Iterator[dict[str, Any]]:
    """Within the block, `from_pretrained(**yielded)` shards with `shard`, and each rank reads only its shards.

    transformers calls `maybe_distribute_model` on the empty model, and its loader reads only this rank's part of each
    DTensor. But its own meshes have no replica and no sequence dimension. Remove this when `from_pretrained` accepts a
    sharded model, or a function that shards it. The loader gets weights that are in several parts in the files as
    whole ones (`convert_first`); remove that when it converts before it cuts.
    Upstream: https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/distributed/mixin.py
    """

    def prepare(cls: type[Any], config: Any, device_mesh: Any = None, device_map: Any = None) -> tuple[Any, Any, None]:
        return config, device_map, None

    def distribute(cls: type[Any], model: Any, config: Any, mesh: Any) -> Any:
        shard(model)
        model.config.distributed_config = None  # transformers must not use its own meshes
        return model

    def load(model: Any, state_dict: Any, load_config: Any, disk_offload_index: Any = None) -> Any:
        changes = load_config.weight_mapping or []
        tensors, left = convert_first(model, state_dict, changes)
        found = loaded(model, tensors, replace(load_config, weight_mapping=left), disk_offload_index)
        model._weight_conversions = [one for one in changes if one.was_used()]  # to be reverted where it is saved
        return found

    loading: Any = modeling_utils
    loaded = loading.convert_and_load_state_dict_in_model
    names = ("prepare_distribute_model", "maybe_distribute_model")
    before = {name: DistributedMixin.__dict__[name] for name in names}
    patches: dict[str, Any] = {names[0]: classmethod(prepare), names[1]: classmethod(distribute)}
    for name, patch in patches.items():
        setattr(DistributedMixin, name, patch)
    loading.convert_and_load_state_dict_in_model = load
    try:
        yield {"distributed_config": DistributedConfig()}
    finally:
        loading.convert_and_load_state_dict_in_model = loaded
        for name, original in before.items():
            setattr(DistributedMixin, name, original)


@contextmanager
def loaded_weights_stay() -> Iterator[None]:
    """Within the block, `from_pretrained` computes what the files lack, and leaves modules whose weights it has read.

    transformers runs the initialisation of loaded modules, too, and trusts it to leave them alone: Youtu's sets the
    embedding of the padding token to 0. For classes outside of transformers, of which FSDP's are some, it passes over
    modules without weights, whose initialisation may fill buffers of their parts (Falcon-H1's multipliers). Remove this
    when neither is so.
    Upstream: https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/modeling_utils.py
    """

    def initialize(self: Any, module: nn.Module, is_custom_code: bool = False) -> None:
        cls = next(one for one in type(self).__mro__ if not issubclass(one, FSDPModule))
        holds = next(chain(module.parameters(recurse=False), module.buffers(recurse=False)), None) is not None
        initialized(self, module, is_custom_code=holds or not cls.__module__.startswith("transformers."))

    initialized = PreTrainedModel._initialize_weights
    PreTrainedModel._initialize_weights = initialize  # type: ignore[method-assign]
    try:
        yield
    finally:
        PreTrainedModel._initialize_weights = initialized  # type: ignore[method-assign]


def replace_search_for_packed_rows(replacement: Callable[[SearchFn], SearchFn]) -> None:
    """Replace what searches the position ids for the ends of packed sequences, in every forward of transformers.

    The search reads a value of the device, which makes the host wait for all queued work. Its result goes into a mask
    that packed attention does not use: hone knows the ends already. Remove this when the search reads nothing, or can
    be turned off.
    Upstream: https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/masking_utils.py
    """
    searched: Any = masking_utils
    searched.find_packed_sequence_indices = replacement(masking_utils.find_packed_sequence_indices)


def name_body(model: Any) -> None:
    """Let `model.base_model` of a language model be its body where the class names a part that it does not have.

    Llama 4's class names the part of the multimodal model that holds it (`language_model`), so that weights of such
    checkpoints are found; `base_model` is then the whole model. Remove this when the class names its own part.
    Upstream: https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/models/llama4/modeling_llama4.py
    """
    if model.base_model is model and model.get_output_embeddings() is not None:
        names = [name for name, part in model.named_children() if isinstance(part, PreTrainedModel)]
        model.base_model_prefix = names[0] if names else model.base_model_prefix


_STEP_LIMIT: ContextVar[tuple[float, float] | None] = ContextVar("hone_step_limit")


@contextmanager
def step_limit(limit: tuple[float, float] | None) -> Iterator[None]:
    """Within the block, layers of `limit_single_steps` keep the step sizes of single tokens between these bounds."""
    token = _STEP_LIMIT.set(limit)
    try:
        yield
    finally:
        _STEP_LIMIT.reset(token)


def limit_single_steps(layer: nn.Module) -> None:
    """Let Mamba 2 layers of this class limit the step size of a single token, as they do for whole sequences.

    transformers' forward of a whole sequence keeps the step size (dt) within the layer's `time_step_limit`; its update
    by a single token does not, so Nemotron-H and Zamba 2 decode other states than they train on. Remove this when the
    update takes `dt_limit`. Other layers stay as they are.
    Upstream: https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/models/mamba2/modeling_mamba2.py
    """
    home: Any = sys.modules[type(layer).__module__]
    update = getattr(home, "mamba2_selective_state_update", None)
    if update is None or hasattr(update, "limited_by_hone"):
        return

    @functools.wraps(update)
    def limited(
        state: Tensor, inputs: Tensor, dt: Tensor, *rest: Any, dt_bias: Tensor, dt_softplus: bool, **named: Any
    ) -> Any:
        limit = _STEP_LIMIT.get(None)
        if limit is not None and dt_softplus:
            # dt is one number per head, expanded: kernels look for its stride of 0, and for a bias
            step = F.softplus(dt[..., :1] + dt_bias[..., :1].to(dt.dtype)).clamp(*limit)
            dt, dt_softplus = step.expand_as(dt), False
            dt_bias = torch.zeros_like(dt_bias[..., :1]).expand_as(dt_bias)
        return update(state, inputs, dt, *rest, dt_bias=dt_bias, dt_softplus=dt_softplus, **named)

    limited.limited_by_hone = True  # type: ignore[attr-defined]
    home.mamba2_selective_state_update = limited
