"""Estimators and losses that a run file names by their file: numbers, settings, errors, and runs."""

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from hone.algorithms import ADVANTAGES, POLICY_LOSSES
from hone.algorithms.algorithm import Algorithm
from hone.algorithms.objective import PolicyObjective
from hone.algorithms.settings import AlgorithmConfig
from hone.cli.main import main
from hone.config import ConfigError, build, plain
from hone.explain import schema
from hone.types import ModelOutput
from tests.trainers.tiny import metrics, recipe

ROOT = Path(__file__).parents[2]
FILE = ROOT / "recipes" / "own_algorithm" / "one_file.py"
PAGE = (ROOT / "docs" / "own_algorithm.md").read_text(encoding="utf-8")
CENTRED, SOFTENED = f"{FILE}:centred", f"{FILE}:Softened"

FORMS = """
from hone.algorithms.advantages import Advantages
from hone.algorithms.settings import AdvantageSettings, PolicyLossSettings
from hone.types import LossOutput

def plain_loss(inputs):
    return LossOutput(-3 * inputs.advantages * inputs.lp)

def plain_advantage(batch):
    return Advantages(2.0 * batch.loss_mask)

class WithCritic(AdvantageSettings):
    @property
    def required_fields(self):
        return frozenset({"rewards", "values"})

def with_critic(batch, settings: WithCritic):
    return Advantages(batch.values, batch.values)

class Silent(PolicyLossSettings):
    pass

class Stranger:
    def __call__(self, inputs):
        return None

def none(inputs): return None
def one_number(inputs): return LossOutput(inputs.lp.mean())
def no_settings(inputs, settings): return LossOutput(inputs.lp)
def unknown_settings(inputs, settings: "Nowhere"): return LossOutput(inputs.lp)
def nothing(): return None
def everything(inputs, *others): return None
number = 3
"""


@pytest.fixture
def forms(tmp_path):
    """forms("name") -> reference of a part in a file with parts of all forms."""
    (tmp_path / "forms.py").write_text(FORMS, encoding="utf-8")
    return lambda name: f"{tmp_path / 'forms.py'}:{name}"


def algorithm(**settings):
    return Algorithm(build(AlgorithmConfig, settings, "run.yaml", "algorithm"), 1)


def test_the_example_s_numbers(batches, close):
    """Rewards 0, 0, 0 and 1 have the mean 0.25; log-ratio log 4 with power 0.5 is a factor of 2."""
    batch = batches.build([[1], [1], [1], [1]], rewards=[0.0, 0.0, 0.0, 1.0], old_logprobs=[-2.0] * 4)
    chosen = algorithm(advantage=CENTRED, loss=SOFTENED)
    found = chosen.advantages(batch)
    close(found.advantages, [-0.25, -0.25, -0.25, 0.75])
    bounded = algorithm(advantage={"name": CENTRED, "bound": 0.5})
    close(bounded.advantages(batch).advantages, [-0.25, -0.25, -0.25, 0.5])

    lp = (torch.tensor([1.0, 4.0, 0.25, 4.0], dtype=torch.float64).log() - 2).requires_grad_()
    values = chosen.policy_objective()(ModelOutput(logprobs=lp), chosen.weigh(found)).values
    close(values.detach(), [0.25, 0.5, 0.125, -1.5])
    (gradient,) = torch.autograd.grad(values.sum(), lp)
    close(gradient, [0.125, 0.25, 0.0625, -0.75])  # of -A rho^0.5: half the value


def test_functions_without_settings(batches, close, forms):
    batch = batches.build([[0, 1], [1]], rewards=[0.0, 1.0])
    chosen = algorithm(advantage=forms("plain_advantage"), loss=forms("plain_loss"))
    found = chosen.advantages(batch)
    close(found.advantages, [0.0, 2.0, 2.0])
    lp = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    close(chosen.policy_objective()(ModelOutput(logprobs=lp), chosen.weigh(found)).values, [0.0, 12.0, 3.0])


def test_what_its_settings_declare_is_what_the_run_provides(forms):
    chosen = algorithm(advantage=forms("with_critic"))
    assert chosen.needs_values
    assert chosen.required_fields == {"rewards", "values"}
    assert not algorithm(advantage=forms("plain_advantage")).needs_values


def test_it_may_be_the_loss_within_another_and_survives_a_preset():
    config = build(AlgorithmConfig, {"preset": "dapo", "loss": {"name": SOFTENED, "power": 1.0}}, "run.yaml")
    assert (config.loss.name, config.loss.power, config.dynamic_sampling.metric) == (SOFTENED, 1.0, "reward")
    inner = build(AlgorithmConfig, {"loss": {"name": "top_entropy", "loss": SOFTENED}}, "run.yaml")
    assert (inner.loss.loss.name, inner.loss.loss.power) == (SOFTENED, 0.5)
    assert build(AlgorithmConfig, plain(inner), "config.yaml") == inner  # as a continued run reads it


@pytest.mark.parametrize("nested", [pytest.param(False, marks=pytest.mark.slow), True])
def test_another_process_in_another_folder_loads_the_file_itself(tmp_path, nested, monkeypatch):
    monkeypatch.chdir(ROOT)
    own = {"name": "recipes/own_algorithm/one_file.py:Softened", "power": 1.0}
    loss = {"name": "top_entropy", "share": 1.0, "loss": own} if nested else own
    sent = pickle.dumps(PolicyObjective(build(AlgorithmConfig, {"loss": loss}, "run.yaml")))
    (tmp_path / "sent").write_bytes(sent)
    code = f"""
import pathlib, pickle, torch
from hone.algorithms.losses import LossInputs
objective = pickle.loads(pathlib.Path("sent").read_bytes())
lp = torch.tensor([-1.0, -2.0])
inputs = LossInputs(lp=lp, old=lp - torch.tensor(3.0).log(), advantages=torch.ones(2), mask=torch.ones(2).bool(),
                    cu_seqlens=torch.tensor([0, 2]), selected=torch.ones(2).bool() if {nested} else None)
print([round(value, 4) for value in objective._loss(inputs, objective._settings).values.tolist()])
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines() == ["[-3.0, -3.0]"], done.stderr  # the ratio is 3, the power 1


@pytest.mark.parametrize(
    ("key", "name", "message"),
    [
        ("loss", "missing.py:f", r"policy loss 'missing.py:f' cannot be loaded: no file missing.py \(current folder"),
        ("loss", "plain_los", r"cannot be loaded: unknown name in .*forms.py 'plain_los'; did you mean 'plain_loss'"),
        ("loss", "number", r"is a int, not a function; expected def name\(inputs: LossInputs, settings: PolicyLossSe"),
        ("loss", "nothing", r"takes \(\); expected def name\(inputs: LossInputs, "),
        ("loss", "everything", r"takes \(inputs, \*others\); expected"),
        ("loss", "no_settings", "has no annotation at its parameter 'settings', not a class that extends PolicyLoss"),
        ("loss", "unknown_settings", "has an annotation that cannot be read .*Nowhere"),
        ("loss", "with_critic", "has the annotation WithCritic at its parameter 'settings', not a class that extends"),
        ("loss", "Stranger", "is a class that does not extend PolicyLossSettings; expected"),
        ("loss", "Silent", "is a settings class without a method __call__"),
        ("advantage", "plain_loss_", r"expected def name\(batch: Batch, settings: AdvantageSettings\) -> Advantages"),
        ("advantage", "one_file", r"unknown advantage estimator 'one_file' .*, or 'path/to/file.py:function' of your"),
    ],
)
def test_what_cannot_be_one_is_refused_at_the_start(forms, key, name, message):
    if name == "plain_loss_":
        name = forms("Silent")
    elif ":" not in name and name != "one_file":
        name = forms(name)
    with pytest.raises(ConfigError, match=message) as caught:
        build(AlgorithmConfig, {key: name}, "run.yaml", "algorithm")
    assert str(caught.value).startswith(f"run.yaml: algorithm.{key}: ")


@pytest.mark.parametrize(
    ("name", "found"), [("none", "returned NoneType"), ("one_number", r"returned values of shape \[\]")]
)
def test_a_result_that_is_not_one_value_per_token_is_an_error(batches, forms, name, found):
    chosen = algorithm(advantage=forms("plain_advantage"), loss=forms(name))
    batch = chosen.weigh(chosen.advantages(batches.build([[0, 1, 1]], rewards=[1.0])))
    expected = rf"forms.py:{name}' {found}; expected LossOutput with values of shape \[3\], one value per token"
    with pytest.raises(ConfigError, match=expected):
        chosen.policy_objective()(ModelOutput(logprobs=torch.tensor([0.0, -1.0, -2.0])), batch)


def test_registered_names_are_as_before():
    assert ADVANTAGES.target("grpo") == "hone.algorithms.advantages:grpo"
    assert POLICY_LOSSES.target(SOFTENED) == SOFTENED
    assert not [name for name in (*ADVANTAGES, *POLICY_LOSSES) if ":" in name]


def test_editors_accept_their_names():
    arms = schema(AlgorithmConfig)["properties"]["advantage"]["anyOf"]
    own = {"type": "string", "pattern": ":"}
    assert own in arms
    assert {"type": "object", "properties": {"name": own}, "required": ["name"]} in arms


def test_a_run_trains_with_both(tmp_path, monkeypatch, capsys):
    """The run is the tiny one; its folder keeps the settings, and a run of this `config.yaml` reads them again."""
    monkeypatch.chdir(FILE.parent)
    chosen = ["algorithm.advantage=one_file.py:centred", "--algorithm.advantage.bound", "0.5"]
    chosen += ["--algorithm.loss", "one_file.py:Softened", "run.steps=2", "evaluation.every_steps=0"]
    assert main(["train", str(recipe(tmp_path)), *chosen]) == 0
    assert metrics(tmp_path / "run")[1]["train/grad_norm"] > 0
    saved = (tmp_path / "run" / "config.yaml").read_text(encoding="utf-8")
    assert "name: one_file.py:centred\n    bound: 0.5\n" in saved
    assert "name: one_file.py:Softened\n    power: 0.5\n" in saved
    assert main(["config", str(tmp_path / "run" / "config.yaml"), "algorithm.loss.powr=1"]) == 2
    assert "unknown key 'algorithm.loss.powr'; did you mean 'algorithm.loss.power'?" in capsys.readouterr().err


def test_the_commands_of_the_page_print_what_it_says(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "300")
    commands = re.findall(r"^\$ hone (config .*)\n((?:(?!\$|```).*\n)+)", PAGE, re.MULTILINE)
    assert len(commands) == 2
    for line, expected in commands:
        main(line.split())
        printed = capsys.readouterr()
        shown = [one.rstrip() for one in (printed.out + printed.err).splitlines() if one.strip()]
        assert shown == [one.rstrip() for one in expected.splitlines()]
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    config = build(AlgorithmConfig, yaml.safe_load(text)["algorithm"], "the page")
    assert (config.advantage.bound, config.loss.power) == (0.5, 0.5)
