"""Which torch the tests run with: some hold for newer ones alone."""

from __future__ import annotations

import torch

TORCH = tuple(int(number) for number in torch.__version__.split(".")[:2])
