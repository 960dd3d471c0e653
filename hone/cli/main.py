"""The `hone` command: find the sub-command, import only that one, and turn its result into an exit code.

arguments --> command name --> import its module (for the others, only the help text) --> typer --> exit code
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from hone import __version__
from hone.cli.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_INTERRUPTED, report, say, sigterm_as_ctrl_c
from hone.cli.keys import keys_of
from hone.cli.recipe import KINDS, RUN_FILES
from hone.other_frameworks import COMMANDS as OTHER_COMMANDS
from hone.other_frameworks import INSTEAD
from hone.plugins import load_plugins
from hone.processes.closing import exits_within
from hone.processes.garbage import collect_rarely
from hone.registry import CannotLoad, UnknownName, reason, resolve, unknown


@dataclass(frozen=True, slots=True)
class Command:
    """Location of a command, and its line in `hone --help`. `hone COMMAND --help` shows the function's docstring."""

    target: str  # "module:function"
    summary: str


COMMANDS = {
    "quickstart": Command("hone.cli.quickstart:quickstart", "Train a pretrained model in minutes, on a CPU."),
    "migrate": Command("hone.cli.migrate:migrate", "Write a run file from a script of verl, TRL or OpenRLHF."),
    "init": Command("hone.cli.init:init", "Write a run file for your own model, data and reward."),
    **{
        kind.command.removeprefix("hone "): Command(f"hone.cli.training:{attribute}", kind.summary)
        for attribute, kind in (("train" if name == "rl" else name, kind) for name, kind in KINDS.items())
    },
    "eval": Command("hone.cli.eval:eval", "Evaluate a model on the held-out sets of a run file."),
    "chat": Command("hone.cli.chat:chat", "Talk to a model, or to two at once, in the terminal."),
    "serve": Command("hone.cli.serve:serve", "Serve a model to OpenAI clients, or a base to clients that train it."),
    "generate": Command("hone.cli.generate:generate", "Generate answers to prompts."),
    "score": Command("hone.cli.score:score", "Score the answers in a file with a reward function."),
    "check": Command("hone.cli.check:check", "Try a run file without training: data, rewards, model, memory."),
    "check-loss": Command("hone.cli.check_loss:check_loss", "Compute the loss on a batch that another system saved."),
    "plan": Command("hone.cli.plan:plan", "Predict memory, time and cost of a run, and whether it fits."),
    "env": Command("hone.cli.env:env", "Check an environment before training: play it without a model."),
    "config": Command("hone.cli.config:config", "Show all settings of a run file, explain a key, print a JSON schema."),
    "doctor": Command("hone.cli.doctor:doctor", "Show what this machine can run, and why it cannot run the rest."),
    "export": Command("hone.cli.export:export", "Write a checkpoint as a Hugging Face folder."),
    "rollout": Command("hone.cli.rollout:rollout", "Let a server join or leave a run that trains asynchronously."),
    "watch": Command("hone.cli.watch:watch", "Show runs in a live page, while they train and after."),
    "report": Command("hone.cli.report:report", "Rebuild the report page of a run."),
    "diagnose": Command("hone.cli.diagnose:diagnose", "Say what is wrong with a run, and what to try."),
    "list": Command("hone.cli.listing:listing", "List the names that a run file may use, by kind."),
}

PANELS = {  # of `hone --help`; the others train
    "Look": ("check", "check-loss", "config", "diagnose", "env", "plan", "report", "score", "watch"),
    "Models": ("chat", "eval", "export", "generate", "serve"),
    "Machine": ("doctor", "list", "rollout"),
}
HELP = {"help_option_names": ["-h", "--help"]}
KEYS_LIKE = "hone.cli.config:keys_like"  # imports all settings
EXIT_S = 60.0  # for the exit handlers of libraries, and for threads of tools that still run
TAKES_KEYS = {
    "quickstart",
    "eval",
    "check",
    "check-loss",
    "doctor",
    "plan",
    "env",
    "config",
    *(kind.command.removeprefix("hone ") for kind in KINDS.values()),
}


def run() -> None:
    """The entry point of the installed `hone` command."""
    collect_rarely()
    code = EXIT_INTERRUPTED
    with suppress(KeyboardInterrupt), sigterm_as_ctrl_c():  # also while the command is imported, which takes seconds
        code = main(sys.argv[1:])
    exits_within(EXIT_S, code)
    sys.exit(code)


def main(arguments: Sequence[str]) -> int:
    """Run one command; returns its exit code."""
    if list(arguments[:1]) == ["help"]:
        arguments = [*arguments[1:2], "--help"]
    name = next((argument for argument in arguments if not argument.startswith("-")), "")
    try:
        if name and name not in COMMANDS:
            if name in OTHER_COMMANDS:
                raise UnknownName(f"unknown command {name!r}: here it is hone {OTHER_COMMANDS[name]}")
            if name.endswith(RUN_FILES):
                raise UnknownName(
                    f"unknown command {name!r}: to train it, hone train {name}; to try it, hone check {name}"
                )
            raise UnknownName(unknown("command", name, list(COMMANDS)))
        command = typer.main.get_command(_app(name, asks_help=bool({*HELP["help_option_names"]} & {*arguments})))
        arguments = _with_keys(name, arguments)
        code = command.main(args=list(arguments) or ["--help"], prog_name="hone", standalone_mode=False)
    except SystemExit as stop:  # of foreign code, which must not look like success, or of a command with its code
        code = stop.code
        if not isinstance(code, int) or code == EXIT_DONE:
            return report(RuntimeError(f"sys.exit({code!r}) was called before the command had ended"), name)
        return code
    except (KeyboardInterrupt, Exception) as error:  # noqa: BLE001 (every error ends here)
        return _usage_error(error, name) or report(error, name)
    if code == EXIT_INTERRUPTED:  # typer turns Ctrl-C into this code
        return report(KeyboardInterrupt(), name)
    return code if isinstance(code, int) else EXIT_DONE


def _with_keys(name: str, arguments: Sequence[str]) -> list[str]:
    """The arguments of a command that reads settings, in which `--run.steps 10` is `run.steps=10`."""
    return keys_of(arguments) if name in TAKES_KEYS else list(arguments)


def _app(chosen: str, asks_help: bool) -> typer.Typer:
    """A typer app in which only the chosen command is real. The others are placeholders for the help."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, context_settings=HELP)
    app.callback(help="Train language models with reinforcement learning.")(_options)
    for name, command in COMMANDS.items():
        function = _load(name, with_plugins=not asks_help) if name == chosen else _placeholder
        panel = next((title for title, names in PANELS.items() if name in names), "Train")
        app.command(
            name, context_settings=HELP, help=None if name == chosen else command.summary, rich_help_panel=panel
        )(function)
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
    """Placeholder for a command that was not chosen."""


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
    """Print typer's error about the arguments in one line and return its exit code; 0 for any other error."""
    message = getattr(error, "format_message", None)
    if message is None:
        return EXIT_DONE
    unknown_one = type(error).__name__ == "NoSuchOption" and name in TAKES_KEYS
    option = getattr(error, "option_name", "").lstrip("-") if unknown_one else ""
    instead = INSTEAD.get(option.replace("-", "_"))
    keys = resolve(KEYS_LIKE)(option) if option and not instead else []
    meant = f"; a key of the run file is meant? --{' or --'.join(keys)}" if keys else f"; {instead}" if instead else ""
    say(f"error: {' '.join(message().split())}{meant} (see: hone {f'{name} ' if name else ''}--help)")
    return EXIT_BAD_INPUT
