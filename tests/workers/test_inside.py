"""What hone does inside other engines' processes, as far as it needs none of them."""

import torch

from hone.workers.inside.receiving import Watched, lost_biases, watched


def test_what_a_loader_does_something_with_is_known():
    names = ("copied", "part", "joined", "named", "turned", "inner", "same", "read", "asked", "dropped")
    given = {name: torch.arange(6.0).view(2, 3) for name in names}
    read = {}
    found = dict(watched(given.items(), read))
    assert read == dict.fromkeys(given, False)
    target = torch.nn.Parameter(torch.zeros(2, 3))
    target.data.copy_(found["copied"])
    assert torch.equal(target.data, given["copied"])
    part = found["part"].narrow(0, 1, 1)
    assert type(part) is torch.Tensor, "what is made of it is plain"
    assert torch.equal(part, given["part"][1:])
    torch.cat([torch.zeros(1, 3), found["joined"]])
    torch.cat(tensors=[found["named"]])
    assert found["turned"].T.shape == (3, 2)
    assert not isinstance(found["inner"].data, Watched)
    assert type(found["same"].contiguous()) is torch.Tensor, "though it is the same"
    assert found["read"].sum().item() == 15
    asked = found["asked"]
    assert (asked.shape, asked.dtype, asked.numel(), asked.dim(), len(asked)) == ((2, 3), torch.float32, 6, 2, 2)
    assert not asked.is_cuda
    assert {name for name in read if not read[name]} == {"asked", "dropped"}


def test_a_bias_is_lost_if_its_weight_was_taken():
    read = {"a.o_proj.weight": True, "a.o_proj.bias": False, "a.q_proj.weight": True, "a.q_proj.bias": True}
    whole = {"lm_head.weight": False, "visual.x.weight": False, "visual.x.bias": False, "scales.bias": False}
    experts = {"mlp.experts.3.up.weight": True, "mlp.experts.3.up.bias": False}
    assert lost_biases({**read, **whole, **experts}) == ["a.o_proj.bias"]
    assert lost_biases(whole) == []
