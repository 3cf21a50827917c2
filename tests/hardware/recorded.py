"""The recorded traces of this folder, whole or put together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from truemfu.hardware.counters.sampler import Sampler
from truemfu.hardware.counters.samples import ACTIVITIES, CounterSample, CounterWindow
from truemfu.hardware.counters.trace import Replay
from truemfu.hardware.counters.windows import GPM_LAG_S, between

TRACES = Path(__file__).parent / "traces"
MATMUL, TRAINING, PIPES, PRODUCTS = (
    TRACES / f"h200_{name}.jsonl" for name in ("matmul", "training", "pipes", "products")
)
EVERY_50_MS = TRACES / "h200_every_50_ms.jsonl"
TROUBLE, NO_GPM = TRACES / "trouble_made_up.jsonl", TRACES / "a100_no_gpm_made_up.jsonl"


def played(path: Path, **options: Any) -> Sampler:
    """A sampler that has read a trace to its end."""
    sampler = Sampler(Replay(path), **options)
    while sampler.poll():
        pass
    return sampler


def rows_of(path: Path) -> list[CounterSample]:
    """The samples of a trace, as they are there."""
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [msgspec.convert(line, CounterSample) for line in lines if line["kind"] == "sample"]


def says_nothing(row: CounterSample) -> bool:
    """A read between two renewals of the counters, as the driver answered it."""
    return row.dram_active is None and not any(getattr(row, name) for name in ACTIVITIES)


def together(into: Path, *paths: Path, rounds: int | None = None) -> Path:
    """One trace of several GPUs: each does what another trace says, for as long as the shortest of them."""
    traces = [[json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] for path in paths]
    gpus = [{**header["gpus"][0], "index": index} for index, (header, *_) in enumerate(traces)]
    lines = [{**traces[0][0], "gpus": gpus}]
    for samples in list(zip(*(trace[1:] for trace in traces), strict=False))[:rounds]:
        lines += [{**sample, "index": index} for index, sample in enumerate(samples)]
    into.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return into


def window_of(
    sampler: Sampler, begin_s: float, end_s: float, *, lag_s: float = GPM_LAG_S
) -> CounterWindow | None:
    """What GPU 0 did between two times."""
    return between(sampler.intervals(0), begin_s, end_s, lag_s=lag_s)
