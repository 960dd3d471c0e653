"""Environments: what a policy talks to, and the loop that runs episodes.

In reading order: `base` (the contract), `chat` (one question, one answer), `episode` (runs episodes), `runners` (which
runner a run file names), `settings`, `text_codec` (messages to tokens, completions to text), `tool_calls` (parsers),
`tools` (episodes with tools), `functions` (Python functions as tools), `mcp/` (tools of MCP servers), `sandboxed` (code
in a sandbox), `search` (a corpus of passages), `games/` (Gymnasium, OpenEnv, TextWorld, attempts at problems).
`agents/` turns the roles round: a program calls the policy, as `nemo_gym` (resources servers) and the agents of
`verifiers/` do. `checking/` plays an environment without a model.
"""

from hone.registry import Entry, Registry

_SETTINGS = "hone.envs.settings:EnvSettings"  # of an environment that has none of its own
ENVS = Registry(
    "environment",
    {
        "chat": Entry("hone.envs.chat:ChatEnv", "hone.config:Choice"),
        "gymnasium": Entry(
            "hone.envs.games.gymnasium:GymnasiumEnv", "hone.envs.settings:GymnasiumSettings", requires=("gymnasium",)
        ),
        "mcp": Entry("hone.envs.mcp.environment:McpEnv", "hone.envs.settings:McpSettings"),
        "openenv": Entry("hone.envs.games.openenv:OpenEnv", "hone.envs.settings:OpenEnvSettings"),
        "python": Entry("hone.envs.sandboxed:SandboxEnv", "hone.envs.settings:PythonSettings"),
        "reasoning_gym": Entry(
            "hone.envs.games.puzzles:PuzzleEnv", "hone.envs.settings:PuzzleSettings", requires=("reasoning_gym",)
        ),
        "search": Entry("hone.envs.search:SearchEnv", "hone.envs.settings:SearchSettings", requires=("bm25s",)),
        "shell": Entry("hone.envs.sandboxed:SandboxEnv", "hone.envs.settings:ShellSettings"),
        "textworld": Entry("hone.envs.games.textworld:TextWorldEnv", "hone.envs.settings:TextWorldSettings"),
        "tools": Entry("hone.envs.tools:ToolEnv", "hone.envs.settings:ToolsSettings"),
    },
    settings=_SETTINGS,
)
"""Classes of environments; an `EpisodeRunner` runs their episodes."""

EPISODES = Registry(
    "environment",
    {
        "agent": Entry("hone.envs.agents.runner:AgentRunner", "hone.envs.settings:AgentSettings"),
        "nemo_gym": Entry("hone.envs.nemo_gym:NemoGymRunner", "hone.envs.settings:NemoGymSettings"),
        "verifiers": Entry("hone.envs.verifiers.episodes:VerifiersRunner", "hone.envs.settings:VerifiersSettings"),
    },
    base=ENVS,
    settings=_SETTINGS,
)
"""The values of `episode.env`: an environment, or a runner of episodes that an agent leads."""

_PARSERS = ("hermes", "llama3", "mistral", "pythonic", "qwen3_coder")
PARSERS = Registry(
    "tool-call parser",
    {**{name: f"hone.envs.tool_calls:{name}" for name in _PARSERS}, "none": "hone.envs.tool_calls:no_calls"},
)
"""Functions that find tool calls in generated text (`hone.envs.tool_calls.ParseFn`)."""

__all__ = ["ENVS", "EPISODES", "PARSERS"]
