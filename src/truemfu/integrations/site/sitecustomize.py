"""Runs at the start of every Python that a command under `truemfu run` starts, before its script.

It waits for torch to be imported (`torch_import.py`), hides its own folder, and then runs the `sitecustomize`
that would have run without it. Nothing of ours may fail here: the script comes first.
"""

import os
import sys


def _watch() -> None:
    try:
        from truemfu.integrations.torch_import import watch_from_environment
    except ImportError as error:
        if os.environ.get("TRUEMFU_RUN_PID") == str(os.getpid()):
            sys.stderr.write(
                f"truemfu: {sys.executable} cannot import truemfu ({error}), so its training is not watched: "
                "install truemfu there\n"
            )
        return
    watch_from_environment()


def _run_the_next() -> None:
    """Run the `sitecustomize` that this one hides, if there is one; its errors are its own."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != here]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


try:
    _watch()
except Exception as error:
    sys.stderr.write(f"truemfu: this process is not watched: {type(error).__name__}: {error}\n")
_run_the_next()
