"""What counts as a value, how a function is found, and what is said when it is not."""

import datetime
import decimal

import numpy
import pytest
import torch

from hone.config import ConfigError, build
from hone.processes.frames import encode_value
from hone.rewards.base import BadReward, judge, load_reward
from hone.rewards.binding import Case
from hone.rewards.pool import encode_case
from hone.rewards.settings import RewardConfig


@pytest.mark.parametrize(
    ("returned", "value", "parts"),
    [
        (1, 1.0, {}),
        (True, 1.0, {}),
        (0.25, 0.25, {}),
        (numpy.float32(0.5), 0.5, {}),
        (numpy.bool_(True), 1.0, {}),
        (torch.tensor(0.5), 0.5, {}),
        ({"reward": 0.5, "format": True}, 0.5, {"format": 1.0}),
        ({"reward": -2}, -2.0, {}),
        ({"score": 0.5, "acc": True}, 0.5, {"acc": 1.0}),  # as verl's functions return
        (
            {"score": 1, "acc": True, "pred": "34", "tip": None, "all": [1], "n": numpy.int64(2)},
            1.0,
            {"acc": 1, "n": 2},
        ),
    ],
)
def test_a_number_or_a_dict_of_numbers_is_a_value(returned, value, parts):
    assert judge(returned) == (value, parts)
    assert all(type(number) is float for number in (judge(returned)[0], *judge(returned)[1].values()))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "is None"),
        ("1.0", "expected a number"),
        ([1.0], "expected a number"),
        (1j, "expected a number"),
        (float("nan"), "expected a finite number"),
        (float("-inf"), "expected a finite number"),
        (torch.tensor(float("nan")), "expected a finite number"),
        (torch.tensor([1.0]), "expected a number"),
        ({"points": 1.0}, r"without the key 'reward' \(it has: points\)"),
        ({"reward": 1.0, "part": None}, "'part' is None"),
        ({"score": "1", "acc": 1}, "the reward's 'score' is '1'"),
        ({"score": 1.0, "acc": float("nan")}, "'acc' is nan; expected a finite number"),
        ({}, "without the key 'reward'"),
    ],
)
def test_anything_else_is_a_failure(returned, message):
    with pytest.raises((TypeError, ValueError), match=message):
        judge(returned)


def test_functions_are_found_by_name_module_or_file(user):
    assert load_reward("a", "gsm8k", {"extraction": "strict"}).call(Case("#### 2", "", 2, {})) == 1.0
    assert load_reward("a", "hone.rewards.gsm8k:gsm8k", {}).call(Case("2", "", 2, {})) == 1.0
    assert load_reward("a", user("length"), {"scale": 0.5}).call(Case("four", "", None, {})) == 2.0
    assert not load_reward("a", user("length"), {}).concurrent
    assert load_reward("a", user("waiting"), {}).concurrent
    assert load_reward("a", user("judge"), {}).concurrent


@pytest.mark.parametrize(
    ("reference", "options", "message"),
    [
        ("gsm9k", {}, "did you mean 'gsm8k'"),
        ("no_such_module:f", {}, "No module named 'no_such_module'"),
        ("no/such/file.py:f", {}, "no file no/such/file.py"),
        ("user:lenght", {}, "did you mean 'length'"),
        ("user:USER", {}, "unknown name"),
        ("json:__name__", {}, "is a str, not a function"),
        ("user:length", {"scale": "big"}, "option scale should be a float, found 'big'"),
        ("user:length", {"scale": True}, "option scale should be a float, found True"),
        ("user:length", {"sclae": 1.0}, r"unexpected keyword argument 'sclae' \(it accepts the options: scale\)"),
        ("gsm8k", {"extraction": "strct"}, "one of 'strict', 'flexible', found 'strct'; did you mean 'strict'"),
        ("exact_match", {"ignore_case": 1}, "option ignore_case should be a bool, found 1"),
        ("math:sqrt", {}, "cannot be called as"),
    ],
)
def test_what_cannot_be_loaded_is_one_sentence_that_names_the_component(user, reference, options, message):
    reference = user(reference.removeprefix("user:")) if reference.startswith("user:") else reference
    with pytest.raises(BadReward, match=message) as caught:
        load_reward("accuracy", reference, options)
    assert "component 'accuracy'" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["def f(:\n", "1/0\n", "import no_such_module\n", "raise SystemError('x')\n"])
def test_a_broken_file_is_reported_whatever_it_raises(tmp_path, text):
    broken = tmp_path / "broken.py"
    broken.write_text(text)
    with pytest.raises(BadReward, match=r"cannot be loaded: \w+Error"):
        load_reward("a", f"{broken}:f", {})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"components": {"environment": {"reward": "math"}}},
            "component name 'environment' is reserved for the rewards of",
        ),
        (
            {"components": {"a": {"reward": "gsm9k"}}},
            r"components.a.reward: unknown reward 'gsm9k'; did you mean 'gsm8k'",
        ),
        ({"components": {"a/b": {"reward": "gsm8k"}}}, "or contain '/'"),
        ({"components": {"a": {"reward": "gsm8k", "timeout_s": 0}}}, "timeout_s"),
        ({"components": {"a": {"reward": "gsm8k", "wieght": 1}}}, "weight"),
        ({"components": {"a": {"reward": "gsm8k", "weight": float("nan")}}}, "finite"),
        ({"components": {"a": {"reward": "gsm8k"}}, "workers": 0}, "workers"),
    ],
)
def test_settings_are_refused_by_name(data, message):
    with pytest.raises(ConfigError, match=message):
        build(RewardConfig, data, source="run.yaml")


def test_rows_cross_as_json_or_name_the_column():
    row = {"day": datetime.date(2026, 1, 2), "price": decimal.Decimal("1.50"), "pair": (1, 2)}
    assert encode_case("t", row) == '"t", {"day": "2026-01-02", "price": "1.50", "pair": [1, 2]}'
    with pytest.raises(TypeError, match="column 'image' of the row: a value of type bytes"):
        encode_case("t", {"image": b"\x89PNG"})
    deep = []
    for _ in range(300):
        deep = [deep]
    with pytest.raises(TypeError, match=r"column 'tree' of the row: .*nested more than 200 levels"):
        encode_case("t", {"tree": deep})
    assert encode_value(None) == "null"
