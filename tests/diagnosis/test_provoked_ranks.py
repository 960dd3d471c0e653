"""The rule about slow ranks, provoked for real: two ranks train together, and one has other work to do, too."""

import os
import re

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from hone.diagnosis.evidence import read_evidence
from hone.diagnosis.rules import findings
from hone.tracking.findings import read_findings
from tests.ranks import run_ranks
from tests.trainers.test_supervised import sft_recipe
from tests.trainers.tiny import fine_tune

ALONE, STEPS = 9, 22


def train_with_other_work(path):
    """Train on this rank; rank 1 also multiplies other matrices in its MLP, when it has trained `ALONE` steps."""
    other, steps = torch.randn(512, 512), []

    def work(module, inputs):
        if type(module).__name__.endswith("MLP") and len(steps) >= ALONE:
            for _ in range(30):
                other @ other

    register_optimizer_step_post_hook(lambda *_: steps.append(1))
    if os.environ["RANK"] == "1":
        register_module_forward_pre_hook(work)
    fine_tune(path)


def test_a_rank_whose_device_is_shared(tmp_path):
    model = {"hidden_size": 256, "layers": 1, "heads": 4, "mlp_size": 1024, "max_positions": 32, "characters": "abcd"}
    path = sft_recipe(
        tmp_path,
        run={"dir": str(tmp_path / "run"), "steps": STEPS, "seed": 3},
        model={"build": model},
        samples_per_step=32,
        actor={"compute_dtype": "float32"},
        evaluation={},
        checkpoint={"every_steps": 1000},
    )
    run_ranks(2, train_with_other_work, path)
    (told,) = [one for one in read_findings(tmp_path / "run") if one["title"] == "a rank is slow"]
    assert told["step"] > ALONE
    found = {one.title: one for one in findings(read_evidence(tmp_path / "run"))}
    said = r"rank 1 of the trained model computes at \d\d?% of the speed of the others since step \d+"
    assert re.fullmatch(said, found["a rank is slow"].seen)
