"""Simulated schedules that can be computed by hand, and what holds for all of them."""

from collections import Counter
from itertools import cycle

import pytest

from hone.planner import simulation
from hone.planner.costs import Costs
from hone.planner.fleet import Fleet
from hone.planner.lengths import Lengths, parse_lengths
from hone.planner.simulation import Setting, simulate
from hone.schedule.seats import Standing, moves


def in_turn(*lengths):
    """Lengths that come in this order, again and again."""
    found = cycle(lengths)
    return Lengths("in turn", lambda _: next(found))


def setting(costs, lengths="constant:10", **others):
    """One prompt with one answer in each step, unless said otherwise."""
    lengths = parse_lengths(lengths, 10_000) if isinstance(lengths, str) else lengths
    return Setting(costs, lengths, **{"prompts_per_step": 1, "samples_per_prompt": 1, **others})


@pytest.mark.parametrize(("generate", "train"), [(5.0, 3.0), (3.0, 5.0), (4.0, 4.0)])
def test_staleness_0_takes_g_plus_t_and_staleness_1_the_longer_of_both(generate, train):
    costs = Costs(generate / 10, train_step_s=train)
    turns, ahead = (simulate(setting(costs, staleness=staleness)) for staleness in (0, 1))
    assert turns.steps_per_s == pytest.approx(1 / (generate + train))
    assert ahead.steps_per_s == pytest.approx(1 / max(generate, train))
    assert (turns.staleness, turns.staleness_max, ahead.staleness, ahead.staleness_max) == (0, 0, 1, 1)
    assert turns.rollout_utilisation == pytest.approx(generate / (generate + train))
    assert turns.trainer_utilisation == pytest.approx(train / (generate + train))
    assert ahead.trainer_utilisation == pytest.approx(train / max(generate, train))


def test_every_cost_of_a_synchronous_step_counts_once():
    costs = Costs(
        decode_s=1.0,
        decode_row_s=0.5,
        prefill_token_s=0.25,
        train_token_s=0.1,
        train_step_s=2.0,
        copy_s=3.0,
        send_s=4.0,
        reward_s=5.0,
    )
    found = simulate(setting(costs, in_turn(4, 4), samples_per_prompt=2, prompt_tokens=8, trainer_devices=2))
    prefill, decode = 8 * 0.25, 4 * (1 + 2 * 0.5)  # both answers share the prompt's KV cache
    train = 2 + (2 * 4 + 2 * 8) * 0.1 / 2
    assert 1 / found.steps_per_s == pytest.approx(prefill + decode + 5 + train + 3 + 4)
    assert found.tokens_per_s == pytest.approx(8 * found.steps_per_s)


def test_a_batch_that_thins_out_decodes_faster():
    found = simulate(setting(Costs(1.0, 1.0, train_step_s=1.0), in_turn(2, 6), samples_per_prompt=2))
    assert 1 / found.steps_per_s == pytest.approx(2 * 3 + 4 * 2 + 1)


def test_answers_beyond_the_seats_wait():
    found = simulate(setting(Costs(1.0, 1.0), in_turn(2, 6), samples_per_prompt=2, seats=1))
    assert 1 / found.steps_per_s == pytest.approx((2 + 6) * 2)


def test_answers_are_spread_over_the_servers():
    found = simulate(setting(Costs(1.0, 1.0), in_turn(2, 6), samples_per_prompt=2, replicas=2))
    assert 1 / found.steps_per_s == pytest.approx(6 * 2)
    assert found.rollout_utilisation == pytest.approx((2 + 6) / (2 * 6))


def test_with_recompute_an_answer_has_tokens_of_several_versions():
    """Draws of even steps end under newer weights than they began, 2 tokens to 8; every other draw is one update old:

    draw 2k   |vv|wwwwwwww|--| (trained: 2 tokens of age 1, 8 of age 0)
    draw 2k+1    |wwwwwwwwww|--| (trained after draw 2k: 10 tokens of age 1)
    """
    costs = Costs(1.0, train_step_s=2.0)
    found = simulate(setting(costs, staleness=1, new_weights="recompute"))
    assert 1 / found.steps_per_s == pytest.approx(12 / 2)
    assert found.staleness == pytest.approx((2 + 10) / 20)


def test_a_kept_cache_is_not_computed_again():
    costs = Costs(1.0, prefill_token_s=0.5, train_step_s=2.0)
    recompute, keep = (simulate(setting(costs, staleness=1, new_weights=mode)) for mode in ("recompute", "keep_cache"))
    assert 1 / keep.steps_per_s == pytest.approx(12 / 2)
    assert 1 / recompute.steps_per_s == pytest.approx((12 + 2 * 0.5) / 2)  # once in two steps, after 2 tokens


@pytest.mark.parametrize("new_weights", ["finish", "recompute", "keep_cache"])
@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
def test_no_token_is_older_than_the_bound_with_a_twentyfold_tail(staleness, new_weights):
    lengths = in_turn(*[5] * 30, 100)
    costs = Costs(0.01, 0.001, train_step_s=0.2, send_s=0.05)
    found = simulate(
        setting(costs, lengths, staleness=staleness, new_weights=new_weights, prompts_per_step=7, replicas=3, seats=4)
    )
    assert found.staleness <= found.staleness_max <= staleness
    assert staleness == 0 or found.staleness > 0


def test_equal_seeds_give_equal_results_and_a_longer_window_is_no_slower():
    def found(staleness, seed):
        costs = Costs(0.01, 0.0005, train_token_s=0.001, send_s=0.1)
        lengths = parse_lengths("lognormal:50:1", 800)
        return simulate(Setting(costs, lengths, 8, 4, staleness, "recompute", replicas=4, steps=20, seed=seed))

    assert found(1, seed=3) == found(1, seed=3) != found(1, seed=4)
    speeds = [found(staleness, seed=3).steps_per_s for staleness in (0, 1, 2, 4)]
    assert speeds == sorted(speeds)


def test_a_few_servers_of_each_class_decide_as_all_do(monkeypatch):
    """The fleet asks `moves` about some of the servers that are alike; asked about all, it would decide the same."""
    compared = []

    class Compared(Fleet):
        def _moves(self):
            found = super()._moves()
            standings = [
                Standing(str(place), one.version, frozenset(one.ranges)) for place, one in enumerate(self.replicas)
            ]
            whole = moves(standings, list(self._waiting), self._held, self._kept)

            def by_class(taken):
                return Counter((self._class_of[int(place)], version) for place, version in taken.items())

            compared.append(by_class(found))
            assert by_class(found) == by_class(whole)
            return found

    monkeypatch.setattr(simulation, "Fleet", Compared)
    for mode in ("finish", "recompute"):
        lengths = parse_lengths("lognormal:60:1.2", 2000)
        costs = Costs(0.01, 0.001, train_step_s=0.7, send_s=0.2)
        simulate(Setting(costs, lengths, 24, 2, 2, mode, replicas=12, seats=3, seed=5))
    assert sum(any(count > 2 for count in found.values()) for found in compared) > 5  # crowds moved
