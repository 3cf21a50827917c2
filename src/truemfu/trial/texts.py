"""A plan and a trial as text: sentences and a table."""

from __future__ import annotations

from ..remedies.facts import Evidence
from ..remedies.table import BY_NAME
from ..report.drawing.tables import Table, digits, table_of, words
from ..text import UNKNOWN, age, counted, duration, on_one_line, share, size
from .plan import Plan
from .record import (
    FAILED,
    GAINS,
    LOSES,
    NOT_APPLICABLE,
    NOT_FROM_OUTSIDE,
    NOT_MEASURED,
    UNCLEAR,
    Trial,
    TrialCase,
    TrialRun,
)

SIDE_EFFECTS = (
    "The command runs many times, as it is: its downloads and files are its own. Each process ends after its "
    "steps by os._exit: code after the training does not run.",
    "W&B, MLflow, Comet, Neptune, ClearML and SwanLab are offline in it. A script can read TRUEMFU_TRY "
    '("unchanged", or the name of the remedy) and TRUEMFU_TRY_FOLDER (an empty folder).',
)


def plan_lines(plan: Plan, first: TrialRun, evidence: Evidence, seconds: float) -> list[str]:
    """What follows the first unchanged run."""
    where = evidence.device_name or evidence.device or "unknown device"
    lines = [
        f"unchanged: on {where}, {size(evidence.peak_memory_bytes)} peak memory; the process took "
        f"{first.seconds:.0f} s"
    ]
    if plan.options:
        remedies = "1 remedy" if len(plan.options) == 1 else f"{len(plan.options)} remedies"
        lines.append(
            f"plan: {remedies} in {counted(plan.rounds, 'round')}, about {plan.process_count()} processes "
            f"and {age(seconds)}"
        )
        lines += [f"  {name}: {plan.reasons[name]}" for name in plan.options]
    else:
        lines.append("plan: no remedy applies")
    lines += plan.notes
    return lines


def tables_of(trial: Trial) -> list[Table]:
    """What was run, with the figures; empty if nothing was."""
    cases = shown_cases(trial)
    if not cases:
        return []
    runs = counted(trial.unchanged_runs, "run")
    fields = [
        words("remedy", lambda case: case.name),
        words("verdict", lambda case: case.verdict),
        digits("step", lambda case: duration(case.step_time_s)),
        digits("gain", _gain),
        digits("95 % interval", _interval),
        digits("peak memory", lambda case: size(case.peak_memory_bytes)),
        words("losses", losses_text),
    ]
    return [table_of(f"unchanged: {1e3 * trial.step_time_s:.2f} ms a step, {runs}", cases, fields)]


def _gain(case: TrialCase) -> str:
    if case.gain is None or case.gain_s is None:
        return UNKNOWN
    return f"{1e3 * case.gain_s:+.2f} ms ({100 * case.gain:+.1f} %)"


def _interval(case: TrialCase) -> str:
    if case.gain_low is None or case.gain_high is None:
        return UNKNOWN
    return f"{100 * case.gain_low:+.1f} to {100 * case.gain_high:+.1f} %"


def losses_text(case: TrialCase) -> str:
    """Whether the training is still the same."""
    losses = case.losses
    if losses is None:
        return UNKNOWN if case.gain is None else "unknown"
    if losses.are_identical:
        return "identical"
    apart = f"{share(losses.largest_difference)} apart"
    if losses.unchanged_difference is None:
        return apart
    return f"{apart} (unchanged: {share(losses.unchanged_difference)})"


def shown_cases(trial: Trial) -> list[TrialCase]:
    """Those that were run: the best gain first, failures last."""
    ran = [case for case in trial.cases if case.verdict in (GAINS, LOSES, UNCLEAR, FAILED)]
    ran.sort(key=lambda case: (case.gain is None, -(case.gain or 0)))
    return [*ran, *([trial.together] if trial.together else [])]


def other_lines(trial: Trial) -> list[str]:
    """The remedies without a measurement, with the reasons."""
    return [
        f"{case.name}: {verdict} ({case.reason})"
        for verdict in (FAILED, NOT_FROM_OUTSIDE, NOT_MEASURED, NOT_APPLICABLE)
        for case in trial.cases
        if case.verdict == verdict
    ]


def conclusion(trial: Trial) -> list[str]:
    """What to write, or that nothing gained."""
    lines = []
    if trial.ended != "done":
        lines.append(f"The trial was {trial.ended}: what was measured until then counts.")
    measured = [case for case in trial.cases if case.gain is not None]
    if not trial.recommended:
        lines.append(
            "No remedy was shown to gain."
            if measured
            else "Nothing was measured beside the unchanged command."
        )
        return lines
    case = _recommended_case(trial)
    assert case.gain is not None
    assert case.gain_s is not None
    names = " and ".join(trial.recommended)
    lines.append(
        f"Recommended: {names}: {1e3 * case.gain_s:.2f} ms of a step less ({100 * case.gain:.1f} %)."
    )
    lines += [f"  {line}" for line in trial.lines]
    changing = [name for name in trial.recommended if BY_NAME[name].changes == "precision"]
    if changing:
        lines.append(f"{', '.join(changing)} changes the precision: compare a longer training.")
    lines += [
        f"{one.name}: {one.warning}."
        for one in (*trial.cases, trial.together)
        if one is not None and one.warning and (one is case or one.name in trial.recommended)
    ]
    return lines


def _recommended_case(trial: Trial) -> TrialCase:
    if len(trial.recommended) > 1:
        assert trial.together is not None
        return trial.together
    return next(case for case in trial.cases if case.name == trial.recommended[0])


def failure_lines(run: TrialRun) -> list[str]:
    """Why the unchanged command could not be measured."""
    lines = [f"the unchanged command could not be measured: {on_one_line(run.failure or 'unknown')}"]
    return lines + [f"  {line}" for line in run.output_tail]
