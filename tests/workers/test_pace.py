"""Speeds of ranks: which forwards are timed and counted, and which ranks are compared."""

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hone.engines.engine import idle_batch
from hone.workers.pace import Pace, shares_of, speed_of


def test_fillers_and_the_last_micro_batch_do_not_count():
    assert speed_of([(1000, 1.0), (2, 0.5), (1000, 3.0), (200, 0.9), (2, 0.5)]) == 500


def test_forwards_shorter_than_what_can_be_timed_give_no_speed():
    assert speed_of([(1000, 0.003), (1000, 0.004)], least_s=0.004) == 0
    assert speed_of([]) == 0


def test_a_rank_with_other_lengths_and_one_without_work_are_not_compared():
    """If attention costs nothing here, the last rank only looks twice as fast as the others."""
    shares = shares_of([(100.0, 1.0), (0.0, 0.0), (50.0, 1.05), (0.0, 1.0), (200.0, 2.0)])
    assert {name: one.value for name, one in shares.items()} == {
        "perf/train/rank_speed/0": 2.0,
        "perf/train/rank_speed/2": 0.5,
    }
    assert shares_of([(100.0, 1.0), (50.0, 1.5)]) == {}


def tiny():
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=16, num_key_value_heads=2)).train()


def test_layers_that_a_backward_repeats_are_not_timed_and_leave_nothing_behind():
    model = tiny()
    model.gradient_checkpointing_enable({"use_reentrant": False})  # as `recompute_layers` does
    pace, ids = Pace(SimpleNamespace(model=model), "cpu"), torch.ones(1, 8, dtype=torch.int64)
    with pace.timing():
        for _ in range(3):
            model(input_ids=ids, labels=ids).loss.backward()
            assert len(pace._begun) == 2
    assert [tokens for tokens, *_ in pace._timed] == [8] * 6
    assert pace.speeds(idle_batch(2), None) == {}
    assert (len(pace._begun), len(pace._timed)) == (0, 0)


def test_a_step_that_fails_ends_the_timing():
    model, ids = tiny(), torch.ones(1, 8, dtype=torch.int64)
    pace = Pace(SimpleNamespace(model=model), "cpu")
    with pytest.raises(ZeroDivisionError), pace.timing():
        raise ZeroDivisionError
    model(input_ids=ids)
    assert pace._timed == []
