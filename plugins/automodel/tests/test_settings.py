"""Settings that the engine does not have are errors that name them."""

import pytest

pytest.importorskip("nemo_automodel")

from tests.engines.contract.cases import Mesh
from tests.engines.contract.test_behaviour import refuse_all
from tests.families.types import save_tiny
from tests.ranks import run_ranks


@pytest.mark.slow
def test_settings_that_the_engine_lacks_are_errors_that_name_them(folders, tmp_path):
    folder, two, own = folders["qwen3"], Mesh("automodel", 2), {"models": "automodel"}
    bad = [
        (Mesh("automodel", 2, {"tensor": 3}), folder, {}, "tensor = 3 does not divide 2 ranks"),
        (Mesh("automodel", 2, {"replicate": 2}), folder, {}, "replicate = 2 leaves no ranks to shard weights over"),
        (Mesh("automodel", 2, {"tensor": 2}), folders["qwen3_moe"], {}, "tensor = 2"),
        (two, folder, {"lora": {"rank": 2}}, "backend automodel does not have lora"),
        (two, folder, {"moe": {}}, "backend automodel does not have moe"),
        (Mesh("automodel", 2, {"expert": 2}), folders["qwen3_moe"], {}, "parallel.expert = 2: Automodel divides"),
        (
            Mesh("automodel", 2, more=own),
            folders["llama"],
            {},
            "models = automodel has qwen3 only, found model_type 'llama'",
        ),
    ]
    hybrid = save_tiny("nemotron_h", tmp_path / "nemotron_h")
    bad.append((two, hybrid, {}, "whose model_type is 'nemotron_h': it has layers that carry a state"))
    run_ranks(2, refuse_all, bad)


@pytest.mark.slow
def test_a_dimension_that_the_mesh_cannot_cut_is_an_error_with_its_number(folders):
    case = (Mesh("automodel", 4, {"tensor": 4}), folders["qwen3"], {}, "tensor: 2 num_key_value_heads")
    run_ranks(4, refuse_all, [case])
