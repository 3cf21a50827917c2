"""A run under a monitor in hostile surroundings: streams, trackers, folders, arguments, values, threads.

Each circumstance runs alone in several configurations, and many pairs of them together.
"""

from __future__ import annotations

import errno
import io
import os
import random
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .attack import Attack
from .training import LOG, Circumstance, Net, check_run, together

CONFIGURATIONS: tuple[Mapping[str, Any], ...] = (
    {},
    {"mfu_calculation_mode": "estimate"},
    {"save_freq": 1, "flops_profile_freq": 3},
    {"save_freq": 2, "detailed_log_freq": 2},
)
_PAIRS = 70
_FOREVER_S = 3600.0


class Exits(BaseException):
    """Not an Exception."""


RAISED: tuple[type[BaseException], ...] = (
    ValueError,
    OSError,
    MemoryError,
    RecursionError,
    SystemExit,
    Exits,
)


class _FailingStream(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError("no such terminal")

    def flush(self) -> None:
        raise OSError("no such terminal")

    def isatty(self) -> bool:
        raise OSError("no such terminal")


def _closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


def _ascii() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")


def _raises(kind: type[BaseException], *args: Any, **kwargs: Any) -> Any:
    raise kind("injected")


def _hangs(*args: Any, **kwargs: Any) -> Any:
    time.sleep(_FOREVER_S)


def _streams() -> dict[str, Circumstance]:
    def stream(make: Callable[[], Any]) -> Circumstance:
        def before(folder: Path) -> None:
            warnings.simplefilter("always")
            sys.stderr = make()

        # A value that is no number has the monitor warn.
        return Circumstance(before=before, values=lambda step: {"grad_norm": object()})

    def handler(kind: type[BaseException]) -> Circumstance:
        def before(folder: Path) -> None:
            warnings.simplefilter("always")
            warnings.showwarning = partial(_raises, kind)

        return Circumstance(before=before, values=lambda step: {"grad_norm": object()})

    def as_errors(folder: Path) -> None:
        warnings.simplefilter("error")

    found = {
        f"stderr {name}": stream(make)
        for name, make in {
            "closed": _closed,
            "failing": _FailingStream,
            "ascii": _ascii,
            "None": lambda: None,
        }.items()
    }
    found |= {
        f"showwarning raises {kind.__name__}": handler(kind)
        for kind in RAISED
        if kind is not KeyboardInterrupt
    }
    found["warnings are errors"] = Circumstance(before=as_errors, values=lambda step: {"loss": "no number"})
    return found


class _Tracker:
    """Does what it is told in one of the four methods, from the n-th call on."""

    def __init__(self, method: str, action: Callable[..., Any], from_call: int) -> None:
        self._method, self._action, self._left = method, action, from_call

    def _called(self, method: str, *args: Any) -> Any:
        if method == self._method:
            self._left -= 1
            if self._left < 0:
                return self._action(*args)
        return None

    def start(self, run: Any) -> Any:
        return self._called("start", run)

    def log(self, step: int, metrics: Any) -> Any:
        return self._called("log", step, metrics)

    def flush(self) -> Any:
        return self._called("flush")

    def finish(self, summary: Any) -> Any:
        return self._called("finish", summary)


def _destroy(*args: Any) -> None:
    """Changes what it is given."""
    for argument in args:
        if isinstance(argument, dict):
            argument.clear()
            argument["global_step"] = object()


def _trackers() -> dict[str, Circumstance]:
    actions: dict[str, Callable[..., Any]] = {
        f"raises {kind.__name__}": partial(_raises, kind) for kind in (*RAISED, KeyboardInterrupt)
    }
    actions |= {"hangs": _hangs, "returns garbage": lambda *args: object(), "changes its arguments": _destroy}
    found = {}
    for method in ("start", "log", "flush", "finish"):
        for what, action in actions.items():
            for first in (0, 2):
                if first and method in ("start", "finish"):
                    continue
                make = partial(_Tracker, method, action, first)
                found[f"tracker {what} in {method} {first}"] = Circumstance(
                    trackers=lambda make=make: [make()]
                )
    return found


class _NoDict:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no attributes here")


class _NoHash:
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not comparable")


class _NoLength(dict[str, Any]):
    def __len__(self) -> int:
        raise RuntimeError("no length")

    def __iter__(self) -> Any:
        raise RuntimeError("no keys")

    items = values = keys = __iter__  # type: ignore[assignment]


class _NoRepr:
    def __repr__(self) -> str:
        raise RuntimeError("no words")

    __str__ = __format__ = __repr__  # type: ignore[assignment]


class _NoAttributes:
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")


class _NoClass:
    @property
    def __class__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no class")


class _NoNumber:
    def __int__(self) -> int:
        raise LookupError("not a number")

    __float__ = __index__ = __bool__ = __int__  # type: ignore[assignment]


def _itself() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


def _deep() -> list[Any]:
    found: list[Any] = []
    for _ in range(20_000):
        found = [found]
    return found


def _arguments() -> dict[str, Circumstance]:
    odd: dict[str, Callable[[], Any]] = {
        "no __dict__": _NoDict,
        "no hash": _NoHash,
        "no length": _NoLength,
        "no repr": _NoRepr,
        "no attributes": _NoAttributes,
        "no class": _NoClass,
        "no number": _NoNumber,
        "contains itself": _itself,
        "20,000 levels deep": _deep,
        "an object": object,
        "a set of tensors": lambda: {torch.ones(1)},
        "a nested tensor": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "a sparse tensor": lambda: torch.ones(2, 2).to_sparse(),
        "a meta tensor": lambda: torch.ones(2, device="meta"),
        "a complex tensor": lambda: torch.ones(2, dtype=torch.complex64),
        "an empty tensor": lambda: torch.ones(0),
        "a tensor of 40 dimensions": lambda: torch.ones([1] * 40),
        "a huge integer": lambda: 10**400,
        "a generator": lambda: (number for number in range(3)),
        "a module": Net,
        "surrogates": lambda: "\udcff",
        "a megabyte of text": lambda: "x" * 2**20,
    }

    return {
        f"argument {name} {when}": Circumstance(arguments=partial(_given, first=first, only=only, make=make))
        for name, make in odd.items()
        for when, first, only in (("from the start", 1, False), ("once, late", 7, True))
    }


def _given(step: int, *, first: int, only: bool, make: Callable[[], Any]) -> dict[str, Any]:
    is_given = step == first if only else step >= first
    return {"extra": make()} if is_given else {}


def _values() -> dict[str, Circumstance]:
    odd: dict[str, Callable[[], Any]] = {
        "NaN": lambda: float("nan"),
        "infinite": lambda: torch.tensor(float("-inf")),
        "no number": _NoNumber,
        "no repr": _NoRepr,
        "no attributes": _NoAttributes,
        "no class": _NoClass,
        "huge": lambda: 10**400,
        "text": lambda: "\x1b[2J\udcff",
        "None": lambda: None,
        "bytes": lambda: b"\xff",
        "a complex tensor": lambda: torch.ones((), dtype=torch.complex64),
        "a meta tensor": lambda: torch.ones((), device="meta"),
        "a tensor of three": lambda: torch.ones(3),
        "an empty tensor": lambda: torch.ones(0),
        "a nested tensor": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "contains itself": _itself,
        "True": lambda: True,
    }
    found = {}
    for name in (
        "step",
        "epoch",
        "loss",
        "grad_norm",
        "learning_rate",
        "attention_mask",
        "skip_wandb",
        "flops",
    ):
        for what, make in odd.items():
            if name == "skip_wandb" and what not in ("no number", "None", "a tensor of three"):
                continue  # most are true, and then the trackers get no row, as asked for
            when = 5 if name == "step" else None
            found[f"{name} is {what}"] = Circumstance(values=partial(_value, name=name, make=make, when=when))
    return found


def _value(step: int, *, name: str, make: Callable[[], Any], when: int | None) -> dict[str, Any]:
    return {name: make()} if when is None or step == when else {}


def _full(folder: Path, *, number: int, calls: int) -> None:
    """The disk is full for so many writes, then has room again."""
    write, left = os.pwrite, [calls]

    def pwrite(file: int, data: Any, at: int) -> int:
        if left[0] > 0:
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        return write(file, data, at)

    os.pwrite = pwrite


def _short_writes(folder: Path) -> None:
    """Every write takes a few bytes alone."""
    write = os.pwrite
    os.pwrite = lambda file, data, at: write(file, bytes(data)[:7], at)


_is_hung = threading.Event()


def _hung(folder: Path) -> None:
    """A dead network file system: whatever touches the run's folder waits for ever."""
    inside = str(folder)
    _is_hung.set()
    for name in ("open", "mkdir", "stat", "lstat", "rename", "replace", "unlink", "scandir", "listdir"):
        real = getattr(os, name)

        def waits(path: Any, *args: Any, real: Any = real, **kwargs: Any) -> Any:
            if (
                isinstance(path, (str, os.PathLike))
                and os.fspath(path).startswith(inside)
                and _is_hung.is_set()
            ):
                time.sleep(_FOREVER_S)
            return real(path, *args, **kwargs)

        setattr(os, name, waits)


def _put(folder: Path, name: str, make: Callable[[Path], None]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    make(folder / name)


def _loop(path: Path) -> None:
    path.symlink_to(path)


def _link_outside(path: Path) -> None:
    foreign = path.parent.parent / "foreign.txt"
    foreign.write_text("mine")
    path.symlink_to(foreign)


def _foreign_is_untouched(step: int, folder: Path, monitor: Any) -> None:
    assert (folder.parent / "foreign.txt").read_text() == "mine"


def _write(content: bytes, path: Path) -> None:
    path.write_bytes(content)


def _at(when: int, action: Callable[[Path], None], step: int, folder: Path, monitor: Any) -> None:
    if step == when:
        monitor.save_logs()
        action(folder)


def _truncate(by: int, folder: Path) -> None:
    path = folder / LOG
    os.truncate(path, max(path.stat().st_size - by, 0))


def _folders() -> dict[str, Circumstance]:
    things: dict[str, Callable[[Path], None]] = {
        "a folder": Path.mkdir,
        "a FIFO": os.mkfifo,
        "a loop": _loop,
        "empty": Path.touch,
        "text": partial(_write, b"not JSON at all"),
        "zeros": partial(_write, bytes(5000)),
        "torn": partial(_write, b'[\n{"global_step": 1, "training/lo'),
        "an object": partial(_write, b"{}"),
        "deep": partial(_write, b"[" * 100_000),
    }
    keeps_log = {"empty", "torn"}
    found = {}
    for name in (LOG, "training_run.json", "training_run.tmp"):
        for what, make in things.items():
            is_log = name == LOG
            found[f"{name} is {what}"] = Circumstance(
                before=partial(_put, name=name, make=make),
                is_harmless=not is_log or what in {"text", "zeros", "an object", "deep", *keeps_log},
            )
    found["training_run.json is a link to a foreign file"] = Circumstance(
        before=partial(_put, name="training_run.json", make=_link_outside), after_step=_foreign_is_untouched
    )
    found["the folder is a file"] = Circumstance(before=Path.touch, is_harmless=False)
    found["the folder is a loop"] = Circumstance(before=_loop, is_harmless=False)
    found["the folder hangs"] = Circumstance(before=_hung, after_close=_is_hung.clear, is_harmless=False)
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE):
        for calls in (1, 2, 10**9):
            found[f"{errno.errorcode[number]} for {calls} writes"] = Circumstance(
                before=partial(_full, number=number, calls=calls), is_harmless=calls == 1
            )
    for number in (errno.EROFS, errno.EBADF):
        found[f"{errno.errorcode[number]} for ever"] = Circumstance(
            before=partial(_full, number=number, calls=10**9), is_harmless=False
        )
    found["writes of seven bytes"] = Circumstance(before=_short_writes)
    changes: dict[str, Callable[[Path], None]] = {
        # the monitor may replace a file meanwhile
        "removed": lambda folder: shutil.rmtree(folder, ignore_errors=True),
        "moved": lambda folder: folder.rename(folder.with_name("moved")),
        "its log removed": lambda folder: (folder / LOG).unlink(),
        "its log truncated to nothing": lambda folder: os.truncate(folder / LOG, 0),
        "its log truncated by 1": partial(_truncate, 1),
        "its log truncated by 100": partial(_truncate, 100),
        "its log replaced": lambda folder: ((folder / LOG).unlink(), (folder / LOG).mkdir()),
    }
    for what, change in changes.items():
        # Of rows in a file that was removed as a whole there is no account.
        found[f"the folder is {what}"] = Circumstance(
            after_step=partial(_at, 5, change), is_harmless=False, log_must_load="truncated" in what
        )
    return found


def _forks(step: int, folder: Path, monitor: Any, *, uses_it: bool) -> None:
    if step not in (1, 6):
        return
    child = os.fork()
    if not child:
        if uses_it:
            monitor.log_step(step + 1, 0, 1.0, 1.0, 1.0)
            monitor.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def _from_threads(step: int, folder: Path, monitor: Any) -> None:
    def ask() -> None:
        monitor.summary()
        monitor.save_logs()
        _ = monitor.last

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    if step % 3 == 0:
        for thread in threads:
            thread.join()


def _signal_itself(step: int, folder: Path, monitor: Any, *, number: int) -> None:
    if step in (2, 6):
        os.kill(os.getpid(), number)


class _ExitsInCount(Net):
    """Wants to end the process where it is not trained but counted."""

    def forward(self, x: torch.Tensor, extra: Any = None) -> torch.Tensor:
        if type(x) is not torch.Tensor:
            sys.exit(3)
        return super().forward(x, extra)


class _RaisesInCount(Net):
    def forward(self, x: torch.Tensor, extra: Any = None) -> torch.Tensor:
        if type(x) is not torch.Tensor:
            raise Exits("injected")
        return super().forward(x, extra)


class _NoSetattr(Net):
    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "is_made", True)

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(self, "is_made", False):
            raise AttributeError("frozen")
        super().__setattr__(name, value)


class _NoRepresentation(Net):
    def __repr__(self) -> str:
        raise RuntimeError("no words")

    _get_name = extra_repr = __repr__


class _NoConfig(Net):
    @property
    def config(self) -> Any:
        raise ValueError("no configuration")

    loss_type = config


def _processes() -> dict[str, Circumstance]:
    def handled(folder: Path) -> None:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, lambda *_: None)

    def no_threads(folder: Path) -> None:
        threading.Thread.start = partial(_raises, RuntimeError)

    def random_state(step: int, folder: Path, monitor: Any) -> None:
        monitor.summary()

    found = {
        "forks that leave": Circumstance(after_step=partial(_forks, uses_it=False)),
        "forks that log": Circumstance(after_step=partial(_forks, uses_it=True)),
        "four threads ask": Circumstance(after_step=_from_threads),
        "summary after each step": Circumstance(after_step=random_state),
        "no threads can be started": Circumstance(before=no_threads, is_harmless=False),
        "a model that exits in the count": Circumstance(model=_ExitsInCount),
        "a model that raises in the count": Circumstance(model=_RaisesInCount),
        "a model that takes no attributes": Circumstance(model=_NoSetattr),
        "a model whose properties raise": Circumstance(model=_NoConfig),
        "a model without words": Circumstance(model=_NoRepresentation),
    }
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        found[f"{signal.Signals(number).name} that is handled"] = Circumstance(
            before=handled, after_step=partial(_signal_itself, number=number)
        )
    return found


_GROUPS = (_streams, _trackers, _arguments, _values, _folders, _processes)


def attacks(chance: random.Random) -> list[Attack]:
    """Each circumstance alone, and pairs of them, each with a configuration and a number of steps."""
    groups = [group() for group in _GROUPS]
    known = {name: around for group in groups for name, around in group.items()}
    chosen = [(name,) for name in known]
    chosen += [tuple(chance.choice([*group]) for group in chance.sample(groups, 2)) for _ in range(_PAIRS)]
    found = []
    for names in chosen:
        config = chance.choice(CONFIGURATIONS)
        steps, seed = chance.randint(9, 25), chance.randrange(2**31)
        around = together([*(known[name] for name in names), Circumstance(config=config)])
        run = partial(check_run, around, steps=steps, seed=seed)
        found.append(
            Attack(
                f"{' and '.join(names)}, {steps} steps, {dict(config)}", lambda folder, run=run: run(folder)
            )
        )
    return found
