"""Read the code blocks of the pages, with the comment that says who runs a block or why it is not run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "recipes").rglob("*.md"))
)
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[^\n`]*)\n(?P<text>.*?)^ *```$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- (not run|run by|run file): (.*?) -->\s*\Z", re.DOTALL)
PROGRAMS = "hone make python python3 pip uv ray torchrun docker kubectl sbatch bash cd for zcat cmp echo export git"
COMMAND = re.compile(rf"(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\.venv\S*/bin/)?(?P<program>{PROGRAMS.replace(' ', '|')}) (?=\S)")


@dataclass(frozen=True)
class Block:
    """A code block of a page."""

    page: str
    line: int
    language: str
    text: str
    mark: str  # "not run", "run by" or "run file", from an HTML comment right before the block; or ""
    reason: str  # what the comment says
    before: str  # the prose between the block before and this one

    @property
    def place(self) -> str:
        """The page and line."""
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """The lines of a block without language that call a program, without `$`, and joined where they go on."""
        if self.language not in ("", "bash"):
            return []
        lines = [line.strip() for line in self.text.replace("\\\n", " ").splitlines()]
        found = [line for line in lines if COMMAND.match(line)]
        session = [line for line in found if line.startswith("$ ")]  # in a session, what has no $ is output
        return [line.removeprefix("$ ").partition(" #")[0].rstrip() for line in session or found]


def read_blocks(page: str) -> list[Block]:
    """All code blocks of a page, in its order."""
    text, blocks, end = (ROOT / page).read_text(encoding="utf-8"), [], 0
    for found in FENCE.finditer(text):
        before = text[end : found.start()]
        mark = MARK.search(before)
        indent = len(found["indent"])
        blocks.append(
            Block(
                page,
                text.count("\n", 0, found.start()) + 1,
                found["language"].strip(),
                "".join(line[indent:] if line[:indent].isspace() else line for line in found["text"].splitlines(True)),
                mark[1] if mark else "",
                " ".join(mark[2].split()) if mark else "",
                before,
            )
        )
        end = found.end()
    return blocks
