"""Data: rows of a file or a generator become a resumable stream of prompts or samples, and trajectories a batch.

    source (rows) --columns, templates--> messages --rendering--> tokens --stream--> Prompt / Sample --packing--> Batch

In reading order: `settings`, `sources/` (rows), `columns` (prompt and answer of a row), `messages` and `blocks` (one
form for what others write in several), `rendering` with `chat_template` and `templates/` (messages to tokens),
`stream` (the order of prompts) with `counting`, `packing` with `turns`, `routes` and `packed_images` (fields of a
batch); `images` (in messages); `answers` (in responses); `preferences` and `preference_readers` (pairs and judged
answers). This file imports none of the sources; it only names where each is.
"""

from __future__ import annotations

from hone.registry import Entry, Registry

SOURCES = Registry(
    "data source",
    {
        "jsonl": Entry("hone.data.sources.files:open_jsonl"),
        "parquet": Entry("hone.data.sources.files:open_parquet"),
        "hf": Entry("hone.data.sources.hf:open_hf", "hone.data.settings:HfSettings", requires=("datasets",)),
        "reasoning_gym": Entry(
            "hone.data.sources.reasoning_gym:open_task",
            "hone.data.settings:ReasoningGymSettings",
            requires=("reasoning_gym",),
        ),
        "shapes": Entry("hone.data.sources.shapes:open_shapes", "hone.data.settings:ShapesSettings"),
        "python": Entry("hone.data.sources.base:open_function", "hone.data.settings:PythonSettings"),
    },
)
"""Name -> function of a `RowsConfig` that gives its `Rows` (`hone.data.sources.base`)."""
