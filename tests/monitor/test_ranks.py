"""Rank 0 counts, the others are told: with real processes, real stores, and ranks that die or stay away."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import free_address, run_ranks
from torch import nn

import truemfu.flops.closed_form as closed_form
import truemfu.monitor.ranks as ranks
from truemfu import FlopModel, count_flops
from truemfu.errors import TruemfuWarning
from truemfu.monitor.ranks import RankLink

KEY = "first"
TIME_LIMIT_S = 120
FORWARD = 2 * 3 * 11 * 16 * (16 + 24)  # 3 × 11 tokens through the two layers of `model`
BACKWARD = 2 * FORWARD


class Tokens(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.mix, self.head = nn.Linear(16, 16), nn.Linear(16, width)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.mix(self.embed(input_ids)))


def tokens(samples: int, length: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.zeros(samples, length, dtype=torch.long)}


def told_or_counted(link: RankLink, model: nn.Module, fingerprint: str, timeout_s: float) -> FlopModel:
    """What a monitor does at its first step."""
    if link.is_first:
        link.announce(KEY, fingerprint)
        fitted = FlopModel.fit(model, tokens(2, 9))
        link.publish(KEY, fitted.export(), fingerprint=fingerprint)
        return fitted
    data = link.poll(KEY, timeout_s, fingerprint=fingerprint)
    return FlopModel.fit(model, tokens(2, 9)) if data is None else FlopModel.from_export(model, data)


def rank_process(rank: int, world_size: int, store: str, folder: str, scenario: str) -> None:
    """One rank of a job; what it found goes to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    runs = 0
    own = closed_form.run_counted

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal runs
        runs += 1
        return own(*args, **kwargs)

    closed_form.run_counted = counting
    link = RankLink.current()
    if scenario == "rank 0 is killed":
        (Path(folder) / f"{rank}.connected").touch()
        if rank == 0:  # not before the others have joined the job
            for other in range(1, world_size):
                wait_for(Path(folder) / f"{other}.connected")
            os.kill(os.getpid(), 9)
    if scenario == "the last rank has no monitor" and rank == world_size - 1:
        wait_for(Path(folder) / f"{world_size - 2}.json")
        return
    is_other = scenario == "the last rank has another model" and rank == world_size - 1
    timeout_s = 3.0 if scenario == "rank 0 is killed" else 60.0
    if is_other:  # rank 0 has announced its model, its count is not needed
        timeout_s = 1e6
    began = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted = told_or_counted(
            link, Tokens(48 if is_other else 24), "other" if is_other else "24", timeout_s
        )
        count = fitted(tokens(3, 11))
    found = {
        "rank": [link.rank, link.world_size, link.is_first],
        "runs": runs,
        "count": count.as_dict(),
        "took_s": time.monotonic() - began,
        "warned": [str(w.message) for w in caught if issubclass(w.category, TruemfuWarning)],
        "notes": link.notes,
    }
    partial = Path(folder) / f"{rank}.partial"
    partial.write_text(json.dumps(found))
    partial.rename(Path(folder) / f"{rank}.json")
    for other in range(world_size):  # rank 0 serves the store: it goes last
        if rank == 0 and not (scenario == "the last rank has no monitor" and other == world_size - 1):
            wait_for(Path(folder) / f"{other}.json")


def wait_for(path: Path) -> None:
    ends = time.monotonic() + TIME_LIMIT_S
    while not path.exists():
        assert time.monotonic() < ends, f"{path.name} does not come"
        time.sleep(0.02)


def job(folder: Path, world_size: int, kind: str, scenario: str) -> tuple[list[int | None], dict[int, Any]]:
    """Exit codes, and what each rank found."""
    store = free_address() if kind == "tcp" else f"file://{folder / 'store'}"
    arguments = [(rank, world_size, store, str(folder), scenario) for rank in range(world_size)]
    return run_ranks(rank_process, arguments, folder, TIME_LIMIT_S)


@pytest.mark.parametrize(("world_size", "kind"), [(2, "tcp"), (3, "file")])
def test_rank_0_alone_counts_and_all_ranks_have_its_count(tmp_path: Path, world_size: int, kind: str) -> None:
    codes, found = job(tmp_path, world_size, kind, "all is well")
    assert codes == [0] * world_size
    assert found[0]["runs"] >= 3
    assert [found[rank]["runs"] for rank in range(1, world_size)] == [0] * (world_size - 1)
    assert found[0]["count"]["forward"] == FORWARD
    assert found[0]["count"]["backward"] == BACKWARD
    for rank in range(world_size):
        assert found[rank]["count"] == found[0]["count"]
        assert found[rank]["rank"] == [rank, world_size, rank == 0]
        assert found[rank]["warned"] == []


def test_a_rank_without_a_monitor_holds_nobody_up(tmp_path: Path) -> None:
    codes, found = job(tmp_path, 3, "tcp", "the last rank has no monitor")
    assert codes == [0, 0, 0]
    assert sorted(found) == [0, 1]
    assert found[1]["count"] == found[0]["count"]
    assert found[1]["runs"] == 0


@pytest.mark.parametrize(
    ("kind", "said"),
    [("tcp", "key-value store cannot be used"), ("file", "rank 0 gave no count within 3 s")],
)
def test_where_rank_0_dies_the_others_count_for_themselves_and_warn(
    tmp_path: Path, kind: str, said: str
) -> None:
    codes, found = job(tmp_path, 3, kind, "rank 0 is killed")
    assert codes == [-9, 0, 0]
    for rank in (1, 2):
        assert found[rank]["runs"] >= 3
        assert found[rank]["count"]["forward"] == FORWARD
        (warned,) = found[rank]["warned"]
        assert said in warned
        assert f"rank {rank} counts for itself" in warned
        assert found[rank]["took_s"] < 60


def test_a_rank_with_another_model_counts_for_itself_at_once(tmp_path: Path) -> None:
    codes, found = job(tmp_path, 3, "tcp", "the last rank has another model")
    assert codes == [0, 0, 0]
    assert found[1]["count"] == found[0]["count"]
    assert found[2]["count"]["forward"] == 2 * 3 * 11 * 16 * (16 + 48)
    assert found[2]["runs"] >= 3
    assert found[2]["warned"] == []
    assert found[2]["notes"] == ["rank 0 has another model than rank 2, which counts for itself"]


@pytest.fixture
def in_one_process() -> Iterator[dist.Store]:
    """A process group of one, whose store both ends of a link use."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield store
    dist.destroy_process_group()


def two_ends(namespace: str) -> tuple[RankLink, RankLink]:
    ends = []
    for rank in (0, 1):
        ranks._created.pop(namespace, None)  # as in another process
        ends.append(RankLink(rank=rank, world_size=2, namespace=namespace))
    return ends[0], ends[1]


@pytest.mark.usefixtures("in_one_process")
def test_large_answers_arrive_whole() -> None:
    first, second = two_ends("large")
    draw = random.Random(0)
    data = {"noise": [draw.getrandbits(64) for _ in range(300_000)]}  # 6 MB, which hardly shrink
    first.publish(KEY, data)
    assert second.poll(KEY, 1.0) == data


@pytest.mark.usefixtures("in_one_process")
def test_links_and_keys_do_not_mix() -> None:
    first, second = two_ends("one")
    other_first = RankLink(rank=0, world_size=2, namespace="one")
    other_first.publish(KEY, {"for": "the second monitor"})
    first.publish("another key", {"for": "another key"})
    with pytest.warns(TruemfuWarning, match=r"rank 0 gave no count within 0.1 s; rank 1 counts for itself"):
        assert second.poll(KEY, 0.1) is None
    first.publish(KEY, {})
    assert second.poll(KEY, 0.1) == {}


@pytest.mark.usefixtures("in_one_process")
def test_an_answer_for_another_model_is_not_taken() -> None:
    first, second = two_ends("models")
    first.publish(KEY, {"a": 1}, fingerprint="stage 0")
    assert second.poll(KEY, 0.1, fingerprint="stage 1") is None
    assert second.poll(KEY, 0.1, fingerprint="stage 0") == {"a": 1}
    assert second.notes == ("rank 0 has another model than rank 1, which counts for itself",)


@pytest.mark.usefixtures("in_one_process")
def test_a_poll_can_be_ended() -> None:
    _, second = two_ends("ended")
    stop = threading.Event()
    threading.Timer(0.2, stop.set).start()
    began = time.monotonic()
    assert second.poll(KEY, 60.0, stop=stop) is None
    assert time.monotonic() - began < 10
    assert second.notes == ()


def test_what_is_no_answer_is_not_taken(in_one_process: dist.Store) -> None:
    first, second = two_ends("foreign")
    first.publish(KEY, {"a": 1})
    dist.distributed_c10d._get_default_store().set(f"truemfu/foreign/0/{KEY}/0", "nonsense")
    with pytest.warns(TruemfuWarning, match="store cannot be used .*rank 1 counts for itself"):
        assert second.poll(KEY, 1.0) is None


def test_without_a_process_group_each_rank_counts_for_itself() -> None:
    first, second = two_ends("none")
    with pytest.warns(TruemfuWarning, match="store cannot be used .*; every rank counts for itself"):
        first.publish(KEY, {"a": 1})
    with pytest.warns(TruemfuWarning, match="store cannot be used .*; rank 1 counts for itself"):
        assert second.poll(KEY, 60.0) is None


SERVER = """
import time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


def test_a_store_that_is_stuck_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_STUCK_S", 0.5)
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    port = int(server.stdout.readline())
    store = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        _, second = two_ends("stuck")
        server.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.warns(TruemfuWarning, match=r"TimeoutError: no answer within 1 s\); rank 1 counts"):
            assert second.poll(KEY, 0.5) is None
        assert time.monotonic() - began < 10
    finally:
        server.kill()
        server.wait()
        dist.destroy_process_group()


@pytest.mark.skipif(not hasattr(dist.Store, "clone"), reason="stores cannot be cloned before torch 2.8")
def test_the_connection_of_the_job_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the job itself waits on its connection, a poll and a publication go on by their own."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False)
    dist.init_process_group("gloo", store=client, rank=0, world_size=1)
    first, second = two_ends("apart")
    own_connection = first._store()
    monkeypatch.setattr(first, "_store", lambda: own_connection)
    answers: list[Any] = []
    poll = threading.Thread(target=lambda: answers.append(second.poll(KEY, 60.0)))
    wait = threading.Thread(target=lambda: client.wait(["the job's own"]))
    try:
        poll.start()
        time.sleep(0.3)
        wait.start()
        time.sleep(0.3)
        first.publish(KEY, {"a": 1})
        poll.join(10)
        assert answers == [{"a": 1}]
        assert wait.is_alive()
    finally:
        server.set("the job's own", "1")
        wait.join(10)
        dist.destroy_process_group()


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


def test_a_single_process_publishes_nothing_and_says_nothing() -> None:
    link = RankLink(rank=0, world_size=1)
    link.announce(KEY, "24")
    link.publish(KEY, {"a": 1}, fingerprint="24")
    assert link.notes == ()


def test_the_expected_figures_are_a_direct_count() -> None:
    count = count_flops(Tokens(), tokens(3, 11))
    assert (count.forward, count.backward) == (FORWARD, BACKWARD)
