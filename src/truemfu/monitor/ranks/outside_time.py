"""How much of its time a training thread is not in a collective, whatever it does there.

A thread of ours looks about twenty times a second at which Python code the training thread executes; the
step path has no part in it. Two places are taken to be collectives: code of `torch.distributed`, and the call
into autograd's engine, in which DDP waits for the other ranks. Python code inside a backward pass (a
hook, an `autograd.Function`) is a place of its own. So the share is a lower bound: operators of the backward
pass are not in it. A wait for other ranks in another library, or by `work.wait()` in the program itself, is:
such a job has the same share on all ranks, and none is named for it.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import weakref
from collections.abc import Iterator
from operator import attrgetter, itemgetter
from types import CodeType

import torch.autograd.graph
import torch.distributed

_MEAN_INTERVAL_S = 0.05
_FEWEST = 20
"""Looks: a share of fewer says nothing."""
_DISTRIBUTED = os.path.dirname(torch.distributed.__file__) + os.sep
_ENGINE = torch.autograd.graph.__file__


_DEADLOCKS = (3, 11) <= sys.version_info < (3, 11, 5)
"""Whether Python may run a garbage collection while it lists the threads, and then wait for ever."""


class OutsideTime:
    """Looks at the thread that makes it until `close`, or until that thread ends."""

    def __init__(self) -> None:
        self._codes = _codes_of(threading.get_ident())
        self._of_thread = threading.local()
        self._of_thread.life = life = _Life()
        self._life = weakref.ref(life)
        """Dead once the thread is: its number may be that of another one then, this object's own included."""
        self._looks = self._outside = 0
        self._last = (0, 0)
        self._is_over = threading.Event()
        self._intervals = random.Random(0)
        """Irregular, so that looks do not fall on the same place of every step."""
        self._looking = threading.Thread(target=self._live, name="truemfu-outside", daemon=True)
        self._looking.start()

    def share(self) -> float | None:
        """Since the last call; None after too few looks."""
        (looks, outside), now = self._last, (self._looks, self._outside)
        if now[0] - looks < _FEWEST:
            return None
        self._last = now
        return (now[1] - outside) / (now[0] - looks)

    def close(self) -> None:
        """Look no more."""
        self._is_over.set()

    def _live(self) -> None:
        while not (_DEADLOCKS or self._is_over.wait(2 * _MEAN_INTERVAL_S * self._intervals.random())):
            try:
                code = next(self._codes)
            except KeyError:
                return  # no thread has its number
            if self._life() is None:
                return  # the code may be another thread's
            self._outside += not _is_collective(code)
            self._looks += 1


class _Life:
    """Held by a thread alone."""


def _codes_of(thread: int) -> Iterator[CodeType]:
    """The code that a thread executes at each `next`, which raises a KeyError without such a thread.

    Without bytecode between the steps, no other thread runs meanwhile: a frame that is held while its thread
    leaves it would keep the variables of the program alive, and end them here.
    """
    frames = map(itemgetter(thread), iter(sys._current_frames, None))
    return map(attrgetter("f_code"), frames)


def _is_collective(code: CodeType) -> bool:
    return code.co_filename == _ENGINE or code.co_filename.startswith(_DISTRIBUTED)
