"""The meshes and models of the contract suite, and what a rank does with an engine of any backend.

Batches, losses and what is done with one engine are those of `hone.testing.training`.
"""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from transformers import GptOssConfig

from hone.engines.registry import EngineRegistry
from hone.engines.settings import EngineConfig, OptimizerConfig
from hone.models.settings import BuildConfig, ModelConfig
from hone.testing import training
from hone.testing.training import (  # noqa: F401  the tests of meshes have them from here
    CAP,
    LENGTHS,
    LOSSES,
    SIZES,
    make_batch,
    nothing_finite,
    own_part,
    policy,
    scores,
    train,
    values,
    weights,
)

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
    return training.save_model(BuildConfig(**{**sizes, "options": {**sizes.get("options", {}), **options}}), folder)


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
