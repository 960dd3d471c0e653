"""Costs from timings of a shape, by hand, and the user's file that has them."""

from dataclasses import replace

import pytest

from hone.config import ConfigError
from hone.planner.calibrated import Line, TimedShape, Work, costs_from, line, shape_of
from hone.planner.devices import known_devices, user_file, write_user_file
from tests.planner.test_memory import ACTOR

FACTS = {
    "forward": [1.0, 0.5, 0.0, 0.01],  # 2 layers: 2 s a call, 0.02 s a token
    "training": [2.0, 1.0, 0.0, 0.03],  # 4 s, 0.06 s
    "optimizer": [0.0, 0.5, 0.0, 0.0],  # 1 s
    "decode": [0.1, 0.05, 0.0, 0.001],  # 0.2 s a step, 0.002 s a row
    "attention": [0.0, 0.0001, 0.0, 0.0],  # 0.0002 s a row and column
    "prefill": [1.0, 0.5, 0.0, 0.005],  # 2 s a call, 0.01 s a token
    "sync": [0.0, 3.0, 0.0, 0.0],
    "sequence rl": [0.25],
}


def test_a_line_of_one_number_of_layers_is_the_layers():
    assert line({(4, 10): 2.0, (4, 30): 4.0}) == Line(0.0, 0.25, 0.0, 0.025)
    assert line({(2, 1): 1.0}) == Line(0.0, 0.5, 0.0, 0.0)


def test_noise_makes_no_negative_cost():
    found = line({(1, 10): 3.0, (1, 20): 2.0, (3, 10): 2.0, (3, 20): 1.0})
    assert min(found.call, found.layer, found.token, found.layer_token) == 0.0


def test_costs_of_a_step():
    """100 tokens in 2 micro-batches, 8 sequences, 2 updates: one forward before, one pass with a backward.

    A decode step reads 30 columns for each answer; 50 tokens of prompts are computed together.
    """
    work = Work(tokens=100, sequences=8, microbatches=2, updates=2, columns=30, prefilled=50)
    found = costs_from([TimedShape.read(FACTS, "rl")], [(ACTOR, 1.0, 1.0)], work)
    assert found.rest_s == 8 * 0.25
    assert found.costs.train_step_s == pytest.approx(2 * 2 + 2 * 4 + 2 * 1 + 2)
    assert found.costs.train_token_s == pytest.approx(0.02 + 0.06)
    assert found.forward_share == pytest.approx((4 + 2) / (4 + 2 + 8 + 2 + 6))
    assert (found.costs.decode_s, found.costs.decode_row_s) == (pytest.approx(0.2), pytest.approx(0.002 + 0.006))
    assert (found.costs.prefill_token_s, found.costs.send_s) == (pytest.approx(0.01 + 0.04), pytest.approx(6.0))
    assert costs_from([TimedShape.read(FACTS, "sft")], [(ACTOR, 0.0, 1.0)], work).rest_s == 0.0


def test_a_shape_names_what_its_timings_depend_on():
    shapes = {shape_of(one) for one in (ACTOR, replace(ACTOR, computed=2), replace(ACTOR, recompute=True))}
    shapes |= {shape_of(replace(ACTOR, adapter=10)), shape_of(replace(ACTOR, values=True))}
    assert len(shapes) == 5
    assert shape_of(replace(ACTOR, tokens=7)) == shape_of(ACTOR)


def test_the_users_file_keeps_other_devices_and_is_checked(tmp_path, monkeypatch):
    monkeypatch.setenv("HONE_DEVICE_FACTS", str(tmp_path / "mine.yaml"))
    known = known_devices()
    write_user_file(replace(known["H100"], price_per_hour=1.5))
    write_user_file(replace(known["A100"], calibrated={"shape": FACTS}))
    again = known_devices()
    assert again["H100"].price_per_hour == 1.5
    assert again["A100"].calibrated["shape"]["forward"] == FACTS["forward"]
    user_file().write_text(user_file().read_text().replace("- 0.25", "- much"))
    with pytest.raises(ConfigError, match=r"A100.calibrated: expected what hone plan --calibrate writes"):
        known_devices()
