"""A whole trial: the unchanged command first, then remedies in turns with it, then all that gained, together.

    unchanged ─► evidence ─► Plan ─► rounds of processes ─► gains ─► together ─► Trial

What was measured counts, whatever ends the trial: a lack of time and Ctrl-C only end the measuring.
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Protocol

import msgspec

from .. import __version__
from ..provenance import redacted_arguments
from ..records import write_record
from ..remedies.facts import UNCHANGED, Evidence, TrialOrder
from ..remedies.table import BY_NAME, CHANGES, REMEDIES
from ..report.compare.compare import CONFIDENCE
from ..text import counted
from .choice import best_of_each, recommended_of, why_not_together
from .figures import (
    beside,
    gain_of,
    loss_distance,
    loss_warning,
    run_to_run,
    typical_step,
    unchanged_difference,
)
from .plan import Plan, make_plan, turns
from .process import run_process
from .record import FAILED, NOT_MEASURED, TOGETHER, TRIAL_FILE, Trial, TrialCase, TrialRun

_FIRST_LIMIT_S = 1800.0
_LIMIT_FACTOR, _LIMIT_EXTRA_S, _COMPILE_EXTRA_S = 10.0, 60.0, 300.0
"""The limit of a process: some times an unchanged one, and time for a compiler."""
USUAL_STEPS, USUAL_S = 40, 2.0
"""At least so many and so long: something else on the host can disturb half a second."""


@dataclass(frozen=True, kw_only=True)
class TrialSettings:
    """What was asked for."""

    command: Sequence[str]
    """As it is started."""
    folder: Path
    steps: int | None
    """Measured ones of each process; None: `USUAL_STEPS`, and more of short ones."""
    warm_up_steps: int
    rounds: int
    time_s: float | None = None
    """The limit of the whole trial."""
    timeout_s: float | None = None
    """The limit of each process; None: from the first one's time, which has half an hour."""
    only: Collection[str] = ()


class TrialListener(Protocol):
    """Is told how a trial goes."""

    def planned(self, plan: Plan, first: TrialRun, evidence: Evidence, seconds: float) -> None:
        """The unchanged command has run, and this will follow."""

    def waiting(self, number: int, count: int, name: str, seconds: float) -> None:
        """A process, of about so many, has run for so long."""

    def ended(self, run: TrialRun) -> None:
        """It has ended."""


class UnchangedFailed(Exception):
    """The unchanged command could not be measured."""

    def __init__(self, run: TrialRun) -> None:
        super().__init__(run.failure)
        self.run = run


class _OutOfTime(Exception):
    pass


def run_trial(settings: TrialSettings, listener: TrialListener) -> Trial:
    """Measure the remedies that apply to a command; raises UnchangedFailed."""
    return _Session(settings, listener).trial()


class _Session:
    def __init__(self, settings: TrialSettings, listener: TrialListener) -> None:
        self._settings, self._listener = settings, listener
        self._began_s, self._started_at = time.monotonic(), datetime.datetime.now(datetime.timezone.utc)
        self._runs: list[TrialRun] = []
        self._count, self._steps = 1, settings.steps or USUAL_STEPS
        self._ended = "done"

    def trial(self) -> Trial:
        first, evidence = self._first()
        process_s = first.seconds
        if self._settings.steps is None and evidence.step_time_s:
            more = max(0, math.ceil(USUAL_S / evidence.step_time_s) - self._steps)
            self._steps += more
            process_s += more * evidence.step_time_s
        time_left_s = None if self._settings.time_s is None else self._settings.time_s - self._elapsed_s
        plan = make_plan(
            evidence,
            only=self._settings.only,
            rounds=self._settings.rounds,
            process_s=process_s,
            time_left_s=time_left_s,
        )
        self._count += plan.process_count()
        self._listener.planned(plan, first, evidence, plan.seconds(process_s))
        together: dict[str, str] = {}
        try:
            self._measure(plan)
            gaining = best_of_each(self._cases(plan, evidence))
            together = {name: plan.options[name] for name in gaining}
            if len(together) > 1:
                self._measure_together(together, plan.rounds)
        except KeyboardInterrupt:
            self._ended = "interrupted"
        except _OutOfTime:
            self._ended = "out of time"
        result = self._result(plan, evidence, together)
        write_record(self._settings.folder / TRIAL_FILE, result)
        return result

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def _first(self) -> tuple[TrialRun, Evidence]:
        limits = (self._settings.timeout_s, self._settings.time_s)
        run, evidence = self._run({}, UNCHANGED, min(filter(None, limits), default=_FIRST_LIMIT_S))
        if run.failure is not None or evidence is None:
            raise UnchangedFailed(run)
        known = msgspec.structs.replace(
            evidence,
            step_time_s=fmean(run.step_times_s),
            data_wait_s=fmean(run.data_waits_s) if run.data_waits_s else None,
            padding=run.padding,
            ranks=run.world_size,
            peak_memory_bytes=run.peak_memory_bytes,
        )
        return run, known

    def _measure(self, plan: Plan) -> None:
        failed: set[str] = set()
        for turn in range(plan.rounds):
            for name in turns([name for name in plan.options if name not in failed], turn):
                remedies = {} if name == UNCHANGED else {name: plan.options[name]}
                if self._next(remedies, name).failure is not None and name != UNCHANGED:
                    failed.add(name)

    def _measure_together(self, remedies: dict[str, str], rounds: int) -> None:
        for _ in range(rounds):
            if self._next(remedies, TOGETHER).failure is not None:
                return
            self._next({}, UNCHANGED)

    def _next(self, remedies: dict[str, str], name: str) -> TrialRun:
        """The next process, if there is time for it."""
        first_s = self._runs[0].seconds
        limit_s = _LIMIT_FACTOR * first_s + _LIMIT_EXTRA_S
        if any(BY_NAME[remedy].one_of == "compile" for remedy in remedies):
            limit_s += _COMPILE_EXTRA_S
        limit_s = self._settings.timeout_s or limit_s
        if self._settings.time_s is not None:
            left_s = self._settings.time_s - self._elapsed_s
            if left_s < first_s:
                raise _OutOfTime
            limit_s = min(limit_s, left_s)
        run = self._run(remedies, name, limit_s)[0]
        ends_s = self._settings.time_s
        if run.failure is not None and ends_s is not None and self._elapsed_s >= ends_s:
            self._runs.remove(run)  # it had no time, which is no failure
            raise _OutOfTime
        return run

    def _run(self, remedies: dict[str, str], name: str, limit_s: float) -> tuple[TrialRun, Evidence | None]:
        settings, number, began_s = self._settings, len(self._runs) + 1, time.monotonic()
        order = TrialOrder(
            folder=str(settings.folder.absolute() / "processes" / f"{number:02}-{name}"),
            steps=self._steps,
            warm_up_steps=settings.warm_up_steps,
            remedies=remedies,
        )
        count = max(self._count, number)
        run, evidence = run_process(
            settings.command,
            order,
            number=number,
            name=name,
            limit_s=limit_s,
            waiting=lambda: self._listener.waiting(number, count, name, time.monotonic() - began_s),
        )
        self._runs.append(run)
        self._listener.ended(run)
        return run, evidence

    def _cases(self, plan: Plan, evidence: Evidence) -> list[TrialCase]:
        return [self._case(remedy.name, plan, evidence) for remedy in REMEDIES]

    def _case(self, name: str, plan: Plan, evidence: Evidence) -> TrialCase:
        remedy = BY_NAME[name]
        verdict, reason = plan.others.get(name, (NOT_MEASURED, "the trial ended before it"))
        lines = (
            []
            if remedy.from_outside and name in plan.others
            else [remedy.line_for(plan.options.get(name) or remedy.judge(evidence).option, evidence)]
        )
        at_most_s = evidence.data_wait_s if name == "loader_workers" and name in plan.options else None
        case = TrialCase(
            name=name,
            title=remedy.title,
            verdict=verdict,
            reason=reason,
            changes=remedy.changes,
            lines=lines,
            at_most_s=at_most_s,
        )
        return self._with_figures(case, plan.reasons.get(name, ""), evidence)

    def _with_figures(self, case: TrialCase, reason: str, evidence: Evidence) -> TrialCase:
        """The case with what its runs show."""
        runs = [run for run in self._runs if run.name == case.name]
        measured = [run for run in runs if run.failure is None]
        if failed := next((run for run in runs if run.failure is not None), None):
            return msgspec.structs.replace(case, verdict=FAILED, reason=failed.failure or "")
        if not measured:
            return case
        usual = max((run.non_finite_losses for run in self._unchanged), default=0)
        if (lost := max(run.non_finite_losses for run in measured)) > usual:
            steps = counted(lost, "step")
            reason = f"the loss is not finite in {steps}; in an unchanged run in {usual:,} at most"
            return msgspec.structs.replace(case, verdict=FAILED, reason=reason)
        neighbours = beside(self._comparable, measured)
        workers = _workers(evidence, [case.name, *case.remedies])
        beside_it, its_own, all_unchanged = (
            [typical_step(run.step_times_s, workers=workers) for run in runs]
            for runs in (neighbours, measured, self._unchanged)
        )
        apart = run_to_run(all_unchanged, on_cpu=evidence.device != "cuda")
        gain = gain_of(beside_it, its_own, run_to_run=apart)
        losses = loss_distance([run.losses for run in self._unchanged], [run.losses for run in measured])
        peaks = [run.peak_memory_bytes for run in measured if run.peak_memory_bytes is not None]
        return msgspec.structs.replace(
            case,
            verdict=gain.verdict,
            reason=reason,
            runs=len(measured),
            step_time_s=gain.step_time_s,
            gain_s=gain.value * gain.unchanged_s,
            gain_low_s=gain.low * gain.unchanged_s,
            gain_high_s=gain.high * gain.unchanged_s,
            gain=gain.value,
            gain_low=gain.low,
            gain_high=gain.high,
            peak_memory_bytes=max(peaks, default=None),
            losses=losses,
            warning=loss_warning(case.changes, losses, is_fp32=set(evidence.products or {}) == {"float32"}),
            losses_unknown=None if losses else "no loss was seen: backward did not start from one number",
        )

    @property
    def _comparable(self) -> list[TrialRun]:
        """All runs, without a first one of fewer steps once there is another unchanged one."""
        first, *others = self._runs
        is_shorter = self._steps > (self._settings.steps or USUAL_STEPS)
        has_other = any(run.name == UNCHANGED and run.failure is None for run in others)
        return others if is_shorter and has_other else [first, *others]

    @property
    def _unchanged(self) -> list[TrialRun]:
        return [run for run in self._comparable if run.name == UNCHANGED and run.failure is None]

    def _result(self, plan: Plan, evidence: Evidence, together: Mapping[str, str]) -> Trial:
        settings, unchanged = self._settings, self._unchanged
        cases = self._cases(plan, evidence)
        combined = self._together(together, evidence)
        recommended = recommended_of(cases, combined)
        by_name = {case.name: case for case in cases}
        peaks = [run.peak_memory_bytes for run in unchanged if run.peak_memory_bytes is not None]
        failed = [run for run in self._runs if run.name == UNCHANGED and run.failure is not None]
        notes = list(plan.notes)
        notes += [f"unchanged run {run.number} failed and is left out: {run.failure}" for run in failed]
        return Trial(
            command=redacted_arguments(settings.command),
            ended=self._ended,
            confidence=CONFIDENCE,
            rounds=plan.rounds,
            steps=self._steps,
            warm_up_steps=settings.warm_up_steps,
            seconds=self._elapsed_s,
            started_at=self._started_at.isoformat(timespec="seconds"),
            truemfu_version=__version__,
            evidence=evidence,
            step_time_s=fmean(
                typical_step(run.step_times_s, workers=_workers(evidence, [])).value for run in unchanged
            ),
            peak_memory_bytes=max(peaks, default=None),
            unchanged_runs=len(unchanged),
            unchanged_losses_difference=unchanged_difference([run.losses for run in unchanged]),
            cases=cases,
            together=combined,
            together_reason=None if combined else why_not_together(cases),
            recommended=recommended,
            lines=[line for name in recommended for line in by_name[name].lines],
            notes=notes,
            runs=self._runs,
        )

    def _together(self, remedies: Mapping[str, str], evidence: Evidence) -> TrialCase | None:
        if len(remedies) < 2:
            return None
        case = TrialCase(
            name=TOGETHER,
            title="all that gained, together",
            verdict=NOT_MEASURED,
            reason="the trial ended before it",
            changes=max((BY_NAME[name].changes for name in remedies), key=CHANGES.index),
            lines=[BY_NAME[name].line_for(option, evidence) for name, option in remedies.items()],
            remedies=list(remedies),
        )
        return self._with_figures(case, "each of them gained alone", evidence)


def _workers(evidence: Evidence, remedies: Sequence[str]) -> int:
    """The most that a loader has, by the script or by one of these remedies."""
    workers = [loader.workers for loader in evidence.loaders]
    if "loader_workers" in remedies:
        workers.append(int(BY_NAME["loader_workers"].judge(evidence).option))
    return max(workers, default=0)
