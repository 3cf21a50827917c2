"""The job's figures: sums over real ranks that do different things, exact, without a collective of ours."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from rank_processes import free_address, run_ranks
from torch import nn

import truemfu.monitor.live_run as live_module
import truemfu.monitor.monitor as monitor_module
import truemfu.monitor.ranks.job_view as job_module
import truemfu.monitor.ranks.reporter as reporter_module
import truemfu.monitor.rows.held_rows as held_module
from truemfu import TrainingMonitor
from truemfu.errors import TruemfuWarning
from truemfu.monitor.ranks.rank_file import read_files
from truemfu.monitor.ranks.rank_row import RankRow
from truemfu.monitor.rows import row_thread

TIME_LIMIT_S = 300
PATIENCE_S = 60.0
DESTROYED = "destroyed"
WIDTH, STEPS, LOST_STEPS = 16, 12, 75
PEAK_TFLOPS = 10.0
COLLECTIVES = (
    "all_gather all_gather_object all_gather_into_tensor all_reduce all_to_all all_to_all_single barrier "
    "broadcast broadcast_object_list gather gather_object irecv isend monitored_barrier new_group recv "
    "reduce reduce_scatter reduce_scatter_tensor scatter scatter_object_list send"
).split()


class Layer(nn.Module):
    """3 × 2 × tokens × 16² FLOPs a step."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = (self.layer(self.embed(input_ids)) * attention_mask[..., None]).sum()
        return total


def batch_of(rank: int, step: int) -> tuple[int, int, int]:
    """Samples, length and padding of a rank's batch: different on each rank, and changing now and then."""
    return 1 + rank, 4 + 2 * (step // 5) + rank, rank


def amounts_of(rank: int, step: int) -> dict[str, int]:
    samples, length, padding = batch_of(rank, step)
    tokens = samples * length
    return {
        "samples": samples,
        "tokens": tokens,
        "useful_tokens": tokens - samples * padding,
        "model_flops": 3 * 2 * tokens * WIDTH * WIDTH,
    }


def summed(step: int, world_size: int) -> dict[str, int]:
    ranks = [amounts_of(rank, step) for rank in range(world_size)]
    return {name: sum(rank[name] for rank in ranks) for name in ranks[0]}


def train_step(model: nn.Module, monitor: TrainingMonitor, rank: int, step: int) -> None:
    samples, length, padding = batch_of(rank, step)
    mask = torch.ones(samples, length, dtype=torch.long)
    mask[:, length - padding :] = 0
    model(torch.zeros(samples, length, dtype=torch.long), attention_mask=mask).backward()
    monitor.log_step(step, 0, 1.0, 1.0, 1.0)


def be_patient() -> None:
    """Wait for other ranks as long as a busy machine needs: what is tested is what they send, not when."""
    row_thread.SAVE_HOLD_S = live_module._RANKS_TIMEOUT_S = PATIENCE_S
    monitor_module._SAVE_TIMEOUT_S = live_module._ROWS_TIMEOUT_S = PATIENCE_S


def uneven(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    be_patient()
    model = nn.parallel.DistributedDataParallel(Layer())
    monitor = TrainingMonitor(folder, {"monitoring": {"peak_tflops": PEAK_TFLOPS}}, model=model)
    for step in range(1, STEPS + 1):
        train_step(model, monitor, rank, step)
        if step == 8:
            monitor.save_logs()
    dist.barrier()
    if DESTROYED in folder:
        dist.destroy_process_group()
        assert monitor._live is not None
        monitor._live._row_thread._wake.set()
        time.sleep(0.5)  # rows are looked at before the run ends
    monitor.close()
    return {"summary": monitor.summary()}


def hybrid(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    be_patient()
    model = nn.parallel.DistributedDataParallel(Layer())
    config = {"monitoring": {"peak_tflops": PEAK_TFLOPS, "mfu_calculation_mode": "hybrid"}}
    with TrainingMonitor(folder, config, model=model) as monitor:
        for step in range(1, STEPS + 1):
            train_step(model, monitor, rank, step)
        dist.barrier()
    return {}


def watched(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """The same with every use of the store and every collective noted, and a trace of the steps."""
    collectives: list[str] = []
    store_calls: list[tuple[str, int]] = []
    for name in COLLECTIVES:
        _noted(dist, name, lambda name: collectives.append(name))
    for kind in {dist.Store, dist.TCPStore, dist.PrefixStore}:
        for name in ("set", "get", "add", "check", "multi_get", "wait"):
            if name in vars(kind):
                _noted(kind, name, lambda name: store_calls.append((name, threading.get_ident())))
    model = nn.parallel.DistributedDataParallel(Layer())
    ids = torch.zeros(2, 4, dtype=torch.long)
    for _ in range(3):  # until DDP has arranged its buckets
        model(ids, attention_mask=torch.ones_like(ids)).backward()
    collectives.clear()
    store_calls.clear()
    found: dict[str, Any] = {}
    for is_monitored in (False, True):
        monitor = None
        if is_monitored:
            monitor = TrainingMonitor(folder, {"monitoring": {"peak_tflops": PEAK_TFLOPS}}, model=model)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
            for step in range(1, STEPS + 1):
                if monitor is not None:
                    train_step(model, monitor, rank, step)
                    time.sleep(0.2)
                else:
                    model(ids, attention_mask=torch.ones_like(ids)).backward()
            if monitor is not None:
                monitor.close()
        names = [event.name for event in trace.events() if "gloo:" in event.name or "c10d::" in event.name]
        found["with" if is_monitored else "without"] = sorted(names)
    own = threading.get_ident()
    return found | {
        "collectives": list(collectives),
        "store_calls": len(store_calls),
        "on_training_thread": [name for name, thread in store_calls if thread == own],
    }


def _noted(owner: Any, name: str, note: Callable[[str], None]) -> None:
    function = getattr(owner, name)

    def noting(*args: Any, **kwargs: Any) -> Any:
        note(name)
        return function(*args, **kwargs)

    setattr(owner, name, noting)


def lose_rank(rank: int, world_size: int, folder: str, how: str) -> dict[str, Any]:
    """Ranks train alone (no collective of theirs); the last one ends or stops after step 15."""
    be_patient()
    reporter_module.ROW_EVERY_S, reporter_module.FIRST_ROWS_S = 0.5, (0.5,)
    reporter_module._SEND_EVERY_S = 0.2
    model = Layer()
    monitor = TrainingMonitor(folder, {"monitoring": {"peak_tflops": PEAK_TFLOPS}}, model=model)
    for step in range(1, LOST_STEPS + 1):
        train_step(model, monitor, rank, step)
        if step == 10:
            dist.barrier()
            monitor.save_logs()
            dist.barrier()
            job_module.SILENT_S, held_module.HOLD_S = 2.0, 1.0
            row_thread.SAVE_HOLD_S = live_module._RANKS_TIMEOUT_S = 2.0
        if rank == world_size - 1 and step == 15:
            (Path(folder) / "lost.pid").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        if step > 15:
            time.sleep(0.1)
    monitor.close()
    return {"summary": monitor.summary()}


class Hanging:
    """A store whose calls do not return from some moment on."""

    def __init__(self, store: Any) -> None:
        self._store, self.hangs = store, False

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name not in ("set", "get", "add", "check", "multi_get"):
            return found

        def call(*args: Any) -> Any:
            while self.hangs:
                time.sleep(0.05)
            return found(*args)

        return call

    def clone(self) -> Any:
        return self


def store_hangs(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    import truemfu.monitor.ranks.store_thread as store_module

    be_patient()
    store_module.STUCK_S = 0.5
    hanging = Hanging(store_module._default_store())
    store_module._default_store = lambda: hanging  # type: ignore[assignment]
    model = Layer()
    monitor = TrainingMonitor(folder, {"monitoring": {"peak_tflops": PEAK_TFLOPS}}, model=model)
    for step in range(1, 41):
        train_step(model, monitor, rank, step)
        if step == 20:
            dist.barrier()
            monitor.save_logs()
            dist.barrier()
            hanging.hangs = True
        if step == 30:
            monitor.save_logs()
    monitor.close()
    found = {"summary": monitor.summary()}
    hanging.hangs = False
    for thread in threading.enumerate():
        if thread.name == "truemfu-store":  # Python must not end while a call of the store returns
            thread.join(PATIENCE_S)
    return found


SCENARIOS: dict[str, Callable[[int, int, str], dict[str, Any]]] = {
    "uneven": uneven,
    "hybrid": hybrid,
    "watched": watched,
    "killed": lambda *of: lose_rank(*of, "killed"),
    "stopped": lambda *of: lose_rank(*of, "stopped"),
    "store hangs": store_hangs,
}


def rank_process(name: str, rank: int, world_size: int, init: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world_size)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", TruemfuWarning)
        found = SCENARIOS[name](rank, world_size, folder)
    found["warned"] = [str(w.message) for w in warned if issubclass(w.category, TruemfuWarning)]
    partial = Path(folder) / f"{rank}.partial"
    partial.write_text(json.dumps(found))
    partial.rename(Path(folder) / f"{rank}.json")
    if rank == 0:  # it serves the store, so it goes last
        others = range(1, world_size - (name in ("killed", "stopped")))
        ends_s = time.monotonic() + TIME_LIMIT_S
        while not all((Path(folder) / f"{other}.json").exists() for other in others):
            assert time.monotonic() < ends_s
            time.sleep(0.02)
        if name == "stopped":
            os.kill(int((Path(folder) / "lost.pid").read_text()), signal.SIGKILL)


def job(folder: Path, name: str, world_size: int) -> tuple[list[int | None], dict[int, Any]]:
    init = free_address()
    arguments = [(name, rank, world_size, init, str(folder)) for rank in range(world_size)]
    return run_ranks(rank_process, arguments, folder, TIME_LIMIT_S)


def rank_rows(folder: Path) -> tuple[list[RankRow], list[str]]:
    files = list(read_files(folder))
    return [row for rows, _ in files for row in rows], [fault for _, faults in files for fault in faults]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "training_log.json").read_text())
    return found


@pytest.fixture(scope="module", params=[("uneven", 4), (DESTROYED, 2)], ids=["group", "group destroyed"])
def uneven_job(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, int, dict[int, Any]]:
    """Folder, number of ranks, and what each rank found."""
    folder, world_size = tmp_path_factory.mktemp(request.param[0]), request.param[1]
    codes, found = job(folder, "uneven", world_size)
    assert codes == [0] * world_size
    return folder, world_size, found


def test_uneven_batches_are_summed_to_the_integer(uneven_job: tuple[Path, int, dict[int, Any]]) -> None:
    folder, world_size, found = uneven_job
    assert [warned for rank in found.values() for warned in rank["warned"]] == []
    rows = rows_of(folder)
    assert [row["global_step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        expected, seconds = summed(row["global_step"], world_size), row["perf/step_time"]
        assert round(row["perf/tokens_per_second"] * seconds, 6) == expected["tokens"]
        assert round(row["perf/real_tokens_per_second"] * seconds, 6) == expected["useful_tokens"]
        assert round(row["perf/samples_per_second"] * seconds, 6) == expected["samples"]
        flops = row["perf/mfu"] * seconds * PEAK_TFLOPS * 1e12 * world_size
        assert round(flops, 3) == expected["model_flops"]
        own = amounts_of(0, row["global_step"])
        assert round(row["perf/tokens_per_second_per_gpu"] * seconds, 6) == own["tokens"]
    totals = found[0]["summary"]["totals"]
    over_all = [summed(step, world_size) for step in range(1, STEPS + 1)]
    for name in ("samples", "tokens", "useful_tokens", "model_flops"):
        assert totals[name] == sum(step[name] for step in over_all), name
        assert isinstance(totals[name], int)
    assert totals["is_complete"]
    assert found[0]["summary"]["scope"] == f"job of {world_size} ranks, summed"
    assert [rank["status"] for rank in found[0]["summary"]["ranks"]] == ["ended"] * world_size


def test_the_executed_flops_of_a_job_are_those_of_all_ranks(tmp_path: Path) -> None:
    codes, found = job(tmp_path, "hybrid", 2)
    assert codes == [0, 0]
    assert ["no hardware counters" in text for text in found[0]["warned"]] == [True]
    assert found[1]["warned"] == []
    last = rows_of(tmp_path)[-1]
    assert last["perf/hfu_method"] == "profiler"
    assert last["perf/hfu"] == pytest.approx(last["perf/mfu"], rel=0.05)  # nothing is recomputed


def test_every_rank_has_a_file_of_its_rows(uneven_job: tuple[Path, int, dict[int, Any]]) -> None:
    folder, world_size, _ = uneven_job
    rows, faults = rank_rows(folder)
    assert faults == []
    assert {row.rank for row in rows} == set(range(world_size))
    assert len(list((folder / "ranks").iterdir())) == world_size
    for rank in range(world_size):
        own = [row for row in rows if row.rank == rank]
        assert [row.number for row in own] == list(range(1, len(own) + 1))
        assert [row.is_last for row in own] == [False] * (len(own) - 1) + [True]
        assert own[-1].step == STEPS
        assert sum(row.steps for row in own) <= STEPS
        assert all(row.memory_bytes for row in own)
        assert any(row.step_time_s for row in own)


def test_no_collective_of_ours_and_no_store_call_on_the_training_thread(tmp_path: Path) -> None:
    codes, found = job(tmp_path, "watched", 2)
    assert codes == [0, 0]
    for rank in found.values():
        assert rank["collectives"] == []
        assert rank["with"] == rank["without"]  # DDP's own, in a Kineto trace
        assert len(rank["with"]) >= STEPS
        assert rank["on_training_thread"] == []
        assert rank["store_calls"] > 0


def test_a_killed_rank_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    codes, found = job(tmp_path, "killed", 3)
    assert codes == [0, 0, -signal.SIGKILL]
    check_lost_rank(tmp_path, found)


def test_a_stopped_rank_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    codes, found = job(tmp_path, "stopped", 3)
    assert codes == [0, 0, -signal.SIGKILL]  # by rank 0, once it has ended
    check_lost_rank(tmp_path, found)


def check_lost_rank(folder: Path, found: dict[int, Any]) -> None:
    summary = found[0]["summary"]
    assert [row["global_step"] for row in rows_of(folder)] == list(range(1, LOST_STEPS + 1))
    assert summary["ranks"][2]["status"] == "silent"
    assert summary["ranks"][2]["step"] in range(10, 16)
    assert [rank["status"] for rank in summary["ranks"][:2]] == ["ended", "ended"]
    (note,) = [note for note in summary["notes"] if "no last row" in note]
    assert note.startswith("rank 2 (")
    assert "silent since" in note
    assert re.search(r"ranks? .*\b2 missing", summary["scope"])
    assert not summary["totals"]["is_complete"]
    assert any("rank 2" in text and "silent" in text for text in found[0]["warned"])
    rows = {row["global_step"]: row for row in rows_of(folder)}
    assert round(rows[3]["perf/tokens_per_second"] * rows[3]["perf/step_time"]) == summed(3, 3)["tokens"]
    assert "perf/tokens_per_second" not in rows[LOST_STEPS]
    assert "perf/tokens_per_second_per_gpu" in rows[LOST_STEPS]
    assert {row.rank for row in rank_rows(folder)[0]} == {0, 1, 2}
    assert found[1]["warned"] == []


def test_a_store_that_hangs_costs_the_figures_of_the_job_alone(tmp_path: Path) -> None:
    codes, found = job(tmp_path, "store hangs", 2)
    assert codes == [0, 0]
    rows = rows_of(tmp_path)
    assert [row["global_step"] for row in rows] == list(range(1, 41))
    assert all("perf/tokens_per_second" in row for row in rows[:20])
    assert "perf/tokens_per_second" not in rows[25]
    assert "perf/mfu_per_gpu" in rows[25]
    assert found[0]["summary"]["totals"]["is_complete"]  # rank 1 left its last message in its file
    assert any("does not respond" in text for text in found[0]["warned"])
    assert {row.rank: row.step for row in rank_rows(tmp_path)[0] if row.is_last} == {0: 40, 1: 40}


def test_rows_of_an_earlier_attempt_stay_in_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "ranks"
    folder.mkdir()
    earlier = RankRow(rank=1, world_size=2, host="a", device="GPU-1", number=1, at_s=1.0, restart=0)
    later = RankRow(rank=0, world_size=1, host="a", device="GPU-1", number=1, at_s=2.0, restart=1)
    (folder / "a-GPU-1.jsonl").write_bytes(
        b"\n".join([msgspec.json.encode(earlier), msgspec.json.encode(later), b'{"rank":1,"wor'])
    )
    rows, faults = rank_rows(tmp_path)
    assert rows == [earlier, later]
    assert faults == ["a-GPU-1.jsonl: 1 lines cannot be read"]
