"""Eight clients train adapters of different ranks through the real client: one after the other, then in threads.

Run with .venv-tinker. The arguments are the keys of the tenants. Prints one JSON object: what each ended with, both
times, and the seconds that both took.
"""

import json
import random
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import tinker
from tinker import types

warnings.simplefilter("ignore", FutureWarning)
RANKS = (1, 2, 3, 4, 6, 8, 12, 16)
STEPS = 4


def datum(rng, length):
    tokens = [rng.randrange(8, 90) for _ in range(length)]
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (length - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def train(key, rank):
    """The loss of each step, and a sample with its log-probs, to the last bit."""
    service = tinker.ServiceClient(api_key=key)
    training = service.create_lora_training_client(base_model="tiny", rank=rank, seed=rank).result()
    rng, found = random.Random(rank), []
    for _ in range(STEPS):
        trained = training.forward_backward([datum(rng, rng.randrange(8, 60)) for _ in range(8)], "cross_entropy")
        stepped = training.optim_step(types.AdamParams(learning_rate=0.01, grad_clip_norm=1.0))
        found += [trained.result().metrics["loss:sum"].hex(), stepped.result().metrics["grad_norm:mean"].hex()]
    sampling = training.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(list(range(10, 20)))
    (answer,) = sampling.sample(prompt, 1, types.SamplingParams(max_tokens=8, seed=3, stop=[])).result().sequences
    service.close("success").result()
    return [*found, answer.tokens, [one.hex() for one in answer.logprobs]]


def main():
    tenants = list(zip(sys.argv[1:], RANKS, strict=True))
    started = time.monotonic()
    alone = [train(*one) for one in tenants]
    between = time.monotonic()
    with ThreadPoolExecutor(len(tenants)) as threads:
        together = list(threads.map(lambda one: train(*one), tenants))
    seconds = [between - started, time.monotonic() - between]
    json.dump({"alone": alone, "together": together, "seconds": seconds}, sys.stdout)


main()
