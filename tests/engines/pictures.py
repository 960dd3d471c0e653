"""Tiny vision-language models, and batches of sequences with images and without: what the ranks of tests run too."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch
from PIL import Image as Pillow

from hone.data.packing import Sample, balanced, pack_samples, select, sequence_costs
from hone.engines.fsdp2.engine import Fsdp2Engine
from hone.engines.fsdp2.settings import Fsdp2Settings, ParallelConfig
from hone.engines.settings import EngineConfig, OptimizerConfig
from hone.models.settings import BuildConfig, ModelConfig, UseConfig, VisionBuildConfig, VisionConfig
from hone.models.vision.image_processor import load_image_processor
from hone.types import LossOutput

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
SIZES = {"hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 2, "mlp_size": 48, "max_positions": 128}
TOWER = {"hidden_size": 16, "layers": 2, "heads": 2, "mlp_size": 24, "patch_size": 4}


def build(architecture="qwen2_5_vl", **changes) -> BuildConfig:
    return BuildConfig(**{**SIZES, "architecture": architecture, "vision": VisionBuildConfig(**TOWER), **changes})


def png(height, width, seed=0) -> bytes:
    """A picture of noise."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Pillow.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def images_of(architecture, *sizes):
    processor = load_image_processor(ModelConfig(build=build(architecture)))
    return tuple(processor.image(png(height, width, seed)) for height, width, seed in sizes)


def sample(images, before=(20, 21), after=(22, 23, 24), answer=(30, 31, 32, 33)) -> Sample:
    """Text, each image between its marks, text, and an answer that is learnt."""
    shown = [token for image in images for token in (8, *[image.token_id] * image.tokens, 10)]
    ids = (1, *before, *shown, *after, *answer)
    return Sample(ids, (0,) * (len(ids) - len(answer)) + (1,) * len(answer), "pictures", tuple(images))


def samples(architecture) -> list[Sample]:
    """Nine sequences: one image, none, two images of other sizes, and three answers to one prompt with an image."""
    small, wide, tall = images_of(architecture, (16, 16, 1), (16, 40, 2), (32, 16, 3))
    return [
        sample([small]),
        sample([], before=tuple(range(40, 52))),
        sample([wide, tall], answer=(9, 35, 9)),  # the placeholder, sampled: a token like any other
        sample([wide], before=(25,), answer=(36, 37)),
        sample([wide], before=(25,), answer=(37, 38, 39)),
        sample([wide], before=(25,), answer=(38,)),
        sample([], before=(60, 61)),
        sample([], before=(62, 63, 64)),
        sample([small], before=(70,)),
    ]


GROUPS = (0, 1, 2, 3, 3, 3, 4, 5, 6)
TEXT = (1, 6, 7)  # sequences without images


def batch_of(architecture="qwen2_5_vl", seed=0):
    batch = pack_samples(samples(architecture))
    generator = torch.Generator().manual_seed(seed)
    return batch.with_(
        group_index=torch.tensor(GROUPS),
        loss_weights=torch.full((batch.num_tokens,), 1 / int(batch.loss_mask.sum())),
        advantages=torch.randn(batch.num_tokens, generator=generator),
    )


@dataclass(frozen=True)
class Case:
    """An engine, and how it lies over ranks."""

    architecture: str = "qwen2_5_vl"
    parallel: dict = field(default_factory=dict)
    engine: dict = field(default_factory=dict)
    path: str = ""
    frozen: bool = False
    model_type: str = "language_model"

    @property
    def name(self) -> str:
        where = " ".join(f"{key}{value}" for key, value in self.parallel.items()) or "fsdp"
        extra = " ".join(f"{key}={value}" for key, value in self.engine.items())
        return f"{self.architecture} {where} {extra} {'frozen' if self.frozen else ''}".strip()


def make_engine(case: Case, total_steps=100, device="cpu") -> Fsdp2Engine:
    vision = VisionConfig(freeze_tower=True) if case.frozen else None
    where = {"path": case.path} if case.path else {"build": build(case.architecture)}
    engine = EngineConfig(
        **{"compute_dtype": "float32", "max_tokens_per_microbatch": 64, **case.engine},
        optimizer=OptimizerConfig(lr=3e-3, options={"eps": 1e-4}),  # gradients that are noise move nothing
        backend=Fsdp2Settings(parallel=ParallelConfig(**case.parallel)),
    )
    model = ModelConfig(**where, use=UseConfig(vision=vision))
    spec = SimpleNamespace(
        model=model,
        engine=engine,
        model_type=case.model_type,
        temperature=0.9,
        total_steps=total_steps,
        reference=None,
        follows=False,
    )
    made = Fsdp2Engine(spec, device)
    made.initialize()
    return made


def likelihood(output, batch):
    return LossOutput(-output.logprobs * (1 + batch.advantages))


def values(output, batch):
    return LossOutput((output.values - batch.advantages) ** 2)


def own_part(engine, batch):
    """This rank's sequences: with two of them, the second has no image."""
    size, rank = engine.ranks.data_parallel_size, engine.ranks.data_parallel_rank
    if size == 2:
        images = [i for i in range(batch.num_sequences) if i not in TEXT]
        return select(batch, [images, list(TEXT)][rank])
    return select(batch, balanced(sequence_costs(batch), size)[rank])


def train(case: Case) -> dict:
    """Norms of three steps, what is then inferred, and the weights."""
    engine = make_engine(case)
    loss = values if case.model_type == "value_model" else likelihood
    parts = [own_part(engine, batch_of(case.architecture, seed)) for seed in range(3)]
    metrics = [engine.train_batch(part, loss) for part in parts]
    output = engine.infer_batch(parts[0])
    score = output.logprobs if output.logprobs is not None else output.values
    first = engine.ranks.is_output_rank
    return {
        "norms": [one["train/grad_norm"].value for one in metrics],
        "losses": [one["train/loss"].value if first else 0.0 for one in metrics],
        "score": float(score.square().sum()) if first else 0.0,
        **dict(engine.get_per_tensor_param()[0]),
    }


def train_cases(cases: list[Case]) -> dict:
    found = {}
    for number, case in enumerate(cases):
        found |= {f"{number}/{key}": value for key, value in train(case).items()}
    return found
