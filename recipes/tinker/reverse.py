"""Train a LoRA adapter on a training service with the `tinker` package alone: `reverse.py sft` or `reverse.py rl`.

    rl: prompts --sample--> answers --reward--> advantages --importance_sampling--> gradients --optim_step--> weights
           ^                                                                                                     |
           `--------------------------- save_weights_and_get_sampling_client <-----------------------------------'

hone is not imported: the script runs against every service of this protocol.
"""

from __future__ import annotations

import argparse
import random

import tinker
from tinker import types

LETTERS = "abcdef"
ANSWER = types.SamplingParams(max_tokens=3, temperature=1.0, stop=[])
GREEDY = types.SamplingParams(max_tokens=3, temperature=0.0, stop=[])


class Task:
    """Three letters -> the same letters from the last to the first, as tokens."""

    def __init__(self, training: tinker.TrainingClient, seed: int) -> None:
        self._tokenizer = training.get_tokenizer()
        self._random = random.Random(seed)

    def take(self, count: int) -> list[tuple[list[int], list[int]]]:
        """`count` pairs of prompt and answer."""
        texts = ["".join(self._random.choices(LETTERS, k=3)) for _ in range(count)]
        return [(self._prompt(text), self._tokenizer.encode(text[::-1])) for text in texts]

    def _prompt(self, text: str) -> list[int]:
        messages = [{"role": "user", "content": text}]
        return self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def datum(prompt: list[int], answer: list[int], **inputs: list[float]) -> types.Datum:
    """One sequence. `inputs` have a value for each token of the answer; the prompt's tokens get 0."""
    padding = len(prompt) - 1
    targets: dict[str, list[int] | list[float]] = {"target_tokens": [0] * padding + answer}
    padded = {name: [0.0] * padding + values for name, values in inputs.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(prompt + answer[:-1]), loss_fn_inputs=targets | padded)


def exact_match(sampling: tinker.SamplingClient, task: Task, prompts: int = 216) -> float:
    """Share of greedy answers that are right."""
    pairs = task.take(prompts)
    futures = [sampling.sample(types.ModelInput.from_ints(prompt), 1, GREEDY) for prompt, _ in pairs]
    answers = [future.result().sequences[0].tokens for future in futures]
    return sum(answer == pair[1] for answer, pair in zip(answers, pairs, strict=True)) / prompts


def supervised(training: tinker.TrainingClient, task: Task, rate: float) -> float:
    """One step on right answers. Returns the loss of a token."""
    data = [datum(prompt, answer, weights=[1.0] * 3) for prompt, answer in task.take(64)]
    trained = training.forward_backward(data, "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=rate)).result()
    return trained.result().metrics["loss:sum"] / (3 * len(data))


def reinforced(training: tinker.TrainingClient, task: Task, rate: float) -> float:
    """One step on the policy's own answers; the reward is 1 for a right one. Returns the mean reward."""
    sampling = training.save_weights_and_get_sampling_client().result()
    pairs = task.take(32)
    futures = [sampling.sample(types.ModelInput.from_ints(prompt), 16, ANSWER) for prompt, _ in pairs]
    data, rewards = [], []
    for (prompt, right), future in zip(pairs, futures, strict=True):
        group = [(answer, float(answer.tokens == right)) for answer in future.result().sequences]
        mean = sum(reward for _, reward in group) / len(group)
        rewards.append(mean)
        for answer, reward in group if 0 < mean < 1 else ():
            sampled = {"logprobs": answer.logprobs, "advantages": [reward - mean] * len(answer.tokens)}
            data.append(datum(prompt, answer.tokens, **sampled))
    if data:
        trained = training.forward_backward(data, "importance_sampling")
        training.optim_step(types.AdamParams(learning_rate=rate)).result()
        trained.result()
    return sum(rewards) / len(rewards)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("how", choices=("sft", "rl"))
    parser.add_argument("--model", default="tiny-reverse")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--every", type=int, default=20, help="steps between two measurements")
    chosen = parser.parse_args()
    service = tinker.ServiceClient()
    training = service.create_lora_training_client(base_model=chosen.model, rank=chosen.rank, seed=1).result()
    train, held_out = Task(training, 1), Task(training, 2)
    step, word = (supervised, "loss") if chosen.how == "sft" else (reinforced, "reward")
    last = float("nan")
    for number in range(chosen.steps + 1):
        if number % chosen.every == 0:
            found = exact_match(training.save_weights_and_get_sampling_client().result(), held_out)
            print(f"step {number:4d}  {word} {last:.3f}  held-out exact match {found:.3f}", flush=True)
        if number < chosen.steps:
            last = step(training, train, chosen.rate)
    service.close("success").result()


if __name__ == "__main__":
    main()
