"""Texts of other processes on their way to a terminal: nothing that steers it passes, and nothing else is changed."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aionn.escapes import EscapedStream, escaped


def fed(pieces: Iterable[bytes]) -> bytes:
    stream = EscapedStream()
    return b"".join([*map(stream.feed, pieces), stream.feed(b"", last=True)])


def steers(text: str) -> bool:
    """Return whether a text has a control character, a format character, or a code point without a character."""
    return any(unicodedata.category(letter).startswith("C") for letter in text if letter not in "\t\n")


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("a line\n\tanother one\n", "a line\n\tanother one\n"),
        ("\x1b]0;title\x07\r\b\x00\x7f", r"\x1b]0;title\x07\r\x08\x00\x7f"),
        ("\x9b2J\x85", r"\x9b2J\x85"),  # the controls of eight bits
        ("\u202etxt.exe\u2028", r"\u202etxt.exe\u2028"),
        ("größer 模型 😀", "größer 模型 😀"),
        ("\ud800", r"\ud800"),
        ("\U000e0001", r"\U000e0001"),
    ],
)
def test_what_steers_a_terminal_becomes_an_escape(given: str, shown: str) -> None:
    assert escaped(given) == shown


def test_a_text_is_cut_with_its_escapes() -> None:
    assert escaped("a" * 9, 10) == "a" * 9
    assert escaped("a" * 11, 10) == "a" * 10 + " [11 characters in all]"
    assert escaped("\x1b" * 9, 10) == r"\x1b\x1b\x" + " [9 characters in all]"


def test_a_name_stays_on_one_line() -> None:
    assert escaped("a\r\n\tb\u2028\x1b\\", one_line=True) == r"a\r\n\tb\u2028\x1b" + "\\"
    assert escaped("a\nb" * 5, 3, one_line=True) == r"a\n" + " [15 characters in all]"


@given(st.text())
def test_any_name_stays_on_one_line(text: str) -> None:
    assert escaped(text, one_line=True).isprintable()


@given(st.text(), st.integers(1, 20))
def test_no_text_steers(text: str, most: int) -> None:
    assert not steers(escaped(text))
    assert not steers(escaped(text, most))
    assert escaped(escaped(text)) == escaped(text)


COLOURED = "\x1b[0;93mwärning\x1b[m\n"


def test_colours_are_left_out_wherever_the_stream_is_cut() -> None:
    whole = COLOURED.encode()
    for first in range(len(whole) + 1):
        for second in range(first, len(whole) + 1):
            assert fed([whole[:first], whole[first:second], whole[second:]]) == "wärning\n".encode()


@pytest.mark.parametrize("begun", ["\x1b", "\x1b[", "\x1b[1;3"])
def test_the_beginning_of_a_colour_at_the_end_is_shown(begun: str) -> None:
    assert fed([b"x", begun.encode()]) == b"x" + ascii(begun)[1:-1].encode()


def test_a_colour_that_never_ends_does_not_hold_the_stream_back() -> None:
    stream = EscapedStream()
    assert stream.feed(b"\x1b[" + b"1;" * 1000).startswith(b"\\x1b[1;1;")


def test_bytes_that_are_not_utf_8_are_shown() -> None:
    assert fed([b"\xff\xfe", b"\xc3", b"\xa4", b"\xe2\x82", b"x"]) == "\\xff\\xfeä\\xe2\\x82x".encode()


@given(st.lists(st.one_of(st.binary(max_size=8), st.sampled_from([b"\x1b", b"\x1b[", b"1;", b"m", "ä".encode()[:1], b"\n", b"plain"]))))
def test_the_cuts_of_a_stream_change_nothing_and_nothing_steers(pieces: list[bytes]) -> None:
    shown = fed(pieces)
    assert shown == fed([b"".join(pieces)])
    assert not steers(shown.decode())


@given(st.lists(st.text(st.characters(min_codepoint=32, max_codepoint=126)).map(str.encode)))
def test_plain_lines_pass_at_once(pieces: list[bytes]) -> None:
    stream = EscapedStream()
    assert [stream.feed(piece) for piece in pieces] == pieces
