"""The prose tests itself: plain English in docstrings, comments, error sentences, README, CHANGELOG and docs.

An engineer opens a file for the first time, may have English as a second language, and reads one sentence only. So sentences are
short, hold one fact, and use none of the words below. Shares and counts are held at or below those of httpx and httpcore.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.no_cover  # it reads code, and runs no line of aionn

ROOT = Path(__file__).parent.parent
HOUSE = ROOT / "aionn"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

MOST_WORDS = 30
LONG_SHARE = 0.03
"""Share of the sentences that may be longer than MOST_WORDS."""

CHAINED_SHARE = 0.03
"""Share of the sentences that may hold two or more colons or semicolons (httpx 2.8 %, httpcore 3.2 %)."""

RIDDLES = re.compile(
    r"\b(?:[Tt]ells|[Tt]old|[Ww]hoever|[Nn]obody|for ever|let go of|lets go of|but for|of (?:its|their|his) own|(?:is|are|was|were) none"
    r"|(?<![Tt]here )(?:is|are) no (?!longer)\w+)\b"
)
"""Phrases that readers stumbled over. `tests/test_prose.py` is the place to read why: each has a plain twin in the style guide."""


@dataclass(frozen=True)
class Sentence:
    place: str
    text: str

    @property
    def words(self) -> int:
        return len(re.findall(r"[\w'`.-]*\w[\w'`.()-]*", self.text))

    @property
    def chained(self) -> bool:
        # A colon inside a path, a time, a URL or a slice is none of prose.
        return len(re.findall(r"[;:](?=\s|$)", self.text.rstrip(":"))) >= 2


_CODE = re.compile(r"``.*?``|`[^`]*`|\"[^\"]*\"", re.DOTALL)
_ITEM = re.compile(r"^[\w, `*]{1,60}:\s+(?=\S)")
_SKIP = re.compile(r"^\s*(?:>>>|\.\.\.|[-|=+─│┌└├]{3,}|\|)")


def sentences_of(place: str, text: str) -> Iterator[Sentence]:
    """The sentences of a paragraph-wise text. Code, tables, headings and doctests are left out."""
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*[-*] )|\n(?=\s*[\w, `*]+:(?:\s|$))", text):
        lines = [line.strip() for line in paragraph.splitlines()]
        if any(_SKIP.match(line) for line in lines) or any("  " in line for line in lines):
            continue  # a doctest, a table or a drawing
        # The name before an argument's or an error's description is layout, not part of the sentence.
        prose = _CODE.sub("CODE", _ITEM.sub("", " ".join(lines)))
        for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z\"'(])", prose):
            if len(sentence.split()) >= 3:
                yield Sentence(place, sentence.strip())


def _docstrings(path: Path, tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        bodies = [node.body] if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) else []
        for body in bodies:
            for statement in body:
                if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str):
                    yield f"{path.relative_to(ROOT)}:{statement.lineno}", statement.value.value


def _comments(path: Path, source: str) -> Iterator[tuple[str, str]]:
    """Comments of neighbouring lines are one text."""
    block: list[str] = []
    first = last = -2
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or re.match(r"#\s*(?:type:|noqa|ruff:|pragma|-+ |!)", token.string):
            continue
        line = token.start[0]
        if line != last + 1 and block:
            yield f"{path.relative_to(ROOT)}:{first}", "\n".join(block)
            block = []
        if not block:
            first = line
        block.append(token.string.lstrip("# "))
        last = line
    if block:
        yield f"{path.relative_to(ROOT)}:{first}", "\n".join(block)


def _errors(path: Path, tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and re.search(r"Error|Refusal|Rejected|warning|info|error", ast.unparse(node.func)):
            for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str) and " " in argument.value:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", argument.value
                elif isinstance(argument, ast.JoinedStr):
                    parts = [str(part.value) if isinstance(part, ast.Constant) else "CODE" for part in argument.values]
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", "".join(parts)


def _c_comments(path: Path) -> Iterator[tuple[str, str]]:
    source = path.read_text(encoding="utf-8")
    for match in re.finditer(r"/\*(.*?)\*/", source, re.DOTALL):
        text = "\n".join(line.strip(" *") for line in match[1].splitlines())
        yield f"{path.relative_to(ROOT)}:{source.count(chr(10), 0, match.start()) + 1}", text


def texts() -> Iterator[tuple[str, str]]:
    for path in sorted(HOUSE.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        yield from _docstrings(path, tree)
        yield from _comments(path, source)
        yield from _errors(path, tree)
    for path in sorted([*HOUSE.rglob("*.c"), *HOUSE.rglob("*.h")]):
        yield from _c_comments(path)
    for page in PAGES:
        if page.exists():
            fenced = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
            yield str(page.relative_to(ROOT)), re.sub(r"^(?:#+ .*|\|.*|<!--.*-->)$", "", fenced, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def sentences() -> list[Sentence]:
    return [sentence for place, text in texts() for sentence in sentences_of(place, text)]


def _listed(found: list[Sentence]) -> str:
    return "\n".join(f"{sentence.place}: {sentence.text}" for sentence in found[:40])


def test_few_sentences_are_chained(sentences: list[Sentence]) -> None:
    chained = [sentence for sentence in sentences if sentence.chained]
    assert len(chained) <= CHAINED_SHARE * len(sentences), _listed(chained)


def test_few_sentences_are_long(sentences: list[Sentence]) -> None:
    long = [sentence for sentence in sentences if sentence.words > MOST_WORDS]
    assert len(long) <= LONG_SHARE * len(sentences), _listed(long)


def test_no_sentence_is_a_riddle(sentences: list[Sentence]) -> None:
    riddles = [sentence for sentence in sentences if RIDDLES.search(sentence.text)]
    assert riddles == [], _listed(riddles)


def test_the_counter_counts() -> None:
    text = "It waits; then it runs: twice. This one is fine. What is no model is told once."
    found = list(sentences_of("here", text))
    assert [sentence.chained for sentence in found] == [True, False, False]
    assert [bool(RIDDLES.search(sentence.text)) for sentence in found] == [False, False, True]
