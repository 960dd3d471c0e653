"""Settings that the engine does not have are errors that name them."""

import pytest

pytest.importorskip("veomni")

from hone.models.errors import ModelError
from hone_veomni.models import model_class
from tests.engines.contract.cases import Mesh, make_engine
from tests.engines.contract.test_behaviour import refuse_all
from tests.ranks import run_ranks


@pytest.mark.slow
def test_settings_that_the_engine_lacks_are_errors_that_name_them(folders):
    folder, two, liger = folders["qwen3"], Mesh("veomni", 2), {"operators": {"rms_norm": "liger_kernel"}}
    bad = [
        (Mesh("veomni", 2, {"replicate": 3}), folder, {}, "replicate = 3 does not divide 2 ranks"),
        (Mesh("veomni", 2, {"shard": 3}), folder, {}, "shard = 3, but 2 of 2 ranks are left"),
        (two, folder, {"lora": {"rank": 2}}, "backend veomni does not have lora"),
        (two, folder, {"moe": {}}, "backend veomni does not have moe"),
        (Mesh("veomni", 2, more=liger), folder, {}, "operators.rms_norm = liger_kernel does not run here"),
        (
            two,
            folder,
            {"model": {"dtype": "bfloat16"}, "compute_dtype": "bfloat16"},
            "needs model.dtype=float32, found",
        ),
        (Mesh("veomni", 2, {"replicate": 2}), folder, {}, "replicate = 2 leaves no ranks to shard weights over"),
        (Mesh("veomni", 2, {"expert": 2}), folders["qwen3_moe"], {}, "parallel.expert = 2: VeOmni sends tokens"),
        (two, folders["mistral"], {}, "whose model_type is 'mistral': it trains llama, qwen2, qwen3, qwen3_moe"),
    ]
    run_ranks(2, refuse_all, bad)
    run_ranks(
        1,
        refuse_after_another,
        Mesh("veomni", 1),
        folder,
        [(Mesh("veomni", 1, more=liger), folder, {}, "choose one for both")],
    )


@pytest.mark.parametrize("kind", ["qwen3_5_text", "nemotron_h", "glm_moe_dsa"])
def test_models_with_a_state_or_an_indexer_are_refused_by_name(kind):
    with pytest.raises(ModelError, match=f"veomni does not train m, whose model_type is '{kind}': it trains llama"):
        model_class(kind, "ForCausalLM", "m")


def refuse_after_another(mesh, folder, bad):
    make_engine(mesh, folder)
    return refuse_all(bad)
