"""Does exact measuring slow training down? The same training under every mode of the monitor, interleaved.

Why: this is the question people ask before they switch a monitor on. Prints, for the same number of steps in
each mode (no monitor, estimate, smart, profiler, hybrid, and the profiler every 1, 10, 50, 100, 500 steps):
time of 1,000 steps, overhead, its spread over the blocks, steps per second, added memory, mean MFU.

Modes take turns in blocks of steps, in another order each round. The first block of a mode is its start-up:
it has the observed steps, and goes on until there is a row. A monitor is paused while others have their turn,
and does not sample. Overheads compare each block with the block without a monitor of the same round; a second
row without a monitor shows the noise. With `--brief` the rows of the profiler more often than every 500 steps
run just long enough for three profiles, and their overhead is that of the blocks after the first. A run that
is stopped (SIGTERM, Ctrl-C) prints what it has, with the rounds it got through. Ends with one line of JSON.

    python benchmarks/measuring_modes.py [--size tiny] [--batch 4] [--seq 128] [--steps 1000] [--brief]
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import json
import platform
import random
import resource
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import truemfu
from source_id import source_id
from truemfu import TrainingMonitor
from truemfu.hardware.counters.sampler import Sampler
from truemfu.hardware.detect import override_flops_per_s
from truemfu.sweep.worker.models import build_reference_model, parameter_count

MODES: dict[str, dict[str, Any] | None] = {
    "no monitor": None,
    "no monitor, again": None,
    "estimate": {"mfu_calculation_mode": "estimate"},
    "smart": {},
    "profiler": {"mfu_calculation_mode": "profiler"},
    "hybrid": {"mfu_calculation_mode": "hybrid"},
    **{
        f"profiler every {n}": {"mfu_calculation_mode": "profiler", "flops_profile_freq": n}
        for n in (1, 10, 50, 100, 500)
    },
}
WARM_UP_STEPS = 5


@dataclass
class Trial:
    """One mode: its monitor, and what its blocks took."""

    name: str
    monitor: TrainingMonitor | None
    steps_wanted: int
    is_brief: bool
    blocks_s: list[float] = field(default_factory=list)
    """Seconds of a step in each block."""
    steps_done: int = 0
    total_s: float = 0.0
    host_bytes: int = 0
    device_bytes: int = 0
    step: int = 0
    away: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Holds the monitor's pause while other modes have their turn."""

    def take_turn(self) -> None:
        """The following steps are this mode's."""
        self.away.close()
        if (watch := self._watch) is not None:
            watch._sampler = Sampler(watch._source, indices=[watch._index], period_s=1.0)
            watch._sampler.start()

    def give_way(self) -> None:
        """The following steps are not this mode's: it must neither measure them nor slow them down."""
        if self.monitor is not None:
            self.away.enter_context(self.monitor.pause())
            if self._watch is not None:
                self._watch._sampler.stop()

    @property
    def _watch(self) -> Any:
        live = None if self.monitor is None else self.monitor._live
        return None if live is None else live.steps._instruments.counters


class Training:
    """The run that is measured: a reference model, AdamW, made-up tokens."""

    def __init__(self, size: str, batch: int, seq: int, *, compiled: bool) -> None:
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda" if cuda else "cpu")
        dtype = torch.bfloat16 if cuda else torch.float32
        torch.manual_seed(0)
        self.model = build_reference_model(size, device=self.device, dtype=dtype)
        if compiled:
            self.model.compile()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.ids = torch.randint(1000, (batch, seq), device=self.device)

    def step(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(self.ids, labels=self.ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def block(training: Training, trial: Trial, steps: int) -> None:
    """Run some steps under one mode; a first block goes on until what the mode has begun is done."""
    monitor, is_first = trial.monitor, not trial.blocks_s
    trial.take_turn()
    training.finish()
    before_device = torch.cuda.memory_allocated() if training.device.type == "cuda" else 0
    before_host = resident_bytes()
    began = time.perf_counter()
    done = 0
    if monitor is None:
        for _ in range(steps):
            training.step()
        done = steps
    else:
        monitor.attach(training.model)
        while done < steps or (is_first and not monitor.last):
            trial.step += 1
            loss = training.step()
            monitor.log_step(trial.step, 0, loss, None, 1e-4)
            done += 1
            if done >= steps and done % 5 == 0:
                training.finish()
        monitor.detach()
    training.finish()
    took_s = time.perf_counter() - began
    trial.blocks_s.append(took_s / done)
    trial.total_s += took_s
    trial.steps_done += done
    if monitor is not None:
        monitor.save_logs()
    trial.give_way()
    trial.host_bytes = max(trial.host_bytes, resident_bytes() - before_host)
    if training.device.type == "cuda":
        trial.device_bytes = max(trial.device_bytes, torch.cuda.memory_allocated() - before_device)


def take_turns(training: Training, trials: list[Trial], rounds: int) -> int:
    """Each mode a block, in another order each round; how many rounds there was time for."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    order = random.Random(0)
    for done in range(rounds):
        turn = list(trials)
        order.shuffle(turn)
        try:
            for trial in turn:
                block(training, trial, max(trial.steps_wanted // rounds, 1))
        except KeyboardInterrupt:
            return done
    return rounds


def resident_bytes() -> int:
    """Memory of this process, from the kernel."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    stderr, sys.stderr = sys.stderr, io.StringIO()
    try:
        yield
    finally:
        sys.stderr = stderr


def mean_mfu(folder: Path) -> float | None:
    rows = json.loads((folder / "training_log.json").read_text(encoding="utf-8"))
    found = [row["perf/mfu"] for row in rows if "perf/mfu" in row and "perf/warmup" not in row]
    found = found or [row["perf/mfu"] for row in rows if "perf/mfu" in row]
    return statistics.fmean(found) if found else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--brief", action="store_true", help="few steps where every step costs much")
    parser.add_argument("--modes", nargs="*", default=list(MODES), help="some of: " + ", ".join(MODES))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    lines: list[str] = []

    def say(text: str = "") -> None:
        print(text, flush=True)
        lines.append(text)

    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # a core of two is left to everything else, which makes less noise
    training = Training(options.size, options.batch, options.seq, compiled=options.compile)
    device = (
        torch.cuda.get_device_name()
        if training.device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )
    say(
        f"measuring_modes {datetime.date.today()}  truemfu {truemfu.__version__} ({source_id()}), "
        f"torch {torch.__version__}, Python {platform.python_version()}, {device}"
    )
    say(
        f"{options.size} ({parameter_count(training.model):,} parameters), "
        f"batch {options.batch} × {options.seq}, AdamW, {'compiled' if options.compile else 'eager'}, "
        f"{options.steps:,} steps, {options.rounds} blocks"
    )
    if (peak := override_flops_per_s()) is not None:
        say(f"peak {peak / 1e12:g} TFLOP/s, as TRUEMFU_PEAK_TFLOPS says")
    for _ in range(WARM_UP_STEPS):
        training.step()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        trials = []
        for name in options.modes:
            config = MODES[name]
            monitor = None
            if config is not None:
                monitor = TrainingMonitor(folder / name.replace(" ", "_"), {"monitoring": config})
            every = (config or {}).get("flops_profile_freq", 500)
            is_brief = options.brief and every < 500
            steps = min(options.steps, max(3 * every, 30)) if is_brief else options.steps
            trials.append(Trial(name, monitor, steps, is_brief))
        rounds = take_turns(training, trials, options.rounds)
        if rounds < options.rounds:
            say(f"stopped after {rounds} of {options.rounds} rounds")
        with quiet():
            for trial in trials:
                trial.away.close()
                if trial.monitor is not None:
                    trial.monitor.close()
        mfus = {t.name: mean_mfu(folder / t.name.replace(" ", "_")) for t in trials if t.monitor is not None}
    plain = next(t for t in trials if t.monitor is None)
    say()
    say(
        f"{'mode':20} {'steps':>6} {'s/1,000':>8} {'overhead':>9} {'later blocks: median (spread)':>32} "
        f"{'steps/s':>8} {'host MiB':>9} {'GPU MiB':>8} {'mean MFU':>9}"
    )
    results = {}
    plain_s = plain.total_s / plain.steps_done
    for trial in trials:
        step_s = statistics.fmean(trial.blocks_s[1:]) if trial.is_brief else trial.total_s / trial.steps_done
        later = [a / b - 1 for a, b in zip(trial.blocks_s[1:rounds], plain.blocks_s[1:rounds], strict=True)]
        mfu = mfus.get(trial.name)
        results[trial.name] = {
            "steps": trial.steps_done,
            "seconds_per_1000_steps": step_s * 1000,
            "overhead": step_s / plain_s - 1,
            "later_blocks": later,
            "steps_per_s": 1 / step_s,
            "added_host_bytes": trial.host_bytes,
            "added_device_bytes": trial.device_bytes,
            "mean_mfu": mfu,
        }
        spread = f"{statistics.median(later):+8.2%} ({min(later):+.2%} … {max(later):+.2%})" if later else ""
        say(
            f"{trial.name:20} {trial.steps_done:6,} {step_s * 1000:8.2f} {step_s / plain_s - 1:+9.2%} "
            f"{spread:>32} {1 / step_s:8.2f} "
            f"{trial.host_bytes / 2**20:9.1f} {trial.device_bytes / 2**20:8.2f} "
            + ("unknown" if mfu is None else f"{mfu:.2%}").rjust(9)
        )
    say(json.dumps(results))
    if options.output:
        options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
