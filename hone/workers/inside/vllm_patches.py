"""Patches of vLLM 0.32, each with its reason and when it can be removed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

Named = tuple[str, torch.Tensor]
Routing = Callable[..., tuple[torch.Tensor, torch.Tensor]]  # hidden states and router logits -> weights, experts


def name_loaders(model: torch.nn.Module) -> None:
    """Name weight loaders that are partial functions (MiniMax-M2's norms), before a layerwise reload.

    `_wrap_parameters_weight_loader` reads the name of each loader. Remove this when it compares functions.
    Upstream: https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/model_loader/reload/layerwise.py
    """
    for weight in model.parameters():
        loader = getattr(weight, "weight_loader", None)
        if isinstance(loader, functools.partial):
            vars(loader)["__name__"] = loader.func.__name__  # no more, or its signature would be the function's


def pack_cpu_experts_again(model: torch.nn.Module) -> None:
    """Make vLLM pack the experts of a model on a CPU again when the weights of an update are complete.

    vLLM packs them only when it creates the kernel, and keeps the kernel over updates, so new weights stay unpacked
    but are read as packed. Remove this when `UnquantizedFusedMoEMethod._setup_kernel` packs updated weights.
    Upstream: https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/fused_moe/unquantized_fused_moe_method.py
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None and _on_cpu(module):
            method.hone_old_kernel, method.moe_kernel = method.moe_kernel, None  # type: ignore[union-attr]


def put_cpu_kernels_back(model: torch.nn.Module) -> None:
    """After a failed update, give experts that kept their old weights their old kernel.

    With several data parallel ranks, vLLM computes a batch without requests before it pauses for the next update.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "hone_old_kernel", None) is not None and method.moe_kernel is None:  # type: ignore[union-attr]
            method.moe_kernel = method.hone_old_kernel  # type: ignore[union-attr]


def copy_convolutions(model: torch.nn.Module) -> None:
    """Give Mamba 2's layers the convolutions of an update.

    On a CPU with instructions for bfloat16, vLLM packs a convolution's weights into new memory when they are complete.
    The layer reads a view of the memory before that, so it keeps the weights with which the server started. Remove this
    when `MambaMixer2` reads its convolution's weights at each forward.
    Upstream: https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/mamba/mamba_mixer2.py
    """
    for module in model.modules():
        held = getattr(module, "conv_weights", None)
        unpacked = getattr(getattr(module, "conv1d", None), "_cpu_unpacked_conv_weight", None)
        if held is not None and unpacked is not None:
            held.copy_(unpacked)


def _on_cpu(module: torch.nn.Module) -> bool:
    return all(weight.device.type in ("cpu", "meta") for weight in module.parameters())


def allow_amx() -> None:
    """Ask the operating system for permission to use the CPU's matrix tiles (AMX), where it has them.

    vLLM's attention uses them in bfloat16 and asks for nothing. A process that no other library asked for dies in its
    first request (SIGILL). Remove this when the kernels of `vllm/v1/attention/backends/cpu_attn.py` ask.
    """
    torch.cpu._init_amx()


def add_bias_to_choice(compute: Routing) -> Routing:
    """Wrap `CPURouter._compute_routing`: experts are chosen by softmax or sigmoid plus the bias, weights have none.

    vLLM's router for CPUs ignores the bias of a softmax router without groups (ERNIE 4.5 MoE), and so chooses other
    experts than on a GPU; it has no sigmoid router without groups (MiniMax-M2). Remove this when `CPURouter` reads
    `e_score_correction_bias` and computes sigmoids there.
    Upstream: https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/fused_moe/router/cpu_router.py
    """

    def route(
        router: Any, hidden: torch.Tensor, logits: torch.Tensor, *rest: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        plain = not (router.use_grouped_topk or router.custom_routing_function)
        bias, sigmoid = router.e_score_correction_bias, router.scoring_func == "sigmoid"
        if not (plain and (sigmoid or (router.scoring_func == "softmax" and bias is not None))):
            return compute(router, hidden, logits, *rest, **named)
        scores = logits.float().sigmoid() if sigmoid else logits.float().softmax(-1)
        chosen = (scores if bias is None else scores + bias).topk(router.top_k, -1).indices
        weights = scores.gather(-1, chosen)
        if router.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * router.routed_scaling_factor, chosen.to(torch.int32)

    return route


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Repeat each request's value for its proposed tokens: x [requests], their ends -> [num_tokens].

    On a CPU, vLLM's own function writes types other than int64 into a copy and returns uninitialised memory
    (temperatures and top-p of speculative decoding). Remove this when `_expand_kernel_impl` copies its result back.
    Upstream: https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/utils/cpu_triton_utils.py
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    found = x.repeat_interleave(counts, output_size=num_tokens)
    return found.masked_fill(found == replace_from, replace_to)


def make_room_between_stages(runner: Any) -> None:
    """Make the tensors into which a stage of a pipeline receives the previous stage's output.

    vLLM makes them in its warm-up, which it leaves out on a CPU if the KV cache has a set size; then every stage but
    the first fails at its first request. Remove this when `CPUModelRunner` makes them without a warm-up.
    Upstream: https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/worker/cpu_worker.py
    """
    if runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def gather_rows(
    communicator: Any, given: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
) -> torch.Tensor | list[torch.Tensor]:
    """Join the rows of all ranks, of which rank r has `sizes[r]`: [rows, ...] -> [sum(sizes), ...].

    vLLM has no such collective for CPUs, so a mixture fails with several data parallel ranks. Remove this and
    `scatter_rows` when `CpuCommunicator` has `all_gatherv` and `reduce_scatterv`.
    Upstream: https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/distributed/device_communicators/cpu_communicator.py
    """
    if isinstance(given, list):
        return [torch.cat(_of_all(communicator, one, sizes)) for one in given]
    return torch.cat(_of_all(communicator, given, sizes))


def _of_all(communicator: Any, rows: torch.Tensor, sizes: list[int] | None) -> list[torch.Tensor]:
    lengths = sizes or [len(rows)] * communicator.world_size
    longest = max(lengths)  # gloo gathers equal shapes only
    own = rows.new_zeros((longest, *rows.shape[1:]))
    own[: len(rows)] = rows
    found = [torch.empty_like(own) for _ in lengths]
    torch.distributed.all_gather(found, own, group=communicator.device_group)
    return [one[:length] for one, length in zip(found, lengths, strict=True)]


def scatter_rows(communicator: Any, rows: torch.Tensor, dim: int = 0, sizes: list[int] | None = None) -> torch.Tensor:
    """Sum the rows of all ranks, and return this rank's part: [sum(sizes), ...] -> [sizes[rank], ...]."""
    total, rank = rows.contiguous().clone(), communicator.rank_in_group
    torch.distributed.all_reduce(total, group=communicator.device_group)
    lengths = sizes or [len(rows) // communicator.world_size] * communicator.world_size
    return total.narrow(0, sum(lengths[:rank]), lengths[rank])


def rotate_by_token(rotate: Callable[..., None]) -> Callable[..., None]:
    """Wrap `_custom_ops.rotary_embedding`, which turns queries and keys in place.

    On a CPU, vLLM's kernel takes heads in a dimension of their own (LFM2, GLM-4.7-Flash) for tokens, and so turns them
    by positions of other tokens. Remove this when the kernel reads the stride of a token from the first dimension.
    Upstream: https://github.com/vllm-project/vllm/blob/v0.32.0/csrc/cpu/pos_encoding.cpp
    """

    def run(positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None, *rest: Any, **named: Any) -> None:
        flat = [one if one is None else one.flatten(1) for one in (query, key)]
        rotate(positions, *flat, *rest, **named)
        for one, turned in zip((query, key), flat, strict=True):
            if one is not None and turned is not None and turned.data_ptr() != one.data_ptr():  # parts of wider rows
                one.copy_(turned.view_as(one))

    return run


def lay_out_single_tokens(convolve: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap `_custom_ops.causal_conv1d_fwd_cpu`: x [channels, tokens], each token in one piece of memory.

    The kernel refuses a single token that is a slice of a wider row (Qwen3.5), whose stride `contiguous` leaves as it
    is, and the server ends. Remove this when the kernel does not read the stride of a dimension of length 1.
    Upstream: https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/mamba/ops/cpu/gdn_attention.py
    """

    def run(x: torch.Tensor, **named: Any) -> torch.Tensor:
        single = x.shape[-1] == 1
        return convolve(x=x.t().clone(memory_format=torch.contiguous_format).t() if single else x, **named)

    return run


def leave_prompts_without_head_adapters(add: Callable[..., None]) -> Callable[..., None]:
    """Wrap `PunicaWrapperCPU.add_lora_logits`, which adds the adapters of a head to logits y from hidden states x.

    Log-probs of a prompt are computed for its tokens alone, and vLLM takes the adapters of the batch's requests for it,
    by position: with more requests than one their number does not fit, and the engine ends. An adapter without a part
    for the head, as hone's are, adds nothing. Remove this when vLLM maps the prompt's tokens.
    Upstream: https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/lora/punica_wrapper/punica_cpu.py
    """

    def run(wrapper: Any, y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *rest: Any) -> None:
        if len(x) == len(wrapper.sampler_indices):
            add(wrapper, y, x, a, b, *rest)
        elif b.any():
            raise RuntimeError("an adapter on the head cannot be served together with log-probs of prompts on a CPU")

    return run


def give_layers_their_embeddings(model: Any) -> None:
    """Give each layer of a text-only Gemma 3n its embeddings of the tokens.

    vLLM computes them in its class for images and sound only, so that in `Gemma3nForCausalLM` every layer goes without
    and log-probs are wrong. Remove this when that class calls `get_per_layer_input_embeddings`.
    Upstream: https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/gemma3n.py
    """
    if type(model).__name__ != "Gemma3nForCausalLM":
        return
    forward, config = model.forward, model.config
    shape = (-1, config.num_hidden_layers, config.hidden_size_per_layer_input)

    def run(input_ids: torch.Tensor, positions: torch.Tensor, **named: Any) -> Any:
        named["per_layer_inputs"] = model.model.get_per_layer_input_embeddings(input_ids).view(shape)
        return forward(input_ids, positions, **named)

    model.forward = run


def as_loaders_want(model: torch.nn.Module, config: Any, weights: Iterable[Named], rank: int) -> Iterator[Named]:
    """Rearrange `weights` of a model's files so that `model.load_weights` uses the parameters' loaders for all.

    An update loses what vLLM copies without a loader, because parameters have no storage until their layer is complete.
    `rank` is this worker's tensor-parallel rank.
    """
    if config.model_type == "gpt_oss" and not hasattr(config, "quantization_config"):
        weights = _gpt_oss(model, weights, rank)
    tied = getattr(config, "tie_word_embeddings", False)
    headless = not any(name.endswith("lm_head") for name, _ in model.named_modules(remove_duplicate=False))
    for name, tensor in weights:
        if not (tied and headless and name == "lm_head.weight"):  # Gemma 2: the head is the embedding
            yield name, tensor


def _gpt_oss(model: torch.nn.Module, weights: Iterable[Named], rank: int) -> Iterator[Named]:
    """Yield experts one by one and pass sinks to their loader: vLLM copies fused experts and sinks without loaders.

    Remove this when `GptOssModel._load_weights_other` calls the loaders of all parameters.
    Upstream: https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/gpt_oss.py
    """
    held: dict[str, Any] = dict(model.named_parameters())
    for name, tensor in weights:
        before, experts, part = name.partition(".mlp.experts.")
        if experts:
            for number, expert in enumerate(tensor):
                yield f"{before}{experts}{number}.{part}", expert
        elif name.endswith(".self_attn.sinks"):
            sinks = held.get(name.replace(".self_attn.", ".attn."))
            if sinks is None:  # a layer of another pipeline stage
                continue
            heads = len(sinks)
            sinks.weight_loader(sinks, tensor.narrow(0, heads * rank, heads))
        else:
            yield name, tensor
