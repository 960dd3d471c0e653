"""A model that a new process takes up from the disk is the one that the old process had in memory."""

import asyncio
import json

import pytest

from hone import full_disk
from hone.service import training as module
from hone.service.disk.keys import add_key
from hone.service.protocol.messages import CreateModel, CreateSession
from hone.service.protocol.wire import read_training
from hone.service.service import Service
from hone.service.settings import ServeConfig
from tests.service.conftest import MODEL, parsed, written
from tests.service.test_service import datum

REMEMBERED = 3  # commands that have ended
LONG_AGO = ("lost",) * (REMEMBERED + 1)
CASES = {  # what came before the restart, and of it what the next step uses; None: that step is refused
    "gradients": (("train", "train", "other"), ("train", "train", "other")),
    "a step that failed": (("train", "bad step", *LONG_AGO), ()),
    "a gradient that failed": (("wrong", *LONG_AGO), None),
    "a gradient that failed between others": (("train", "wrong", "train", "train"), None),
    "a step that was given up": (("train", "never came", "step", "give up"), ()),
    "a gradient that was given up": (("train", "never came", "train", "give up"), None),
}


class House:
    """A service without its network, and a tenant with one session."""

    tenant = None

    def __init__(self, folder, **limits):
        training, limits = {"compute_dtype": "float32"}, {"gap_s": 1e-9, "models": 100, **limits}
        names = {"names": ("tiny",), "folder": str(folder)}
        self._config = ServeConfig(model=MODEL, training=training, limits=limits, **names)
        self._next = {}  # model -> number of its next command

    async def start(self):
        self.service = Service(self._config)
        await self.service.start()
        if self.tenant is None:
            self.tenant = self.service.tenant(add_key(self.service.registry, "one"))
            self.session = self.service.create_session(self.tenant, CreateSession())["session_id"]

    async def stop(self):
        await self.service.stop()
        self.service.registry.close()

    async def make(self):
        """A new model."""
        session = self.service.session(self.tenant, self.session)
        message = CreateModel(
            session_id=self.session, model_seq_id=len(self._next), base_model="tiny", lora_config={"rank": 4, "seed": 1}
        )
        model = f"{self.session}:train:{message.model_seq_id}"
        await self.result(self.service.training.create(self.tenant, session, message))
        self._next[model] = 1
        return model

    async def do(self, model, kinds):
        """Run commands; returns the outcome of the last one."""
        sent = []
        for kind in kinds:
            if kind == "give up":  # what is behind a gap
                self.service.training.give_up_gaps()
                self.service.training.give_up_gaps()
                continue
            number, self._next[model] = self._next[model], self._next[model] + 1
            if kind != "never came":
                sent.append(self._send(model, number, kind))
                continue
            for one in sent:
                await self.result(one)
        return [await self.result(one) for one in sent][-1]

    def _send(self, model, number, kind):
        training, body = self.service.training, {"model_id": model, "seq_id": number}
        match kind:
            case "train" | "other" | "wrong" | "forward":
                loss = "stable_reinforce" if kind == "wrong" else "cross_entropy"
                data = [datum(99 if kind == "other" else 1)]
                request = written(model, number, data, loss, kind == "forward")
                return training.submit_training(self.tenant, read_training(request, 1 << 20))
            case "lost":
                verb, more = "load_weights", {"path": "tinker://no/weights/where"}
            case _:
                verb, more = "optim_step", {"adam_params": {"beta1": 7 if kind == "bad step" else 0.9}}
        return training.submit(self.tenant, model, number, verb, json.dumps({**body, **more}).encode())

    async def result(self, request_id):
        return await self.service.futures.wait(request_id, self.tenant.name, 60)

    def kept(self, model):
        """Bytes of the commands that a restart repeats, and the most that one of them may have."""
        return self.service.registry.kept_bytes(model, 1000), len(written(model, 1000, [datum(1)]))


@pytest.fixture
def memory(monkeypatch):
    """The service remembers less than it would."""
    monkeypatch.setattr(module, "REMEMBERED", REMEMBERED)
    monkeypatch.setattr(full_disk, "PATIENCE_S", full_disk.PATIENCE_S)  # a service sets it for its process


async def story(house, cases):
    """Case -> the error of its last step and log-probs after it: undisturbed, taken up, and without what is dropped."""
    await house.start()
    wanted = {name: await ended(house, await house.make(), kinds or ()) for name, (_, kinds) in cases.items()}
    went_on, taken_up = {}, {}
    for name, (kinds, _) in cases.items():
        model, taken_up[name] = await house.make(), await house.make()
        await house.do(model, kinds)
        await house.do(taken_up[name], kinds)
        went_on[name] = await ended(house, model, ())
    kept = [house.kept(model) for model in taken_up.values()]
    await house.stop()
    await house.start()
    taken_up = {name: await ended(house, model, ()) for name, model in taken_up.items()}
    await house.stop()
    return wanted, went_on, taken_up, kept


async def ended(house, model, kinds):
    step = await house.do(model, [*kinds, "other", "step"])
    rows, _ = parsed((await house.do(model, ["forward"])).body)
    return step.error, rows[0].tobytes()


WRITTEN = ("gradients", "a gradient that failed between others")


@pytest.mark.parametrize(("replayed_bytes", "cases"), [(1 << 20, CASES), (1, {name: CASES[name] for name in WRITTEN})])
def test_the_next_step_of_a_model_uses_the_same_gradients_or_is_refused(tmp_path, memory, replayed_bytes, cases):
    wanted, went_on, taken_up, kept = asyncio.run(story(House(tmp_path, replayed_bytes=replayed_bytes), cases))
    assert taken_up == went_on
    for name, (_, kinds) in cases.items():
        error, logprobs = went_on[name]
        if kinds is None:
            assert "no step was made" in error, name
        else:
            assert (error, logprobs) == wanted[name], name
    assert len({logprobs for _, logprobs in wanted.values()}) == len({kinds or () for _, kinds in cases.values()})
    if replayed_bytes == 1:  # gradients are written in their place
        assert all(size <= most for size, most in kept)
