"""The contract of an environment, checked without a model: episodes that are played by two policies of rules."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from hone.config import Choice
from hone.envs import ENVS
from hone.envs.base import EnvFactory, Shared, StepResult
from hone.envs.checking.check import Checker, Checkup, watched
from hone.envs.runners import environments
from hone.envs.settings import EnvSettings, EpisodeConfig
from hone.envs.tool_calls import Said
from hone.testing.contract import Absent, Contract, require
from hone.types import Completion, Message, Metric, Prompt, Status, StopReason

Seen = tuple[Any, ...]
"""One response of an environment: its messages, and what the step says of itself."""


class EnvironmentContract(Contract):
    """Contract of `hone.envs.base.Env`: repeatable episodes, apart from each other, that end and do not fail.

    `rows` are rows of data that the environment can play, with "prompt" and if it needs them "ground_truth" and other
    columns. `answers` are what a policy says, turn by turn, in an episode of the first row that ends with the last of
    them; `rewards` are the rewards of these turns.
    """

    rows: ClassVar[Sequence[Mapping[str, Any]]] = ({"prompt": "?"},)
    settings: ClassVar[Mapping[str, Any]] = {}  # of `episode.env`, without its name
    max_turns: ClassVar[int] = 8
    answers: ClassVar[Sequence[str]] = ()
    rewards: ClassVar[Sequence[float | None]] = ()
    call_s: ClassVar[float] = 30.0  # deadline of one call

    def make(self) -> str:
        """Return the name under which the environment is registered."""
        raise NotImplementedError

    def test_scripted_and_random_policies_find_no_problem(self) -> None:
        """Episodes start alike, respond alike, end within `max_turns`, and take good, odd and broken answers."""
        found = self._checkup()
        problems = [one.text for one in found.findings if one.kind == "problem"]
        require(not problems, "; ".join(problems))
        self.figures |= {"turns": found.turns, "longest text, characters": found.longest}

    def test_the_answers_end_the_episode(self) -> None:
        """The episode ends with the last of `answers`, and its turns have the rewards `rewards`."""
        if not self.answers:
            raise Absent("the suite has no answers that end an episode")
        seen = self._within_shared(lambda make, config: self._episode(make, config, 0))
        done = [result.done for result in seen]
        require(
            done == [False] * (len(self.answers) - 1) + [True],
            f"the answers should end the episode in turn {len(self.answers)}, found done = {done}",
        )
        for turn, result in enumerate(seen, start=1):
            for name, one in result.metrics.items():
                expected = f"metrics[{name!r}] is {one!r:.80}; expected hone.types.Metric.mean(...)"
                require(isinstance(one, Metric), f"turn {turn}: {expected}")
        require(seen[-1].status is Status.OK, f"the last turn is {seen[-1].status}: {seen[-1].error}")
        if self.rewards:
            found = [result.reward for result in seen]
            require(found == list(self.rewards), f"the turns have rewards {found}, expected {list(self.rewards)}")

    def test_episodes_do_not_see_each_other(self) -> None:
        """Two samples of a prompt, played turn by turn side by side, get what each of them gets alone."""
        alone = self._within_shared(self._one_by_one)
        together = self._within_shared(self._side_by_side)
        for sample, (first, second) in enumerate(zip(alone, together, strict=True)):
            require(
                first == second, f"sample {sample} got {first!r:.300} alone, and beside another one {second!r:.300}"
            )

    def test_an_episode_can_be_closed_before_its_first_step(self) -> None:
        """`close` works right after `start`, and without it: an episode may be cancelled at any time."""

        async def close(make: EnvFactory, config: EpisodeConfig) -> None:
            started, fresh = make(self._prompt(0), 0, config), make(self._prompt(0), 1, config)
            await started.start()
            await started.close()
            await fresh.close()

        self._within_shared(close)

    def test_its_settings_have_the_limits_of_episodes(self) -> None:
        """The settings class extends `EnvSettings`, so that run files can set `max_turn_tokens` and the others."""
        settings: Any = ENVS.settings(self.make())
        known = isinstance(settings, type) and issubclass(settings, Choice)
        require(known, f"the settings class should extend hone.envs.settings.EnvSettings, found {settings!r}")
        if not issubclass(settings, EnvSettings):
            raise Absent(f"{settings.__name__} has no limits of turns: for an environment of one turn")

    # ---------------------------------------------------------------------------------------------------- episodes

    def _config(self) -> EpisodeConfig:
        env = {"name": self.make(), **self.settings}
        return EpisodeConfig.model_validate({"env": env, "max_turns": self.max_turns})

    def _prompt(self, number: int) -> Prompt:
        row = dict(self.rows[number])
        text = str(row.get("prompt", "?"))
        message: tuple[Message, ...] = ({"role": "user", "content": text},)
        return Prompt(f"contract/{number}", tuple(text.encode()), message, row.get("ground_truth"), "contract", row)

    def _checkup(self) -> Checkup:
        config = self._config()
        make, shared = environments(config)
        prompts = [self._prompt(number) for number in range(len(self.rows))]
        return watched(Checker(make, config, None, self.call_s), prompts, shared, self.call_s)

    def _within_shared(self, play: Any) -> Any:
        """Run `await play(make, config)`, and close what the episodes share."""

        async def run() -> Any:
            config = self._config()
            shared: Shared | None = None
            make, shared = environments(config)
            try:
                return await play(make, config)
            finally:
                if shared is not None:
                    await shared.close()

        return self.wait(run())

    async def _episode(self, make: EnvFactory, config: EpisodeConfig, sample: int) -> list[StepResult]:
        env = make(self._prompt(0), sample, config)
        try:
            await env.start()
            return [await env.step(Said(text), _completion(text)) for text in self.answers]
        finally:
            await env.close()

    async def _one_by_one(self, make: EnvFactory, config: EpisodeConfig) -> list[list[Seen]]:
        return [await self._some_turns(make, config, sample) for sample in range(2)]

    async def _side_by_side(self, make: EnvFactory, config: EpisodeConfig) -> list[list[Seen]]:
        return list(await asyncio.gather(*(self._some_turns(make, config, sample) for sample in range(2))))

    async def _some_turns(self, make: EnvFactory, config: EpisodeConfig, sample: int) -> list[Seen]:
        """The start of an episode and its responses to `answers`, or to the ground truth."""
        said = self.answers or (str(self.rows[0].get("ground_truth", "?")),)
        env = make(self._prompt(0), sample, config)
        try:
            start = await env.start()
            seen: list[Seen] = [(start.messages, start.token_ids, start.tools)]
            for text in said:
                await asyncio.sleep(0)  # let the other episode have its turn
                result = await env.step(Said(text), _completion(text))
                seen.append((result.messages, result.done, result.status, result.reward, result.anchor))
                if result.done:
                    break
        finally:
            await env.close()
        return seen


def _completion(text: str) -> Completion:
    ids = tuple(text.encode())
    return Completion("contract", ids, (0.0,) * len(ids), (0,) * len(ids), StopReason.STOP)
