"""Two samples of one prompt by an agent's program, as a run plays them, with a tiny built-in engine."""

import asyncio

from hone.data.rendering import Renderer
from hone.envs.agents.runner import AgentRunner
from hone.envs.episode import Play
from hone.envs.settings import AgentSettings, EpisodeConfig
from hone.models.building import build_model
from hone.models.loading import DTYPES
from hone.models.settings import BuildConfig
from hone.models.tokenizer import build_tokenizer
from hone.rollout.builtin.engine import BuiltinEngine
from hone.rollout.settings import BuiltinSettings
from hone.types import Prompt, SamplingParams


class Stage:
    """A tokenizer and an engine for programs of agents."""

    def __init__(self):
        self.language = Renderer(build_tokenizer(BuildConfig()))
        build = BuildConfig(hidden_size=32, layers=1, heads=2, mlp_size=64, max_positions=256)
        self.engine = BuiltinEngine(BuiltinSettings(), build_model(build, DTYPES["float32"]), self.language.tokenizer)
        message = {"role": "user", "content": "ab"}
        self.prompt = Prompt("task/0", self.language.render_prompt([message]), (message,), None, "task")

    def play(self, settings: AgentSettings, generate=None, timeout_s=30, budget=40):
        """The trajectories of the group; their rewards are the program's own."""
        runner = AgentRunner(EpisodeConfig(timeout_s=timeout_s), settings, self.language)
        sampling = SamplingParams(budget, stop_token_ids=tuple(self.language.end_token_ids))
        how = Play(generate or self.engine.generate, sampling, seed=0, samples=2)

        async def unjudged(group):
            return group

        async def played():
            try:
                return await asyncio.wait_for(runner.run([self.prompt], how, unjudged), 60)
            finally:
                await runner.close()

        (group,) = asyncio.run(played())
        return group.trajectories
