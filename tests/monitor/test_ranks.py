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

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from rank_processes import free_address, run_ranks

import truemfu.monitor.ranks.rank_link as ranks
import truemfu.monitor.ranks.store_thread as store_thread
from truemfu.errors import TruemfuWarning
from truemfu.monitor.ranks.rank_link import LinkLimits, RankLink

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
    """What rank 0 receives, and the threads on which it does."""

    def __init__(self, link: RankLink) -> None:
        self._link, self.messages = link, list[bytes]()
        self.threads: set[str] = set()
        link.exchange_rows(self._take)

    def _take(self, messages: list[bytes]) -> None:
        self.threads.add(threading.current_thread().name)
        self.messages += messages

    def wait(self, *expected: bytes, limit_s: float = 60.0) -> None:
        """Until all of these have arrived."""
        ends_s = time.monotonic() + limit_s
        while not set(expected) <= set(self.messages):
            assert time.monotonic() < ends_s, f"only {len(self.messages)} messages arrived"
            self._link.read_soon()
            time.sleep(0.01)


def wait_for(path: Path) -> None:
    ends_s = time.monotonic() + TIME_LIMIT_S
    while not path.exists():
        assert time.monotonic() < ends_s, f"{path.name} does not come"
        time.sleep(0.02)


def one_of_each(link: RankLink, folder: Path) -> Any:
    """Ranks send at different times."""
    if link.is_first:
        inbox = Inbox(link)
        inbox.wait(b"from 1", b"from 2")
        return sorted(map(bytes.decode, inbox.messages)), sorted(inbox.threads)
    time.sleep(0.5 * link.rank)
    link.exchange_rows(None)
    link.send_message(f"from {link.rank}".encode())
    return None


def one_after_another(link: RankLink, folder: Path) -> Any:
    """Each message is sent once the one before it has arrived."""
    if link.is_first:
        inbox = Inbox(link)
        for number in range(5):
            inbox.wait(*(f"{rank}: {number}".encode() for rank in (1, 2)))
            (folder / f"arrived {number}").touch()
        return sorted(map(bytes.decode, inbox.messages))
    link.exchange_rows(None)
    for number in range(5):
        link.send_message(f"{link.rank}: {number}".encode())
        wait_for(folder / f"arrived {number}")
    return None


def a_large_one(link: RankLink, folder: Path) -> Any:
    large = bytes(range(256)) * 400
    if link.is_first:
        inbox = Inbox(link)
        inbox.wait(large)
        return len(inbox.messages[0])
    link.exchange_rows(None)
    if link.rank == 2:
        link.send_message(large)
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
    links = []
    for scenario in SCENARIOS:
        links.append(link := RankLink.current())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            value = scenario(link, Path(folder))
        warned = [str(w.message) for w in caught if issubclass(w.category, TruemfuWarning)]
        found[scenario.__name__] = {"value": value, "notes": link.notes, "warned": warned}
    found["job"] = {
        "rank": [link.rank, link.world_size, link.is_first],
        "threads": sorted(threads),
        "collectives": collectives,
    }
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
            assert (seen["warned"], seen["notes"]) == ([], [])


def test_the_store_is_used_on_its_thread_alone_and_no_collective_is_called(found: dict[int, Any]) -> None:
    for rank in range(3):
        job = found[rank]["job"]
        assert job == {"rank": [rank, 3, rank == 0], "threads": ["truemfu-store"], "collectives": []}


def mortal_process(rank: int, world_size: int, store: str, folder: str) -> None:
    """A rank of a job in which rank 0, which serves the store, is killed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    link = RankLink.current(limits=LinkLimits(stuck_s=3))
    (Path(folder) / f"{rank}.connected").touch()
    for other in range(world_size):
        wait_for(Path(folder) / f"{other}.connected")
    if link.is_first:
        os.kill(os.getpid(), signal.SIGKILL)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        link.exchange_rows(None)
        ends_s = time.monotonic() + 20
        while link.is_connected and time.monotonic() < ends_s:
            link.send_message(str(time.monotonic()).encode())
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


class Job:
    """Links of several ranks in one process, whose group of one has the store they share."""

    def __init__(self) -> None:
        self._links: list[RankLink] = []

    def links(self, world_size: int = 2, limits: LinkLimits | None = None) -> list[RankLink]:
        """The links the ranks make next, as if each were in a process of its own."""
        made = []
        namespace = f"test {len(self._links)}"
        for rank in range(world_size):
            ranks._created.pop(namespace, None)
            made.append(RankLink(rank=rank, world_size=world_size, namespace=namespace, limits=limits))
        self._links += made
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


class HangingStore(dist.Store):
    """Works until it is told to hang, then does not come back before it is released."""

    def __init__(self) -> None:
        super().__init__()
        self._store = dist.HashStore()
        self.hangs, self.released = False, threading.Event()

    def _now(self) -> dist.Store:
        if self.hangs:
            self.released.wait(60)
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


QUICK = LinkLimits(group_s=0.0, stuck_s=0.3)


def sends(link: RankLink, message: bytes = b"a row") -> RankLink:
    link.exchange_rows(None)
    link.send_message(message)
    return link


def test_a_store_that_hangs_is_given_up_and_nobody_waits_for_it(job: Job, hanging: HangingStore) -> None:
    _, second = job.links(limits=QUICK)
    hanging.hangs = True
    began_s = time.monotonic()
    sends(second)
    assert time.monotonic() - began_s < 0.2
    while second.is_connected:
        assert time.monotonic() - began_s < 5
        time.sleep(0.01)
    assert second.failure == "the job's key-value store does not respond"
    began_s = time.monotonic()
    second.send_message(b"another")
    second.read_soon()
    assert not second.was_connected
    second.stop()
    assert time.monotonic() - began_s < 0.2


def test_stopping_does_not_wait_for_a_store_that_hangs_and_warns_of_nothing(
    job: Job, hanging: HangingStore
) -> None:
    _, second = job.links(limits=QUICK)
    hanging.hangs = True
    sends(second)
    began_s = time.monotonic()
    second.stop(timeout_s=0.2)
    assert time.monotonic() - began_s < 1
    time.sleep(0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second.send_message(b"another")
    assert (second.notes, second.failure) == ((), None)


def test_a_store_without_clones_is_used_directly(job: Job, hanging: HangingStore) -> None:
    first, second = job.links()
    sends(second)
    Inbox(first).wait(b"a row")
    assert second._thread._own_store is None


def test_stopping_ends_the_thread(job: Job) -> None:
    job.start(dist.HashStore())
    first, _ = job.links()
    Inbox(first)
    thread = first._thread._thread
    assert thread is not None
    first.stop(timeout_s=10)
    assert not thread.is_alive()
    assert first.notes == ()


def test_what_is_queued_is_written_before_the_end(job: Job) -> None:
    job.start(dist.HashStore())
    first, second = job.links()
    sends(second).stop(timeout_s=10)
    Inbox(first).wait(b"a row")


def test_a_message_replaces_one_that_was_not_sent_yet(job: Job) -> None:
    first, second = job.links()
    sends(second, b"old")
    second.send_message(b"new")
    job.start(dist.HashStore())
    inbox = Inbox(first)
    inbox.wait(b"new")
    assert inbox.messages == [b"new"]


def test_a_group_that_was_destroyed_is_no_failure(job: Job) -> None:
    job.start(dist.HashStore())
    first, second = job.links()
    sends(second)
    Inbox(first).wait(b"a row")
    dist.destroy_process_group()
    for link in (first, second):
        link.send_message(b"late")
        link.read_soon()
        time.sleep(0.1)
        assert (link.is_connected, link.was_connected, link.failure) == (False, True, None)
        assert link.notes == ()


def test_a_group_that_is_made_again_is_used_with_its_new_store(job: Job) -> None:
    job.start(dist.HashStore())
    first, second = job.links()
    sends(second, b"in the first store")
    inbox = Inbox(first)
    inbox.wait(b"in the first store")
    dist.destroy_process_group()
    job.start(dist.HashStore())
    second.send_message(b"in the second store")
    inbox.wait(b"in the second store")


def test_a_group_may_come_after_the_link(job: Job) -> None:
    first, second = job.links()
    sends(second)
    inbox = Inbox(first)
    time.sleep(0.1)
    assert not inbox.messages
    job.start(dist.HashStore())
    inbox.wait(b"a row")


def test_without_a_process_group_the_link_is_given_up_after_the_limit(job: Job) -> None:
    _, second = job.links(limits=LinkLimits(group_s=0.3))
    sends(second)
    ends_s = time.monotonic() + 10
    while second.failure is None and time.monotonic() < ends_s:
        second._thread.wake()
        time.sleep(0.05)
    assert second.failure == "torch.distributed is not initialized"


def test_links_of_several_monitors_do_not_mix(job: Job) -> None:
    job.start(dist.HashStore())
    first, second = job.links()
    namespace = first._prefix.split("/")[1]
    other_first = RankLink(rank=0, world_size=2, namespace=namespace)
    ranks._created.pop(namespace)
    next(ranks._created[namespace])
    other_second = RankLink(rank=1, world_size=2, namespace=namespace)
    try:
        sends(second, b"of the first monitor")
        sends(other_second, b"of the second monitor")
        inbox, other = Inbox(first), Inbox(other_first)
        inbox.wait(b"of the first monitor")
        other.wait(b"of the second monitor")
        assert (len(inbox.messages), len(other.messages)) == (1, 1)
    finally:
        other_first.stop()
        other_second.stop()


def test_a_message_is_not_read_before_it_is_there(job: Job) -> None:
    job.start(dist.HashStore())
    first, *_ = job.links(world_size=3)
    shared = c10d._get_default_store()
    shared.add(f"{first._prefix}/rows/length", 2)  # two ranks have taken a number, one has written
    shared.set(f"{first._prefix}/rows/2", "the second")
    inbox = Inbox(first)
    inbox.wait(b"the second")
    shared.set(f"{first._prefix}/rows/1", "the first")
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
from truemfu.monitor.ranks.rank_link import LinkLimits, RankLink
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), None, False, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
link = RankLink(rank=0, world_size=2, limits=LinkLimits(stuck_s=0.5))
link.exchange_rows(lambda messages: None)
while link._thread._own_store is None or link._thread._call_ends_s is not None:
    time.sleep(0.01)
os.kill(int(sys.argv[2]), signal.SIGSTOP)
began_s = time.monotonic()
while link.is_connected:
    link.read_soon()
    time.sleep(0.01)
print(time.monotonic() - began_s, link.failure, flush=True)
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
            timeout=60,
            check=False,
        )
    finally:
        server.kill()
        server.wait()
    assert ended.returncode == 0, ended.stderr
    took_s, _, text = ended.stdout.partition(" ")
    assert float(took_s) < 10
    assert text.strip() == "the job's key-value store does not respond"
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
    first, second = job.links()
    sends(second)
    inbox = Inbox(first)
    inbox.wait(b"a row")  # both are connected
    wait = threading.Thread(target=lambda: client.wait(["the job's own"]))
    try:
        wait.start()
        time.sleep(0.3)
        second.send_message(b"while it waits")
        inbox.wait(b"while it waits")
        assert wait.is_alive()
    finally:
        server.set("the job's own", "1")
        wait.join(10)
    assert not wait.is_alive()


def test_a_shared_connection_that_the_training_uses_is_no_failure(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_thread, "_MAX_RANKS_WITH_OWN_CONNECTION", 1)
    server, client = tcp_group(job)
    first, second = job.links(limits=LinkLimits(stuck_s=0.2))
    wait = threading.Thread(target=lambda: client.wait(["the job's own"]))
    wait.start()
    try:
        time.sleep(0.3)
        sends(second)
        inbox = Inbox(first)
        ends_s = time.monotonic() + 1
        while time.monotonic() < ends_s:
            assert first.is_connected
            assert second.is_connected
            assert not inbox.messages
            time.sleep(0.05)
    finally:
        server.set("the job's own", "1")
        wait.join(10)
    inbox.wait(b"a row")


def test_the_store_of_a_destroyed_group_is_not_kept_alive(job: Job) -> None:
    job.start(dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False))
    store = weakref.ref(c10d._get_default_store())
    first, second = job.links()
    sends(second)
    Inbox(first).wait(b"a row")
    dist.destroy_process_group()
    ends_s = time.monotonic() + 10
    while store() is not None and time.monotonic() < ends_s:
        time.sleep(0.01)
    assert store() is None


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
    link = RankLink.current()
    assert (link.rank, link.world_size) == expected
    assert link.is_first is (expected[0] == 0)


def test_a_rank_that_is_no_number_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "three")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.warns(TruemfuWarning, match="RANK and WORLD_SIZE must be whole numbers"):
        link = RankLink.current()
    assert (link.rank, link.world_size) == (0, 1)


def test_a_single_process_needs_no_thread() -> None:
    link = RankLink(rank=0, world_size=1)
    link.send_message(b"to nobody")
    link.stop()
    assert link._thread._thread is None
    assert link.notes == ()
