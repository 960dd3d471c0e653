"""What is run for each family: one function for each column of the table. A check that fails raises; that is the cell.

folder (Hugging Face format) --engine, trainer, rollout of hone--> numbers  ==  transformers' own forward
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM

from hone.config import load
from hone.data.packing import Sample, balanced, pack_samples, select, sequence_costs
from hone.engines.fsdp2.engine import Fsdp2Engine
from hone.engines.fsdp2.settings import Fsdp2Settings, ParallelConfig
from hone.engines.settings import EngineConfig, LoraConfig, OptimizerConfig
from hone.models.errors import ModelError
from hone.models.loading import DTYPES
from hone.models.routing import expert_count
from hone.models.settings import FourBitConfig, ModelConfig
from hone.models.value_head import VALUE_HEAD_FILE
from hone.processes.child import ServerFailed
from hone.rollout.base import Generating, ServerSpec
from hone.rollout.builtin.engine import BuiltinEngine
from hone.rollout.servers.vllm import VllmServer
from hone.rollout.settings import BuiltinSettings, RolloutConfig
from hone.trainers.exports.checkpoint import export_checkpoint
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.run.launch import run_policy, run_supervised
from hone.trainers.supervised.settings import SupervisedRunConfig
from hone.types import Batch, GenerationRequest, LossOutput, SamplingParams
from hone.weights.in_process import sync
from hone.workers.publishing.probe import Probe
from hone.workers.rollout import engine_config
from hone.workers.train import TrainSpec, TrainWorker
from tests.ranks import run_ranks
from tests.rollout.syncing import sync_to
from tests.trainers.tiny import metrics

LENGTHS = (13, 9, 12, 7, 20, 12)
GROUPS = (0, 0, 1, 2, 1, 0)  # answers to one prompt share its first 6 tokens, which the row holds once
PROMPTS = [tuple(range(10, 10 + n)) for n in (1, 12, 30, 12)]
TOKENS = 20
YES = "yes"
VLLM_PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
VLLM_OPTIONS = {"max_model_len": 64, "max_num_seqs": 8, "kv_cache_memory_bytes": 2**24}
DEADLINE_S = 120
SERVED_S = 240
TASK = """
import random
def rows(seed, size):
    rng = random.Random(seed)
    for _ in range(size):
        text = "".join(rng.choices("abcdefgh", k=6))
        yield {"prompt": text, "completion": text[::-1], "ground_truth": text[::-1]}

def low(response, ground_truth, row):
    return sum(ord(one) < 80 for one in response) / 12
"""
VOCABULARY, CONTEXT = 104, 60
ROUNDED = 2.0  # a rollout is at most so many times as far from exact log-probs as the trainer, which rounds as well
WIDER = {"bfloat16": "float32", "float32": "float64"}  # in which log-probs are exact, next to these
_BEFORE = "::"
CLOSE = 1e-4  # in log-probs; what is left out or stale shows as 0.01 and more


def make_batch(seed: int) -> Batch:
    """Ragged sequences, some with a prompt in common; each token weighs the same."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(8, 104, (length,), generator=generator).tolist() for length in LENGTHS]
    prompts = {group: row[:6] for group, row in reversed(list(zip(GROUPS, rows, strict=True)))}
    samples = [
        Sample((*prompts[group], *row[6:]), (0,) * 6 + (1,) * (len(row) - 6))
        for group, row in zip(GROUPS, rows, strict=True)
    ]
    batch = pack_samples(samples)
    weights = torch.full((batch.num_tokens,), 1 / int(batch.loss_mask.sum()))
    return batch.with_(group_index=torch.tensor(GROUPS), loss_weights=weights)


def make_worker(folder: Path, model_type: str = "language_model", **settings: Any) -> TrainWorker:
    """A trainer, by default in float32, with a learning rate that moves every weight visibly."""
    engine = EngineConfig(
        **{
            "compute_dtype": "float32",
            "max_tokens_per_microbatch": 60,
            "optimizer": OptimizerConfig(lr=1e-3),
            **settings,
        }
    )
    made = TrainWorker(TrainSpec(ModelConfig(path=str(folder)), engine, model_type, total_steps=100))
    made.initialize()
    return made


def make_engine(folder: Path, model_type: str = "language_model", **settings: Any) -> Fsdp2Engine:
    engine = make_worker(folder, model_type, **settings).engine
    assert isinstance(engine, Fsdp2Engine)
    return engine


def likelihood(output: Any, batch: Batch) -> LossOutput:
    return LossOutput(-output.logprobs)


def plain_logprobs(model: Any, batch: Batch) -> Tensor:
    """Log-probs of each token by transformers' own attention, sequence by sequence; 0 where there is no loss."""
    found = torch.zeros(batch.num_tokens)
    for index in range(batch.num_sequences):
        one = select(batch, [index])
        with torch.no_grad():
            logits = model(one.token_ids[None], use_cache=False).logits[0].float()
        scores = torch.log_softmax(logits[:-1], -1).gather(1, one.token_ids[1:, None])[:, 0]
        found[batch.cu_seqlens[index] + 1 : batch.cu_seqlens[index + 1]] = scores
    return torch.where(batch.loss_mask, found, 0)


def require_close(found: Tensor, expected: Tensor, what: str, limit: float = CLOSE) -> None:
    gap = float((found - expected).abs().max())
    assert gap <= limit, f"{what} differ by {gap:.2g}"


# ----------------------------------------------------------------------------------------------- the cheap columns


def packed(folder: Path) -> None:
    """Training on packed rows with shared prompts lowers the loss, and scores as transformers does row by row."""
    engine = make_engine(folder)
    first = engine.train_batch(make_batch(0), likelihood)["train/loss"].value
    for _ in range(3):
        last = engine.train_batch(make_batch(0), likelihood)["train/loss"].value
    assert last < first, f"the loss went from {first:.4f} to {last:.4f}"
    batch = make_batch(1)
    found = engine.infer_batch(batch).logprobs
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    plain.load_state_dict(dict(engine.get_per_tensor_param()[0]))
    require_close(found, plain_logprobs(plain, batch), "log-probs")  # type: ignore[arg-type]


def whole_path(folder: Path) -> None:
    """`hone sft` for a step, `hone train` (GRPO) from its export for a step, its export read by transformers alone."""
    work = folder / "runs"
    tuned = run_supervised(load(SupervisedRunConfig, _run_file(work, "sft", folder)))
    policy = run_policy(load(PolicyRunConfig, _run_file(work, "rl", tuned / "export")))
    for run, key in ((tuned, "train/grad_norm"), (policy, "train/grad_norm")):
        (line,) = (one for one in metrics(run) if key in one)
        assert line[key] > 0, f"{run.name}: no gradient"
    gap = line["correction/mean_abs_difference"]
    assert gap <= CLOSE, f"rollout and trainer differ by {gap:.2g} a token"
    output = work / "export"
    export_checkpoint(policy, output)
    batch = make_batch(2)
    exported = AutoModelForCausalLM.from_pretrained(output, attn_implementation="eager")
    ours = make_engine(policy / "export").infer_batch(batch).logprobs
    assert ours is not None
    require_close(ours, plain_logprobs(exported, batch), "log-probs of the export")
    before = plain_logprobs(AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager"), batch)
    assert float((ours - before).abs().max()) > 10 * CLOSE, "nothing was learnt"


def _run_file(work: Path, kind: str, model: Path) -> Path:
    work.mkdir(parents=True, exist_ok=True)
    (work / "task.py").write_text(TASK, encoding="utf-8")
    rows = {"source": {"name": "python", "function": f"{work}/task.py:rows", "size": 16, "seed": 1}}
    settings: dict[str, Any] = {
        "kind": kind,
        "run": {"dir": str(work / kind), "steps": 1, "seed": 3},
        "model": {"path": str(model)},
        "data": {"train": rows},
        "actor": {"compute_dtype": "float32", "optimizer": {"lr": 1e-3}},
        "tracking": {"trackers": ["jsonl"]},
        "runtime": {"threads": 1},
    }
    if kind == "sft":
        settings |= {"samples_per_step": 8}
    else:
        settings |= {
            "tracking": {"trackers": ["jsonl"], "rollouts_per_step": 0},
            "update": {"prompts_per_step": 4, "samples_per_prompt": 4},
            "rollout": {"sampling": {"max_response_tokens": 12}, "builtin": {"max_sequence_tokens": 64}},
            "reward": {"components": {"low": {"reward": f"{work}/task.py:low"}}, "workers": 1},
        }
    path = work / f"{kind}.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


def built_in_rollout(folder: Path) -> None:
    """What the built-in engine samples after a weight sync has the trainer's log-probs."""
    _built_in(folder, "float32")


def built_in_bfloat16(folder: Path) -> None:
    """The same in bfloat16, as far as its rounding lets the two agree."""
    _built_in(folder, "bfloat16")


def _built_in(folder: Path, dtype: str) -> None:
    both = Both(folder, dtype)
    settings = BuiltinSettings(max_sequence_tokens=64, slots=4, dtype=dtype)
    rollout = BuiltinEngine(settings, engine_config(ModelConfig(path=str(folder)), dtype))
    for version, change in enumerate((None, both.train, both.reverse)):
        if change is not None:
            change()
        asyncio.run(asyncio.wait_for(_sync_and_compare(both, rollout, version), DEADLINE_S))


async def _sync_and_compare(both: Both, rollout: BuiltinEngine, version: int) -> None:
    await sync(both.weights(), rollout.update_weights, version)  # raises if a digest differs
    await _sample_and_compare(both, rollout)
    await _probe(both, rollout, version)


class Both:
    """A trainer, and transformers' own model in the next wider dtype, for exact log-probs of the weights sent."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self.dtype = dtype
        self.trainer = make_worker(folder, compute_dtype=dtype)
        self._exact = AutoModelForCausalLM.from_pretrained(
            folder, dtype=DTYPES[WIDER[dtype]], attn_implementation="eager", experts_implementation="eager"
        )

    def train(self) -> None:
        self.trainer.train_batch(make_batch(0), likelihood)

    @torch.no_grad()
    def reverse(self) -> None:
        """Reverse the rows of every weight: another model, so that a weight that a sync leaves out shows."""
        weights = self.trainer.engine.weights
        for _, one, _ in weights.trained():
            one.copy_(one.flip(0) if one.dim() else one)
        weights.publish()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Weights as they are sent."""
        return self.trainer.weights(DTYPES[self.dtype])

    def exact(self, batch: Batch) -> Tensor:
        self._exact.load_state_dict(dict(self.weights()))
        return plain_logprobs(self._exact, batch)


async def _probe(both: Both, rollout: Any, version: int) -> None:
    """What `weights.verify: probe` does after a sync."""
    mixture = expert_count(both.trainer.engine.model.config) > 0
    probe = Probe(VOCABULARY, 1.0, [DTYPES[both.dtype]], CONTEXT, mixture)
    probe.compare(await probe.ask([rollout], version), both.trainer.infer_batch, version)


async def _sample_and_compare(both: Both, rollout: Generating) -> None:
    """Require what a rollout engine samples to have the trainer's log-probs, as far as both round."""
    sampled = await asyncio.gather(
        *(rollout.generate(GenerationRequest(str(i), p, sampling(i))) for i, p in enumerate(PROMPTS))
    )
    tokens = [one.token_ids for one in sampled]
    samples = [Sample((*p, *t), (0,) * len(p) + (1,) * len(t)) for p, t in zip(PROMPTS, tokens, strict=True)]
    batch = pack_samples(samples)
    found = both.trainer.infer_batch(batch).logprobs
    assert found is not None
    theirs = torch.tensor([logprob for one in sampled for logprob in one.logprobs])
    exact = both.exact(batch)[batch.loss_mask]
    own, other = ((one - exact).abs() for one in (found[batch.loss_mask], theirs))
    if both.dtype == "float32":
        require_close(found[batch.loss_mask], theirs, "rollout and trainer", max(CLOSE, ROUNDED * float(own.max())))
    else:
        ratio = float(other.mean() / own.mean())
        assert ratio <= ROUNDED, f"the rollout is {ratio:.2g} times as far from float32 as the trainer"


def sampling(seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=seed)


def value_head(folder: Path) -> None:
    """A value model learns, and its export gives the same values by hand; so does the sequence-classification form."""
    engine = make_engine(folder, "value_model")
    batch = make_batch(0)
    torch.nn.init.normal_(engine.model.score.weight, std=0.1)  # type: ignore[union-attr, arg-type]
    targets = torch.randn(batch.num_tokens)

    def squared(output: Any, part: Batch) -> LossOutput:
        return LossOutput((output.values - part.advantages) ** 2)

    losses = [engine.train_batch(batch.with_(advantages=targets), squared)["train/loss"].value for _ in range(3)]
    assert losses[-1] < losses[0], f"the loss went from {losses[0]:.4f} to {losses[-1]:.4f}"
    output = folder / "critic"
    engine.export_hf(output)
    again = make_engine(output, "value_model").infer_batch(batch).values
    found = engine.infer_batch(batch).values
    assert again is not None
    assert found is not None
    require_close(again, found, "values after a reload")
    body = AutoModel.from_pretrained(output, attn_implementation="eager")
    head = load_file(output / VALUE_HEAD_FILE)["score.weight"][0]
    one = select(batch, [0])
    with torch.no_grad():
        expected = body(one.token_ids[None]).last_hidden_state[0, :-1] @ head
    by_hand = torch.where(one.loss_mask[1:], expected, 0)
    require_close(found[1 : int(batch.cu_seqlens[1])], by_hand, "values by hand")


# ---------------------------------------------------------------------------------------------------------- servers


def vllm_rollout(folder: Path) -> None:
    """A real vLLM that reads the folder samples as the trainer scores, and again after each of two weight syncs."""
    asyncio.run(asyncio.wait_for(_serve_and_compare(folder, "float32"), SERVED_S))


def vllm_bfloat16(folder: Path) -> None:
    """The same in bfloat16, as far as its rounding lets the two agree."""
    asyncio.run(asyncio.wait_for(_serve_and_compare(folder, "bfloat16"), SERVED_S))


async def _serve_and_compare(folder: Path, dtype: str) -> None:
    both = Both(folder, dtype)
    settings = RolloutConfig(backend="vllm", python=str(VLLM_PYTHON), engine=VLLM_OPTIONS, start_timeout_s=SERVED_S / 2)
    token = secrets.token_hex(16)
    server = VllmServer(ServerSpec(settings, str(folder), dtype, 0, folder, token, frozen=True))
    try:
        await server.start()
        await _sample_and_compare(both, server)
        for version, change in enumerate((both.train, both.reverse), 1):
            change()
            await sync_to(server, both.weights(), version)
            await _sample_and_compare(both, server)
            await _probe(both, server, version)
    except ServerFailed as error:
        raise AssertionError(str(error).splitlines()[0]) from error
    finally:
        await server.close()


def lora(folder: Path) -> None:
    """An adapter learns beside a base that stays; merged, the weights give the adapter's log-probs."""
    _adapter(folder, LoraConfig(rank=4))


def qlora(folder: Path) -> None:
    """The same with a base in 4 bits, whose dequantised weights are merged."""
    _adapter(folder, LoraConfig(rank=4, quantise=FourBitConfig()))


def _adapter(folder: Path, config: LoraConfig) -> None:
    engine = make_engine(folder, lora=config)
    batch = make_batch(0)
    base = engine.infer_batch(batch).logprobs
    for _ in range(3):
        engine.train_batch(make_batch(0), likelihood)
    adapted = engine.infer_batch(batch).logprobs
    with engine.disable_adapter():
        without = engine.infer_batch(batch).logprobs
    assert base is not None
    assert adapted is not None
    assert without is not None
    require_close(without, base, "log-probs without the adapter", 0.0)
    assert float((adapted - base).abs().max()) > CLOSE, "the adapter learnt nothing"
    plain = make_engine(folder)
    plain.model.load_state_dict(dict(engine.get_per_tensor_param()[0]))
    merged = plain.infer_batch(batch).logprobs
    assert merged is not None
    require_close(merged, adapted, "log-probs of the merged weights")


# ----------------------------------------------------------------------------------------------------- several ranks


def mesh(folder: str, parallel: dict[str, int]) -> dict[str, Any]:
    """Run by each rank: two steps, and the weights then; or why the model was refused."""
    try:
        steady = OptimizerConfig(lr=1e-3, options={"eps": 1e-6})  # weights without a gradient do not follow rounding
        backend = Fsdp2Settings(parallel=ParallelConfig(**parallel))
        engine = make_engine(Path(folder), backend=backend, optimizer=steady)
    except ModelError as error:
        return {"refused": str(error)}
    losses = []
    for seed in (0, 1):
        batch = make_batch(seed)
        part = select(
            batch, balanced(sequence_costs(batch), engine.ranks.data_parallel_size)[engine.ranks.data_parallel_rank]
        )
        found = engine.train_batch(part, likelihood)
        losses.append(found["train/grad_norm"].value)
    return {"norms": losses, **dict(engine.get_per_tensor_param()[0])}


def each_mesh(folders: dict[str, str], parallel: dict[str, int]) -> dict[str, Any]:
    """Run by each rank: `mesh` of several families; names are those of the families before those of `mesh`."""
    found = {name: mesh(folder, parallel) for name, folder in folders.items()}
    return {f"{name}{_BEFORE}{key}": one for name, cells in found.items() for key, one in cells.items()}


def on_ranks(folders: dict[str, Path], **parallel: int) -> dict[str, str]:
    """Two ranks give the gradient norms and weights of one process: the cell of each family."""
    ranks = run_ranks(2, each_mesh, {name: str(folder) for name, folder in folders.items()}, parallel)
    assert None not in ranks, "a rank ended by itself"
    cells = {}
    for name, folder in folders.items():
        found = [
            {key.partition(_BEFORE)[2]: one for key, one in rank.items() if key.partition(_BEFORE)[0] == name}
            for rank in ranks
        ]
        try:
            _compare_ranks(mesh(str(folder), {}), found)
            cells[name] = YES
        except (AssertionError, ModelError) as error:
            cells[name] = str(error)
    return cells


def _compare_ranks(alone: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    first, second = ranks
    if "refused" in first:
        raise ModelError(first["refused"])
    for name, expected in alone.items():
        for rank in (first, second):
            if name == "norms":
                gap = max(abs(a / b - 1) for a, b in zip(rank[name], expected, strict=True))
                assert gap < CLOSE, f"gradient norms differ by {gap:.2g}"
            else:
                require_close(rank[name], expected, name, 2 * CLOSE)
