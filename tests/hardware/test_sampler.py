"""The sampler: what it keeps, what it survives, and that it ends."""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.hardware.recorded import MATMUL, TRAINING, TROUBLE, played, together, window_of
from tests.waiting import FOREVER_S, wait_until

from truemfu.errors import CounterError, ReplayEnded, UsageError
from truemfu.hardware.counters import sampler as sampler_module
from truemfu.hardware.counters.sampler import Sampler
from truemfu.hardware.counters.samples import CounterSample, CounterSource, GpuInfo
from truemfu.hardware.counters.trace import Replay


@contextlib.contextmanager
def running(source: CounterSource, *, period_s: float) -> Iterator[Sampler]:
    """A sampler whose thread reads meanwhile."""
    sampler = Sampler(source, period_s=period_s)
    sampler.start()
    try:
        yield sampler
    finally:
        sampler.stop()


class Fake:
    """A GPU whose every read is what `answer` makes of its number."""

    def __init__(self, answer: Callable[[int], CounterSample]) -> None:
        self.answer = answer
        self.reads = 0

    def gpus(self) -> Sequence[GpuInfo]:
        return [GpuInfo(index=0, name="NVIDIA H200")]

    def read(self, index: int) -> CounterSample:
        self.reads += 1
        return self.answer(self.reads)

    def close(self) -> None: ...


def good(read: int, **values: float) -> CounterSample:
    return CounterSample(index=0, at_s=float(read), tensor_active=values.get("tensor_active", 0.5))


def metered(read: int, energy_j: float | None = None, *, fresh: bool = True) -> CounterSample:
    return CounterSample(index=0, at_s=float(read), energy_j=energy_j, fresh=fresh)


def listed(samples: Sequence[CounterSample]) -> Sampler:
    sampler = Sampler(Fake(lambda read: samples[read - 1]), keep=4)
    for _ in samples:
        sampler.poll()
    return sampler


def bad_at(trouble: dict[int, Callable[[], CounterSample]]) -> Callable[[int], CounterSample]:
    return lambda read: trouble[read]() if read in trouble else good(read)


def raises(error: Exception) -> Callable[[], CounterSample]:
    def fail() -> CounterSample:
        raise error

    return fail


def test_each_pair_of_reads_makes_an_interval() -> None:
    sampler = Sampler(Fake(good))
    assert sampler.latest(0) is None
    for _ in range(4):
        assert sampler.poll()
    assert [(part.begin_s, part.end_s) for part in sampler.intervals(0)] == [(1, 2), (2, 3), (3, 4)]
    assert sampler.latest(0) == sampler.intervals(0)[-1]
    window = window_of(sampler, 1.5, 4.0, lag_s=0.0)
    assert window is not None
    assert (window.begin_s, window.end_s, window.seconds) == (1.5, 4.0, 2.5)


def test_memory_does_not_grow() -> None:
    sampler = Sampler(Fake(good), keep=5)
    for _ in range(100):
        sampler.poll()
    assert [part.end_s for part in sampler.intervals(0)] == [96, 97, 98, 99, 100]
    assert sampler.health(0).intervals == 99


def test_a_read_without_news_is_no_interval_and_no_fault() -> None:
    sampler = listed([good(1), metered(2, fresh=False), good(3), metered(4, fresh=False)])
    assert [(part.begin_s, part.end_s) for part in sampler.intervals(0)] == [(1, 3)]
    health = sampler.health(0)
    assert (health.intervals, health.dropped, health.fault) == (1, 0, None)
    assert sampler.latest(0) is not None, "the last interval is as good as before"


def test_a_read_without_news_begins_nothing_and_ends_no_fault() -> None:
    trouble = bad_at({2: raises(CounterError("lost")), 3: lambda: metered(3, fresh=False)})
    sampler = Sampler(Fake(trouble))
    for _ in range(4):
        sampler.poll()
    assert (sampler.intervals(0), sampler.health(0).fault) == ([], "lost")
    sampler.poll()
    assert [(part.begin_s, part.end_s) for part in sampler.intervals(0)] == [(4, 5)]


def test_a_reading_of_the_energy_fills_the_intervals_before_it() -> None:
    samples = [metered(0, 100.0), metered(1), metered(2), metered(4, 500.0), metered(5)]
    sampler = listed(samples)
    assert [part.energy_j for part in sampler.intervals(0)] == [100.0, 100.0, 200.0, None]
    assert [part.end_s for part in sampler.intervals(0)] == [1, 2, 4, 5]


def test_of_the_intervals_before_a_reading_those_that_are_kept_are_filled() -> None:
    sampler = listed([metered(0, 0.0), *map(metered, range(1, 8)), metered(8, 800.0)])
    assert [part.end_s for part in sampler.intervals(0)] == [5, 6, 7, 8]
    assert [part.energy_j for part in sampler.intervals(0)] == [100.0] * 4
    assert sampler.health(0).intervals == 8


def test_no_energy_spans_trouble() -> None:
    lost: dict[int, Callable[[], CounterSample]] = {
        1: lambda: metered(1, 0.0),
        2: lambda: metered(2),
        3: raises(CounterError("lost")),
        4: lambda: metered(4),
        5: lambda: metered(5, 900.0),
        6: lambda: metered(6, 1000.0),
    }
    sampler = Sampler(Fake(bad_at(lost)))
    for _ in lost:
        sampler.poll()
    parts = {part.end_s: part.energy_j for part in sampler.intervals(0)}
    assert parts == {2.0: None, 5.0: None, 6.0: 100.0}


def test_an_energy_counter_that_goes_backwards_is_a_fault_wherever_it_was_read_last() -> None:
    sampler = listed([metered(0, 100.0), metered(1), metered(2, 50.0)])
    assert sampler.health(0).fault == "the energy counter went backwards by 50 J"
    assert [part.energy_j for part in sampler.intervals(0)] == [None]


@pytest.mark.parametrize(
    ("trouble", "words", "lost"),
    [
        (raises(CounterError("GPU is lost")), "GPU is lost", 2),
        (raises(OSError("libnvidia-ml went away")), "unexpected OSError: libnvidia-ml went away", 2),
        (lambda: good(3, tensor_active=math.nan), "tensor_active is nan", 1),
        (lambda: good(3, tensor_active=1.2), "tensor_active is 1.2", 1),
        (lambda: good(3, tensor_active=-0.1), "tensor_active is -0.1", 1),
        (lambda: good(1), "time went backwards", 1),
    ],
)
def test_trouble_costs_the_intervals_it_touches_and_is_counted(
    trouble: Callable[[], CounterSample], words: str, lost: int
) -> None:
    sampler = Sampler(Fake(bad_at({3: trouble})))
    for _ in range(3):
        assert sampler.poll()
    health = sampler.health(0)
    assert health.dropped == 1
    assert words in (health.fault or "")
    assert sampler.latest(0) is None, "an old interval does not pass for the present"
    for _ in range(3):
        assert sampler.poll()
    assert sampler.health(0).fault is None
    assert sampler.health(0).intervals == 5 - lost
    assert sampler.latest(0) is not None


def test_the_trace_of_troubles_keeps_its_good_intervals() -> None:
    sampler = played(TROUBLE)
    spans = [(part.begin_s, part.end_s) for part in sampler.intervals(0)]
    assert spans == [(1, 2), (3, 4), (7, 8), (7.5, 9.5), (9.5, 10.5), (13.5, 14.5)]
    health = sampler.health(0)
    assert health.dropped == 7
    assert health.stopped == "the trace has no more samples of GPU 0"


def test_one_gpu_of_several(tmp_path: Path) -> None:
    sampler = played(together(tmp_path / "two.jsonl", MATMUL, TRAINING, rounds=8), indices=[1])
    assert [gpu.index for gpu in sampler.gpus()] == [1]
    assert len(sampler.intervals(1)) == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"indices": [3]}, "no GPU 3"),
    ],
)
def test_wrong_arguments_are_said(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Sampler(Fake(good), **arguments)  # type: ignore[arg-type]


def test_the_thread_reads_until_it_is_stopped() -> None:
    source = Fake(good)
    with running(source, period_s=0.005) as sampler:
        wait_until(lambda: sampler.health(0).intervals >= 5)
        assert any(thread.name == "truemfu-counters" and thread.daemon for thread in threading.enumerate())
    reads = source.reads
    time.sleep(0.05)
    assert source.reads == reads
    assert not any(thread.name == "truemfu-counters" for thread in threading.enumerate())


class Waits:
    """In place of the event that wakes the thread: a clock that each wait advances by its timeout."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.timeouts_s: list[float] = []

    def wait(self, timeout_s: float) -> None:
        self.timeouts_s.append(timeout_s)
        self.now_s += timeout_s

    def clear(self) -> None: ...

    def set(self) -> None: ...


def times_of_reads(
    monkeypatch: pytest.MonkeyPatch,
    *,
    number: int,
    period_s: float,
    asked: dict[int, float],
    takes_s: float = 0,
) -> tuple[list[float], list[float]]:
    """When so many reads begin, and how long is waited; in some of them another one is asked for."""
    waits = Waits()
    monkeypatch.setattr(sampler_module, "time", SimpleNamespace(monotonic=lambda: waits.now_s))
    times_s: list[float] = []

    def answer(read: int) -> CounterSample:
        if read > number:
            raise ReplayEnded("no more")
        times_s.append(waits.now_s - 100.0)
        waits.now_s += takes_s
        if read in asked:
            sampler.read_soon(asked[read])
        return good(read)

    sampler = Sampler(Fake(answer), period_s=period_s)
    monkeypatch.setattr(sampler, "_wake", waits)
    sampler._run()
    return times_s, waits.timeouts_s[: number - 1]


def test_a_read_that_is_asked_for_comes_between_the_usual_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    times_s, waits_s = times_of_reads(monkeypatch, number=4, period_s=60, asked={1: 0.5, 2: 0.25})
    assert times_s == [0, 0.5, 0.75, 60]
    assert waits_s == [0.5, 0.25, 59.25]  # it waits, it does not ask


def test_usual_reads_go_on_as_they_were_beside_those_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    times_s, _ = times_of_reads(monkeypatch, number=4, period_s=1, asked={1: 0.5})
    assert times_s == [0, 0.5, 1, 2]  # and not a period after the one asked for


def test_a_slow_read_is_followed_by_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    times_s, _ = times_of_reads(monkeypatch, number=3, period_s=1, asked={}, takes_s=1.5)
    assert times_s == [0, 2.5, 5]


def test_a_request_wakes_the_thread_and_so_does_the_end() -> None:
    source = Fake(good)
    with running(source, period_s=3600) as sampler:
        wait_until(lambda: source.reads == 1)
        sampler.read_soon(0.01)
        wait_until(lambda: source.reads == 2)
    assert not any(thread.name == "truemfu-counters" for thread in threading.enumerate())


def test_the_thread_survives_every_kind_of_error() -> None:
    errors: list[Exception] = [CounterError("lost"), ValueError("odd"), MemoryError(), RuntimeError("x")]
    source = Fake(bad_at({n: raises(error) for n, error in enumerate(errors, 2)}))
    with running(source, period_s=0.002) as sampler:
        wait_until(lambda: sampler.health(0).intervals >= 3)
        assert sampler.health(0).dropped == 4


def test_the_thread_ends_with_the_trace(tmp_path: Path) -> None:
    trace = together(tmp_path / "two.jsonl", MATMUL, TRAINING, rounds=8)
    sampler = Sampler(Replay(trace), period_s=0.001)
    sampler.start()
    wait_until(lambda: sampler.health(0).stopped is not None and sampler.health(1).stopped is not None)
    sampler.stop()
    assert len(sampler.intervals(0)) == 7


def test_a_read_that_hangs_in_the_driver_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truemfu.hardware.counters.sampler._JOIN_S", 0.05)
    hang = threading.Event()

    def hanging(read: int) -> CounterSample:
        hang.wait(FOREVER_S)
        return good(read)

    sampler = Sampler(Fake(hanging), period_s=0.01)
    sampler.start()
    sampler.stop()
    assert sampler._thread is not None
    assert sampler._thread.is_alive()  # it was not waited for
    hang.set()


def test_while_a_read_hangs_old_figures_do_not_pass_for_the_present(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truemfu.hardware.counters.sampler._HANG_TIMEOUT_S", 0.05)
    hang = threading.Event()

    def hanging(read: int) -> CounterSample:
        if read == 4:
            hang.wait(FOREVER_S)
        return good(read)

    with running(Fake(hanging), period_s=0.005) as sampler:
        wait_until(lambda: sampler.hanging() is not None)
        assert (sampler.health(0).fault or "").startswith("the driver has not answered for ")
        assert sampler.latest(0) is None
        assert sampler.health(0).intervals == 2
        hang.set()
        wait_until(lambda: sampler.health(0).intervals >= 3)
        assert (sampler.hanging(), sampler.health(0).fault) == (None, None)
        assert sampler.latest(0) is not None


def test_the_thread_ends_with_the_process_even_in_the_middle_of_a_read() -> None:
    program = """
import time
from truemfu.hardware.counters.samples import GpuInfo
from truemfu.hardware.counters.sampler import Sampler

class Hanging:
    def gpus(self): return [GpuInfo(index=0, name="x")]
    def read(self, index): time.sleep(60)
    def close(self): pass

Sampler(Hanging(), period_s=0.01).start()
time.sleep(0.05)
print("done")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=FOREVER_S)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")


def test_reading_needs_neither_torch_nor_the_driver() -> None:
    program = "import sys, truemfu.hardware.counters.sampler; print({'torch', 'pynvml'} & set(sys.modules))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=FOREVER_S)
    assert ended.stdout.strip() == "set()"
