"""Teach an instruct model to answer with JSON, on a training service with the `tinker` package alone.

Twelve examples of a country and its capital; three other countries are asked before and after. hone is not imported.
"""

from __future__ import annotations

import argparse
import time

import tinker
from tinker import types

CAPITALS = {
    "France": "Paris",
    "Japan": "Tokyo",
    "Spain": "Madrid",
    "Egypt": "Cairo",
    "Cuba": "Havana",
    "Kenya": "Nairobi",
    "Norway": "Oslo",
    "Peru": "Lima",
    "Austria": "Vienna",
    "Ireland": "Dublin",
    "Greece": "Athens",
    "Iran": "Tehran",
}
HELD_OUT = ("Italy", "Germany", "Russia")
GREEDY = types.SamplingParams(max_tokens=24, temperature=0.0)


class Chat:
    """Questions and answers as tokens, by the model's chat template."""

    def __init__(self, training: tinker.TrainingClient) -> None:
        self.tokenizer = training.get_tokenizer()

    def prompt(self, country: str) -> list[int]:
        messages = [{"role": "user", "content": f"What is the capital of {country}?"}]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer.encode(text))

    def example(self, country: str, capital: str) -> types.Datum:
        """Question and answer: the loss counts the answer's tokens only, and each target is the next token."""
        prompt = self.prompt(country)
        answer = self.tokenizer.encode(f'{{"capital": "{capital}"}}<|im_end|>')
        tokens, weights = [*prompt, *answer], [0.0] * len(prompt) + [1.0] * len(answer)
        inputs = {"target_tokens": tokens[1:], "weights": weights[1:]}
        return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)

    def ask(self, training: tinker.TrainingClient) -> None:
        """Print the greedy answers about countries that are not trained on."""
        sampling = training.save_weights_and_get_sampling_client().result()
        waiting = [sampling.sample(types.ModelInput.from_ints(self.prompt(one)), 1, GREEDY) for one in HELD_OUT]
        for country, answer in zip(HELD_OUT, waiting, strict=True):
            tokens = answer.result().sequences[0].tokens
            print(f"  {country}: {self.tokenizer.decode(tokens, skip_special_tokens=True)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-model", default="smollm2", help="an instruct model whose answers end with <|im_end|>")
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args()
    service = tinker.ServiceClient()
    training = service.create_lora_training_client(base_model=given.base_model, rank=16, seed=1).result()
    chat = Chat(training)
    began = time.perf_counter()
    chat.ask(training)
    examples = [chat.example(*pair) for pair in CAPITALS.items()]
    answered = sum(sum(one.loss_fn_inputs["weights"].data) for one in examples)  # tokens of all answers
    for step in range(1, given.steps + 1):
        trained = training.forward_backward(examples, "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        loss = trained.result().metrics["loss:sum"] / answered
        print(f"step {step}: loss of a token {loss:.3f}, {time.perf_counter() - began:.0f} s")
    chat.ask(training)


if __name__ == "__main__":
    main()
