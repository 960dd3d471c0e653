"""`hone generate`: generate answers to prompts from the command line or a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from hone.cli.answer_file import AnswerFile, Count
from hone.cli.flags import Threads, guessed_columns, guessed_prompt
from hone.cli.grouping import grouped
from hone.config import ConfigError, build
from hone.data.columns import PromptReader
from hone.data.images import put_images, without_images
from hone.data.settings import DatasetConfig
from hone.data.sources.base import open_rows
from hone.engines.settings import EngineConfig
from hone.platforms.base import AUTO
from hone.rollout.settings import RolloutConfig, SamplingConfig
from hone.trainers.answering.asking import AnswerRequest, generate_answers
from hone.trainers.answering.model import Answering, finished_model
from hone.types import Message


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling of answers."""

    samples: Annotated[int, typer.Option(min=1, help="answers per prompt")] = 1
    temperature: Annotated[float, typer.Option(min=0.0, help="0: greedy")] = 1.0
    max_response_tokens: Annotated[int, typer.Option(min=1, help="longest response, in tokens")] = 512
    seed: Annotated[int, typer.Option(min=0, help="random seed")] = 0
    threads: Threads = 0


@grouped
def generate(
    model: Annotated[
        str, typer.Argument(help="model folder, GGUF file, hub name or packaged:NAME, or the folder of a run")
    ],
    how: Sampling,
    prompt: Annotated[list[str] | None, typer.Option(help="a prompt; may be repeated")] = None,
    source: Annotated[
        Path | None, typer.Option("--input", help="file: rows with a prompt, question or messages")
    ] = None,
    target: Annotated[
        Path | None, typer.Option("--output", help="file to write (.jsonl): a row per answer, in the column 'response'")
    ] = None,
    compute_dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32")] = AUTO,
) -> None:
    """Generate answers with the built-in engine. `hone score` reads the file that --output writes.

    The file gets each answer as soon as it is there, and the terminal those to each prompt, in order, so a command that
    is killed leaves those it has.
    """
    rows = _rows(prompt or [], source)
    sampling = SamplingConfig(max_response_tokens=how.max_response_tokens, temperature=how.temperature)
    engine = build(EngineConfig, {"compute_dtype": compute_dtype}, "--compute-dtype")
    questions = AnswerRequest(
        [_messages(row, i) for i, row in enumerate(rows)],
        Answering(RolloutConfig(sampling=sampling), engine, how.threads),
        how.samples,
        how.seed,
        source.parent if source is not None else Path(),
    )
    with AnswerFile(target, "--output") as kept:
        count = Count("answers", len(rows) * how.samples)
        waiting: list[dict[int, str]] = [{} for _ in rows]  # answers by sample, to print in the order of the prompts
        unprinted = iter(range(len(rows))) if target is None else iter(())
        following = next(unprinted, None)

        def on_answer(number: int, sample: int, answer: str) -> None:
            nonlocal following
            kept.add((number, sample), {**_text_of(rows[number]), "sample": sample, "response": answer})
            count.one()
            waiting[number][sample] = answer
            while following is not None and len(waiting[following]) == how.samples:
                count.end()
                _print(rows[following], waiting[following])
                following = next(unprinted, None)

        generate_answers(finished_model(model), questions, on_answer)
        count.end()


def _print(row: dict[str, Any], answers: Mapping[int, str]) -> None:
    typer.secho(_printable(str(row.get("prompt", row.get("messages")))), bold=True)
    for _, answer in sorted(answers.items()):  # by echo: rich would change `:smile:` and tabs
        typer.echo(_printable(answer))


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _rows(prompts: list[str], source: Path | None) -> list[dict[str, Any]]:
    if bool(prompts) == (source is not None):
        raise ConfigError(f"{'two sources of' if prompts else 'no'} prompts: give either --prompt TEXT or --input FILE")
    if source is None:
        return [{"prompt": text} for text in prompts]
    rows = open_rows(DatasetConfig(path=str(source)), "--input")
    if rows[0].keys() & {"prompt", "messages"}:
        return [dict(rows[index]) for index in range(len(rows))]
    named = {"columns": guessed_columns("distill", rows[0]), "prompt_template": guessed_prompt(rows[0])}
    reader = PromptReader("input", build(DatasetConfig, {"path": str(source), **named}, "--input"), "--input")
    return [_asked(reader, index) for index in range(len(rows))]


def _asked(reader: PromptReader, index: int) -> dict[str, Any]:
    """A row with its prompt in the column `prompt` or `messages`; its images are in the messages."""
    row = reader.row(index)
    messages = reader.messages(row, index)
    text = messages[0].get("content") if len(messages) == 1 and messages[0]["role"] == "user" else None
    prompt = {"prompt": text} if isinstance(text, str) else {"messages": list(messages)}
    return {**prompt, **{name: value for name, value in row.items() if name != "images"}}


def _text_of(row: dict[str, Any]) -> dict[str, Any]:
    """The row without its encoded images, which stay in the input file."""
    kept = {key: value for key, value in row.items() if key != "images"}
    return {**kept, "messages": list(without_images(kept["messages"]))} if kept.get("messages") else kept


def _messages(row: dict[str, Any], index: int) -> Sequence[Message]:
    found: list[Message] = list(row.get("messages") or [])
    if not found and isinstance(row.get("prompt"), str):
        found = [Message(role="user", content=row["prompt"])]
    if found:
        return put_images(found, row["images"]) if row.get("images") else found
    raise ConfigError(f"--input row {index}: expected a column 'prompt' or 'messages', found {', '.join(row)}")
