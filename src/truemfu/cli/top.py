"""`truemfu top`: every GPU of the machine, live, without changes to the run.

    poll in a thread ─► readings ─┬─► top_screen.py: the table
    then sleep, and again         └─► top_export.py: Prometheus

The driver is queried in a separate thread: a call that hangs in it cannot be interrupted; the screen then
reports that, and Ctrl-C still ends the program.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from queue import Empty, SimpleQueue

import click
import msgspec
from rich.console import Console
from rich.live import Live
from rich.text import Text

from ..errors import CounterError, NvmlMissing, UsageError
from ..hardware.counters.nvml import NvmlSource
from ..hardware.counters.sampler import Sampler
from ..hardware.counters.samples import CounterSource
from ..hardware.counters.trace import Recorder, Replay
from ..hardware.counters.windows import GPM_LAG_S, combine
from ..trackers.prometheus_server import parse_address
from .console import FilePath, SafeConsole, json_option, output, print_json, say
from .top_screen import Reading, reading_of, screen

# The counters are updated every 0.1 s: at shorter intervals the figures would depend on the time of reading.
# A trace may be replayed at any speed.
_LEAST_S, _LEAST_REPLAYED_S, _MOST_S = 0.25, 0.01, 3600.0
_WHOLE_TRACE = 10**7


@click.command(short_help="Show live what the tensor cores of every GPU execute.")
@click.option("--once", is_flag=True, help="Show one interval (or a whole replayed trace), then exit.")
@click.option(
    "--interval",
    "interval_s",
    type=float,
    default=1.0,
    show_default=True,
    help=f"Seconds between updates; at least {_LEAST_S:g}, since the counters are updated every "
    f"{GPM_LAG_S:g} s.",
)
@click.option("--record", "record_to", type=FilePath(), metavar="FILE", help="Record all samples to a trace.")
@click.option(
    "--replay",
    "replay_from",
    type=FilePath(),
    metavar="FILE",
    help="Show a recorded trace instead of this machine.",
)
@click.option(
    "--export",
    "export_to",
    metavar="[HOST:]PORT",
    help="Also serve the metrics to Prometheus (port 0: any free port). Without HOST only this "
    "machine can connect; 0.0.0.0:9400 serves every machine that can reach the port.",
)
@json_option
def top(
    once: bool,
    interval_s: float,
    record_to: Path | None,
    replay_from: Path | None,
    export_to: str | None,
    as_json: bool,
) -> None:
    """Every GPU of this machine, live, without code in the run.

    FLOP util is what the tensor cores executed as a share of the dense 16-bit peak; TFLOP/s is at the
    16-bit rate (fp8 does twice, tf32 half of it in the same time). Both are upper bounds: some kernels
    without a matrix product use the tensor pipe too, and the clock is the one that the driver requested: the
    actual clock is 4 to 11 % lower in steady tensor work (H200). Only code that runs on the GPU, such as the
    monitor in a training run, can read the actual clock. "GPU util" is the driver's figure: 100 % as soon as
    any kernel runs. Activity needs a Hopper or later; for older GPUs the other columns are shown.

    Without a terminal, a table is printed at each interval; with --json a line, with --json --once one
    document. Energy is read only for --json and --record, because it takes most of the time of a
    reading. Exit codes: 0 done, 1 the driver cannot be read, 2 wrong usage.

    \b
    Examples
        truemfu top
        truemfu top --once --json
        truemfu top --export 9400
        truemfu top --replay recorded.jsonl
    """
    least_s = _LEAST_S if replay_from is None else _LEAST_REPLAYED_S
    if not least_s <= interval_s <= _MOST_S:
        raise UsageError(
            f"--interval must be from {least_s:g} to {_MOST_S:g} seconds, got {interval_s:g}; "
            f"the counters are updated every {GPM_LAG_S:g} s"
        )
    export = None if export_to is None else parse_address(export_to, "--export")
    if once and export is not None:
        raise UsageError(
            "--once ends after one interval, so nothing could be served: leave out --once or --export"
        )
    both = [path for path in (replay_from, record_to) if path is not None and path.exists()]
    if len(both) > 1 and both[0].samefile(both[1]):
        raise UsageError(
            f"--record would overwrite {replay_from}, which is being replayed: give --record another file"
        )
    with ExitStack() as open_ones:
        source = _open(replay_from, energy=as_json or record_to is not None)
        open_ones.callback(lambda: source.close())
        samplers: list[Sampler] = []
        if export is not None:
            # Before a file is opened for writing: an unavailable port must not overwrite an old trace.
            from .top_export import serving

            host, port = export
            found = serving(lambda: [one for each in samplers for one in readings(each)], port, host)
            address = open_ones.enter_context(found)
            say(f"serving {address}", err=True)
        if record_to is not None:
            source = _recorder(source, record_to, interval_s)
        samplers.append(Sampler(source, period_s=interval_s, keep=_WHOLE_TRACE if once else 1))
        if once:
            _once(samplers[0], interval_s, replayed=replay_from is not None, as_json=as_json)
        else:
            silent = export is not None and not sys.stdout.isatty() and not as_json
            _watch(samplers[0], interval_s, as_json=as_json, silent=silent)


def _recorder(source: CounterSource, path: Path, interval_s: float) -> Recorder:
    """A recorder; a copy of a trace keeps the note on its origin."""
    live = f"recorded {date.today()} by truemfu top, every {interval_s:g} s"
    try:
        return Recorder(source, path, note=source.note if isinstance(source, Replay) else live)
    except CounterError as problem:
        raise UsageError(str(problem)) from None


def readings(sampler: Sampler, *, whole: bool = False) -> list[Reading]:
    """Every GPU over the last interval, or over all stored intervals."""
    return [
        reading_of(
            gpu,
            combine(sampler.intervals(gpu.index)) if whole else sampler.latest(gpu.index),
            sampler.health(gpu.index),
        )
        for gpu in sampler.gpus()
    ]


def _open(replay_from: Path | None, *, energy: bool) -> CounterSource:
    if replay_from is not None:
        return Replay(replay_from)
    try:
        return NvmlSource(energy=energy)
    except NvmlMissing:
        raise UsageError("truemfu top needs nvidia-ml-py: pip install 'truemfu[nvidia]'") from None


def _once(sampler: Sampler, interval_s: float, *, replayed: bool, as_json: bool) -> None:
    def give_up() -> None:
        if (hanging := sampler.hanging()) is not None:
            raise CounterError(hanging)

    if replayed:
        while sampler.poll():
            pass
    else:
        _poll(sampler, meanwhile=give_up)
        time.sleep(interval_s)
        _poll(sampler, meanwhile=give_up)
    found = readings(sampler, whole=replayed)
    if as_json:
        print_json({"gpus": [reading.as_dict() for reading in found]})
    else:
        width = Console().width if sys.stdout.isatty() else None
        output().print(screen(found, width, with_dropped=True), soft_wrap=True)


def _watch(sampler: Sampler, interval_s: float, *, as_json: bool, silent: bool = False) -> None:
    """Until the trace ends or Ctrl-C, which is how `top` is ended and so not a failure."""
    try:
        if silent:
            _every(interval_s, sampler, lambda found: None)
        elif as_json:
            _every(interval_s, sampler, _json_line)
        elif not sys.stdout.isatty():
            _every(interval_s, sampler, lambda found: say(screen(found).plain))
        else:
            _live(sampler, interval_s, SafeConsole())
    except KeyboardInterrupt:
        return


def _live(sampler: Sampler, interval_s: float, console: Console) -> None:
    # Only redrawn for new values, not four times a second, to keep the cost low.
    def show(found: Sequence[Reading]) -> None:
        live.update(screen(found, console.width), refresh=True)

    with Live(Text("reading…"), console=console, auto_refresh=False, screen=False) as live:
        live.refresh()
        _every(interval_s, sampler, show)
        show(readings(sampler))  # a trace may end with its first read


def _every(interval_s: float, sampler: Sampler, show: Callable[[list[Reading]], object]) -> None:
    def report_hang() -> None:
        if sampler.hanging() is not None:
            show(readings(sampler))

    due_s = time.monotonic()
    first = True
    while _poll(sampler, meanwhile=report_hang):
        if not first:
            show(readings(sampler))
        first = False
        now_s = time.monotonic()
        due_s = due_s + interval_s if due_s + interval_s > now_s else now_s + interval_s
        time.sleep(due_s - now_s)


def _poll(sampler: Sampler, *, meanwhile: Callable[[], None]) -> bool:
    """`Sampler.poll` in a daemon thread; `meanwhile` is called for each second that it takes."""
    answers: SimpleQueue[bool] = SimpleQueue()

    def poll() -> None:
        more = False
        try:
            more = sampler.poll()
        finally:
            answers.put(more)

    threading.Thread(target=poll, name="truemfu-top", daemon=True).start()
    while True:
        try:
            return answers.get(timeout=1.0)
        except Empty:
            meanwhile()


def _json_line(found: Sequence[Reading]) -> None:
    say(msgspec.json.encode({"gpus": [reading.as_dict() for reading in found]}).decode())
