"""Text from elsewhere is shown in full, does nothing, and is no longer than it may be."""

from __future__ import annotations

import json
import warnings

import pytest

from truemfu.errors import TruemfuError, TruemfuWarning, UsageError, message_of, one_line, warn_once
from truemfu.text import on_one_line, printable, ranges, shortened, some_of


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ü, 漢字, 🙂 × µs…", "plain, ü, 漢字, 🙂 × µs…"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ("\x1b[31m\x07\x7f\r\x00", r"\u001b[31m\u0007\u007f\u000d\u0000"),
        ("\x9b2J\x85", r"\u009b2J\u0085"),
        ("\u202eabc\u2066\u200b\ufeff\u2028", r"\u202eabc\u2066\u200b\ufeff\u2028"),
        ("\U000e0041", r"\udb40\udc41"),
        ("\udcff", r"\udcff"),
    ],
)
def test_only_what_is_not_printable_is_replaced(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(shown) == shown


def test_every_control_character_is_replaced() -> None:
    controls = [chr(code) for code in (*range(32), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"]
    assert all(printable(control) == f"\\u{ord(control):04x}" for control in controls)


def test_json_stays_json_of_the_same_data() -> None:
    data = {"\x7f\x9b": ["\u202e\U000e0041", "ü\\n\n\x1b", "\udcff"]}
    text = printable(json.dumps(data, indent=2, ensure_ascii=False))
    assert json.loads(text) == data
    assert "ü" in text


def test_one_line_is_one_line() -> None:
    assert on_one_line(" a\n\n b\r\nc\x0bd  e\tf \x1b") == r"a b c d  e f \u001b"


def test_a_long_text_keeps_its_ends_and_says_its_length() -> None:
    text = "begin" + "x" * 100_000 + "; do this"
    short = shortened(text, 200)
    assert len(short) == 200
    assert short.startswith("beginxxx")
    assert short.endswith("xxx; do this")
    assert " … (100,014 characters) … " in short
    assert shortened("x" * 200, 200) == "x" * 200


@pytest.mark.parametrize("text", ["x" * 400_000, "a\nb" * 10_000, "\x1b]52;c;aGk=\x07" * 1000])
def test_errors_and_warnings_are_one_printable_line_of_bounded_length(text: str) -> None:
    said = [str(UsageError(text)), str(TruemfuError(text)), str(TruemfuWarning(text)), message_of(text)]
    said += [one_line(UsageError(text)), one_line(ValueError(text))]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_once(text)
    said.append(str(caught[0].message))
    assert all(line.isprintable() and 0 < len(line) <= 600 for line in said)


def test_neighbours_are_a_range() -> None:
    assert ranges([5, 0, 1, 2, 7, 8]) == ["0-2", "5", "7-8"]
    assert ranges([]) == []


def test_names_beyond_the_first_are_counted() -> None:
    names = ["a", "b", "c"]
    assert [some_of(names, most) for most in (1, 2, 3)] == ["a and 2 more", "a, b and 1 more", "a, b, c"]
