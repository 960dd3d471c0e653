"""`hone serve` beside the same training in one process, and what adapters gain by sharing a forward.

    python benchmarks/service.py overhead      a step of 8,192 tokens, in turns: in process, and through the service
    python benchmarks/service.py sharing       small batches of eight adapters one by one, and in one forward
    python benchmarks/service.py tenants       steps of eight tenants at once, and of one who does all the work
    python benchmarks/service.py losses        gradients of ppo by name, and as weights of tokens after a forward
    python benchmarks/service.py runs          a whole run through client and service, and in one process

`overhead`: both train the same adapter on the same data with one thread. The service also writes the command, its
result and the model's state to disk, which a step in process does not. `runs`: steps by the clock, without the first
two, and the largest difference of rewards, losses and gradient norms of the same step. `sharing`: adapters of ranks 1
to 16, as with `training.share_forwards`; forward and backward without the service. `tenants` and `losses`: processor
time of the service, which other programs of the machine change little.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import yaml

from hone.engines.settings import EngineConfig, LoraConfig
from hone.models.settings import BuildConfig, ModelConfig
from hone.service.disk.keys import add_key
from hone.service.disk.registry import REGISTRY_FILE, Registry
from hone.service.protocol.data import pack_request
from hone.service.protocol.wire import read_training
from hone.workers.tenants.shared_forward import SharedForward
from hone.workers.tenants.training import AdamStep, Base, TenantModel
from hone.workers.tenants.work import Work

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "plugins" / "tinker"))

from hone_tinker.connection import Connection  # noqa: E402 (a plug-in that need not be installed)
from hone_tinker.messages import ServiceLoss, cross_entropy, training_requests  # noqa: E402

BUILD = {"hidden_size": 128, "layers": 4, "heads": 4, "mlp_size": 384, "max_positions": 512}
RANK, ALPHA, LENGTH, LONGEST = 8, 32.0, 256, 16384
ADAM = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 1.0}
STEP = AdamStep(1e-3, (0.9, 0.95), 1e-12, 0.0, 1.0)


def weighted(row: torch.Tensor) -> ServiceLoss:
    return cross_entropy(row, torch.ones(len(row)))


def clipped(row: torch.Tensor) -> ServiceLoss:
    inputs = {"target_tokens": row, "advantages": torch.ones(len(row)), "logprobs": -4 * torch.ones(len(row))}
    return ServiceLoss("ppo", inputs, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2})


def request(
    model: str,
    number: int,
    tokens: int,
    length: int = LENGTH,
    loss: Callable[[torch.Tensor], ServiceLoss] = weighted,
    forward_only: bool = False,
) -> bytes:
    """A request with `tokens` tokens in all."""
    generator = torch.Generator().manual_seed(number)
    rows = torch.randint(8, 90, (max(1, tokens // length), min(length, tokens)), generator=generator)
    (body,) = training_requests(model, number, [(row, loss(row)) for row in rows], forward_only)
    return body


def opened() -> TenantModel:
    engine = EngineConfig(compute_dtype="float32", max_tokens_per_microbatch=LONGEST)
    return Base(ModelConfig(build=BuildConfig(**BUILD)), engine).open(LoraConfig(rank=RANK, alpha=ALPHA, seed=1))


def packed(body: bytes) -> Work:
    return pack_request(read_training(body, 1 << 26), len(BuildConfig(**BUILD).characters) + 8, LONGEST)


def train(model: TenantModel, body: bytes) -> None:
    """Forward and backward of a request, as the service does it."""
    work = packed(body)
    model.forward_backward(work.batch, work.loss)


class Tenant:
    """A tenant of a service, with one model."""

    def __init__(self, url: str, key: str) -> None:
        self._service, self._seq = Connection(url, key, 600.0), 0
        lora = {"rank": RANK, "seed": 1}
        body = {"session_id": self._service.session_id, "model_seq_id": 0, "base_model": "base", "lora_config": lora}
        self.model = self.begin("create_model", body).result()["model_id"]

    def begin(self, path: str, body: Any) -> Future[Any]:
        return self._service.start(self._service.result(path, body))

    def train(self, tokens: int, **more: Any) -> Future[Any]:
        self._seq += 1
        return self.begin("forward_backward", request(self.model, self._seq, tokens, **more))

    def step(self, tokens: int) -> list[Future[Any]]:
        """Send forward, backward and optimizer step."""
        sent = self.train(tokens)
        self._seq += 1
        return [
            sent,
            self.begin("optim_step", {"model_id": self.model, "seq_id": self._seq, "adam_params": ADAM}),
        ]


class Served:
    """A service in a process of its own."""

    def __init__(self, folder: Path, tenants: int = 1, path: str | None = None, longest: int = LONGEST) -> None:
        model = {"path": path} if path else {"build": BUILD}
        run = {"kind": "serve", "model": model, "names": ["base"], "folder": str(folder / "run")}
        training = {"compute_dtype": "float32", "max_tokens_per_microbatch": longest, "lora_alpha": ALPHA}
        file = folder / "serve.yaml"
        file.write_text(yaml.safe_dump({**run, "listen": {"port": 0}, "training": training}), encoding="utf-8")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "hone", "serve", str(file)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self._process.stdout is not None
        said = [next(self._process.stdout).split()[-1] for _ in range(2)]  # the key, the address
        registry = Registry(folder / "run" / REGISTRY_FILE)
        keys = [said[0], *(add_key(registry, f"tenant-{number}") for number in range(1, tenants))]
        self.url, self.key = said[1], said[0]
        self.tenants = [Tenant(said[1], key) for key in keys]

    def processor_s(self) -> float:
        """Processor time of the service so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)


def wait_for(sent: Sequence[Future[Any]]) -> None:
    for one in sent:
        one.result()


def compared(served: Served, pairs: int, one: Callable[[], object], other: Callable[[], object], name: str) -> None:
    """Print the service's processor time for two kinds of work, in turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs + 1):
        for number, work in [(0, one), (1, other)][:: 1 if pair % 2 else -1]:
            before = served.processor_s()
            work()
            if pair:  # the first one warms up
                times[number].append(served.processor_s() - before)
    said(f"{name}, processor time", *times)


def tenants(pairs: int, tokens: int) -> None:
    with tempfile.TemporaryDirectory() as name, closing(Served(Path(name), 8)) as served:

        def all_at_once() -> None:
            wait_for([each for one in served.tenants for each in one.step(tokens)])

        def one_alone() -> None:
            wait_for([each for _ in served.tenants for each in served.tenants[0].step(tokens)])

        compared(served, pairs, all_at_once, one_alone, f"8 tenants, {tokens} tokens each, beside one with all steps")


def losses(pairs: int, tokens: int) -> None:
    with tempfile.TemporaryDirectory() as name, closing(Served(Path(name))) as served:
        (tenant,) = served.tenants

        def by_weights() -> None:
            tenant.train(tokens, forward_only=True).result()
            tenant.train(tokens).result()

        compared(
            served,
            pairs,
            by_weights,
            lambda: tenant.train(tokens, loss=clipped).result(),
            f"ppo of {tokens} tokens as weights, beside by name",
        )


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def said(name: str, times: Sequence[float], other: Sequence[float]) -> None:
    """Print medians, and the median ratio of pairs with its quartiles."""
    ratios = [one / two for one, two in zip(times, other, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    both = f"{statistics.median(times):.3f} s beside {statistics.median(other):.3f} s"
    print(f"{name}: {both}, ratio {middle:.3f} ({low:.3f} to {high:.3f}, {len(ratios)} pairs)", flush=True)


def overhead(pairs: int, tokens: int) -> None:
    with tempfile.TemporaryDirectory() as name, closing(Served(Path(name))) as served:
        alone = opened()

        def here(number: int) -> None:
            train(alone, request("here", number, tokens))
            alone.step(STEP)

        times: dict[str, list[float]] = {"here": [], "there": []}
        for pair in range(pairs + 2):
            ways = [("here", here), ("there", lambda _: wait_for(served.tenants[0].step(tokens)))]
            for way, work in ways if pair % 2 else reversed(ways):
                took = seconds(lambda work=work, pair=pair: work(1 + 2 * pair))  # type: ignore[misc]
                if pair > 1:  # the first ones warm up
                    times[way].append(took)
    said(f"through the service, {tokens} tokens a step", times["there"], times["here"])


def runs(pairs: int, steps: int, base: str | None) -> None:
    """Train recipes/smollm2 with an adapter if `base` is its model, and else a toy."""
    recipe = f"recipes/{'smollm2/grpo' if base else 'tinker/reverse'}.yaml"
    adapter = ("actor.lora.rank=8", "actor.compute_dtype=float32") if base else ()
    longest = 2048 if base else LONGEST  # as the recipes have it
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if base is None:
            hone("sft", "recipes/tinker/base.yaml", f"run.dir={folder / 'base'}")
            base = str(folder / "base" / "export")
        with closing(Served(folder, path=base, longest=longest)) as served:
            service = ("runtime.backend=tinker", f"runtime.backend.url={served.url}", "runtime.backend.base_model=base")
            os.environ["TINKER_API_KEY"] = served.key
            times: dict[str, list[float]] = {"there": [], "here": []}
            apart = [0.0] * steps
            for pair in range(pairs):
                found = {}
                for way in ("there", "here") if pair % 2 else ("here", "there"):
                    run, more = folder / f"{way}-{pair}", service if way == "there" else ()
                    settings = (f"model.path={base}", f"run.dir={run}", f"run.steps={steps}", "evaluation.sets={}")
                    hone("train", recipe, *settings, *adapter, *more)
                    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
                    found[way] = [one for one in map(json.loads, lines) if "perf/step_s" in one]
                    times[way] += [statistics.median(one["perf/step_s"] for one in found[way][2:])]
                for step, (one, other) in enumerate(zip(found["here"], found["there"], strict=True)):
                    differ = (abs(one[key] - other[key]) for key in ("reward/mean", "train/loss", "train/grad_norm"))
                    apart[step] = max(apart[step], *differ)
    said(f"a step through client and service, beside in one process ({steps} steps)", times["there"], times["here"])
    print(f"largest difference of reward, loss and gradient norm: {apart[0]:.2g} in step 1, {max(apart):.2g} in all")


def hone(*command: str) -> None:
    """Run a command of hone with one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'plugins' / 'tinker'}"}
    environment["HONE_USE_EXTERNAL_MODULES"] = "hone_tinker:register"
    subprocess.run([sys.executable, "-m", "hone", *command], check=True, cwd=ROOT, env=environment, capture_output=True)


def sharing(pairs: int, path: str | None) -> None:
    model = ModelConfig(path=path) if path else ModelConfig(build=BuildConfig(**BUILD))
    base = Base(model, EngineConfig(compute_dtype="auto" if path else "float32", max_tokens_per_microbatch=LONGEST))
    shared = SharedForward(base)
    models = [base.open(LoraConfig(rank=rank, alpha=ALPHA, seed=rank)) for rank in (1, 2, 4, 6, 8, 10, 12, 16)]
    for tokens in (32, 128, 512):
        apart, joined = [], []
        for pair in range(pairs + 1):
            bodies = [request("x", 1 + number, tokens, min(tokens, LENGTH)) for number in range(len(models))]
            works = [(one, packed(body)) for one, body in zip(models, bodies, strict=True)]
            again = [(one, packed(body)) for one, body in zip(models, bodies, strict=True)]
            one_by_one = seconds(lambda works=works: [one.forward_backward(w.batch, w.loss) for one, w in works])  # type: ignore[misc]
            at_once = seconds(lambda again=again: shared.train(again))  # type: ignore[misc]
            for one in models:
                one.clear_gradients()
            if pair:
                apart.append(one_by_one)
                joined.append(at_once)
        said(f"8 adapters x {tokens} tokens one by one, beside one forward", apart, joined)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("overhead", "sharing", "tenants", "losses", "runs"))
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=20, help="of each run of `runs`")
    parser.add_argument("--model", help="of `sharing` and `runs`, instead of a built one")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.what == "sharing":
        sharing(chosen.pairs, chosen.model)
    elif chosen.what == "runs":
        runs(chosen.pairs, chosen.steps, chosen.model)
    else:
        {"overhead": overhead, "tenants": tenants, "losses": losses}[chosen.what](chosen.pairs, chosen.tokens)


if __name__ == "__main__":
    main()
