"""`truemfu status`: a run while it runs, from its files."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import click

from .console import FilePath, debug_option, json_option, print_json, say

_SHOWN = ("step, median", "MFU, median", "HFU, median", "tokens/s")


@click.command(short_help="A run in progress: its last steps, MFU and age.")
@click.argument("folder", metavar="DIR", type=FilePath())
@json_option
@debug_option
def status(folder: Path, as_json: bool) -> None:
    """The run in DIR so far: steps, step time, MFU, tokens/s, loss, and how old the last step is.

    DIR is the output_dir of a TrainingMonitor or the folder of `truemfu run`. Steps are on disk ten seconds
    after they end.

    \b
    Examples
        truemfu status truemfu-runs/20261117-0930-train
        watch truemfu status runs/a
        truemfu status runs/a --json
    """
    from ..report.run.load import load_run
    from ..report.run.log_summary import results_of, summary_of_log
    from ..run_summary.texts import figures

    run = load_run(folder)
    record, rows = run.record, run.rows
    summary = summary_of_log(rows)
    has_ended = record is not None and record.summary is not None
    age_s = None if has_ended or not rows else max(0.0, time.time() - run.files[1].stat().st_mtime)
    last = rows[-1] if rows else None
    found = {
        "folder": str(folder),
        "has_ended": has_ended,
        "last_write_s_ago": age_s,
        "steps": len(rows),
        "last_step": None if last is None else last.global_step,
        "loss": None if last is None else last.loss,
        "median_step_time_s": summary.median_step_time_s,
        "median_mfu": summary.median_mfu,
        "median_hfu": summary.median_hfu,
        "median_tokens_per_second": summary.median_tokens_per_second,
        "method": summary.method,
    }
    if as_json:
        print_json(found)
        return
    state = (
        "ended" if has_ended else "running, or killed" if age_s is None else f"last write {age_s:.0f} s ago"
    )
    say(f"{folder}: {state}")
    so_far = replace(results_of(run), summary=summary)
    lines = [
        ("step", f"{found['last_step']:,}" if last is not None else "none yet"),
        ("loss", "unknown" if last is None or last.loss is None else f"{last.loss:.6g}"),
        *((one.label, one.text) for one in figures(so_far) if one.label in _SHOWN),
        ("FLOPs by", summary.method or "nothing yet"),
    ]
    for label, text in lines:
        say(f"  {label:14}{text}")
