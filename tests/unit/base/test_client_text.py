"""Text from outside in messages and logs: short, on one line, and not to be taken for anything else."""

from __future__ import annotations

import pytest

from twostroke.base.client_text import MOST_VALUE, log_value, on_one_line, shown, without_middle
from twostroke.base.errors import MOST_MESSAGE, NotFound


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("decode-0", "decode-0"),
        ("größe", "größe"),
        ("", '""'),
        ("a b", '"a b"'),
        ("id error=None", '"id error=None"'),
        ('say "yes"', r'"say \"yes\""'),
        ("C:\\", r'"C:\\"'),
        ("one\ntwo\r\x1b[2J", r'"one\ntwo\r\x1b[2J"'),
        ("\u202eevil", r'"\u202eevil"'),
        ("\u2028", r'"\u2028"'),
        ("\ud800", r'"\ud800"'),
        ("a\u00a0b", r'"a\xa0b"'),
    ],
)
def test_a_value_in_a_log_is_quoted_unless_it_cannot_be_misread(text: str, written: str) -> None:
    assert log_value(text) == written


def test_a_long_value_is_cut_in_the_middle_and_says_so() -> None:
    written = log_value("x" * 8_000_000)
    assert len(written) < MOST_VALUE + 60
    assert "7999000 characters left out" in written


def test_what_a_client_sent_is_cut_and_quoted_in_a_message() -> None:
    assert shown("gpt'4\n") == repr("gpt'4\n")
    assert shown("m" * 8_000_000) == f"'{'m' * 80}'... (8000000 characters)"


def test_a_line_stays_one() -> None:
    assert on_one_line("as it is, with = and spaces") == "as it is, with = and spaces"
    assert on_one_line("one\n12:00:00 INFO two") == "one\\n12:00:00 INFO two"


def test_no_error_has_a_message_of_megabytes_whoever_makes_it() -> None:
    error = NotFound("no such thing: " + "y" * 8_000_000 + " at all")
    assert len(error.message) < MOST_MESSAGE + 60
    assert error.message.startswith("no such thing: y")
    assert error.message.endswith("y at all")
    assert str(error) == error.message
    assert without_middle("short", 100) == "short"
