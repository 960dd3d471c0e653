"""The engines that the contract is checked against. A new engine is one more entry of `ENGINES`."""

import asyncio
import random
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hone.rollout.base import ServerSpec
from hone.rollout.builtin.engine import BuiltinEngine
from hone.rollout.router import Router
from hone.rollout.servers.builtin import BuiltinServer
from hone.rollout.settings import BuiltinSettings, RolloutConfig
from hone.types import GenerationRequest, SamplingParams
from hone.weights.digests.digest import digest_tensors
from tests.rollout.receipts import receipt_of, served_digest
from tests.rollout.syncing import sync_to

COME_S = 30  # until the first token of an engine in another process


@dataclass
class Bench:
    """One engine under test, beside the model whose weights it serves and another of the same shape."""

    engine: Any
    model: Any
    other_model: Any
    tokenizer: Any
    tolerance: float = 1e-5  # of log-probs against transformers, float32
    hides_aborts: bool = False  # whether requests that a pause aborted are sent again
    positional_seed: bool = True  # whether a request that is sent again goes on with the same random numbers
    min_p_first: bool = False  # whether min-p comes before top-k and top-p
    constrains: bool = False  # whether it can make an answer follow a JSON schema
    joint_filters: bool = False  # whether top-p looks at the probabilities that top-k has not renormalised
    asked: int = 0  # how many prompts the last `all` had

    def prompts(self, number, longest=24):
        draw = random.Random(0)
        lengths = [1, longest, *(draw.randint(1, longest) for _ in range(number - 2))][:number]
        return [tuple(draw.randrange(8, 104) for _ in range(length)) for length in lengths]

    async def all(self, prompts, tag="r", **sampling):
        """Every prompt at once; request i has seed i unless `seed` is given."""
        wanted = {"max_tokens": 16, "ignore_eos": True, **sampling}
        self.asked = len(prompts)
        return await asyncio.gather(
            *(
                self.engine.generate(GenerationRequest(f"{tag}{i}", prompt, SamplingParams(**{"seed": i, **wanted})))
                for i, prompt in enumerate(prompts)
            )
        )

    async def let_some_come(self):
        """Return when what was just asked for has a few tokens, and not all."""
        await self.let_run(6)

    async def let_run(self, turns):
        """Give the engine time, whether or not tokens come."""
        for _ in range(turns):
            await asyncio.sleep(0)

    def weights(self, model):
        return list(model.state_dict().items())

    def digest(self, tensors):
        """What a receipt says of these tensors."""
        return digest_tensors(tensors)

    async def update(self, stream, version):
        """Replace the engine's weights; the receipt."""
        return receipt_of(await self.engine.update_weights(stream, version))


class Routed(Bench):
    """Several engines in this process behind a router."""

    async def update(self, stream, version):
        """As a run does it: each engine takes its own pass over the weights."""
        weights = list(stream)
        try:
            return receipt_of([await engine.update_weights(weights, version) for engine in self.engine.replicas][-1])
        except ValueError as error:  # a run ends here
            for engine in self.engine.replicas:
                await engine.stop(str(error))
            raise


class Served(Bench):
    """An engine in a process of its own: time passes there by itself, and weights reach it through a channel."""

    def digest(self, tensors):
        return served_digest(tensors)

    async def let_some_come(self):
        told = self.engine._metrics.get("rollout/tokens")
        before = told.value if told else 0
        async with asyncio.timeout(COME_S):
            while await self._produced() <= before:
                await asyncio.sleep(0.004)

    async def let_run(self, turns):
        await asyncio.sleep(0.004 * min(turns, 60))
        await self.engine.look()

    async def _produced(self):
        """Tokens that came out so far, those of running requests too."""
        await self.engine.look()
        return self.engine._metrics["rollout/tokens"].value

    async def update(self, stream, version):
        (receipt, *_) = await sync_to(self.engine, stream, version)
        return receipt


class ServedByVllm(Served):
    """The real vLLM. What it does otherwise than the built-in engine stands here."""

    async def let_some_come(self):
        before = await self._produced()
        async with asyncio.timeout(COME_S):
            while await self._produced() <= before:
                await asyncio.sleep(0.01)

    async def let_run(self, turns):
        await asyncio.sleep(0.02 * turns if self.engine._state.paused else 0.01)

    async def _produced(self):
        async with self.engine.connection.session().get("http://server/metrics") as reply:
            lines = (await reply.text()).splitlines()
        return float(next(line.split()[-1] for line in lines if line.startswith("vllm:generation_tokens_total")))


class ServedBySglang(Served):
    """The real SGLang. It tells how many requests have their first token, but not how many tokens."""

    async def let_some_come(self):
        await asyncio.sleep(0)  # `all` begins
        async with asyncio.timeout(COME_S):
            while await self._begun() < self.asked:
                await asyncio.sleep(0.01)

    async def _begun(self):
        async with self.engine.connection.session().get("http://server/v1/loads") as reply:
            return sum(rank["num_running_reqs"] for rank in (await reply.json())["loads"])

    async def let_run(self, turns):
        await asyncio.sleep(0.02 * turns)


def inside(**settings):
    return lambda model, tokenizer, server: BuiltinEngine(BuiltinSettings(**settings), model, tokenizer)


def routed(model, tokenizer, server):
    engines = [BuiltinEngine(BuiltinSettings(), model, tokenizer, replica=f"builtin-{i}") for i in range(2)]
    return Router(engines, RolloutConfig(), tokenizer)


ENGINES = {
    "builtin-fused": inside(execution="fused"),
    "builtin-generic": inside(execution="generic"),
    "builtin-few-slots": inside(slots=3),
    "builtin-separate": lambda model, tokenizer, server: server(),
    "router": routed,
    "vllm": lambda model, tokenizer, server: server(),
    "sglang": lambda model, tokenizer, server: server(),
}
BENCHES = {"router": Routed, "builtin-separate": Served, "vllm": ServedByVllm, "sglang": ServedBySglang}
MODELS = {"vllm": "qwen3_wide"}
REAL = {"vllm": pytest.mark.vllm, "sglang": pytest.mark.sglang}


@pytest.fixture(scope="session")
def finish(runner):
    """`finish(coroutine)`: its result, all on one loop as in a run; no test waits without end."""
    return lambda coroutine: runner.run(asyncio.wait_for(coroutine, 60))


class SlowRemote(BuiltinServer):
    program = (str(Path(__file__).with_name("slow_server.py")),)


@pytest.fixture(scope="session")
def server(tiny, tokenizer, finish, tmp_path_factory):
    """`server()`: the adapter of a server that is started once."""
    folder = tmp_path_factory.mktemp("server")
    started = []

    def adapter():
        if not started:
            tiny("qwen3", seed=0).save_pretrained(folder / "model")
            tokenizer.save_pretrained(folder / "model")
            config = RolloutConfig(start_timeout_s=120)
            spec = ServerSpec(config, str(folder / "model"), "float32", 0, folder, secrets.token_hex(16))
            started.append(SlowRemote(spec))
            finish(started[0].start())
        return started[0]

    yield adapter
    for engine in started:
        finish(engine.close())


async def _as_new(bench):
    """A server that other tests have used: awake, not paused, nothing running, the first model's weights."""
    await bench.engine.abort_all()
    await bench.engine.wake_up()
    await bench.engine.resume()
    await bench.update(bench.weights(bench.model), 0)
    bench.engine.metrics()


@pytest.fixture(params=[pytest.param(e, marks=REAL.get(e, ())) for e in sorted(ENGINES)])
def bench(request, tiny, tokenizer, server, finish):
    name = MODELS.get(request.param, "qwen3")
    model, other = tiny(name, seed=0), tiny(name, seed=1)
    kind = BENCHES.get(request.param, Bench)
    if request.param in REAL:
        shared = request.getfixturevalue("real_server")(request.param)
        server = lambda: shared  # noqa: E731
    made = kind(ENGINES[request.param](model, tokenizer, server), model, other, tokenizer)
    made.hides_aborts = request.param == "router"
    made.constrains = request.param in REAL
    if request.param == "vllm":
        made.tolerance, made.positional_seed, made.min_p_first = 1e-4, False, True
    if request.param == "sglang":
        made.tolerance, made.joint_filters = 1e-4, True
    if issubclass(kind, Served):
        finish(_as_new(made))
    return made
