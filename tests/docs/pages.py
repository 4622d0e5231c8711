"""The code blocks of README.md and of the pages of docs/, with the marks that stand before them.

A mark is a line `<!-- ... -->` right before a block. These marks have a meaning for Python:

    <!-- not run: REASON -->     the block does not run in the tests
    <!-- fragment -->            the block needs names, and `test_fragments` has a world for it
    <!-- source: PATH -->        the block is a part of that file of the project, as it stands there, and the file runs it

Every other Python block is a whole program: `test_programs` runs it in a process. `<!-- output -->` before a block of text says that the
program before it prints this text, where `...` stands for anything. `<!-- run -->` before a block of shell commands has bash run them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(path for path in DOCS.rglob("*.md") if not any(part.startswith(".") for part in path.parts))]

_MARK = re.compile(r"<!-- *(.+?) *-->")


class Block(NamedTuple):
    """One fenced block.

    Attributes:
        page: the file. section: the heading above the block. language: the word behind the fence, or empty.
        line: the number of the line with the opening fence.
        mark: the text of the mark right before the block, or empty.
    """

    page: Path
    section: str
    language: str
    line: int
    text: str
    mark: str

    @property
    def place(self) -> str:
        """Where the block stands, as `docs/index.md:12`."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def reason(self) -> str:
        """Why the block does not run, or empty."""
        return self.mark.removeprefix("not run:").strip() if self.mark.startswith("not run:") else ""

    @property
    def is_fragment(self) -> bool:
        return self.language == "python" and self.mark == "fragment"

    @property
    def source(self) -> str:
        """The file of the project of which the block is a part, or empty."""
        return self.mark.removeprefix("source:").strip() if self.mark.startswith("source:") else ""

    @property
    def is_program(self) -> bool:
        """Whether it is Python that runs in a process."""
        return self.language == "python" and not self.reason and not self.source and not self.is_fragment


def blocks() -> Iterator[Block]:
    """Return the blocks of all pages, in order."""
    for page in PAGES:
        yield from blocks_of(page)


def blocks_of(page: Path) -> Iterator[Block]:
    """Return the blocks of one page, in order."""
    section, mark, language, fence, indent, begun, lines = "", "", "", "", 0, 0, list[str]()
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        stripped = line.strip()
        if fence:
            if stripped == fence:
                yield Block(page, section, language, begun, "\n".join(lines) + "\n", mark)
                fence = mark = ""
            else:
                lines.append(line[min(indent, len(line) - len(line.lstrip())) :])
        elif opened := re.match(r"( *)(`{3,})(\w*)", line):
            indent, fence, language, begun, lines = len(opened[1]), opened[2], opened[3], number, []
        elif found := _MARK.fullmatch(stripped):
            mark = found[1]
        elif stripped:
            mark = ""
            if line.startswith("#"):
                section = line.lstrip("# ")


def programs() -> list[Block]:
    """Return every whole program of the pages."""
    return [block for block in blocks() if block.is_program]


def outputs() -> dict[str, Block]:
    """Return the block of text that each program or command prints, by the place of the program."""
    found: dict[str, Block] = {}
    for page in PAGES:
        before: Block | None = None
        for block in blocks_of(page):
            if block.mark == "output" and before is not None:
                found[before.place] = block
            elif block.language in ("python", "sh"):
                before = block
    return found


def the_block(section: str, language: str) -> Block:
    """Return the one block in that language under that heading. Of Python it is the fragment."""
    under = [block for block in blocks() if (block.section, block.language) == (section, language)]
    (found,) = (block for block in under if (block.is_fragment if language == "python" else not block.is_program))
    return found
