"""Compiled layers: the same training, and nothing is compiled after the first steps, however ragged the batches are."""

from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.utils import counters
from transformers.modeling_layers import GradientCheckpointingLayer

from hone.engines.fsdp2.compiled import compile_layers
from hone.engines.fsdp2.settings import Fsdp2Settings
from hone.models.errors import ModelError
from hone.models.settings import BuildConfig, ModelConfig
from tests.engines.adapters import BUILDS, SIZES
from tests.engines.spread import Case, train, train_cases
from tests.engines.spread import make_engine as make_case
from tests.ranks import run_ranks

pytestmark = [  # of torch's own tracing
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

WARM_UP = 3
GEMMA = BuildConfig(**SIZES, architecture="gemma2", options={"sliding_window": 8, "head_dim": 8})
SHARED = Case(loss="policy", parallel={"sequence": 2}, compile="aot_eager")  # the weights are sharded too


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch._dynamo.reset()
    counters.clear()


def graphs():
    return counters["stats"]["unique_graphs"]


def steps(engine, make_batch, loss):
    """Losses and sums of log-probs (or values) of ragged batches; and how many graphs there were after each step."""
    generator = torch.Generator().manual_seed(1)
    found, compiled = [], []
    for seed in range(WARM_UP + 4):
        lengths = torch.randint(4, 30, (int(torch.randint(2, 6, (1,), generator=generator)),), generator=generator)
        batch = make_batch(lengths.tolist(), seed=seed, groups=[i // 2 for i in range(len(lengths))])
        output = engine.infer_batch(batch)
        found.append((output.logprobs if output.logprobs is not None else output.values).sum().item())
        if engine.adapter is not None:
            with engine.disable_adapter():
                found.append(engine.infer_batch(batch).logprobs.sum().item())
        found.append(engine.train_batch(batch, loss)["train/loss"].value)
        compiled.append(graphs())
    return found, compiled


class Layer(GradientCheckpointingLayer):
    def __init__(self, size):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))

    def forward(self, x):
        return x * self.weight


def test_a_layer_that_comes_in_many_sizes_is_compiled_for_all_of_them():
    for size in range(2, 14):
        body = torch.nn.Sequential(Layer(size))
        body.config = SimpleNamespace()
        compile_layers(body, "eager", "actor.backend.compile", "a model")
        assert body(torch.ones(1, size)).sum() == size
    assert graphs() == 12


CASES = {
    "gpt2": {"model": ModelConfig(build=BUILDS["gpt2"])},
    "sliding windows": {"model": ModelConfig(build=GEMMA), "activation_checkpointing": True},
    "values": {"model_type": "value_model", "activation_checkpointing": "offload"},
    "qwen3, as code": {"compile": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_training_is_the_same_and_is_compiled_in_the_first_steps(case, make_engine, make_batch, losses):
    settings = {**CASES[case]}
    loss = losses.values if "model_type" in settings else losses.policy
    how = settings.pop("compile", "aot_eager")
    plain, none = steps(make_engine(**settings), make_batch, loss)
    assert none[-1] == 0
    engine = make_engine(**settings, backend=Fsdp2Settings(compile=how))
    found, compiled = steps(engine, make_batch, loss)
    assert found == pytest.approx(plain, rel=1e-4, abs=1e-4)
    assert compiled[0] >= 8  # four graphs or more for inference, and as many for training
    assert compiled[WARM_UP - 1 :] == [compiled[-1]] * (len(compiled) - WARM_UP + 1)


@pytest.mark.slow
def test_an_adapter_on_four_bits_is_compiled_too(engine_of, saved, make_batch, losses):
    folder, lora = saved("qwen3"), {"quantise": {"kind": "nf4"}, "dropout": 0.1}
    engine = {"max_tokens_per_microbatch": 64}
    plain, _ = steps(engine_of(folder, engine, **lora), make_batch, losses.policy)
    engine["backend"] = Fsdp2Settings(compile="aot_eager")
    found, compiled = steps(engine_of(folder, engine, **lora), make_batch, losses.policy)
    assert found == pytest.approx(plain, rel=1e-4, abs=1e-4)
    assert compiled[WARM_UP - 1] == compiled[-1] > 0


@pytest.mark.slow
def test_training_on_two_ranks_is_the_same():
    alone = train(make_case(Case(loss="policy")), "policy")
    ranks = run_ranks(2, train_cases, [SHARED])
    assert [sum(step) for step in zip(*(rank["0/losses"] for rank in ranks), strict=True)] == pytest.approx(
        alone["losses"], rel=1e-5, abs=1e-5
    )
    for rank in ranks:
        for name, value in alone.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(rank[f"0/{name}"], value, rtol=1e-5, atol=1e-5)


def refused():
    with pytest.raises(ValueError, match=r"compile does not work with parallel.tensor = 2: torch cannot compile"):
        make_case(Case(parallel={"tensor": 2}, compile=True))


@pytest.mark.slow
def test_split_matrices_are_refused():
    run_ranks(2, refused)


def test_a_mixture_of_experts_is_refused(make_engine):
    model = ModelConfig(build=BUILDS["qwen3_moe"])
    with pytest.raises(ModelError, match=r"compile: .*qwen3_moe.* is a mixture of experts"):
        make_engine(model=model, backend=Fsdp2Settings(compile=True))
