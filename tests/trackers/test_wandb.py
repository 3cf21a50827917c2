"""Real offline W&B runs, read back: every row of ours and of the program is there, whoever logs when."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from math import nan
from pathlib import Path
from typing import Any

import pytest
from tests.wandb_records import history, records

from truemfu.trackers import wandb as tracker_module
from truemfu.trackers.lane import Lane
from truemfu.trackers.wandb import WandbTracker

wandb = pytest.importorskip("wandb")

STEPS = 60
LATE = 10  # our rows come in batches of this many steps, after the program has logged all of them


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    yield
    if wandb.run is not None:
        wandb.run.finish()


def their_run(folder: Path, **more: Any) -> Any:
    return wandb.init(project="theirs", dir=folder, mode="offline", **more)


def ours(rows: list[dict[str, Any]]) -> list[int]:
    """The training steps of our rows, checked to be whole, in increasing order."""
    found = [row for row in rows if "global_step" in row]
    for row in found:
        assert row["training/loss"] == row["global_step"] / 2
        assert row["perf/mfu"] == 0.25
    return sorted(row["global_step"] for row in found)


def ours_at(step: int) -> dict[str, Any]:
    return {"training/loss": step / 2, "perf/mfu": 0.25, "perf/hfu": None}


def train(
    tracker: WandbTracker, program: Callable[[int], None], before: Callable[[int], None] | None = None
) -> None:
    """Steps of a program, with our rows behind."""
    for step in range(1, STEPS + 1):
        program(step)
        if step % LATE == 0:
            for late in range(step - LATE + 1, step + 1):
                tracker.log(late, ours_at(late))
        if before is not None:
            before(step)


def silent(step: int) -> None: ...


def without_step(step: int) -> None:
    wandb.log({"mine": step})


def at_training_step(step: int) -> None:
    wandb.log({"mine": step}, step=step)


def counted_from_zero(step: int) -> None:
    wandb.log({"mine": step}, step=step - 1)


def twice_at_a_step(step: int) -> None:
    wandb.log({"mine": step}, step=step)
    wandb.log({"also": step}, step=step)


def every_tenth_step(step: int) -> None:
    if step % 10 == 0:
        wandb.log({"mine": step}, step=step)


def committed(step: int) -> None:
    wandb.log({"mine": step}, step=step, commit=True)


def through_the_run(step: int) -> None:
    assert wandb.run is not None
    wandb.run.log({"mine": step}, step=step)


def epochs_from_the_start(step: int) -> None:
    if step % 20 == 1:
        wandb.log({"mine": step}, step=step // 20)


STEP_OF = {
    at_training_step: lambda step: step,
    counted_from_zero: lambda step: step - 1,
    twice_at_a_step: lambda step: step,
    every_tenth_step: lambda step: step,
    committed: lambda step: step,
    through_the_run: lambda step: step,
    epochs_from_the_start: lambda step: step // 20,
}
LOGGED = {
    silent: [],
    every_tenth_step: list(range(10, STEPS + 1, 10)),
    epochs_from_the_start: list(range(1, STEPS + 1, 20)),
}


@pytest.mark.parametrize("program", [silent, without_step, *STEP_OF], ids=lambda program: program.__name__)
def test_no_row_is_lost_or_moved_however_the_program_logs(
    program: Callable[[int], None], tmp_path: Path
) -> None:
    run = their_run(tmp_path)
    tracker = WandbTracker(tmp_path / "out")
    tracker.start({"method": "count"})
    train(tracker, program)
    tracker.finish({"mfu": 0.25})
    run.finish()
    rows = history(tmp_path)
    assert ours(rows) == list(range(1, STEPS + 1))
    theirs = [row for row in rows if "mine" in row]
    assert [row["mine"] for row in theirs] == LOGGED.get(program, list(range(1, STEPS + 1)))
    if program in STEP_OF:
        assert [row["_step"] for row in theirs] == [STEP_OF[program](row["mine"]) for row in theirs]
    assert not any("truemfu/user_step" in row for row in rows)
    if program is twice_at_a_step:
        assert [row["also"] for row in theirs] == [row["mine"] for row in theirs]


@pytest.mark.parametrize(
    "step_of",
    [lambda step: step - 1, lambda step: step - 1 if step % 10 == 0 else None],
    ids=["from zero", "every tenth from zero"],
)
def test_the_programs_rows_stay_where_they_are_when_ours_come_first(
    step_of: Callable[[int], int | None], tmp_path: Path
) -> None:
    run = their_run(tmp_path)
    tracker = WandbTracker(tmp_path / "out")
    tracker.start({})
    for step in range(1, STEPS + 1):
        tracker.log(step, ours_at(step))
        if step_of(step) is not None:
            wandb.log({"mine": step}, step=step_of(step))
    tracker.finish({})
    run.finish()
    rows = history(tmp_path)
    assert ours(rows) == list(range(1, STEPS + 1))
    assert [(row["mine"], row["_step"]) for row in rows if "mine" in row] == [
        (step, step_of(step)) for step in range(1, STEPS + 1) if step_of(step) is not None
    ]


def test_no_row_is_lost_while_the_program_logs_every_step_and_a_lane_writes(tmp_path: Path) -> None:
    run = their_run(tmp_path)
    lane = Lane(WandbTracker(tmp_path / "out"), "wandb", notice=pytest.fail)
    lane.start({})
    assert lane.flush() is None
    assert lane.wait_until_idle(30)

    def wake(step: int) -> None:
        if step % LATE == 0:
            lane.wake()

    class ThroughLane:
        log = staticmethod(lane.put)

    train(ThroughLane(), at_training_step, before=wake)  # type: ignore[arg-type]
    lane.close({}, timeout_s=30)
    wandb.log({"after": 1.0}, step=STEPS)
    run.finish()
    rows = history(tmp_path)
    assert ours(rows) == list(range(1, STEPS + 1))
    assert [(row["_step"], row["mine"]) for row in rows if "mine" in row] == [
        (step, step) for step in range(1, STEPS + 1)
    ]
    assert [row["_step"] for row in rows if "after" in row] == [STEPS]


def test_a_row_left_open_by_the_program_is_not_split(tmp_path: Path) -> None:
    run = their_run(tmp_path)
    tracker = WandbTracker(tmp_path / "out")
    tracker.start({})
    train(
        tracker,
        lambda step: wandb.log({"mine": step}, commit=False),
        before=lambda step: wandb.log({"also": step}),
    )
    tracker.finish({})
    run.finish()
    rows = history(tmp_path)
    assert ours(rows) == list(range(1, STEPS + 1))
    assert [(row["mine"], row["also"]) for row in rows if "mine" in row or "also" in row] == [
        (step, step) for step in range(1, STEPS + 1)
    ]


def test_all_rows_of_an_epoch_below_the_counter_are_kept(tmp_path: Path) -> None:
    run = their_run(tmp_path)
    tracker = WandbTracker(tmp_path / "out")
    tracker.start({})
    for epoch in range(3):
        for step in range(20 * epoch + 1, 20 * epoch + 21):
            tracker.log(step, ours_at(step))
        wandb.log({"train": epoch}, step=epoch)
        wandb.log({"validation": epoch}, step=epoch)
        wandb.log({"last": epoch}, step=epoch, commit=True)
    tracker.finish({})
    run.finish()
    rows = history(tmp_path)
    assert ours(rows) == list(range(1, 61))
    for key in ("train", "validation", "last"):
        assert [(row[key], row["truemfu/user_step"]) for row in rows if key in row] == [
            (epoch, epoch) for epoch in range(3)
        ]


def test_a_row_that_wandb_drops_does_not_count_as_a_step_of_the_program(tmp_path: Path) -> None:
    run = their_run(tmp_path)
    tracker = WandbTracker(tmp_path / "out")
    tracker.start({})
    for step in range(1, 11):
        tracker.log(step, ours_at(step))
    wandb.log({"mine": 1}, step=5)
    wandb.log({"mine": 2}, step=3, commit=True)  # in the past, whoever else logs
    wandb.log({"mine": 3}, step=5)
    tracker.finish({})
    run.finish()
    rows = history(tmp_path)
    assert [(row["mine"], row["truemfu/user_step"]) for row in rows if "mine" in row] == [(1, 5), (3, 5)]
    assert ours(rows) == list(range(1, 11))


def test_a_row_the_program_itself_puts_in_the_past_is_left_to_wandb(tmp_path: Path) -> None:
    run = their_run(tmp_path)
    tracker = WandbTracker(tmp_path / "out")
    tracker.start({})
    wandb.log({"mine": 1}, step=100)
    tracker.log(1, ours_at(1))
    wandb.log({"mine": 2}, step=50)
    wandb.log({"mine": 3}, step=101)
    tracker.finish({})
    run.finish()
    rows = history(tmp_path)
    assert [row["mine"] for row in rows if "mine" in row] == [1, 3]
    assert ours(rows) == [1]


def test_a_program_that_uses_our_names_keeps_its_values_and_we_ours(tmp_path: Path) -> None:
    run = their_run(tmp_path)
    tracker = WandbTracker(tmp_path / "out")
    tracker.start({})
    train(tracker, lambda step: wandb.log({"mine": step, "global_step": -step}, step=step))
    tracker.finish({})
    run.finish()
    rows = history(tmp_path)
    assert [row["global_step"] for row in rows if "mine" in row] == [-step for step in range(1, STEPS + 1)]
    assert ours([row for row in rows if "mine" not in row]) == list(range(1, STEPS + 1))


def test_our_metrics_have_the_training_step_as_their_axis_and_the_programs_do_not(tmp_path: Path) -> None:
    run = their_run(tmp_path)
    tracker = WandbTracker(tmp_path / "out")
    tracker.start({"method": "count", "convention": {"attention": "full"}})
    tracker.log(1, {"training/loss": nan, "mfu(%)": 25.0, "perf/hfu": None})
    wandb.log({"training/mine": 1})
    tracker.finish({"mfu": 0.25})
    run.finish()
    axes = {record["name"]: record.get("step_metric") for record in records(tmp_path, "metric")}
    assert axes == {"global_step": None, "training/loss": "global_step", "mfu(%)": "global_step"}
    (row,) = [row for row in history(tmp_path) if "global_step" in row]
    assert row["training/loss"] == "NaN"
    updates = [record["update"] for record in records(tmp_path, "config")]
    assert {"truemfu": {"method": "count", "convention": {"attention": "full"}}} in updates
    summaries = [record["update"] for record in records(tmp_path, "summary")]
    assert any(update.get("truemfu") == {"mfu": 0.25} for update in summaries), summaries


def test_datasets_may_be_called_anything(tmp_path: Path) -> None:
    tracker = WandbTracker(tmp_path)
    tracker.start({})
    names = ["/data/c4.jsonl", "", "c4*", "c4_", "a.b", "a\\b", "\udcff", "\udcfe", "x" * 300]
    tracker.log(1, {f"dataset/{name}/loss": float(at) for at, name in enumerate(names)} | {"*": 9.0})
    tracker.finish({})
    (row,) = history(tmp_path)
    assert sorted(value for key, value in row.items() if key.startswith("dataset")) == [*range(9)]
    assert (row["dataset/c4_/loss"], row["dataset/?/loss"], row["_"]) == (2, 6, 9)
    axes = {record["name"]: record.get("step_metric") for record in records(tmp_path, "metric")}
    assert len(axes) == 11
    assert set(axes.values()) == {None, "global_step"}


def test_more_rows_than_may_wait_go_to_a_second_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker_module, "_MAX_WAITING", 25)
    run = their_run(tmp_path, name="big", group="g")
    wandb.log({"mine": 0}, step=0)
    tracker = WandbTracker(tmp_path / "out")
    tracker.start({"method": "count"})
    train(tracker, lambda step: wandb.log({"mine": step}, step=step) if step % 20 == 0 else None)
    assert wandb.run is run
    tracker.finish({})
    run.finish()
    first, second = history(tmp_path), history(tmp_path / "out")
    assert sorted(ours(first) + ours(second)) == list(range(1, STEPS + 1))
    assert [row["_step"] for row in first if "mine" in row] == [0, 20, 40, 60]
    assert len(ours(second)) > 25
    (about,) = records(tmp_path / "out", "run")
    assert (about["project"], about["display_name"], about["run_group"], about["job_type"]) == (
        "theirs", "big-truemfu", "g", "truemfu",
    )  # fmt: skip


def test_without_an_open_run_ours_is_apart_from_the_one_the_program_opens_later(tmp_path: Path) -> None:
    tracker = WandbTracker(tmp_path / "out")
    tracker.start({"method": "count"})
    assert wandb.run is None
    run = their_run(tmp_path)
    train(tracker, at_training_step)
    tracker.finish({"mfu": 0.25})
    run.finish()
    assert ours(history(tmp_path / "out")) == list(range(1, STEPS + 1))
    assert [row["_step"] for row in history(tmp_path)] == list(range(1, STEPS + 1))
    (about,) = records(tmp_path / "out", "run")
    assert about["project"] == "truemfu"


def test_rows_on_their_way_are_awaited_when_the_program_ends_its_run(tmp_path: Path) -> None:
    tracker = WandbTracker(tmp_path / "out")
    with their_run(tmp_path):
        tracker.start({})
        tracker.before_end = lambda: tracker.log(2, ours_at(2))
        tracker.log(1, ours_at(1))
        wandb.log({"mine": 5}, step=5)
    assert ours(history(tmp_path)) == [1, 2]
    with pytest.raises(RuntimeError, match="finished its W&B run before the monitor"):
        tracker.log(3, ours_at(3))
    tracker.finish({})


SCRIPT = """
import sys, wandb
from pathlib import Path
from truemfu.trackers.wandb import WandbTracker
run = wandb.init(project="theirs", dir=sys.argv[1], mode="offline")
tracker = WandbTracker(Path(sys.argv[1]) / "out")
tracker.start({})
for step in range(1, 31):
    wandb.log({"mine": step}, step=step)
    tracker.log(step, {"training/loss": step / 2, "perf/mfu": 0.25})
for step in range(31, 41):
    tracker.log(step, {"training/loss": step / 2, "perf/mfu": 0.25})
"""


def run_program(script: str, folder: Path) -> int:
    # Not with the service of this process, which would not be told that the program has ended.
    environment = {key: value for key, value in os.environ.items() if key != "WANDB_SERVICE"}
    command = [sys.executable, "-c", script, str(folder)]
    return subprocess.run(command, timeout=120, env=environment).returncode


def test_a_program_that_just_ends_loses_nothing(tmp_path: Path) -> None:
    assert run_program(SCRIPT, tmp_path) == 0
    rows = history(tmp_path)
    assert ours(rows) == list(range(1, 41))
    assert [row["_step"] for row in rows if "mine" in row] == list(range(1, 31))


# The monitor's exit hook is older than W&B's: here it is the first function that is registered.
OWN_SCRIPT = """
import atexit, sys
from pathlib import Path
from truemfu.trackers.lane import Lane
from truemfu.trackers.wandb import WandbTracker
tracker = WandbTracker(Path(sys.argv[1]))
lane = Lane(tracker, "wandb", notice=sys.exit)
def put(step):
    lane.put(step, {"training/loss": step / 2, "perf/mfu": 0.25})
def save():
    put(2)
    lane.flush()
    assert lane.wait_until_idle(60)
def close():
    save()
    lane.close({"mfu": 0.25}, 60)
    assert lane.lost_rows == 0 and lane.error is None
atexit.register(close)
lane.start({})
put(1)
lane.flush()
assert lane.wait_until_idle(60)
"""


@pytest.mark.parametrize("hook", ["before_end = save", "at_exit = close"])
def test_a_program_that_just_ends_loses_nothing_of_a_run_of_ours(hook: str, tmp_path: Path) -> None:
    script = OWN_SCRIPT.replace("    save()\n", "") if "save" in hook else OWN_SCRIPT
    assert run_program(f"{script}\ntracker.{hook}\nsys.exit(3)", tmp_path) == 3
    assert ours(history(tmp_path)) == [1, 2]
    assert [record["exit_code"] for record in records(tmp_path, "exit")] == [3]
    if "close" in hook:
        summaries = [record["update"] for record in records(tmp_path, "summary")]
        assert any(update.get("truemfu") == {"mfu": 0.25} for update in summaries), summaries


def test_a_forked_worker_that_logs_does_not_wait_for_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    their_run(tmp_path)
    tracker = WandbTracker(tmp_path / "out")
    tracker.start({})
    shared = tracker._shared
    assert shared is not None
    seen: list[Any] = []
    monkeypatch.setattr(shared, "_plain_log", lambda *args: seen.append(args))
    with shared._lock:
        if (child := os.fork()) == 0:
            wandb.log({"mine": 1}, step=1)
            os._exit(0 if seen == [({"mine": 1}, 1, None)] else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_the_program_is_held_up_a_moment_at_most_where_a_row_of_ours_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("truemfu.trackers.wandb_shared._LONGEST_WAIT_S", 0.1)
    run = their_run(tmp_path)
    tracker = WandbTracker(tmp_path / "out")
    tracker.start({})
    shared = tracker._shared
    assert shared is not None
    release = threading.Event()
    plain = shared._plain_log
    shared._plain_log = lambda *args, **options: release.wait(30)
    tracker.log(1, ours_at(1))
    stuck = threading.Thread(target=tracker.log, args=(2, ours_at(2)))
    stuck.start()
    shared._plain_log = plain
    wandb.log({"mine": 1})
    assert stuck.is_alive()
    release.set()
    stuck.join()
    run.finish()
    assert [row["mine"] for row in history(tmp_path) if "mine" in row] == [1]


def test_a_disabled_run_takes_rows_and_does_nothing(tmp_path: Path) -> None:
    with wandb.init(mode="disabled"):
        tracker = WandbTracker(tmp_path / "out")
        tracker.start({})
        train(tracker, at_training_step)
        tracker.finish({})
    assert list(tmp_path.glob("**/*.wandb")) == []


def test_without_a_login_our_run_stays_offline_and_nobody_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    tracker = WandbTracker(tmp_path / "out")
    tracker.start({})
    tracker.log(1, ours_at(1))
    tracker.finish({})
    assert ours(history(tmp_path / "out")) == [1]
