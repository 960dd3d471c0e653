"""Ranks that shard a model hold the weights that one process holds, also where the files have them in several parts."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen3ForCausalLM

from hone.data.packing import select
from hone.engines.fsdp2.settings import Fsdp2Settings, ParallelConfig
from hone.engines.settings import EngineConfig, LoraConfig
from hone.models import transformers_patches
from hone.models.loading import load_language_model
from hone.models.settings import BuildConfig, ModelConfig
from hone.models.tokenizer import load_tokenizer
from hone.runtime import ranks
from hone.workers.train import TrainSpec, TrainWorker
from tests.families.checks import CLOSE, ROUNDED, likelihood, make_batch, make_engine
from tests.families.types import save_tiny
from tests.ranks import run_ranks

JOINED = ("kimi_linear", "olmo_hybrid")  # one convolution here, three in the files
OTHER = ("qwen3_5_moe_text",)  # stacked experts
MAY_BE_TRANSPOSED = "qwen3_vl_moe"  # experts: as it is published, and not as transformers saves it
COMPUTED = "falcon_h1"  # its layers' multipliers are in no file: the model computes them
SHARED = "zamba2"  # layers share the weights of a block, and have other layers inside
WIDE_HEAD = "hy_v4"  # whose head, and parts of whose layers, stay in float32
WIDE_STATE = "olmo_hybrid"  # whose rate of decay is read in float32 whatever the model's dtype
STORED = {
    f"{COMPUTED} float32": {"compute_dtype": "float32"},
    f"{SHARED} float32": {"compute_dtype": "float32"},
    f"{SHARED} mixed": {"compute_dtype": "bfloat16"},
    f"{WIDE_HEAD} mixed": {"compute_dtype": "bfloat16"},
    f"{WIDE_HEAD} adapter": {"compute_dtype": "bfloat16", "lora": LoraConfig(rank=2)},
    f"{WIDE_STATE} bfloat16": {"compute_dtype": "bfloat16", "dtype": "bfloat16"},
}
TEXT = {
    "vocab_size": 400,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "moe_intermediate_size": 12,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
TOWER = {
    "hidden_size": 16,
    "depth": 2,
    "num_heads": 2,
    "intermediate_size": 24,
    "patch_size": 4,
    "out_hidden_size": 32,
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
}
MARKS = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}


def save_vision(folder, published):
    """A tiny Qwen3-VL-MoE; experts of the published files are [experts, inputs, outputs]."""
    config = AutoConfig.for_model(MAY_BE_TRANSPOSED, text_config=TEXT, vision_config=TOWER, **MARKS)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    load_tokenizer(ModelConfig(build=BuildConfig())).save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if published:
        tensors |= {name: one.transpose(1, 2).contiguous() for name, one in tensors.items() if ".experts." in name}
    save_file(tensors, file, {"format": "pt"})
    return folder


def weights(folders, meshes):
    """Run by each rank."""
    return {
        f"{name} {mesh} {key}": one
        for mesh, names in meshes.items()
        for name in names
        for key, one in _engine(folders[name], mesh).get_per_tensor_param()[0]
    }


def _engine(folder, mesh="shard"):
    parallel = ParallelConfig(tensor=2) if mesh == "tensor" and ranks.ranks() > 1 else ParallelConfig()
    return make_engine(folder, backend=Fsdp2Settings(parallel=parallel))


def of_ranks(folders, meshes):
    """Run by each rank: the weights, those that transformers alone reads, and bytes that no shard needs."""
    found, engine = weights(folders, meshes), _engine(folders["olmo_hybrid"])
    shards = {name: one.to_local() for name, one in engine.model.named_parameters() if "conv1d" in name}
    spare = sum(one.untyped_storage().nbytes() - one.nbytes for one in shards.values())
    joins = transformers_patches.convert_first
    transformers_patches.convert_first = lambda model, tensors, mapping: (tensors, mapping)
    try:
        unjoined = dict(_engine(folders["olmo_hybrid"]).get_per_tensor_param()[0])
    finally:
        transformers_patches.convert_first = joins
    return {**found, **{f"unjoined {name}": one for name, one in unjoined.items()}, "spare": (len(shards), spare)}


@pytest.mark.slow
def test_ranks_hold_the_weights_of_one_process(tmp_path):
    vision = ("published", "saved")
    meshes = {"shard": (*JOINED, *OTHER, *vision), "tensor": vision}
    folders = {name: str(save_tiny(name, tmp_path / name)) for name in (*JOINED, *OTHER)}
    folders |= {name: str(save_vision(tmp_path / name, published=name == "published")) for name in vision}
    alone = weights(folders, meshes)
    joined = [key for key in alone if key.endswith("conv1d.weight")]
    assert len(joined) >= len(JOINED)
    for rank in run_ranks(2, of_ranks, folders, meshes):
        count, spare = rank["spare"]
        assert (count > 0, spare) == (True, 0)
        assert alone.keys() <= rank.keys()
        assert [key for key, one in alone.items() if not torch.equal(rank[key], one)] == []
        # once these are right, transformers converts before it cuts, and `convert_first` can go
        unjoined = [key for key in rank if key.startswith("unjoined ")]
        assert any(
            not torch.equal(alone[key.replace("unjoined", "olmo_hybrid shard", 1)], rank[key]) for key in unjoined
        )


def scores(folders):
    """Run by each rank: weights and log-probs of engines that store and compute in several dtypes."""
    found = {}
    for way, settings in STORED.items():
        settings = dict(settings)
        model = ModelConfig(path=folders[way.split()[0]], dtype=settings.pop("dtype", "float32"))
        worker = TrainWorker(TrainSpec(model, EngineConfig(**settings), "language_model", total_steps=1))
        worker.initialize()
        found |= {f"{way} weights {key}": one for key, one in worker.engine.get_per_tensor_param()[0]}
        batch, size = make_batch(0), worker.engine.ranks.data_parallel_size
        found[f"{way} logprobs"] = worker.engine.infer_batch(batch).logprobs
        part = select(batch, [[0, 1, 2, 3, 4], [5]][worker.engine.ranks.data_parallel_rank] if size == 2 else range(6))
        worker.engine.train_batch(part, likelihood)
        found[f"{way} logprobs, trained"] = worker.engine.infer_batch(batch).logprobs
    return found


@pytest.mark.ci
@pytest.mark.slow
def test_ranks_store_and_compute_as_one_process_does(tmp_path):
    kinds = {way.split()[0] for way in STORED}
    folders = {kind: str(save_tiny(kind, tmp_path / kind)) for kind in kinds}
    alone = scores(folders)
    assert alone[f"{WIDE_HEAD} mixed weights lm_head.weight"].dtype == torch.float32
    for rank in run_ranks(2, scores, folders):
        for key, one in alone.items():
            if " weights " in key:
                assert (key, rank[key].dtype) == (key, one.dtype)
                assert torch.equal(rank[key], one), key
            else:
                limit = CLOSE if "float32" in key else ROUNDED
                assert float((rank[key] - one).abs().mean()) <= limit, key


def test_a_class_of_another_package_is_read_in_shards(tmp_path):
    """Such as VeOmni's: a class of one architecture, not one of transformers' Auto classes."""
    seen = []
    folder = ModelConfig(path=str(save_tiny("qwen3", tmp_path / "model")))
    model = load_language_model(folder, seen.append, class_of=lambda kind: Qwen3ForCausalLM)
    assert isinstance(model, Qwen3ForCausalLM)
    assert len(seen) == 1
