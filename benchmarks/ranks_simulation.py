"""What rows of 2 to 16,384 ranks cost the store and rank 0, and how long it takes to name a late rank.

Measured here, printed first:
  store      a real TCPStore and 2 to 32 real processes: `set` of one message, by all of them at once, and the
             processor time it takes the process that hosts the store; `check` and `multi_get` of 2 to 16,384
             rows by another process, the least of 15
  rank 0     messages of up to 16,384 ranks decoded, added up and compared: processor time and memory, with
             equal steps and with steps that all differ
Computed from these: bytes a second, shares of a processor, files. Simulated: 16,384 GPU ranks that report
every ten seconds, each at its own time, some of which become late at times of their own: the time until each
is named, and alerts about ranks that are not late.

    python benchmarks/ranks_simulation.py [--ranks 16384] [--output FILE]
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import os
import platform
import random
import statistics
import sys
import time
import tracemalloc
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed import TCPStore

import truemfu

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.source_id import source_id
from truemfu.monitor.ranks.amounts import OwnAmounts, StepKey
from truemfu.monitor.ranks.job_view import JobView
from truemfu.monitor.ranks.rank_row import RankRow
from truemfu.monitor.ranks.reporter import send_every_s
from truemfu.monitor.ranks.row_exchange import read_every_s
from truemfu.monitor.ranks.stragglers import Stragglers

WINDOW_S = 10.0
SIZES = (8, 64, 512, 4096, 16384)
PROCESSES = (2, 4, 8, 16, 32)
SETS = 200
READ_TOGETHER = 1024
KEY = "truemfu/monitor/0/rows/{}"
LATE_RANKS = 24
WINDOWS = 24
DAY_S = 86_400
_MESSAGE_BYTES = 1 + 8 + 8
"""Of a TCPStore message beside key and value: the kind of call, and two lengths."""


def gpu_row(draws: random.Random, rank: int, number: int, at_s: float, chip_mhz: float = 1650.0) -> RankRow:
    """A row with every field that a GPU's rank has."""
    step_s = draws.gauss(0.8, 0.004)
    return RankRow(
        rank=rank,
        world_size=16384,
        host=f"node{rank // 8:04d}.cluster.internal",
        device=f"GPU-8f2c41d7-59a1-40c6-b3a5-{rank:012x}",
        role="dp",
        number=number,
        at_s=at_s,
        step=12 * number,
        steps=12,
        step_time_s=step_s,
        data_wait_s=abs(draws.gauss(0.004, 0.002)),
        busy_share=min(1.0, draws.gauss(0.97, 0.012)),
        collective_s={"dp": draws.gauss(0.09, 0.004)},
        clock_mhz=chip_mhz * draws.gauss(1.0, 0.004),
        tensor_activity=draws.gauss(0.42, 0.01),
        throttle="power limit",
        memory_bytes=71_234_567_890 + rank,
        model_flops=3.1e14,
        tokens=8192.0,
    )


def message(row: RankRow, *, varies: bool) -> bytes:
    """What such a rank sends: 37 steps in half a minute, all alike or each with an amount of its own."""
    own = OwnAmounts()
    for step in range(12 * row.number - 36, 12 * row.number + 1):
        tokens = 8192 - (step % 37 if varies else 0)
        shares = {"samples": 4, "tokens": tokens, "useful_tokens": tokens}
        flops = {"model_flops": 310 * 10**12 + tokens, "hardware_flops": 410 * 10**12 + tokens}
        own.add(step, 1, shares | flops | {"peak_flops_per_s": 989 * 10**12})
    return msgspec.json.encode(own.message(row))


def setter(port: int, rank: int, row: bytes, orders: Connection) -> None:
    """One process: waits for the order, then sets its row again and again."""
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    orders.send("ready")
    orders.recv()
    taken = []
    for _ in range(SETS):
        begun_s = time.perf_counter()
        store.set(KEY.format(rank), row)
        taken.append(time.perf_counter() - begun_s)
    orders.send(taken)


def reader(port: int, counts: list[int], row: bytes, orders: Connection) -> None:
    """One process: sets the rows of so many ranks, then reads them as rank 0 does."""
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    found = {}
    for rank in range(max(counts)):
        store.set(KEY.format(rank), row)
    for count in counts:
        keys = [KEY.format(rank) for rank in range(count)]
        parts = [keys[at : at + READ_TOGETHER] for at in range(0, count, READ_TOGETHER)]
        check_s = _least_s(lambda parts=parts: [store.check(part) for part in parts])
        get_s = _least_s(lambda parts=parts: [store.multi_get(part) for part in parts])
        found[count] = check_s, get_s
    orders.send(found)


def _least_s(call: Any, times: int = 15, clock: Any = time.perf_counter) -> float:
    """The least of several: other work on the machine only adds."""
    taken = []
    for _ in range(times):
        begun_s = clock()
        call()
        taken.append(clock() - begun_s)
    return min(taken)


def measure_sets(processes: int, row: bytes) -> tuple[float, float, float]:
    """`set` by so many processes at once: median, 99th percentile, the host's processor seconds per call."""
    context = multiprocessing.get_context("fork")
    port, ends, children = _port(), [], []
    for rank in range(processes):
        ours, theirs = context.Pipe()
        children.append(context.Process(target=setter, args=(port, rank, row, theirs)))
        children[-1].start()
        ends.append(ours)
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    for end in ends:
        end.recv()
    cpu_s = time.process_time()
    for end in ends:
        end.send("go")
    taken = sorted(value for end in ends for value in end.recv())
    cpu_s = time.process_time() - cpu_s
    for child in children:
        child.join()
    del store
    return statistics.median(taken), taken[int(0.99 * len(taken))], cpu_s / len(taken)


def measure_reads(counts: list[int], row: bytes) -> tuple[dict[int, tuple[float, float]], float]:
    """Seconds of `check` and `multi_get` by the number of rows; the store's growth in bytes per row."""
    context = multiprocessing.get_context("fork")
    port = _port()
    ours, theirs = context.Pipe()
    child = context.Process(target=reader, args=(port, counts, row, theirs))
    child.start()
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    before = _resident_bytes()
    found = ours.recv()
    grown = _resident_bytes() - before
    child.join()
    del store
    return found, grown / max(counts)


def measure_rank_0(count: int, *, varies: bool) -> tuple[float, float]:
    """Processor seconds in which rank 0 takes the messages of so many ranks, and the bytes that stay."""
    draws = random.Random(1)
    clock = [0.0]
    job = JobView(count, notice=lambda text, **_: None, clock=lambda: clock[0])
    taken = []
    for window in range(3, 9):
        rows = [gpu_row(draws, rank, window, 1.7949e9 + WINDOW_S * window) for rank in range(1, count)]
        messages = [message(row, varies=varies) for row in rows]
        clock[0] += WINDOW_S
        if window == 3:
            tracemalloc.start()
            job.take(messages)
            state_bytes = tracemalloc.get_traced_memory()[0]
            tracemalloc.stop()
            continue
        begun_s = time.thread_time()
        job.take(messages)
        taken.append(time.thread_time() - begun_s)
        for step in range(12 * window - 11, 12 * window + 1):
            job.step(StepKey(0, step, 1))
    return statistics.median(taken), state_bytes


def simulate(ranks: int) -> tuple[list[float], int, int]:
    """Seconds from onset to name for each late rank; late ranks not named with their cause; other alerts."""
    draws = random.Random(20261117)
    chips = [draws.gauss(1650.0, 25.0) for _ in range(ranks)]
    phases = [draws.uniform(0.0, WINDOW_S) for _ in range(ranks)]
    late = {rank: draws.uniform(5.0, 12.0) * WINDOW_S for rank in draws.sample(range(ranks), LATE_RANKS)}
    stragglers = Stragglers(window_s=WINDOW_S)
    named: dict[int, float] = {}
    others = 0
    for number in range(1, WINDOWS + 1):
        read_s = WINDOW_S * (number + 1)
        rows = []
        for rank in range(ranks):
            at_s = WINDOW_S * number + phases[rank]
            row = gpu_row(draws, rank, number, at_s, chips[rank])
            part = min(1.0, max(0.0, (at_s - late[rank]) / WINDOW_S)) if rank in late else 0.0
            if part:  # of the window; a clock that is lower by a quarter
                clock = (row.clock_mhz or 0.0) * (1 - 0.25 * part)
                row = msgspec.structs.replace(row, clock_mhz=clock)
            rows.append(row)
        for alert in stragglers.add(rows, read_s):
            if alert.rank in late and alert.cause == "gpu" and alert.rank not in named:
                named[alert.rank] = read_s - late[alert.rank]
            else:
                others += 1
    return sorted(named.values()), LATE_RANKS - len(named), others


def _port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _size(value: float) -> str:
    for unit in ("B", "KB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=max(SIZES))
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    lines: list[str] = []

    def say(line: str = "") -> None:
        print(line, flush=True)
        lines.append(line)

    sizes = [size for size in SIZES if size <= arguments.ranks]
    draws = random.Random(1)
    rows = [gpu_row(draws, rank, 9, 1.7949e9) for rank in range(512)]
    row_bytes = statistics.mean(len(msgspec.json.encode(row)) for row in rows)
    alike, varied = (
        statistics.mean(len(message(row, varies=varies)) for row in rows) for varies in (False, True)
    )
    data = message(rows[0], varies=False)
    say(
        f"ranks_simulation {datetime.date.today()}  truemfu {truemfu.__version__} ({source_id()}), torch "
        f"{torch.__version__}, Python {platform.python_version()}, {platform.machine()}, "
        f"{os.cpu_count()} cores shared with other work"
    )
    say()
    say(
        f"measured: a row with all fields of a GPU's rank is {row_bytes:.0f} bytes of JSON; a message with it"
    )
    say(f"measured: and 37 steps is {alike:,.0f} bytes if they are alike, {varied:,.0f} if all differ")
    say(f"measured: {'processes':>10}{'set, median':>14}{'set, 99 %':>12}{'CPU of the host, per set':>27}")
    host_s = 0.0
    for processes in PROCESSES:
        median_s, high_s, host_s = measure_sets(processes, data)
        taken = f"{median_s * 1e6:>11.0f} µs{high_s * 1e6:>9.0f} µs{host_s * 1e6:>24.1f} µs"
        say(f"measured: {processes:>10}{taken}")
    reads, store_bytes = measure_reads(sorted({2, 32, *sizes}), data)
    say(
        f"measured: {'messages':>10}{'check':>14}{'multi_get':>12}{'take':>12}{'state':>12}"
        f"{'take, differing':>18}{'state':>12}"
    )
    rank_0 = {}
    for count, (check_s, get_s) in reads.items():
        take_s, state = measure_rank_0(count, varies=False)
        differing_s, differing_state = measure_rank_0(count, varies=True)
        rank_0[count] = (check_s + get_s, take_s, state)
        say(
            f"measured: {count:>10,}{check_s * 1e3:>11.2f} ms{get_s * 1e3:>9.2f} ms{take_s * 1e3:>9.2f} ms"
            f"{_size(state):>12}{differing_s * 1e3:>15.2f} ms{_size(differing_state):>12}"
        )
    say(f"measured: the store's process grows by {store_bytes:.0f} bytes a row")
    say()
    sent = alike + len(KEY.format(16383)) + _MESSAGE_BYTES
    got = alike + len(KEY.format(16383)) + 2 * 8
    say(
        f"computed: {'ranks':>10}{'sent every':>12}{'read every':>12}{'to the store':>14}{'to rank 0':>12}"
        f"{'store CPU':>12}{'rank 0 CPU':>12}{'rank 0 mem.':>13}{'files, a day':>14}"
    )
    for size in sizes:
        read_s, own_s, state = rank_0[size]
        every_s = read_every_s(size)
        sent_every_s = send_every_s(size)
        store_share = size * host_s / sent_every_s + read_s / every_s
        own_share = read_s / every_s + own_s / sent_every_s
        to_store, to_rank_0 = _size(size * sent / sent_every_s) + "/s", _size(size * got / every_s) + "/s"
        files = _size(size * row_bytes * DAY_S / WINDOW_S)
        say(
            f"computed: {size:>10,}{sent_every_s:>10g} s{every_s:>10g} s{to_store:>14}{to_rank_0:>12}"
            f"{store_share:>12.2%}{own_share:>12.2%}{_size(state):>13}{files:>14}"
        )
    say(
        "computed: CPU: shares of one core. The store's: sets at the cost measured with 32 processes, and all"
    )
    say("computed: of the time of reads, which is an upper bound. Files: each rank's own, of its own rows.")
    say()
    begun_s = time.perf_counter()
    times, unnamed, others = simulate(arguments.ranks)
    say(
        f"simulated: {arguments.ranks:,} ranks, {WINDOWS} windows; the clock of {LATE_RANKS} of them falls "
        f"by a quarter, each at its own time: {len(times)} named, {unnamed} not named, {others} other alerts"
    )
    if times:
        say(
            f"simulated: seconds until named: median {statistics.median(times):.0f}, least {times[0]:.0f}, "
            f"most {times[-1]:.0f}"
        )
    print(f"({time.perf_counter() - begun_s:.0f} s)")
    if arguments.output:
        arguments.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
