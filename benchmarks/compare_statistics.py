"""How often `truemfu compare` is wrong: equal runs reported as slower, and slow-downs of 5 % not found.

Pairs of equal runs are made from noise, and B's steps then take 5 % longer. A pair counts as reported when
its verdict is "slower", with the settings of the command. The noise is
  CPU, recorded    step times of one training on a shared machine, each run in its own process
                   (compare_noise.py). A run is `calm` if the load average at its end was below 3, or `busy`.
                   Pairs are all pairs of calm runs, and busy runs that followed one another
  CPU alone        the same on a machine that does nothing else: all pairs of runs, and four runs each of
                   eight that followed one another, in turn or first all of one side
  H200, …          two trainings on a GPU, each of which keeps it busy: pairs are all pairs of runs
  H200, resampled  longer runs of 16 experiments (results/sweep_h200), made of blocks of ten consecutive steps
                   of each; what differs between runs is not in it. Those whose steps vary by less than 5 %
                   are shown apart: most others are bound by the host, and their steps have several levels
  synthetic        seeded processes with known properties
A row that is marked `ok` has at most 5 % false alarms and finds at least 95 %; the run length it states is
what that takes. Rows that do not reach it are shown too. Exits 1 if a row that reached it before does not.

    python benchmarks/compare_statistics.py
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from truemfu.report.compare.compare import CONFIDENCE, RUN_TO_RUN, RUN_TO_RUN_ON_CPU
from truemfu.report.compare.intervals import Estimate, median_of, ratio_of

RESULTS = Path(__file__).parent / "results"
SLOW_DOWN = 1.05
STEADY = 0.05
CALM_LOAD = 3.0
SYNTHETIC_RUNS = 60
MOST_FALSE, FEWEST_FOUND = 0.05, 0.95

Runs = Sequence[Estimate]
Pair = tuple[Runs, Runs]


@dataclass(frozen=True)
class Line:
    """One row of the table."""

    noise: str
    design: str
    steps: int
    pairs: int
    false_alarms: float
    found: float
    is_claimed: bool

    @property
    def is_good(self) -> bool:
        return self.false_alarms <= MOST_FALSE and self.found >= FEWEST_FOUND

    def text(self) -> str:
        result = "ok" if self.is_good else "MISSED" if self.is_claimed else "-"
        return (
            f"{self.noise:36} {self.design:11} {self.steps:>6,} {self.pairs:>6,} {self.false_alarms:>8.1%} "
            f"{self.found:>8.1%}  {result}"
        )


def is_slower(first: Runs, second: Runs, run_to_run: float) -> bool:
    return ratio_of(first, second, confidence=CONFIDENCE, run_to_run=run_to_run).low > 1


def slowed(run: Estimate) -> Estimate:
    """The run with steps that take 5 % longer: medians and quantiles scale with their steps."""
    return Estimate(
        value=SLOW_DOWN * run.value,
        low=SLOW_DOWN * run.low,
        high=SLOW_DOWN * run.high,
        steps=run.steps,
        independent_steps=run.independent_steps,
    )


def line(noise: str, design: str, steps: int, pairs: Iterable[Pair], *, is_claimed: bool) -> Line:
    assumed = RUN_TO_RUN_ON_CPU if noise.startswith("CPU") else RUN_TO_RUN
    results = [
        (is_slower(a, b, assumed), is_slower(a, [slowed(run) for run in b], assumed)) for a, b in pairs
    ]
    false_alarms, found = (sum(column) / len(results) for column in zip(*results, strict=True))
    return Line(noise, design, steps, len(results), false_alarms, found, is_claimed)


def parts(times: Sequence[float], steps: int) -> list[Estimate]:
    """The whole parts of a run with so many steps."""
    return [median_of(times[at : at + steps], CONFIDENCE) for at in range(0, len(times) - steps + 1, steps)]


def every_pair(runs: Sequence[Sequence[Estimate]]) -> list[Pair]:
    """Parts of different runs, in both orders."""
    return [([a], [b]) for one in runs for other in runs if one is not other for a in one for b in other]


def recorded_lines(recording: dict[str, object]) -> Iterable[Line]:
    runs = recording["runs"]
    assert isinstance(runs, list)
    calm = [run["step_times_us"] for run in runs if run["load"] < CALM_LOAD]
    busy = {"runs": [run for run in runs if run["load"] >= CALM_LOAD]}
    for steps in (100, 300, 700, 1450):
        yield line(
            f"CPU, recorded, calm ({len(calm)} runs)",
            "1 run each",
            steps,
            every_pair([parts(times, steps) for times in calm]),
            is_claimed=False,
        )
    for steps in (300, 1450):
        estimates = [parts(run["step_times_us"], steps) for run in busy["runs"]]
        followed = [pair for two in pairwise(estimates) for pair in every_pair(two)]
        yield line(
            f"CPU, recorded, busy ({len(busy['runs'])} runs)", "1 run each", steps, followed, is_claimed=False
        )
    yield from repeated_lines("CPU, recorded, busy", busy, (1450,), claimed_from=None)


def undisturbed_lines(
    noise: str, recording: dict[str, Any], lengths: Sequence[int], *, claimed_from: int | None
) -> Iterable[Line]:
    """Pairs of runs of a machine that did nothing else; both limits are claimed from so many steps on."""
    runs = recording["runs"]
    for steps in lengths:
        estimates = [parts(run["step_times_us"], steps) for run in runs]
        name = f"{noise} ({len(runs)} runs)"
        is_claimed = claimed_from is not None and steps >= claimed_from
        yield line(name, "1 run each", steps, every_pair(estimates), is_claimed=is_claimed)


def repeated_lines(
    noise: str, recording: dict[str, Any], lengths: Sequence[int], *, claimed_from: int | None
) -> Iterable[Line]:
    """Four runs on each side, of eight that followed one another: in turn, or first all of A."""
    name = f"{noise} ({len(recording['runs'])} runs)"
    for steps in lengths:
        runs = [parts(run["step_times_us"], steps) for run in recording["runs"]]
        eights = [
            [run[part] for run in runs[at : at + 8]]
            for at in range(len(runs) - 7)
            for part in range(min(map(len, runs)))
        ]
        for design, halves in (
            ("4 in turn", [(eight[::2], eight[1::2]) for eight in eights]),
            ("4, then 4", [(eight[:4], eight[4:]) for eight in eights]),
        ):
            pairs = [pair for a, b in halves for pair in ((a, b), (b, a))]
            is_claimed = design == "4 in turn" and claimed_from is not None and steps >= claimed_from
            yield line(name, design, steps, pairs, is_claimed=is_claimed)


def resampled_gpu_lines() -> Iterable[Line]:
    """Long runs with the noise of each experiment on the H200, in two groups by spread."""
    series = []
    for path in sorted((RESULTS / "sweep_h200" / "results").glob("*.json")):
        measured = json.loads(path.read_text(encoding="utf-8")).get("measured")
        if measured is not None:
            series.append(measured["steps"]["times_s"])
    steady = [times for times in series if stdev(times) < STEADY * fmean(times)]
    uneven = [times for times in series if times not in steady]
    for name, group, lengths in (("spread < 5 %", steady, (50, 200)), ("≥ 5 %", uneven, (500, 2000, 8000))):
        for steps in lengths:
            draw = random.Random(steps)
            pairs: list[Pair] = []
            for times in group:
                made = [median_of(blocks(draw, times, steps, 10), CONFIDENCE) for _ in range(8)]
                pairs += every_pair([[run] for run in made])
            noise = f"H200, resampled, {name} ({len(group)})"
            yield line(noise, "1 run each", steps, pairs, is_claimed=group is steady and steps >= 200)


def blocks(draw: random.Random, times: Sequence[float], steps: int, length: int) -> list[float]:
    """A run of blocks of consecutive steps of another."""
    found: list[float] = []
    while len(found) < steps:
        at = draw.randrange(len(times) - length + 1)
        found += times[at : at + length]
    return found[:steps]


def autoregressive(draw: random.Random, steps: int) -> list[float]:
    """AR(1): correlation 0.9 from step to step, 3 % spread."""
    level, push = draw.gauss(0, 0.03), 0.03 * math.sqrt(1 - 0.9**2)
    found = []
    for _ in range(steps):
        level = 0.9 * level + draw.gauss(0, push)
        found.append(math.exp(level))
    return found


def drifting(draw: random.Random, steps: int) -> list[float]:
    """A random walk by 1 % over the run, and 2 % from step to step."""
    level, found = 0.0, []
    for _ in range(steps):
        level += draw.gauss(0, 0.01 / math.sqrt(steps))
        found.append(math.exp(level + draw.gauss(0, 0.02)))
    return found


def spiking(draw: random.Random, steps: int) -> list[float]:
    """One step in twenty takes several times as long, without a finite variance (Pareto 1.2)."""
    return [
        math.exp(draw.gauss(0, 0.02)) + (draw.paretovariate(1.2) if draw.random() < 0.05 else 0.0)
        for _ in range(steps)
    ]


def differing(draw: random.Random, steps: int) -> list[float]:
    """AR(1) as above, and equal runs differ by a standard deviation of 0.7 %."""
    level = math.exp(draw.gauss(0, 0.007))
    return [level * seconds for seconds in autoregressive(draw, steps)]


SYNTHETIC: dict[str, Callable[[random.Random, int], list[float]]] = {
    "AR(1), 3 %": autoregressive,
    "drift, 1 % a run": drifting,
    "spikes": spiking,
    "AR(1), runs ±0.7 %": differing,
}


def synthetic_lines() -> Iterable[Line]:
    for name, process in SYNTHETIC.items():
        for steps in (200, 2000):
            draw = random.Random(f"{name} {steps}")
            runs = [median_of(process(draw, steps), CONFIDENCE) for _ in range(SYNTHETIC_RUNS)]
            pairs = every_pair([[run] for run in runs])
            is_claimed = steps >= 2000 and process is not drifting
            yield line(f"synthetic, {name}", "1 run each", steps, pairs, is_claimed=is_claimed)


def read(name: str) -> dict[str, Any]:
    """A recording of compare_noise.py."""
    found: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return found


def between_runs(recording: dict[str, Any]) -> float:
    """How much equal runs differ: the standard deviation of the logarithms of their medians."""
    return stdev(math.log(median(run["step_times_us"])) for run in recording["runs"])


def main() -> int:
    shared, alone = read("compare_noise.json"), read("compare_noise_alone.json")
    transformer, convolutions = read("compare_noise_h200.json"), read("compare_noise_h200_convolutions.json")
    recordings = (shared, alone, transformer, convolutions)
    print(
        f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}; noise recorded "
        + "; ".join(f"{it['recorded']} on {it['machine']}, torch {it['torch']}" for it in recordings)
    )
    print(
        f"assumed between runs, 1 run each: {RUN_TO_RUN:.1%}, on a CPU {RUN_TO_RUN_ON_CPU:.1%}; "
        f"confidence {CONFIDENCE:.0%}"
    )
    names = ("CPU, recorded", "CPU alone", "H200, transformer", "H200, convolutions")
    differ = ", ".join(
        f"{name} {between_runs(recording):.2%}" for name, recording in zip(names, recordings, strict=True)
    )
    print(f"standard deviation of the medians of equal runs: {differ}\n")
    print(
        f"{'noise':36} {'design':11} {'steps':>6} {'pairs':>6} {'A/A':>8} {'found':>8}\n"
        f"{'':36} {'':11} {'a run':>6} {'':>6} {'slower':>8} {'of +5 %':>8}"
    )
    missed = 0
    for part in (
        recorded_lines(shared),
        undisturbed_lines("CPU alone, recorded", alone, (100, 300, 700, 1450), claimed_from=None),
        repeated_lines("CPU alone, recorded", alone, (100, 300, 700, 1450), claimed_from=300),
        undisturbed_lines("H200, transformer", transformer, (50, 100, 200, 400), claimed_from=200),
        undisturbed_lines("H200, convolutions", convolutions, (50, 100, 200, 400), claimed_from=50),
        resampled_gpu_lines(),
        synthetic_lines(),
    ):
        for found in part:
            print(found.text(), flush=True)
            missed += found.is_claimed and not found.is_good
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
