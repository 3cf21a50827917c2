"""Trainings with one private name of torch taken away; each in a process of its own.

A host process imports torch once and forks a child for each case, which is quicker than importing it for
each. Cases come as lines of JSON on the standard input, results leave as lines of JSON.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import json
import os
import pkgutil
import random
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

STEPS = 9
SHAPE = (4, 6, 16)
BESIDE_TORCH = (
    *("torch._dynamo", "torch.profiler", "torch.distributed.fsdp", "click", "rich.live", "jinja2", "msgspec"),
    *("opacus", "accelerate", "peft", "transformers.trainer", "lightning.pytorch", "yaml"),
)
"""What the package imports where it is installed."""
VARIANTS = ("plain", "whole", "profiler")
"""A run whose steps are alike, one with a checkpoint around the whole model, one that profiles steps."""


def take_away(path: str) -> None:
    """Let every lookup of this name fail."""
    from truemfu.torch_private import find as lookup

    found_before = lookup.find

    def find(asked: str, *, load: bool = True) -> Any:
        return lookup.ABSENT if asked == path else found_before(asked, load=load)

    lookup.find = find


def model_and_batches() -> tuple[Any, list[Any]]:
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = (nn.Linear(SHAPE[-1], SHAPE[-1]) for _ in range(3))
            self.dropout = nn.Dropout(0.25)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.dropout(self.first(x)).tanh()
            x = checkpoint(self.stretch, x, use_reentrant=False)
            heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
            x = nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
            x = x * (1.5 if random.random() < 0.5 else 0.5)
            return self.last(x).square().mean()

        def stretch(self, x: torch.Tensor) -> torch.Tensor:
            return self.dropout(self.second(x)).tanh()

    torch.manual_seed(1)
    return Model(), [torch.randn(SHAPE) for _ in range(STEPS)]


def hold_numbers() -> None:
    """Have losses kept for a while and read later, as those on a GPU are."""
    import torch

    from truemfu.monitor.values.host_values import HostValues

    at_once = HostValues._number

    def number(self: HostValues, name: str, value: Any) -> Any:
        held = type(value) is torch.Tensor and not value.dim()
        return self._hold(name, value, is_input=False) if held else at_once(self, name, value)

    HostValues._number = number


def random_states() -> str:
    import torch

    states = (torch.get_rng_state().numpy().tobytes(), random.getstate())
    return hashlib.sha256(repr(states).encode()).hexdigest()


def train(variant: str, folder: Path | None) -> tuple[Any, dict[str, Any]]:
    """All that must not depend on a monitor, and what that says of the run."""
    import torch
    from torch.utils.checkpoint import checkpoint

    model, batches = model_and_batches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(2)
    random.seed(3)
    monitor, seen = None, []
    if folder is not None:
        from truemfu.monitor.monitor import TrainingMonitor

        mode = "profiler" if variant == "profiler" else "smart"
        config = {"monitoring": {"mfu_calculation_mode": mode, "peak_tflops": 1.0}}
        monitor = TrainingMonitor(folder, config, model=model, flops_profile_freq=2)
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = checkpoint(model, batch, use_reentrant=False) if variant == "whole" else model(batch)
        loss.backward()
        optimizer.step()
        if monitor is not None:
            monitor.log_step(step, 0.0, loss, 1.0, 0.1)
        seen.append((loss.item(), random_states()))
    if monitor is None:
        return (seen, weights_of(model)), {}
    with contextlib.redirect_stdout(sys.stderr):
        monitor.close()
    rows = json.loads((folder / "training_log.json").read_text(encoding="utf-8"))
    summary = monitor.summary()
    said = [*summary["warnings"], *summary["notes"], *summary["lost"]]
    return (seen, weights_of(model)), {"rows": rows, "said": said, "losses": [loss for loss, _ in seen]}


def weights_of(model: Any) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def import_everything() -> list[str]:
    """What of the package cannot be imported, and why."""
    import truemfu

    failed = []
    for module in pkgutil.walk_packages(truemfu.__path__, "truemfu."):
        if module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if (error.name or "torch").split(".")[0] in ("torch", "truemfu"):  # else an optional package
                failed.append(f"{module.name}: {error!r}")
        except Exception as error:
            failed.append(f"{module.name}: {error!r}")
    return failed


def result_of(case: dict[str, str]) -> dict[str, Any]:
    import truemfu

    assert {name for name in sys.modules if name.startswith("truemfu.")} <= {"truemfu.lazy"}
    take_away(case["path"])
    assert truemfu.__version__
    result: dict[str, Any] = {"imports": import_everything()}
    warnings.simplefilter("ignore", truemfu.TruemfuWarning)
    hold_numbers()
    with tempfile.TemporaryDirectory() as folder:
        for variant in VARIANTS:
            alone, _ = train(variant, None)
            watched, told = train(variant, Path(folder) / variant)
            result[variant] = {"is_identical": alone == watched, **told}
    from truemfu.torch_private.table import missing

    return {**result, "count": counted(), "missed": sorted(missing)}


def counted() -> dict[str, Any]:
    """A count outside of a training: its FLOPs, or why there are none."""
    from truemfu import count_flops

    model, batches = model_and_batches()
    try:
        count = count_flops(model, (batches[0],))
    except Exception as error:
        return {"error": repr(error)}
    return {"flops": [count.model_flops, count.hardware_flops]}


def main() -> None:
    """Serve cases until the input ends."""
    import torch

    for name in BESIDE_TORCH:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # a collection in a child would copy every page
    torch.set_num_threads(1)
    for line in sys.stdin:
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.close(reading)
            try:
                result = result_of(json.loads(line))
            except BaseException:
                result = {"error": traceback.format_exc()}
            with os.fdopen(writing, "w") as out:
                json.dump(result, out)
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as answer:
            text = answer.read()
        os.waitpid(child, 0)
        print(text.replace("\n", " ") or '{"error": "it ended without an answer"}', flush=True)


if __name__ == "__main__":
    main()
