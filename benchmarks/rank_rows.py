"""What the exchange of ranks costs: a row on a rank's background thread, and a read by rank 0.

    python benchmarks/rank_rows.py                   2, 4, 8, 16 and 32 clients of one store
    python benchmarks/rank_rows.py --clients 2 8     these numbers
    python benchmarks/rank_rows.py --shapes 100      each message with 100 different steps

A client is a process with its own connection to a TCPStore on this machine; it makes and sends messages as a
rank does, without training. Rank 0 reads them as it does in a job.

Printed for each number: microseconds of CPU time on the client for a row and for its sending, and on rank 0
for a read of all messages and for adding them up (medians; the largest wall time beside them), and the bytes
of a message. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from truemfu.monitor.ranks.amounts import PEAK
from truemfu.monitor.ranks.job_view import JobView
from truemfu.monitor.ranks.reporter import Identity, RankReporter
from truemfu.monitor.ranks.row_exchange import RowExchange
from truemfu.monitor.ranks.row_sources import HostTime, RowSources

ROUNDS = 30
PREFIX = "truemfu/benchmark"


class Timed:
    """Medians of CPU time and the largest wall time, in microseconds."""

    def __init__(self) -> None:
        self._cpu: list[float] = []
        self._wall: list[float] = []

    def __enter__(self) -> None:
        self._began = time.thread_time(), time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._cpu.append(1e6 * (time.thread_time() - self._began[0]))
        self._wall.append(1e6 * (time.perf_counter() - self._began[1]))

    def figures(self, name: str) -> dict[str, float]:
        return {
            f"{name}_cpu_us": round(statistics.median(self._cpu), 1),
            f"{name}_wall_us": round(statistics.median(self._wall), 1),
            f"{name}_largest_wall_us": round(max(self._wall), 1),
        }


def calls_to(store: Any) -> tuple[Any, int, Callable[..., Any]]:
    return store, 1, lambda function, *args: function(*args)


def connected(port: int, *, is_server: bool) -> Any:
    return dist.TCPStore("127.0.0.1", port, is_master=is_server, timeout=timedelta(seconds=120))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def client(rank: int, world_size: int, port: int, shapes: int, results: Any) -> None:
    store = connected(port, is_server=False)
    calls = calls_to(store)
    exchange = RowExchange(PREFIX, rank, world_size=world_size)
    sizes: list[int] = []

    def send(message: bytes) -> None:
        sizes.append(len(message))
        exchange.put(message)

    now_s = [0.0]
    own = Identity(rank=rank, world_size=world_size, host=f"host-{rank}", device=f"GPU-{rank:032}", restart=0)
    reporter = RankReporter(
        own,
        role_name=lambda: "",
        memory_bytes=lambda: 1 << 30,
        send=send,
        sources=RowSources(host_time=HostTime(multiprocessing.current_process().pid or 0)),
        clock=lambda: now_s[0],
    )
    making, sending = Timed(), Timed()
    step = 0
    store.add(f"{PREFIX}/ready", 1)
    store.wait([f"{PREFIX}/go"])
    for _ in range(ROUNDS):
        for _ in range(100):
            step += 1
            tokens = 4096 + (step % shapes if shapes > 1 else 0)
            amounts = {
                "tokens": tokens,
                "samples": 4,
                "model_flops": tokens * 10**9,
                PEAK: 10**15,
            }
            reporter.add(step, 1, 0.1, 0.01, paused_s=0.0, is_warmup=False, amounts=amounts)
        now_s[0] += 10.0
        with making:
            reporter.tick()
        with sending:
            exchange.work(*calls)
        time.sleep(0.02)
    results.put((making.figures("row"), sending.figures("send"), sizes[-1]))
    store.add(f"{PREFIX}/done", 1)
    store.wait([f"{PREFIX}/read"])


def measured(clients: int, shapes: int) -> dict[str, Any]:
    context = multiprocessing.get_context("fork")  # before there is a server: torch is imported once
    results = context.Queue()
    port, world_size = free_port(), clients + 1
    processes = [
        context.Process(target=client, args=(rank, world_size, port, shapes, results))
        for rank in range(1, world_size)
    ]
    for process in processes:
        process.start()
    store = connected(port, is_server=True)
    while store.add(f"{PREFIX}/ready", 0) < clients:
        time.sleep(0.1)
    job = JobView(world_size, notice=lambda text, **_: print(text, file=sys.stderr))
    exchange = RowExchange(PREFIX, 0, world_size=world_size, take=job.take)
    calls, reading, adding = calls_to(store), Timed(), Timed()
    store.set(f"{PREFIX}/go", "1")
    while store.add(f"{PREFIX}/done", 0) < clients:
        with reading:
            messages = exchange._read(calls[0], calls[2])
        if messages:
            with adding:
                job.take(messages)
        time.sleep(0.05)
    job.take(exchange._read(calls[0], calls[2]))
    seen = [entry["step"] for entry in job.table()[1:]]
    assert seen == [100 * ROUNDS] * clients, "every client's last message was read"
    store.set(f"{PREFIX}/read", "1")
    found = [results.get() for _ in processes]
    for process in processes:
        process.join()
    of_clients = {
        name: round(statistics.median(of[name] for rank in found for of in rank[:2] if name in of), 1)
        for of in found[0][:2]
        for name in of
    }
    return {
        "clients": clients,
        "message_bytes": found[0][2],
        **of_clients,
        **reading.figures("read"),
        **adding.figures("add"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    parser.add_argument("--shapes", type=int, default=1, help="different amounts that steps take in turn")
    arguments = parser.parse_args()
    found = []
    for clients in arguments.clients:
        figures = measured(clients, arguments.shapes)
        found.append(figures)
        print(", ".join(f"{name} {value:,}" for name, value in figures.items()), flush=True)
    print(json.dumps({"shapes": arguments.shapes, "by_clients": found}))


if __name__ == "__main__":
    main()
