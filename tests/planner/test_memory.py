"""Memory by phase, by hand: a model of 1000 weights whose parts are plain numbers."""

from dataclasses import replace

import pytest

from hone.models.attention.shapes import AttentionShape
from hone.planner.anatomy import Anatomy, Files
from hone.planner.memory import (
    Layout,
    Role,
    Serving,
    Setup,
    Static,
    activation_bytes_per_token,
    certain_bytes,
    logits_bytes,
    peak,
    phases,
    static,
)

ANATOMY = Anatomy(
    family="llama",
    architecture="LlamaForCausalLM",
    parameters=1000,
    active=1000,
    embedding=200,
    largest_layer=400,
    layers=2,
    hidden=10,
    attention=(AttentionShape(2, 1, 5, 5, cached=True),) * 2,
    index_size=0,
    mlp=20,
    vocabulary=20,
    context=64,
    window=0,
    experts=0,
    experts_per_token=0,
    tied=True,
    stateful=False,
    states=(),
    obstacle="",
    tensor_plan=True,
    expert_plan=False,
    linear=(),
    adapted=(),
    unadapted={},
    expert_matrices=(),
    kept=(300, 600),
    expert_layers=0,
    expert_width=0,
    largest_weight=200,
    files=Files(1, 4000, "F32", "", "language model", {}),
)
ACTOR = Role("actor", ANATOMY, stored=4, computed=4, tokens=50, microbatches=1)


def total(setup, name):
    (found,) = (one for one in phases(setup) if one.name == name)
    return found.total


def test_one_process_in_one_dtype():
    """Weights 4000, state 8000, gradients 4000; 50 tokens of 600 bytes; logits 50 x 20 x 4 x 3; the head's gradient."""
    setup = Setup([ACTOR])
    assert total(setup, "load") == 4000
    assert total(setup, "optimizer") == 4000 + 8000 + 4000
    head = 20 * 10 * (2 * 4 + 4)
    assert total(setup, "backward") == 12000 + 50 * 600 + 50 * 20 * 4 * 3 + head
    assert total(setup, "forward") == 12000 + 50 * 300 + 12000
    assert peak(phases(setup)).name == "backward"


def test_gradients_of_earlier_microbatches_exist_beside_the_activations():
    one, several = (total(Setup([replace(ACTOR, microbatches=count)]), "backward") for count in (1, 2))
    assert several - one == 4000


def test_checkpointing_keeps_the_input_of_each_layer_and_one_layer():
    assert activation_bytes_per_token(ACTOR) == 600
    kept = activation_bytes_per_token(replace(ACTOR, recompute=True))
    assert kept == 2 * 10 * 4 + 600 // 2
    assert activation_bytes_per_token(replace(ACTOR, recompute=True, keeps_inputs=False)) == 600 // 2


def test_a_narrow_working_copy_has_weights_and_gradients_of_its_own():
    found = static(replace(ACTOR, computed=2))
    assert (found.weights, found.gradients, found.optimizer, found.gathered) == (6000, 6000, 8000, 0)


def test_shards_hold_their_part_and_gather_two_layers():
    found = static(replace(ACTOR, computed=2, layout=Layout(shard=2, tensor=2)))
    assert (found.weights, found.gradients, found.optimizer) == (1000, 1000, 2000)
    assert found.gathered == (2 * 2 * 400 + 2 * 200) // 2
    mixture = replace(ANATOMY, experts=4, expert_layers=2, expert_width=2)  # 4 x 3 x 10 x 2 = 240 of a layer's 400
    split = replace(ACTOR, anatomy=mixture, computed=2, layout=Layout(shard=2, tensor=2, expert=4))
    assert static(split).gathered == 2 * 2 * (160 // 2 + 240 // 4) + 2 * 200 // 2
    copies = static(replace(ACTOR, computed=2, layout=Layout(replicate=2, shard=2)))
    assert copies.weights == 2000  # a replica holds the same


def test_ranks_with_whole_weights_share_only_the_state_of_the_optimizer():
    """ZeRO-1 over 4 copies, in bfloat16 with masters of 4 bytes; two stages, the larger has 800 / 2 + 200 weights."""
    role = replace(ACTOR, computed=2, layout=Layout(replicate=4, whole=True))
    assert static(role) == Static(2 * 1000 + 4 * 250, 0, 4 * 1000, 2 * 4 * 250)
    staged = replace(role, layout=Layout(replicate=2, pipeline=2, whole=True))
    assert static(staged) == Static(2 * 600 + 4 * 300, 0, 4 * 600, 2 * 4 * 300)
    assert certain_bytes(Setup([staged])) == total(Setup([staged]), "optimizer") - 2 * 600
    mixture = replace(ANATOMY, experts=4, expert_layers=2, expert_width=3)  # 4 x 2 x 3 x 10 x 3 = 720 weights
    split = replace(role, anatomy=mixture, layout=Layout(replicate=2, tensor=2, expert=4, whole=True))
    assert static(split).gradients == 4 * (40 + 180 + 100)
    assert static(split).optimizer == 2 * 4 * 250


def test_the_first_stage_keeps_activations_of_as_many_microbatches_as_there_are_stages():
    staged = replace(ACTOR, layout=Layout(pipeline=4, whole=True))
    kept = [activation_bytes_per_token(replace(staged, microbatches=count)) for count in (1, 2, 8)]
    assert kept == [150, 300, 600]
    parts = replace(ACTOR, layout=Layout(pipeline=4, parts=2, whole=True))  # 8 parts of 75 bytes; 3 begin in addition
    assert [activation_bytes_per_token(replace(parts, microbatches=one)) for one in (1, 2, 8)] == [150, 300, 825]
    tensor = [
        activation_bytes_per_token(replace(ACTOR, layout=Layout(tensor=2, between=one, whole=True)))
        for one in (False, True)
    ]
    assert tensor == [80 + 520 // 2, 600 // 2]


def test_an_adapter_trains_its_own_weights_only():
    found = static(replace(ACTOR, computed=2, adapter=100))
    assert (found.weights, found.gradients, found.optimizer) == (6 * 100 + 2 * 1000, 6 * 100, 8 * 100)
    assert total(Setup([replace(ACTOR, adapter=100)]), "backward") < total(Setup([ACTOR]), "backward")


def test_a_cpu_reads_small_blocks_of_logits():
    wide = replace(ANATOMY, vocabulary=1 << 15)
    role = replace(ACTOR, anatomy=wide, tokens=4096)
    assert logits_bytes(role) == 1024 * (1 << 15) * 12
    assert logits_bytes(role, on_cpu=True) == 64 * (1 << 15) * 12


def test_a_server_sleeps_while_a_model_trains():
    serving = Serving(weights=4000, cache=900, work=100)
    awake, asleep = (Setup([ACTOR], replace(serving, sleeps=sleeps)) for sleeps in (False, True))
    assert total(awake, "backward") - total(asleep, "backward") == 4900
    assert total(awake, "generate") == total(asleep, "generate") == 12000 + 5000
    assert total(awake, "sync") == 12000 + 4900 + 800
    share = Setup([ACTOR], Serving(reserved=0.5, buckets=64), device_bytes=10_000)
    assert total(share, "generate") == 12000 + 5000
    assert total(share, "sync") == 12000 + 5000 + 64


def test_a_merged_adapter_is_kept_with_the_base_of_what_it_changes():
    setups = [Setup([ACTOR], Serving(weights=4000, adapted=adapted, sleeps=True)) for adapted in (0, 700)]
    for name, more in {"load": 700, "generate": 700, "sync": 700, "backward": 0}.items():
        assert total(setups[1], name) - total(setups[0], name) == more


def test_a_frozen_model_has_weights_only_and_offload_moves_them():
    reference = replace(ACTOR, name="reference", trained=False, computed=2)
    assert static(reference).total == 2000
    both = Setup([ACTOR, reference])
    assert total(both, "optimizer") == 16000 + 2000
    away = Setup([replace(ACTOR, offload=True), replace(reference, offload=True)])
    assert total(away, "optimizer") == 4000  # its gradients; the state is brought for the backward
    assert certain_bytes(away) == 4000


def test_weights_that_are_sent_while_the_policy_is_trained_are_a_copy():
    plain, sending = (Setup([ACTOR], on_cpu=True, sent=sent) for sent in (0, 4000))
    for name, more in {"load": 0, "forward": 4000, "backward": 4000, "checkpoint": 4000}.items():
        assert total(sending, name) - total(plain, name) == more


def test_a_cpu_copies_state_for_a_checkpoint():
    assert total(Setup([ACTOR], on_cpu=True, base=5), "checkpoint") == 5 + 12000 + 4000 + 8000
    assert total(Setup([ACTOR], base=5), "checkpoint") == 5 + 12000


@pytest.mark.parametrize("microbatches", [1, 4])
def test_what_is_certain_is_never_more_than_the_peak(microbatches):
    setup = Setup([replace(ACTOR, microbatches=microbatches)], Serving(weights=4000, cache=100), base=7)
    assert certain_bytes(setup) <= peak(phases(setup)).total
