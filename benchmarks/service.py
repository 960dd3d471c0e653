"""`hone serve` beside the same training in one process, and what adapters gain by sharing a forward.

    python benchmarks/service.py overhead      a step of 8,192 tokens, in turns: in process, and through the service
    python benchmarks/service.py sharing       small batches of eight adapters one by one, and in one forward

`overhead`: both train the same adapter on the same data with one thread. The service also writes the command, its
result and the model's state to disk, which a step in process does not. `sharing`: adapters of ranks 1 to 16, as with
`training.share_forwards`; forward and backward without the service.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import yaml

from hone.engines.settings import EngineConfig, LoraConfig
from hone.models.settings import BuildConfig, ModelConfig
from hone.service.protocol.data import pack_request
from hone.service.protocol.wire import read_training
from hone.workers.tenants.shared_forward import SharedForward
from hone.workers.tenants.training import AdamStep, Base, TenantModel
from hone.workers.tenants.work import Work

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "plugins" / "tinker"))

from hone_tinker.connection import Connection  # noqa: E402 (a plug-in that need not be installed)
from hone_tinker.messages import Weighted, training_requests  # noqa: E402

BUILD = {"hidden_size": 128, "layers": 4, "heads": 4, "mlp_size": 384, "max_positions": 512}
RANK, ALPHA, LENGTH, LONGEST = 8, 32.0, 256, 16384
ADAM = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 1.0}
STEP = AdamStep(1e-3, (0.9, 0.95), 1e-12, 0.0, 1.0)


def request(model: str, number: int, tokens: int, length: int = LENGTH) -> bytes:
    """A cross_entropy request with `tokens` tokens in all."""
    generator = torch.Generator().manual_seed(number)
    rows = torch.randint(8, 90, (max(1, tokens // length), min(length, tokens)), generator=generator)
    (body,) = training_requests(model, number, [Weighted(row, row, torch.ones(len(row))) for row in rows], False)
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


class Served:
    """One model of a service in a process of its own."""

    def __init__(self, folder: Path) -> None:
        run = {"kind": "serve", "model": {"build": BUILD}, "names": ["base"], "folder": str(folder / "run")}
        training = {"compute_dtype": "float32", "max_tokens_per_microbatch": LONGEST, "lora_alpha": ALPHA}
        file = folder / "serve.yaml"
        file.write_text(yaml.safe_dump({**run, "listen": {"port": 0}, "training": training}), encoding="utf-8")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "hone", "serve", str(file)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self._process.stdout is not None
        said = [next(self._process.stdout).split()[-1] for _ in range(2)]  # the key, the address
        self._service = Connection(said[1], said[0], 600.0)
        lora = {"rank": RANK, "seed": 1}
        body = {"session_id": self._service.session_id, "model_seq_id": 0, "base_model": "base", "lora_config": lora}
        self.model = self._do("create_model", body)["model_id"]

    def _do(self, path: str, body: Any) -> Any:
        return self._service.wait(self._service.result(path, body))

    def step(self, number: int, tokens: int) -> None:
        self._do("forward_backward", request(self.model, number, tokens))
        self._do("optim_step", {"model_id": self.model, "seq_id": number + 1, "adam_params": ADAM})

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)


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
            ways = [("here", here), ("there", lambda number: served.step(number, tokens))]
            for way, work in ways if pair % 2 else reversed(ways):
                took = seconds(lambda work=work, pair=pair: work(1 + 2 * pair))  # type: ignore[misc]
                if pair > 1:  # the first ones warm up
                    times[way].append(took)
    said(f"through the service, {tokens} tokens a step", times["there"], times["here"])


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
    parser.add_argument("what", choices=("overhead", "sharing"))
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--model", help="of `sharing`, instead of a built one of 0.8 M parameters")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.what == "overhead":
        overhead(chosen.pairs, chosen.tokens)
    else:
        sharing(chosen.pairs, chosen.model)


if __name__ == "__main__":
    main()
