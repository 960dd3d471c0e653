"""Learning from preferences over two ranks: whole pairs, KTO's baseline of all answers, the record of one process, and
a reference that follows."""

import pytest
import torch
from safetensors.torch import load_file

from hone.cli.main import main
from hone.models.loading import VALUE_HEAD_FILE
from tests.ranks import run_ranks
from tests.trainers.preference_task import written
from tests.trainers.tiny import metrics

pytestmark = pytest.mark.slow

OTHER = {"hidden_size": 32, "layers": 1, "heads": 2, "mlp_size": 64, "max_positions": 32, "characters": "abcd"}
REFERENCE = {"build": {**OTHER, "seed": 1}}
FOLLOW = {"every_steps": 1, "mixup": 0.5}
RUNS = {
    "dpo": ("prefer", "dpo", {"samples_per_step": 1, "reference": {"model": REFERENCE}}),
    "kto": ("prefer", "kto", {"samples_per_step": 3, "reference": {"model": REFERENCE, "logprobs": "live"}}),
    "following": ("prefer", "dpo", {"samples_per_step": 3, "reference": {"logprobs": "live", "follow": FOLLOW}}),
    "bradley_terry": ("reward-model", "bradley_terry", {"samples_per_step": 3}),
}
OVERRIDES = ("run.steps=3", "runtime.collective_timeout_s=60")


def start(command, path):
    return main([command, str(path), *OVERRIDES])


def start_all(paths):
    """Every run, one after the other, on this rank."""
    return {name: start(RUNS[name][0], path) for name, path in paths.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """folder / "alone" or "spread" / name / "run": each run on one process, and on two ranks of one fork."""
    folder = tmp_path_factory.mktemp("runs")
    paths = {
        kind: {
            name: written(folder / kind / name, command.replace("-", "_"), loss, **changes)
            for name, (command, loss, changes) in RUNS.items()
        }
        for kind in ("alone", "spread")
    }
    assert set(start_all(paths["alone"]).values()) == {0}
    for codes in run_ranks(2, start_all, paths["spread"]):
        assert set(codes.values()) == {0}
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_learn_what_one_process_learns(runs, name):
    """Three items a step are two for one rank and one for the other; of one pair a step the other rank has nothing."""
    alone, spread = (runs / kind / name / "run" for kind in ("alone", "spread"))
    assert len(metrics(alone)) == len(metrics(spread)) == 4
    for mine, theirs in zip(metrics(spread), metrics(alone), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    start = load_file(alone / "model" / "model.safetensors")
    for file in ("model.safetensors", *([VALUE_HEAD_FILE] if name == "bradley_terry" else [])):
        one, other = (load_file(run / "export" / file) for run in (alone, spread))
        assert one.keys() == other.keys()
        for key, weight in one.items():
            torch.testing.assert_close(other[key], weight, rtol=1e-5, atol=1e-5)
            assert not torch.equal(weight, start.get(key, torch.zeros_like(weight))), f"{key} was never trained"


def test_two_ranks_blend_the_reference_of_one_process(runs):
    alone, spread = (saved(runs / kind / "following" / "run", 3, "reference") for kind in ("alone", "spread"))
    before, policy = (saved(runs / "spread" / "following" / "run", *of) for of in ((2, "reference"), (3, "actor")))
    assert len(list((runs / "spread" / "following" / "run" / "checkpoints").glob("*3/reference/model-*"))) == 2
    assert alone.keys() == spread.keys()
    for name, weight in spread.items():
        torch.testing.assert_close(weight, alone[name], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(weight, 0.5 * policy[name] + 0.5 * before[name], rtol=1e-6, atol=1e-7)
        assert not torch.equal(weight, before[name]), f"{name} did not move"


def saved(run, step, role):
    """The weights in a checkpoint: each is one tensor, or cut into rows, the first rank's first ("name@offset")."""
    parts: dict[str, list[torch.Tensor]] = {}
    for file in sorted((run / "checkpoints" / f"step_{step:08d}" / role).glob("model-*.safetensors")):
        for key, part in load_file(file).items():
            parts.setdefault(key.partition("@")[0], []).append(part)
    return {name: torch.cat(rows) for name, rows in parts.items()}
