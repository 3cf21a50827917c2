"""Text from elsewhere (names, logs, errors, file contents), made safe to show; and figures as text.

    printable       no control character reaches a terminal or a file: it is shown as `\\u001b`
    on_one_line     the same on a single line
    shortened       limited in length: the beginning, the length, and the end

Each is applied where text leaves the program, not where it comes in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

UNKNOWN = "-"
"""An unknown figure in a table."""
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


def sentence(text: str) -> str:
    """A note as a sentence: `executed FLOPs are …` → `Executed FLOPs are … .`; a name in front stays."""
    first = text.partition(" ")[0]
    begun = text[:1].upper() + text[1:] if first.isalpha() and first.islower() else text
    return begun if begun.endswith((".", "!", "?", ":")) else f"{begun}."


def counted(number: int, noun: str) -> str:
    """A number of things: `1 experiment`, `2 experiments`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def some_of(names: Sequence[str], most: int) -> str:
    """The first names and the number of the others: `a, b and 3 more`."""
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def ranges(numbers: Iterable[int]) -> list[str]:
    """Whole numbers in order, neighbours together: 0, 1, 2, 5 → `0-2`, `5`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]


def percent_text(fraction: float) -> str:
    """A share in percent: 0.4321 → `43.2 %`; below 1 % with two significant digits."""
    percent = 100 * fraction
    return f"{percent:.1f} %" if abs(percent) >= 1 or not percent else f"{percent:.2g} %"


def share(fraction: float | None) -> str:
    """`percent_text`, or `UNKNOWN`."""
    return UNKNOWN if fraction is None else percent_text(fraction)


def number(value: float | None) -> str:
    """12345.6 → `12,346`."""
    return UNKNOWN if value is None else f"{value:,.0f}"


def duration(seconds: float | None) -> str:
    """0.0364 → `36.40 ms`."""
    if seconds is None:
        return UNKNOWN
    return f"{seconds:.3f} s" if seconds >= 1 else f"{1e3 * seconds:.2f} ms"


def age(seconds: float) -> str:
    """7_500 → `2 h`: in the largest unit of which there are at least two."""
    for unit, unit_s in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def size(count_bytes: float | None) -> str:
    """Bytes in a readable binary unit."""
    if count_bytes is None:
        return UNKNOWN
    return f"{count_bytes / 2**30:.2f} GiB" if count_bytes >= 2**30 else f"{count_bytes / 2**20:.1f} MiB"


def flop_rate(flops_per_s: float) -> str:
    """9.894e14 → `989.4 TFLOP/s`."""
    unit, prefix = next(
        ((unit, prefix) for unit, prefix in ((1e15, "P"), (1e12, "T")) if flops_per_s >= unit), (1e9, "G")
    )
    return f"{flops_per_s / unit:,.4g} {prefix}FLOP/s"
