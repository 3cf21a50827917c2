"""A rank that sleeps in its step holds up a job of real processes: it is named, wherever it sleeps."""

from __future__ import annotations

import _thread
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from rank_processes import free_address, run_ranks
from torch import nn

from truemfu.monitor.ranks.lateness import lateness
from truemfu.monitor.ranks.outside_time import OutsideTime
from truemfu.monitor.ranks.rank_row import RankRow
from truemfu.monitor.ranks.reporter import Identity, RankReporter
from truemfu.monitor.ranks.row_sources import HostTime, RowSources

SLEEP_S = 0.12
STEPS = 15


def rank_of_two(rank: int, address: str, where: str, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)

    def sleeps(*_: Any) -> None:
        if rank == 1:
            time.sleep(SLEEP_S)

    inner = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    if where == "forward":
        inner[1].register_forward_pre_hook(sleeps)
    elif where == "backward":
        inner[1].register_full_backward_hook(sleeps)
    model = nn.parallel.DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if where == "optimizer":
        optimizer.register_step_pre_hook(sleeps)
    reporter = RankReporter(
        Identity.current(rank, 2, torch.device("cpu")),
        role_name=lambda: "",
        memory_bytes=lambda: None,
        send=lambda message: None,
        sources=RowSources(
            host_time=HostTime(threading.get_native_id()),
            outside=OutsideTime(),
        ),
    )
    for step in range(STEPS):
        began_s = time.perf_counter()
        model(torch.ones(4, 16)).sum().backward()
        optimizer.step()
        taken_s = time.perf_counter() - began_s
        reporter.add(step, 1, taken_s, 0.0, paused_s=0.0, is_warmup=False, amounts={})
    reporter.close()
    assert reporter._row is not None
    (folder / f"{rank}.json").write_bytes(msgspec.json.encode(reporter._row))
    dist.destroy_process_group()


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
def test_a_rank_that_sleeps_is_late_because_it_is_blocked(tmp_path: Path, where: str) -> None:
    address = free_address()
    arguments = [(rank, address, where, tmp_path) for rank in range(2)]
    codes, written = run_ranks(rank_of_two, arguments, tmp_path, 200.0)
    assert codes == [0, 0]
    rows = [msgspec.convert(written[rank], RankRow) for rank in range(2)]
    found = {cause: seconds[1] for cause, seconds in lateness(rows).items() if seconds[1] is not None}
    assert max(found, key=lambda cause: found[cause]) == "blocked", found
    assert rows[1].step_time_s is not None
    assert SLEEP_S / 2 < found["blocked"] <= rows[1].step_time_s
    others = {cause: seconds[0] for cause, seconds in lateness(rows).items() if seconds[0] is not None}
    assert others["blocked"] <= 0.0  # less what its host explains


def made_on_a_thread_of_its_own(how: str) -> OutsideTime:
    """By one that has ended, and whose number is given to the next."""
    made: queue.SimpleQueue[OutsideTime] = queue.SimpleQueue()
    if how == "of threading":
        threading.Thread(target=lambda: made.put(OutsideTime())).start()
    else:
        _thread.start_new_thread(lambda: made.put(OutsideTime()), ())
    return made.get()


@pytest.mark.parametrize("how", ["of threading", "of another library"])
def test_a_thread_that_has_ended_is_not_looked_at(how: str) -> None:
    outside = [made_on_a_thread_of_its_own(how) for _ in range(20)]
    stay = threading.Event()
    others = [threading.Thread(target=stay.wait, daemon=True) for _ in range(20)]
    for other in others:
        other.start()
    for one in outside:
        one._looking.join(60.0)
    assert not any(one._looking.is_alive() for one in outside)
    assert {one.share() for one in outside} == {None}
    stay.set()


LOOKS = """
import sys, threading, time, weakref
from truemfu.monitor.ranks.outside_time import _codes_of

class Held:
    pass

def leaves():
    held = Held()
    return weakref.ref(held)

sys.setswitchinterval(1e-6)
codes = _codes_of(threading.get_ident())
is_over = False

def looks():
    while not is_over:
        next(codes)

looking = threading.Thread(target=looks)
looking.start()
ends_s = time.monotonic() + 1.0
kept = calls = 0
while time.monotonic() < ends_s:
    calls += 1
    kept += leaves()() is not None
is_over = True
looking.join()
print(calls > 0, kept)
"""


def test_a_look_keeps_nothing_of_the_program_alive() -> None:
    """In a process of its own: other threads of this one may look at frames, too."""
    ran = subprocess.run([sys.executable, "-c", LOOKS], capture_output=True, text=True, timeout=120)
    assert ran.stdout.split() == ["True", "0"], ran.stderr
