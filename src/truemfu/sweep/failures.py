"""The status of an experiment that raised: the category of the failure, and one line about it."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import torch

from ..errors import one_line, text_of
from ..records import Status
from .trainers.base import Unsupported
from .worker.memory_limit import is_limited

# GPU memory allocated outside torch's allocator fails with an error of the library that requested it.
_CUDA_OOM_TEXTS = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
# oneDNN's error if it gets no memory for the code it generates, and for other reasons.
_NO_PRIMITIVE = "could not create a primitive"
_HOST_OOM_TEXTS = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")


def status_of(error: BaseException) -> tuple[Status, str]:
    """The status of an experiment that raised this error, and the reason in one line."""
    if is_cuda_oom(error):
        return Status.CUDA_OOM, one_line(error)
    if is_host_oom(error):
        return Status.HOST_OOM, one_line(error)
    if isinstance(error, Unsupported):
        return Status.UNSUPPORTED, one_line(error)
    return Status.ERROR, one_line(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the GPU or the host ran out of memory."""
    return is_cuda_oom(error) or is_host_oom(error)


def is_cuda_oom(error: BaseException) -> bool:
    """Whether the GPU ran out of memory."""
    return any(map(_says_cuda_oom, _with_causes(error)))


def is_host_oom(error: BaseException) -> bool:
    """Whether the host ran out of memory, or this process reached its limit."""
    return any(map(_says_host_oom, _with_causes(error)))


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes: a model that does not fit may be reported by a wrapping error."""
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__


def _says_cuda_oom(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in text_of(error) for text in _CUDA_OOM_TEXTS)


def _says_host_oom(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if not isinstance(error, RuntimeError):
        return False
    text = text_of(error)
    return any(known in text for known in _HOST_OOM_TEXTS) or (_NO_PRIMITIVE in text and is_limited())
