"""A run's summary so far, only from its log: for a run that is still running or was killed.

The monitor's own summary is better if there is one: it knows the number of steps between two rows, and the
cost of the monitor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import compress
from math import isfinite
from operator import mul
from typing import Any

import msgspec

from ...records import GenerationServer, RunHardware, RunRecord, RunSummary, WaterfallPart, WaterfallRecord
from ...run_summary.sums import HFU, MEDIANS, STEP_TIME, RunSums
from ...run_summary.texts import RunResults
from ...waterfall import between_steps_notes, limiter_of, parts_of_metrics
from .load import LastWindow, LoadedRun
from .log_rows import PAUSES, PHASES, LogRows


def summary_of_log(
    rows: LogRows, last_window: LastWindow | None = None, servers: Sequence[GenerationServer] = ()
) -> RunSummary:
    """The summary of all rows; figures of hardware and servers are those of the last window."""
    sums = RunSums(sample=len(rows))
    of_warmup, observed = rows.column("is_warmup"), rows.column("is_observed")
    sums.steps, sums.warmup_steps, sums.observed_steps = len(rows), sum(of_warmup), sum(observed)
    is_timed = bytes(map(isfinite, rows.column(STEP_TIME)))
    steady = bytes(timed and not is_warmup for timed, is_warmup in zip(is_timed, of_warmup, strict=True))
    warmup = bytes(
        timed and is_warmup and not is_observed
        for timed, is_warmup, is_observed in zip(is_timed, of_warmup, observed, strict=True)
    )
    for of, is_warmup in ((steady, False), (warmup, True)):
        for name in MEDIANS:
            if name != HFU:
                sums.add_values(name, _known(rows, name, of), is_warmup=is_warmup)
        methods = rows.column("hfu_method")
        for method in dict.fromkeys(methods):
            of_method = bytes(map(mul, of, (found == method for found in methods)))
            sums.add_hfu(_known(rows, HFU, of_method), method, is_warmup=is_warmup)
    steady_s = sum(_known(rows, STEP_TIME, steady))
    sums.add_time(steady_s, is_warmup=False)
    sums.add_time(sum(_known(rows, STEP_TIME, is_timed)) - steady_s, is_warmup=True)
    sums.add_between(
        _known(rows, "data_wait_s", steady),
        _known(rows, "between_steps_s", steady),
        sum(compress(rows.column("forwards_between_steps"), steady)),
    )
    for kind, value in PAUSES.items():
        sums.add_pauses(kind, _known(rows, value, b"\1" * len(rows)))
    if rows.has(PHASES["forward"]):
        steps = sum(map(isfinite, compress(rows.column(PHASES["forward"]), steady)))
        seconds = {phase: _known(rows, value, steady) for phase, value in PHASES.items()}
        sums.add_phases({phase: sum(known) for phase, known in seconds.items() if known}, steps)
    for reason, steps in Counter(filter(None, compress(rows.column("phases_unknown"), steady))).items():
        sums.add_phases_unknown(reason, steps)
    _add_tokens(sums, rows)
    sums.methods.update(filter(None, rows.column("method")))
    for reason, steps in Counter(filter(None, rows.column("mfu_unknown"))).items():
        sums.add_unknown(reason, steps)
    found = msgspec.convert(sums.as_dict(), RunSummary)
    return msgspec.structs.replace(
        found,
        skipped_steps=None,
        hardware=None if last_window is None else _hardware(last_window, rows),
        generation_servers=list(servers),
        notes=between_steps_notes(found.between_steps_share, found.forwards_between_steps or 0),
    )


def _known(rows: LogRows, name: str, of: bytes) -> list[float]:
    """The known values of a column in the rows for which `of` is 1."""
    return list(filter(isfinite, compress(rows.column(name), of))) if rows.has(name) else []


def _add_tokens(sums: RunSums, rows: LogRows) -> None:
    """A row's tokens are its rate times its time; without its padding efficiency it is left out."""
    tokens = list(map(mul, rows.column("tokens_per_second"), rows.column(STEP_TIME)))
    useful = list(map(mul, tokens, rows.column("padding_efficiency")))
    is_known = bytes(map(isfinite, useful))
    sums.add_tokens(sum(compress(tokens, is_known)), sum(compress(useful, is_known)))


def results_of(run: LoadedRun) -> RunResults:
    """What is known of a run: its own summary, or that of its log."""
    record, rows = run.record or RunRecord(), run.rows
    return RunResults(
        record=record,
        summary=record.summary or summary_of_log(rows, run.last_window, run.servers),
        log_steps=(rows.steps[0], rows.steps[-1]) if rows else None,
        peak_flops_per_s=peak_flops_per_s(rows),
        peak_memory_bytes=max(_known(rows, "memory_peak_bytes", b"\1" * len(rows)), default=None),
    )


def peak_flops_per_s(rows: LogRows) -> float | None:
    """The peak of one device, by the last MFU: FLOP/s over MFU."""
    for row in reversed(rows):
        own_mfu = row.mfu if row.mfu_per_gpu is None else row.mfu_per_gpu
        if own_mfu and row.tflops_per_gpu:
            return 1e12 * row.tflops_per_gpu / own_mfu
    return None


def _hardware(window: LastWindow, rows: LogRows) -> RunHardware:
    """A row's metrics of a window in the summary's form; a row is not enough for advice."""
    metric = window.metrics.get
    rate_tflops, clock_mhz = metric("perf/executed_tflops_per_gpu"), metric("perf/sm_clock_mhz")
    same: dict[str, Any] = {name: metric(f"perf/{name}") for name in RunHardware.__struct_fields__}
    same = {name: value for name, value in same.items() if value is not None}
    hfu = same.get("executed_hfu")
    peak = 1e12 * rate_tflops / hfu if rate_tflops and hfu else peak_flops_per_s(rows)
    parts = parts_of_metrics(window.metrics)
    recorded = msgspec.convert(parts, list[WaterfallPart], from_attributes=True)
    return RunHardware(
        executed_flops_per_s=None if rate_tflops is None else 1e12 * rate_tflops,
        clock_hz=None if clock_mhz is None else 1e6 * clock_mhz,
        clock_source=window.clock_source,
        limiter=limiter_of(parts[:-1]),
        waterfall=WaterfallRecord(parts=recorded, peak_flops_per_s=peak) if recorded else None,
        **same,
    )
