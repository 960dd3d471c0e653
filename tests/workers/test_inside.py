"""What hone does inside other engines' processes, as far as it needs none of them."""

from hone.models.parts.views import Reads
from hone.workers.inside.receiving import lost_biases


def read(**names):
    found = Reads(shapes={name.replace("__", "."): (2,) for name in names})
    found.boxes = {name: ((0, 2),) for name in found.shapes if names[name.replace(".", "__")]}
    return found


def test_a_bias_is_lost_if_its_weight_was_taken():
    taken = {"a__o_proj__weight": True, "a__o_proj__bias": False, "a__q_proj__weight": True, "a__q_proj__bias": True}
    whole = {"lm_head__weight": False, "visual__x__weight": False, "visual__x__bias": False, "scales__bias": False}
    experts = {"mlp__experts__3__up__weight": True, "mlp__experts__3__up__bias": False}
    assert lost_biases(read(**taken, **whole, **experts)) == ["a.o_proj.bias"]
    assert lost_biases(read(**whole)) == []
