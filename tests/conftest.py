"""Shared set-up: one thread per process (two cores are shared), deterministic seeds."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from hypothesis import settings

settings.register_profile("hone", deadline=None)  # how long an example takes says nothing about whether it is right
settings.load_profile("hone")


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)
