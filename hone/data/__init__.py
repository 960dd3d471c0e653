"""Data: rows of a file or a generator become a resumable stream of prompts or samples, and trajectories a batch.

    source (rows) --columns, templates--> messages --rendering--> tokens --stream--> Prompt / Sample --packing--> Batch

This file imports nothing heavy: it only says where each source is.
"""

from __future__ import annotations

from hone.registry import Entry, Registry

SOURCES = Registry(
    "data source",
    {
        "jsonl": Entry("hone.data.files:open_jsonl"),
        "parquet": Entry("hone.data.files:open_parquet"),
        "hf": Entry("hone.data.hf:open_hf", "hone.data.settings:HfSettings", requires=("datasets",)),
        "reasoning_gym": Entry(
            "hone.data.reasoning_gym:open_task",
            "hone.data.settings:ReasoningGymSettings",
            requires=("reasoning_gym",),
        ),
        "shapes": Entry("hone.data.shapes:open_shapes", "hone.data.settings:ShapesSettings"),
        "python": Entry("hone.data.sources:open_function", "hone.data.settings:PythonSettings"),
    },
)
"""Name -> function of a `DatasetConfig` that gives its `Rows` (`hone.data.sources`)."""
