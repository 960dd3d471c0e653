"""8-bit optimizers on two ranks: each rank quantises the state of its parts of the weights."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engines.spread import LOSSES, Case, make_batch, make_engine, own_part
from tests.ranks import run_ranks

pytest.importorskip("bitsandbytes", reason="comes with hone-rl[qlora]")
pytestmark = pytest.mark.slow

EIGHT = Case(loss="policy", optimizer="AdamW8bit")
CASES = [
    EIGHT,
    replace(EIGHT, parallel={"tensor": 2}),
    replace(EIGHT, architecture="qwen3_moe", parallel={"expert": 2}),
    replace(EIGHT, optimizer="Lion8bit", parallel={"replicate": 2}),
]
STEPS = range(5)
OTHERS = [("fsdp to tensor", "0"), ("one process to tensor", "alone")]


def weights_of(engine):
    return dict(engine.get_per_tensor_param()[0])


def steps(engine, numbers):
    for seed in numbers:
        engine.train_batch(own_part(engine, make_batch(seed)), LOSSES["policy"])
    return weights_of(engine)


def state_bytes(engine):
    """Bytes of the state of this rank's parts, and how many of them are quantised."""
    states = engine.update.optimizer.state.values()
    held = [v for state in states for k, v in state.items() if torch.is_tensor(v) and not k.startswith("qmap")]
    return sum(one.nbytes for one in held), sum(one.dtype == torch.uint8 for one in held)


def train_and_resume(folder):
    """Each case: trained through, and from a checkpoint on; then from checkpoints of other meshes on."""
    found = {}
    for number, case in enumerate(CASES):
        place = Path(folder) / str(number)
        place.mkdir(exist_ok=True)
        through = make_engine(case)
        steps(through, STEPS[:3])
        through.save_checkpoint(place)
        found |= {f"{number}/through/{name}": tensor for name, tensor in steps(through, STEPS[3:]).items()}
        resumed = make_engine(replace(case, build={"seed": 9}))
        resumed.load_checkpoint(place)
        found |= {f"{number}/resumed/{name}": tensor for name, tensor in steps(resumed, STEPS[3:]).items()}
        found[f"{number}/bytes"], found[f"{number}/quantised"] = state_bytes(through)
        found[f"{number}/values"] = sum(one.numel() for one in through.weights.masters.values())
    for name, place in OTHERS:
        engine = make_engine(replace(CASES[1], build={"seed": 9}))
        engine.load_checkpoint(Path(folder) / place)
        found |= {f"{name}/{key}": tensor for key, tensor in steps(engine, STEPS[3:]).items()}
        found[f"{name}/quantised"] = state_bytes(engine)[1]
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eight bit")
    (folder / "alone").mkdir()
    engine = make_engine(EIGHT)
    steps(engine, STEPS[:3])
    engine.save_checkpoint(folder / "alone")
    return folder


@pytest.fixture(scope="module")
def ranks(alone):
    return run_ranks(2, train_and_resume, str(alone))


def distance(found, other):
    """The 2-norm of the difference of two sets of weights."""
    return sum((found[name] - other[name]).square().sum() for name in other).sqrt()


def part(rank, prefix):
    return {key.removeprefix(prefix): value for key, value in rank.items() if key.startswith(prefix)}


@pytest.mark.parametrize("number", range(len(CASES)))
def test_training_on_from_a_checkpoint_equals_training_through(number, ranks):
    for rank in ranks:
        through, resumed = (part(rank, f"{number}/{name}/") for name in ("through", "resumed"))
        assert through
        for name, tensor in through.items():
            assert torch.equal(tensor, resumed[name]), name
            assert torch.equal(tensor, ranks[0][f"{number}/through/{name}"]), f"{name} differs between ranks"
        assert rank[f"{number}/quantised"] > 10


@pytest.mark.parametrize("number", [0, 1, 2])
def test_steps_follow_those_of_32_bit_adamw_in_one_process(number, ranks):
    case = replace(CASES[number], optimizer="AdamW", parallel={})
    first = weights_of(make_engine(case))
    exact = steps(make_engine(case), STEPS)
    found = part(ranks[0], f"{number}/through/")
    assert 0 < distance(found, exact) / distance(first, exact) < 0.03  # of the way that the weights went


def test_state_takes_about_two_bytes_for_each_value(ranks):
    assert all(rank["0/bytes"] / rank["0/values"] < 2.2 for rank in ranks)


@pytest.mark.parametrize("name", [name for name, _ in OTHERS])
def test_a_checkpoint_of_another_mesh_is_cut_anew(name, ranks):
    through, found = part(ranks[0], "0/through/"), part(ranks[0], f"{name}/")
    quantised = found.pop("quantised")
    first = weights_of(make_engine(replace(EIGHT, optimizer="AdamW")))
    assert quantised > 10
    assert distance(found, through) / distance(first, through) < 0.03  # quantised once more


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_checkpoint_of_two_ranks_goes_on_in_one_process(number, ranks, alone):
    case = replace(CASES[number], parallel={})
    first, engine = weights_of(make_engine(case)), make_engine(replace(case, build={"seed": 9}))
    engine.load_checkpoint(alone / str(number))
    through, found = part(ranks[0], f"{number}/through/"), steps(engine, STEPS[3:])
    assert distance(found, through) / distance(first, through) < 0.03
