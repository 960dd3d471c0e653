"""Environments: what a policy talks to, and the loop that runs episodes.

In reading order: `base` (the contract), `chat` (one question, one answer), `episode` (runs episodes), `runners` (which
runner a run file names), `settings`, `text_codec` (messages to tokens, completions to text), `tool_calls` (parsers),
`tools` (episodes with tools), `functions` (Python functions as tools), `mcp/` (tools of MCP servers), `sandboxed` (code
in a sandbox), `search` (a corpus of passages), `gym_class` (classes with the `reset` and `step` of gym), `puzzles`
(attempts at problems, scored by `puzzle_program`).
`agents/` turns the roles round: a program calls the policy. `checking/` plays an environment without a model. Plug-ins
add environments of other projects.
"""

from hone.registry import Entry, Registry

_SETTINGS = "hone.envs.settings:EnvSettings"  # of an environment that has none of its own
ENVS = Registry(
    "environment",
    {
        "chat": Entry("hone.envs.chat:ChatEnv", "hone.config:Choice"),
        "mcp": Entry("hone.envs.mcp.environment:McpEnv", "hone.envs.settings:McpSettings"),
        "python": Entry("hone.envs.sandboxed:SandboxEnv", "hone.envs.settings:PythonSettings"),
        "reasoning_gym": Entry(
            "hone.envs.puzzles:PuzzleEnv", "hone.envs.settings:PuzzleSettings", requires=("reasoning_gym",)
        ),
        "search": Entry("hone.envs.search:SearchEnv", "hone.envs.settings:SearchSettings", requires=("bm25s",)),
        "shell": Entry("hone.envs.sandboxed:SandboxEnv", "hone.envs.settings:ShellSettings"),
        "tools": Entry("hone.envs.tools:ToolEnv", "hone.envs.settings:ToolsSettings"),
    },
    settings=_SETTINGS,
    files=True,
)
"""Classes of environments, also those that `file.py:Class` names; an `EpisodeRunner` runs their episodes."""

EPISODES = Registry(
    "environment",
    {
        "agent": Entry("hone.envs.agents.runner:AgentRunner", "hone.envs.settings:AgentSettings"),
    },
    base=ENVS,
    settings=_SETTINGS,
    files=True,
)
"""The values of `episode.env`: an environment, or a runner of episodes that an agent leads."""

_PARSERS = ("hermes", "llama3", "mistral", "pythonic", "qwen3_coder")
PARSERS = Registry(
    "tool-call parser",
    {**{name: f"hone.envs.tool_calls:{name}" for name in _PARSERS}, "none": "hone.envs.tool_calls:no_calls"},
)
"""Functions that find tool calls in generated text (`hone.envs.tool_calls.ParseFn`)."""

__all__ = ["ENVS", "EPISODES", "PARSERS"]
