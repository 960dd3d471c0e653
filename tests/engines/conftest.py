"""Tiny engines and batches: fixtures that make them."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from hone.config import build
from hone.data.packing import Sample, pack_samples
from hone.engines.fsdp2.engine import Fsdp2Engine
from hone.engines.settings import EngineConfig, LoraConfig
from hone.models.loading import load_language_model, without_progress_bars
from hone.models.settings import BuildConfig, ModelConfig
from hone.models.tokenizer import build_tokenizer
from hone.types import LossOutput
from tests.engines.adapters import BUILDS
from tests.families.types import save_tiny

BUILD = BuildConfig(hidden_size=32, layers=2, heads=4, kv_heads=2, mlp_size=48, max_positions=64)


@dataclass(frozen=True)
class Spec:
    model: ModelConfig
    engine: EngineConfig
    model_type: str = "language_model"
    temperature: float = 1.0
    total_steps: int = 100
    reference: ModelConfig | None = None
    follows: bool = False


@pytest.fixture
def make_engine():
    """make_engine(engine settings..., model=..., spec fields..., device="cpu") -> an initialised engine."""

    def make(model=None, model_type="language_model", temperature=1.0, total_steps=100, optimizer=None, **engine):
        device, reference = engine.pop("device", "cpu"), engine.pop("reference", None)
        follows = engine.pop("follows", False)
        engine.setdefault("compute_dtype", "float32")
        engine.setdefault("max_tokens_per_microbatch", 64)
        config = build(EngineConfig, {"optimizer": {"lr": 1e-3} | (optimizer or {}), **engine}, "test")
        spec = Spec(model or ModelConfig(build=BUILD), config, model_type, temperature, total_steps, reference, follows)
        made = Fsdp2Engine(spec, device)
        made.initialize()
        return made

    return make


@pytest.fixture
def folder(tmp_path):
    """A tiny Qwen3 with its tokenizer, saved."""
    with without_progress_bars():
        load_language_model(ModelConfig(build=BUILD)).save_pretrained(tmp_path / "model")
    build_tokenizer(BUILD).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def make_batch():
    """make_batch(lengths, prompt=2) -> a batch with loss weights 1 / trained tokens and random advantages.

    With `groups`, sequence i belongs to group groups[i] and begins with that group's `prompt` tokens.
    """

    def make(lengths=(9, 5, 12, 5, 20), prompt=2, seed=0, groups=None):
        generator = torch.Generator().manual_seed(seed)
        samples = [
            Sample(
                tuple(torch.randint(8, 104, (length,), generator=generator).tolist()),
                (0,) * min(prompt, length) + (1,) * max(length - prompt, 0),
            )
            for length in lengths
        ]
        if groups is not None:
            begin = {g: tuple(torch.randint(8, 104, (prompt,), generator=generator).tolist()) for g in set(groups)}
            samples = [
                Sample((*begin[g], *one.token_ids[prompt:]), one.loss_mask)
                for g, one in zip(groups, samples, strict=True)
            ]
        batch = pack_samples(samples)
        if groups is not None:
            batch = batch.with_(group_index=torch.tensor(groups))
        return batch.with_(
            loss_weights=torch.full((batch.num_tokens,), 1 / max(int(batch.loss_mask.sum()), 1)),
            advantages=torch.randn(batch.num_tokens, generator=generator),
        )

    return make


def _policy(output, batch):
    ratio = (output.logprobs - output.logprobs.detach()).exp()
    return LossOutput(-batch.advantages * ratio, {"train/logprob": output.logprobs.detach()})


def _likelihood(output, batch):
    return LossOutput(-output.logprobs)


def _values(output, batch):
    return LossOutput((output.values - batch.advantages) ** 2)


def _entropy(output, batch):
    return LossOutput(-output.logprobs - 0.1 * output.entropy, {"train/entropy": output.entropy.detach()})


_entropy.needs = frozenset({"entropy"})


@pytest.fixture
def losses():
    return SimpleNamespace(policy=_policy, likelihood=_likelihood, values=_values, entropy=_entropy)


@pytest.fixture
def saved(tmp_path):
    """saved("qwen3") -> the folder of a base model: one of `BUILDS`, or the tiny model of a type."""

    def save(name):
        folder = tmp_path / f"base-{name}"
        if name not in BUILDS:
            return save_tiny(name, folder)
        with without_progress_bars():
            load_language_model(ModelConfig(build=BUILDS[name])).save_pretrained(folder)
        build_tokenizer(BUILDS[name]).save_pretrained(folder)
        return folder

    return save


@pytest.fixture
def engine_of(make_engine):
    """engine_of(folder, rank=4, ...) -> an engine with an adapter."""

    def make(folder, engine=None, model_type="language_model", dtype="float32", reference=None, **lora):
        lora = LoraConfig(**{"rank": 4, "alpha": 8, **lora} if "path" not in lora else lora)
        settings = {
            "reference": reference,
            "optimizer": {"lr": 1e-2},
            "max_tokens_per_microbatch": 24,
            **(engine or {}),
        }
        model = ModelConfig(path=str(folder), dtype=dtype)
        return make_engine(model=model, model_type=model_type, temperature=0.9, lora=lora, **settings)

    return make


@pytest.fixture
def plain(make_engine):
    def make(folder, model_type="language_model", **engine):
        model = ModelConfig(path=str(folder))
        return make_engine(model=model, model_type=model_type, temperature=0.9, total_steps=0, **engine)

    return make
