"""Speculative decoding by n-grams: drafts are taken over and thrown away, and what is sampled is still the policy's.

The server is a frozen one at first: it scores with the weights of its folder.
"""

import math
import re

import pytest
import torch

from tests.rollout.servers.test_server_scores import check_scores

pytestmark = pytest.mark.vllm

CYCLE = (9, 30, 51, 72) * 6  # its n-grams came before, so there is always something to propose
PROMPTS = [CYCLE[:9], CYCLE, (5, 6, 7) * 7, (40,), tuple(range(20, 60))]
TEMPERATURE = 0.5
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def frozen(real_adapter, runner):
    """A server that proposes tokens, with the weights of its folder."""
    server = real_adapter("vllm", 2, engine={"speculative_config": DRAFTS}, lora={"frozen": True})
    runner.run(server.start())
    yield server
    runner.run(server.close())


@pytest.fixture(scope="module")
def guessing(frozen, push, models):
    """That server with the first model's weights as version 1, which took the place of others."""
    for version in (0, 1):
        push(frozen, list(models[1 - version].state_dict().items()), version)
    return frozen


def counted(server, finish, what):
    async def ask():
        async with server.connection.session().get("http://server/metrics") as reply:
            return await reply.text()

    found = re.findall(rf"^vllm:spec_decode_num_{what}_tokens_total{{.*}} (\S+)$", finish(ask()), re.MULTILINE)
    return sum(map(float, found))


def surprise(forward, model, prompt, completion):
    """Over the tokens of a completion: how much less likely they are than samples of the model would be, the variance
    of that, and the largest difference of a log-prob from the model's."""
    logits = forward(model, (*prompt, *completion.token_ids))[len(prompt) - 1 : -1]
    logprobs = (logits / TEMPERATURE).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    variance = (logprobs.exp() * logprobs**2).sum(-1) - entropy**2
    own = logprobs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    gap = (own - torch.tensor(completion.logprobs)).abs().max()
    return float((-own - entropy).sum()), float(variance.sum()), float(gap)


def test_a_server_scores_with_the_weights_of_its_folder(frozen, models, runner, forward):
    assert not frozen.has_base, "weights came by a sync"
    check_scores(frozen, models[0], runner, forward)


def test_greedy_tokens_are_the_models_whatever_was_proposed(guessing, models, finish, forward, sample, gap):
    before = counted(guessing, finish, "accepted")
    for prompt, one in zip(PROMPTS, sample(guessing, PROMPTS, temperature=0.0, max_tokens=40), strict=True):
        logits = forward(models[0], (*prompt, *one.token_ids))[len(prompt) - 1 : -1]
        assert torch.equal(logits.argmax(-1), torch.tensor(one.token_ids))
        assert gap(models[0], prompt, one) < 1e-4
        assert len(one.token_ids) == 40
    assert counted(guessing, finish, "accepted") > before, "nothing that was proposed was taken over"


def test_samples_are_the_policys_and_repeat_with_their_seeds(guessing, models, finish, forward, sample):
    proposed, accepted = (counted(guessing, finish, what) for what in ("draft", "accepted"))
    prompts = [prompt for prompt in PROMPTS for _ in range(12)]
    wanted = {"max_tokens": 24, "temperature": TEMPERATURE}
    found = sample(guessing, prompts, **wanted)
    assert [one.token_ids for one in sample(guessing, prompts, **wanted)] == [one.token_ids for one in found]
    taken = counted(guessing, finish, "accepted") - accepted
    assert 0 < taken < counted(guessing, finish, "draft") - proposed
    off = variance = 0.0
    for prompt, one in zip(prompts, found, strict=True):
        assert set(one.weight_versions) == {1}
        more, width, gap = surprise(forward, models[0], prompt, one)
        assert gap < 1e-4
        off, variance = off + more, variance + width
    assert abs(off) < 4 * math.sqrt(variance), "they are not drawn from the model's distribution"
