"""Step times under the monitor against events placed by hand, in programs that are hard to time.

Why: a program that turns from host-bound to device-bound and back, and reads its loss now and then, is what
most training loops do, and the host's clock says nothing about such steps. For a stack of Linear layers and
a U-Net, each variant runs 400 steps in 20 turns of host-bound and device-bound steps, with `loss.item()`
every 1, 7, 20 or 50 steps, before or after `log_step`; in one variant an evaluation comes every 10 steps. It
prints per variant
  rows          compared: all but the monitor's warm-up steps
  step          the median step by hand in host-bound and in device-bound turns
  difference    the largest difference of a row's step time from the events by hand before `log_step`,
                relative to the latter, and how many rows are further than 2 % from them
  beyond        the same as far as events on both sides of `log_step` do not explain it: the monitor's own
                event lies between them, and a host that is held up there moves it
  left out      what the monitor excluded as unusual, and by hand, from events at both ends of the same gaps:
                a gap ends between an event before the model is called and one in its forward pass, since a
                host that is held up between these two is held up in either
and what placing a mark takes the host. On a CPU the host's clock stands for the events.
Ends with one line of JSON; exits 1 where a row is more than 2 % beyond what both events allow.

    python benchmarks/gpu/clock.py [--device cuda] [--models linear unet] [--tiny]
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import json
import statistics
import sys
import tempfile
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import truemfu
from truemfu import TrainingMonitor
from truemfu.monitor.timing.clock import clock_for

sys.path.insert(0, str(Path(__file__).parents[1]))
from source_id import source_id

LIMIT = 0.02
TURNS = 20
STEPS_PER_TURN = 20
LEAD_IN_STEPS = 10
EVALUATE_EVERY = 10
HOST_OVER_DEVICE = 1.5
"""The host's work in a host-bound step, in device time of a step."""


LEFT_OUT = ("perf/evaluation_time", "perf/other_pause_time")
"""What the monitor excludes by itself."""


class Variant(NamedTuple):
    """When the program waits for the device or evaluates."""

    name: str
    item_every: int = 0
    after_log_step: bool = False
    evaluates: bool = False


VARIANTS = [
    *(
        Variant(f"item() every {every} {'after' if after else 'before'} log_step", every, after)
        for every in (1, 7, 20, 50)
        for after in (False, True)
    ),
    Variant(f"evaluation every {EVALUATE_EVERY}", evaluates=True),
]


class Block(nn.Module):
    """Two convolutions."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(inside, outside, 3, padding=1),
            nn.GroupNorm(8, outside),
            nn.SiLU(),
            nn.Conv2d(outside, outside, 3, padding=1),
            nn.SiLU(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


class UNet(nn.Module):
    """Three levels with skip connections."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.ModuleList([Block(8, width), Block(width, 2 * width), Block(2 * width, 4 * width)])
        self.up = nn.ModuleList([Block(6 * width, 2 * width), Block(3 * width, width)])
        self.out = nn.Conv2d(width, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.down[0](x)
        second = self.down[1](nn.functional.max_pool2d(first, 2))
        x = self.down[2](nn.functional.max_pool2d(second, 2))
        for block, skip in zip(self.up, (second, first), strict=True):
            x = block(torch.cat([nn.functional.interpolate(x, scale_factor=2.0), skip], 1))
        return self.out(x)  # type: ignore[no-any-return]


def model_and_batch(name: str, device: torch.device, *, tiny: bool) -> tuple[nn.Module, torch.Tensor]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if name == "linear":
        width, layers, samples = (64, 4, 32) if tiny else (4096, 16, 8192)
        model: nn.Module = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        batch = torch.randn(samples, width)
    else:
        model = UNet(8 if tiny else 64)
        batch = torch.randn(2 if tiny else 32, 8, *((16, 16) if tiny else (128, 128)))
    return model.to(device, dtype), batch.to(device, dtype)


class Stamps:
    """Moments of the device, placed by hand: events on CUDA, else the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"

    def now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between_s(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1e3 if self._is_cuda else end - begin


class Program:
    """One training, with a stamp at the end of each step."""

    def __init__(self, name: str, device: torch.device, *, tiny: bool) -> None:
        torch.manual_seed(0)
        self.model, self.batch = model_and_batch(name, device, tiny=tiny)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self.device, self.stamps = device, Stamps(device)
        self.step_s = self._step_s()

    def step(self, host_s: float) -> torch.Tensor:
        loss = self.model(self.batch).float().square().mean()
        ends_s = time.perf_counter() + host_s
        while time.perf_counter() < ends_s:
            pass
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _step_s(self) -> float:
        for _ in range(LEAD_IN_STEPS):
            self.step(0.0)
        begin = self.stamps.now()
        for _ in range(LEAD_IN_STEPS):
            self.step(0.0)
        end = self.stamps.now()
        self.synchronize()
        return self.stamps.between_s(begin, end) / LEAD_IN_STEPS

    def run(self, variant: Variant, folder: str) -> dict[str, Any]:
        """The rows of the monitor against the stamps."""
        stamps, ends, logged, begins, entered = self.stamps, [], [], [], []
        monitor = TrainingMonitor(folder, model=self.model)
        # After the monitor's own hook, which was there before it.
        hook = self.model.register_forward_pre_hook(lambda *_: entered.append(stamps.now()))
        for step in range(LEAD_IN_STEPS + TURNS * STEPS_PER_TURN):
            is_host_bound = self._is_host_bound(step)
            begins.append(stamps.now())
            del entered[step:]  # of an evaluation
            loss = self.step(HOST_OVER_DEVICE * self.step_s if is_host_bound else 0.0)
            is_due = variant.item_every > 0 and step % variant.item_every == 0
            if is_due and not variant.after_log_step:
                loss.item()
            ends.append(stamps.now())
            monitor.log_step(step, 0, loss, None, 1e-6)
            logged.append(stamps.now())
            if is_due and variant.after_log_step:
                loss.item()
            if variant.evaluates and step % EVALUATE_EVERY == 0:
                self._evaluate()
        hook.remove()
        self.synchronize()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            monitor.close()
        rows = json.loads((Path(folder) / "training_log.json").read_text(encoding="utf-8"))
        by_hand = [stamps.between_s(begin, end) for begin, end in pairwise(ends)]
        gaps = [
            (stamps.between_s(end, begin), stamps.between_s(end, inside))
            for end, begin, inside in zip(ends, begins[1:], entered[1:], strict=False)
        ]
        in_log_step = [stamps.between_s(end, after) for end, after in zip(ends, logged, strict=True)]
        return self._compared(rows, by_hand, in_log_step, gaps)

    def _is_host_bound(self, step: int) -> bool:
        return step >= LEAD_IN_STEPS and (step - LEAD_IN_STEPS) // STEPS_PER_TURN % 2 == 0

    def _evaluate(self) -> None:
        """Forward passes for longer than the five milliseconds that may be excluded."""
        ends_s = time.perf_counter() + 0.01
        with torch.no_grad():
            while time.perf_counter() < ends_s:
                self.model(self.batch)

    def _compared(
        self,
        rows: list[dict[str, Any]],
        by_hand: list[float],
        in_log_step: list[float],
        gaps: list[tuple[float, float]],
    ) -> dict[str, Any]:
        """Rows from the second step on; a gap that the monitor excluded is taken off by hand too."""
        compared = [row for row in rows if row["global_step"] > LEAD_IN_STEPS and not row.get("perf/warmup")]
        excluded = {
            row["global_step"]: min(max(shortest_s, _left_out_s(row)), longest_s)
            for row in compared
            if any(name in row for name in LEFT_OUT)
            for shortest_s, longest_s in [gaps[row["global_step"] - 1]]
        }
        true_s = {
            row["global_step"]: by_hand[row["global_step"] - 1] - excluded.get(row["global_step"], 0.0)
            for row in compared
        }
        differences = {
            row["global_step"]: row["perf/step_time"] / true_s[row["global_step"]] - 1 for row in compared
        }
        worst = max(differences, key=lambda step: abs(differences[step]))
        beyond = {  # a step is up to its end's time in log_step longer, or its begin's shorter
            step: max(
                difference - in_log_step[step] / true_s[step],
                -difference - in_log_step[step - 1] / true_s[step],
                0.0,
            )
            for step, difference in differences.items()
        }
        medians = [
            statistics.median(
                true_s[step] for step in differences if self._is_host_bound(step) == is_host_bound
            )
            for is_host_bound in (True, False)
        ]
        return {
            "rows": len(compared),
            "host_bound_step_s": medians[0],
            "device_bound_step_s": medians[1],
            "largest_difference": abs(differences[worst]),
            "at_step": worst,
            "largest_beyond": max(beyond.values()),
            "rows_above_limit": sum(abs(difference) > LIMIT for difference in differences.values()),
            "median_difference": statistics.median(map(abs, differences.values())),
            "left_out_s": sum(map(_left_out_s, compared)),
            "left_out_by_hand_s": sum(excluded.values()),
        }

    def mark_costs_s(self, steps: int = 200) -> list[float]:
        """What placing a mark takes the host, once after each step."""
        clock, found = clock_for(self.device), []
        for _ in range(steps):
            self.step(0.0)
            began_s = time.perf_counter()
            clock.mark(began_s)
            found.append(time.perf_counter() - began_s)
            clock.poll()
        self.synchronize()
        return found


def _left_out_s(row: dict[str, Any]) -> float:
    return sum(float(row.get(name, 0.0)) for name in LEFT_OUT)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", choices=("linear", "unet"), default=["linear", "unet"])
    parser.add_argument("--tiny", action="store_true", help="small models, for a trial without a GPU")
    options = parser.parse_args()
    device = torch.device(options.device)
    warnings.simplefilter("ignore", UserWarning)
    versions = {"truemfu": truemfu.__version__, "torch": torch.__version__, "source": source_id()}
    is_cuda = device.type == "cuda"
    device_name = torch.cuda.get_device_name(device) if is_cuda else device
    print(f"gpu/clock {datetime.date.today()}, {device_name}, {versions}")
    results: dict[str, Any] = {}
    for name in options.models:
        program = Program(name, device, tiny=options.tiny)
        costs_s = sorted(program.mark_costs_s())
        costs = {"median_s": statistics.median(costs_s), "p99_s": costs_s[int(0.99 * len(costs_s))]}
        results[name] = {"mark": costs}
        print(f"{name}: a mark takes {1e6 * costs['median_s']:.1f} µs, p99 {1e6 * costs['p99_s']:.1f} µs")
        for variant in VARIANTS:
            with tempfile.TemporaryDirectory() as folder:
                found = program.run(variant, folder)
            results[name][variant.name] = found
            print(
                f"  {variant.name:34} {found['rows']} rows, steps {1e3 * found['host_bound_step_s']:.2f} and "
                f"{1e3 * found['device_bound_step_s']:.2f} ms, difference at most "
                f"{100 * found['largest_difference']:.2f} % (step {found['at_step']}), beyond "
                f"{100 * found['largest_beyond']:.2f} %, "
                f"{found['rows_above_limit']} above {100 * LIMIT:.0f} %, median "
                f"{100 * found['median_difference']:.3f} %, left out {found['left_out_s']:.3f} s, by hand "
                f"{found['left_out_by_hand_s']:.3f} s",
                flush=True,
            )
    worst = max(
        found["largest_beyond"]
        for variants in results.values()
        for name, found in variants.items()
        if name != "mark"
    )
    print(json.dumps({"versions": versions, "largest_beyond": worst, "limit": LIMIT, "results": results}))
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
