"""The engine on models that see images: log-probs of plain transformers, gradients that no cut and no rank changes."""

import functools

import pytest
import torch
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

from hone.data.packing import pack_samples, select
from hone.engines.engine import on_device
from hone.engines.fsdp2.engine import Fsdp2Engine
from hone.engines.fsdp2.sharding import ShardingError
from hone.engines.layout import lay_out
from hone.models.errors import ModelError
from hone.models.loading import without_progress_bars
from hone.models.settings import BuildConfig, ModelConfig
from hone.models.vision.model import positions_of
from tests.engines.pictures import (
    FAMILIES,
    TEXT,
    Case,
    batch_of,
    images_of,
    likelihood,
    make_engine,
    sample,
    samples,
    train,
    train_cases,
)
from tests.ranks import run_ranks


def plain_logprobs(model, one, temperature=0.9):
    """What transformers gives for one sequence: its own positions, mask and merging of features."""
    ids = torch.tensor([one.token_ids])
    inputs = {}
    if one.images:
        first = torch.zeros_like(ids)
        left = sum(image.tokens for image in one.images)
        for at, token in enumerate(one.token_ids):
            if token == one.images[0].token_id and left:
                first[0, at], left = 1, left - 1
        # a placeholder that was sampled has to be hidden from transformers, which would want a feature for it
        answer_starts = one.loss_mask.index(1)
        assert not first[0, answer_starts:].any()
        inputs = {
            "pixel_values": torch.cat([torch.from_numpy(image.patches()) for image in one.images]),
            "image_grid_thw": torch.tensor([image.grid for image in one.images]),
            "mm_token_type_ids": first,
        }
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False, **inputs).logits[0] / temperature
    found = logits[:-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return torch.cat([torch.zeros(1), found]) * torch.tensor(one.loss_mask)


def saved(engine, folder):
    with without_progress_bars():
        engine.model.save_pretrained(folder)
        return AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()


@pytest.mark.parametrize("architecture", FAMILIES)
def test_logprobs_are_those_of_transformers_sequence_by_sequence(architecture, tmp_path):
    engine = make_engine(Case(architecture, engine={"max_tokens_per_microbatch": 200}))
    reference = saved(engine, tmp_path)
    chosen = [0, 1, 3, 4, 5, 6, 8]  # the others show a sampled placeholder, which transformers refuses
    batch = select(batch_of(architecture), chosen)
    found = engine.infer_batch(batch).logprobs
    expected = torch.cat([plain_logprobs(reference, samples(architecture)[i]) for i in chosen])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_several_images_of_other_sizes_are_those_of_transformers(architecture, tmp_path):
    engine = make_engine(Case(architecture))
    reference = saved(engine, tmp_path)
    one = sample(images_of(architecture, (16, 40, 2), (32, 16, 3)), answer=(33, 35))
    found = engine.infer_batch(pack_samples([one])).logprobs
    torch.testing.assert_close(found, plain_logprobs(reference, one), rtol=0, atol=1e-5)


# ------------------------------------------------------------------------------------------------------- invariance


def gradients(engine, batch, parts):
    """Gradients summed over the given parts of a batch, one call each."""
    with engine.train_mode():
        for part in parts:
            engine.forward_backward(select(batch, part), likelihood)
    found = {name: one.grad.clone() for name, one in engine.weights.masters.items() if one.grad is not None}
    engine.weights.clear_gradients()
    return found


@pytest.mark.parametrize("architecture", FAMILIES)
def test_gradients_do_not_depend_on_how_the_batch_is_cut(architecture):
    engine = make_engine(Case(architecture, engine={"max_tokens_per_microbatch": 400}))
    batch = batch_of(architecture)
    every = list(range(batch.num_sequences))
    whole = gradients(engine, batch, [every])
    assert whole["model.visual.patch_embed.proj.weight"].abs().max() > 1e-6
    singly = gradients(engine, batch, [[i] for i in every])
    turned = gradients(engine, batch, [every[::-1]])
    halves = gradients(engine, batch, [[2, 0, 7], [8, 4, 3], [1, 5, 6]])
    small = make_engine(Case(architecture, engine={"max_tokens_per_microbatch": 45}))
    for other in (singly, turned, halves, gradients(small, batch, [every])):
        assert other.keys() == whole.keys()
        for name, value in whole.items():
            torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_a_step_without_images_leaves_the_tower_zero_gradients_and_not_none():
    engine = make_engine(Case())
    found = gradients(engine, batch_of(), [list(TEXT)])
    tower = {name: grad for name, grad in found.items() if ".visual." in name}
    assert len(tower) == sum(".visual." in name for name, _ in engine.model.named_parameters())
    assert all(not grad.any() for grad in tower.values())


def test_answers_to_one_prompt_hold_its_image_once():
    batch = select(batch_of(), [3, 4, 5])
    layout = lay_out(batch)
    one = samples("qwen2_5_vl")[3]
    prompt = one.loss_mask.index(1)
    answers = sum(batch.loss_mask).item()
    assert layout.token_ids.shape[0] == prompt + answers
    assert layout.images.at.shape[0] == one.images[0].tokens
    assert batch.images.grids.shape[0] == 1


def test_a_micro_batch_moves_to_a_device_with_its_images():
    moved = on_device(select(batch_of(), [0, 1]), "meta")
    assert moved.token_ids.device.type == "meta"
    assert {getattr(moved.images, name).device.type for name in moved.images.__slots__} == {"meta"}


def test_equal_tokens_over_other_images_share_only_what_comes_before_them():
    first, second = images_of("qwen2_5_vl", (16, 16, 1), (16, 16, 9))  # other pixels, as many tokens
    batch = pack_samples([sample([first]), sample([second], answer=(40, 41))])
    batch = batch.with_(group_index=torch.tensor([0, 0]), advantages=torch.zeros(batch.num_tokens))
    assert lay_out(batch).images.at.shape[0] == first.tokens + second.tokens
    engine = make_engine(Case())
    together = engine.infer_batch(batch).logprobs
    apart = torch.cat([engine.infer_batch(select(batch, [i])).logprobs for i in range(2)])
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-6)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_positions_are_those_of_the_model(architecture):
    body = make_engine(Case(architecture)).model.base_model
    one = samples(architecture)[2]
    ids = torch.tensor([one.token_ids])
    first = one.token_ids.index(9)
    second = first + one.images[0].tokens + 2
    kinds = torch.zeros_like(ids)
    for start, image in zip((first, second), one.images, strict=True):
        kinds[0, start : start + image.tokens] = 1
    grids = torch.tensor([image.grid for image in one.images])
    theirs, deltas = body.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=grids)
    shown = [(first, one.images[0].grid), (second, one.images[1].grid)]
    ours, shift = positions_of(len(one.token_ids), shown, 2)
    assert torch.equal(ours.T, theirs[:, 0])
    assert shift == int(deltas)
    assert [image.grid for image in one.images] == [(1, 4, 10), (1, 8, 4)]
    assert ours[first + 6].tolist() == [first, first + 1, first + 1]  # 2 x 5 tokens: the seventh is row 1, column 1
    assert ours[first + 10].tolist() == [first + 5] * 3  # text goes on after the larger side


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_a_frozen_tower_stays_as_it_is_and_the_rest_learns(compute):
    plain = make_engine(Case(frozen=True))
    before = {name: one.clone() for name, one in plain.get_per_tensor_param()[0]}
    engine = make_engine(Case(frozen=True, engine={"compute_dtype": compute}))
    engine.train_batch(batch_of(), likelihood)
    after = dict(engine.get_per_tensor_param()[0])
    assert after.keys() == before.keys()
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert not any(".visual." in name for name in changed)
    assert "model.language_model.layers.0.self_attn.q_proj.weight" in changed


def test_a_model_of_text_refuses_a_batch_with_images():
    case = Case()
    spec = make_engine(case).spec
    spec.model = ModelConfig(build=BuildConfig(hidden_size=32, layers=1, heads=2, mlp_size=48))
    engine = Fsdp2Engine(spec, "cpu")
    engine.initialize()
    with pytest.raises(ValueError, match="a model of type 'qwen3' takes none"):
        engine.infer_batch(batch_of())


def test_a_model_that_merges_its_features_otherwise_is_refused(monkeypatch):
    plain = Qwen2_5_VLModel.get_image_features

    def louder(self, *args, **kwargs):
        found = plain(self, *args, **kwargs)
        found.pooler_output = tuple(2 * part for part in found.pooler_output)
        return found

    monkeypatch.setattr(Qwen2_5_VLModel, "get_image_features", louder)
    with pytest.raises(ModelError, match="cannot be trained with images: hidden states"):
        make_engine(Case())


# ------------------------------------------------------------------------------------------------------------- ranks

TWO = [
    *(Case(architecture) for architecture in FAMILIES),
    *(Case(architecture, engine={"activation_checkpointing": True}) for architecture in FAMILIES),
    Case(parallel={"replicate": 2}),
    *(Case(architecture, parallel={"sequence": 2}) for architecture in FAMILIES),
    Case(parallel={"tensor": 2}),
    Case(frozen=True),
    Case("qwen3_vl", model_type="value_model"),
]


@functools.cache
def _alone(architecture, frozen, model_type):
    return train(Case(architecture, frozen=frozen, model_type=model_type))


@pytest.fixture(scope="module")
def spread():
    return run_ranks(2, train_cases, TWO)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(TWO)), ids=[case.name for case in TWO])
def test_training_on_two_ranks_equals_that_of_one_process(number, spread):
    """The second data-parallel rank never has an image, and still holds half of the tower."""
    case = TWO[number]
    alone = _alone(case.architecture, case.frozen, case.model_type)
    prefix = f"{number}/"
    ranks = [{k.removeprefix(prefix): v for k, v in rank.items() if k.startswith(prefix)} for rank in spread]
    assert sum(rank["score"] for rank in ranks) == pytest.approx(alone["score"], rel=1e-4)
    for rank in ranks:
        assert rank["norms"] == pytest.approx(alone["norms"], rel=1e-4)
    for name, value in alone.items():
        if isinstance(value, torch.Tensor):
            for rank in ranks:
                torch.testing.assert_close(rank[name], value, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def _refused(case):
    with pytest.raises(ShardingError, match=r"parallel\.tensor = 2: .*qwen3_vl.* has no tensor-parallel plan"):
        make_engine(case)


@pytest.mark.slow
def test_tensor_parallelism_without_a_plan_is_refused_by_name():
    run_ranks(2, _refused, Case("qwen3_vl", parallel={"tensor": 2}))
