"""Shows that CUDA graphs and compiled code are counted as the eager step is, and run unchanged.

Each row is a way to run the same training step: eager, a whole step captured as a CUDA graph,
`make_graphed_callables`, and torch.compile in its modes (max-autotune writes products as Triton templates,
reduce-overhead replays CUDA graphs). Printed per row: forward and backward FLOPs of the observed step, the
reason if they are unknown, and the number of graphs that were compiled during the observed step (0 expected).

    python benchmarks/gpu/observe_graphs.py

The last line is JSON; the exit status is 1 if a row's FLOPs differ from the eager ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from truemfu import Convention
from truemfu.flops.observe.observer import StepObserver, cuda_captures

_CONVENTION = Convention()


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512), nn.Linear(512, 1)).cuda()


def _observed(step: Callable[[], Any], *, warm_up: int = 4) -> dict[str, Any]:
    for _ in range(warm_up):
        step()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    observer = StepObserver(_CONVENTION)
    observer.enter()
    step()
    observation = observer.leave()
    torch.cuda.synchronize()
    count = observation.count()
    return {
        "forward": count.forward,
        "backward": count.backward,
        "problem": observation.problem,
        "compiled_meanwhile": torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs,
    }


def _step_of(model: Callable[..., Any], x: torch.Tensor) -> Callable[[], None]:
    parameters = list(getattr(model, "parameters", list)())

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None  # else the next replay would add to memory that it overwrites
        model(x).square().mean().backward()

    return step


def _captured_step(x: torch.Tensor) -> Callable[[], None]:
    model = _model()
    step = _step_of(model, x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def main() -> int:
    """Print a row per way; 1 if one differs."""
    cuda_captures(_CONVENTION).hold()
    x = torch.randn(64, 512, device="cuda")
    rows = {"eager": _observed(_step_of(_model(), x)), "captured step": _observed(_captured_step(x))}
    graphed = torch.cuda.make_graphed_callables(_model(), (x,))
    rows["make_graphed_callables"] = _observed(_step_of(graphed, x))
    for mode in ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"):
        torch._dynamo.reset()
        rows[f"compile, {mode}"] = _observed(_step_of(torch.compile(_model(), mode=mode), x))
    for name, row in rows.items():
        print(f"{name:40} {row}")
    expected = (rows["eager"]["forward"], rows["eager"]["backward"])
    differs = [name for name, row in rows.items() if (row["forward"], row["backward"]) != expected]
    print(json.dumps({"rows": rows, "differs": differs}))
    return int(bool(differs))


if __name__ == "__main__":
    raise SystemExit(main())
