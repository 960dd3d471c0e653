"""Ranks that share rows (Ulysses) take rows with fewer tokens than ranks, and agree with one process."""

import pytest
import torch

from hone.data.packing import Sample, pack_samples
from hone.engines.fsdp2.settings import Fsdp2Settings, ParallelConfig
from hone.engines.settings import EngineConfig
from hone.models.settings import BuildConfig, ModelConfig
from hone.types import LossOutput
from hone.workers.train import TrainSpec, TrainWorker
from tests.ranks import run_ranks

SIZES = {"hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 2, "mlp_size": 48, "max_positions": 64}


def likelihood(output, batch):
    return LossOutput(-output.logprobs)


def short_rows(ranks):
    """Rows of 2 and of 3 tokens, a micro-batch each."""
    engine = EngineConfig(
        compute_dtype="float32",
        max_tokens_per_microbatch=3,
        backend=Fsdp2Settings(parallel=ParallelConfig(sequence=ranks)),
    )
    worker = TrainWorker(TrainSpec(ModelConfig(build=BuildConfig(**SIZES)), engine, total_steps=2))
    worker.initialize()
    batch = pack_samples([Sample((10, 11), (0, 1)), Sample((12, 13, 14), (0, 1, 1))])
    batch = batch.with_(loss_weights=torch.ones(5))
    found = worker.infer_batch(batch).logprobs
    return {"logprobs": found, "norm": worker.train_batch(batch, likelihood)["train/grad_norm"].value}


def single_token(ranks):
    engine = EngineConfig(compute_dtype="float32", backend=Fsdp2Settings(parallel=ParallelConfig(sequence=ranks)))
    worker = TrainWorker(TrainSpec(ModelConfig(build=BuildConfig(**SIZES)), engine))
    worker.initialize()
    return {"logprobs": worker.infer_batch(pack_samples([Sample((10,), (0,))])).logprobs}


def test_a_row_of_one_token_on_two_ranks():
    for rank in run_ranks(2, single_token, 2):
        assert rank["logprobs"].tolist() == [0.0]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_shorter_than_the_ranks_give_the_numbers_of_one_process(ranks):
    alone = short_rows(1)
    for rank in run_ranks(ranks, short_rows, ranks):
        assert (rank["logprobs"] - alone["logprobs"]).abs().max() < 1e-5
        assert rank["norm"] == pytest.approx(alone["norm"], rel=1e-4)
