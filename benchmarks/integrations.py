"""Step times that integrations log, against an independent timer around the same steps.

Why: a framework evaluates, saves and logs between steps, and only its own hooks tell what belongs to a step.
Each run trains a small model in a framework with an integration of truemfu, with evaluations and checkpoints
that are slow on purpose. A timer of this script takes the time from the end of each step to the end of the
next, less the evaluations and checkpoints between them: by CUDA events on a GPU, by the host's clock on a
CPU. Prints, per framework: median step by both, the ratio of the two sums over all steps (1 is ideal, the
target is within 2 %), the largest difference of one step, and the seconds left out by both. Ends with one
line of JSON.

    python benchmarks/integrations.py [FRAMEWORK ...] [--steps 60]

To add a framework, write a function from a number of steps to a `Row` and name it in RUNS.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from source_id import source_id

PAUSE_S = 0.3
FIRST = 3
"""Steps before this one count the model or are the first of their kind."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One framework: times of the same steps by the integration and by the timer, in order."""

    framework: str
    version: str
    device: str
    logged_s: Sequence[float]
    timer_s: Sequence[float]
    left_out_s: float
    timer_left_out_s: float

    @property
    def ratio(self) -> float:
        return sum(self.logged_s) / sum(self.timer_s)

    @property
    def worst(self) -> float:
        """The largest relative difference of one step."""
        return max(abs(logged / timer - 1) for logged, timer in zip(self.logged_s, self.timer_s, strict=True))

    def as_dict(self) -> dict[str, Any]:
        return {
            "framework": self.framework,
            "version": self.version,
            "device": self.device,
            "steps": len(self.logged_s),
            "median_logged_s": statistics.median(self.logged_s),
            "median_timer_s": statistics.median(self.timer_s),
            "ratio": self.ratio,
            "worst_step": self.worst,
            "left_out_s": self.left_out_s,
            "timer_left_out_s": self.timer_left_out_s,
        }


class Timer:
    """Ends of steps, and the spans between them that belong to no step, on the device's clock."""

    def __init__(self) -> None:
        self._ends: list[Any] = []
        self._left_out: list[tuple[int, Any, Any]] = []

    def end_step(self) -> None:
        self._ends.append(self.mark())

    def leave_out(self, began: Any) -> None:
        """The time since this mark, which belongs to no step."""
        self._left_out.append((len(self._ends), began, self.mark()))

    @staticmethod
    def mark() -> Any:
        if not torch.cuda.is_available():
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def left_out_s(self, steps: Sequence[int]) -> float:
        return sum(_seconds(began, ended) for after, began, ended in self._left_out if after + 1 in steps)

    def step_s(self, step: int) -> float:
        """Seconds of a step, which are counted from 1; the first has no beginning."""
        whole_s = _seconds(self._ends[step - 2], self._ends[step - 1])
        return whole_s - self.left_out_s([step])


def _seconds(began: Any, ended: Any) -> float:
    if isinstance(began, float):
        return float(ended - began)
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def row_of(framework: str, folder: Path, timer: Timer, steps: int) -> Row:
    """The row of a finished run, from the log in its folder."""
    log = json.loads((folder / "training_log.json").read_text(encoding="utf-8"))
    rows = {row["global_step"]: row for row in log}
    numbers = range(FIRST, steps + 1)
    pauses = ("perf/evaluation_time", "perf/checkpoint_time", "perf/generation_time", "perf/other_pause_time")
    return Row(
        framework,
        importlib.metadata.version(framework),
        device_name(),
        [rows[step]["perf/step_time"] for step in numbers],
        [timer.step_s(step) for step in numbers],
        sum(rows[step].get(name, 0.0) for step in numbers for name in pauses),
        timer.left_out_s(numbers),
    )


def transformers_run(steps: int) -> Row:
    """The Trainer: accumulation 2, an evaluation every 10 steps, a checkpoint every 15."""
    import transformers as hf

    from truemfu.integrations.transformers import TrueMFUCallback

    timer = Timer()

    class Timed(hf.Trainer):  # type: ignore[misc]
        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            began = timer.mark()
            time.sleep(PAUSE_S)
            metrics = super().evaluate(*args, **kwargs)
            timer.leave_out(began)
            return metrics

        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            began = timer.mark()
            time.sleep(PAUSE_S)
            super()._save_checkpoint(*args, **kwargs)
            timer.leave_out(began)

    class Ends(hf.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            timer.end_step()

    config = hf.LlamaConfig(
        vocab_size=1000,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        use_cache=False,
    )
    data = [{"input_ids": row, "labels": row} for row in torch.randint(1000, (256, 64))]
    with tempfile.TemporaryDirectory() as folder:
        args = hf.TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            logging_steps=5,
            eval_strategy="steps",
            eval_steps=10,
            save_steps=15,
            save_total_limit=1,
            disable_tqdm=True,
        )
        Timed(
            hf.LlamaForCausalLM(config),
            args,
            train_dataset=data,
            eval_dataset=data[:16],
            callbacks=[TrueMFUCallback(), Ends()],
        ).train()
        return row_of("transformers", Path(folder) / "truemfu", timer, steps)


class Net(torch.nn.Module):
    """A language model without attention."""

    def __init__(self) -> None:
        super().__init__()
        layers = [torch.nn.Linear(128, 128) for _ in range(4)]
        self.layers = torch.nn.Sequential(torch.nn.Embedding(1000, 128), *layers, torch.nn.Linear(128, 1000))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        scores = self.layers(input_ids)
        return torch.nn.functional.cross_entropy(scores.flatten(0, 1), input_ids.flatten())


def loader(batches: int) -> torch.utils.data.DataLoader[torch.Tensor]:
    return torch.utils.data.DataLoader(torch.randint(1000, (8 * batches, 128)), batch_size=8)


def lightning_run(steps: int) -> Row:
    """Lightning's Trainer: accumulation 2, a validation every 20 batches, a checkpoint every 15 steps."""
    import lightning.pytorch as pl

    from truemfu.integrations.lightning import TrueMFUCallback

    timer = Timer()

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.net(batch)  # type: ignore[no-any-return]

        def validation_step(self, batch: torch.Tensor) -> None:
            self.net(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    class Ends(pl.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if not trainer.fit_loop._should_accumulate():
                timer.end_step()

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = timer.mark()
            time.sleep(PAUSE_S)
            result = method(*args, **kwargs)
            timer.leave_out(began)
            return result

        return call

    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            max_steps=steps,
            accumulate_grad_batches=2,
            val_check_interval=20,
            num_sanity_val_steps=0,
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[
                TrueMFUCallback(folder),
                Ends(),
                pl.callbacks.ModelCheckpoint(dirpath=folder, every_n_train_steps=15),
            ],
        )
        trainer.save_checkpoint = timed(trainer.save_checkpoint)
        trainer.fit_loop.epoch_loop.val_loop.run = timed(trainer.fit_loop.epoch_loop.val_loop.run)
        trainer.fit(Module(), loader(2 * steps), loader(2))
        return row_of("lightning", Path(folder), timer, steps)


def accelerate_run(steps: int) -> Row:
    """A loop with Accelerate: accumulation 2, a paused evaluation every 10 steps, a checkpoint every 15."""
    from accelerate import Accelerator

    from truemfu.integrations.accelerate import watch

    timer = Timer()
    accelerator = Accelerator(gradient_accumulation_steps=2)
    with tempfile.TemporaryDirectory() as folder:
        monitor = watch(accelerator, folder)
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters())
        net, optimizer, batches = accelerator.prepare(net, optimizer, loader(2 * steps))
        done = 0
        for batch in batches:
            with accelerator.accumulate(net):
                accelerator.backward(net(batch))
                optimizer.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            done += 1
            timer.end_step()
            began = timer.mark()
            if done % 10 == 0:
                with monitor.pause("evaluation"), torch.no_grad():
                    time.sleep(PAUSE_S)
                    net(batch)
                timer.leave_out(began)
            if done % 15 == 0:
                began = timer.mark()
                accelerator.save_state(str(Path(folder) / f"state-{done}"))
                timer.leave_out(began)
        monitor.close()
        return row_of("accelerate", Path(folder), timer, steps)


RUNS: dict[str, Callable[[int], Row]] = {
    "transformers": transformers_run,
    "lightning": lightning_run,
    "accelerate": accelerate_run,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("frameworks", nargs="*", help=f"of {', '.join(RUNS)}; all if none is named")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    unknown = [name for name in options.frameworks if name not in RUNS]
    if unknown:
        parser.error(f"unknown framework {unknown[0]}: {', '.join(RUNS)}")
    rows = [RUNS[name](options.steps).as_dict() for name in options.frameworks or RUNS]
    print(f"integrations {datetime.date.today()}  truemfu ({source_id()}), torch {torch.__version__}")
    for row in rows:
        print(
            f"{row['framework']} {row['version']} on {row['device']}, {row['steps']} steps\n"
            f"  median step   {row['median_logged_s'] * 1e3:.2f} ms logged, "
            f"{row['median_timer_s'] * 1e3:.2f} ms by the timer\n"
            f"  ratio of sums {row['ratio']:.4f}, worst step {row['worst_step']:.2%}\n"
            f"  left out      {row['left_out_s']:.2f} s logged, {row['timer_left_out_s']:.2f} s by the timer"
        )
    print(json.dumps({"torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
