"""Settings of data sets: where rows come from, and how a row becomes a prompt. No torch in here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import SerializeAsAny, model_validator

from hone.config import Choice, Config, FromRegistry, setting
from hone.data import SOURCES

Column = Literal[
    "prompt", "messages", "ground_truth", "data_source", "completion",
    "chosen", "rejected", "margin", "label", "completions", "labels", "images", "tools", "system",
]  # fmt: skip


class HfSettings(Choice):
    """The `datasets` library: `path` is a folder, or a name on the Hugging Face hub."""

    name: str = "hf"
    subset: str | None = setting(None, "configuration of the data set, such as main")
    split: str = setting("train", "split of the data set")
    revision: str | None = setting(None, "branch, tag or commit on the hub; null: its main branch")


class ReasoningGymSettings(Choice):
    """One task of the reasoning-gym package: problems made on demand, with a verifier of their own."""

    name: str = "reasoning_gym"
    task: str = setting(meaning="name of the task, such as number_sorting")
    size: int = setting(100_000, "number of different problems", unit="rows", ge=1)
    seed: int = setting(0, "seed of the problems")
    options: dict[str, Any] = setting(factory=dict, meaning="the task's own options, such as max_numbers")


class ShapesSettings(Choice):
    """Pictures of coloured squares with questions about them, for models that see images."""

    name: str = "shapes"
    size: int = setting(100_000, "number of different pictures", unit="rows", ge=1)
    seed: int = setting(0, "seed of the pictures")
    tasks: tuple[Literal["colour", "count", "order"], ...] = setting(
        ("colour", "count", "order"), "kinds of questions, equally frequent", min_length=1
    )
    side: int = setting(48, "width and height of a picture, which has 3 x 3 cells", unit="pixels", ge=6)
    text_share: float = setting(0.0, "share of rows without a picture, which ask to repeat three letters", ge=0, le=1)


class PythonSettings(Choice):
    """A Python function `(seed, size, **options) -> rows`, each a mapping."""

    name: str = "python"
    function: str = setting(meaning="'package.module:name' or 'path/to/file.py:name'")
    size: int = setting(100_000, "largest number of rows", unit="rows", ge=1)
    seed: int = setting(0, "seed that the function gets")
    options: dict[str, Any] = setting(factory=dict, meaning="further arguments of the function")


TooLongChoice = Literal["error", "drop", "truncate"]


class RowsConfig(Config):
    """Source of rows."""

    path: str = setting("", "file (.jsonl, .parquet), pattern such as data/*.jsonl, or what the source expects")
    source: Annotated[SerializeAsAny[Choice] | None, FromRegistry(SOURCES)] = setting(
        None, "where rows come from; null: a file, by the suffix of path"
    )


class PromptSetConfig(RowsConfig):
    """One data set: its rows, and how each becomes a prompt."""

    columns: dict[Column, str] = setting(
        factory=dict,
        meaning="hone's column name: the data set's, such as {ground_truth: solution}; a.b is field b of column a",
    )
    system_prompt: str = setting(
        "", "first message of every prompt that has no system message and no column system of its own"
    )
    prompt_template: str = setting("", "Jinja2 template of the user's message, over the row's columns")
    ground_truth_template: str = setting("", "Jinja2 template of the ground truth, over the row's columns")
    max_prompt_tokens: int | None = setting(None, "longest prompt allowed", unit="tokens", ge=1)
    too_long: TooLongChoice = setting(
        "drop", "rows over the limit: drop and count them, stop with an error, or truncate (supervised samples only)"
    )
    skip_rows: int = setting(0, "number of rows to skip at the start", unit="rows", ge=0)
    max_rows: int | None = setting(None, "largest number of rows to use", unit="rows", ge=1)


class DatasetConfig(PromptSetConfig):
    """A training set: its rows, how each becomes a prompt or a sample, and its weight in a mixture."""

    answer_template: str = setting("", "Jinja2 template of the answer in supervised training, over the row's columns")
    max_sample_tokens: int | None = setting(None, "longest supervised sample allowed", unit="tokens", ge=2)
    weight: float = setting(1.0, "how often the set is drawn, relative to the other sets of the mixture", gt=0)


class ChatConfig(Config):
    """Rendering of messages to tokens, and of sampled tokens to text."""

    options: dict[str, Any] = setting(
        factory=dict, meaning="variables for the chat template, such as {enable_thinking: false}"
    )
    unrendered: Literal["error", "drop"] = setting(
        "error", "a field (tool_calls, reasoning_content) or role of a message that the chat template does not render"
    )
    special_tokens_in_rows: bool = setting(
        False, "rows may contain special tokens, such as prompts that are rendered already; false: they are text"
    )
    special_tokens_in_answers: bool = setting(
        True, "rewards and environments read answers with all special tokens but their end; false: without them"
    )


class DataConfig(Config):
    """Training data: one set, or several mixed by weight, and the rendering of messages."""

    train: DatasetConfig = setting(meaning="the training set")
    mix: dict[str, DatasetConfig] = setting(factory=dict, meaning="more training sets by name, mixed in by weight")
    shuffle: bool = setting(True, "shuffle the rows anew in every epoch; false: keep the order of the file")
    chat_template: str = setting("", "Jinja2 chat template, or a file of one; default: the tokenizer's own")
    chat: ChatConfig | None = setting(None, "how the chat template renders messages; null: the defaults")

    @property
    def rows_hold_tokens(self) -> bool:
        """True if rows may hold special tokens."""
        return self.chat is not None and self.chat.special_tokens_in_rows

    @model_validator(mode="after")
    def _names_differ(self) -> DataConfig:
        if "train" in self.mix:
            raise ValueError("a set of mix may not be called 'train': that is the name of the first set")
        return self
