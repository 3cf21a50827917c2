"""Text from elsewhere (names, logs, errors, file contents), made safe to show; numbers of things, and shares.

    printable       no control character reaches a terminal or a file: it is shown as `\\u001b`
    on_one_line     the same on a single line
    shortened       limited in length: the beginning, the length, and the end

Each is applied where text leaves the program, not where it comes in.
"""

from __future__ import annotations

_KEPT = "\n\t"
_MAX_LINE = 300


def printable(text: str) -> str:
    """The text with every character that is not printable (control, bidirectional, zero-width, half of a
    surrogate pair) as `\\uXXXX`; line ends and tabs stay.

    JSON text stays JSON of the same data: such characters only occur in its strings, where this is an
    equivalent escape.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in _KEPT else _escaped(c) for c in text)


def on_one_line(text: str) -> str:
    """`printable`, with a space for each line end and tab."""
    lines = (line.strip() for line in text.replace("\t", " ").splitlines())
    return printable(" ".join(line for line in lines if line))


def shortened(text: str, most: int = _MAX_LINE) -> str:
    """The text, or its beginning and end with its length between, in at most `most` characters.

    The end stays because that is where an error states what to do.
    """
    if len(text) <= most:
        return text
    cut = f" … ({len(text):,} characters) … "
    room = max(most - len(cut), 0)
    end = room // 3
    return f"{text[: room - end]}{cut}{text[len(text) - end :]}"


def _escaped(character: str) -> str:
    """`\\uXXXX`, twice for a character beyond 16 bits, as in JSON."""
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))


def counted(number: int, noun: str) -> str:
    """A number of things: `1 experiment`, `2 experiments`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def percent_text(fraction: float) -> str:
    """A share in percent: 0.4321 → `43.2 %`; below 1 % with two significant digits."""
    percent = 100 * fraction
    return f"{percent:.1f} %" if abs(percent) >= 1 or not percent else f"{percent:.2g} %"
