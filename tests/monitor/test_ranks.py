"""Messages of ranks to rank 0: real processes, real stores, stores that hang, die or are replaced."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from rank_processes import free_address, run_ranks

import truemfu.monitor.ranks.store_thread as store_module
from truemfu.errors import TruemfuWarning, warn_once
from truemfu.monitor.ranks.row_exchange import RowExchange
from truemfu.monitor.ranks.store_thread import GROUP_S, STUCK_S, StoreThread
from truemfu.monitor.ranks.this_rank import ThisRank
from truemfu.monitor.summary import lines_of
from truemfu.records import RankSummary, RunSummary

TIME_LIMIT_S = 120
COLLECTIVES = (
    "all_gather all_gather_into_tensor all_gather_object all_reduce all_to_all all_to_all_single barrier "
    "batch_isend_irecv broadcast broadcast_object_list gather gather_object irecv isend monitored_barrier "
    "new_group recv reduce reduce_scatter reduce_scatter_tensor scatter scatter_object_list send"
).split()


class WatchedStore:
    """A store that notes which threads use it."""

    def __init__(self, store: Any, threads: set[str]) -> None:
        self._store, self._threads = store, threads

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._store, name)

        def called(*args: Any) -> Any:
            self._threads.add(threading.current_thread().name)
            result = attribute(*args)
            return WatchedStore(result, self._threads) if name == "clone" else result

        return called


class Inbox:
    """What a rank 0 receives, and the threads on which it does."""

    def __init__(self, prefix: str, world_size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.messages: list[bytes] = []
        self.threads: set[str] = set()
        exchange = RowExchange(prefix, 0, world_size=world_size, take=self._take)
        self.link = StoreThread(exchange, world_size=world_size, clock=clock)
        self.link.wake()

    def _take(self, messages: list[bytes]) -> None:
        self.threads.add(threading.current_thread().name)
        self.messages += messages

    def wait(self, *expected: bytes) -> None:
        """Until all of these have arrived."""
        ends_s = time.monotonic() + TIME_LIMIT_S
        while not set(expected) <= set(self.messages):
            assert time.monotonic() < ends_s, f"only {len(self.messages)} messages arrived"
            self.link.read_soon()
            time.sleep(0.01)


def sender(
    prefix: str, rank: int, world_size: int, clock: Callable[[], float] = time.monotonic
) -> StoreThread:
    """How another rank sends messages."""
    return StoreThread(RowExchange(prefix, rank, world_size=world_size), world_size=world_size, clock=clock)


def wait_for(path: Path) -> None:
    ends_s = time.monotonic() + TIME_LIMIT_S
    while not path.exists():
        assert time.monotonic() < ends_s, f"{path.name} does not come"
        time.sleep(0.02)


def one_of_each(link: Inbox | StoreThread, rank: int, folder: Path) -> Any:
    if isinstance(link, Inbox):
        link.wait(b"from 1", b"from 2")
        return sorted(map(bytes.decode, link.messages)), sorted(link.threads)
    link.send(f"from {rank}".encode())
    return None


def one_after_another(link: Inbox | StoreThread, rank: int, folder: Path) -> Any:
    """Each message is sent once the one before it has arrived."""
    if isinstance(link, Inbox):
        for number in range(5):
            link.wait(*(f"{rank}: {number}".encode() for rank in (1, 2)))
            (folder / f"arrived {number}").touch()
        return sorted(map(bytes.decode, link.messages))
    for number in range(5):
        link.send(f"{rank}: {number}".encode())
        wait_for(folder / f"arrived {number}")
    return None


def a_large_one(link: Inbox | StoreThread, rank: int, folder: Path) -> Any:
    large = bytes(range(256)) * 400
    if isinstance(link, Inbox):
        link.wait(large)
        return len(link.messages[0])
    if rank == 2:
        link.send(large)
    return None


SCENARIOS = (one_of_each, one_after_another, a_large_one)


def rank_process(rank: int, world_size: int, store: str, folder: str) -> None:
    """One rank that goes through all scenarios with a link for each; what it found goes to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    threads: set[str] = set()
    watched = WatchedStore(c10d._get_default_store(), threads)
    c10d._get_default_store = lambda: watched
    collectives: list[str] = []
    for name in COLLECTIVES:
        for module in (dist, c10d):
            setattr(module, name, lambda *_, name=name, **__: collectives.append(name))
    found: dict[str, Any] = {}
    links: list[StoreThread] = []
    for scenario in SCENARIOS:
        prefix = scenario.__name__
        own = sender(prefix, rank, world_size) if rank else Inbox(prefix, world_size)
        links.append(own.link if isinstance(own, Inbox) else own)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            value = scenario(own, rank, Path(folder))
        warned = [str(w.message) for w in caught if issubclass(w.category, TruemfuWarning)]
        found[scenario.__name__] = {"value": value, "failure": links[-1].failure, "warned": warned}
    found["job"] = {"threads": sorted(threads), "collectives": collectives}
    leave(rank, world_size, folder, found)
    for link in links:
        link.stop()


def leave(rank: int, world_size: int, folder: str, found: Any) -> None:
    partial = Path(folder) / f"{rank}.partial"
    partial.write_text(json.dumps(found))
    partial.rename(Path(folder) / f"{rank}.json")
    if rank == 0:  # it serves the store, so it goes last
        for other in range(1, world_size):
            wait_for(Path(folder) / f"{other}.json")


@pytest.fixture(scope="module", params=["tcp", "file"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """What each of three ranks found in each scenario."""
    folder = tmp_path_factory.mktemp(request.param)
    store = free_address() if request.param == "tcp" else f"file://{folder / 'store'}"
    arguments = [(rank, 3, store, str(folder)) for rank in range(3)]
    codes, written = run_ranks(rank_process, arguments, folder, TIME_LIMIT_S)
    assert codes == [0, 0, 0]
    return written


def values(found: dict[int, Any], scenario: Callable[..., Any]) -> list[Any]:
    return [found[rank][scenario.__name__]["value"] for rank in range(3)]


def test_rank_0_receives_a_message_of_each_rank_on_its_store_thread(found: dict[int, Any]) -> None:
    assert values(found, one_of_each) == [[["from 1", "from 2"], ["truemfu-store"]], None, None]


def test_messages_arrive_once_each(found: dict[int, Any]) -> None:
    sent = sorted(f"{rank}: {number}" for rank in (1, 2) for number in range(5))
    assert values(found, one_after_another) == [sent, None, None]


def test_large_messages_arrive_whole(found: dict[int, Any]) -> None:
    assert values(found, a_large_one) == [256 * 400, None, None]


def test_no_rank_warns_where_all_goes_well(found: dict[int, Any]) -> None:
    for rank in range(3):
        for scenario in SCENARIOS:
            seen = found[rank][scenario.__name__]
            assert (seen["warned"], seen["failure"]) == ([], None)


def test_the_store_is_used_on_its_thread_alone_and_no_collective_is_called(found: dict[int, Any]) -> None:
    for rank in range(3):
        assert found[rank]["job"] == {"threads": ["truemfu-store"], "collectives": []}


def mortal_process(rank: int, world_size: int, store: str, folder: str) -> None:
    """A rank of a job in which rank 0, which serves the store, is killed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    store_module.STUCK_S = 3.0
    link = sender("mortal", rank, world_size)
    (Path(folder) / f"{rank}.connected").touch()
    for other in range(world_size):
        wait_for(Path(folder) / f"{other}.connected")
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ends_s = time.monotonic() + TIME_LIMIT_S
        while link.is_connected and time.monotonic() < ends_s:
            link.send(str(time.monotonic()).encode())
            time.sleep(0.05)
    warned = [str(w.message) for w in caught if issubclass(w.category, TruemfuWarning)]
    partial = Path(folder) / f"{rank}.partial"
    partial.write_text(json.dumps({"failure": link.failure, "warned": warned}))
    partial.rename(Path(folder) / f"{rank}.json")
    link.stop()


def test_where_rank_0_dies_the_others_go_on_and_warn_of_nothing(tmp_path: Path) -> None:
    arguments = [(rank, 3, store, str(tmp_path)) for store in [free_address()] for rank in range(3)]
    codes, found = run_ranks(mortal_process, arguments, tmp_path, TIME_LIMIT_S)
    assert codes == [-9, 0, 0]
    for rank in (1, 2):
        assert found[rank]["warned"] == []
        # While a rank connects, a server that is gone is tried again and again.
        said = r"the job's key-value store (cannot be used \(.*\)|does not respond)"
        assert re.fullmatch(said, found[rank]["failure"])


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Job:
    """Ranks in one process, whose group of one has the store they share."""

    def __init__(self) -> None:
        self._links: list[StoreThread] = []
        self.clock = Clock()

    def first(self, prefix: str = "rows", world_size: int = 2) -> Inbox:
        """Rank 0."""
        made = Inbox(prefix, world_size)
        self._links.append(made.link)
        return made

    def second(self, prefix: str = "rows", *, clock: Callable[[], float] = time.monotonic) -> StoreThread:
        """Another rank."""
        self._links.append(made := sender(prefix, 1, 2, clock))
        return made

    def start(self, store: Any) -> None:
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)

    def end(self) -> None:
        for link in self._links:
            link.stop()
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    made.end()


def until(holds: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + TIME_LIMIT_S
    while not holds():
        assert time.monotonic() < ends_s
        time.sleep(0.005)


def is_in_a_call(link: StoreThread) -> bool:
    return link._call_ends_s is not None


class HangingStore(dist.Store):
    """Works until it is told to hang, then does not come back before it is released."""

    def __init__(self) -> None:
        super().__init__()
        self._store = dist.HashStore()
        self.hangs, self.released = False, threading.Event()

    def _now(self) -> dist.Store:
        if self.hangs:
            self.released.wait(TIME_LIMIT_S)
        return self._store

    def set(self, key: str, value: Any) -> None:
        self._now().set(key, value)

    def get(self, key: str) -> bytes:
        return self._now().get(key)

    def add(self, key: str, amount: int) -> int:
        return self._now().add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._now().check(keys)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch, job: Job) -> Iterator[HangingStore]:
    """A job whose store can be made to hang; only our own calls go to it."""
    job.start(dist.HashStore())
    store = HangingStore()
    monkeypatch.setattr(c10d, "_get_default_store", lambda: store)
    yield store
    store.released.set()


def test_a_store_that_hangs_is_given_up_and_nobody_waits_for_it(job: Job, hanging: HangingStore) -> None:
    second = job.second(clock=job.clock)
    hanging.hangs = True
    second.send(b"a row")
    until(lambda: is_in_a_call(second))
    assert second.is_connected
    job.clock.now_s += GROUP_S + STUCK_S + 1
    assert not second.is_connected
    assert second.failure == "the job's key-value store does not respond"
    second.send(b"another")
    second.read_soon()
    assert not second.was_connected
    second.stop()
    assert is_in_a_call(second)


def test_stopping_does_not_wait_for_a_store_that_hangs_and_warns_of_nothing(
    job: Job, hanging: HangingStore
) -> None:
    second = job.second()
    hanging.hangs = True
    second.send(b"a row")
    until(lambda: is_in_a_call(second))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second.stop(timeout_s=0.01)
        second.send(b"another")
    assert is_in_a_call(second)
    assert second.failure is None


def test_a_store_without_clones_is_used_directly(job: Job, hanging: HangingStore) -> None:
    second = job.second()
    second.send(b"a row")
    job.first().wait(b"a row")
    assert second._own_store is None


def test_stopping_ends_the_thread(job: Job) -> None:
    job.start(dist.HashStore())
    link = job.first().link
    thread = link._thread
    assert thread is not None
    link.stop(timeout_s=TIME_LIMIT_S)
    assert not thread.is_alive()
    assert link.failure is None


def test_what_is_queued_is_written_before_the_end(job: Job) -> None:
    job.start(dist.HashStore())
    second = job.second()
    second.send(b"a row")
    second.stop(timeout_s=TIME_LIMIT_S)
    job.first().wait(b"a row")


def test_a_message_replaces_one_that_was_not_sent_yet(job: Job) -> None:
    second = job.second()
    second.send(b"old")
    second.send(b"new")
    job.start(dist.HashStore())
    inbox = job.first()
    inbox.wait(b"new")
    assert inbox.messages == [b"new"]


def test_a_group_that_was_destroyed_is_no_failure(job: Job) -> None:
    job.start(dist.HashStore())
    inbox, second = job.first(), job.second()
    second.send(b"a row")
    inbox.wait(b"a row")
    dist.destroy_process_group()
    for link in (inbox.link, second):
        link.send(b"late")
        link.read_soon()
        link.stop(timeout_s=TIME_LIMIT_S)
        assert link.failure is None


def test_a_connection_that_was_there_is_remembered(job: Job) -> None:
    job.start(dist.HashStore())
    second = job.second()
    dist.destroy_process_group()
    assert (second.is_connected, second.was_connected) == (False, True)


def test_a_group_that_is_made_again_is_used_with_its_new_store(job: Job) -> None:
    job.start(dist.HashStore())
    inbox, second = job.first(), job.second()
    second.send(b"in the first store")
    inbox.wait(b"in the first store")
    dist.destroy_process_group()
    job.start(dist.HashStore())
    second.send(b"in the second store")
    inbox.wait(b"in the second store")


def test_a_group_may_come_after_the_link(job: Job) -> None:
    inbox, second = job.first(), job.second()
    second.send(b"a row")
    job.start(dist.HashStore())
    inbox.wait(b"a row")


def test_without_a_process_group_the_link_is_given_up_after_the_limit(job: Job) -> None:
    second = job.second(clock=job.clock)
    job.clock.now_s = 1.0
    second.send(b"a row")
    until(lambda: second._no_group_since_s is not None)
    assert second.failure is None
    job.clock.now_s += GROUP_S + 1
    second.wake()
    until(lambda: second.failure is not None)
    assert second.failure == "torch.distributed is not initialized"


def test_messages_of_several_monitors_do_not_mix(job: Job) -> None:
    job.start(dist.HashStore())
    inboxes = {name: job.first(name) for name in ("first", "second")}
    for name in inboxes:
        job.second(name).send(name.encode())
    for name, inbox in inboxes.items():
        inbox.wait(name.encode())
        assert inbox.messages == [name.encode()]


def test_each_monitor_has_a_prefix_of_its_own() -> None:
    prefixes = [ThisRank(1, 2, warn_once).store._exchange._prefix for _ in range(2)]
    assert len(set(prefixes)) == 2


def test_a_message_is_not_read_before_it_is_there(job: Job) -> None:
    job.start(dist.HashStore())
    shared = c10d._get_default_store()
    shared.set("rows/2", "the second")
    inbox = job.first(world_size=3)
    inbox.wait(b"the second")
    shared.set("rows/1", "the first")
    inbox.wait(b"the first")
    assert inbox.messages == [b"the second", b"the first"]


SERVER = """
import time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""

CLIENT = """
import os, signal, sys, time
import torch.distributed as dist
import truemfu.monitor.ranks.store_thread as store_module
from truemfu.monitor.ranks.row_exchange import RowExchange
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), None, False, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
store_module.STUCK_S = 0.5
exchange = RowExchange("rows", 0, world_size=2, take=lambda messages: None)
link = store_module.StoreThread(exchange, world_size=2)
link.wake()
while link._own_store is None or link._call_ends_s is not None:
    time.sleep(0.01)
os.kill(int(sys.argv[2]), signal.SIGSTOP)
while link.is_connected:
    link.read_soon()
    time.sleep(0.01)
print(link.failure, flush=True)
link.stop()
"""


@pytest.mark.skipif(not hasattr(dist.Store, "clone"), reason="stores cannot be cloned before torch 2.8")
def test_a_process_ends_while_its_store_is_stuck() -> None:
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        port = server.stdout.readline().strip()
        ended = subprocess.run(
            [sys.executable, "-c", CLIENT, port, str(server.pid)],
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S,
            check=False,
        )
    finally:
        server.kill()
        server.wait()
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "the job's key-value store does not respond"
    assert ended.stderr == ""


def tcp_group(job: Job) -> tuple[dist.TCPStore, dist.TCPStore]:
    """The server of a process group's store, and the client the group uses."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False)
    job.start(client)
    return server, client


@pytest.mark.skipif(not hasattr(dist.Store, "clone"), reason="stores cannot be cloned before torch 2.8")
def test_the_connection_of_the_job_is_left_alone(job: Job) -> None:
    """While the training itself waits on its connection, ours go on."""
    server, client = tcp_group(job)
    inbox, second = job.first(), job.second()
    second.send(b"a row")
    inbox.wait(b"a row")  # both are connected
    wait = threading.Thread(target=lambda: client.wait(["the job's own"]))
    try:
        wait.start()
        time.sleep(0.3)
        second.send(b"while it waits")
        inbox.wait(b"while it waits")
        assert wait.is_alive()
    finally:
        server.set("the job's own", "1")
        wait.join(10)
    assert not wait.is_alive()


def test_a_shared_connection_that_the_training_uses_is_no_failure(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_MAX_RANKS_WITH_OWN_CONNECTION", 1)
    server, client = tcp_group(job)
    second = job.second(clock=job.clock)
    wait = threading.Thread(target=lambda: client.wait(["the job's own"]))
    wait.start()
    try:
        time.sleep(0.3)
        second.send(b"a row")
        until(lambda: is_in_a_call(second))
        job.clock.now_s += STUCK_S + 1
        assert second.is_connected
    finally:
        server.set("the job's own", "1")
        wait.join(TIME_LIMIT_S)
    job.first().wait(b"a row")


def test_the_store_of_a_destroyed_group_is_not_kept_alive(job: Job) -> None:
    job.start(dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False))
    store = weakref.ref(c10d._get_default_store())
    second = job.second()
    second.send(b"a row")
    job.first().wait(b"a row")
    dist.destroy_process_group()
    until(lambda: store() is None)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({}, (0, 1)), ({"RANK": "3", "WORLD_SIZE": "8"}, (3, 8)), ({"RANK": "3"}, (0, 1))],
)
def test_before_torch_distributed_the_launcher_tells_the_rank(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: tuple[int, int]
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = ThisRank.current(warn_once)
    assert (found.rank, found.world_size) == expected
    assert found.is_first is (expected[0] == 0)


def test_a_rank_that_is_no_number_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "three")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.warns(TruemfuWarning, match="RANK and WORLD_SIZE must be whole numbers"):
        found = ThisRank.current(warn_once)
    assert (found.rank, found.world_size) == (0, 1)


def test_a_single_process_reports_nothing_and_needs_no_thread(tmp_path: Path) -> None:
    alone = ThisRank(0, 1, warn_once)
    alone.join(
        tmp_path,
        device=torch.device("cpu"),
        reads_gpu=False,
        clock_hz=lambda: None,
        memory_bytes=lambda: None,
    )
    alone.expect_last_reports()
    alone.leave(ends_s=0.0)
    alone.store.stop()
    assert alone.store._thread is None
    assert (alone.reporter, alone.job, alone.figures(), alone.notes) == (None, None, None, [])
    assert list(tmp_path.iterdir()) == []


def test_the_line_of_a_rank_says_which_steps_its_time_is_of() -> None:
    rank = RankSummary(rank=1, status="ended", host="vm", device="vm:cpu:1", steps=35, step_time_s=0.01963)
    lines = dict(lines_of(msgspec.to_builtins(RunSummary(ranks=[rank]))))
    assert lines["rank 1"] == "vm:cpu:1, 35 steps after warm-up, mean 19.63 ms"
