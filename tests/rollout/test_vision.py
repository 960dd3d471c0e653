"""Rollout of models that see images: sampled log-probs are the trainer's, whatever runs beside a request."""

import asyncio
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForImageTextToText

from hone.data.packing import Sample, pack_samples
from hone.models.loading import load_language_model, without_progress_bars
from hone.models.settings import BuildConfig, ModelConfig
from hone.rollout.builtin.engine import BuiltinEngine
from hone.rollout.settings import BuiltinSettings
from hone.types import GenerationRequest, SamplingParams, StopReason
from tests.engines.pictures import FAMILIES, Case, images_of, make_engine, sample

SAMPLING = SamplingParams(max_tokens=12, temperature=0.9, ignore_eos=True)


def prompts(architecture):
    """(ids, images): one image, two of other sizes, none, and one that is asked of twice."""
    small, wide, tall = images_of(architecture, (16, 16, 1), (16, 40, 2), (32, 16, 3))
    shown = [[small], [wide, tall], [], [wide]]
    return [(sample(images, answer=()).token_ids, tuple(images)) for images in shown]


@pytest.fixture(params=FAMILIES)
def pair(request):
    """(the engine that trains, one that generates with the same weights)."""
    trainer = make_engine(Case(request.param, engine={"max_tokens_per_microbatch": 200}))
    return trainer, generating(trainer)


def generating(trainer, **settings):
    return BuiltinEngine(BuiltinSettings(kv_cache_tokens=4096, **settings), trainer.model)


async def ask(engine, asked, seed=0, **changes):
    return await asyncio.gather(
        *(
            engine.generate(
                GenerationRequest(f"r{number}", ids, replace(SAMPLING, seed=seed + number, **changes), images)
            )
            for number, (ids, images) in enumerate(asked)
        )
    )


def trained(trainer, asked, found):
    """The trainer's log-probs of what was sampled."""
    samples = [
        Sample((*ids, *one.token_ids), (0,) * len(ids) + (1,) * len(one.token_ids), "r", images)
        for (ids, images), one in zip(asked, found, strict=True)
    ]
    batch = pack_samples(samples)
    return trainer.infer_batch(batch).logprobs[batch.loss_mask].split([len(one.token_ids) for one in found])


def test_sampled_logprobs_are_the_trainers(pair):
    trainer, engine = pair
    asked = prompts(trainer.model.config.model_type)
    asked += asked[3:] * 2  # the prompts of one group: prefilled once
    found = asyncio.run(ask(engine, asked))
    assert [one.stop_reason for one in found] == [StopReason.LENGTH] * len(asked)
    for one, expected in zip(found, trained(trainer, asked, found), strict=True):
        torch.testing.assert_close(torch.tensor(one.logprobs), expected, rtol=0, atol=1e-5)
    assert len({one.token_ids for one in found[3:]}) > 1  # other seeds, other answers
    prompt = len(asked[3][0])
    assert engine.metrics()["rollout/shared_prompt_tokens"].value == 2 * (prompt - 1)


def test_greedy_answers_are_those_of_transformers(pair, tmp_path):
    trainer, engine = pair
    with without_progress_bars():
        trainer.model.save_pretrained(tmp_path)
        plain = AutoModelForImageTextToText.from_pretrained(tmp_path, attn_implementation="eager").eval()
    ids, images = prompts(trainer.model.config.model_type)[1]
    kinds = torch.tensor([[int(token == images[0].token_id) for token in ids]])
    answer = plain.generate(
        input_ids=torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        mm_token_type_ids=kinds,
        pixel_values=torch.cat([torch.from_numpy(image.patches()) for image in images]),
        image_grid_thw=torch.tensor([image.grid for image in images]),
        max_new_tokens=10,
        do_sample=False,
        eos_token_id=None,
    )[0, len(ids) :]
    greedy = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    found = asyncio.run(engine.generate(GenerationRequest("greedy", ids, greedy, images)))
    assert list(found.token_ids) == answer.tolist()


def test_an_answer_does_not_depend_on_its_neighbours(pair):
    trainer, engine = pair
    asked = prompts(trainer.model.config.model_type)
    together = asyncio.run(ask(engine, asked))
    for number, one in enumerate(together):
        alone = asyncio.run(
            generating(trainer).generate(
                GenerationRequest("alone", asked[number][0], replace(SAMPLING, seed=number), asked[number][1])
            )
        )
        assert alone.token_ids == one.token_ids


def test_what_an_image_shows_changes_the_answer_of_equal_tokens(pair):
    trainer, engine = pair
    first, other = images_of(trainer.model.config.model_type, (16, 16, 1), (16, 16, 9))
    ids = sample([first], answer=()).token_ids
    greedy = SamplingParams(max_tokens=1, temperature=0.0)

    async def both():  # at the same time: the prompts' tokens are equal, and must not share their keys and values
        one = engine.generate(GenerationRequest("one", ids, greedy, (first,)))
        return await asyncio.gather(one, engine.generate(GenerationRequest("other", ids, greedy, (other,))))

    async def later():  # while the first is running, which could lend what it has computed
        running = asyncio.ensure_future(engine.generate(GenerationRequest("long", ids, SAMPLING, (first,))))
        for _ in range(3):
            await asyncio.sleep(0)
        found = await engine.generate(GenerationRequest("later", ids, greedy, (other,)))
        await running
        return found

    one, two = asyncio.run(both())
    assert abs(one.logprobs[0] - two.logprobs[0]) > 1e-6
    assert asyncio.run(later()).logprobs[0] == pytest.approx(two.logprobs[0], abs=1e-6)


def test_new_weights_in_the_middle_of_an_answer_see_the_image_again(pair):
    """The tokens after a sync are those of the new weights; their keys and values are computed anew, image included."""
    trainer, engine = pair
    (ids, images) = prompts(trainer.model.config.model_type)[1]

    async def interrupted():
        running = asyncio.ensure_future(engine.generate(GenerationRequest("r", ids, SAMPLING, images)))
        for _ in range(4):
            await asyncio.sleep(0)
        await engine.update_weights(trainer.get_per_tensor_param()[0], 1)
        return await running

    found = asyncio.run(interrupted())
    assert set(found.weight_versions) == {0, 1}
    expected = trained(trainer, [(ids, images)], [found])[0]
    torch.testing.assert_close(torch.tensor(found.logprobs), expected, rtol=0, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------ refusals


def test_requests_that_do_not_fit_are_refused(pair):
    trainer, engine = pair
    architecture = trainer.model.config.model_type
    small, wide = images_of(architecture, (16, 16, 1), (16, 40, 2))
    ids = sample([small], answer=()).token_ids
    for tokens, images, says in (
        (ids, (wide,), "image 0 takes 10 tokens in a row, which are not there"),
        (ids, (small, small), "image 1 takes 4 tokens in a row"),
        (ids[: ids.index(10)], (small,), "ends with an image"),
    ):
        with pytest.raises(ValueError, match=says):
            asyncio.run(engine.generate(GenerationRequest("bad", tokens, SAMPLING, images)))


def test_an_engine_for_text_refuses_images(folder_of_text):
    engine = BuiltinEngine(BuiltinSettings(kv_cache_tokens=4096), folder_of_text)
    ids, images = prompts("qwen3_vl")[0]
    with pytest.raises(ValueError, match="a model of type 'qwen3' takes text only"):
        asyncio.run(engine.generate(GenerationRequest("r", ids, SAMPLING, images)))


@pytest.fixture
def folder_of_text():
    return load_language_model(
        ModelConfig(build=BuildConfig(hidden_size=32, layers=1, heads=2, mlp_size=48, max_positions=64))
    )


def test_kept_kv_beside_images(pair):
    """The second turn of a text in one prefill with images: their positions are of three axes."""
    trainer, engine = pair
    asked = prompts(trainer.model.config.model_type)
    text = (tuple(range(8, 24)) * 3)[:40]

    async def story():
        first = await engine.generate(GenerationRequest("t/0", text, replace(SAMPLING, keep_kv=True)))
        second = (*text, *first.token_ids, 9, 9)
        together = [(second, ()), *asked]
        return together, await ask(engine, together, keep_kv=True)

    together, found = asyncio.run(story())
    assert engine.metrics()["rollout/cached_prompt_tokens"].value == 32
    for one, expected in zip(found, trained(trainer, together, found), strict=True):
        torch.testing.assert_close(torch.tensor(one.logprobs), expected, rtol=0, atol=1e-5)
