"""GRPO with hone's public API in one file: a tiny model with random weights learns to reverse three characters.

    prompts --generate--> answers --reward--> groups --pack--> batch --advantages, weigh--> train_batch --.
                  ^                                                                                       |
                  `------------- the sync verifies which weights arrived <---------- weight sync ---------'

    python recipes/rl_loop.py
    python recipes/rl_loop.py --steps 50 --prompts 64 --seed 1

It calls the same functions as the trainers, but has no checkpoints, reward processes, deadlines, prompt ledger or
trackers. `hone train recipes/reverse/grpo.yaml` runs the same task with all of these, and with a harder reward: 1 for
the whole answer, otherwise 0.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hone.algorithms.algorithm import Algorithm
from hone.algorithms.settings import AlgorithmConfig, GrpoSettings, PpoSettings
from hone.data.packing import pack
from hone.data.rendering import Renderer
from hone.data.settings import DataConfig, DatasetConfig, PythonSettings
from hone.data.stream import PromptStream, read_prompts
from hone.engines.base import BaseEngine
from hone.engines.registry import EngineRegistry
from hone.engines.settings import EngineConfig, OptimizerConfig, ScheduleConfig
from hone.envs.episode import request_seed
from hone.models.loading import load_language_model
from hone.models.settings import BuildConfig, ModelConfig
from hone.models.tokenizer import load_tokenizer
from hone.platforms.base import current_platform
from hone.rollout.builtin.engine import BuiltinEngine
from hone.rollout.settings import BuiltinSettings
from hone.types import (
    Completion,
    GenerationRequest,
    Metrics,
    Prompt,
    SamplingParams,
    Status,
    StopReason,
    Trajectory,
    TrajectoryGroup,
)
from hone.weights.in_process import sync
from hone.workers.train import TrainSpec

TASK = f"{Path(__file__).parent}/reverse/task.py:rows"  # the prompt "abc" has the ground truth "cba"
HELD_OUT_SEED = 1_000_003  # added to the run's seed, so that evaluation draws other random numbers than training


# ----------------------------------------------------------------------------------------------- the parts of a loop


@dataclass(frozen=True)
class Options:
    """The options of the command line."""

    steps: int
    prompts: int  # per step
    samples: int  # answers to each prompt: the group
    lr: float
    seed: int
    evaluate_every: int  # steps


@dataclass(frozen=True)
class Parts:
    """The policy, the rollout engine with a copy of its weights, and the algorithm."""

    renderer: Renderer  # text to tokens and back
    policy: BaseEngine
    rollout: BuiltinEngine
    algorithm: Algorithm
    sampling: SamplingParams


def build_parts(options: Options) -> Parts:
    """Build a Qwen3 of 0.1 M parameters with random weights, and a tokenizer with one token per character."""
    model = ModelConfig(
        build=BuildConfig(
            architecture="qwen3",
            hidden_size=64,
            layers=2,
            heads=4,
            kv_heads=2,
            head_size=16,
            mlp_size=192,
            max_positions=32,
            characters="abcdef",
            seed=options.seed,
        )
    )
    renderer = Renderer(load_tokenizer(model))
    engine = EngineConfig(
        compute_dtype="float32",
        optimizer=OptimizerConfig(name="AdamW", lr=options.lr),
        schedule=ScheduleConfig(name="constant", warmup_steps=10),
    )
    platform = current_platform()
    policy = EngineRegistry.create(TrainSpec(model, engine, total_steps=options.steps), platform)
    policy.initialize()
    # The rollout engine is built from a config: it has no weights, and serves nothing, before the first weight sync.
    architecture = load_language_model(model).config
    rollout = BuiltinEngine(BuiltinSettings(), architecture, renderer.tokenizer, platform.device)
    algorithm = Algorithm(AlgorithmConfig(advantage=GrpoSettings(), loss=PpoSettings()), steps_per_batch=1)
    sampling = SamplingParams(max_tokens=3, temperature=1.0, stop_token_ids=tuple(renderer.end_token_ids))
    return Parts(renderer, policy, rollout, algorithm, sampling)


# ------------------------------------------------------------------------------------------------------------- the loop


async def train(options: Options) -> float:
    """Run the loop and return the final exact match on held-out prompts."""
    parts = build_parts(options)
    prompts = PromptStream(DataConfig(train=problems(seed=1)), parts.renderer, options.seed)
    held_out, _ = read_prompts("held_out", problems(seed=2, size=256), parts.renderer, "held_out")
    await sync(parts.policy.get_per_tensor_param()[0], parts.rollout.update_weights, version=0)
    print(f"step {0:4d}  held-out exact match {await exact_match(parts, held_out, options):.3f}")
    measured = 0.0
    for step in range(1, options.steps + 1):
        began = time.perf_counter()
        groups = await collect(parts, prompts.take(options.prompts), options, step)
        metrics = learn(parts, groups)
        # Sender and receiver compute a digest of the weights. If digest or version differ, `sync` raises
        # WeightSyncError: without this check, a failed sync would make the next step off-policy unnoticed.
        await sync(parts.policy.get_per_tensor_param()[0], parts.rollout.update_weights, version=step)
        line = (
            f"step {step:4d}  reward {mean_reward(groups):.3f}  entropy {metrics['train/entropy'].value:.3f}  "
            f"gradient norm {metrics['train/grad_norm'].value:.3f}  {time.perf_counter() - began:.2f} s"
        )
        if step % options.evaluate_every == 0 or step == options.steps:
            measured = await exact_match(parts, held_out, options)
            line += f"  held-out exact match {measured:.3f}"
        print(line, flush=True)
    return measured


async def collect(parts: Parts, prompts: Sequence[Prompt], options: Options, step: int) -> list[TrajectoryGroup]:
    """Generate `samples` answers to every prompt and compute their rewards."""
    assert parts.rollout.weight_version == step - 1  # on-policy: the rollout has the weights that are trained next
    return await asyncio.gather(*(answer(parts, prompt, options.samples, options.seed, step) for prompt in prompts))


def learn(parts: Parts, groups: Sequence[TrajectoryGroup]) -> Metrics:
    """Take one optimizer step on one packed batch."""
    batch = pack(groups)  # all trajectories in one row, without padding
    batch = parts.algorithm.advantages(batch)  # (reward - mean of the group) / its standard deviation, on every token
    batch = parts.algorithm.weigh(batch)  # the weight of each token in the loss: here 1 / number of sampled tokens
    # The loss is max(-A r, -A clip(r)), where r is the ratio of the policy to the one that sampled. With one optimizer
    # step per batch r is 1, so no forward for old log-probs is needed; r still has the gradient of log p.
    return parts.policy.train_batch(batch, parts.algorithm.policy_objective())


async def exact_match(parts: Parts, held_out: Sequence[Prompt], options: Options) -> float:
    """Return the share of held-out prompts whose greedy answer is right."""
    greedy = replace(parts, sampling=replace(parts.sampling, temperature=0.0))
    seed = options.seed + HELD_OUT_SEED
    groups = await asyncio.gather(*(answer(greedy, prompt, 1, seed, step=0) for prompt in held_out))
    right = [one.response == group.prompt.ground_truth for group in groups for one in group.trajectories]
    return sum(right) / len(right)


# --------------------------------------------------------------------------------------------- prompts, answers, reward


def problems(seed: int, size: int = 100_000) -> DatasetConfig:
    """Random strings of six letters, with their reverse as ground truth."""
    return DatasetConfig(source=PythonSettings(function=TASK, size=size, seed=seed))


async def answer(parts: Parts, prompt: Prompt, samples: int, seed: int, step: int) -> TrajectoryGroup:
    """Generate `samples` answers to one prompt, with rewards. The engine batches all waiting requests."""

    async def one(sample: int) -> Trajectory:
        # The seed depends on the request only, so the answer does not depend on other requests.
        sampling = replace(parts.sampling, seed=request_seed(seed, step, prompt.draw, sample, turn=0))
        request_id = f"{step}/{prompt.draw}/{sample}"
        completion = await parts.rollout.generate(GenerationRequest(request_id, prompt.token_ids, sampling))
        return trajectory(prompt, sample, completion, parts.renderer.decode(completion.token_ids))

    return TrajectoryGroup(prompt, tuple(await asyncio.gather(*(one(sample) for sample in range(samples)))))


def trajectory(prompt: Prompt, sample: int, completion: Completion, text: str) -> Trajectory:
    """Join prompt and answer to one sequence; the loss mask is 1 for the tokens that the policy sampled."""
    asked, answered = len(prompt.token_ids), len(completion.token_ids)
    return Trajectory(
        prompt_id=prompt.prompt_id,
        sample=sample,
        token_ids=prompt.token_ids + completion.token_ids,
        prompt_length=asked,
        loss_mask=(0,) * asked + (1,) * answered,
        rollout_logprobs=(0.0,) * asked + completion.logprobs,
        weight_versions=(-1,) * asked + completion.weight_versions,
        response=text,
        stop_reason=completion.stop_reason,
        status=Status.TRUNCATED if completion.stop_reason is StopReason.LENGTH else Status.OK,
        reward=reward(text, prompt.ground_truth),
        episode=sample,
    )


def reward(text: str, ground_truth: str) -> float:
    """Return the share of right characters."""
    return sum(a == b for a, b in zip(text, ground_truth, strict=False)) / len(ground_truth)


def mean_reward(groups: Sequence[TrajectoryGroup]) -> float:
    """Return the mean over all answers."""
    rewards = [one.reward for group in groups for one in group.trajectories]
    return sum(rewards) / len(rewards)


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO on reversing three characters.")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--prompts", type=int, default=32, help="prompts per step")
    parser.add_argument("--samples", type=int, default=16, help="answers to each prompt")
    parser.add_argument("--lr", type=float, default=5e-4, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--evaluate-every", type=int, default=25, help="steps between two evaluations")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: torch's default")
    options = vars(parser.parse_args())
    if threads := options.pop("threads"):
        torch.set_num_threads(threads)
    asyncio.run(train(Options(**options)))


if __name__ == "__main__":
    main()
