"""Tasks, agents and scoring as verifiers 0.4 documents them. An agent is a conversation that a thread asks for."""

import asyncio
import contextlib
import importlib
import inspect
import json
import typing
import urllib.error
import urllib.request
from types import SimpleNamespace

from pydantic import BaseModel, ConfigDict


class TaskTimeout(BaseModel):
    scoring: float | None = None


class TaskData(BaseModel):
    idx: int | None = None
    name: str | None = None
    description: str | None = None
    prompt: str | None = None
    system_prompt: str | None = None
    timeout: TaskTimeout = TaskTimeout()

    @property
    def prompt_text(self):
        return self.prompt or ""


class TasksetConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")
    id: str = ""
    task: dict = {}


class PrimeConfig(BaseModel):
    type: str = "prime"


class HarnessConfig(BaseModel):
    id: str = "bash"


class AgentConfig(BaseModel):
    harness: HarnessConfig | None = None
    runtime: dict | PrimeConfig = PrimeConfig()
    client: dict | None = None
    max_turns: int | None = None


class EnvConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")
    id: str = ""
    taskset: typing.Any


class EvalClientConfig(BaseModel):
    base_url: str
    api_key_var: str


class SamplingConfig(BaseModel):
    pass


class ModelContext(SimpleNamespace):
    pass


class Task:
    def __init__(self, data, config=None):
        self.data, self.config = data, config

    def __class_getitem__(cls, data):
        return type(cls.__name__, (cls,), {"data_type": classmethod(lambda _: data)})

    async def setup(self, trace, runtime):
        pass

    def marked(self, mark):
        found = [method for _, method in inspect.getmembers(self, inspect.ismethod)]
        return [one for one in found if hasattr(one, mark)]


class Taskset:
    INFINITE = False

    def __init__(self, config):
        self.config = config
        self._most = None

    def __class_getitem__(cls, task):
        return type(cls.__name__, (cls,), {"task_type": classmethod(lambda _: task)})

    @property
    def bounded(self):
        return not self.INFINITE or self._most is not None

    def take(self, most):
        self._most = most
        return self

    def __iter__(self):
        for number, task in enumerate(self.load()):
            if number == self._most:
                return
            yield type(task)(task.data.model_copy(update={"idx": number}), task.config)


def reward(function=None, weight=1.0):
    def mark(method):
        method.reward_weight = weight
        return method

    return mark if function is None else mark(function)


def metric(function):
    function.is_metric = True
    return function


class Failed(Exception):
    def __init__(self, kind, message, status_code=None):
        super().__init__(message)
        self.error = SimpleNamespace(type=kind, message=message, status_code=status_code)


class Trace:
    def __init__(self, name):
        self.agent = SimpleNamespace(name=name)
        self.ok, self.errors, self.stop_condition = False, [], None
        self.rewards, self.metrics = {}, {}
        self.num_turns, self.last_reply = 0, ""

    @property
    def reward(self):
        return sum(one.value for one in self.rewards.values() if one is not None)


class Interaction:
    def __init__(self, config, context, task, trace):
        self._config, self._context, self.trace = config, context, trace
        self._messages = []
        if task.data.system_prompt:
            self._messages.append({"role": "system", "content": task.data.system_prompt})
        self._prompt = task.data.prompt

    async def turn(self, message=None):
        trace = self.trace
        if trace.errors:
            return SimpleNamespace(terminated=True, last_reply="")
        if self._config.max_turns is not None and trace.num_turns >= self._config.max_turns:
            trace.stop_condition = "max_turns"
            return SimpleNamespace(terminated=True, last_reply="")
        self._messages.append({"role": "user", "content": self._prompt if message is None else message})
        try:
            trace.last_reply = await asyncio.to_thread(self._asked)
        except Failed as failure:
            trace.errors.append(failure.error)
            return SimpleNamespace(terminated=True, last_reply="")
        self._messages.append({"role": "assistant", "content": trace.last_reply})
        trace.num_turns += 1
        return SimpleNamespace(terminated=False, last_reply=trace.last_reply)

    def _asked(self):
        body = json.dumps({"model": self._context.model, "messages": self._messages}).encode()
        headers = {"Content-Type": "application/json", "Authorization": "Bearer EMPTY"}
        url = f"{self._context.client.base_url}/chat/completions"
        try:
            with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as reply:
                return json.load(reply)["choices"][0]["message"]["content"]
        except urllib.error.HTTPError as refusal:
            said = refusal.read().decode()
            raise Failed("ProviderError", f"upstream {refusal.code}: {said}", refusal.code) from refusal


class Agent:
    def __init__(self, name, config, context, episode):
        self._name, self._config, self._context, self._episode = name, config, context, episode

    @contextlib.asynccontextmanager
    async def interaction(self, task):
        trace = Trace(self._name)
        self._episode.traces.append(trace)
        async with self._recorded(trace):
            await self._named("TaskError", task.setup(trace, None))
        yield Interaction(self._config, self._context, task, trace)
        if not trace.errors:
            async with self._recorded(trace):
                await self._scored(task, trace)
        trace.ok = not trace.errors

    async def run(self, task):
        async with self.interaction(task) as conversation:
            await conversation.turn()

    @contextlib.asynccontextmanager
    async def _recorded(self, trace):
        try:
            yield
        except Failed as failure:
            trace.errors.append(failure.error)

    async def _scored(self, task, trace):
        rewards = task.marked("reward_weight")
        trace.rewards = {one.__name__: None for one in rewards}
        try:
            async with asyncio.timeout(task.data.timeout.scoring):
                for one in task.marked("is_metric"):
                    trace.metrics[one.__name__] = await self._named("TaskError", one(trace=trace))
                for one in rewards:
                    score = await self._named("TaskError", one(trace=trace))
                    trace.rewards[one.__name__] = SimpleNamespace(value=score * one.reward_weight)
        except TimeoutError:
            trace.stop_condition = "scoring_timeout"

    async def _named(self, kind, work):
        try:
            return await work
        except Exception as error:
            raise Failed(kind, f"{type(error).__name__}: {error}") from error


class Env:
    def __init__(self, config):
        self.config = config
        self.taskset = load_taskset(config.taskset)

    def __class_getitem__(cls, config):
        return type(cls.__name__, (cls,), {"config_type": config})

    def slots(self, task):
        return [SimpleNamespace(task=task)]

    @contextlib.asynccontextmanager
    async def serving(self):
        yield

    async def run_slot(self, slot, context):
        episode = SimpleNamespace(ok=False, errors=[], traces=[])
        named = {name: one for name, one in self.config if isinstance(one, AgentConfig)}
        agents = {name: Agent(name, one, context, episode) for name, one in named.items()}
        await self.run(slot.task, SimpleNamespace(**agents))
        episode.ok = all(one.ok for one in episode.traces)
        return episode


class SingleAgentEnvConfig(EnvConfig):
    agent: AgentConfig = AgentConfig()


class SingleAgentEnv(Env[SingleAgentEnvConfig]):
    async def run(self, task, agents):
        await agents.agent.run(task)


def _exported(name, base):
    module = importlib.import_module(name)
    found = [getattr(module, one) for one in module.__all__]
    return next((one for one in found if issubclass(one, base)), None)


def load_taskset(config):
    return _exported(config.id, Taskset)(config)


def taskset_config_type(name):
    importlib.import_module(name)
    return TasksetConfig


def env_config_type(taskset, name=""):
    return (_exported(name or taskset, Env) or SingleAgentEnv).config_type


def resolve_env_config(data):
    taskset = TasksetConfig.model_validate(data["taskset"])
    return env_config_type(taskset.id, data.get("id", "")).model_validate({**data, "taskset": taskset})


def load_environment(config):
    return (_exported(config.id or config.taskset.id, Env) or SingleAgentEnv)(config)


def default_harness_id(taskset):
    return "bash"
