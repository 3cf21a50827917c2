"""Sweeps on a real Ray: a cluster on this machine with two fake GPUs, and one that a sweep starts."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters import (
    ENDS,
    check_ends,
    check_gpus_were_not_shared,
    check_nothing_is_left,
    check_ran_once,
    check_two_at_once_have_different_gpus,
    is_collected,
    name_of,
    ran,
    results,
    submitter,
    sweep_of,
)
from supervised import HERE, until

from truemfu.errors import UsageError
from truemfu.records import CaseResult, Status, read_record
from truemfu.sweep.paths import SweepFolder
from truemfu.sweep.supervisor.cluster_batches import cancel_all

pytest.importorskip("ray")


class Cluster:
    """A head that runs nothing, and one node with two CPUs and two fake GPUs."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster as RayCluster

        self._cluster = RayCluster(initialize_head=True, head_node_args={"num_cpus": 0, "num_gpus": 0})
        self._node: Any = None
        self.address: str = self._cluster.address

    def settings(self, **more: Any) -> dict[str, Any]:
        """The settings of a sweep on it."""
        if self._node is None:
            self._node = self._cluster.add_node(num_cpus=2, num_gpus=2)
            self._cluster.wait_for_nodes()
        return {"ray_address": self.address, "gpus": 1, "cpus": 1, **more}

    def kill_node(self) -> None:
        self._cluster.remove_node(self._node, allow_graceful=False)
        self._node = None

    def stop(self) -> None:
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        made = Cluster()
        yield made
        made.stop()


@pytest.fixture(autouse=True)
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(HERE)
    monkeypatch.setenv("TRUEMFU_TEST_FOLDER", str(tmp_path))
    return tmp_path


def processes_started_with(mark: Path) -> list[str]:
    """The programs, of Ray too, that have this folder in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if f"TRUEMFU_TEST_FOLDER={mark}".encode() in (entry / "environ").read_bytes():
                    found.append((entry / "comm").read_text().strip())
            except OSError:
                continue
    return found


def test_every_end_is_the_same_as_on_one_machine(cluster: Cluster, tmp_path: Path) -> None:
    what, root = list(ENDS), tmp_path / "out"
    found, heard = results(root, sweep_of(what, launcher="ray", cluster=cluster.settings()))
    check_ends(found, what)
    check_ran_once(tmp_path, what)
    check_gpus_were_not_shared(tmp_path)
    check_nothing_is_left(root, tmp_path)
    assert any("submitted to Ray: job" in line for line in heard.lines)


def test_two_at_once_have_different_gpus(cluster: Cluster, tmp_path: Path) -> None:
    settings = {"launcher": "ray", "cluster": cluster.settings()}
    check_two_at_once_have_different_gpus(tmp_path / "out", tmp_path, settings)


def test_a_killed_submitter_is_called_again_and_the_local_ray_ends_with_the_sweep(tmp_path: Path) -> None:
    what, root = ["Nothing", "Waits", "Daemonises"], tmp_path / "out"
    settings: dict[str, Any] = {"what": what, "launcher": "ray", "cluster": {"max_jobs": 1}}
    first = submitter(root, **settings)
    until(lambda: any(line["name"] == name_of("Waits") for line in ran(tmp_path)))
    until(lambda: is_collected(root, 0))
    first.kill()
    first.wait()
    assert "raylet" in processes_started_with(tmp_path)

    (tmp_path / "go").touch()
    found, heard = results(root, sweep_of(**settings))
    assert [result.end for result in found.values()] == [Status.OK] * 3
    assert heard.reused == [name_of("Nothing")]
    assert "2 experiments already submitted to Ray" in heard.lines[0]
    check_ran_once(tmp_path, what)
    check_nothing_is_left(root, tmp_path)
    until(lambda: processes_started_with(tmp_path) == [])


def test_a_killed_driver_loses_what_ran_and_the_rest_is_run_by_the_next_call(
    cluster: Cluster, tmp_path: Path
) -> None:
    what, root = ["Waits", "Nothing"], tmp_path / "out"
    settings: dict[str, Any] = {
        "what": what,
        "launcher": "ray",
        "cluster": cluster.settings(max_jobs=1),
    }
    first = submitter(root, **settings)
    until(lambda: bool(ran(tmp_path)))
    first.kill()
    first.wait()
    (jobs,) = SweepFolder(root).all_jobs()
    os.kill(int((jobs / "keeper.lock").read_text()), 9)
    found, _ = results(root, sweep_of(**settings))
    assert (found["Waits"].end, found["Nothing"].end) == (Status.LOST, Status.OK)
    assert "Ray: the driver of the Ray tasks has ended" in (found["Waits"].message or "")
    check_ran_once(tmp_path, what)
    check_nothing_is_left(root, tmp_path)


def test_cancel_ends_the_tasks(cluster: Cluster, tmp_path: Path) -> None:
    root = tmp_path / "out"
    first = submitter(root, what=["Waits", "Nothing"], launcher="ray", cluster=cluster.settings(max_jobs=1))
    until(lambda: bool(ran(tmp_path)))
    first.terminate()  # leaves the jobs
    first.wait()
    assert cancel_all(root) == 2
    assert list(SweepFolder(root).results.iterdir()) == []
    check_nothing_is_left(root, tmp_path)
    assert [line["name"] for line in ran(tmp_path)] == [name_of("Waits")]


def test_a_killed_node_is_lost_with_rays_reason(cluster: Cluster, tmp_path: Path) -> None:
    root = tmp_path / "out"
    first = submitter(root, what=["Waits"], launcher="ray", cluster=cluster.settings())
    until(lambda: bool(ran(tmp_path)))
    cluster.kill_node()
    assert first.wait() == 0
    lost = read_record(SweepFolder(root).result(name_of("Waits")), CaseResult)
    assert lost.end is Status.LOST
    assert "Ray: " in (lost.message or "")
    assert "died" in (lost.message or "") or "dead" in (lost.message or "")
    check_ran_once(tmp_path, ["Waits"])
    check_nothing_is_left(root, tmp_path)


def refused(root: Path, words: str, **cluster: Any) -> None:
    with pytest.raises(UsageError) as error:
        results(root, sweep_of(["Nothing"], launcher="ray", cluster=cluster))
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert not root.exists()


def test_more_than_a_node_has(cluster: Cluster, tmp_path: Path) -> None:
    refused(tmp_path / "out", "no node can satisfy the request", **cluster.settings(gpus=3))


def test_more_than_this_machine_has(tmp_path: Path) -> None:
    refused(tmp_path / "out", "an experiment requests 100,000 CPUs", cpus=100_000)


def test_an_address_that_does_not_answer(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    refused(tmp_path / "out", f"Ray at {address} does not answer", ray_address=address)


@pytest.mark.parametrize("address", ["nowhere", "nowhere:port"])
def test_an_address_that_is_none(tmp_path: Path, address: str) -> None:
    refused(tmp_path / "out", f"ray_address must be host:port or auto; got '{address}'", ray_address=address)


def test_without_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    refused(tmp_path / "out", "not installed: pip install 'truemfu[ray]'")
