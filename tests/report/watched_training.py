"""A training run on the CPU, watched by a real monitor; and what counters would add to its summary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from truemfu import TrainingMonitor
from truemfu.waterfall import WaterfallInputs, waterfall

GPU_PEAK_FLOPS_PER_S = 989.4e12
RUN_STEPS = 20
PEAK_TFLOPS = 0.05
PADDING_LOST = 0.125


class Net(nn.Module):
    """An embedding and a product: enough for a loss that falls."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(input_ids) * attention_mask[..., None])


def train_watched(folder: Path) -> None:
    """Train for `RUN_STEPS` steps and leave in `folder` what the monitor writes."""
    torch.manual_seed(0)
    model, ids = Net(), torch.randint(0, 50, (4, 16))
    mask = torch.ones_like(ids)
    mask[:, 14:] = 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with TrainingMonitor(folder, {"monitoring": {"peak_tflops": PEAK_TFLOPS}}, model=model) as monitor:
        for step in range(1, RUN_STEPS + 1):
            logits = model(input_ids=ids, attention_mask=mask)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.log_step(step, 0.0, loss, 1.0, 0.5)


def hardware_block(**changed: Any) -> dict[str, Any]:
    """As a monitor with counters writes it."""
    fall = waterfall(
        WaterfallInputs(
            peak_flops_per_s=GPU_PEAK_FLOPS_PER_S,
            model_flops_per_s=0.38 * GPU_PEAK_FLOPS_PER_S,
            hardware_flops_per_s=0.43 * GPU_PEAK_FLOPS_PER_S,
            executed_flops_per_s=0.437 * GPU_PEAK_FLOPS_PER_S,
            datasheet_clock_hz=1.83e9,
            mean_clock_hz=1.716e9,
            throttle={"power_limit": 0.8},
            gpu_busy_share=0.93,
            sm_active_share=0.846,
            tensor_active_share=0.472,
            data_wait_share=0.03,
            padding_efficiency=0.9,
        )
    )
    assert fall is not None
    block = {
        "windows": 12,
        "seconds": 120.3,
        "executed_flops_per_s": 4.3e14,
        "executed_hfu": 0.437,
        "executed_over_counted": 0.95,
        "executed_over_expected": 1.01,
        "clock_hz": 1.716e9,
        "clock_source": "cycle counters",
        "reported_clock_hz": 1.828e9,
        "power_w": 689.1,
        "energy_j_per_step": 100.2,
        "energy_j_per_million_tokens": 12000.0,
        "tensor_active": 0.462,
        "sm_active": 0.846,
        "dram_active": 0.268,
        "limiter": fall.limiter,
        "advice": list(fall.advice()),
        "waterfall": fall.as_dict(),
    }
    return block | changed
