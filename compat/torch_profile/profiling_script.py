r"""The original command line of the sweep; `truemfu sweep --help` explains its flags.

    python profiling_script.py --mode=single --trainer=StandardTrainer \
        --batch-size=4 --seq-len=512 --model-size=1b

Writes logs/, runs/ and results/ into the current folder; `--mode=test`, a sweep of its own, into test_run/.
"""

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

REPOSITORY = Path(__file__).resolve().parents[2]


def truemfu(*arguments: str) -> NoReturn:
    """Become `truemfu ARGUMENTS`, in this Python where it has the package, else in the repository's own."""
    python = sys.executable
    if find_spec("truemfu") is None:
        python = str(REPOSITORY / ".venv" / "bin" / "python")
        if not Path(python).exists():
            sys.exit(f"error: truemfu is not installed: run `make setup` in {REPOSITORY}")
    os.execv(python, [python, "-m", "truemfu", *arguments])


if __name__ == "__main__":
    flags = sys.argv[1:]
    folder = "test_run" if re.search(r"--mode[= ]test\b", " ".join(flags)) else "."
    truemfu("sweep", "--output", folder, *flags)
