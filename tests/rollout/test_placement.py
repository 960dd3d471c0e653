"""Which replica gets a request: prompts are computed once, and no replica gets far more to do than another."""

import random
from collections import Counter

from hone.processes.restarts import Restarts
from hone.rollout.pending import PendingRequest
from hone.rollout.placement import TOGETHER, RequestPlacement
from hone.rollout.replicas import Replica
from hone.types import GenerationRequest, SamplingParams


def replicas(count):
    return [Replica(None, f"r{number}", Restarts(1, 1.0)) for number in range(count)]


def request(name, prompt, max_tokens=100):
    return PendingRequest(GenerationRequest(name, prompt, SamplingParams(max_tokens)))


def place(placement, one, free):
    chosen = placement.choose(one, free)
    chosen.begin(one)
    return chosen.name


def test_samples_of_a_prompt_are_together_and_prompts_of_any_length_are_spread_by_tokens():
    """Answers of 100 tokens, 4 samples: a prompt costs 400 and its length once."""
    placement, fleet = RequestPlacement(), replicas(2)
    lengths = [1000, 50, 50, 50, 50, 50, 50]
    homes = [
        {place(placement, request(f"1/{i}/{sample}/0", (i,) * length), fleet) for sample in range(4)}
        for i, length in enumerate(lengths)
    ]
    assert homes == [{"r0"}, {"r1"}, {"r1"}, {"r1"}, {"r1"}, {"r0"}, {"r1"}]
    # after four prompts r1 has 4 x 450 = 1800 > 1400 of r0; then 1850 of r0
    assert [one.expected_tokens for one in fleet] == [1400 + 450, 5 * 450]


def test_one_prompt_does_not_stay_at_one_replica_while_others_have_nothing_to_do():
    """A request costs 200 where the prompt is new, then 100; a replica takes 16 until it is 8 x 200 ahead."""
    placement, fleet = RequestPlacement(), replicas(4)
    found = [place(placement, request(f"1/0/{sample}/0", (7,) * 100), fleet) for sample in range(64)]
    assert found == ["r0"] * 16 + ["r1"] * 16 + ["r2"] * 16 + ["r3"] * 16
    assert {one.expected_tokens for one in fleet} == {200 + 15 * 100}


def test_ragged_prompts_that_come_and_go_leave_no_replica_far_behind():
    draw = random.Random(0)
    placement, fleet = RequestPlacement(), replicas(3)
    running = []
    for number in range(400):
        length, samples = draw.choice([5, 40, 300, 2000]), draw.choice([1, 2, 8, 16])
        for sample in range(samples):
            one = request(f"1/{number}/{sample}/0", (number,) * length)
            before = {replica.name: replica.expected_tokens for replica in fleet}
            chosen = place(placement, one, fleet)
            assert before[chosen] - min(before.values()) <= TOGETHER * (length + 100)
            running.append((next(replica for replica in fleet if replica.name == chosen), one))
        while len(running) > 60:
            replica, ended = running.pop(draw.randrange(len(running)))
            replica.end(ended)
    for replica, one in running:
        replica.end(one)
    assert [replica.expected_tokens for replica in fleet] == [0, 0, 0]


def test_a_turn_goes_to_its_trajectory_and_without_a_seat_there_to_another():
    placement, fleet = RequestPlacement(), replicas(2)
    assert place(placement, request("1/0/0/0", (1, 2)), fleet) == "r0"
    assert place(placement, request("1/1/0/0", (3, 4)), fleet) == "r1"
    assert place(placement, request("1/1/0/1", (3, 4, 5)), fleet) == "r1"
    assert place(placement, request("1/1/0/2", (3, 4, 5, 6)), fleet[:1]) == "r0"
    assert place(placement, request("1/1/0/3", (3, 4, 5, 6, 7)), fleet) == "r0"


def test_answers_are_expected_to_be_as_long_as_the_last_ones():
    placement, fleet = RequestPlacement(), replicas(1)
    placement.saw(64)
    placement.saw(0)  # 64 - 64 / 64
    costs = Counter()
    for name, limit in (("a", 1000), ("b", 10)):
        one = request(name, (1,) * 5, limit)
        place(placement, one, fleet)
        costs[name] = one.cost
    assert costs == {"a": 63 + 5, "b": 10}
