"""A bare training loop with the monitor: three lines more than without.

python examples/bare_loop.py
"""

from __future__ import annotations

import torch

from truemfu import TrainingMonitor
from truemfu.sweep.worker.models import build_reference_model

STEPS = 200


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build_reference_model("tiny", device=device, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    monitor = TrainingMonitor("out/bare_loop", model=model)  # 1
    for step in range(1, STEPS + 1):
        tokens = torch.randint(1000, (8, 128), device=device)
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        monitor.log_step(step, 0, loss, grad_norm, optimizer.param_groups[0]["lr"])  # 2
    monitor.close()  # 3: prints the summary; at exit it would happen by itself

    print("rows in out/bare_loop/training_log.json; a CPU has no peak: set TRUEMFU_PEAK_TFLOPS to see an MFU")


if __name__ == "__main__":
    main()
