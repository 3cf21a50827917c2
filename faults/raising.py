"""Every call that leaves our code raises: each site in turn, once an Exception and once a BaseException.

A run is watched once with a profile function, on every thread, which notes each place in truemfu that calls
something else: a function of Python, torch, msgspec or the operating system. An attack is the same run in
which the n-th call from one of these places raises in the place of what it calls. On threads of ours nothing
may leave, whatever is raised. On the training thread no Exception may leave; a BaseException there is what a
handler of a signal raises: it ends the training loop, as it would without a monitor, and every step before it
is still a row or counted.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

import truemfu
from truemfu import TrainingMonitor

from .attack import Attack
from .training import (
    Circumstance,
    Kept,
    Net,
    assert_same,
    check_account,
    close_in_time,
    rows_in,
    trained,
    weights_after,
)

_OURS = os.path.dirname(os.path.abspath(truemfu.__file__)) + os.sep
_PARTS = ("monitor", "trackers", "torch_private", "plain_files.py", "commit.py", "provenance.py", "text.py")
_STEPS = 14
_SAVED_AT = 9
_SEED = 7
_CANNOT_FAIL = frozenset(
    (
        "perf_counter",
        "monotonic",
        "thread_time",
        "getpid",
        "get_ident",
        "current_thread",
        "acquire",
        "release",
        "__enter__",
        "__exit__",
        "set",
        "is_set",
        "clear",
        "is_alive",
        "notify_all",
        "__del__",
        "is_grad_enabled",
        "is_compiling",
        "is_dynamo_compiling",
        "is_inference_mode_enabled",
        "set_eval_frame",
        "_current_graph_task_id",
        "_get_sequence_nr",
        "_getframe",
        "__eq__",
        "__hash__",
        "__fspath__",
        "__str__",
        "_engine_run_backward",
    )
)
"""Clocks, identities, locks, flags (torch's own included), own frames and comparisons of paths: nothing makes
these raise, and no code survives a lock that is not released. The last is the program's own backward pass,
whose error is the program's."""
_OF_THE_PROGRAM = frozenset({("torch_private/phase_changes.py", "__init__")})
"""Calls that the program makes itself, of what stands in for torch: their error is the program's."""
_KINDS: tuple[type[BaseException], ...] = (RuntimeError, OSError, MemoryError, ValueError)


class Injected(BaseException):
    """Raised in the place of a call; not an Exception."""


class Site(NamedTuple):
    """A place in our code, what it calls, and whether that is on the training thread."""

    file: str
    line: int
    callee: str
    is_training: bool

    def __str__(self) -> str:
        thread = "the training thread" if self.is_training else "a thread of ours"
        return f"{self.file}:{self.line} → {self.callee} on {thread}"


def _is_outside(function: Any) -> bool:
    """Whether a function written in C is of something that can fail: no method of a built-in type."""
    owner = getattr(function, "__self__", None)
    module = getattr(function, "__module__", None)
    if owner is not None and not isinstance(owner, type(os)):
        module = type(owner).__module__
    return module not in (None, "builtins", "collections", "_thread", "_contextvars", "_weakref")


def _site(frame: FrameType, event: str, argument: Any, training: int) -> Site | None:
    """The place in our code from which this event is a call to the outside; None where it is none."""
    if event == "c_call":
        caller, callee = frame, getattr(argument, "__name__", "")
        if not caller.f_code.co_filename.startswith(_OURS) or not _is_outside(argument):
            return None
    elif event == "call" and frame.f_back is not None:
        caller, callee = frame.f_back, frame.f_code.co_name
        inside = frame.f_code.co_filename
        if inside.startswith((_OURS, "<")) or not caller.f_code.co_filename.startswith(_OURS):
            return None
    else:
        return None
    name = caller.f_code.co_filename[len(_OURS) :]
    if callee in _CANNOT_FAIL or (name, callee) in _OF_THE_PROGRAM or not name.startswith(_PARTS):
        return None
    return Site(name, caller.f_lineno, callee, threading.get_ident() == training)


class Ran(NamedTuple):
    """A monitored run whose calls were seen."""

    monitor: TrainingMonitor
    kept: Kept
    logged: int
    """The last step whose `log_step` came back."""
    weights: list[list[torch.Tensor]]
    was_ended: bool
    """Whether a BaseException ended the training loop."""
    was_left: bool
    """Whether one ended `close`."""


def _run(folder: Path, on_call: Callable[[Site], None]) -> Ran:
    """Train; `on_call` hears of each call out of our code from the first forward pass to the end."""
    training = threading.get_ident()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if (site := _site(frame, event, argument, training)) is not None:
            on_call(site)

    torch.manual_seed(_SEED)
    model, kept, logged = Net(), Kept(), [0]
    config = {"monitoring": {"peak_tflops": 10.0, "save_freq": 4}}
    monitor = TrainingMonitor(folder / "out", config, model=model, trackers=[kept])
    weights: list[list[torch.Tensor]] = []
    was_ended = was_left = False

    def log(step: int, loss: torch.Tensor) -> None:
        monitor.log_step(step, 0, loss, 1.0, 0.1)
        logged[0] = step
        if step == _SAVED_AT:
            monitor.save_logs()

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        weights = trained(model, Circumstance(), range(1, _STEPS + 1), log)
    except (Injected, SystemExit):
        was_ended = True
    try:
        close_in_time(monitor)
    except (Injected, SystemExit):
        was_left = True
    sys.setprofile(None)
    threading.setprofile(None)  # type: ignore[arg-type]
    return Ran(monitor, kept, logged[0], weights, was_ended, was_left)


def _attack(folder: Path, *, site: Site, call: int, kind: type[BaseException]) -> None:
    expected = weights_after(Circumstance(), _STEPS, _SEED)
    left = [call]

    def on_call(here: Site) -> None:
        if here == site:
            left[0] -= 1
            if not left[0]:
                raise kind("injected")

    ran = _run(folder, on_call)
    out = folder / "out"
    if ran.was_left:  # whoever ends `close` has not waited for all rows; the log loads
        assert site.is_training
        rows_in(out)
        return
    if ran.was_ended:
        assert site.is_training, "what was raised on a thread of ours has left it"
    else:
        assert ran.logged == _STEPS
        assert_same(expected, ran.weights)
    try:
        check_account(ran.monitor, out, ran.kept, ran.logged, is_harmless=False)
    except AssertionError:
        if not ran.was_ended:
            raise
        # The step that was being logged may be a row by then.
        check_account(ran.monitor, out, ran.kept, ran.logged + 1, is_harmless=False)


def _watched() -> list[tuple[Site, int]]:
    """The sites of a run without a fault, and how often each is called; in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        counted: dict[Site, int] = {}

        def on_call(site: Site) -> None:
            counted[site] = counted.get(site, 0) + 1

        _run(Path(folder), on_call)
    return sorted(counted.items())


def sites() -> list[tuple[Site, int]]:
    """As `_watched`; this process stays without threads, so that it can be forked."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "faults.raising"],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=True,
        timeout=300,
    )
    return [(Site(*site), number) for site, number in json.loads(done.stdout)]


def attacks(chance: random.Random) -> list[Attack]:
    """Each site × Exception and BaseException, at the first call or a later one."""
    found = []
    for site, number in sites():
        for kind in (chance.choice(_KINDS), chance.choice((SystemExit, Injected))):
            call = 1 if chance.random() < 0.6 else chance.randint(1, number)
            run = partial(_attack, site=site, call=call, kind=kind)
            found.append(Attack(f"{site}, call {call}, {kind.__name__}", lambda folder, run=run: run(folder)))
    return found


if __name__ == "__main__":
    from .preload import preload

    preload()
    result = json.dumps(_watched())
    sys.__stdout__.write(result)
    sys.__stdout__.flush()
    os._exit(0)
