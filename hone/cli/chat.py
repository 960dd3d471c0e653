"""`hone chat`: talk to a model in the terminal, or to two models at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from hone.cli.errors import say
from hone.cli.flags import Threads
from hone.cli.grouping import grouped
from hone.models.settings import ModelConfig
from hone.rollout.settings import RolloutConfig, SamplingConfig
from hone.tracking.base import printable
from hone.trainers.answering.chat import Chat, chatting
from hone.trainers.answering.model import Answering, finished_model, name_of

HELP = "/system TEXT: begin anew with a system prompt   /new: begin anew   /quit, Ctrl-D: end   Ctrl-C: end an answer"


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling of answers."""

    temperature: Annotated[float, typer.Option(min=0.0, help="0: greedy")] = 0.7
    max_response_tokens: Annotated[int, typer.Option(min=1, help="longest answer, in tokens")] = 512
    seed: Annotated[int, typer.Option(min=0, help="random seed of the first answer")] = 0
    threads: Threads = 0


@grouped
def chat(
    model: Annotated[
        str, typer.Argument(help="model folder, GGUF file, hub name or packaged:NAME, or the folder of a run")
    ],
    how: Sampling,
    system: Annotated[str, typer.Option(help="system prompt; empty: the chat template's own")] = "",
    beside: Annotated[str, typer.Option(help="another model, such as the one before training, that answers too")] = "",
) -> None:
    """Talk to a model. Answers appear while they are generated; --beside shows two models in two columns.

    From a pipe, each line is a message.
    """
    models: dict[str, ModelConfig] = {}
    for one in filter(None, (model, beside)):
        found = finished_model(one)
        models[name_of(found, *models)] = found
    sampling = SamplingConfig(max_response_tokens=how.max_response_tokens, temperature=how.temperature)
    console = Console()
    with chatting(models, Answering(RolloutConfig(sampling=sampling), threads=how.threads), system, how.seed) as talk:
        show = _beside(console, list(models)) if len(models) > 1 else _alone
        if sys.stdin.isatty():
            console.print(Text(HELP, style="dim"))
        for line in _lines():
            _obey(talk, line, show)


Show = Callable[[Chat, str], None]


def _obey(talk: Chat, line: str, show: Show) -> None:
    """Answer one line, or do what it commands."""
    command, _, rest = line.partition(" ")
    if command == "/system":
        talk.begin(rest.strip())
    elif command == "/new":
        talk.begin(talk.system)
    elif line.startswith("/"):
        say(f"{command} is no command. {HELP}")
    else:
        try:
            show(talk, line)
        except KeyboardInterrupt:
            say("\nended; the message was removed from the conversation")
        except ValueError as error:  # a conversation that is too long, or that the template refuses
            say(f"error: {error}; /new begins anew")


def _alone(talk: Chat, line: str) -> None:
    talk.say(line, lambda _, more: typer.echo(printable(more), nl=False))
    typer.echo()


def _beside(console: Console, names: list[str]) -> Show:
    def show(talk: Chat, line: str) -> None:
        texts = dict.fromkeys(names, "")

        def drawn() -> Columns:
            width = max(20, console.width // len(names) - 1)
            panels = [Panel(Text(printable(text)), title=Text(name), width=width) for name, text in texts.items()]
            return Columns(panels, padding=(0, 1))

        with Live(drawn(), console=console, auto_refresh=False) as live:

            def on_text(name: str, more: str) -> None:
                texts[name] += more
                live.update(drawn(), refresh=console.is_terminal)

            talk.say(line, on_text)
            live.update(drawn(), refresh=True)

    return show


def _lines() -> Iterator[str]:
    """The lines that a person types, or that come from a pipe, until the end or /quit."""
    while True:
        try:
            line = (input("> ") if sys.stdin.isatty() else input()).strip()
        except (EOFError, KeyboardInterrupt):
            return
        if line == "/quit":
            return
        if line:
            yield line
