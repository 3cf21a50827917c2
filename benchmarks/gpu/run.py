"""`truemfu run` and TraceML on the same unmodified script, taking turns with the script alone.

The script is transformers' Trainer with a Llama of 1.3 B parameters in bf16, at 4 × 512 and at 8 × 1024. It
times its own steps by CUDA events in a callback; the first ten of each shape are left out. Every variant runs
in processes of its own, one after the other, several rounds. Prints the median step of each process, the
ratio of each variant to the script alone (median over rounds, with the smallest and the largest), and what
the monitor measured of its own time on the training thread. TraceML is left out where it is not installed.

    python benchmarks/gpu/run.py [--rounds 2] [--tiny] [--output FILE]
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from source_id import source_id

LEFT_OUT = 10
STEPS = 60
MARK = "step_seconds "


def script(*, tiny: bool) -> None:
    """The unmodified script; prints the times of its steps."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    on_gpu = torch.cuda.is_available()
    torch.manual_seed(0)
    size = (
        {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        if tiny
        else {
            "hidden_size": 2048,
            "intermediate_size": 5504,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
        }
    )
    with torch.device("cuda" if on_gpu else "cpu"):
        model = LlamaForCausalLM(LlamaConfig(**size, vocab_size=512 if tiny else 32000)).to(torch.bfloat16)

    class Times(TrainerCallback):
        def __init__(self) -> None:
            self.marks: list[Any] = []

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            if on_gpu:
                self.marks.append(torch.cuda.Event(enable_timing=True))
                self.marks[-1].record()
            else:
                self.marks.append(time.perf_counter())

        def seconds(self) -> list[float]:
            if on_gpu:
                torch.cuda.synchronize()
                pairs = zip(self.marks, self.marks[1:], strict=False)
                return [a.elapsed_time(b) / 1e3 for a, b in pairs][LEFT_OUT:]
            return [b - a for a, b in zip(self.marks, self.marks[1:], strict=False)][LEFT_OUT:]

    found = {}
    for samples, length in ((4, 512), (8, 1024)):
        ids = torch.randint(512, (samples * STEPS, 32 if tiny else length))
        data = [{"input_ids": row, "labels": row} for row in ids]
        times = Times()
        arguments = TrainingArguments(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=samples,
            max_steps=STEPS,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            optim="adamw_torch_fused",
            use_cpu=not on_gpu,
        )
        Trainer(model=model, args=arguments, train_dataset=data, callbacks=[times]).train()
        found[f"{samples}x{length}"] = times.seconds()
    print(MARK + json.dumps(found), flush=True)


def measured(prefix: list[str], inner: list[str], environment: dict[str, str]) -> dict[str, float]:
    """The median step of one process, by shape."""
    done = subprocess.run([*prefix, *inner], env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if MARK in line]
    if not lines:
        raise SystemExit(
            f"{' '.join(prefix)} printed no times:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        )
    times = json.loads(lines[-1].partition(MARK)[2])
    return {shape: statistics.median(seconds) for shape, seconds in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the script on a CPU")
    parser.add_argument("--script", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.script:
        script(tiny=options.tiny)
        return 0
    import torch

    import truemfu

    lines: list[str] = []

    def say(text: str = "") -> None:
        print(text, flush=True)
        lines.append(text)

    has_traceml = importlib.util.find_spec("traceml_ai") is not None
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    say(
        f"gpu/run {datetime.date.today()}  truemfu {truemfu.__version__} ({source_id()}), torch "
        f"{torch.__version__}, Python {platform.python_version()}, {device}, TraceML "
        f"{importlib.metadata.version('traceml-ai') if has_traceml else 'not installed'}"
    )
    folder = Path(tempfile.mkdtemp())
    flags = ["--script", *(["--tiny"] if options.tiny else [])]
    inner = [sys.executable, str(Path(__file__).resolve()), *flags]
    found: dict[str, list[dict[str, float]]] = {"alone": [], "truemfu run": []}
    if has_traceml:
        found["traceml run"] = []
    for number in range(options.rounds):
        for name, medians in found.items():
            environment = dict(os.environ)
            if name == "truemfu run":
                output = str(folder / f"run{number}")
                prefix, call = [sys.executable, "-m", "truemfu", "run", "-o", output, "--"], inner
            elif name == "traceml run":
                prefix = [sys.executable, "-m", "traceml_ai.launcher.cli", "run", "--mode", "summary"]
                prefix += ["--logs-dir", str(folder / f"traceml{number}"), inner[1]]
                call = ["--args", *flags]
            else:
                prefix, call = [], inner
            began_s = time.perf_counter()
            medians.append(measured(prefix, call, environment))
            texts = [f"{shape} {1e3 * seconds:.3f} ms" for shape, seconds in medians[-1].items()]
            say(f"  round {number + 1}, {name}: {', '.join(texts)}; {time.perf_counter() - began_s:.1f} s")
    results: dict[str, Any] = {"medians_s": found, "ratios": {}}
    for name, medians in found.items():
        for shape in medians[0] if name != "alone" else ():
            pairs = zip(medians, found["alone"], strict=True)
            ratios = sorted(own[shape] / alone[shape] - 1 for own, alone in pairs)
            middle = statistics.median(ratios)
            results["ratios"][f"{name} {shape}"] = ratios
            say(f"  {name} against alone, {shape}: {middle:+.3%} ({ratios[0]:+.3%} … {ratios[-1]:+.3%})")
    for number in range(options.rounds):
        file = folder / f"run{number}" / "training_run.json"
        summary = json.loads(file.read_text(encoding="utf-8"))["summary"]
        cost = summary["monitor_cost"]
        results.setdefault("own_us", []).append(cost["training_thread_us_per_step"])
        say(
            f"  truemfu run, round {number + 1}: {cost['training_thread_us_per_step']:.0f} µs a step on the "
            f"training thread by its own clock, {cost['counts']} counts in {cost['counting_s']:.1f} s, "
            f"{summary['steps']} steps, FLOPs by {summary['methods']}"
        )
    say(json.dumps(results))
    if options.output:
        options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
