"""What `test_fake_npu` runs in a process of its own, because a device is registered for good: prints JSON."""

import json
from types import SimpleNamespace

import torch
from fake_npu.tensor import waits

from hone.cli.conformance.kernels import kernels as kernels_section
from hone.cli.conformance.record import Recorder
from hone.cli.conformance.suites import device as device_section
from hone.cli.conformance.suites import rollouts as rollouts_section
from hone.engines.fsdp2.engine import Fsdp2Engine
from hone.engines.fsdp2.settings import Fsdp2Settings
from hone.engines.settings import EngineConfig, OptimizerConfig
from hone.models.settings import BuildConfig, ModelConfig
from hone.platforms.base import current_platform
from hone.rollout.servers.host import LocalHost
from hone.workers.rollout import device_share
from hone.workers.train import TrainSpec, TrainWorker
from tests.engines.spread import LOSSES, SIZES, make_batch

platform = current_platform()


def engine_on(device, compute="float32"):
    torch.manual_seed(0)
    optimizer = OptimizerConfig(lr=3e-3, options={"eps": 1e-4})
    config = EngineConfig(
        compute_dtype=compute, max_tokens_per_microbatch=24, optimizer=optimizer, backend=Fsdp2Settings()
    )
    model = ModelConfig(build=BuildConfig(**SIZES, kv_heads=2, architecture="qwen3"))
    spec = SimpleNamespace(model=model, engine=config, model_type="language_model", temperature=0.9)
    made = Fsdp2Engine(SimpleNamespace(**vars(spec), total_steps=100, reference=None, follows=False), device)
    made.initialize()
    return made


def two_steps(engine):
    losses = [engine.train_batch(make_batch(seed), LOSSES["policy"])["train/loss"].value for seed in (1, 2)]
    return losses, {name: tensor.cpu() for name, tensor in engine.get_per_tensor_param()[0]}


def refused():
    try:
        torch.ones(3, device="npu") + torch.ones(3)
    except RuntimeError as error:
        return str(error)
    return ""


def conformance():
    """The sections of the conformance kit that need no further process: [name, status, reason] of each check."""
    results = []
    for section in (device_section, kernels_section, rollouts_section):
        section(Recorder(section.__name__, results.append))
    return [[one.name, one.status, one.reason] for one in results]


def moved(engine):
    """How far a step moves the masters of an engine that computes in bfloat16, and where they are."""
    before = {name: master.detach().clone() for name, master in engine.weights.masters.items()}
    engine.train_batch(make_batch(1), LOSSES["policy"])
    after = engine.weights.masters
    return [
        min(float((after[n].detach() - w).abs().max()) for n, w in before.items()),
        sorted({str(w.device) for w in after.values()}),
    ]


def shares():
    """What servers with half of a device take of the trainer's, which is the first of the devices."""
    taking_half = SimpleNamespace(memory_fraction=("gpu_memory_utilization", 0.5))
    elsewhere = SimpleNamespace(is_shared=False)
    layouts = {
        "one": [(LocalHost(), (0,))],
        "two on one device": [(LocalHost(), (0,)), (LocalHost(), (0,))],
        "of two devices": [(LocalHost(), (0,)), (LocalHost(), (1,))],
        "beside it": [(LocalHost(), (1,))],
        "elsewhere": [(elsewhere, ())],
    }
    found = {}
    for name, layout in layouts.items():
        share = device_share([SimpleNamespace(host=host, devices=devices) for host, devices in layout], taking_half)
        found[name] = None if share is None else [share.fraction, share.servers, share.key]
    return found


def needed():
    """The facts that a rank on the device tells the driver."""
    model = ModelConfig(build=BuildConfig(**SIZES, kv_heads=2, architecture="qwen3"))
    worker = TrainWorker(TrainSpec(model, EngineConfig(backend=Fsdp2Settings()), total_steps=10))
    worker.initialize()
    return {name: one.value for name, one in worker.device_memory().items()}


losses, weights = two_steps(engine_on("cpu"))
engine = engine_on("npu")
built = sum(waits.values())
waits.clear()
own = [engine.train_batch(make_batch(seed), LOSSES["policy"])["train/loss"].value for seed in (1, 2)]
stepping = dict(waits)
ours = {name: tensor.cpu() for name, tensor in engine.get_per_tensor_param()[0]}
found = {
    "platform": platform.name,
    "tied": engine.model.lm_head.weight is engine.model.model.embed_tokens.weight,
    "losses": [losses, own],
    "gap": max(float((weights[name] - ours[name]).abs().max()) for name in weights),
    "built": built,
    "stepping": stepping,
    "bfloat16": moved(engine_on("npu", "bfloat16")),
    "refused": refused(),
    "shares": shares(),
    "needed": needed(),
    "conformance": conformance(),
    "inferred_on": str(engine.infer_batch(make_batch(3)).logprobs.device),
}
print(json.dumps(found))
