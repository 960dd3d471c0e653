"""Play episodes of a `verifiers` environment: a program for the Python that has this package, not hone's.

    stdin   {"id": 1, "method": "load", "params": {"taskset": ..., "options": {...}, "max_turns": 8}}
            {"id": 2, "method": "play", "params": {"task": {...}, "base_url": "http://127.0.0.1:.../s/KEY/v1"}}
            {"method": "notifications/cancelled", "params": {"requestId": 2}}
    stdout  {"id": 2, "result": {...}}, or {"id": 2, "error": {"message": ...}}; one JSON object in a line each way

Episodes run concurrently on one event loop. What the environment prints goes to standard error, hone's log.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import socket
import sys
from typing import Any

LARGEST_MESSAGE = 64 << 20  # bytes
NO_KEY = "HONE_ENDPOINT_HAS_ITS_KEY_IN_THE_PATH"  # a variable that is not set: verifiers then sends the key EMPTY
NOT_SCORED = ("setup_timeout", "finalize_timeout", "scoring_timeout")  # stages of the environment, not of the policy


class Player:
    """One environment and its episodes."""

    def __init__(self, vf: Any, params: dict[str, Any]) -> None:
        self._vf = vf
        options = dict(params["options"])
        name = params["taskset"]
        taskset = {**options.get("taskset", {}), "id": name}
        self.role = self._fill(options, name, params["max_turns"])
        self._config = vf.resolve_env_config({**options, "taskset": taskset})
        self.env = vf.load_environment(self._config)
        self._task = type(self.env.taskset).task_type()

    def _fill(self, options: dict[str, Any], taskset: str, max_turns: int) -> str:
        """Set what the options leave open of each agent; returns the name of the agent that is the policy."""
        vf = self._vf
        fields = vf.env_config_type(taskset, options.get("id", "")).model_fields.items()
        agents = {name: field.default for name, field in fields if isinstance(field.default, vf.AgentConfig)}
        policies = []
        for name, default in agents.items():
            given = options[name] = dict(options.get(name, {}))
            if "runtime" not in given and isinstance(default.runtime, vf.PrimeConfig):
                given["runtime"] = {"type": "subprocess"}
            if "harness" not in given and default.harness is None and vf.default_harness_id(taskset) == "bash":
                given["harness"] = {"id": "null"}  # a conversation with the task's tools; it runs no code
            if given.get("client") is None and default.client is None:
                policies.append(name)
                if default.max_turns is None:
                    given.setdefault("max_turns", max_turns)
        if len(policies) != 1:
            raise ValueError(
                f"the environment has the agents {', '.join(agents)}; exactly one is the policy: give each of the "
                f"others a model of its own (episode.env.options.NAME.client and .model)"
            )
        return str(policies[0])

    async def play(self, task: dict[str, Any], base_url: str) -> dict[str, Any]:
        """Play one episode; returns its reward and figures, or the failure that ended it."""
        vf = self._vf
        data = self._task.data_type().model_validate(task)
        client = vf.EvalClientConfig(base_url=base_url, api_key_var=NO_KEY)
        context = vf.ModelContext(client=client, model="policy", sampling=vf.SamplingConfig())
        (slot,) = self.env.slots(self._task(data, self._config.taskset.task))
        return self._outcome(await self.env.run_slot(slot, context))

    def _outcome(self, episode: Any) -> dict[str, Any]:
        failed = [one for one in (episode, *episode.traces) if not one.ok and one.errors]
        if failed:  # an agent's error says more than the episode's, which follows from it
            error = failed[-1].errors[-1]
            return {"failure": f"{error.type}: {error.message}", "status_code": error.status_code}
        traces = [one for one in episode.traces if one.agent.name == self.role]
        if not episode.ok or len(traces) != 1:
            return {"failure": f"the agent {self.role} played {len(traces)} times in one episode, expected once"}
        trace = traces[0]
        if trace.stop_condition in NOT_SCORED or None in trace.rewards.values():
            return {"failure": f"the environment did not score the episode ({trace.stop_condition})"}
        return {
            "reward": trace.reward if trace.rewards else None,
            "rewards": {name: one.value for name, one in trace.rewards.items()},
            "metrics": {name: value for name, value in trace.metrics.items() if value is not None},
        }


class Service:
    """Answers hone's requests until hone closes the connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._running: dict[int, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        first = json.loads(await self._reader.readline() or "{}")
        if not first:
            return
        try:
            player = Player(importlib.import_module("verifiers.v1"), first["params"])
        except Exception as error:  # noqa: BLE001  importing and loading run foreign code
            self._answer(first["id"], error={"message": f"{type(error).__name__}: {error}"})
            await self._writer.drain()
            return
        async with player.env.serving():
            self._answer(first["id"], result={"role": player.role})
            while line := await self._reader.readline():
                self._take(player, json.loads(line))
            for one in self._running.values():
                one.cancel()

    def _take(self, player: Player, message: dict[str, Any]) -> None:
        params = message["params"]
        if message["method"] == "play":
            task = asyncio.create_task(self._play(player, message["id"], params))
            self._running[message["id"]] = task
            task.add_done_callback(lambda _: self._running.pop(message["id"], None))
        elif params.get("requestId") in self._running:
            self._running[params["requestId"]].cancel()

    async def _play(self, player: Player, number: int, params: dict[str, Any]) -> None:
        try:
            self._answer(number, result=await player.play(params["task"], params["base_url"]))
        except Exception as error:  # noqa: BLE001  foreign code; one episode's failure must not end the others
            self._answer(number, error={"message": f"{type(error).__name__}: {error}"})

    def _answer(self, number: int, **content: Any) -> None:
        self._writer.write(json.dumps({"jsonrpc": "2.0", "id": number, **content}).encode() + b"\n")


async def main() -> None:
    channel = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    await Service(*await asyncio.open_unix_connection(sock=channel, limit=LARGEST_MESSAGE)).serve()


if __name__ == "__main__":
    sys.path[:1] = []  # this folder, whose modules are hone's
    sys.path.append(os.getcwd())  # a taskset may be a module in the working folder
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])  # uv
    asyncio.run(main())
