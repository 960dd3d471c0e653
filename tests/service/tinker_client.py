"""Uses `hone serve` through the real client; run with .venv-tinker. Prints one JSON object: what the client got."""

import json
import sys
import urllib.request
import warnings

import tinker
import torch
from tinker import types

warnings.simplefilter("ignore", FutureWarning)
PROMPT, SAMPLED = types.ModelInput.from_ints, types.SamplingParams


def datum(ids, **inputs):
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs={"target_tokens": ids[1:], **inputs}
    )


def failed(future):
    try:
        future.result()
    except tinker.RequestFailedError as error:
        return str(error)
    return ""


def adapted(service, rest, **layers):
    """The names of the layers that have an adapter, by its exported files, and what the service says of it."""
    training = service.create_lora_training_client(base_model="tiny", rank=2, **layers).result()
    path = training.save_weights_external("out").result().path
    with urllib.request.urlopen(rest.get_external_weights_urls(path).result().urls["adapter_config.json"]) as file:
        names = json.load(file)["target_modules"]
    info = rest.get_weights_info_by_tinker_path(path).result()
    return sorted(names), [info.train_attn, info.train_mlp, info.train_unembed]


def main():
    found = {}
    service = tinker.ServiceClient()
    found["models"] = [one.model_name for one in service.get_server_capabilities().supported_models]
    rest = service.create_rest_client()
    others = rest.list_training_runs().result().cursor.total_count
    training = service.create_lora_training_client(base_model="tiny", rank=4, seed=3).result()
    info = training.get_info()
    found["info"] = [info.model_data.model_name, info.is_lora, info.lora_rank]
    ids = training.get_tokenizer().encode("hello world")
    found["ids"] = ids
    one = datum(ids, weights=[1.0] * (len(ids) - 1))
    losses = []
    for _ in range(4):
        trained = training.forward_backward([one] * 3, "cross_entropy")
        stepped = training.optim_step(types.AdamParams(learning_rate=0.002, grad_clip_norm=1.0))
        losses.append(trained.result().metrics["loss:sum"])
        stepped.result()
    found["losses"] = losses
    many = training.forward([one] * 2500, "cross_entropy").result()  # three chunks, of which the first is sent last
    found["chunks"] = [len(many.loss_fn_outputs), many.metrics["loss:sum"] / 2500]

    snapshot = training.save_weights_and_get_sampling_client().result()
    prompt = PROMPT(ids)
    wide = types.TensorData.from_torch(torch.tensor([[ids[1], -1]] * (len(ids) - 1)))
    sampled = snapshot.sample(
        prompt,
        num_samples=3,
        sampling_params=SAMPLED(max_tokens=5, seed=1),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=2,
        target_prompt_logprobs=wide,
        prompt_alt_tokens_k=2,
    ).result()
    logprobs = many.loss_fn_outputs[0]["logprobs"].to_torch()
    found["gap"] = (torch.tensor(sampled.prompt_logprobs[1:]) - logprobs).abs().max().item()
    found["samples"] = [len(one.tokens) for one in sampled.sequences]
    found["target"] = [*sampled.target_prompt_logprobs.to_torch()[0].tolist(), sampled.prompt_logprobs[1]]
    found["alternatives"] = sampled.prompt_alt_tokens.tokens.shape

    found["logprobs"] = logprobs.tolist()
    found["apart"] = [(0.3, -0.5, -0.5, 0.3)[place % 4] for place in range(len(logprobs))]  # from the sampler's
    found["advantages"] = [(2.0, -1.0)[place % 2] for place in range(len(logprobs))]
    old = (logprobs - torch.tensor(found["apart"])).tolist()
    advantages, mask = {"logprobs": old, "advantages": found["advantages"]}, [0.0] + [1.0] * (len(logprobs) - 1)
    asked = [(loss, {}, {}) for loss in ("importance_sampling", "ppo", "cispo", "dro")]
    asked += [("gspo", {"sequence_ratio_mask": mask}, {}), ("dro", {}, {"beta": 0.5})]
    asked += [("ppo", {}, {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1})]
    data = [([datum(ids, **advantages, **more)], loss, settings) for loss, more, settings in asked]
    found["sums"] = [training.forward(*one).result().metrics["loss:sum"] for one in data]
    sparse = torch.zeros(len(logprobs), 40, dtype=torch.int64)
    sparse[:, 0], weights = torch.tensor(ids[1:]), torch.zeros(len(logprobs), 40)
    weights[:, 0] = 1
    wide = types.Datum(model_input=PROMPT(ids[:-1]), loss_fn_inputs={"target_tokens": sparse, "weights": weights})
    found["sparse"] = [
        wide.loss_fn_inputs["target_tokens"].sparse_crow_indices is not None,
        training.forward([wide], "cross_entropy").result().metrics["loss:sum"],
    ]

    def custom(data, logprobs):
        return sum((one**2).sum() for one in logprobs), {"custom": 2.0}

    mine = training.forward_backward_custom([one], custom).result()
    found["custom"] = [mine.metrics["loss:sum"], (logprobs**2).sum().item(), mine.metrics["custom"]]
    training.optim_step(types.AdamParams(learning_rate=0.0)).result()

    state = training.save_state("state", ttl_seconds=3600).result().path
    named = training.save_weights_for_sampler("named").result().path
    loaded = service.create_training_client_from_state_with_optimizer(state).result()
    again = loaded.forward([one], "cross_entropy").result().metrics["loss:sum"]
    found["loaded"] = [again, many.metrics["loss:sum"] / 2500]
    client = service.create_sampling_client(model_path=named).result()
    greedy = client.sample(prompt, 1, SAMPLED(max_tokens=4, temperature=0.0)).result().sequences[0]
    found["greedy"] = [len(greedy.tokens), greedy.stop_reason]
    found["computed"] = len(client.compute_logprobs(prompt).result())

    found["layers"] = [adapted(service, rest, **one) for one in ({"train_mlp": False}, {"train_attn": False})]
    found["unembedding"] = failed(
        service.create_lora_training_client(base_model="tiny", train_mlp=False, train_attn=False)
    )
    found["refused"] = [
        failed(training.forward_backward([datum(ids, **advantages)], "stable_reinforce")),
        failed(training.optim_step(types.AdamParams())),
        failed(training.forward_backward([datum(ids)], "ppo")),
    ]
    found["checkpoints"] = [one.checkpoint_id for one in rest.list_checkpoints(training.model_id).result().checkpoints]
    rest.delete_checkpoint_from_tinker_path(state).result()
    found["left"] = [one.checkpoint_id for one in rest.list_checkpoints(training.model_id).result().checkpoints]
    found["runs"] = rest.list_training_runs().result().cursor.total_count - others
    service.close("success").result()
    json.dump(found, sys.stdout)


main()
