"""Receipts as tests compare them: what an engine in this process serves, and what a server should prove."""

import torch

from hone.platforms.base import current_platform
from hone.rollout.base import WeightReceipt
from hone.weights.digests.digest import digest_tensors, method_for
from hone.weights.digests.packed import size_of


def served_digest(tensors):
    """Of named tensors that came through a channel on this machine: by the method of its memory."""
    return digest_tensors(tensors, method_for(torch.device(current_platform().device)))


def receipt_of(served):
    """The receipt that a server would write for these weights."""
    tensors = served.tensors
    size = sum(size_of(tensor) for tensor in tensors.values())
    return WeightReceipt(served.replica, served.version, digest_tensors(tensors.items()), len(tensors), size)
