"""Facts about devices: names, a user's file, and this CPU."""

from dataclasses import replace

import pytest

from hone.cli.plan import Hardware
from hone.config import ConfigError
from hone.planner.devices import (
    USER_FILE,
    Machine,
    known_devices,
    measured_cpu,
    parse_devices,
    this_machine,
    write_user_file,
)
from hone.planner.roofline import Load, Pass, costs_of, forward_operations
from hone.platforms.base import current_platform
from hone.platforms.layout import Layout
from tests.planner.test_memory import ACTOR, ANATOMY

FACTS = "memory_gib: 10, tflops: 1, memory_gb_s: 100, link_gb_s: 10, network_gb_s: 1"
ASKED = ("H100", "H200", "B200", "A100", "MI300X", "MI355X", "Ascend-910B", "RTX-4090")


def test_every_device_is_described():
    known = known_devices()
    assert set(ASKED) == set(known)
    assert all(one.source and one.price_per_hour and one.memory_bytes > 2**34 for one in known.values())


@pytest.mark.parametrize(
    ("text", "count", "name"), [("8xH100", 8, "H100"), ("h100", 1, "H100"), ("2xrtx 4090", 2, "RTX-4090")]
)
def test_a_machine_is_a_count_and_a_name(text, count, name):
    found = parse_devices(text, 2, known_devices())
    assert (found.devices, found.device.name, found.nodes, found.total) == (count, name, 2, 2 * count)


def test_more_machines_are_of_the_same_devices(monkeypatch):
    monkeypatch.setattr("hone.cli.plan.this_machine", lambda known, computed: Machine(known["H100"], 8))
    assert Hardware(nodes=2).machine("auto").total == 16


def test_a_users_file_adds_and_replaces(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(f"H100: {{{FACTS}, price_per_hour: 9}}\nMine: {{{FACTS}}}\n")
    known = known_devices(file)
    assert (known["H100"].price_per_hour, known["Mine"].memory_gib) == (9, 10)
    assert set(ASKED) < set(known)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("A: {tflop: 1}", "did you mean 'tflops'"),
        ("A: {tflops: many}", "A.tflops is 'many'; expected a number"),
        ("A: {tflops: 1}", "A has no memory_gib, memory_gb_s, link_gb_s, network_gb_s"),
        ("[]", "expected a mapping of device names"),
        ("a: [", "is not valid YAML"),
        ("H100: \xe9", r"mine.yaml is not text in UTF-8 \(.* at byte 6\); expected YAML .*: save it as UTF-8"),
    ],
)
def test_wrong_facts_are_refused(text, says, tmp_path, monkeypatch):
    """Both files are tried: the one that is named on the command line, and the user's own."""
    file = tmp_path / "mine.yaml"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=says):
        known_devices(file)
    monkeypatch.setenv(USER_FILE, str(file))
    with pytest.raises(ConfigError, match=says):
        known_devices()


@pytest.mark.parametrize("text", ["a: [", "H100: \xe9", "[]"])
def test_a_calibration_leaves_a_file_that_holds_no_facts_as_it_is(text, tmp_path, monkeypatch):
    file, device = tmp_path / "mine.yaml", known_devices()["H100"]
    file.write_text(text, encoding="latin-1")
    monkeypatch.setenv(USER_FILE, str(file))
    with pytest.raises(ConfigError, match=r"mine\.yaml"):
        write_user_file(device)
    assert file.read_text(encoding="latin-1") == text


@pytest.mark.parametrize(
    ("text", "says"), [("8xH1000", "did you mean 'H100'"), ("0xH100", "a number of devices above 0")]
)
def test_other_devices_are_refused(text, says):
    with pytest.raises(ConfigError, match=says):
        parse_devices(text, 1, known_devices())


def test_a_cpu_is_measured_with_products_as_the_run_has_them(monkeypatch):
    for computed in ("float32", "bfloat16"):
        found = measured_cpu(computed)
        assert found.tflops > 1e-3
        assert found.memory_gb_s > 0.1
        assert "measured" in found.source
    monkeypatch.setattr("hone.planner.devices.measured_cpu", lambda computed: replace(found, name=computed))
    dtype = "float32" if current_platform().why_bfloat16_is_slow() else "bfloat16"
    machines = [this_machine({}, "auto"), this_machine({}, "float32"), parse_devices("2", 1, {}, "auto")]
    assert [one.device.name for one in machines] == [dtype, "float32", dtype]


def test_costs_by_hand(tmp_path):
    """1000 weights, 200 of them embedding and head: 800 + 20 x 10 of a forward, and attention of 2 layers."""
    assert forward_operations(ANATOMY, 8.0) == 2 * (800 + 200 + 2 * 2 * (5 + 5) * 8 / 2)
    device = parse_devices("A100", 1, known_devices()).device
    load = Load(sequence_tokens=8.0, tokens=80.0, optimizer_steps=1, microbatches=1.0, rows=10.0)
    costs = costs_of(device, [Pass(ACTOR, forwards=1.0, epochs=1.0)], load)
    assert costs.decode_s == pytest.approx(2000 / (2039e9 * 0.6) + device.decode_overhead_s)
    operations = forward_operations(ANATOMY, 8.0)
    assert costs.train_token_s == pytest.approx(operations / (312e12 * 0.5) + 3 * operations / (312e12 * 0.4))
    assert costs.train_step_s == pytest.approx(2 * (4000 + 4000 + 8000) / 2039e9)
    assert costs.send_s == pytest.approx(2000 / 300e9)


@pytest.mark.parametrize(
    ("layout", "numbers", "link"),
    [
        (Layout(tensor=2), 2 * 2 * 10 * 2, 300e9),  # two sums of 10 numbers in each of 2 layers, twice each
        (Layout(sequence=4), 2 * (2 + 1) * (5 + 5) * 3 / 4, 300e9),  # 3 of 4 parts of q, k, v and outputs
        (Layout(shard=4, expert=4), 2 * 2 * 10 * 2 * 3 / 4, 300e9),  # to 2 experts and back, in 2 layers
        (Layout(tensor=8), 2 * 2 * 7 * 10 * 2, 25e9),  # over the network: a machine has 4 devices
        (Layout(tensor=2, expert=2), 2 * 2 * 10 * 2 + 2 * 2 * 10 * 2 * 2 / 2, 300e9),  # each rank sends all tokens
        (Layout(tensor=2, expert=2, between=True), 2 * 2 * 10 * 2 + 2 * 2 * 10 * 2 / 2, 300e9),
    ],
)
def test_what_ranks_of_a_copy_exchange_by_hand(layout, numbers, link):
    device = parse_devices("A100", 1, known_devices()).device
    mixture = replace(ANATOMY, experts=8, experts_per_token=2, expert_layers=2, expert_width=1)
    load = Load(sequence_tokens=8.0, tokens=80.0, optimizer_steps=1, microbatches=1.0, rows=10.0, node_devices=4)
    alone, several = (
        costs_of(device, [Pass(replace(ACTOR, anatomy=mixture, layout=one), 1.0, 1.0)], load).train_token_s
        for one in (Layout(), layout)
    )
    assert several - alone == pytest.approx((1 + 2) * 4 * numbers / link, rel=1e-4)  # a forward, and one with backward


def test_parts_of_a_pipeline_idle_less_and_hand_over_more():
    """Two stages of one part send 10 numbers once in each direction, two stages of two parts three times."""
    device = parse_devices("A100", 1, known_devices()).device
    load = Load(sequence_tokens=8.0, tokens=80.0, optimizer_steps=1, microbatches=1.0, rows=10.0)
    alone, plain, virtual = (
        costs_of(device, [Pass(replace(ACTOR, layout=one, microbatches=4), 1.0, 1.0)], load).train_token_s
        for one in (Layout(), Layout(pipeline=2, whole=True), Layout(pipeline=2, parts=2, whole=True))
    )
    assert plain == pytest.approx(alone * (1 + 1 / 4) + 3 * 4 * 10 * 1 / 300e9)
    assert virtual == pytest.approx(alone * (1 + 1 / 8) + 3 * 4 * 10 * 3 / 300e9)


def test_copies_add_up_their_gradients_after_each_microbatch():
    """In a ring of four, each rank sends 2 x 3/4 of the 4,000 bytes: over the network if a machine has two ranks.

    A gradient that is cut over two ranks is added up in halves of 2,000 bytes.
    """
    device = parse_devices("A100", 1, known_devices()).device
    load = Load(sequence_tokens=8.0, tokens=80.0, optimizer_steps=1, microbatches=5.0, rows=10.0, node_devices=4)

    def step_s(layout, **facts):
        return costs_of(device, [Pass(replace(ACTOR, layout=layout), 0.0, 1.0)], replace(load, **facts)).train_step_s

    copies = Layout(replicate=4)
    assert step_s(copies) - step_s(Layout()) == pytest.approx(5 * 1.5 * 4000 / 300e9)
    assert step_s(copies, node_devices=2) - step_s(Layout()) == pytest.approx(5 * 1.5 * 4000 / 25e9)
    sharded = replace(copies, shard=2)
    assert step_s(sharded) - step_s(Layout(shard=2)) == pytest.approx(5 * 1.5 * 2000 / 25e9)


def test_ranks_that_split_experts_gather_only_their_own():
    """1000 weights, 480 of them of experts: a micro-batch of FSDP gathers weights twice and scatters gradients once."""
    device = parse_devices("A100", 1, known_devices()).device
    mixture = replace(ANATOMY, experts=8, experts_per_token=2, expert_layers=2, expert_width=1)
    load = Load(sequence_tokens=8.0, tokens=80.0, optimizer_steps=1, microbatches=1.0, rows=10.0)
    whole, split = (
        costs_of(device, [Pass(replace(ACTOR, anatomy=mixture, layout=Layout(shard=4, expert=one)), 0.0, 1.0)], load)
        for one in (1, 4)
    )
    assert whole.train_step_s - split.train_step_s == pytest.approx(3 * 4 * 480 * (3 / 4) / 300e9 / 2)
