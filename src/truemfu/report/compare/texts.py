"""A comparison as text: one sentence each for result and doubt, and tables for terminal, Markdown and HTML.

Comparison ─► conclusion, tables_of, remarks ─► terminal (cli/compare.py), markdown, compare_page.py
           └► json_text: raw values in base units, for other programs
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from ...run_summary.phases import PHASE_NAMES
from ...text import counted, duration, number, share, shortened, size, some_of
from ..drawing.documents import json_text, markdown_document
from ..drawing.tables import Table, digits, measures, table_of, words
from ..run.log_rows import PHASES
from .compare import FASTER, SLOWER, UNCLEAR, ComparedFigure, Comparison, Pair, Unmatched

_FORMATS = {
    "step_time_median_s": ("step time, median", duration),
    "step_time_mean_s": ("step time, mean", duration),
    "tokens_per_s": ("tokens/s, median", number),
    "samples_per_s": ("samples/s, median", number),
    "mfu": ("MFU, median", share),
    "peak_memory_bytes": ("peak memory", size),
    **{figure: (f"{PHASE_NAMES[phase]}, mean of a step", duration) for phase, figure in PHASES.items()},
}
_PHASES = {figure: phase for phase, figure in PHASES.items()}
LONGEST_NAME = 200
_LONGEST_STATUS = 300
TITLE = "Comparison"


def conclusions(comparison: Comparison) -> list[str]:
    """What was found, and whether it is within the limit, in sentences."""
    sentences = [_of_run(comparison) if comparison.kind == "run" else _of_sweep(comparison)]
    if failed := [one.name for one in comparison.unmatched if one.is_failure]:
        sentences.append(f"Succeeded in A and failed in B: {_names(failed)}.")
    if comparison.max_regression is not None:
        limit = _percent(comparison.max_regression)
        is_slower = any(pair.is_beyond_limit for pair in comparison.pairs)
        if is_slower:
            sentences.append(f"This is beyond the limit of {limit}.")
        elif unsure := comparison.unsure:
            where = "" if comparison.kind == "run" else f" in {_names([pair.name for pair in unsure])}"
            sentences.append(f"Cannot tell whether B is slower by more than the limit of {limit}{where}.")
        elif comparison.is_within_limit:
            sentences.append(f"No slow-down beyond the limit of {limit}.")
        else:
            sentences.append(f"No step time is beyond the limit of {limit}, but experiments failed in B.")
    return sentences


def conclusion(comparison: Comparison) -> str:
    """The same as one text."""
    return " ".join(conclusions(comparison))


def _of_run(comparison: Comparison) -> str:
    (pair,) = comparison.pairs
    step = pair.step_time
    change = f"step time {_change(step.ratio)} (95 %: {_change(step.low)} to {_change(step.high)})"
    phase = _of_phases(pair)
    if pair.verdict != UNCLEAR:
        return f"B is {pair.verdict}: {change}.{phase}"
    return (
        f"No difference shown: {change}. The smallest slow-down that this data could show is "
        f"{_percent(pair.smallest_shown)}.{phase}"
    )


def _of_phases(pair: Pair) -> str:
    """The phases with the largest change that is shown, in each direction; empty without any."""
    shown = [
        figure
        for figure in pair.figures
        if figure.name in _PHASES and figure.low is not None and figure.high is not None
    ]
    slower = [figure for figure in shown if (figure.low or 0.0) > 1]
    faster = [figure for figure in shown if (figure.high or 0.0) < 1]
    texts = [
        f" The phase that got {verdict} most: {PHASE_NAMES[_PHASES[figure.name]]}, "
        f"{duration(figure.a)} to {duration(figure.b)} a step ({_change(figure.ratio)})."
        for verdict, figures in ((SLOWER, slower), (FASTER, faster))
        for figure in sorted(figures, key=lambda figure: -abs(figure.b - figure.a))[:1]
    ]
    return "".join(texts)


def _change(ratio: float | None) -> str:
    return "unknown" if ratio is None else f"{100 * (ratio - 1):+.1f} %"


def _of_sweep(comparison: Comparison) -> str:
    counts = {
        verdict: [pair.name for pair in comparison.pairs if pair.verdict == verdict]
        for verdict in (SLOWER, FASTER, UNCLEAR)
    }
    text = (
        f"Experiments: {len(comparison.pairs)}; slower in B: {len(counts[SLOWER])}, "
        f"faster: {len(counts[FASTER])}, no difference shown: {len(counts[UNCLEAR])}."
    )
    if beyond := [pair.name for pair in comparison.pairs if pair.is_beyond_limit]:
        text += f" Slower by more than the limit: {_names(beyond)}."
    return text


_NAMES_SHOWN = 5


def _names(names: Sequence[str]) -> str:
    return some_of([shortened(name, LONGEST_NAME) for name in names], _NAMES_SHOWN)


def tables_of(comparison: Comparison) -> list[Table]:
    """The tables to show, in reading order."""
    if comparison.kind == "run":
        (pair,) = comparison.pairs
        return [
            table_of(
                "B over A",
                pair.figures,
                [
                    words("figure", figure_name),
                    digits("A", lambda figure: _text(figure, figure.a) + figure.mark_a),
                    digits("B", lambda figure: _text(figure, figure.b) + figure.mark_b),
                    digits("B / A", lambda figure: f"{figure.ratio:.3f}"),
                    words("95 % interval", _interval),
                ],
                sentence=_steps(pair),
            )
        ]
    tables = [
        table_of(
            "Step time, B over A",
            comparison.pairs,
            [
                words("experiment", _name),
                measures("A", duration, lambda pair: pair.step_time.a, unit="s"),
                measures("B", duration, lambda pair: pair.step_time.b, unit="s"),
                digits("B / A", lambda pair: f"{pair.step_time.ratio:.3f}"),
                words("interval", lambda pair: _interval(pair.step_time)),
                words("smallest shown", lambda pair: _percent(pair.smallest_shown)),
                words("result", _result),
            ],
            sentence=(
                "Medians. The intervals hold for all experiments together with a confidence of 95 %."
                if len(comparison.pairs) > 1
                else "Medians."
            ),
        ),
        table_of(
            "Other figures, B over A",
            comparison.pairs,
            [
                words("experiment", _name),
                digits("mean step", lambda pair: _ratio(pair, "step_time_mean_s")),
                digits("tokens/s", lambda pair: _ratio(pair, "tokens_per_s")),
                digits("MFU", lambda pair: _ratio(pair, "mfu")),
                digits("peak memory", lambda pair: _ratio(pair, "peak_memory_bytes")),
                words("steps A, B", lambda pair: f"{pair.steps_a:,}, {pair.steps_b:,}"),
            ],
        ),
    ]
    if comparison.unmatched:
        tables.append(
            table_of(
                "Not compared",
                comparison.unmatched,
                [
                    words("experiment", _name),
                    words("A", lambda one: shortened(one.a, _LONGEST_STATUS)),
                    words("B", lambda one: shortened(one.b, _LONGEST_STATUS)),
                ],
            )
        )
    return tables


def _name(compared: Pair | Unmatched) -> str:
    return shortened(compared.name, LONGEST_NAME)


def figure_name(figure: ComparedFigure) -> str:
    return _FORMATS[figure.name][0]


def _result(pair: Pair) -> str:
    if pair.is_beyond_limit:
        return "beyond limit"
    return "-" if pair.verdict == UNCLEAR else pair.verdict


def _text(figure: ComparedFigure, value: float) -> str:
    return _FORMATS[figure.name][1](value)


def _interval(figure: ComparedFigure) -> str:
    has_none = figure.low is None or figure.high is None
    return "-" if has_none else f"{figure.low:.3f} to {figure.high:.3f}"


def _ratio(pair: Pair, name: str) -> str:
    return next((f"{figure.ratio:.3f}" for figure in pair.figures if figure.name == name), "-")


def _steps(pair: Pair) -> str:
    sides = (
        ("A", pair.runs_a, pair.steps_a, pair.independent_steps_a),
        ("B", pair.runs_b, pair.steps_b, pair.independent_steps_b),
    )
    return " ".join(
        f"{side}: {counted(runs, 'run')}, {steps:,} steps after warm-up, "
        f"as informative as {counted(round(independent), 'independent step')}."
        for side, runs, steps, independent in sides
    )


def remarks(comparison: Comparison) -> list[str]:
    """What the reader needs to know to trust the result, and notes about the files."""
    found = []
    if comparison.run_to_run is not None:
        repeat = " To measure it, give several runs in each folder." if comparison.kind == "run" else ""
        found.append(
            "One run on each side does not show how much equal runs differ. The intervals include an assumed "
            f"standard deviation of {_percent(comparison.run_to_run)} between runs (--run-to-run).{repeat}"
        )
    if (limit := comparison.max_regression) is not None:
        reaching = [
            pair
            for pair in comparison.pairs
            if not pair.is_beyond_limit and (pair.step_time.high or 0.0) > 1 + limit
        ]
        if reaching:
            what = "This comparison" if comparison.kind == "run" else _names([pair.name for pair in reaching])
            found.append(
                f"{what} cannot exclude a slow-down of more than {_percent(limit)}: the interval is wide. "
                "Longer or repeated runs narrow it; --fail-if-unsure makes this an error."
            )
    if stalled := [pair for pair in comparison.pairs if pair.verdict != SLOWER and _has_slower_mean(pair)]:
        where = "B" if comparison.kind == "run" else f"B in {_names([pair.name for pair in stalled])}"
        found.append(f"The mean step is slower in {where}, the median is not: some steps take much longer.")
    return found + [shortened(note, _LONGEST_STATUS) for note in comparison.notes]


def _has_slower_mean(pair: Pair) -> bool:
    return any(figure.name == "step_time_mean_s" and (figure.low or 0.0) > 1 for figure in pair.figures)


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.3g} %"


def markdown(comparison: Comparison) -> str:
    lines = [conclusion(comparison), *sides_of(comparison)]
    return markdown_document(TITLE, lines, tables_of(comparison), remarks(comparison))


WRITERS: Mapping[str, Callable[[Comparison], str]] = MappingProxyType(
    {"json": json_text, "markdown": markdown}
)


def sides_of(comparison: Comparison) -> list[str]:
    """Where the two sides are."""
    return [f"A: {comparison.a}", f"B: {comparison.b}"]
