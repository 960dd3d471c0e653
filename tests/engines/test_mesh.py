"""The engine on meshes of real processes: losses, norms and weights are those of one process, however it is spread."""

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from hone.algorithms.objective import PolicyObjective
from hone.algorithms.settings import AlgorithmConfig
from hone.data.packing import balanced, select, sequence_costs
from hone.engines.checkpoint.files import MODEL, OPTIMIZER, PartsReader, load_json
from hone.engines.fsdp2.settings import Fsdp2Settings, ParallelConfig, Sizes
from hone.engines.fsdp2.sharding import ShardingError
from hone.engines.parts import Whole
from tests.engines.spread import (
    Case,
    likelihood,
    make_batch,
    make_engine,
    own_part,
    save,
    save_several,
    train,
    train_cases,
)
from tests.ranks import run_ranks

RL = {"loss": "policy"}
VALUE = {"loss": "values", "model_type": "value_model", "optimizer": "SGD"}
MOE = {"architecture": "qwen3_moe", **RL}

TWO = [
    Case(),
    Case("llama", **RL),
    Case(**MOE),
    Case(**VALUE),
    Case("llama", **RL, parallel={"replicate": 2}),
    Case(**RL, parallel={"tensor": 2}),
    Case(**MOE, parallel={"tensor": 2}),
    Case("llama", **VALUE, parallel={"tensor": 2}),
    Case(**RL, parallel={"sequence": 2}),
    Case("llama", parallel={"sequence": 2}),
    Case(**VALUE, parallel={"sequence": 2}),
    Case(**MOE, parallel={"sequence": 2}),
    Case(**MOE, parallel={"expert": 2}),
    *(Case(parallel=one, engine={"activation_checkpointing": True}) for one in ({}, {"tensor": 2}, {"sequence": 2})),
    Case(**MOE, parallel={"expert": 2}, engine={"activation_checkpointing": True}),
    Case("llama", **RL, offload=True),
    Case("qwen3_5_text", **RL),
    Case("qwen3_5_text", **RL, parallel={"tensor": 2}),
    Case("qwen3_5_text", **RL, parallel={"tensor": 2}, engine={"compute_dtype": "bfloat16"}),
]
FOUR = [
    Case(**RL),
    Case(**RL, parallel={"replicate": 2, "shard": 2}),
    Case(parallel={"tensor": 2}),
    Case("llama", **RL, parallel={"sequence": 2}),
    Case("llama", parallel={"sequence": 4}),
    Case(**RL, parallel={"sequence": 2, "tensor": 2}),
    Case(**MOE, parallel={"expert": 2}),
    Case(**MOE, parallel={"expert": 2, "tensor": 2}),
    Case(**MOE, parallel={"expert": 2, "replicate": 2}),
]


@functools.cache
def _alone(key):
    architecture, loss, model_type, optimizer = key
    return train(make_engine(Case(architecture, loss, model_type, optimizer)), loss)


@pytest.fixture(scope="module")
def spread():
    """What every case gave on every rank: trained in one fork for each number of ranks."""
    return {world: run_ranks(world, train_cases, cases) for world, cases in ((2, TWO), (4, FOUR))}


def _of(spread, world, number):
    prefix = f"{number}/"
    return [{k.removeprefix(prefix): v for k, v in rank.items() if k.startswith(prefix)} for rank in spread[world]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "number"),
    [pytest.param(w, i, id=f"{w}: {c.name}") for w, cases in ((2, TWO), (4, FOUR)) for i, c in enumerate(cases)],
)
def test_training_equals_that_of_one_process(world, number, spread):
    case = {2: TWO, 4: FOUR}[world][number]
    alone = _alone((case.architecture, case.loss, case.model_type, case.optimizer))
    results = _of(spread, world, number)
    close = 2e-2 if case.engine.get("compute_dtype") == "bfloat16" else 1e-5
    for key in ("losses", "norms", "score"):
        mine = [rank[key] for rank in results]
        if key == "losses":  # each data-parallel rank has its share of the sum
            mine = [[sum(step) for step in zip(*mine, strict=True)]]
        if key == "score":
            mine = [sum(mine)]
        for one in mine:
            assert one == pytest.approx(alone[key], rel=close, abs=close), key
    names = {name for name, value in alone.items() if isinstance(value, torch.Tensor)}
    for rank in results:
        assert {name for name, value in rank.items() if isinstance(value, torch.Tensor)} == names
        for name in names:
            assert torch.equal(rank[name], results[0][name]), f"{name} differs between ranks"
            torch.testing.assert_close(
                rank[name], alone[name], rtol=close, atol=close, msg=lambda m, n=name: f"{n}: {m}"
            )


# --------------------------------------------------------------------------------------------------- checkpoints


def _whole(folder, kind):
    reader = PartsReader(Path(folder), kind, load_json(Path(folder) / "engine.json")["ranks"])
    return {name: reader.read(name, Whole(shape)) for name, shape in reader.shapes.items()}


def _assert_same(one, other):
    for kind in (MODEL, OPTIMIZER):
        a, b = _whole(one, kind), _whole(other, kind)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
def test_a_checkpoint_of_any_mesh_loads_on_any_other_bit_for_bit(tmp_path):
    """One rank -> two ways over 2 -> three ways over 4 -> over 2 -> one rank: it stays the same to the bit."""
    folders = {}

    def step(name, before, case, ranks=0):
        folders[name] = tmp_path / name
        folders[name].mkdir()
        return case, str(folders[before]) if before else "", str(folders[name])

    dense = Case(**RL)
    save(*step("one", "", dense))
    weights = run_ranks(
        2,
        save_several,
        [step("two dp", "one", dense), step("two tp", "two dp", replace(dense, parallel={"tensor": 2}))],
    )
    four = [{"tensor": 2}, {"replicate": 2}, {"sequence": 2, "tensor": 2}]
    four = [
        step(f"four {i}", ["two tp", "four 0", "four 1"][i], replace(dense, parallel=p)) for i, p in enumerate(four)
    ]
    run_ranks(4, save_several, four)
    run_ranks(2, save_several, [step("two again", "four 2", dense)])
    last = save(*step("one again", "two again", dense))
    for name in folders:
        _assert_same(folders["one"], folders[name])
    exported = dict(weights[0])
    assert all(torch.equal(exported[f"1/{name}"], tensor) for name, tensor in last.items())
    assert len(list((folders["two dp"]).glob("*.safetensors"))) == 4
    for name in folders:
        loaded = AutoModelForCausalLM.from_pretrained(folders[name] / "export").state_dict()
        assert all(torch.equal(loaded[key], last[key]) for key in last), name


@pytest.mark.slow
def test_experts_are_saved_from_their_ranks(tmp_path):
    moe = Case(**MOE, parallel={"expert": 2})
    (tmp_path / "two").mkdir()
    (tmp_path / "tp").mkdir()
    saves = [
        (moe, "", str(tmp_path / "two")),
        (Case(**MOE, parallel={"tensor": 2}), str(tmp_path / "two"), str(tmp_path / "tp")),
    ]
    before = run_ranks(2, save_several, saves)[0]
    (tmp_path / "one").mkdir()
    after = save(Case(**MOE), str(tmp_path / "two"), str(tmp_path / "one"))
    assert all(torch.equal(before[f"0/{name}"], tensor) for name, tensor in after.items())
    _assert_same(tmp_path / "two", tmp_path / "one")
    _assert_same(tmp_path / "two", tmp_path / "tp")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "two" / "export").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in after.items())


# ------------------------------------------------------------------------------------------------------- loading


def load_from_folder(path):
    """This rank's own parts of a model that lies in a folder, and the model gathered whole again."""
    found = {}
    for number, parallel in enumerate(({}, {"tensor": 2})):
        for model_type in ("language_model", "value_model"):
            case = Case(model={"path": path}, model_type=model_type, parallel=parallel)
            engine = make_engine(case)
            key = f"{number} {model_type}"
            found[f"held {key}"] = sum(part.numel() for _, part, _ in engine.weights.parts())
            found |= {f"{key}/{name}": tensor for name, tensor in engine.get_per_tensor_param()[0]}
    return found


@pytest.mark.slow
def test_each_rank_reads_its_own_shards(folder):
    alone = dict(make_engine(Case(model={"path": str(folder)})).get_per_tensor_param()[0])
    total = sum(tensor.numel() for name, tensor in alone.items() if name != "lm_head.weight")
    for rank in run_ranks(2, load_from_folder, str(folder)):
        for number in range(2):
            for name, tensor in alone.items():
                assert torch.equal(rank[f"{number} language_model/{name}"], tensor)
                body = f"{number} value_model/body.{name.removeprefix('model.')}"
                assert name == "lm_head.weight" or torch.equal(rank[body], tensor)
        assert rank["held 0 language_model"] == total // 2
        assert total // 2 < rank["held 1 language_model"] < total  # embeddings are not split by tensor parallelism


# ------------------------------------------------------------------------------------------- precision, odd batches


def odd_batches(folder):
    """What a mesh does in bfloat16, with a gradient that is not finite on one rank, and with nothing to do on one."""
    engine = make_engine(Case(engine={"compute_dtype": "bfloat16"}))
    narrow = train(engine, "likelihood", range(1))
    dtypes = sorted({str(master.dtype) for master in engine.weights.masters.values()})
    engine = make_engine(Case())
    before = dict(engine.get_per_tensor_param()[0])
    batch = own_part(engine, make_batch(0))
    bad = float("nan") if engine.ranks.data_parallel_rank == 1 else 1.0
    skipped = engine.train_batch(batch.with_(loss_weights=batch.loss_weights * bad), likelihood)
    after = dict(engine.get_per_tensor_param()[0])
    nothing = (
        batch if engine.ranks.data_parallel_rank == 0 else batch.with_(loss_mask=torch.zeros_like(batch.loss_mask))
    )
    moved = engine.train_batch(nothing, likelihood)
    engine.train_batch(
        half_without_advantage(batch, engine.ranks.data_parallel_rank), PolicyObjective(AlgorithmConfig())
    )
    engine.save_checkpoint(Path(folder))
    return {
        "loss": narrow["losses"][0],
        "dtypes": dtypes,
        "skipped": skipped["train/skipped_steps"].value,
        "kept": all(torch.equal(before[name], after[name]) for name in before),
        "norm": moved["train/grad_norm"].value,
        "moved loss": moved["train/loss"].value,
        **dict(engine.get_per_tensor_param()[0]),
    }


def half_without_advantage(batch, rank):
    """The batch of a rank; the second rank's answers have no advantage, so it only joins the first one's backward."""
    return batch if rank == 0 else batch.with_(advantages=torch.zeros_like(batch.advantages))


@pytest.mark.slow
def test_odd_batches_and_narrow_precision(tmp_path):
    first, second = run_ranks(2, odd_batches, str(tmp_path))
    assert first["dtypes"] == second["dtypes"] == ["torch.float32"]
    alone = _alone(("qwen3", "likelihood", "language_model", "AdamW"))
    assert first["loss"] + second["loss"] == pytest.approx(alone["losses"][0], rel=2e-2)
    assert (first["skipped"], second["skipped"]) == (1.0, 0.0)  # added up over ranks, it is one step
    assert first["kept"]
    assert second["kept"]
    assert second["moved loss"] == 0

    engine, batch = make_engine(Case()), make_batch(0)
    engine.train_batch(batch.with_(loss_weights=batch.loss_weights * float("nan")), likelihood)
    moved = engine.train_batch(select(batch, balanced(sequence_costs(batch), 2)[0]), likelihood)
    assert first["norm"] == second["norm"] == pytest.approx(moved["train/grad_norm"].value, rel=1e-5)
    parts = balanced(sequence_costs(batch), 2)
    zero = torch.isin(torch.repeat_interleave(batch.lengths), torch.tensor(parts[1]))
    answers = batch.with_(advantages=torch.where(zero, 0, batch.advantages))
    engine.train_batch(answers, PolicyObjective(AlgorithmConfig()))
    loaded = make_engine(Case())
    loaded.load_checkpoint(tmp_path)  # with the optimizer's state of every part of every weight
    weights = dict(loaded.get_per_tensor_param()[0])
    for name, value in engine.get_per_tensor_param()[0]:
        for rank in (first, second):
            torch.testing.assert_close(rank[name], value, rtol=1e-5, atol=1e-5)
            assert torch.equal(weights[name], rank[name])


# ------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("sizes", "world", "message"),
    [
        ({"tensor": 4}, 6, r"parallel\.tensor = 4 does not divide 6 ranks"),
        ({"replicate": 2, "sequence": 4}, 4, r"parallel\.sequence = 4 does not divide 2 of 4 ranks"),
        ({"shard": 3}, 4, r"parallel\.shard = 3, but 4 of 4 ranks are left for it"),
        ({"expert": 3}, 4, r"parallel\.expert = 3 does not divide the 4 ranks"),
        ({"expert": 2, "tensor": 4}, 4, r"parallel\.expert = 2 should be a multiple of tensor = 4"),
        ({"tensor": 2}, 1, r"parallel\.tensor = 2 does not divide 1 ranks"),
    ],
)
def test_sizes_that_do_not_fit_name_the_dimension(sizes, world, message):
    with pytest.raises(ValueError, match=message):
        Fsdp2Settings(parallel=ParallelConfig(**sizes)).parallel.sizes(world)


def test_what_is_left_is_sharded():
    assert ParallelConfig(replicate=2, tensor=2).sizes(16) == Sizes(
        replicate=2, shard=4, sequence=1, tensor=2, expert=1
    )


def refused():
    found = {}
    cases = {
        "plan": Case("gpt2", parallel={"tensor": 2}),
        "heads": Case(parallel={"tensor": 2}, build={"kv_heads": 1}),
        "sequence": Case(parallel={"sequence": 2}, build={"heads": 1, "kv_heads": 1}),
        "dense": Case(parallel={"expert": 2}),
        "optimizer": Case(optimizer="Adafactor"),
        "state": Case("qwen3_5_text", parallel={"tensor": 2}),
    }
    plan = CONFIG_MAPPING["qwen3_5_text"].base_model_tp_plan
    CONFIG_MAPPING["qwen3_5_text"].base_model_tp_plan = {**plan, "layers.*.linear_attn.out_proj": "rowwise"}
    for name, case in cases.items():
        try:
            make_engine(case)
        except ValueError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.slow
def test_a_model_that_does_not_fit_is_refused_by_dimension():
    (found, _) = run_ranks(2, refused)
    assert "parallel.tensor = 2: architecture 'gpt2' has no tensor-parallel plan" in found["plan"]
    assert "parallel.tensor: 1 num_key_value_heads" in found["heads"]
    assert "parallel.sequence: 1 num_attention_heads" in found["sequence"]
    assert "parallel.expert = 2: architecture 'qwen3' has no expert-parallel plan" in found["dense"]
    assert "optimizer.name: Adafactor" in found["optimizer"]
    assert (
        "cuts model.layers.0.linear_attn.out_proj (rowwise), a part of a layer that carries a state" in found["state"]
    )
    assert found["plan"].startswith(ShardingError.__name__)
