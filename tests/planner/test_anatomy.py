"""What a model is, from its config and headers: counts of the loaded model, memory of a real engine."""

from types import SimpleNamespace

import pytest
import torch
from transformers import RecurrentGemmaConfig

from hone.data.packing import Sample, pack_samples
from hone.engines.fsdp2.engine import Fsdp2Engine
from hone.engines.settings import EngineConfig
from hone.models.attention.packed import packed
from hone.models.errors import ModelError
from hone.models.four_bit import FourBitLinear
from hone.models.loading import load_language_model, without_progress_bars
from hone.models.numerics.fused_norm import fuse_norms
from hone.models.settings import BuildConfig, ModelConfig
from hone.planner.anatomy import _from_config, examine
from hone.planner.memory import Layout, Role, kept_bytes_per_token, static
from hone.rollout.builtin.decoder import build_decoder
from hone.types import LossOutput
from tests.families.families import FAMILIES, save
from tests.families.types import save_tiny, tiny_config


def training_memory(anatomy, devices, lora_rank=0, four_bit=False):
    adapter = anatomy.lora_parameters(lora_rank) if lora_rank else 0
    return static(Role("actor", anatomy, adapter=adapter, four_bit=four_bit, layout=Layout(shard=devices)))


@pytest.mark.parametrize("name", ["Qwen2.5", "Qwen3-MoE", "DeepSeek-V3", "gpt-oss", "Mistral", "Gemma 3"])
def test_it_is_what_the_loaded_model_is(name, tmp_path):
    family = FAMILIES[name]
    save(family, tmp_path)
    found = examine(ModelConfig(path=str(tmp_path)))
    model = load_language_model(ModelConfig(path=str(tmp_path)))
    assert found.parameters == sum(one.numel() for one in model.parameters())
    assert (found.family, found.architecture) == (family.architecture, type(model).__name__)
    assert found.tied == model.config.tie_word_embeddings
    assert (found.files.count, found.files.dtype, found.files.head) == (1, "F32", "language model")
    assert bool(found.experts) == family.experts
    assert (found.active < found.parameters) == family.experts
    assert found.window == family.options.get("sliding_window", 0)
    (cache,) = build_decoder("generic", model.config, torch.float32, torch.device("cpu"), longest=64).cache_shapes
    assert {(one.kv_heads, one.key_size, one.value_size) for one in found.attention} == {
        (cache.kv_heads, cache.key_size, cache.value_size)
    }
    assert len(found.attention) == found.layers == cache.layers
    assert found.kv_bytes_per_token() == cache.layers * cache.kv_heads * (cache.key_size + cache.value_size) * 2


@pytest.mark.parametrize("kind", ["deepseek_v32", "diffllama", "gemma3n_text", "gemma4_text", "mimo_v2_flash"])
def test_layers_that_differ_cache_what_is_said(kind, tmp_path):
    """Indexers, two attentions in a layer, layers that share keys, and two shapes of layers."""
    save_tiny(kind, tmp_path)
    found = examine(ModelConfig(path=str(tmp_path)))
    shapes = build_decoder("generic", tiny_config(kind), torch.float32, torch.device("cpu"), longest=64).cache_shapes
    cached = sum(one.layers * one.kv_heads * (one.key_size + one.value_size) for one in shapes)
    assert found.kv_bytes_per_token() == 2 * cached


def test_shared_keys_are_cached_once(tmp_path):
    """Gemma 4: layers 2 and 3 read the keys of layers 0 and 1, of 2 heads of 8 and of 16."""
    save_tiny("gemma4_text", tmp_path)
    found = examine(ModelConfig(path=str(tmp_path)))
    assert [(one.key_size, one.cached) for one in found.attention] == [(8, True), (16, True), (8, False), (16, False)]
    assert found.kv_bytes_per_token() == 2 * (2 * (8 + 8) + 2 * (16 + 16))


def test_memory_by_hand(tmp_path):
    """40,480 weights of Qwen3; of them 18,528 - the norm's 32 - in each layer's ... see the engine for the rest."""
    save(FAMILIES["Qwen3"], tmp_path)
    found = examine(ModelConfig(path=str(tmp_path)))
    assert found.parameters == 40480
    alone = training_memory(found, 1)
    assert (alone.weights, alone.gradients, alone.optimizer) == (6 * 40480, 6 * 40480, 8 * 40480)
    shared = training_memory(found, 4)
    layer = (40480 - 104 * 32 - 32) // 2
    assert (shared.weights, shared.gradients, shared.optimizer) == (4 * 10120, 4 * 10120, 8 * 10120)
    assert shared.gathered == 2 * (2 * layer + 104 * 32)
    adapter = 2 * 16 * ((32 + 128) * 2 + (32 + 64) * 2 + (32 + 64) * 3)  # q and o, k and v, gate and up and down
    assert found.lora_parameters(16) == adapter
    assert training_memory(found, 1, lora_rank=16).optimizer == 8 * adapter


def loaded_engine(folder, **settings):
    config = EngineConfig(compute_dtype="bfloat16", **settings)  # as the estimate has it: auto is float32 on some CPUs
    spec = SimpleNamespace(
        model=ModelConfig(path=str(folder)),
        engine=config,
        model_type="language_model",
        temperature=1.0,
        total_steps=1,
        reference=None,
        follows=False,
    )
    engine = Fsdp2Engine(spec, "cpu")
    engine.initialize()
    return engine


def test_an_engine_holds_what_is_said(tmp_path):
    save(FAMILIES["Qwen3"], tmp_path)
    engine = loaded_engine(tmp_path)
    batch = pack_samples([Sample((1, 9, 8, 2), (0, 1, 1, 1))])
    batch = batch.with_(loss_weights=torch.full((4,), 1 / 3))
    engine.train_batch(batch, lambda output, part: LossOutput(-output.logprobs))
    said = training_memory(examine(ModelConfig(path=str(tmp_path))), 1)
    masters = engine.weights.masters.values()
    held = sum(one.nbytes for one in {id(one): one for one in [*masters, *engine.model.parameters()]}.values())
    assert held == said.weights
    state = engine.update.optimizer.state
    states = sum(value.nbytes for one in state.values() for value in one.values() if value.dim())
    assert states == said.optimizer


def test_an_engine_in_four_bits_holds_what_is_said(tmp_path):
    pytest.importorskip("bitsandbytes", reason="comes with hone-rl[qlora]")
    save(FAMILIES["Qwen3"], tmp_path)
    model = ModelConfig(path=str(tmp_path))
    engine = loaded_engine(tmp_path, lora={"rank": 16, "quantise": {}})
    said = training_memory(examine(model), 1, lora_rank=16, four_bit=True)
    found = {id(one): one for one in [*engine.weights.masters.values(), *engine.model.parameters()]}
    held = sum(one.nbytes for one in found.values())
    layers = [one for one in engine.model.modules() if isinstance(one, FourBitLinear)]
    codes = len(layers) * (4 * 256 + 4)  # of 8 bits, and an offset: nothing in a model of usual size
    scales = sum(-(-one.absmax.numel() // 256) * 4 - one.absmax.numel() / 64 for one in layers)
    assert held + sum(one.bytes() for one in layers) - codes == pytest.approx(said.weights + scales, abs=len(layers))
    plain = training_memory(examine(model), 1, lora_rank=16)
    linear = 2 * (2 * 32 * 128 + 2 * 32 * 64 + 3 * 32 * 64)  # q and o, k and v, gate and up and down
    assert examine(model).linear_parameters == linear
    assert plain.weights - said.weights == round(linear * (2 - 0.5 - 1 / 64 - 1 / 4096))
    four = training_memory(examine(model), 4, lora_rank=16, four_bit=True)
    assert four.weights > said.weights / 4
    assert said.gathered == 2 * 32 * 128  # q, the largest


@pytest.mark.parametrize(("kind", "dtype"), [("qwen3", "float32"), ("qwen3", "bfloat16"), ("gemma2", "bfloat16")])
def test_activations_are_what_the_backward_keeps(kind, dtype, tmp_path):
    """Against the tensors that autograd keeps in forwards of 64 and 192 tokens of the loaded model."""
    build = BuildConfig(architecture=kind, hidden_size=128, layers=3, heads=4, kv_heads=2, head_size=32, mlp_size=384)
    with without_progress_bars():
        load_language_model(ModelConfig(build=build)).save_pretrained(tmp_path)
    model = load_language_model(ModelConfig(path=str(tmp_path), dtype=dtype))
    fuse_norms(model)
    weights = {one.untyped_storage().data_ptr() for one in model.parameters()}

    def kept(length):
        sizes, alive = {}, []  # a storage that is freed gives its address to another

        def note(tensor):
            if (storage := tensor.untyped_storage()).data_ptr() not in weights:
                sizes[storage.data_ptr()] = storage.nbytes()
                alive.append(tensor)
            return tensor

        with packed(torch.tensor([0, length])), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            places = torch.arange(length)[None]
            model.base_model(torch.randint(0, 100, (1, length)), position_ids=places, use_cache=False)
        return sum(sizes.values())

    said = kept_bytes_per_token(examine(ModelConfig(path=str(tmp_path))), 2 if dtype == "bfloat16" else 4)
    assert said == pytest.approx((kept(192) - kept(64)) / 128, rel=0.06)


def test_layers_without_attention_cache_nothing_where_only_the_config_tells():
    """RecurrentGemma's forward needs values; two of its three layers are recurrent."""
    config = RecurrentGemmaConfig(num_hidden_layers=3, num_attention_heads=2, hidden_size=16)
    assert len(_from_config(config)) == 1


def test_what_cannot_be_loaded_is_refused(tmp_path):
    with pytest.raises(ModelError, match="no folder"):
        examine(ModelConfig(path=str(tmp_path / "none")))
