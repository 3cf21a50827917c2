"""A job of several ranks as real processes, each of which writes what it found."""

from __future__ import annotations

import json
import multiprocessing
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_LOADED = ["torch.distributed.fsdp", "torch._dynamo", "truemfu.flops", "truemfu.monitor.live_run"]
"""What ranks would otherwise load one by one; the server they are forked from does it once."""


def free_address() -> str:
    """An address on this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"


def run_ranks(
    target: Callable[..., None], arguments: list[tuple[Any, ...]], folder: Path, time_limit_s: float
) -> tuple[list[int | None], dict[int, Any]]:
    """Exit codes (None: killed after the time limit), and what each rank wrote to `<rank>.json`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_LOADED)
    processes = [context.Process(target=target, args=own) for own in arguments]
    for process in processes:
        process.start()
    ends_s = time.monotonic() + time_limit_s
    for process in processes:
        process.join(max(0.0, ends_s - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
    written = {rank: folder / f"{rank}.json" for rank in range(len(processes))}
    return codes, {rank: json.loads(p.read_text()) for rank, p in written.items() if p.exists()}
