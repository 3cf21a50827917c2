"""An Accelerate loop with the monitor: one line more than without. Random weights, seconds on a CPU.

python examples/accelerate_loop.py
"""

from __future__ import annotations

import torch
from accelerate import Accelerator

from truemfu.integrations.accelerate import watch
from truemfu.sweep.worker.models import build_reference_model


def main() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    monitor = watch(accelerator, "out/accelerate_loop")  # the line

    model = build_reference_model("tiny", device="cpu", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    loader = torch.utils.data.DataLoader(torch.randint(1000, (320, 64)), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for index, tokens in enumerate(loader, start=1):
        with accelerator.accumulate(model):
            loss = model(tokens, labels=tokens).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if index % 20 == 0:
            with monitor.pause("evaluation"), torch.no_grad():
                model(tokens, labels=tokens)
    accelerator.end_training()  # prints the summary

    print("rows in out/accelerate_loop; a CPU has no peak: set TRUEMFU_PEAK_TFLOPS to see an MFU")


if __name__ == "__main__":
    main()
