"""One rank of each model structure counts: real processes, real stores, ranks that die or stay away."""

from __future__ import annotations

import json
import os
import random
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
from torch import nn

import truemfu.monitor.ranks.rank_link as ranks
import truemfu.monitor.ranks.store_thread as store_thread
from truemfu import FlopModel, count_flops
from truemfu.errors import TruemfuWarning
from truemfu.monitor.ranks.rank_link import COUNT, NOTHING, WAITING, Answer, LinkLimits, RankLink

KEY = "first"
TIME_LIMIT_S = 120
FORWARD = 2 * 3 * 11 * 16 * (16 + 24)  # 3 × 11 tokens through the two layers of `model`
BACKWARD = 2 * FORWARD
COLLECTIVES = (
    "all_gather all_gather_into_tensor all_gather_object all_reduce all_to_all all_to_all_single barrier "
    "batch_isend_irecv broadcast broadcast_object_list gather gather_object irecv isend monitored_barrier "
    "new_group recv reduce reduce_scatter reduce_scatter_tensor scatter scatter_object_list send"
).split()


class Tokens(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.mix, self.head = nn.Linear(16, 16), nn.Linear(16, width)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.mix(self.embed(input_ids)))


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


def tokens(samples: int, length: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.zeros(samples, length, dtype=torch.long)}


def noise(size_bytes: int) -> dict[str, Any]:
    """Data of about this size, which hardly shrinks."""
    draw = random.Random(0)
    return {"noise": [draw.getrandbits(64) for _ in range(size_bytes // 20)]}


def answered(link: RankLink, structure: str, key: str = KEY) -> Answer:
    """What a row thread does, in short."""
    ends_s = time.monotonic() + 60
    while (answer := link.ask(key, structure)) is WAITING:
        assert time.monotonic() < ends_s, "no answer"
        time.sleep(0.01)
    return answer


def counts_or_receives(link: RankLink, structure: str, data: dict[str, Any]) -> Answer:
    answer = answered(link, structure)
    if answer is COUNT:
        link.publish(KEY, structure, data)
    return answer


def wait_for(path: Path) -> None:
    ends_s = time.monotonic() + TIME_LIMIT_S
    while not path.exists():
        assert time.monotonic() < ends_s, f"{path.name} does not come"
        time.sleep(0.02)


def all_alike(link: RankLink, folder: Path) -> Any:
    time.sleep(0.5 * link.rank)  # ranks come to a key at different times
    answer = answered(link, "24")
    if answer is COUNT:
        fitted = FlopModel.fit(Tokens(), tokens(2, 9))
        link.publish(KEY, "24", fitted.export())
    else:
        fitted = FlopModel.from_export(Tokens(), answer.data)
    return answer.kind, fitted(tokens(3, 11)).as_dict()


def last_rank_differs(link: RankLink, folder: Path) -> Any:
    structure = "other" if link.rank == 2 else "24"
    answer = counts_or_receives(link, structure, {"counted by": link.rank})
    return answer.kind, answer.data


def others_differ_from_rank_0(link: RankLink, folder: Path) -> Any:
    structure = "first stage" if link.is_first else "last stage"
    answer = counts_or_receives(link, structure, {"counted by": link.rank})
    return answer.kind, answer.data


def none_alike(link: RankLink, folder: Path) -> Any:
    return counts_or_receives(link, f"stage {link.rank}", {"counted by": link.rank}).kind


def rank_0_cannot_count(link: RankLink, folder: Path) -> Any:
    return counts_or_receives(link, "24", {}).kind


def rank_0_never_announces(link: RankLink, folder: Path) -> Any:
    return "not asked" if link.is_first else answered(link, "24").kind


def rank_0_stops_before_it_counts(link: RankLink, folder: Path) -> Any:
    kind = answered(link, "24").kind
    link.stop()
    return kind


def large_count(link: RankLink, folder: Path) -> Any:
    data = noise(20_000_000)
    answer = counts_or_receives(link, "24", data)
    return answer.kind, answer.data in ({}, data)


def counts_are_logged(link: RankLink, folder: Path) -> Any:
    if link.is_first:
        link.count_begins(7)
        (folder / f"{link._prefix.replace('/', ' ')} begins").touch()
    else:
        wait_for(folder / f"{link._prefix.replace('/', ' ')} begins")
    began_s = time.monotonic()
    while 7 not in (steps := link.counted_after()) and time.monotonic() < began_s + 30:
        time.sleep(0.01)
    return sorted(steps), time.monotonic() - began_s


SCENARIOS: dict[str, tuple[Callable[[RankLink, Path], Any], LinkLimits]] = {
    scenario.__name__: (scenario, limits)
    for scenario, limits in [
        (all_alike, LinkLimits(answer_s=60)),
        (last_rank_differs, LinkLimits(answer_s=60)),
        (others_differ_from_rank_0, LinkLimits(answer_s=60)),
        (none_alike, LinkLimits(answer_s=60)),
        (rank_0_cannot_count, LinkLimits(answer_s=60)),
        (rank_0_never_announces, LinkLimits(answer_s=1)),
        (rank_0_stops_before_it_counts, LinkLimits(answer_s=60)),
        (large_count, LinkLimits(answer_s=60)),
        (counts_are_logged, LinkLimits()),
    ]
}


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
    for name, (scenario, limits) in SCENARIOS.items():
        links.append(link := RankLink.current(limits=limits))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            value = scenario(link, Path(folder))
        warned = [str(w.message) for w in caught if issubclass(w.category, TruemfuWarning)]
        found[name] = {"value": value, "notes": link.notes, "warned": warned}
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


def notes(found: dict[int, Any], scenario: Callable[..., Any]) -> list[list[str]]:
    return [found[rank][scenario.__name__]["notes"] for rank in range(3)]


def test_rank_0_alone_counts_and_all_ranks_have_its_count(found: dict[int, Any]) -> None:
    told = values(found, all_alike)
    assert [kind for kind, _ in told] == ["count", "received", "received"]
    assert told[0][1]["forward"] == FORWARD
    assert told[0][1]["backward"] == BACKWARD
    assert told[1][1] == told[2][1] == told[0][1]
    assert notes(found, all_alike) == [[], [], []]


def test_a_rank_with_another_model_counts_its_own(found: dict[int, Any]) -> None:
    told = values(found, last_rank_differs)
    assert told == [["count", {}], ["received", {"counted by": 0}], ["count", {}]]
    assert notes(found, last_rank_differs) == [
        [],
        [],
        ["the model of rank 2 differs from rank 0's, so it is counted separately"],
    ]


def test_one_of_the_ranks_that_differ_from_rank_0_counts_for_all_of_them(found: dict[int, Any]) -> None:
    told = values(found, others_differ_from_rank_0)
    assert told[0] == ["count", {}]
    elected = 1 if told[1][0] == "count" else 2
    assert told[elected] == ["count", {}]
    assert told[3 - elected] == ["received", {"counted by": elected}]


def test_where_no_ranks_are_alike_each_counts(found: dict[int, Any]) -> None:
    assert values(found, none_alike) == ["count"] * 3


def test_what_rank_0_cannot_count_is_estimated_by_all(found: dict[int, Any]) -> None:
    assert values(found, rank_0_cannot_count) == ["count", "nothing", "nothing"]
    assert notes(found, rank_0_cannot_count) == [[], [], []]


def test_where_rank_0_announces_nothing_the_others_estimate(found: dict[int, Any]) -> None:
    assert values(found, rank_0_never_announces) == ["not asked", "nothing", "nothing"]
    for rank in (1, 2):
        assert notes(found, rank_0_never_announces)[rank] == [
            f"rank 0 announced no count within 1 s; the FLOPs of rank {rank} are estimated"
        ]


def test_nobody_waits_for_a_rank_that_stopped(found: dict[int, Any]) -> None:
    assert values(found, rank_0_stops_before_it_counts) == ["count", "nothing", "nothing"]
    assert notes(found, rank_0_stops_before_it_counts) == [[], [], []]


def test_large_counts_arrive_whole(found: dict[int, Any]) -> None:
    assert values(found, large_count) == [["count", True], ["received", True], ["received", True]]


def test_all_ranks_know_within_a_second_after_which_step_one_counted(found: dict[int, Any]) -> None:
    for steps, took_s in values(found, counts_are_logged):
        assert steps == [7]
        assert took_s < 1


def test_no_rank_warns_where_all_goes_well(found: dict[int, Any]) -> None:
    for rank in range(3):
        assert {name: found[rank][name]["warned"] for name in SCENARIOS} == {name: [] for name in SCENARIOS}


def test_the_store_is_used_on_its_thread_alone_and_no_collective_is_called(found: dict[int, Any]) -> None:
    for rank in range(3):
        job = found[rank]["job"]
        assert job == {"rank": [rank, 3, rank == 0], "threads": ["truemfu-store"], "collectives": []}


def mortal_process(rank: int, world_size: int, store: str, folder: str, dies: str) -> None:
    """A rank of a job in which rank 0, or the rank elected of the others, is killed before it publishes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    link = RankLink.current(limits=LinkLimits(answer_s=3))
    (Path(folder) / f"{rank}.connected").touch()
    for other in range(world_size):
        wait_for(Path(folder) / f"{other}.connected")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if dies == "rank 0" and link.is_first:
            os.kill(os.getpid(), signal.SIGKILL)
        answer = answered(link, "first stage" if link.is_first else "last stage")
        if answer is COUNT and not link.is_first:
            os.kill(os.getpid(), signal.SIGKILL)
    warned = [str(w.message) for w in caught if issubclass(w.category, TruemfuWarning)]
    found = {"kind": answer.kind, "notes": link.notes, "warned": warned}
    partial = Path(folder) / f"{rank}.partial"
    partial.write_text(json.dumps(found))
    partial.rename(Path(folder) / f"{rank}.json")
    if link.is_first:
        ends_s = time.monotonic() + TIME_LIMIT_S
        while len(list(Path(folder).glob("*.json"))) < 2 and time.monotonic() < ends_s:
            time.sleep(0.02)
    link.stop()


def mortal_job(folder: Path, kind: str, dies: str) -> tuple[list[int | None], dict[int, Any]]:
    store = free_address() if kind == "tcp" else f"file://{folder / 'store'}"
    arguments = [(rank, 3, store, str(folder), dies) for rank in range(3)]
    return run_ranks(mortal_process, arguments, folder, TIME_LIMIT_S)


def test_where_the_elected_rank_dies_those_like_it_estimate(tmp_path: Path) -> None:
    codes, found = mortal_job(tmp_path, "tcp", "the elected")
    killed = codes.index(-9)
    assert sorted(codes, key=str) == [-9, 0, 0]
    assert killed in (1, 2)
    left = 3 - killed
    assert found[0] == {"kind": "count", "notes": [], "warned": []}
    text = f"the counting rank published no count within 3 s; the FLOPs of rank {left} are estimated"
    assert found[left] == {"kind": "nothing", "notes": [text], "warned": []}


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        # While a rank connects, a server that is gone is tried again and again.
        ("tcp", r"the job's key-value store (cannot be used \(.*\)|does not respond)"),
        ("file", "rank 0 announced no count within 3 s"),
    ],
    ids=["tcp", "file"],
)
def test_where_rank_0_dies_the_others_estimate(tmp_path: Path, kind: str, said: str) -> None:
    codes, found = mortal_job(tmp_path, kind, "rank 0")
    assert codes == [-9, 0, 0]
    for rank in (1, 2):
        assert (found[rank]["kind"], found[rank]["warned"]) == ("nothing", [])
        (note,) = found[rank]["notes"]
        assert re.fullmatch(f"{said}; the FLOPs of rank {rank} are estimated", note), note


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


QUICK = LinkLimits(answer_s=0.3, stuck_s=0.3, read_s=0.2)


def settled(link: RankLink, structure: str = "24", key: str = KEY) -> Answer:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return answered(link, structure, key)


def test_a_store_that_hangs_is_given_up_and_nobody_waits_for_it(job: Job, hanging: HangingStore) -> None:
    first, second = job.links(limits=QUICK)
    hanging.hangs = True
    began_s = time.monotonic()
    assert second.ask(KEY, "24") is WAITING
    assert time.monotonic() - began_s < 0.2
    assert settled(second) is NOTHING
    assert time.monotonic() - began_s < 5
    while second._thread.check():
        time.sleep(0.01)
    began_s = time.monotonic()
    assert second.ask("another key", "24") is NOTHING
    assert second.counted_after() == frozenset()
    second.stop()
    assert time.monotonic() - began_s < 0.2
    assert second.notes[-1] == "the job's key-value store does not respond; the FLOPs of rank 1 are estimated"

    assert first.ask(KEY, "24") is COUNT
    first.count_begins(3)
    with pytest.warns(TruemfuWarning, match="store does not respond; the FLOPs of other ranks are estimated"):
        while first._is_usable():
            assert first.counted_after() == {3}
            time.sleep(0.01)
    assert first.counted_after() == {3}
    first.publish(KEY, "24", {"a": 1})
    assert len(first.notes) == 1


def test_counts_are_not_waited_for_twice_in_a_store_that_hangs(job: Job, hanging: HangingStore) -> None:
    _, second = job.links(limits=LinkLimits(read_s=0.3))
    hanging.hangs = True
    began_s = time.monotonic()
    for _ in range(20):
        second.counted_after()
    assert 0.3 <= time.monotonic() - began_s < 1.5


def test_stopping_does_not_wait_for_a_store_that_hangs_and_warns_of_nothing(
    job: Job, hanging: HangingStore
) -> None:
    first, _ = job.links(limits=QUICK)
    hanging.hangs = True
    first.ask(KEY, "24")
    began_s = time.monotonic()
    first.stop(timeout_s=0.2)
    assert time.monotonic() - began_s < 1
    time.sleep(0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first.publish(KEY, "24", {})
        first.counted_after()
    assert first.notes == ()


def test_a_store_without_clones_is_used_directly(job: Job, hanging: HangingStore) -> None:
    first, second = job.links()
    assert first.ask(KEY, "24") is COUNT
    first.publish(KEY, "24", {"a": 1})
    assert settled(second) == Answer("received", {"a": 1})
    assert second._thread._own_store is None


def test_stopping_ends_a_wait(job: Job) -> None:
    job.start(dist.HashStore())
    _, second = job.links()
    assert second.ask(KEY, "24") is WAITING
    thread = second._thread._thread
    assert thread is not None
    second.stop()
    assert not thread.is_alive()
    assert second.ask(KEY, "24") is NOTHING
    assert second.notes == ()


def test_what_is_queued_is_written_before_the_end(job: Job) -> None:
    job.start(dist.HashStore())
    first, second = job.links()
    first.ask(KEY, "24")
    first.count_begins(1)
    first.publish(KEY, "24", {"a": 1})
    first.stop()
    assert settled(second).data == {"a": 1}
    assert second.counted_after() == {1}


def test_a_group_that_was_destroyed_is_no_failure(job: Job) -> None:
    job.start(dist.HashStore())
    first, second = job.links()
    assert second.ask(KEY, "24") is WAITING
    assert second.counted_after() == frozenset()
    dist.destroy_process_group()
    for link in (first, second):
        link.count_begins(2)
        assert settled(link) is (COUNT if link is first else NOTHING)
        link.publish(KEY, "24", {"a": 1})
        assert link.counted_after() == {2}
        assert link.notes == ()


def test_a_group_that_is_made_again_is_used_with_its_new_store(job: Job) -> None:
    job.start(dist.HashStore())
    first, second = job.links()
    first.count_begins(1)
    assert second.ask(KEY, "24") is WAITING
    while second.counted_after() != {1}:
        time.sleep(0.01)
    dist.destroy_process_group()
    assert settled(second) is NOTHING
    job.start(dist.HashStore())
    first.ask("second", "24")
    first.publish("second", "24", {"a": 1})
    assert settled(second, key="second").data == {"a": 1}
    first.count_begins(5)
    ends_s = time.monotonic() + 10
    while second.counted_after() != {1, 5} and time.monotonic() < ends_s:
        time.sleep(0.01)
    assert second.counted_after() == {1, 5}


def test_a_group_may_come_after_the_link(job: Job) -> None:
    first, second = job.links()
    assert first.ask(KEY, "24") is COUNT
    first.publish(KEY, "24", {"a": 1})
    assert second.ask(KEY, "24") is WAITING
    job.start(dist.HashStore())
    assert settled(second).data == {"a": 1}


def test_without_a_process_group_the_others_estimate_after_the_limit(job: Job) -> None:
    first, second = job.links(limits=QUICK)
    assert settled(first) is COUNT
    assert settled(second) is NOTHING
    assert second.notes[0].endswith("the FLOPs of rank 1 are estimated")
    time.sleep(1.5)
    first.publish(KEY, "24", {"a": 1})


def test_links_and_keys_do_not_mix(job: Job) -> None:
    job.start(dist.HashStore())
    first, second = job.links(limits=LinkLimits(answer_s=0.3))
    other_first = RankLink(rank=0, world_size=2, namespace=first._prefix.split("/")[1])
    try:
        other_first.ask(KEY, "24")
        other_first.publish(KEY, "24", {"for": "the second monitor"})
        first.ask("another key", "24")
        first.publish("another key", "24", {"for": "another key"})
        assert settled(second) is NOTHING
        assert settled(second, key="another key").data == {"for": "another key"}
    finally:
        other_first.stop()


def test_a_publication_that_cannot_be_read_is_not_taken(job: Job) -> None:
    store = dist.HashStore()
    job.start(store)
    first, second = job.links()
    place = f"{first._prefix}/published/24/{KEY}"
    shared = c10d._get_default_store()
    shared.set(f"{place}/0", "nonsense")
    shared.set(f"{place}/chunks", "1")
    assert settled(second) is NOTHING
    (note,) = second.notes
    assert note.startswith("the count from another rank cannot be read (")
    assert first.ask(KEY, "24") is COUNT  # the link itself goes on
    first.ask("next", "24")
    first.publish("next", "24", {"a": {1, 2}})
    assert settled(second, key="next") is NOTHING
    assert first.notes[0].startswith("the count cannot be published (TypeError")


def test_a_missing_entry_of_the_log_is_not_read_before_it_is_there(job: Job) -> None:
    job.start(dist.HashStore())
    first, second = job.links()
    shared = c10d._get_default_store()
    shared.add(f"{first._prefix}/counts/length", 2)  # two ranks have taken a number, one has written
    shared.set(f"{first._prefix}/counts/2", "8")
    assert second.counted_after() == {8}
    shared.set(f"{first._prefix}/counts/1", "7")
    assert second.counted_after() == {7, 8}


def test_the_log_keeps_the_newest_few_hundred(job: Job) -> None:
    job.start(dist.HashStore())
    first, second = job.links()
    for step in range(2000):
        first.count_begins(step)
        if step % 100 == 0:
            first.counted_after()
    for link in (first, second):
        steps = link.counted_after()
        assert 1999 in steps
        assert len(steps) <= 1024


def test_old_answers_are_dropped(job: Job) -> None:
    job.start(dist.HashStore())
    first, second = job.links()
    for number in range(100):
        key = str(number)
        assert first.ask(key, "24") is COUNT
        first.publish(key, "24", {"number": number})
    for number in range(100):
        assert settled(second, key=str(number)).data == {"number": number}
    for link in (first, second):
        assert len(link._questions) <= 64
    assert settled(second, key="0").data == {"number": 0}


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
from truemfu.monitor.ranks.rank_link import LinkLimits, NOTHING, RankLink, WAITING
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), None, False, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
link = RankLink(rank=1, world_size=2, limits=LinkLimits(stuck_s=0.5))
assert link.ask("key", "24") is WAITING
link.counted_after()
os.kill(int(sys.argv[2]), signal.SIGSTOP)
began_s = time.monotonic()
while link.ask("key", "24") is WAITING:
    time.sleep(0.01)
print(time.monotonic() - began_s, link.notes, flush=True)
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
    assert "store does not respond; the FLOPs of rank 1 are estimated" in text
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
    for link in (first, second):
        link.counted_after()  # connected
    wait = threading.Thread(target=lambda: client.wait(["the job's own"]))
    try:
        wait.start()
        time.sleep(0.3)
        first.ask(KEY, "24")
        first.publish(KEY, "24", {"a": 1})
        assert settled(second).data == {"a": 1}
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
    first, second = job.links(limits=LinkLimits(answer_s=30, stuck_s=0.2, read_s=0.1))
    wait = threading.Thread(target=lambda: client.wait(["the job's own"]))
    wait.start()
    try:
        time.sleep(0.3)
        assert first.ask(KEY, "24") is COUNT
        first.publish(KEY, "24", {"a": 1})
        ends_s = time.monotonic() + 1
        while time.monotonic() < ends_s:
            assert second.ask(KEY, "24") is WAITING
            time.sleep(0.05)
    finally:
        server.set("the job's own", "1")
        wait.join(10)
    assert settled(second).data == {"a": 1}


def test_the_store_of_a_destroyed_group_is_not_kept_alive(job: Job) -> None:
    job.start(dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False))
    store = weakref.ref(c10d._get_default_store())
    first, _ = job.links()
    first.ask(KEY, "24")
    first.counted_after()
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


def test_a_single_process_counts_without_a_thread() -> None:
    link = RankLink(rank=0, world_size=1)
    assert link.ask(KEY, "24") is COUNT
    link.publish(KEY, "24", {"a": 1})
    for step in range(1000):
        link.count_begins(step)
    assert link.counted_after() == set(range(488, 1000))
    link.stop()
    assert link._thread._thread is None
    assert link.notes == ()


def test_the_expected_figures_are_a_direct_count() -> None:
    count = count_flops(Tokens(), tokens(3, 11))
    assert (count.forward, count.backward) == (FORWARD, BACKWARD)
