"""Prompts that show images, at the real vLLM: what it samples has the trainer's log-probs, before and after a sync.

vLLM imports torchvision for models that see. Where its environment has none, `HONE_TEST_VLLM_SITE` may name a folder
that has one (which has to fit torch there).
"""

import asyncio
import json
import os
import secrets
import subprocess

import numpy as np
import pytest
import torch

from hone.data.packing import Sample, pack_samples
from hone.models.loading import load_language_model, without_progress_bars
from hone.models.settings import ModelConfig
from hone.models.vision.image_processor import save_language
from hone.rollout.base import ServerSpec
from hone.rollout.servers.vllm import VllmServer
from hone.rollout.servers.vllm_images import features_of
from hone.rollout.settings import RolloutConfig
from hone.types import GenerationRequest, SamplingParams
from tests.engines.pictures import FAMILIES, Case, batch_of, build, images_of, likelihood, make_engine, sample
from tests.rollout.receipts import served_digest

pytestmark = pytest.mark.vllm

SITE = os.environ.get("HONE_TEST_VLLM_SITE", "")
TEMPERATURE = 0.9  # that of the trainer
OPTIONS = {"kv_cache_memory_bytes": 2**24, "max_model_len": 64, "max_num_seqs": 8}


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, real_python, runner, tmp_path_factory):
    """(the engine that trains, a server of the same model that has no weights yet)."""
    python = real_python("vllm")
    site = {"PYTHONPATH": SITE} if SITE else {}
    if subprocess.run([python, "-c", "import torchvision"], env=site, capture_output=True, check=False).returncode:
        pytest.skip("vLLM's environment has no torchvision, which vLLM needs for models that see images")
    folder = tmp_path_factory.mktemp(request.param)
    source = ModelConfig(build=build(request.param, hidden_size=64, heads=2, kv_heads=1))
    with without_progress_bars():
        load_language_model(source).save_pretrained(folder / "model")
    save_language(source, folder / "model")
    trainer = make_engine(Case(path=str(folder / "model")))
    settings = RolloutConfig(backend="vllm", python=str(python), engine=OPTIONS, start_timeout_s=200)
    spec = ServerSpec(settings, str(folder / "model"), "float32", 3, folder, secrets.token_hex(16), environment=site)
    server = VllmServer(spec)
    runner.run(server.start())
    yield trainer, server
    runner.run(server.close())


def prompts(architecture):
    """(ids, images): one image, two of other sizes, none, and one that was shown before."""
    small, wide, tall = images_of(architecture, (16, 16, 1), (16, 40, 2), (32, 16, 3))
    shown = [[small], [wide, tall], [], [wide], [wide]]
    return [(sample(images, answer=()).token_ids, tuple(images)) for images in shown]


def test_what_is_sampled_has_the_trainers_logprobs_after_every_sync(pair, push, finish):
    trainer, server = pair
    asked = prompts(trainer.model.config.model_type)

    async def ask():
        wanted = [SamplingParams(12, temperature=TEMPERATURE, ignore_eos=True, seed=i) for i in range(len(asked))]
        return await asyncio.gather(
            *(
                server.generate(GenerationRequest(f"r{i}", ids, wanted[i], images))
                for i, (ids, images) in enumerate(asked)
            )
        )

    before = None
    for version in (0, 1):
        sent = list(trainer.get_per_tensor_param()[0])
        assert any("visual" in name for name, _ in sent)
        receipts = push(server, sent, version)
        assert [one.digest for one in receipts] == [served_digest(sent)]
        found = finish(ask())
        samples = [
            Sample((*ids, *one.token_ids), (0,) * len(ids) + (1,) * len(one.token_ids), "r", images)
            for (ids, images), one in zip(asked, found, strict=True)
        ]
        batch = pack_samples(samples)
        expected = trainer.infer_batch(batch).logprobs[batch.loss_mask]
        theirs = torch.tensor([logprob for one in found for logprob in one.logprobs])
        torch.testing.assert_close(theirs, expected, rtol=0, atol=1e-4)
        if before is not None:
            assert not torch.allclose(before.infer_batch(batch).logprobs[batch.loss_mask], expected, atol=1e-2)
        before = make_engine(Case(path=server._spec.model))
        tower = {name: tensor.clone() for name, tensor in sent if "visual" in name}
        for seed in range(4):
            trainer.train_batch(batch_of(trainer.model.config.model_type, seed), likelihood)
        now = dict(trainer.get_per_tensor_param()[0])
        assert all(not torch.equal(now[name], tensor) for name, tensor in tower.items() if name.endswith("qkv.weight"))


READ = """
import json, sys
from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import decode_mm_kwargs_item
from vllm.entrypoints.scale_out.token_in_token_out.protocol import MultiModalFeatures
features = MultiModalFeatures(**json.load(sys.stdin))
items = map(decode_mm_kwargs_item, features.kwargs_data["image"])
print(json.dumps([{key: one.data.tolist() for key, one in item.items()} for item in items]))
"""


def test_vllm_reads_the_patches_and_places_that_are_sent(real_python):
    small, wide = images_of("qwen2_5_vl", (16, 16, 1), (16, 40, 2))
    sent = features_of(((2, small), (9, wide), (30, small)))
    assert [(one["offset"], one["length"]) for one in sent["mm_placeholders"]["image"]] == [(2, 4), (9, 10), (30, 4)]
    first, second, third = sent["mm_hashes"]["image"]
    assert first == third != second
    python = str(real_python("vllm"))
    told = subprocess.run([python, "-c", READ], input=json.dumps(sent), capture_output=True, text=True, check=True)
    for found, image in zip(json.loads(told.stdout.splitlines()[-1]), (small, wide, small), strict=True):
        assert found["image_grid_thw"] == list(image.grid)
        assert np.array_equal(np.array(found["pixel_values"], np.float32), image.patches())
