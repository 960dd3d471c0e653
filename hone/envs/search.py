"""Episodes with a tool that searches a corpus of passages by their words, with BM25.

    corpus (JSONL, Parquet, ...) --once a run--> index in memory --search(query, k)--> "title: text" of the best

A word is a run of letters and digits; upper and lower case are equal. There is no list of stop words and no stemming:
BM25 itself gives frequent words little weight, in every language.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from typing import Any

import bm25s
import numpy
from pydantic import Field

from hone.config import ConfigError
from hone.data.sources.base import Row, Rows, open_rows
from hone.envs.functions import FunctionTool, Signature
from hone.envs.settings import CorpusConfig, EpisodeConfig, SearchSettings
from hone.envs.tools import ToolEnv
from hone.types import Prompt

WORD = re.compile(r"\w+")
NOTHING = "no passage has a word of this query"
KEY = "episode.env.corpus"


class Index:
    """A BM25 index of texts in memory. It scores as Lucene does, with k1 = 1.5 and b = 0.75."""

    def __init__(self, texts: Sequence[str]) -> None:
        """Raises ValueError if no text has a word."""
        known: dict[str, int] = {}
        words = [array("i", [known.setdefault(word, len(known)) for word in words_of(text)]) for text in texts]
        if not known:
            raise ValueError("no text has a word")
        self._bm25 = bm25s.BM25(method="lucene", backend="numpy")
        self._bm25.index((words, known), show_progress=False)

    def best(self, query: str, k: int) -> list[int]:
        """The numbers of the best texts, at most `k`. Equal scores keep the order of the texts.

        A text without a word of the query is never among them.
        """
        known = [word for word in words_of(query) if word in self._bm25.vocab_dict]
        if not known:
            return []
        scores = self._bm25.get_scores(known)
        found = numpy.flatnonzero(scores > 0)
        order = numpy.argsort(-scores[found], kind="stable")[:k]
        return [int(number) for number in found[order]]


class Corpus:
    """The passages of a run file with their index. Its method `search` is what the tool does."""

    def __init__(self, config: CorpusConfig, max_characters: int) -> None:
        """Read and index the passages. Raises ConfigError for files, rows or columns that cannot be used."""
        rows = open_rows(config, KEY)
        self._passages = [_passage(rows, number, config) for number in range(len(rows))]
        self._max_characters = max_characters
        try:
            self._index = Index(self._passages)
        except ValueError as error:
            raise ConfigError(f"{KEY}: {rows.place} has no words in column {config.text_column}") from error

    def search(self, query: str, k: int) -> str:
        """The best passages for a query, each cut to the longest length, with an empty line between two."""
        found = [_cut(self._passages[number], self._max_characters) for number in self._index.best(query, k)]
        return "\n\n".join(found) or NOTHING


class SearchEnv(ToolEnv):
    """One episode with the tool `search`."""

    @classmethod
    def for_run(cls, settings: EpisodeConfig) -> SearchEnvs:  # type: ignore[override]
        """Build the index. Raises ConfigError for a corpus that cannot be used."""
        assert isinstance(settings.env, SearchSettings)
        return SearchEnvs(settings.env)


class SearchEnvs:
    """Creates the environments of a run's episodes, which share one index (`hone.envs.base.Shared`)."""

    def __init__(self, settings: SearchSettings) -> None:
        corpus = Corpus(settings.corpus, settings.max_passage_characters)
        most = settings.max_passages
        parameters = {
            "query": (str, Field(description="words to look for")),
            "k": (int, Field(most, ge=1, le=most, description="number of passages")),
        }
        signature = Signature.of_parameters("search", "Find passages that contain the words of a query.", parameters)
        self._tool = FunctionTool(signature, corpus.search, settings.tool_timeout_s)

    def __call__(self, prompt: Prompt, sample: int, settings: EpisodeConfig) -> SearchEnv:
        return SearchEnv(prompt, [self._tool], settings.limits)

    async def close(self) -> None:
        return None


def words_of(text: str) -> list[str]:
    """The words of a text, in lower case.

    >>> words_of("BM25, été!")
    ['bm25', 'été']
    """
    return WORD.findall(text.lower())


def _passage(rows: Rows, number: int, config: CorpusConfig) -> str:
    row = rows[number]
    text = _text(rows, number, row, "text_column", config.text_column)
    if config.title_column is None:
        return text
    title = _text(rows, number, row, "title_column", config.title_column)
    return f"{title}: {text}" if title else text


def _text(rows: Rows, number: int, row: Row, key: str, column: str) -> str:
    if column not in row:
        null = " (null: passages without titles)" if key == "title_column" else ""
        raise ConfigError(
            f"{KEY}.{key}: {rows.where(number)} has no column {column!r} (it has: {', '.join(row)}); set {KEY}.{key} "
            f"to one of them{null}"
        )
    value: Any = row[column]
    if not isinstance(value, str):
        raise ConfigError(f"{KEY}.{key}: {column!r} of {rows.where(number)} should be text, found {value!r:.60}")
    return value.strip()


def _cut(passage: str, most: int) -> str:
    return passage if len(passage) <= most else f"{passage[:most]} [...]"


__all__ = ["Corpus", "Index", "SearchEnv", "SearchEnvs", "words_of"]
