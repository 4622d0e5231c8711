"""Make texts of other processes safe for a terminal and a log: characters that steer a terminal become escapes such as "\\x1b".

A driver may be hostile or broken. What it writes must not move the cursor of the app's user, change a title or fake a line of the app.
"""

from __future__ import annotations

import codecs
import re


class _EscapeTable(dict[int, str]):
    """Maps each character that is not printable to its escape, for `str.translate`."""

    def __missing__(self, code: int) -> str:
        letter = chr(code)
        return letter if letter.isprintable() else ascii(letter)[1:-1]


_ALL = _EscapeTable({number: _EscapeTable()[number] for number in range(256)})
_LINES = _EscapeTable({**_ALL, ord("\n"): "\n", ord("\t"): "\t"})

_PLAIN = bytes([*b"\t\n", *range(32, 127)])
"""Bytes that stand for themselves."""

_COLOUR = re.compile(r"\x1b\[[0-9;]{0,32}m")
_BEGUN = re.compile(r"\x1b(?:\[[0-9;]{0,32})?\Z")
"""A sequence that changes the colour of what follows, and the beginning of one at the end of a text."""


def escaped(text: str, most: int | None = None, *, one_line: bool = False) -> str:
    """Return a text whose unprintable characters are replaced by escapes, as in Python's source.

    Args:
        most: the length after which the text is cut, in characters, escapes included. None for any length.
        one_line: replace ends of lines and tabs, too, as in a name or in a cell of a table. Otherwise they stay.
    """
    length = len(text)
    if most is not None:
        text = text[:most]  # first, because a translation takes time
    if not text.isprintable():
        text = text.translate(_ALL if one_line else _LINES)
    if most is not None and max(length, len(text)) > most:
        text = f"{text[:most]} [{length} characters in all]"
    return text


class EscapedStream:
    """Escapes a stream of bytes that comes in pieces, as `escaped` does. Bytes that are not UTF-8 become escapes. Colours are removed.

    Engines colour their warnings also where no terminal reads them. A character or a colour that is cut off at the end of a piece waits for
    the next piece.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._begun = ""

    def feed(self, data: bytes, *, last: bool = False) -> bytes:
        """Return the part of the stream that can be written now, as UTF-8. With `last`, nothing follows, so nothing waits."""
        if not self._begun and not data.translate(None, _PLAIN) and not self._decoder.getstate()[0]:
            return data
        text = _COLOUR.sub("", self._begun + self._decoder.decode(data, last))
        begun = None if last else _BEGUN.search(text)
        self._begun = "" if begun is None else begun[0]
        return text[: len(text) - len(self._begun)].translate(_LINES).encode()
