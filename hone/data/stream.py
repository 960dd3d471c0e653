"""Streams: the training sets as an endless, shuffled, resumable supply of prompts or samples.

    set "train" --order of epoch 0, 1, 2 ...--> row --read, render, filter by length--\\
    set "more"  --order of epoch 0, 1, ...  --> row --------------------------------->  the set that is most behind
                                                                                         its share --> take(n)

The order of a set's rows depends on (seed, set, epoch) only, and which set is drawn from only on how much each has
given, so the position of a stream is a handful of integers, and a resumed stream goes on with the very next row.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from hone.data.chat_template import is_text
from hone.data.columns import PromptReader, RowReader, SampleReader
from hone.data.images import ImageReader, images_in, without_images
from hone.data.messages import RenderingError, Tools
from hone.data.packing import Sample
from hone.data.rendering import Renderer
from hone.data.settings import ChatConfig, DataConfig, DatasetConfig, PromptSetConfig, TooLongChoice
from hone.data.sources.base import DataError, Row
from hone.data.sources.checksums import checksum, tell_changed
from hone.data.sources.files import GROUPS_IN_MEMORY
from hone.data.templates.rendered import tell_rendered
from hone.types import Image, Message, Prompt

T = TypeVar("T", covariant=True)


class TooLong(Exception):
    """A row has more tokens than its set allows: it is dropped and counted."""

    def __init__(self, tokens: int, limit: str, images: Sequence[Image] = ()) -> None:
        self.tokens = tokens
        self.limit = limit
        self.image_tokens = sum(image.tokens for image in images)


class LengthLimit:
    """One limit of a data set, and what happens to rows over it."""

    def __init__(self, key: str, name: str, tokens: int | None, too_long: TooLongChoice) -> None:
        """`key` is where the set stands in the run file, `name` the limit's own key. `tokens` None: no limit."""
        self._key = key
        self._name = name
        self._tokens = tokens
        self._too_long = too_long

    def check(self, tokens: int, images: Sequence[Image], where: Callable[[], str]) -> bool:
        """Return whether a row of this many tokens has to be truncated; `where()` names the row.

        Raises TooLong if it is to be dropped, DataError if `too_long` is error.
        """
        if self._tokens is None or tokens <= self._tokens:
            return False
        if self._too_long == "error":
            raise DataError(
                f"{where()} has {tokens} tokens, more than {self._key}.{self._name}={self._tokens}; raise that key, "
                f"or set {self._key}.too_long=drop"
            )
        if self._too_long == "drop":
            raise self._dropped(tokens, images)
        return True

    def reached(self, tokens: int) -> bool:
        """Return whether a sample of this many tokens may have been truncated."""
        return self._too_long == "truncate" and tokens == self._tokens

    def fit(self, sample: Sample, where: Callable[[], str]) -> Sample:
        """The sample, without its last tokens where it is truncated.

        Raises TooLong also for one that would lose all its loss tokens, or a part of an image; DataError as `check`.
        """
        ids, mask, images = sample.token_ids, sample.loss_mask, sample.images
        if not self.check(len(ids), images, where):
            return sample
        placeholders = {image.token_id for image in images}
        if not any(mask[: self._tokens]) or any(token in placeholders for token in ids[self._tokens :]):
            raise self._dropped(len(ids), images)
        return Sample(ids[: self._tokens], mask[: self._tokens], sample.source, images, sample.row)

    def _dropped(self, tokens: int, images: Sequence[Image]) -> TooLong:
        return TooLong(tokens, f"{self._name}={self._tokens}", images)


def prompt_limit(key: str, tokens: int | None, too_long: TooLongChoice) -> LengthLimit:
    """The limit of a set's prompts. Raises DataError for too_long: truncate."""
    if too_long == "truncate" and tokens is not None:
        raise DataError(
            f"{key}.too_long=truncate with {key}.max_prompt_tokens: a prompt without its end asks something else; only "
            f"supervised samples can be truncated (max_sample_tokens). Set {key}.too_long=drop, or error"
        )
    return LengthLimit(key, "max_prompt_tokens", tokens, too_long)


class Maker(Protocol[T]):
    """Makes one item of a data set from a row; raises TooLong for a row that is to be dropped."""

    @property
    def reader(self) -> RowReader: ...

    def make(self, index: int) -> T: ...


class PromptMaker:
    """Rows of one set as prompts."""

    def __init__(self, name: str, config: PromptSetConfig, renderer: Renderer, key: str) -> None:
        self.reader = PromptReader(name, config, key)
        self._renderer = renderer
        limit = config.max_prompt_tokens
        self._limit = prompt_limit(key, limit, config.too_long if limit is not None else "drop")

    def make(self, index: int) -> Prompt:
        """The prompt of a row, with draw number 0. Raises TooLong."""
        reader, row = self.reader, self.reader.row(index)
        messages = reader.messages(row, index)
        try:
            messages = self._renderer.with_images(messages, reader.rows.folder(index))
            tools = tools_of(reader, row, index, messages, self._renderer)
            token_ids = self._renderer.render_prompt(messages, tools)
        except RenderingError as error:
            raise DataError(f"{reader.rows.where(index)}: {error}") from error
        images = () if is_text(messages) else images_in(messages)
        self._limit.check(len(token_ids), images, lambda: reader.rows.where(index))
        if not token_ids:
            raise DataError(f"{reader.rows.where(index)}: the prompt has no tokens")
        return Prompt(
            prompt_id=f"{reader.name}/{index}",
            token_ids=token_ids,
            messages=without_images(messages) if images else messages,
            ground_truth=reader.ground_truth(row, index),
            data_source=reader.data_source(row),
            row=reader.rest(row),
            images=images,
            tools=tuple(tools),
        )


class SampleMaker:
    """Rows of one set as supervised samples."""

    def __init__(self, name: str, config: DatasetConfig, renderer: Renderer, key: str) -> None:
        self.reader = SampleReader(name, config, key)
        self._renderer = renderer
        self._limit = sample_limit(config, key)

    def make(self, index: int) -> Sample:
        """The sample of a row. Raises TooLong."""
        reader, row = self.reader, self.reader.row(index)
        messages = reader.conversation(row, index)
        try:
            messages = self._renderer.with_images(messages, reader.rows.folder(index))
            tools = tools_of(reader, row, index, messages, self._renderer)
            token_ids, loss_mask = self._renderer.render_sample(messages, tools)
        except RenderingError as error:
            raise DataError(f"{reader.rows.where(index)}: {error}") from error
        sample = Sample(token_ids, loss_mask, reader.name, images_in(messages), f"{reader.name}/{index}")
        return self._limit.fit(sample, lambda: reader.rows.where(index))


def sample_limit(config: DatasetConfig, key: str) -> LengthLimit:
    """The limit of a set's supervised samples."""
    limit = config.max_sample_tokens
    return LengthLimit(key, "max_sample_tokens", limit, config.too_long if limit is not None else "drop")


def tools_of(reader: RowReader, row: Row, index: int, messages: Sequence[Message], renderer: Renderer) -> Tools:
    """The functions that a row offers to the model. Raises DataError if the chat template does not render them."""
    tools = reader.tools(row, index)
    if tools and not renderer.renders_tools(messages, tools):
        raise DataError(
            f"{reader.rows.where(index)} has {len(tools)} tools in column {reader.column('tools')!r}, but the chat "
            "template does not render them; set data.chat_template to one that does, or remove the column"
        )
    return tools


class _Set(Generic[T]):
    """One data set and the position in it."""

    def __init__(self, maker: Maker[T], weight: float, order_seed: int | None, content: str) -> None:
        self.maker = maker
        self.weight, self.content = weight, content  # a checksum
        self._order_seed = order_seed  # None: the order of the file
        self._order: npt.NDArray[np.int64] | None = None
        self.epoch = 0
        self.position = 0  # in the order of this epoch
        self.taken = 0  # items given, all epochs
        self.dropped = 0  # rows too long, counted in the first epoch only: later ones drop the same rows again
        with suppress(TooLong):
            maker.make(maker.reader.first)  # so that a wrong column or template is found before training starts

    @property
    def size(self) -> int:
        return len(self.maker.reader)

    def next(self) -> T:
        """The next item; goes on to the next epoch by itself. Raises DataError if every row is too long."""
        shortest: TooLong | None = None
        for _ in range(2 * self.size):  # two epochs' worth has a whole epoch in it, wherever it begins
            try:
                item = self.maker.make(self._advance())
            except TooLong as error:
                self.dropped += self.epoch == 0
                shortest = min(shortest or error, error, key=lambda one: one.tokens)
            else:
                self.taken += 1
                return item
        assert shortest is not None
        raise _all_too_long(self.maker.reader, self.size, shortest)

    def _advance(self) -> int:
        if self.position == self.size:
            self.epoch, self.position, self._order = self.epoch + 1, 0, None
        if self._order is None:
            self._order = row_order(self.maker.reader, self._order_seed, self.epoch)
        self.position += 1
        return int(self._order[self.position - 1])

    def state(self) -> dict[str, Any]:
        return {"rows": self.size} | {k: getattr(self, k) for k in ("epoch", "position", "taken", "dropped", "content")}

    def restore(self, state: Mapping[str, Any]) -> None:
        if state["rows"] != self.size:
            reader = self.maker.reader
            raise DataError(
                f"{reader.key}: {reader.rows.place} now gives {self.size} rows, but the run that is continued had "
                f"{state['rows']}: the position in the data would be wrong"
            )
        if state.get("content", self.content) != self.content:
            tell_changed(self.maker.reader.key, self.maker.reader.rows.place)
        if state["epoch"] != self.epoch:
            self._order = None  # otherwise kept: shuffling many rows in every step takes long
        self.epoch, self.position = state["epoch"], state["position"]
        self.taken, self.dropped = state["taken"], state["dropped"]


def row_order(reader: RowReader, seed: int | None, epoch: int) -> npt.NDArray[np.int64]:
    """The numbers of a set's rows in the order of one epoch; `seed=None` is the order of the file.

    Rows that are cheap to read are shuffled freely. Where rows are read in blocks (row groups of Parquet), the blocks
    are shuffled, and then the rows of each few blocks that are in memory together.
    """
    if seed is None:
        return np.arange(reader.first, reader.last)
    rng = np.random.default_rng([seed, epoch])
    blocks = _blocks(reader)
    if len(blocks) > GROUPS_IN_MEMORY:
        blocks = [blocks[i] for i in rng.permutation(len(blocks))]
    windows = [blocks[i : i + GROUPS_IN_MEMORY] for i in range(0, len(blocks), GROUPS_IN_MEMORY)]
    return np.concatenate([rng.permutation(np.concatenate([np.arange(a, b) for a, b in part])) for part in windows])


def _blocks(reader: RowReader) -> list[tuple[int, int]]:
    """(first, last + 1) of each block, without what `skip_rows` and `max_rows` leave out."""
    sizes = reader.rows.blocks or [len(reader.rows)]
    edges = itertools.pairwise([0, *itertools.accumulate(sizes)])
    clipped = [(max(a, reader.first), min(b, reader.last)) for a, b in edges]
    return [(a, b) for a, b in clipped if a < b]


def _all_too_long(reader: RowReader, size: int, shortest: TooLong) -> DataError:
    return DataError(
        f"{reader.key}: every one of the {size} rows of {reader.rows.place} is longer than {shortest.limit}; the "
        f"shortest has {shortest.tokens} tokens"
        + (f", {shortest.image_tokens} of them images (see model.use.vision)" if shortest.image_tokens else "")
    )


class _Stream(Generic[T]):
    """The sets of a mixture, drawn from by weight."""

    def __init__(self, makers: Mapping[str, Maker[T]], config: DataConfig, seed: int) -> None:
        self._seed = seed
        self._shuffle = shuffle = config.shuffle
        self._sets: dict[str, _Set[T]] = {}
        for name, maker in makers.items():
            tell_rendered(maker.reader, config.rows_hold_tokens)
            own, order = config.mix.get(name, config.train), _order_seed(seed, name) if shuffle else None
            content = checksum(own.__dict__["path"])  # which is no use of a path that the source does not read
            self._sets[name] = _Set(maker, own.weight if config.mix else 1.0, order, content)

    @property
    def rows(self) -> int:
        """Rows of all sets together, before any is dropped."""
        return sum(one.size for one in self._sets.values())

    @property
    def epoch(self) -> int:
        """Return the number of times that every row has been drawn at least."""
        return min(one.epoch + (one.position == one.size) for one in self._sets.values())

    @property
    def taken(self) -> dict[str, int]:
        """Items given so far, by set."""
        return {name: one.taken for name, one in self._sets.items()}

    @property
    def dropped(self) -> dict[str, int]:
        """Different rows found too long so far, by set."""
        return {name: one.dropped for name, one in self._sets.items()}

    def state_dict(self) -> dict[str, Any]:
        """The position, as JSON-compatible data."""
        sets = {name: one.state() for name, one in self._sets.items()}
        return {"seed": self._seed, "shuffle": self._shuffle, "sets": sets}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken. Raises DataError if the data, their order or the sets are others."""
        for name, now in (("seed", self._seed), ("shuffle", self._shuffle), ("sets", list(self._sets))):
            before = list(state[name]) if name == "sets" else state[name]
            if before != now:
                raise DataError(f"data: the run that is continued had {name} {before}, this one has {now}")
        for name, one in self._sets.items():
            one.restore(state["sets"][name])

    def _items(self) -> Iterator[T]:
        while True:
            total = 1 + sum(one.taken for one in self._sets.values())
            weights = sum(one.weight for one in self._sets.values())
            yield max(self._sets.values(), key=lambda one: one.weight * total / weights - one.taken).next()


class PromptStream(_Stream[Prompt]):
    """The prompts of a run, numbered in the order in which they are drawn.

    >>> stream = PromptStream(config.data, renderer, seed=config.run.seed)            # doctest: +SKIP
    >>> [prompt.draw for prompt in stream.take(3)]                                    # doctest: +SKIP
    [0, 1, 2]
    """

    def __init__(self, config: DataConfig, renderer: Renderer, seed: int, key: str = "data") -> None:
        """`key` is where `config` stands in the run file. Raises DataError for data that cannot be used."""
        super().__init__({n: PromptMaker(n, c, renderer, k) for n, c, k in named_sets(config, key)}, config, seed)

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts; `draw` numbers go on without a gap."""
        return list(itertools.islice(self._numbered(), count))

    def peek(self, count: int) -> list[Prompt]:
        """The next `count` prompts, which `take` returns again."""
        position, prompts = self.state_dict(), self.take(count)
        self.load_state_dict(position)
        return prompts

    def take_unless(self, skip: Callable[[Prompt], bool], count: int) -> tuple[list[Prompt], list[Prompt]]:
        """The next `count` prompts that `skip` does not want skipped, and the skipped ones; both have draw numbers.

        At most as many are skipped as there are rows, so that a `skip` that wants them all ends too.
        """
        taken: list[Prompt] = []
        skipped: list[Prompt] = []
        items = self._numbered()
        while len(taken) < count:
            prompt = next(items)
            (skipped if len(skipped) < self.rows and skip(prompt) else taken).append(prompt)
        return taken, skipped

    def since(self, before: Mapping[str, Any]) -> list[Prompt]:
        """The prompts that were drawn after the earlier position `before`, again; the stream stays where it is."""
        end = sum(self.taken.values())
        self.load_state_dict(before)
        return self.take(end - sum(self.taken.values()))

    def back_to(self, before: Mapping[str, Any], draw: int) -> None:
        """Go back to draw number `draw`, which `take` returns next; `before` is a position at it or earlier."""
        self.load_state_dict(before)
        self.take(draw - sum(self.taken.values()))

    def _numbered(self) -> Iterator[Prompt]:
        first = sum(self.taken.values())
        for number, prompt in enumerate(self._items(), first):
            yield replace(prompt, draw=number)


MakerOf = Callable[[str, DatasetConfig, Renderer, str], Maker[T]]
"""(name of a set, its settings, renderer, where the settings stand in the run file) -> what makes its items."""


class ItemStream(_Stream[T]):
    """Stream of a supervised run's items: samples, pairs of answers, judged answers, answers in steps."""

    def __init__(self, maker: MakerOf[T], config: DataConfig, renderer: Renderer, seed: int, key: str = "data") -> None:
        """`key` is where `config` stands in the run file. Raises DataError for data that cannot be used."""
        super().__init__({n: maker(n, c, renderer, k) for n, c, k in named_sets(config, key)}, config, seed)

    def take(self, count: int) -> list[T]:
        """The next `count` items."""
        return list(itertools.islice(self._items(), count))


def make_renderer(config: DataConfig, tokenizer: Any, image_reader: ImageReader | None = None) -> Renderer:
    """The renderer that a run's data settings ask for; `image_reader` is of a model that takes images."""
    chat = config.chat or ChatConfig()
    return Renderer(
        tokenizer,
        config.chat_template,
        chat.options,
        image_reader,
        unrendered=chat.unrendered,
        special_tokens_in_rows=chat.special_tokens_in_rows,
        special_tokens_in_answers=chat.special_tokens_in_answers,
    )


def read_prompts(name: str, config: PromptSetConfig, renderer: Renderer, key: str) -> tuple[list[Prompt], int]:
    """Every prompt of a held-out set in the order of the file, and how many rows were too long.

    Raises DataError if all of them are.
    """
    maker = PromptMaker(name, config, renderer, key)
    tell_rendered(maker.reader, not renderer.guards_rows)
    prompts, dropped = read_all(maker)
    return [replace(prompt, draw=number) for number, prompt in enumerate(prompts)], dropped


def read_all(maker: Maker[T]) -> tuple[list[T], int]:
    """Every item of a held-out set in the order of the file, and how many rows were too long.

    Raises DataError if all of them are.
    """
    items = list(each_item(maker))
    return items, len(maker.reader) - len(items)


def each_item(maker: Maker[T]) -> Iterator[T]:
    """The items in the order of the file. Raises DataError if all rows are too long."""
    reader, shortest, given = maker.reader, None, False
    for index in range(reader.first, reader.last):
        try:
            yield maker.make(index)
            given = True
        except TooLong as error:
            shortest = min(shortest or error, error, key=lambda one: one.tokens)
    if not given and shortest is not None:
        raise _all_too_long(reader, len(reader), shortest)


def named_sets(config: DataConfig, key: str) -> Iterator[tuple[str, DatasetConfig, str]]:
    yield "train", config.train, f"{key}.train"
    for name, one in config.mix.items():
        yield name, one, f"{key}.mix.{name}"


def _order_seed(seed: int, name: str) -> int:
    """A set's own seed, so that two sets of the same size are not shuffled alike."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "big")
