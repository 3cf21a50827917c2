"""`truemfu status`: a run while it runs and after it, from its files; or all runs here."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ..errors import TruemfuError, UsageError
from ..records import RunRecord, RunSummary
from ..report.run.job_view import job_json, job_lines
from ..report.run.load import LoadedRun, holds_run, load_run
from ..report.run.log_summary import results_of, summary_of_log
from ..run_summary.phases import LIMIT_LABEL, limit_of_steps
from ..run_summary.texts import SERVER_LABEL, estimate_mark, figures, methods_text, mfu_text
from ..text import age, flop_rate, on_one_line
from .console import FilePath, json_option, output, print_json, say, table, table_width

_SHORTEST_STATE = 30
"""To so much a long state, such as an error, is cut on a terminal."""
_SHOWN = (
    "step, median",
    "MFU, median",
    "model FLOP/s, median",
    "HFU, median",
    "tokens/s",
    "samples/s",
    "forward and backward",
)


@click.command(short_help="Show a run, running or ended; without a folder, list the runs here.")
@click.argument("folder", metavar="[DIR]", required=False, type=FilePath())
@json_option
def status(folder: Path | None, as_json: bool) -> None:
    """The run in DIR so far: steps, step time, MFU, tokens/s, loss, and whether and how it ended.

    DIR is the output_dir of a TrainingMonitor or the folder of `truemfu run`. Steps are on disk ten seconds
    after they end. Without DIR: a line for each run in the current folder and two levels below; likewise if
    DIR is no run itself.

    \b
    Examples
        truemfu status
        truemfu status truemfu-runs
        truemfu status truemfu-runs/20261117-0930-train
        watch truemfu status runs/a
        truemfu status runs/a --json
    """

    if folder is None or (folder.is_dir() and not holds_run(folder)):
        _list_runs(folder or Path(), as_json)
        return

    run = load_run(folder)
    summary = summary_of_log(run.rows, servers=run.servers)
    found = _state_of(run, summary)
    if as_json:
        print_json(found)
        return
    say(f"{folder}: {found['state']}")
    last = run.rows[-1] if run.rows else None
    lines = [
        ("step", f"{found['last_step']:,}" if last is not None else "none yet"),
        ("loss", "unknown" if last is None or last.loss is None else f"{last.loss:.6g}"),
        *(
            (one.label, one.text)
            for one in figures(replace(results_of(run), summary=summary))
            if one.label in _SHOWN or one.label.startswith(SERVER_LABEL)
        ),
        *([(LIMIT_LABEL, found["limit"])] if found["limit"] is not None else []),
        ("FLOPs by", methods_text(summary) or "nothing yet"),
        *(job_lines(run.job) if run.job is not None else ()),
    ]
    for label, text in lines:
        say(f"  {label:22}{text}")
    for note in run.notes:
        say(f"note: {note}")


def _list_runs(top: Path, as_json: bool) -> None:
    """A line for each run in a folder; one that cannot be read is named on stderr."""

    folders = [top, *sorted(top.glob("*/")), *sorted(top.glob("*/*/"))]
    states = []
    for folder in filter(holds_run, folders):
        try:
            run = load_run(folder)
            summary = summary_of_log(run.rows)
            states.append((_state_of(run, summary), summary))
        except TruemfuError as error:
            say(f"note: {error}", err=True)
    if not states:
        raise UsageError(
            f"no run in {'this folder' if top == Path() else top} or two levels below: give a run's folder "
            "(truemfu status DIR), or start a run (truemfu run train.py)"
        )
    states.sort(key=lambda found: found[0]["started_at"] or "")
    if as_json:
        print_json([state for state, _ in states])
        return
    runs = table("run", "started", "steps", "MFU or FLOP/s", "state", texts=["state"])
    runs.columns[-1].min_width = _SHORTEST_STATE
    for state, summary in states:
        rate = summary.median_tflops_per_gpu
        runs.add_row(
            state["folder"],
            (state["started_at"] or "unknown")[:16].replace("T", " "),
            f"{state['steps']:,}",
            mfu_text(summary)
            if rate is None or summary.median_mfu is not None
            else flop_rate(1e12 * rate) + estimate_mark(summary),
            on_one_line(state["state"]),
        )
    output(table_width(runs)).print(runs)


def _state_of(run: LoadedRun, summary: RunSummary) -> dict[str, Any]:
    """What a script reads; `summary` is that of the log."""
    from msgspec import to_builtins

    last = run.rows[-1] if run.rows else None
    own = None if run.record is None else run.record.summary
    age_s = None if own is not None or last is None else max(0.0, time.time() - run.files[1].stat().st_mtime)
    ended_by = None if own is None else own.ended_by
    last_step = None if last is None else last.global_step
    return {
        "folder": str(run.folder),
        "state": _state_text(own is not None, ended_by, last_step, age_s),
        "has_ended": own is not None,
        "ended_by": ended_by,
        "started_at": None if run.record is None else run.record.started_at,
        "last_write_s_ago": age_s,
        "steps": len(run.rows),
        "last_step": last_step,
        "loss": None if last is None else last.loss,
        "median_step_time_s": summary.median_step_time_s,
        "median_mfu": summary.median_mfu,
        "median_hfu": summary.median_hfu,
        "phases_s": summary.phases_s,
        "phases_unknown": summary.phases_unknown,
        "limit": limit_of_steps(run.record or RunRecord(), summary),
        "median_tokens_per_second": summary.median_tokens_per_second,
        "generation_servers": to_builtins(summary.generation_servers),
        "method": summary.method,
        "methods": summary.methods,
        **job_json(run.job),
    }


def _state_text(has_ended: bool, ended_by: str | None, last_step: int | None, age_s: float | None) -> str:

    if ended_by is not None:
        where = "before its first step" if last_step is None else f"after step {last_step:,}"
        return f"ended by {ended_by}, {where}"
    if has_ended:
        return "ended"
    return "running, or killed" + ("" if age_s is None else f": last write {age(age_s)} ago")
