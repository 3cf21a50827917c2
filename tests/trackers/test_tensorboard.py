"""A real event file, read back with TensorBoard's own reader."""

from __future__ import annotations

from math import inf, isnan, nan
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from truemfu.trackers.tensorboard import TensorBoardTracker


def read(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return events


def scalars(events: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events.Scalars(tag)]


def texts(events: EventAccumulator, tag: str) -> list[tuple[int, str]]:
    return [
        (event.step, event.tensor_proto.string_val[0].decode())
        for event in events.Tensors(f"{tag}/text_summary")
    ]


def test_every_number_is_at_its_own_step(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path)
    tracker.start({"method": "count"})
    for step in (7, 8, 50):
        tracker.log(
            step, {"global_step": step, "training/loss": step / 2, "perf/mfu": None if step == 8 else 0.25}
        )
    tracker.flush()
    before = read(tracker.path)
    assert scalars(before, "training/loss") == [(7, 3.5), (8, 4.0), (50, 25.0)]
    assert scalars(before, "perf/mfu") == [(7, 0.25), (50, 0.25)]
    tracker.finish({"mfu": 0.25})
    assert '"method": "count"' in texts(read(tracker.path), "truemfu/run")[0][1]
    assert '"mfu": 0.25' in texts(read(tracker.path), "truemfu/summary")[0][1]


def test_odd_values_are_passed_on_as_they_are(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path)
    tracker.start({})
    tracker.log(1, {"training/loss": nan, "training/grad_norm": inf, "perf/warmup": True})
    tracker.log(2, {"perf/warmup": False})
    tracker.finish({})
    events = read(tracker.path)
    ((step, loss),) = scalars(events, "training/loss")
    assert step == 1
    assert isnan(loss)
    assert scalars(events, "training/grad_norm") == [(1, inf)]
    assert scalars(events, "perf/warmup") == [(1, 1.0), (2, 0.0)]


def test_a_string_is_written_when_it_changes(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path)
    tracker.start({})
    for step, method in enumerate(["estimate", "estimate", "count", "count"], start=1):
        tracker.log(step, {"perf/method": method})
    tracker.finish({})
    assert texts(read(tracker.path), "perf/method") == [(1, "estimate"), (3, "count")]


def test_a_restarted_run_adds_to_the_folder(tmp_path: Path) -> None:
    for step in (1, 2):
        tracker = TensorBoardTracker(tmp_path)
        tracker.start({})
        tracker.log(step, {"training/loss": 0.5})
        tracker.finish({})
    found = [scalars(read(file), "training/loss") for file in sorted(tracker.path.iterdir())]
    assert sorted(found) == [[(1, 0.5)], [(2, 0.5)]]


def test_datasets_may_be_called_anything(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path)
    tracker.start({})
    names = ["/data/c4.jsonl", "", "c4*", "\udcff", "\udcfe", "x" * 300]
    tracker.log(1, {f"dataset/{name}/loss": float(at) for at, name in enumerate(names)})
    tracker.finish({})
    events = read(tracker.path)
    tags = events.Tags()["scalars"]
    assert sorted(scalars(events, tag)[0][1] for tag in tags) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert scalars(events, "dataset/?/loss") == [(1, 3.0)]
