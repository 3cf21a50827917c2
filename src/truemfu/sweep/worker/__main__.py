"""One experiment in a process of its own, started by the supervisor (`launchers.local.WORKER`).

    die with the supervisor ─► imports ─► one order on stdin ─► its own log ─► experiment ─┐
                               (no CUDA)  (none: exit 0)                                   │
        to the supervisor, which writes it to results/<name>.json and the end of the log ◄─┘

Exit codes: 0 measured (a probe: it fits), 1 failed, with the reason in the result.
The worker may be started long before its order: until then it only imports, those of its arguments too.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import NoReturn

from ...plain_files import Descriptor, open_plain
from ..process import ANSWER_NAME
from .worker_process import die_with_parent, exit_at_once, find_modules_here, send

STARTED_AT_S = time.time()


def main() -> int:
    """Wait for an order, run it, report the result."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # so any KeyboardInterrupt was raised by a trainer
    answer = Descriptor(int(os.environ.pop(ANSWER_NAME)))
    os.set_inheritable(answer.number, False)  # no child of the trainer inherits it
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # hides the profiler's start messages
    for name in sys.argv[1:]:
        with contextlib.suppress(ImportError):  # the trainer that needs it reports that in its result
            importlib.import_module(name)

    from torch import nn

    from ..order import decode_order
    from ..trainers.base import TrainerSettings
    from ..trainers.standard import make_optimizer
    from .experiment import CaseRun

    # Embeddings look up integers, which have no gradient: true for every model, so not worth a warning.
    warnings.filterwarnings("ignore", message="Full backward hook is firing")

    # Loads a third of torch now, not in the gradient check.
    make_optimizer(nn.Linear(1, 1), TrainerSettings())
    line = sys.stdin.buffer.readline()
    if not line.strip():
        return 0
    order = decode_order(line)
    began_at_s = time.time()
    _write_to(Path(order.log_path))
    find_modules_here()
    if order.case.gpus > 1:
        from .ranks import run_ranks

        return send(run_ranks(order), answer)
    return send(CaseRun(order, started_at_s=STARTED_AT_S, began_at_s=began_at_s).run(), answer)


def _write_to(log_path: Path) -> None:
    """Redirect output to the case's own log, and input from the null device."""
    sys.stdout.flush()
    sys.stderr.flush()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    try:
        log = open_plain(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW)
    except OSError as error:
        print(f"note: {log_path} cannot be written: {error.strerror}", flush=True)
        return
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def start() -> NoReturn:
    """Run as a worker process, then exit."""
    exit_at_once(main())


if __name__ == "__main__":
    start()
