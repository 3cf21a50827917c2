"""An exception turned into an end: which kind of failure it is, and one line about it."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import torch

from ..errors import one_line, text_of
from ..records import End
from .trainers.base import Unsupported
from .worker.memory_limit import is_limited

# Memory of the GPU taken past torch's allocator fails with an error of the library that asked for it.
_CUDA_OOM_TEXTS = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
# What oneDNN says when it gets no memory for the code it makes, and for other reasons.
_NO_PRIMITIVE = "could not create a primitive"
_HOST_OOM_TEXTS = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")


def end_of(error: BaseException) -> tuple[End, str]:
    """How an experiment that raised this ended, and why, in one line."""
    if is_cuda_oom(error):
        return End.CUDA_OOM, one_line(error)
    if is_host_oom(error):
        return End.HOST_OOM, one_line(error)
    if isinstance(error, Unsupported):
        return End.UNSUPPORTED, one_line(error)
    return End.ERROR, one_line(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory, of the GPU or the host, was too small."""
    return is_cuda_oom(error) or is_host_oom(error)


def is_cuda_oom(error: BaseException) -> bool:
    """Whether the GPU's memory was too small."""
    return any(map(_says_cuda_oom, _with_causes(error)))


def is_host_oom(error: BaseException) -> bool:
    """Whether the host's memory, or the limit set for this process, was too small."""
    return any(map(_says_host_oom, _with_causes(error)))


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from: building a model that does not fit is said in other words."""
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
