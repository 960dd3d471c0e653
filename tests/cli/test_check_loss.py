"""`hone check-loss` gives the loss of a saved batch: sums of token losses by hand, and TRL's formula."""

import json

import pytest
import torch
import yaml
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from hone.cli.main import main
from hone.models.settings import ModelConfig
from hone.trainers.run.run_model import local_model
from tests.trainers import tiny

ROWS, PROMPT, ANSWER = 4, 3, 4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model on the disk, which transformers loads without hone."""
    return local_model(ModelConfig(**tiny.BASE["model"]), tmp_path_factory.mktemp("model") / "model").path


@pytest.fixture(scope="module")
def batch():
    """Prompts padded on the left, answers on the right, as verl and TRL pad."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 7, (ROWS, PROMPT + ANSWER), generator=draw)
    mask = torch.tensor([[0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0], [1] * 7, [0, 0, 1, 1, 1, 1, 0]])
    learnt = mask[:, PROMPT:].clone()
    learnt[2, 1] = 0  # a token of a tool
    old = -torch.rand(ROWS, ANSWER, generator=draw) * 2
    return ids, mask, learnt, old, torch.tensor([1.0, -0.5, 0.25, -1.0])


def logprobs_of(path, ids, mask):
    """Log-probs of the answers' tokens, each sequence alone and without padding: [ROWS, ANSWER]."""
    network = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    found = torch.zeros(ROWS, PROMPT + ANSWER)
    for row in range(ROWS):
        kept = mask[row].bool()
        one = ids[row][kept][None]
        scores = network(one).logits[0, :-1].log_softmax(-1).gather(1, one[0, 1:, None])[:, 0]
        found[row, torch.nonzero(kept)[1:, 0]] = scores
    return found[:, PROMPT:], network


def run_file(folder, path, kind="rl", **changes):
    recipe = tiny.recipe(folder, {"model": {"path": str(path)}, **changes})
    settings = yaml.safe_load(recipe.read_text())
    if kind == "sft":
        kept = ("run", "model", "data", "actor", "runtime")
        settings = {"kind": "sft", "samples_per_step": 4, **{key: settings[key] for key in kept}, **changes}
    recipe.write_text(yaml.safe_dump(settings))
    return recipe


def checked(capsys, *arguments, code=0):
    capsys.readouterr()
    assert main(["check-loss", *map(str, arguments)]) == code
    return capsys.readouterr()


def saved(folder, tensors):
    save_file({name: one.contiguous() for name, one in tensors.items()}, folder / "batch.safetensors")
    return folder / "batch.safetensors"


def test_supervised_loss_is_the_mean_over_tokens(tmp_path, capsys, model, batch):
    ids, mask, learnt, *_ = batch
    logprobs, network = logprobs_of(model, ids, mask)
    loss = -(logprobs * learnt).sum() / learnt.sum()
    loss.backward()
    norm = torch.stack([one.grad.norm() for one in network.parameters()]).norm()
    path = saved(tmp_path, {"input_ids": ids, "attention_mask": mask, "loss_mask": learnt})
    found = json.loads(checked(capsys, path, run_file(tmp_path, model, "sft"), "--json").out)
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert found["gradient norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert found["tokens with a loss"] == learnt.sum()


@pytest.mark.parametrize("names", ["verl", "trl"])
def test_policy_loss_is_the_clipped_ratio_as_in_trl(tmp_path, capsys, model, batch, names):
    """TRL's GRPO loss: of each answer the mean over its tokens, and then the mean over the answers."""
    ids, mask, learnt, old, advantages = batch
    logprobs, network = logprobs_of(model, ids, mask)
    ratio = (logprobs - old).exp()
    clipped = torch.min(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    loss = -((clipped * learnt).sum(1) / learnt.sum(1)).mean()
    loss.backward()
    norm = torch.stack([one.grad.norm() for one in network.parameters()]).norm()
    whole = {"input_ids": ids, "attention_mask": mask, "response_mask": learnt, "old_log_probs": old}
    if names == "trl":
        learnt = mask[:, PROMPT:]  # TRL's mask of completions is that of padding alone
        loss = -((clipped * learnt).sum(1) / learnt.sum(1)).mean()
        whole = {"prompt_ids": ids[:, :PROMPT], "prompt_mask": mask[:, :PROMPT], "completion_ids": ids[:, PROMPT:]}
        whole |= {"completion_mask": learnt, "old_per_token_logps": old}
    path = saved(tmp_path, {**whole, "advantages": advantages})
    algorithm = {
        "loss": {"name": "ppo", "clip_low": 0.2, "clip_high": 0.2},
        "aggregation": {"mode": "seq_mean_token_mean"},
    }
    recipe = run_file(tmp_path, model, algorithm=algorithm)
    found = json.loads(checked(capsys, path, recipe, "--json").out)
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-5)
    if names == "verl":
        assert found["gradient norm"] == pytest.approx(norm.item(), rel=1e-4)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"old_logprob": torch.zeros(ROWS, ANSWER)}, "did you mean 'old_logprobs'"),
        ({"advantages": torch.zeros(ROWS + 1)}, r"advantages is [5]; expected [4, 7]"),
        ({"loss_mask": None}, "has no loss_mask"),
        ({"response_mask": torch.ones(ROWS, ANSWER)}, "another name of loss_mask, which is there too"),
        ({}, "neither advantages nor rewards"),
        ({"input_ids": torch.full((ROWS, 7), 5000), "rewards": torch.ones(ROWS)}, "token id 5000 is in the batch"),
    ],
)
def test_a_wrong_batch_is_one_clear_error(tmp_path, capsys, model, batch, change, says):
    ids, mask, learnt, *_ = batch
    tensors = {"input_ids": ids, "attention_mask": mask, "loss_mask": learnt, **change}
    path = saved(tmp_path, {name: one for name, one in tensors.items() if one is not None})
    assert says in checked(capsys, path, run_file(tmp_path, model), code=2).err


def test_prompts_that_are_not_repeated_are_one_clear_error(tmp_path, capsys, model, batch):
    ids = torch.ones(4, 3, dtype=torch.long)
    path = saved(
        tmp_path, {"prompt_ids": ids[:2].clone(), "completion_ids": ids, "completion_mask": torch.ones_like(ids)}
    )
    assert main(["check-loss", str(path), str(run_file(tmp_path, model))]) == 2
    assert "[[2, 3], [2, 3], [4, 3], [4, 3]]; expected [N, P]" in capsys.readouterr().err
