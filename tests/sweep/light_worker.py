"""A worker without torch for tests of where experiments run: it takes a real order and ends in a real way.

The trainer's name in the order, `light_worker:Segfaults`, is what it does. Each start adds a line to `ran` in
TRUEMFU_TEST_FOLDER: when, until when at least, what, on which GPU.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

from truemfu.plain_files import Descriptor
from truemfu.records import CaseResult, Phase, Status
from truemfu.sweep.order import Progress, WorkerOrder, append_progress, decode_order
from truemfu.sweep.process import ANSWER_NAME
from truemfu.sweep.worker.worker_process import send

FOLDER = Path(os.environ.get("TRUEMFU_TEST_FOLDER", "."))


def raises() -> None:
    raise RuntimeError("the loss has exploded")


def out_of_gpu_memory() -> None:
    raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")


def eats_memory() -> None:
    """Inside the limit of its order, or of its job."""
    eaten = []
    while True:
        eaten.append(bytearray(b"x") * (64 << 20))


def kills_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def segfaults() -> None:
    ctypes.string_at(0)


def exits() -> None:
    print("about to leave", flush=True)
    os._exit(3)


def hangs() -> None:
    """And will not be talked to."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (FOLDER / "hangs").touch()
    time.sleep(600)


def daemonises() -> None:
    """Leaves a process in a session of its own."""
    if os.fork():
        until_exists(FOLDER / "daemon.pid")
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    os.closerange(0, 3)
    (FOLDER / "daemon.tmp").write_text(str(os.getpid()))
    (FOLDER / "daemon.tmp").rename(FOLDER / "daemon.pid")
    time.sleep(600)
    os._exit(0)


def waits() -> None:
    until_exists(FOLDER / "go")


def meets() -> None:
    """Ends only once another one runs beside it."""
    (FOLDER / f"met-{os.getpid()}").touch()
    while len(list(FOLDER.glob("met-*"))) < 2:
        time.sleep(0.05)


def until_exists(path: Path) -> None:
    while not path.exists():
        time.sleep(0.05)


WHAT = {
    "Raises": raises,
    "OutOfGpuMemory": out_of_gpu_memory,
    "EatsMemory": eats_memory,
    "KillsItself": kills_itself,
    "Segfaults": segfaults,
    "Exits": exits,
    "Hangs": hangs,
    "Daemonises": daemonises,
    "Waits": waits,
    "Meets": meets,
    "Nothing": lambda: None,
}


def note(**values: object) -> None:
    """A line in the file of everything that ran; whole, because it is one write to its end."""
    file = os.open(FOLDER / "ran", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, json.dumps({"at_s": time.time(), **values}).encode() + b"\n")
    os.close(file)


def result_of(order: WorkerOrder) -> CaseResult:
    began_at_s = time.time()
    end, message = Status.OK, None
    try:
        if order.memory_limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (order.memory_limit_bytes, order.memory_limit_bytes))
        WHAT[order.case.trainer.partition(":")[2]]()
    except MemoryError:
        end, message = Status.HOST_OOM, "MemoryError"
    except RuntimeError as error:
        end = Status.CUDA_OOM if "CUDA out of memory" in str(error) else Status.ERROR
        message = f"RuntimeError: {error}"
    return CaseResult(
        name=order.name,
        sweep_id=order.sweep_id,
        content_hash=order.content_hash,
        case=order.case,
        end=end,
        phase=Phase.WARM_UP if message else Phase.DONE,
        message=message,
        began_at_s=began_at_s,
    )


def main() -> int:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # a worker dies with its supervisor
    order = decode_order(sys.stdin.buffer.readline())
    log = os.open(order.log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES")
    note(name=order.name, event="began", gpu=gpu, pid=os.getpid())
    for phase in (Phase.START, Phase.WARM_UP):
        append_progress(Path(order.progress_path), Progress(phase=phase, at_s=time.time()))
    result = result_of(order)
    note(name=order.name, event="ended", gpu=gpu, pid=os.getpid())
    code = send(result, Descriptor(int(os.environ[ANSWER_NAME])))
    append_progress(Path(order.progress_path), Progress(phase=Phase.DONE, at_s=time.time()))
    return code


if __name__ == "__main__":
    os._exit(main())
