"""The meshes and models of the contract suite, and what a rank does with an engine of any backend.

Every function here uses the verbs of `BaseEngine` only. Batches have pad tokens inside of their rows, and sequences
that share a prompt.
"""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import GptOssConfig

from hone.data.packing import Sample, balanced, pack_samples, select, sequence_costs
from hone.engines.registry import EngineRegistry
from hone.engines.settings import EngineConfig, OptimizerConfig
from hone.models.loading import load_language_model, without_progress_bars
from hone.models.precision import state_buffers
from hone.models.settings import BuildConfig, ModelConfig
from hone.models.tokenizer import build_tokenizer
from hone.types import LossOutput

SIZES = {"hidden_size": 32, "layers": 4, "heads": 4, "kv_heads": 2, "mlp_size": 48, "max_positions": 64}
MODELS = {
    "qwen3": {"options": {"head_dim": 16}},
    "qwen3-untied": {"architecture": "qwen3", "tie_embeddings": False},
    "llama": {
        "architecture": "llama",
        "tie_embeddings": False,
        "options": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    },
    "qwen2": {"architecture": "qwen2"},
    "mistral": {"architecture": "mistral", "tie_embeddings": False, "options": {"sliding_window": 6}},
}
MIXTURES = {
    "qwen3_moe": {
        "architecture": "qwen3_moe",
        "options": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True},
    },
    "qwen3_moe-unnormalised": {
        "architecture": "qwen3_moe",
        "tie_embeddings": False,
        "options": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": False},
    },
}
FAMILIES = {
    "mixtral": {"architecture": "mixtral", "options": {"num_local_experts": 4, "num_experts_per_tok": 2}},
    "qwen2_moe": {
        "architecture": "qwen2_moe",
        "options": {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
        },
    },
    "glm4_moe": {
        "architecture": "glm4_moe",
        "tie_embeddings": False,
        "options": {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    },
    "glm4_moe-tied": {
        "architecture": "glm4_moe",
        "options": {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 3,
            "n_shared_experts": 2,
            "n_group": 1,
            "topk_group": 1,
        },
    },
    "deepseek_v3": {
        "architecture": "deepseek_v3",
        "tie_embeddings": False,
        "kv_heads": 4,
        "options": {
            "q_lora_rank": 12,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 6,
            "v_head_dim": 10,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 0.8,
            },
        },
    },
    "deepseek_v3-tied": {
        "architecture": "deepseek_v3",
        "kv_heads": 4,
        "options": {
            "q_lora_rank": None,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_group": 1,
            "topk_group": 1,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "first_k_dense_replace": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "gpt_oss": {
        "architecture": "gpt_oss",
        "tie_embeddings": False,
        "head_size": 16,
        "options": {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 6,
            **({"swiglu_limit": 0.5} if hasattr(GptOssConfig(), "swiglu_limit") else {}),  # since transformers 5.19
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        },
    },
}
"""Mixtures of experts of other architectures; some layers of the second GLM's pipeline stages have no experts."""
LENGTHS = (9, 7, 12, 7, 20, 8, 13)  # ragged: four micro-batches of at most 24 tokens for one rank, two for each of two
GROUPS = (0, 0, 0, 1, 2, 2, 3)
CAP = 24
PAD = 0


@dataclass(frozen=True)
class Mesh:
    """A backend, a number of ranks, and how the engine lies over them."""

    backend: str
    world: int
    parallel: dict = field(default_factory=dict)
    more: dict = field(default_factory=dict)  # other settings of the backend

    def __str__(self) -> str:
        settings = {**self.parallel, **self.more}
        return " ".join([self.backend, str(self.world), *(f"{key}={value}" for key, value in settings.items())])


def names_of(mesh):
    """The dense models, by name, that a mesh can train."""
    if mesh.more.get("models") == "automodel":
        return {"qwen3", "qwen3-untied", "value-qwen3"}
    return {*MODELS, "value"} - ({"mistral"} if mesh.backend == "veomni" else set())


def save_model(name, folder, **options):
    """Save a tiny model with random weights, norms and biases too, and its tokenizer; `options` change its config."""
    sizes = {**SIZES, **(MODELS | MIXTURES | FAMILIES)[name]}
    build = BuildConfig(**{**sizes, "options": {**sizes.get("options", {}), **options}})
    with without_progress_bars(), torch.random.fork_rng():
        torch.manual_seed(0)
        model = load_language_model(ModelConfig(build=build))
        with torch.no_grad():
            for weight in (*model.parameters(), *(buffer for _, buffer in state_buffers(model))):
                weight.add_(torch.randn_like(weight) * 0.1)
        model.save_pretrained(folder)
    build_tokenizer(build).save_pretrained(folder)
    return folder


def make_engine(
    mesh, folder, model_type="language_model", total_steps=100, model=None, optimizer=None, reference=None, **engine
):
    optimizer = {"lr": 1e-2, "options": {"eps": 1e-4}, "weight_decay": 0.1, **(optimizer or {})}
    backend = EngineRegistry.backends.settings(mesh.backend)(parallel=mesh.parallel or None, **mesh.more)
    config = EngineConfig(
        **{"compute_dtype": "float32", "max_tokens_per_microbatch": CAP, **engine},
        optimizer=OptimizerConfig(**optimizer),
        backend=backend,
    )
    spec = SimpleNamespace(
        model=ModelConfig(path=str(folder), **(model or {})),
        engine=config,
        model_type=model_type,
        temperature=0.9,
        total_steps=total_steps,
        reference=None if reference is None else ModelConfig(path=str(reference)),
        follows=False,
    )
    made = EngineRegistry.create(spec, SimpleNamespace(device="cpu", vendor="cpu"))
    made.initialize()
    return made


def make_batch(seed):
    """Seven sequences with a pad token in each; with an odd seed some are answers to one prompt."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(3, 104, (length,), generator=generator).tolist() for length in LENGTHS]
    groups = GROUPS if seed % 2 else range(len(LENGTHS))
    first = {group: tokens[i][:4] for i, group in reversed(list(enumerate(groups)))}
    samples = [
        Sample((*first[group], *row[4:-2], PAD, row[-1]), (0, 0) + (1,) * (len(row) - 2))
        for group, row in zip(groups, tokens, strict=True)
    ]
    batch = pack_samples(samples)
    return batch.with_(
        group_index=torch.tensor(list(groups)),
        loss_weights=torch.full((batch.num_tokens,), 1 / int(batch.loss_mask.sum())),
        advantages=torch.randn(batch.num_tokens, generator=generator),
    )


def policy(output, batch):
    """A clipped ratio to log-probs of another policy, and an entropy bonus."""
    ratio = (output.logprobs - output.logprobs.detach() * 1.01).exp()
    clipped = torch.maximum(-batch.advantages * ratio, -batch.advantages * ratio.clamp(0.8, 1.2))
    return LossOutput(clipped - 0.01 * output.entropy, {"train/entropy": output.entropy.detach()})


policy.needs = frozenset({"entropy"})


def values(output, batch):
    return LossOutput((output.values - batch.advantages) ** 2)


def nothing_finite(output, batch):
    return LossOutput(output.logprobs * float("nan"))


LOSSES = {"language_model": policy, "value_model": values}


def own_part(engine, batch):
    return balanced(sequence_costs(batch), engine.ranks.data_parallel_size)[engine.ranks.data_parallel_rank]


def train(engine, steps=range(2)):
    """Metrics of some steps: losses as this rank's part of a sum. The second one has an optimizer's state already."""
    loss, first = LOSSES[engine.model_type], engine.ranks.is_output_rank
    found = []
    for seed in steps:
        batch = make_batch(seed)
        metrics = engine.train_batch(select(batch, own_part(engine, batch)), loss)
        found.append([metrics["train/loss"].value if first else 0.0, metrics["train/grad_norm"].value])
    return found


def scores(engine, seed=9):
    """Log-probs or values by sequence, of the sequences that this rank answers for."""
    batch = make_batch(seed)
    indices = own_part(engine, batch)
    output = engine.infer_batch(select(batch, indices), LOSSES[engine.model_type].__dict__.get("needs", frozenset()))
    if not engine.ranks.is_output_rank:
        return {}
    score = output.logprobs if output.logprobs is not None else output.values
    parts = score.split([LENGTHS[i] for i in indices])
    return {f"score {i}": part for i, part in zip(indices, parts, strict=True)}


def weights(engine):
    return dict(engine.get_per_tensor_param()[0])


def train_models(mesh, cases):
    """For each (name, folder, settings): scores, two steps, and the weights after them."""
    found = {}
    for name, folder, settings in cases:
        engine = make_engine(mesh, folder, **settings)
        before = scores(engine)
        steps = train(engine)
        found |= {f"{name}/{key}": value for key, value in {**before, "steps": steps, **weights(engine)}.items()}
    return found


def carry_on(mesh, folder, load, save, settings):
    """Load a checkpoint, save it again, export it, and train one more step."""
    engine = make_engine(mesh, folder, **settings)
    if load:
        engine.load_checkpoint(Path(load))
    else:
        train(engine, range(2))
    engine.save_checkpoint(Path(save))
    engine.export_hf(Path(save) / "export")
    saved = {f"saved/{name}": one for name, one in weights(engine).items()}
    steps = train(engine, [5])
    return {**saved, "steps": steps, **weights(engine)}
