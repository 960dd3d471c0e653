"""The environments `python` and `shell`: one tool, which runs what the policy writes in the sandbox of the episode.

    completion --tool call--> sandbox: a new process, the same working folder --> what it printed

Files stay between the calls of an episode; variables and processes do not. What a program does is an observation; a
lost sandbox is a failure of the environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hone.config import ConfigError
from hone.envs.base import ToolLost, ToolResult
from hone.envs.functions import FunctionTool, Signature
from hone.envs.settings import EpisodeConfig, SandboxedSettings
from hone.envs.tools import ToolEnv
from hone.sandboxes.base import PYTHON, Ran, Sandbox, SandboxHost, SandboxLost, SandboxRefused
from hone.sandboxes.choice import make_sandboxes
from hone.types import Prompt

ENDED = {
    "time": "it was stopped after {timeout_s:g} s",
    "cpu": "it used more than {cpu_s} s of processor time",
    "memory": "it used more than {memory_mb} MB of memory",
    "output": "it printed more than {output_kb} KB",
    "disk": "it wrote more than {disk_mb} MB",
    "processes": "it started more than {processes} processes",
}
SANDBOX_S = 3600.0  # backstop: the sandbox has deadlines of its own, also for the wait for a seat


class SandboxEnv(ToolEnv):
    """One episode with a tool that runs programs (`python`) or commands (`shell`) in a sandbox."""

    def __init__(self, prompt: Prompt, settings: EpisodeConfig, sandbox: Sandbox) -> None:
        env = settings.env
        assert isinstance(env, SandboxedSettings)
        tools = _Tools(sandbox, env, prompt)
        method = tools.python if env.name == "python" else tools.shell
        signature = Signature.of(method, f"environment {env.name}")
        super().__init__(prompt, [FunctionTool(signature, method, SANDBOX_S)], settings.limits)
        self._sandbox = sandbox

    @classmethod
    def for_run(cls, settings: EpisodeConfig) -> SandboxEnvs:  # type: ignore[override]
        """Choose the sandboxes. Raises ConfigError if they do not work here."""
        return SandboxEnvs(settings)

    async def close(self) -> None:
        await self._sandbox.close()


class SandboxEnvs:
    """The environments of a run that share the parent of their sandboxes."""

    def __init__(self, settings: EpisodeConfig) -> None:
        env = settings.env
        assert isinstance(env, SandboxedSettings)
        try:
            self._host: SandboxHost = make_sandboxes(env.sandbox, env.limits_of_a_program, env.url, env.image)
        except SandboxRefused as error:
            raise ConfigError(f"episode.env.sandbox: {error}") from error

    def __call__(self, prompt: Prompt, sample: int, settings: EpisodeConfig) -> SandboxEnv:
        return SandboxEnv(prompt, settings, self._host.open())

    async def close(self) -> None:
        await self._host.close()


class _Tools:
    """The tools of one episode."""

    def __init__(self, sandbox: Sandbox, settings: SandboxedSettings, prompt: Prompt) -> None:
        self._sandbox = sandbox
        self._settings = settings
        self._files = _files(settings.files_column, prompt)  # written with the first program

    async def python(self, code: str) -> ToolResult:
        """Run a Python program and read what it prints. Files stay for the next program; variables do not.

        Args:
            code: the whole program; it has to print what you want to read
        """
        return await self._run([PYTHON, "program.py"], {"program.py": code.encode("utf-8", "surrogatepass")})

    async def shell(self, command: str) -> ToolResult:
        """Run a command in bash and read what it prints. Files stay for the next command; variables do not.

        Args:
            command: one or several lines of bash
        """
        return await self._run(["bash", "-c", command.replace("\0", "")], {})

    async def _run(self, argv: list[str], files: Mapping[str, bytes]) -> ToolResult:
        given, self._files = {**self._files, **files}, {}
        try:
            ran = await self._sandbox.run(argv, files=given, timeout_s=self._settings.tool_timeout_s)
        except SandboxLost as error:
            raise ToolLost(f"sandbox: {error}") from error
        return ToolResult(shown(ran, self._settings), failed=not ran.ok)


def shown(ran: Ran, settings: SandboxedSettings) -> str:
    """Return the text of a program for the policy: its output, then its end if that was not well."""
    parts = [data.decode("utf-8", "replace").rstrip("\n") for data in (ran.stdout, ran.stderr)]
    text = shortened("\n".join(part for part in parts if part), settings.max_output_characters)
    limits = settings.limits_of_a_program
    if ran.limit:
        how = ENDED[ran.limit].format(timeout_s=settings.tool_timeout_s, **vars(limits))
    else:
        how = f"exit status {ran.status}" if ran.status > 0 else f"ended by signal {-ran.status}"
    return "\n".join(part for part in (text, "" if ran.ok else f"[{how}]") if part) or "[no output]"


def shortened(text: str, most: int) -> str:
    """The beginning and the end of a text that is too long.

    >>> shortened("abcdefghij", 4)
    'ab\\n[... 6 characters ...]\\nij'
    """
    if len(text) <= most:
        return text
    head, tail = most - most // 2, most // 2
    return f"{text[:head]}\n[... {len(text) - most} characters ...]\n{text[len(text) - tail :]}"


def _files(column: str | None, prompt: Prompt) -> dict[str, bytes]:
    """The files that a row brings along: path -> content."""
    if column is None:
        return {}
    found: Any = prompt.row.get(column)
    if not isinstance(found, Mapping) or not all(isinstance(text, str) for text in found.values()):
        raise ConfigError(
            f"{prompt.prompt_id}: column {column} should map paths to texts (episode.env.files_column), found "
            f"{found!r:.80}"
        )
    return {str(path): text.encode() for path, text in found.items()}


__all__ = ["SandboxEnv", "SandboxEnvs", "shortened", "shown"]
