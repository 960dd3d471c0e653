"""Episodes of a `verifiers` environment: its agent calls the policy, and the environment scores what came of it.

    VerifiersRunner --task, URL of the endpoint--> program.py --harness of the environment--> endpoint --> rollout
                    <------ reward, metrics ------ (one process, all episodes)

for_run   the process is started once and ended, so that a wrong taskset is an error before the first step
episode   starts a process that is not running, within a budget of restarts
failures  of the environment (its setup, tools, reward functions, a process that died) are `env_failed`; an episode that
          verifiers itself ends and scores (`max_turns`, an agent's deadline) counts as played
"""

from __future__ import annotations

import asyncio
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hone.config import ConfigError
from hone.data.rendering import Renderer
from hone.envs.agents.program import Verdict
from hone.envs.agents.runner import AgentRunner
from hone.envs.base import ToolLost
from hone.envs.episode import Play, ScoreFn
from hone.envs.mcp.restarted import RestartedProgram, loaded
from hone.envs.mcp.transports import PipeTransport, Rpc
from hone.envs.settings import EpisodeConfig
from hone.processes.child import END_S
from hone.types import Prompt, TrajectoryGroup
from hone_environments.settings import VerifiersSettings

PROGRAM = Path(__file__).with_name("program.py")


class EpisodeFailed(RuntimeError):
    """An episode that verifiers could not finish; `status_code` is that of the request that failed, if one did."""

    def __init__(self, text: str, status_code: int | None = None) -> None:
        super().__init__(text)
        self.status_code = status_code


class Taskset:
    """The process that plays the episodes of a run (`hone.envs.agents.program.AgentProgram`)."""

    def __init__(self, settings: VerifiersSettings, max_turns: int) -> None:
        """Start the process, load the environment, and end it. Raises ConfigError."""
        self._settings = settings
        self._max_turns = max_turns
        self._program = RestartedProgram("verifiers", self._started)
        self._numbers = itertools.count(1)
        with ThreadPoolExecutor(1) as thread:  # the caller may be on an event loop, which it would block anyway
            thread.submit(asyncio.run, self._check()).result(settings.start_timeout_s + 2 * END_S)

    async def __call__(self, base_url: str, api_key: str, prompt: Prompt) -> Verdict:
        """Play one episode. Raises EpisodeFailed, ToolLost."""
        transport = await self._program.running()
        return verdict_of(await self._ask(transport, "play", {"task": prompt.row["task"], "base_url": base_url}))

    async def close(self) -> None:
        await self._program.close()

    async def _started(self) -> PipeTransport:
        """A new process that has loaded the environment. Raises ToolLost, with the last lines that it printed."""
        settings = self._settings
        command = [settings.python or sys.executable, str(PROGRAM)]
        transport = PipeTransport(f"verifiers {settings.taskset}", command, {})
        wanted = {"taskset": settings.taskset, "options": settings.options, "max_turns": self._max_turns}
        return await loaded(transport, self._message("load", wanted), settings.start_timeout_s)

    async def _check(self) -> None:
        try:
            transport = await self._started()
        except ToolLost as error:
            raise ConfigError(f"episode.env: taskset {self._settings.taskset} cannot be loaded: {error}") from error
        await transport.close()

    async def _ask(self, transport: PipeTransport, method: str, params: Mapping[str, Any]) -> Rpc:
        response = await transport.request(self._message(method, params))
        if "error" in response:
            raise EpisodeFailed(str(response["error"].get("message")))
        result: Rpc = response["result"]
        return result

    def _message(self, method: str, params: Mapping[str, Any]) -> Rpc:
        return {"jsonrpc": "2.0", "id": next(self._numbers), "method": method, "params": dict(params)}


class VerifiersRunner(AgentRunner):
    """Runs groups of episodes of a verifiers environment."""

    def __init__(self, config: EpisodeConfig, settings: VerifiersSettings, renderer: Renderer) -> None:
        self._taskset = Taskset(settings, config.max_turns)
        self._name = settings.taskset
        super().__init__(config, settings, renderer, self._taskset)

    async def run(self, prompts: Sequence[Prompt], play: Play, score: ScoreFn) -> list[TrajectoryGroup]:
        """Return the groups of `prompts`. Raises ConfigError for a prompt without a task of the taskset."""
        bare = next((one for one in prompts if not isinstance(one.row.get("task"), Mapping)), None)
        if bare is not None:
            raise ConfigError(
                f"{bare.prompt_id}: the row has no column task with a task of the environment; take the rows from it: "
                f"data.train.source={{name: verifiers, taskset: {self._name}}}"
            )
        return await super().run(prompts, play, score)

    async def close(self) -> None:
        try:
            await super().close()
        finally:
            await self._taskset.close()


def verdict_of(outcome: Mapping[str, Any]) -> Verdict:
    """Return verifiers' verdict on an episode. Raises EpisodeFailed for one that it could not finish or score."""
    if "failure" in outcome:
        raise EpisodeFailed(str(outcome["failure"]), outcome.get("status_code"))
    parts = {f"verifiers/reward/{name}": float(value) for name, value in outcome["rewards"].items()}
    figures = {f"verifiers/{name}": float(value) for name, value in outcome["metrics"].items()}
    for name, value in {**parts, **figures}.items():
        if not math.isfinite(value):
            raise EpisodeFailed(f"{name} should be a finite number, found {value}")
    return Verdict(reward=outcome["reward"], metrics={**figures, **parts})


__all__ = ["EpisodeFailed", "Taskset", "VerifiersRunner", "verdict_of"]
