"""A model trains without dropout, whatever its config has, unless `model.use.dropout` says otherwise."""

import math

import pytest
import torch
from torch import nn

from hone.data.packing import Sample, pack_samples
from hone.engines.checks.probe import check_training
from hone.engines.settings import EngineConfig, LoraConfig, OptimizerConfig
from hone.models.errors import ModelError
from hone.models.loading import load_language_model
from hone.models.settings import BuildConfig, ModelConfig, UseConfig
from hone.types import LossOutput
from hone.workers.train import TrainSpec, TrainWorker
from tests.trainers.preference_task import prefer, written
from tests.trainers.tiny import BASE, metrics

SIZES = {"hidden_size": 32, "layers": 2, "heads": 2, "mlp_size": 48, "max_positions": 64}
WITH_DROPOUT = {  # attention alone; residuals, embeddings and attention; residuals and attention
    "qwen3": {"attention_dropout": 0.5},
    "gpt2": {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5},
    "phi3": {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attention_dropout": 0.5},
    "gemma2": {"attention_dropout": 0.5},  # soft-capped scores: attention without a kernel
    "phimoe": {"router_jitter_noise": 0.5, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    "mixtral": {"router_jitter_noise": 0.5, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def worker_of(architecture, dropout=0.0, lora=None, **options):
    build = BuildConfig(architecture=architecture, options={**WITH_DROPOUT[architecture], **options}, **SIZES)
    if architecture == "gemma2":
        build = build.model_copy(update={"options": {**build.options, "attn_logit_softcapping": 5.0}})
    model = ModelConfig(build=build, use=UseConfig(dropout=dropout))
    engine = EngineConfig(compute_dtype="float32", optimizer=OptimizerConfig(lr=1e-12), lora=lora)
    worker = TrainWorker(TrainSpec(model, engine, total_steps=10))
    worker.initialize()
    return worker


def make_batch():
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(8, 100, (length,), generator=generator).tolist() for length in (12, 9)]
    batch = pack_samples([Sample(tuple(row), (0,) + (1,) * (len(row) - 1)) for row in rows])
    return batch.with_(loss_weights=torch.full((batch.num_tokens,), 1.0))


def likelihood(output, batch):
    return LossOutput(-output.logprobs)


def loss_in_training(worker):
    return worker.train_batch(make_batch(), likelihood)["train/loss"].value


def loss_without(worker):
    batch = make_batch()
    return -float(worker.infer_batch(batch).logprobs[batch.loss_mask].sum())


@pytest.mark.parametrize("architecture", WITH_DROPOUT)
def test_a_config_with_dropout_trains_without(architecture):
    worker = worker_of(architecture)
    assert loss_in_training(worker) == pytest.approx(loss_without(worker), rel=1e-6)
    saved = worker.engine.model.config.to_dict()  # what an export says
    assert all(saved[name] == rate for name, rate in WITH_DROPOUT[architecture].items())


@pytest.mark.parametrize("architecture", WITH_DROPOUT)
def test_the_key_turns_on_what_the_config_has(architecture):
    worker = worker_of(architecture, "config")
    assert abs(loss_in_training(worker) - loss_without(worker)) > 1e-3


@pytest.mark.parametrize(("architecture", "rates"), [("qwen3", 2), ("gpt2", 7)])
def test_a_number_is_the_rate_of_every_dropout(architecture, rates):
    options = dict.fromkeys(WITH_DROPOUT[architecture], 0.0)
    model = load_language_model(
        ModelConfig(build=BuildConfig(architecture=architecture, options=options, **SIZES), use=UseConfig(dropout=0.25))
    )
    found = [one.p for one in model.modules() if isinstance(one, nn.Dropout)]
    found += [one.attention_dropout for one in model.modules() if hasattr(one, "attention_dropout")]
    assert [rate for rate in found if isinstance(rate, float)] == [0.25] * rates


def test_draws_depend_on_step_and_micro_batch_only():
    losses = []
    for seed in (1, 2):
        worker = worker_of("gpt2", 0.5)
        torch.manual_seed(seed)
        losses.append([loss_in_training(worker) for _ in range(2)])
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[0][1]


def test_an_adapter_s_dropout_stays():
    worker = worker_of("qwen3", lora=LoraConfig(rank=4, dropout=0.5, init="pissa"))
    assert abs(loss_in_training(worker) - loss_without(worker)) > 1e-4


def test_noise_that_stays_is_refused():
    body = load_language_model(ModelConfig(build=BuildConfig(**SIZES))).eval().model
    body.norm.register_forward_hook(lambda module, _, out: 1.1 * out if module.training else out)
    with pytest.raises(ModelError, match=r"differently in training.*set model\.use\.dropout: config"):
        check_training(body, "it")


def test_noise_that_few_tokens_show_is_refused():
    """PhiMoE draws an expert only where two are almost equal: with these weights at none of the probe's 11 tokens."""
    options = {"num_local_experts": 16, "num_experts_per_tok": 2, "sliding_window": None}
    build = BuildConfig(architecture="phimoe", options=options, **{**SIZES, "heads": 4, "kv_heads": 2})
    body = load_language_model(ModelConfig(build=build, use=UseConfig(dropout="config"))).eval().model
    with torch.no_grad():
        for seed, parameter in enumerate(body.parameters()):
            if parameter.dim() > 1:
                parameter.normal_(std=0.15, generator=torch.Generator().manual_seed(seed))
    with pytest.raises(ModelError, match=r"differently in training.*set model\.use\.dropout: config"):
        check_training(body, "it")


def test_random_numbers_without_effect_are_no_noise():
    body = load_language_model(ModelConfig(build=BuildConfig(**SIZES))).eval().model
    body.norm.register_forward_hook(
        lambda module, _, out: out if torch.rand([]) >= 0 else 0 * out
    )  # as layer drop does
    check_training(body, "it")


def test_dpo_begins_at_log_2_with_a_config_that_has_dropout(tmp_path):
    build = {**BASE["model"]["build"], "options": {"attention_dropout": 0.3}}
    run = prefer(written(tmp_path, "prefer", "dpo", model={"build": build}), "run.steps=1")
    (first,) = (line for line in metrics(run) if "train/loss" in line)
    assert first["train/loss"] == pytest.approx(math.log(2), abs=1e-6)
