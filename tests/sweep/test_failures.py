"""An exception becomes an end, also where it was put in other words on its way."""

from __future__ import annotations

import errno

import pytest
import torch

from truemfu.errors import ModelError
from truemfu.records import Status
from truemfu.sweep.failures import status_of
from truemfu.sweep.trainers.base import Unsupported


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), Status.CUDA_OOM),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), Status.CUDA_OOM),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried …"), Status.HOST_OOM),
        (MemoryError(), Status.HOST_OOM),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), Status.HOST_OOM),
        (Unsupported("not on a Sunday"), Status.UNSUPPORTED),
        (RuntimeError("could not create a primitive"), Status.ERROR),
        (ValueError("out of memory"), Status.ERROR),
    ],
)
def test_an_error_has_the_same_end_when_it_is_the_cause_of_another(error: Exception, end: Status) -> None:
    assert status_of(error)[0] is end
    wrapped = ModelError("the configuration does not build a model")
    wrapped.__cause__ = error
    assert status_of(wrapped)[0] is (Status.ERROR if end is Status.UNSUPPORTED else end)


def test_errors_that_cause_each_other_end(never_waits: None) -> None:
    first, second = RuntimeError("first"), RuntimeError("second")
    first.__cause__, second.__cause__ = second, first
    assert status_of(first) == (Status.ERROR, "RuntimeError: first")
