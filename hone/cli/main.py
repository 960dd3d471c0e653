"""The `hone` command: finds the sub-command, imports only that one, and turns whatever happens into an exit code.

arguments --> name of the command --> its module is imported (the others are only named) --> typer --> exit code
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from hone import __version__
from hone.cli.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_INTERRUPTED, report, say
from hone.registry import CannotLoad, UnknownName, load_plugins, reason, resolve, unknown


@dataclass(frozen=True, slots=True)
class Command:
    """Where a command is and what `hone --help` says of it; its own help comes from its function."""

    target: str  # "module:function"
    summary: str


COMMANDS = {
    "train": Command("hone.cli.train:train", "Train a policy with reinforcement learning."),
    "sft": Command("hone.cli.sft:sft", "Fine-tune a model on samples."),
    "prefer": Command("hone.cli.prefer:prefer", "Train a model on preferences: DPO and its family, KTO."),
    "reward-model": Command("hone.cli.reward_model:reward_model", "Train a reward model."),
    "distill": Command("hone.cli.distill:distill", "Teach a policy what teachers think of its own answers."),
    "eval": Command("hone.cli.eval:eval", "Measure a model on held-out prompts."),
    "generate": Command("hone.cli.generate:generate", "Answer prompts with a model."),
    "score": Command("hone.cli.score:score", "Judge the answers in a file with a reward function."),
    "config": Command("hone.cli.config:config", "Show a run file resolved, explain a key, print the JSON schema."),
    "doctor": Command("hone.cli.doctor:doctor", "Say what this machine can run, and why not the rest."),
    "export": Command("hone.cli.export:export", "Write a checkpoint as a Hugging Face model folder."),
    "report": Command("hone.cli.report:report", "Rebuild the report page of a run."),
    "list": Command("hone.cli.listing:listing", "List the registered names, by kind."),
}


def run() -> None:
    """The entry point of the installed `hone` command."""
    sys.exit(main(sys.argv[1:]))


def main(arguments: Sequence[str]) -> int:
    """Run one command; returns its exit code. Raises nothing but SystemExit."""
    name = next((argument for argument in arguments if not argument.startswith("-")), "")
    try:
        if name and name not in COMMANDS:
            raise UnknownName(unknown("command", name, list(COMMANDS)))
        command = typer.main.get_command(_app(name, asks_help="--help" in arguments))
        code = command.main(args=list(arguments) or ["--help"], prog_name="hone", standalone_mode=False)
    except (KeyboardInterrupt, Exception) as error:  # noqa: BLE001 (the one place where every error ends)
        return _usage_error(error, name) or report(error, name)
    if code == EXIT_INTERRUPTED:  # what typer makes of Ctrl-C
        return report(KeyboardInterrupt(), name)
    return code if isinstance(code, int) else EXIT_DONE


def _app(chosen: str, asks_help: bool) -> typer.Typer:
    """All commands, of which only the chosen one is real: the others are there to be named in the help."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.callback(help="Train language models with reinforcement learning.")(_options)
    for name, command in COMMANDS.items():
        function = _load(name, with_plugins=not asks_help) if name == chosen else _placeholder
        app.command(name, help=None if name == chosen else command.summary)(function)
    return app


def _load(name: str, with_plugins: bool) -> Callable[..., Any]:
    for plugin, problem in load_plugins().items() if with_plugins else []:
        if problem:
            say(f"warning: plug-in {plugin} failed to load: {problem}")
    try:
        function: Callable[..., Any] = resolve(COMMANDS[name].target)
    except ImportError as error:
        raise CannotLoad(f"the command {name!r} cannot be loaded here: {reason(error)}") from error
    return function


def _placeholder() -> None:
    """Stands for a command that was not chosen."""


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"hone {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    pass


def _usage_error(error: BaseException, name: str) -> int:
    """Exit code of an error in the arguments as typer found it, said in one line; 0 if it is none."""
    message = getattr(error, "format_message", None)
    if message is None:
        return EXIT_DONE
    say(f"error: {' '.join(message().split())} (see: hone {f'{name} ' if name else ''}--help)")
    return EXIT_BAD_INPUT
