"""Which torch the tests run with: some hold for newer ones alone."""

from __future__ import annotations

import torch

HAS_FSDP2_ON_CPU = hasattr(torch.cpu.Stream, "record_event")
TORCH = tuple(int(number) for number in torch.__version__.split(".")[:2])
