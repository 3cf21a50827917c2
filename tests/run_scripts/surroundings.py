"""Prints what a script can see of the process that it runs in, trains, and forks."""

import multiprocessing
import os
import pickle
import signal
import sys
import threading
from pathlib import Path

import torch
from torch import nn

STEPS, BATCH, FEATURES = 5, 3, 6


class Settings:
    """Pickled by name, as `__main__.Settings`."""

    def __init__(self, rate):
        self.rate = rate


def build():
    return nn.Linear(FEATURES, 2)


def example_batch():
    return (torch.zeros(BATCH, FEATURES),)


def train(seed, steps):
    torch.manual_seed(seed)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(BATCH, FEATURES)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    return losses


def in_a_fork(queue):
    queue.put((__name__, sys.argv, train(1, 3)))


def main():
    import sitecustomize  # the user's own, from PYTHONPATH

    print("argv", sys.argv, sys.orig_argv[1:])
    print("name", __name__, "package", __package__, "spec", __spec__)
    print("file", Path(__file__).name, Path(sys.path[0]).name, Path(__file__).is_absolute())
    print("main", sys.modules["__main__"].Settings is Settings, sys.modules["__main__"].__dict__ is globals())
    print("cwd", Path.cwd() == Path(os.environ["PWD_EXPECTED"]), Path("notes.txt").read_text())
    print("sitecustomize", sitecustomize.MARK, Path(sitecustomize.__file__).parent.name, sitecustomize.LOADED)
    print("flags", sys.flags)
    print("signals", signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    print("threads", threading.active_count(), sys.gettrace(), sys.getprofile(), sys.excepthook.__name__)
    print("stdin", sys.stdin.read())
    Path("settings.pkl").write_bytes(pickle.dumps(Settings(0.1)))
    print("pickled", b"__main__" in Path("settings.pkl").read_bytes())
    print("losses", *train(0, STEPS))
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=in_a_fork, args=(queue,))
    child.start()
    print("fork", queue.get())
    child.join()
    print("child", child.exitcode)
    sys.exit(5)


if __name__ == "__main__":
    main()
