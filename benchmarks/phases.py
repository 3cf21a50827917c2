"""Phases of a step by the monitor against marks placed by hand, and what dividing a step into them costs.

Why: where the time of a step goes is only worth reading if it is where the program spent it. Each case trains
a small model with the monitor and has marks of its own in the script, where it asks for a batch, calls the
model, and so on: CUDA events on a GPU, `time.perf_counter` on a CPU. Prints, per case and phase, the median
seconds of a step by both, and the median difference of a step as a share of it; the target is 2 %. The two
trainers re-create the loader, so there waiting for data is marked in the dataset and in the collation; the
calls of torch that they make are marked where they are called. Then the cost: the processor time that the
training thread spends on a step with next to no work, phases on and off in turns, at the lowest twentieth of
all steps of each, which other programs on the machine disturb least.
Ends with one line of JSON; exits 1 if a phase is off by more than the target.

    python benchmarks/phases.py [CASE ...] [--steps 60] [--rounds 20] [--output FILE]

On a GPU the same, with `--width 4096` or so for steps that keep it busy.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.metadata
import io
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from source_id import source_id
from truemfu import TrainingMonitor
from truemfu.run_summary.sums import PHASES

FIRST = 12
"""Steps before this one count the model, compile, or are the first of their kind."""
TARGET = 0.02
EXCLUDED = ("perf/evaluation_time", "perf/other_pause_time")
"""What the monitor excludes as an unusual gap, which the marks by hand do not know."""
COLLATE_S = 0.004
BATCH = 64
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Shares = dict[str, tuple[float, float, float]]
"""By phase: median seconds by the monitor and by hand, and the median difference as a share of the step."""


class Hand:
    """Marks of the script: `to` a phase where it begins, `end_step` where a step is logged."""

    def __init__(self) -> None:
        self._marks: list[tuple[Any, str]] = []
        self._steps: list[list[tuple[Any, str]]] = []
        self.base = "other"
        """The phase between passes and clippings."""

    def to(self, phase: str) -> None:
        if DEVICE.type == "cuda":
            mark: Any = torch.cuda.Event(enable_timing=True)
            mark.record()
        else:
            mark = time.perf_counter()
        self._marks.append((mark, phase))

    def end_step(self) -> None:
        self.to("other")
        self._steps.append(self._marks)
        self._marks = [self._marks[-1]]

    def seconds(self, step: int) -> dict[str, float]:
        """Of a step, counted from 1."""
        found: dict[str, float] = defaultdict(float)
        marks = self._steps[step - 1]
        for (begin, phase), (end, _) in pairwise(marks):
            found[phase] += end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3
        return found


def compared(folder: Path, hand: Hand, steps: int) -> Shares:
    """Both over the same steps: those that are neither warm-up nor observed, and exclude nothing."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    log = json.loads((folder / "training_log.json").read_text(encoding="utf-8"))
    rows = {row["global_step"]: row for row in log if not {"perf/warmup", *EXCLUDED} & row.keys()}
    used = [step for step in range(FIRST, steps + 1) if step in rows]
    if unknown := {rows[step].get("perf/phases_unknown") for step in used} - {None}:
        raise RuntimeError(f"steps without phases: {unknown}")
    by_hand = [hand.seconds(step) for step in used]
    step_s = statistics.median(rows[step]["perf/step_time"] for step in used)
    found = {}
    for phase in PHASES:
        ours = [rows[step].get(f"perf/phase/{phase}", 0.0) for step in used]
        own = [seconds.get(phase, 0.0) for seconds in by_hand]
        if any(ours) or any(own):
            apart = statistics.median(a - b for a, b in zip(ours, own, strict=True)) / step_s
            found[phase] = (statistics.median(ours), statistics.median(own), apart)
    return found


def net(width: int) -> nn.Module:
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, 1)).to(DEVICE)


class MarkedData(torch.utils.data.Dataset[Any]):
    """Samples whose fetching begins with a mark."""

    def __init__(self, hand: Hand, samples: list[Any]) -> None:
        self._hand, self._samples = hand, samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, at: int) -> Any:
        return self._samples[at]

    def __getitems__(self, places: list[int]) -> list[Any]:
        self._hand.to("data_wait")
        return [self._samples[at] for at in places]


def collate(hand: Hand, samples: list[Any]) -> Any:
    """What a loader does for a batch, slow on purpose; ends with a mark."""
    time.sleep(COLLATE_S)
    batch = torch.utils.data.default_collate(samples)
    hand.to("input")
    return batch


def loop(folder: Path, steps: int, width: int, *, accumulation: int = 1, compiled: bool = False) -> Shares:
    """A bare loop with a frozen reference model."""
    hand, model, reference = Hand(), net(width), net(width)
    if compiled:
        model = torch.compile(model)  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = TensorDataset(torch.randn(steps * accumulation * BATCH, width))
    batches: Iterator[Any] = iter(DataLoader(data, batch_size=BATCH))
    with TrainingMonitor(folder, model=model, trackers=[]) as monitor:
        hand.to("other")
        for step in range(1, steps + 1):
            for _ in range(accumulation):
                hand.to("data_wait")
                (batch,) = next(batches)
                hand.to("input")
                batch = (2 * batch).to(DEVICE, non_blocking=True)
                hand.to("no_grad")
                with torch.no_grad():
                    wanted = reference(batch)
                hand.to("forward")
                loss = nn.functional.mse_loss(model(batch), wanted)
                hand.to("backward")
                loss.backward()
                hand.to("other")
            hand.to("clipping")
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            hand.to("optimizer")
            optimizer.step()
            hand.to("other")
            optimizer.zero_grad()
            hand.end_step()
            monitor.log_step(step, None, loss.detach(), None, None)
    return compared(folder, hand, steps)


def marked(hand: Hand, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a mark where it begins, and one where it has returned to what called it."""

    def instead(*args: Any, **kwargs: Any) -> Any:
        hand.to(phase)
        result = call(*args, **kwargs)
        hand.to(hand.base)
        return result

    return instead


@contextmanager
def marked_calls(hand: Hand) -> Iterator[None]:
    """Marks around the calls of a trainer that a user does not see: the passes and the clipping."""
    backward, clip = torch.Tensor.backward, torch.nn.utils.clip_grad_norm_
    torch.Tensor.backward = marked(hand, "backward", backward)  # type: ignore[method-assign]
    torch.nn.utils.clip_grad_norm_ = marked(hand, "clipping", clip)
    try:
        yield
    finally:
        torch.Tensor.backward = backward  # type: ignore[method-assign]
        torch.nn.utils.clip_grad_norm_ = clip


class MarkedAdamW(torch.optim.AdamW):
    """With marks around `step`, and what a closure of it does outside of passes belongs to that."""

    hand: Hand

    def step(self, closure: Any = None) -> Any:
        self.hand.base = "optimizer"
        self.hand.to("optimizer")
        result = super().step(closure)
        self.hand.base = "other"
        self.hand.to("other")
        return result


def transformers_run(folder: Path, steps: int, width: int) -> Shares:
    """The Trainer of transformers, accumulation 2."""
    import transformers as hf

    from truemfu.integrations.transformers import TrueMFUCallback

    hand = Hand()

    class Marked(hf.Trainer):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            hand.to("forward")
            return super().compute_loss(*args, **kwargs)

    class Marks(hf.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            hand.end_step()

    hidden = max(64, width // 4)
    config = hf.LlamaConfig(
        vocab_size=1000,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        use_cache=False,
    )
    data = [{"input_ids": row, "labels": row} for row in torch.randint(1000, (512, 64))]
    args = hf.TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    model = hf.LlamaForCausalLM(config).to(DEVICE)
    optimizer = MarkedAdamW(model.parameters(), lr=5e-5)
    optimizer.hand = hand
    trainer = Marked(
        model,
        args,
        train_dataset=MarkedData(hand, data),
        data_collator=functools.partial(collate, hand),
        callbacks=[TrueMFUCallback(folder), Marks()],
        optimizers=(optimizer, None),
    )
    hand.to("other")
    with marked_calls(hand):
        trainer.train()
    return compared(folder, hand, steps)


def lightning_run(folder: Path, steps: int, width: int) -> Shares:
    """Lightning's Trainer, accumulation 2: its optimizers run the passes in a closure."""
    import lightning.pytorch as pl

    from truemfu.integrations.lightning import TrueMFUCallback

    hand = Hand()

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net(width)

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            hand.to("forward")
            return self.net(batch).square().mean()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            optimizer = MarkedAdamW(self.parameters(), lr=1e-3)
            optimizer.hand = hand
            return optimizer

    class Ends(pl.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if not trainer.fit_loop._should_accumulate():
                hand.end_step()

    trainer = pl.Trainer(
        max_steps=steps,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[TrueMFUCallback(folder), Ends()],
    )
    data = MarkedData(hand, list(torch.randn(2 * steps * BATCH, width)))
    hand.to("other")
    with marked_calls(hand):
        trainer.fit(Module(), DataLoader(data, batch_size=BATCH, collate_fn=functools.partial(collate, hand)))
    return compared(folder, hand, steps)


CASES: dict[str, Callable[[Path, int, int], Shares]] = {
    "loop": loop,
    "accumulation": functools.partial(loop, accumulation=4),
    "compiled": functools.partial(loop, compiled=True),
    "transformers": transformers_run,
    "lightning": lightning_run,
}


def step_times_s(folder: Path, *, has_phases: bool, steps: int = 300) -> list[float]:
    """Processor time of the training thread, in a loop where every microsecond of the monitor shows."""
    model = net(16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    config = {"monitoring": {"step_phases": has_phases, "trackers": []}}
    data = TensorDataset(torch.randn(steps * 4, 16))
    ends = []
    with TrainingMonitor(folder, config, model=model) as monitor:
        for step, (batch,) in enumerate(DataLoader(data, batch_size=4)):
            model(batch.to(DEVICE)).sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            monitor.log_step(step, None, None, None, None)
            ends.append(time.thread_time())
    return [end - begin for begin, end in pairwise(ends[100:])]


def cost_us(rounds: int) -> float | None:
    """What phases add to a step, at the lowest twentieth of all steps with and without them, in turns."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds):
        for has_phases in sorted(times, reverse=number % 2 == 0):
            with tempfile.TemporaryDirectory() as folder, redirect_stderr(io.StringIO()):
                times[has_phases] += step_times_s(Path(folder), has_phases=has_phases)
    if not rounds:
        return None
    with_s, without_s = (statistics.quantiles(times[key], n=20)[0] for key in (True, False))
    return 1e6 * (with_s - without_s)


def text_of(name: str, found: Shares) -> list[str]:
    lines = [f"{name}, medians of a step"]
    lines += [
        f"  {phase:10} {1e3 * ours:9.3f} ms  by hand {1e3 * own:9.3f} ms  {100 * apart:+6.2f} % of the step"
        for phase, (ours, own, apart) in found.items()
    ]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    if unknown := set(chosen.cases) - set(CASES):
        parser.error(f"unknown case {unknown.pop()!r}; known: {', '.join(CASES)}")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # threads that wait for each other measure what else runs on the machine
    device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu, 1 thread"
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "lightning")}
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines = [f"{date}, {device}, {named}, Python {sys.version.split()[0]}, truemfu source {source_id()}"]
    results: dict[str, Shares] = {}
    for name in chosen.cases or CASES:
        with tempfile.TemporaryDirectory() as folder, redirect_stderr(io.StringIO()):
            results[name] = CASES[name](Path(folder), chosen.steps, chosen.width)
        lines += text_of(name, results[name])
        print("\n".join(text_of(name, results[name])), file=sys.stderr, flush=True)
    furthest = max(abs(apart) for found in results.values() for _, _, apart in found.values())
    lines.append(f"furthest apart: {100 * furthest:.2f} % of a step; target {100 * TARGET:.0f} %")
    cost = cost_us(chosen.rounds)
    if cost is not None:
        lines.append(
            f"cost of phases: {cost:.1f} µs a step (lowest twentieth of steps, {chosen.rounds} turns)"
        )
    found = {"date": date, "device": device, "versions": versions, "phases": results, "cost_us": cost}
    lines.append(json.dumps(found))
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if chosen.output is not None:
        chosen.output.write_text(text, encoding="utf-8")
    return int(furthest > TARGET)


if __name__ == "__main__":
    sys.exit(main())
