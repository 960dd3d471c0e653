"""The contract of a data source: rows by index, in any order, the same each time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hone.data.sources.base import Rows
from hone.testing.contract import Absent, Contract, require

MOST = 32  # rows that are read, spread over the set


class SourceContract(Contract):
    """Contract of `hone.data.sources.base.Rows`: a resumed run reads the rows that the first would have read."""

    def make(self) -> Rows:
        """Open the rows: a set of at least two."""
        raise NotImplementedError

    def test_each_row_is_a_mapping_of_columns(self) -> None:
        """Every row is a mapping whose keys are text, and says where it is."""
        rows = self.make()
        require(len(rows) >= 2, f"the set has {len(rows)} rows; give the suite one of at least two")
        for index in _some(rows):
            row = rows[index]
            require(
                isinstance(row, Mapping) and bool(row) and all(isinstance(key, str) for key in row),
                f"row {index} should be a mapping of columns, found {row!r:.100}",
            )
            where, folder = rows.where(index), rows.folder(index)
            require(isinstance(where, str) and bool(where), f"where({index}) should be a place, found {where!r}")
            require(isinstance(folder, Path), f"folder({index}) should be a Path, found {folder!r}")

    def test_rows_have_places_of_their_own(self) -> None:
        """`where` names each row apart, so that an error leads to it."""
        rows = self.make()
        places = [rows.where(index) for index in _some(rows)]
        require(len(set(places)) == len(places), f"two rows are at one place: {sorted(places)[:4]}")
        require(bool(rows.place), "the set should say where its rows come from (place)")

    def test_rows_are_the_same_in_any_order_and_when_opened_again(self) -> None:
        """Row i depends on i alone: not on what was read before, nor on the process."""
        rows, again = self.make(), self.make()
        require(len(rows) == len(again), f"opened again, the set has {len(again)} rows instead of {len(rows)}")
        order = _some(rows)
        first = {index: rows[index] for index in order}
        for index in reversed(order):
            require(again[index] == first[index], f"row {index} is {first[index]!r:.100} first, then another one")

    def test_an_index_beyond_the_end_is_refused(self) -> None:
        """`rows[len(rows)]` raises IndexError."""
        rows = self.make()
        try:
            row = rows[len(rows)]
        except IndexError:
            return
        require(False, f"row {len(rows)} of {len(rows)} is {row!r:.100}, expected IndexError")

    def test_blocks_cover_the_set(self) -> None:
        """The sizes of blocks that are read at once add up to the set."""
        rows = self.make()
        if rows.blocks is None:
            raise Absent("any row is cheap to read: there are no blocks")
        require(
            sum(rows.blocks) == len(rows) and min(rows.blocks) > 0,
            f"blocks of {list(rows.blocks)[:8]} rows make {sum(rows.blocks)}, the set has {len(rows)}",
        )

    def test_columns_lead_to_columns(self) -> None:
        """`columns` maps hone's names to names of columns that the rows have."""
        rows = self.make()
        row = rows[0]
        missing = [theirs for theirs in rows.columns.values() if theirs not in row]
        require(not missing, f"columns names {missing}, but the first row has {sorted(row)}")


def _some(rows: Rows) -> list[int]:
    """Indices over the whole set, its first and last row among them."""
    size = len(rows)
    return sorted({round(part * (size - 1) / (MOST - 1)) for part in range(MOST)}) if size > 1 else [0]
