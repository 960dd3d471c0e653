"""Columns: find the prompt, answer and ground truth of a row, in a column or by a template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hone.data.images import ImageError, put_images
from hone.data.messages import (
    MessageError,
    normal_messages,
    normal_tool,
    parameters_by_tool,
    parsed,
    stored_messages,
    without_nulls,
)
from hone.data.settings import DatasetConfig, PromptSetConfig
from hone.data.sources.base import DataError, Row, Rows, open_rows
from hone.registry import unknown
from hone.types import Message

_ABSENT = object()
STANDARD = ("prompt", "messages", "ground_truth", "data_source", "completion", "images")


class Template:
    """A sandboxed Jinja2 template over a row's columns. An unknown column is an error, not an empty text.

    >>> Template("prompt_template", "{{ numbers | join(' ') }} =").render({"numbers": [3, 1]}, str, 0)
    '3 1 ='
    """

    def __init__(self, key: str, text: str) -> None:
        self._key = key
        environment = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
        try:
            self._template = environment.from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise DataError(f"{key} is not a valid Jinja2 template: {error.message} (line {error.lineno})") from error

    def render(self, row: Row, where: Callable[[int], str], index: int) -> str:
        """Render row `index`. `where` describes the row in an error of the template."""
        try:
            return self._template.render(row)
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{self._key} fails on {where(index)}: {error} (columns: {', '.join(row)})") from error


class RowReader:
    """The rows of one data set after `skip_rows` and up to `max_rows`, read by meaning instead of column name."""

    def __init__(self, name: str, config: PromptSetConfig, key: str) -> None:
        """`name` is the set's name in prompt ids; `key` is the key of its settings in the run file."""
        self.name = name
        self.key = key
        self.rows: Rows = open_rows(config, key)
        self._named = dict(self.rows.columns) | {str(meaning): own for meaning, own in config.columns.items()}
        self._chosen = frozenset(config.columns)
        self._nested = tuple(own for own in config.columns.values() if "." in own)  # such as reward_model.ground_truth
        self._system = config.system_prompt
        self._prompt = Template(f"{key}.prompt_template", config.prompt_template) if config.prompt_template else None
        self.first, self.last = self._range(config)
        self._check_names(self.row(self.first))

    def _range(self, config: PromptSetConfig) -> tuple[int, int]:
        first, size = config.skip_rows, len(self.rows)
        if first >= size:
            raise DataError(f"{self.key}.skip_rows={first} skips all {size} rows of {self.rows.place}; lower it")
        return first, size if config.max_rows is None else min(size, first + config.max_rows)

    def _check_names(self, row: Row) -> None:
        for meaning in self._chosen:
            if self._named[meaning] not in row:
                wrong = unknown(f"column of {self.rows.place}", self._named[meaning], list(row))
                raise DataError(f"{self.key}.columns.{meaning}: {wrong}")

    def __len__(self) -> int:
        return self.last - self.first

    def row(self, index: int) -> Row:
        """Row `index` of the source (not counted from `skip_rows`), with the nested columns that the settings name."""
        row = self.rows[index]
        return {**nested_columns(row, self._nested), **row} if self._nested else row

    def messages(self, row: Row, index: int) -> tuple[Message, ...]:
        """The conversation of a row: its `messages`, or its prompt as one user message.

        Raises DataError if the row has neither or both, or if one is invalid.
        """
        found: Any
        if self._prompt is not None:
            found = self._prompt.render(row, self.rows.where, index)
        else:
            found = self._parsed(row, self._conversation_column(row, index), index)
        text = isinstance(found, str)
        column = "" if text else self._conversation_column(row, index)
        conversation = (Message(role="user", content=found),) if text else self._checked(found, row, index, column)
        return self._with_system(self.illustrated(conversation, row, index), row)

    def tools(self, row: Row, index: int) -> tuple[Mapping[str, Any], ...]:
        """JSON schemas of the functions that the model may call in this row, from the column `tools` (list or JSON).

        Raises DataError for anything else.
        """
        column = self.column("tools")
        if row.get(column) is None:
            return ()
        try:
            found = parsed(row[column], "the column")
            if found is not None and (isinstance(found, str) or not isinstance(found, Sequence)):
                raise MessageError(f"the column should be a list of JSON schemas, found {found!r:.80}")
            return tuple(normal_tool(without_nulls(tool)) for tool in found or ())
        except (MessageError, RecursionError) as error:
            raise DataError(f"{self.rows.where(index)}: {column}: {error}") from error

    def _parsed(self, row: Row, column: str, index: int) -> Any:
        """The value of a column of messages or text. Messages may be stored as JSON text."""
        found = row[column]
        if not isinstance(found, str) or not found.lstrip().startswith(("[", "{", '"[')):
            return found
        messages = stored_messages(found)
        if messages is None and column == self.column("messages"):
            raise DataError(
                f"{self.rows.where(index)}: {column} should be a list of messages, or the JSON text of one, found "
                f"{found!r:.80}; a column of texts is named in {self.key}.columns.prompt"
            )
        return found if messages is None else messages

    def illustrated(self, conversation: tuple[Message, ...], row: Row, index: int) -> tuple[Message, ...]:
        """Add the images of the row's column `images` to the conversation."""
        sources = row.get(self.column("images"))
        if sources is None or (isinstance(sources, Sequence) and not sources):
            return conversation
        try:
            return put_images(conversation, sources)
        except ImageError as error:
            raise DataError(f"{self.rows.where(index)}: {error}") from error

    def _with_system(self, conversation: tuple[Message, ...], row: Row) -> tuple[Message, ...]:
        """Begin with the row's column `system` or `system_prompt`, unless the messages have a system message."""
        said = row.get(self.column("system"))
        system = said if isinstance(said, str) and said.strip() else self._system
        if system and conversation[0]["role"] != "system":
            return (Message(role="system", content=system), *conversation)
        return conversation

    def _conversation_column(self, row: Row, index: int) -> str:
        there = [meaning for meaning in ("messages", "prompt") if row.get(self.column(meaning)) is not None]
        chosen = [meaning for meaning in there if meaning in self._chosen]
        if len(there) == 1 or len(chosen) == 1:
            return self.column((chosen or there)[0])
        if not there:
            raise DataError(
                f"{self.rows.where(index)} has no column 'prompt' or 'messages' (columns: {', '.join(row)}); "
                f"set {self.key}.prompt_template, or name one in {self.key}.columns"
            )
        raise DataError(f"{self.rows.where(index)} has both 'prompt' and 'messages': name one in {self.key}.columns")

    def required(self, row: Row, meaning: str, index: int) -> Any:
        """The value in the column of this meaning. Raises DataError, with the nearest column, if there is none."""
        column = self.column(meaning)
        if row.get(column) is None:
            wrong = unknown("column", column, list(row)) if column not in row else f"column {column!r} is null"
            raise DataError(f"{self.rows.where(index)}: {wrong}; name the right one in {self.key}.columns.{meaning}")
        return row[column]

    def _checked(self, found: Any, row: Row, index: int, column: str) -> tuple[Message, ...]:
        where = self.rows.where
        if isinstance(found, bytes) or not isinstance(found, Sequence) or not found:
            raise DataError(f"{where(index)}: {column} should be text or a list of messages, found {found!r:.80}")
        schemas = parameters_by_tool(self.tools(row, index))
        try:
            return normal_messages(found, schemas, filled=self.rows.fills_gaps)
        except MessageError as error:
            raise DataError(f"{where(index)}: {error}") from error

    def column(self, meaning: str) -> str:
        return self._named.get(meaning, meaning)

    def missing(self, meaning: str, template: str, row: Row, index: int) -> DataError:
        """The error for a row without the column for `meaning`, which names `template` as the alternative."""
        return DataError(
            f"{self.rows.where(index)} has no column {self.column(meaning)!r} (columns: {', '.join(row)}); "
            f"set {self.key}.{template}, or name the column in {self.key}.columns"
        )


def nested_columns(row: Row, names: Sequence[str]) -> dict[str, Any]:
    """The values under dotted names, of which the row has them.

    >>> nested_columns({"reward_model": {"ground_truth": "4"}}, ["reward_model.ground_truth", "reward_model.style"])
    {'reward_model.ground_truth': '4'}
    """
    found = {}
    for name in names:
        value: Any = row
        for part in name.split("."):
            value = value.get(part, _ABSENT) if isinstance(value, Mapping) else _ABSENT
        if value is not _ABSENT:
            found[name] = value
    return found


class PromptReader(RowReader):
    """Reads rows as prompts, with what a reward needs to score an answer."""

    def __init__(self, name: str, config: PromptSetConfig, key: str) -> None:
        super().__init__(name, config, key)
        text = config.ground_truth_template
        self._ground_truth = Template(f"{key}.ground_truth_template", text) if text else None

    def ground_truth(self, row: Row, index: int) -> Any:
        """The value that the reward compares with; None if the row has none."""
        if self._ground_truth is not None:
            return self._ground_truth.render(row, self.rows.where, index)
        column = self.column("ground_truth")
        if "ground_truth" in self._chosen and column not in row:
            raise self.missing("ground_truth", "ground_truth_template", row, index)
        return row.get(column)

    def data_source(self, row: Row) -> str:
        """The row's data source, by default the set's name."""
        return str(row.get(self.column("data_source")) or self.name)

    def rest(self, row: Row) -> Row:
        """All columns but the standard ones, unchanged."""
        images = self.column("images")
        known = (*STANDARD, *self._nested, images)
        return {column: value for column, value in row.items() if column not in known}


class SampleReader(RowReader):
    """Reads rows as complete conversations to train on."""

    def __init__(self, name: str, config: DatasetConfig, key: str) -> None:
        super().__init__(name, config, key)
        text = config.answer_template
        self._answer = Template(f"{key}.answer_template", text) if text else None

    def conversation(self, row: Row, index: int) -> tuple[Message, ...]:
        """The messages of a row, which end with at least one assistant message.

        A prompt takes its answer from `answer_template` or the column `completion` (text, or a list of messages).
        """
        messages = self.messages(row, index)
        if self._answer is not None:
            answer: Any = self._answer.render(row, self.rows.where, index)
        elif any(message["role"] == "assistant" for message in messages):
            return messages
        elif self.column("completion") in row:
            answer = self._parsed(row, self.column("completion"), index)
        elif len(messages) > 1:
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(f"{self.rows.where(index)}: no message is the assistant's, found the roles {roles}")
        else:
            raise self.missing("completion", "answer_template", row, index)
        if isinstance(answer, str):
            return (*messages, Message(role="assistant", content=answer))
        return (*messages, *self._checked(answer, row, index, self.column("completion")))
