"""What the ranks of the mesh tests run, and what one process runs to compare: the same steps on the same batches."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch

from hone.data.packing import Sample, balanced, pack_samples, select, sequence_costs
from hone.engines.fsdp2.engine import Fsdp2Engine
from hone.engines.fsdp2.settings import Fsdp2Settings, ParallelConfig
from hone.engines.settings import EngineConfig, OptimizerConfig
from hone.models.settings import BuildConfig, ModelConfig
from hone.types import LossOutput
from tests.engines.contract.cases import policy, values

OPTIONS = {
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "qwen3": {},
    "llama": {},
    "gpt2": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
SIZES = {"hidden_size": 32, "layers": 2, "heads": 4, "mlp_size": 48, "max_positions": 64}
LENGTHS = (9, 5, 12, 5, 20, 7, 13)  # ragged: four micro-batches of at most 24 tokens for one rank, two for each of two
GROUPS = (0, 0, 0, 1, 2, 2, 3)
CAP = 24


@dataclass(frozen=True)
class Case:
    """An engine, how it lies over ranks, and from which loss it learns."""

    architecture: str = "qwen3"
    loss: str = "likelihood"
    model_type: str = "language_model"
    optimizer: str = "AdamW"
    parallel: dict = field(default_factory=dict)
    offload: bool = False
    compile: bool | str = False
    engine: dict = field(default_factory=dict)
    model: dict = field(default_factory=dict)  # a path, or a dtype
    build: dict = field(default_factory=dict)

    @property
    def name(self) -> str:
        where = " ".join(f"{key}{value}" for key, value in self.parallel.items()) or "fsdp"
        extra = " ".join(f"{key}={value}" for key, value in self.engine.items())
        return f"{self.architecture} {self.loss} {where} {'offload' if self.offload else ''} {extra}".strip()


EPS = 1e-4  # of Adam: with 1e-8, a gradient that is rounding noise alone moves its weight by a whole learning rate


def make_engine(case: Case, reference: ModelConfig | None = None, follows: bool = False) -> Fsdp2Engine:
    build = {"kv_heads": 2} if case.architecture != "gpt2" else {}
    build = BuildConfig(
        **{**SIZES, **build, **case.build}, architecture=case.architecture, options=OPTIONS[case.architecture]
    )
    model = ModelConfig(**(case.model if "path" in case.model else {"build": build, **case.model}))
    of_adam = {"eps": EPS}
    options = {"SGD": {"momentum": 0.9}, "AdamW": of_adam, "Lion8bit": {"min_8bit_size": 256}}
    options["AdamW8bit"] = {**of_adam, **options["Lion8bit"]}
    options = options.get(case.optimizer, {})
    engine = EngineConfig(
        **{"compute_dtype": "float32", "max_tokens_per_microbatch": CAP, **case.engine},
        optimizer=OptimizerConfig(name=case.optimizer, lr=3e-3, options=options),
        backend=Fsdp2Settings(parallel=ParallelConfig(**case.parallel), offload=case.offload, compile=case.compile),
    )
    spec = SimpleNamespace(
        model=model,
        engine=engine,
        model_type=case.model_type,
        temperature=0.9,
        total_steps=0 if follows else 100,
        reference=reference,
        follows=follows,
    )
    made = Fsdp2Engine(spec, "cpu")
    made.initialize()
    return made


def make_batch(seed: int):
    """Seven sequences; with an odd seed some are answers to one prompt, whose first 4 tokens the row holds once."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(8, 104, (length,), generator=generator).tolist() for length in LENGTHS]
    groups = GROUPS if seed % 2 else range(len(LENGTHS))
    first = {group: tokens[i][:4] for i, group in reversed(list(enumerate(groups)))}
    samples = [
        Sample((*first[group], *row[4:]), (0, 0) + (1,) * (len(row) - 2))
        for group, row in zip(groups, tokens, strict=True)
    ]
    batch = pack_samples(samples)
    return batch.with_(
        group_index=torch.tensor(list(groups)),
        loss_weights=torch.full((batch.num_tokens,), 1 / int(batch.loss_mask.sum())),
        advantages=torch.randn(batch.num_tokens, generator=generator),
    )


def own_part(engine: Fsdp2Engine, batch):
    return select(
        batch, balanced(sequence_costs(batch), engine.ranks.data_parallel_size)[engine.ranks.data_parallel_rank]
    )


def likelihood(output, batch):
    return LossOutput(-output.logprobs)


LOSSES = {"likelihood": likelihood, "policy": policy, "values": values}


def train(engine: Fsdp2Engine, loss: str, steps=range(3)) -> dict:
    """Losses (this rank's share) and norms of some steps, what is then inferred, and the weights."""
    metrics = [engine.train_batch(own_part(engine, make_batch(seed)), LOSSES[loss]) for seed in steps]
    output = engine.infer_batch(own_part(engine, make_batch(9)))
    score = output.logprobs if output.logprobs is not None else output.values
    first = engine.ranks.is_output_rank
    return {
        "losses": [one["train/loss"].value if first else 0.0 for one in metrics],
        "norms": [one["train/grad_norm"].value for one in metrics],
        "score": float(score.square().sum()) if first else 0.0,
        **dict(engine.get_per_tensor_param()[0]),
    }


def train_cases(cases: list[Case]) -> dict:
    """`train` for several engines, one after the other; keys are `<number>/<name>`."""
    found = {}
    for number, case in enumerate(cases):
        found |= {f"{number}/{key}": value for key, value in train(make_engine(case), case.loss).items()}
    return found


def save(case: Case, load: str, folder: str) -> dict:
    """Train two steps, or continue from a checkpoint; save, export; the weights as they were then."""
    engine = make_engine(case)
    if load:
        engine.load_checkpoint(Path(load))
    else:
        train(engine, case.loss, range(2))
    engine.save_checkpoint(Path(folder))
    weights = dict(engine.get_per_tensor_param()[0])
    engine.export_hf(Path(folder) / "export")
    return weights


def save_several(saves: list[tuple]) -> dict:
    return {f"{number}/{key}": value for number, one in enumerate(saves) for key, value in save(*one).items()}
