"""LoRA on meshes of real processes: losses, the adapter's gradients and the adapter are those of one process."""

import dataclasses
import functools
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hone.engines.checkpoint.files import MODEL, OPTIMIZER, PartsReader, load_json
from hone.engines.fsdp2.shards import gather
from hone.engines.lora.adapter_files import AdapterError
from hone.engines.parts import Whole
from hone.models.loading import load_language_model, without_progress_bars
from hone.models.settings import BuildConfig, ModelConfig
from hone.models.tokenizer import build_tokenizer
from tests.engines.spread import LOSSES, SIZES, Case, make_batch, make_engine, own_part, train
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

LORA = {"rank": 4, "alpha": 8}
MOE = {"architecture": "qwen3_moe", "loss": "policy"}
VALUE = {"loss": "values", "model_type": "value_model"}


def case(
    architecture="qwen3", loss="policy", model_type="language_model", parallel=None, lora=None, offload=False, **engine
):
    settings = {"lora": {**LORA, **(lora or {})}, **engine}
    return Case(architecture, loss, model_type, parallel=parallel or {}, offload=offload, engine=settings)


EXPERTS = {"targets": ("q_proj", "experts.gate_up_proj", "experts.down_proj")}

TWO = [
    case(),
    case("llama", lora={"dora": True, "rslora": True}),
    case(lora={"init": "pissa"}),
    case(lora={"init": "olora", "targets": ("q_proj", "down_proj")}),
    case(**VALUE),
    case(parallel={"tensor": 2}),
    case("llama", parallel={"tensor": 2}, lora={"init": "orthogonal"}),
    case(parallel={"tensor": 2}, lora={"init": "pissa"}, activation_checkpointing=True),
    case(**VALUE, parallel={"tensor": 2}),
    case(parallel={"sequence": 2}),
    case(**VALUE, parallel={"sequence": 2}),
    case(**MOE),
    case(**MOE, parallel={"expert": 2}),
    case(**MOE, parallel={"tensor": 2}),
    case("qwen3_5_text", parallel={"tensor": 2}, lora={"init": "pissa"}),
    case(**MOE, lora=EXPERTS),
    case(activation_checkpointing=True),
    case(offload=True),
    case("llama", parallel={"replicate": 2}, lora={"init": "gaussian", "exclude": ("o_proj",)}),
    case(lora={"modules_to_save": ("lm_head",)}),
    case("llama", parallel={"sequence": 2}, lora={"modules_to_save": ("lm_head", "norm", "layers.0.mlp")}),
    case(parallel={"tensor": 2}, lora={"modules_to_save": ("embed_tokens", "model.norm"), "init": "pissa"}),
    case(**VALUE, lora={"modules_to_save": ("norm",)}, activation_checkpointing=True),
    case(**MOE, parallel={"expert": 2}, lora={"modules_to_save": ("lm_head",)}),
]
FOUR = [
    case(parallel={"replicate": 2, "shard": 2}),
    case(parallel={"tensor": 2}),
    case("llama", loss="likelihood", parallel={"sequence": 2, "tensor": 2}),
    case(**MOE, parallel={"expert": 2}),
    case(**MOE, parallel={"expert": 2, "tensor": 2}),
]


def train_adapter(one: Case) -> dict:
    """The adapter's gradients of one batch, whole; then three steps, and the adapter and all weights merged."""
    engine = make_engine(one)
    engine.forward_backward(own_part(engine, make_batch(0)), LOSSES[one.loss])
    engine.weights.settle()
    shards = {name: shard for name, _, shard in engine.weights.parts()}
    grads = [(f"grad {n}", w.grad, shards[n]) for n, w in engine.weights.masters.items() if w.grad is not None]
    found = dict(gather(grads, 2**20)) if engine.mesh else {name: grad.clone() for name, grad, _ in grads}
    engine.weights.clear_gradients()
    found |= train(engine, one.loss)
    tensors, config = engine.get_per_tensor_param(adapter_only=True)
    return found | {f"adapter {name}": tensor for name, tensor in tensors} | {"rank": config["r"]}


def train_several(cases: list[Case]) -> dict:
    found = {}
    for number, one in enumerate(cases):
        found |= {f"{number}/{key}": value for key, value in train_adapter(one).items()}
    return found


@functools.cache
def _alone(key):
    return train_adapter(Case(**json.loads(key)))


@pytest.fixture(scope="module")
def spread():
    return {world: run_ranks(world, train_several, cases) for world, cases in ((2, TWO), (4, FOUR))}


def _name(one: Case) -> str:
    rest = {**one.engine, "lora": {k: v for k, v in one.engine["lora"].items() if k not in LORA}}
    return f"{one.architecture} {one.loss} {one.parallel} {rest}"


@pytest.mark.parametrize(
    ("world", "number"),
    [pytest.param(w, i, id=f"{w}: {_name(c)}") for w, cases in ((2, TWO), (4, FOUR)) for i, c in enumerate(cases)],
)
def test_training_an_adapter_equals_that_of_one_process(world, number, spread):
    one = {2: TWO, 4: FOUR}[world][number]
    key = {
        "architecture": one.architecture,
        "loss": one.loss,
        "model_type": one.model_type,
        "engine": {"lora": one.engine["lora"]},
    }
    alone = _alone(json.dumps(key))
    prefix = f"{number}/"
    results = [{k.removeprefix(prefix): v for k, v in rank.items() if k.startswith(prefix)} for rank in spread[world]]
    assert [sum(step) for step in zip(*(rank["losses"] for rank in results), strict=True)] == pytest.approx(
        alone["losses"], rel=1e-5, abs=1e-5
    )
    assert sum(rank["score"] for rank in results) == pytest.approx(alone["score"], rel=1e-5, abs=1e-5)
    names = {name for name, value in alone.items() if isinstance(value, torch.Tensor)}
    for rank in results:
        assert rank["norms"] == pytest.approx(alone["norms"], rel=1e-5, abs=1e-5)
        assert {name for name, value in rank.items() if isinstance(value, torch.Tensor)} == names
        for name in names:
            assert torch.equal(rank[name], results[0][name]), f"{name} differs between ranks"
            torch.testing.assert_close(rank[name], alone[name], rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


# ---------------------------------------------------------------------------------------------------------- checkpoints


def _whole(folder: Path, kind: str) -> dict:
    reader = PartsReader(folder, kind, load_json(folder / "engine.json")["ranks"])
    return {name: reader.read(name, Whole(shape)) for name, shape in reader.shapes.items()}


def save_adapters(saves: list[tuple[Case, str, str]]) -> dict:
    """For each (case, checkpoint to go on from, new folder): a checkpoint, the adapter's export and the merged one."""
    found = {}
    for number, (one, load, folder) in enumerate(saves):
        engine = make_engine(one)
        if load:
            engine.load_checkpoint(Path(load))
        else:
            train(engine, one.loss, range(2))
        Path(folder).mkdir(exist_ok=True)
        engine.save_checkpoint(Path(folder))
        engine.export_adapter(Path(folder) / "adapter")
        engine.export_hf(Path(folder) / "export")
        with engine.disable_adapter():
            base = dict(engine.get_per_tensor_param()[0])
            found |= {f"{number}/base {name}": tensor for name, tensor in base.items()}
        found |= {f"{number}/{name}": tensor for name, tensor in engine.get_per_tensor_param()[0]}
    return found


@pytest.mark.parametrize(
    "lora", [{}, {"init": "pissa"}, {"modules_to_save": ("lm_head",)}], ids=["default", "pissa", "whole head"]
)
def test_an_adapter_of_any_mesh_loads_on_any_other_bit_for_bit(lora, tmp_path):
    """One rank -> two ways over 2 -> one over 4 -> one rank: checkpoints and exports stay the same to the bit."""
    dense = [case(lora=lora, parallel=parallel) for parallel in ({}, {"tensor": 2}, {"sequence": 2, "tensor": 2})]
    names = ["one", "dp", "tp", "four", "again"]
    folder = {name: str(tmp_path / name) for name in names}
    alone = save_adapters([(dense[0], "", folder["one"])])
    two = [(dense[0], folder["one"], folder["dp"]), (dense[1], folder["dp"], folder["tp"])]
    spread = run_ranks(2, save_adapters, two)
    spread += run_ranks(4, save_adapters, [(dense[2], folder["tp"], folder["four"])])
    last = save_adapters([(dense[0], folder["four"], folder["again"])])
    for rank in [*spread, last]:
        for name, tensor in rank.items():
            assert torch.equal(tensor, alone["0/" + name.partition("/")[2]]), name
    for name in names[1:]:
        for kind in (MODEL, OPTIMIZER):
            one, other = _whole(tmp_path / "one", kind), _whole(tmp_path / name, kind)
            assert one.keys() == other.keys()
            assert all(torch.equal(one[key], other[key]) for key in one), (name, kind)
        for file in ("adapter/adapter_model.safetensors", "export/model.safetensors"):
            one, other = load_file(tmp_path / "one" / file), load_file(tmp_path / name / file)
            assert one.keys() == other.keys()
            assert all(torch.equal(one[key], other[key]) for key in one), (name, file)
        configs = [(tmp_path / one / "adapter/adapter_config.json").read_text() for one in ("one", name)]
        assert configs[0] == configs[1]
    whole = {key for key in _whole(tmp_path / "dp", MODEL) if ".lora_" not in key}
    assert whole == ({"model.embed_tokens.trained.default.weight"} if "modules_to_save" in lora else set())


def losses_of(one: Case) -> dict:
    return {"losses": train(make_engine(one), one.loss, range(2))["losses"]}


def test_embeddings_that_are_trained_whole_keep_their_scale_when_read_over_ranks(tmp_path):
    """Gemma multiplies embeddings by a number that is in no file: a buffer, which the copy is made without."""
    build = BuildConfig(
        **{**SIZES, "kv_heads": 2, "tie_embeddings": True},
        architecture="gemma3_text",
        options={"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
    )
    with without_progress_bars():
        load_language_model(ModelConfig(build=build)).save_pretrained(tmp_path)
    build_tokenizer(build).save_pretrained(tmp_path)
    one = dataclasses.replace(case(lora={"modules_to_save": ("embed_tokens",)}), model={"path": str(tmp_path)})
    alone = losses_of(one)["losses"]
    ranks = [rank["losses"] for rank in run_ranks(2, losses_of, one)]
    assert [sum(step) for step in zip(*ranks, strict=True)] == pytest.approx(alone, rel=1e-5)
    base = losses_of(dataclasses.replace(one, engine={"lora": LORA}))["losses"]
    assert base[0] == pytest.approx(alone[0], rel=1e-6), "nothing is added at first"


# ------------------------------------------------------------------------------------------------------------- refusals


def narrow(number: int) -> dict:
    """In bfloat16, over two ranks: losses of two steps, and in which precision what is held."""
    engine = make_engine(NARROW[number])
    losses = train(engine, NARROW[number].loss, range(2))["losses"]
    held = {name: str(tensor.dtype) for name, tensor, _ in engine.weights.parts()}
    frozen = held.keys() - engine.weights.masters.keys()
    return {
        "losses": losses,
        "masters": sorted({str(master.dtype) for master in engine.weights.masters.values()}),
        "frozen": sorted({held[name] for name in frozen if ".lora_" not in name}),
        "whole": sorted(name for name in engine.weights.masters if ".lora_" not in name),
    }


def bfloat16(**changes) -> Case:
    return case(**changes, compute_dtype="bfloat16")


NARROW = [
    bfloat16(),
    bfloat16(parallel={"tensor": 2}, lora={"init": "pissa"}),
    bfloat16(**VALUE),
    bfloat16(lora={"modules_to_save": ("lm_head", "layers.1.mlp")}),
]


@pytest.mark.parametrize("number", range(len(NARROW)), ids=["dp", "tp pissa", "dp values", "dp whole modules"])
def test_in_bfloat16_the_adapter_alone_has_wide_masters(number):
    one = NARROW[number]
    ranks = run_ranks(2, narrow, number)
    alone = train(make_engine(dataclasses.replace(one, parallel={})), one.loss, range(2))["losses"]
    together = [sum(step) for step in zip(*(rank["losses"] for rank in ranks), strict=True)]
    assert together == pytest.approx(alone, rel=2e-2, abs=2e-3)
    for rank in ranks:
        assert rank["masters"] == ["torch.float32"]
        assert rank["frozen"] == ["torch.bfloat16"]
        assert len(rank["whole"]) == (4 if number == 3 else int(number == 2))


def refusals() -> dict:
    found = {}
    for name, one in {
        "experts": case(**MOE, parallel={"expert": 2}, lora=EXPERTS),
        "dora": case(parallel={"tensor": 2}, lora={"dora": True}),
        "whole": case(parallel={"tensor": 2}, lora={"modules_to_save": ("mlp",)}),
        "whole experts": case(**MOE, parallel={"expert": 2}, lora={"modules_to_save": ("layers.1.mlp",)}),
    }.items():
        with pytest.raises(AdapterError) as error:
            make_engine(one)
        found[name] = str(error.value)
    return found


def test_what_a_mesh_cannot_adapt_is_refused():
    for rank in run_ranks(2, refusals):
        assert re.search(
            r"experts\.\w+ is a weight of all experts, .* only with parallel\.expert and parallel\.tensor at 1",
            rank["experts"],
        )
        for name in ("whole", "whole experts"):
            assert re.search(r"modules_to_save: model\.layers\.\d\.mlp is within a layer", rank[name])
        assert re.search(r"lora\.dora: DoRA needs the norms of whole rows of .*\.0\.self_attn\.q_proj", rank["dora"])
