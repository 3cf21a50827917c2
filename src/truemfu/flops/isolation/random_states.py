"""Keeps the random generators that a process shares as they were before a count.

A model on fake tensors draws no numbers of torch, but it may seed its generators, and draw from those of
Python and NumPy.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def preserved_random_states() -> Iterator[None]:
    """Restore the states of torch's, Python's and NumPy's global generators after the code inside has run."""
    numpy_random = getattr(sys.modules.get("numpy"), "random", None)
    on_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    in_torch, in_python = torch.default_generator.get_state(), random.getstate()
    in_numpy = None if numpy_random is None else numpy_random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(in_torch)
        random.setstate(in_python)
        if numpy_random is not None:
            numpy_random.set_state(in_numpy)
        if on_cuda is not None:
            torch.cuda.set_rng_state_all(on_cuda)
