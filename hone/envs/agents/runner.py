"""Run episodes in which an agent program calls the policy.

    prompt --(n samples)--> key --> program(base_url, key, prompt) <--HTTP--> endpoint <--> rollout
                                        | ends, fails, or its deadline passes
                            recorded trajectories of the episode --> score(group) -> TrajectoryGroup

It has the same methods as `hone.envs.episode.EpisodeRunner`; one endpoint serves all calls of `run`. An episode may
give several trajectories (branches, several agents); they share its number, so the episode counts once in its group's
baseline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from hone.config import ConfigError
from hone.data.rendering import Renderer
from hone.deadline import Deadline
from hone.envs.agents.endpoint import Endpoint
from hone.envs.agents.images import told_to_agents
from hone.envs.agents.program import AgentProgram, Verdict, load_program
from hone.envs.agents.sessions import AgentSession, AgentTask
from hone.envs.base import NOT_FOREIGN
from hone.envs.episode import Play, ScoreFn, first_failure, request_seed
from hone.envs.settings import AgentSettings, EndpointSettings, EpisodeConfig
from hone.envs.tool_calls import ParseFn, parser_of
from hone.types import Metric, Prompt, Status, StopReason, Trajectory, TrajectoryGroup


class AgentRunner:
    """Runs groups of agent episodes, and scores each group as soon as it is complete."""

    def __init__(
        self,
        config: EpisodeConfig,
        settings: EndpointSettings,
        renderer: Renderer,
        program: AgentProgram | None = None,  # None: the function that the settings name
    ) -> None:
        if program is None:
            assert isinstance(settings, AgentSettings)
            program = load_program(settings.program)
        self._program = program
        self._client_sampling = settings.client_sampling
        self._adapters = tuple(settings.adapters)
        self._roles = settings.roles if isinstance(settings, AgentSettings) else ()
        self._reads_prompts = isinstance(settings, AgentSettings)  # else it takes its task from the row
        self._timeout_s = config.timeout_s
        self._max_turns = config.max_turns
        self._renderer = renderer
        self._parse_tools = tool_parser(settings.parser, renderer.template)
        self._endpoint: Endpoint | None = None
        self._opening = asyncio.Lock()

    async def run(self, prompts: Sequence[Prompt], play: Play, score: ScoreFn) -> list[TrajectoryGroup]:
        """Return the groups of `prompts`, in their order; errors of the rollout engine and of scoring are raised.

        Raises ConfigError for a prompt whose images nobody would see, or that the endpoint would refuse.
        """
        unseen = next((one for one in prompts if one.images and not self._reads_prompts), None)
        if unseen is not None:
            raise ConfigError(
                f"{unseen.prompt_id} has images, and this environment takes its task from the row; remove the column "
                "of images, or use an agent program (episode.env.name=agent)"
            )
        endpoint = await self._open()
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self._group(endpoint, one, play, score)) for one in prompts]
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from failures
        return [await task for task in running]

    async def close(self) -> None:
        if self._endpoint is not None:
            endpoint, self._endpoint = self._endpoint, None
            await endpoint.__aexit__(None, None, None)

    async def _open(self) -> Endpoint:
        """The endpoint of the run, opened by the first call."""
        async with self._opening:
            if self._endpoint is None:
                self._endpoint = await Endpoint(self._renderer, self._parse_tools).__aenter__()
            return self._endpoint

    async def _group(self, endpoint: Endpoint, prompt: Prompt, play: Play, score: ScoreFn) -> TrajectoryGroup:
        told = await endpoint.in_thread(told_to_agents, prompt) if prompt.images else prompt
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._episode(endpoint, told, i, play)) for i in range(play.samples)]
            alone = (
                tasks.create_task(self._episode(endpoint, told, play.samples, play.greedily)) if play.greedy else None
            )
        played = [one for task in running for one in await task]
        scored = await score(TrajectoryGroup(prompt, tuple(played)))
        if alone is None:
            return scored
        greedy = await score(TrajectoryGroup(prompt, tuple((await alone)[:1])))
        return replace(scored, greedy=greedy.trajectories[0])

    async def _episode(self, endpoint: Endpoint, prompt: Prompt, sample: int, play: Play) -> list[Trajectory]:
        deadline = Deadline(self._timeout_s)
        task = AgentTask(
            generate=deadline.over(play.generate),
            sampling=play.sampling,
            request_id=f"{play.step}/{prompt.draw}/{sample}",
            seed_of=lambda number: request_seed(play.seed, play.step, prompt.draw, sample, number),
            client_sampling=self._client_sampling,
            adapters=self._adapters,
            roles=self._roles,
            max_turns=self._max_turns,
        )
        key = endpoint.open_session(task)
        session = endpoint.session(key)
        verdict, status, error = Verdict(), Status.OK, ""
        try:
            async with deadline:
                verdict = _verdict(await self._program(endpoint.url_of(key), key, prompt), self._roles)
        except NOT_FOREIGN:
            raise
        except BaseException as failure:  # noqa: BLE001  user code: its error becomes the trajectory's
            status, error = self._failed(session, failure, deadline)
        finally:
            endpoint.close_session(key)
        if session.failure is not None:
            raise session.failure
        recorded = _judged(session.trajectories(prompt.prompt_id, sample, verdict.answer), verdict)
        return _with_status(recorded, prompt, sample, status, error)

    def _failed(self, session: AgentSession, failure: BaseException, deadline: Deadline) -> tuple[Status, str]:
        """Return why a program failed: its deadline, a length limit of the policy, or the program itself."""
        if deadline.expired():  # a request open at that time means that the engine was slow
            for_engine = session.waiting or session.client_gone_at >= (deadline.when() or 0.0)
            waited = "the rollout engine" if for_engine else "the program"
            status = Status.ENGINE_FAILED if for_engine else Status.ENV_FAILED
            return status, f"not finished after {self._timeout_s:g} s, waiting for {waited}"
        reason = f"{type(failure).__name__}: {failure}"
        if session.tracks and session.refused_for_length and _is_refusal(failure):
            return Status.TRUNCATED, reason
        return Status.ENV_FAILED, reason


def _is_refusal(failure: BaseException | None) -> bool:
    """Return whether an exception is a refusal by the endpoint (OpenAI clients keep the HTTP status)."""
    while failure is not None:
        if getattr(failure, "status_code", None) == 400:
            return True
        failure = failure.__cause__ or failure.__context__
    return False


def tool_parser(name: str, template: str) -> ParseFn | None:
    """The tool-call parser; None if the chat template decides and has no tool calls, which agents need not use."""
    try:
        return parser_of(name, template)
    except ConfigError:
        if name != "auto":
            raise
        return None


def _verdict(returned: object, roles: Sequence[str]) -> Verdict:
    """Return a program's verdict. Raises TypeError or ValueError for anything but a text, None or a valid Verdict."""
    if isinstance(returned, Verdict):
        returned.check(roles)
        return returned
    if returned is None or isinstance(returned, str):
        return Verdict(returned)
    raise TypeError(f"an agent program should return a text, None or a Verdict, found {type(returned).__name__}")


def _judged(recorded: list[Trajectory], verdict: Verdict) -> list[Trajectory]:
    """Each trajectory of an episode with the program's reward, at its last turn; the metrics count once."""
    judged = [_rewarded(one, verdict.of_role(one.role)) for one in recorded]
    if judged and verdict.metrics:
        figures = {name: Metric.mean(float(value)) for name, value in verdict.metrics.items()}
        judged[0] = judged[0].with_(metrics=figures)
    return judged


def _rewarded(one: Trajectory, reward: float | None) -> Trajectory:
    if reward is None:
        return one
    return one.with_(spans=(*one.spans[:-1], replace(one.spans[-1], reward=float(reward))))


def _with_status(
    recorded: list[Trajectory], prompt: Prompt, sample: int, status: Status, error: str
) -> list[Trajectory]:
    """Set the episode's status on its trajectories; without any, return one failed trajectory."""
    if not recorded:
        nothing = Trajectory(prompt.prompt_id, sample, (), 0, (), (), (), "", StopReason.STOP, episode=sample)
        failed = Status.ENV_FAILED if status is Status.OK else status
        return [nothing.with_(status=failed, error=error or "the program asked the policy nothing")]
    if status is Status.OK:
        return recorded
    return [one.with_(status=status, error=error) for one in recorded]


__all__ = ["AgentRunner", "tool_parser"]
