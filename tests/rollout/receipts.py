"""The digest that a server's receipt should have."""

import torch

from hone.models.digest import digest_tensors, method_for
from hone.platforms.base import current_platform


def served_digest(tensors):
    """Of named tensors that came through a channel on this machine: by the method of its memory."""
    return digest_tensors(tensors, method_for(torch.device(current_platform().device)))
