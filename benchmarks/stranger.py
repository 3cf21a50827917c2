"""From `pip install` of the built wheel to a first MFU of one's own script: commands and minutes.

Makes a fresh environment in a temporary folder, writes the training script of somebody who does not know
truemfu there, and calls what that person would call, one command after the other, each timed. torch is not
downloaded again: the fresh environment sees the packages of the one that runs this, apart from truemfu.

    make release RELEASE=--draft
    python benchmarks/stranger.py dist/*.whl > benchmarks/results/stranger.txt

On a machine without a known peak (any CPU) MFU needs two commands more than on a GPU of the table: the peak
must be measured and given. The last line of output is JSON.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from pathlib import Path

SCRIPT = """\
import torch
from torch import nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, dropout=0.0)
embed, body, head = nn.Embedding(1000, 256), nn.TransformerEncoder(layer, 2), nn.Linear(256, 1000)
model = nn.Sequential(embed, body, head).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for step in range(30):
    tokens = torch.randint(0, 1000, (8, 128), device=device)
    logits = model(tokens)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"loss {loss.item():.3f}")
"""


class Stranger:
    """Somebody at a shell in a fresh folder, who types commands."""

    def __init__(self, folder: Path, programs: Path) -> None:
        self._folder = folder
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TRUEMFU"))
        }
        self._environment = {**kept, "PATH": f"{programs}:{os.environ['PATH']}"}
        self.seconds: list[float] = []

    def types(self, command: str) -> str:
        """Run the command as a shell does and print it with its output and its time."""
        began = time.perf_counter()
        done = subprocess.run(
            command,
            shell=True,
            cwd=self._folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        self.seconds.append(time.perf_counter() - began)
        shown = done.stdout.replace(str(self._folder), "…").strip()
        print(
            f"$ {command}\n{shown}\n  [{self.seconds[-1]:.1f} s, exit code {done.returncode}]\n", flush=True
        )
        if done.returncode:
            sys.exit("the stranger gives up")
        return done.stdout


def fresh_environment(folder: Path) -> Path:
    """Its programs; links to the packages of this environment, apart from truemfu, are on its path."""
    venv.create(folder, with_pip=True, symlinks=True)
    links = folder / "packages"
    links.mkdir()
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if "truemfu" not in package.name:
            (links / package.name).symlink_to(package)
    (site,) = (folder / "lib").glob("python*/site-packages")
    (site / "environment.pth").write_text(str(links))
    return folder / "bin"


def measured_tflops(printed: str) -> str:
    """The figure in the last line of `truemfu peak`, which a reader copies."""
    return re.findall(r"measured_peak_tflops: ([\d.e+-]+)", printed)[-1]


def mfu_in(printed: str) -> str | None:
    found = re.search(r"MFU, median\s+(.+)", printed)
    return None if found is None or "unknown" in found[1] else found[1].strip()


def main() -> None:
    import torch

    with tempfile.TemporaryDirectory(prefix="stranger-") as name:
        folder = Path(name)
        programs = fresh_environment(folder / "environment")
        wheel = Path(shutil.copy(sys.argv[1], folder))
        (folder / "train.py").write_text(SCRIPT)
        load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
        print(
            f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, niceness {os.nice(0)}, "
            f"load {load}, Python {platform.python_version()}, torch {torch.__version__}\n"
            f"The wheel has {wheel.stat().st_size / 1e3:.0f} kB; torch and other dependencies are installed "
            "already, and the time has no download in it.\n"
        )
        stranger = Stranger(folder, programs)
        stranger.types(f"pip install --quiet --disable-pip-version-check {wheel.name}")
        printed = stranger.types("truemfu run train.py 2>&1")
        if mfu_in(printed) is None:
            tflops = measured_tflops(stranger.types("truemfu peak --dtype fp32"))
            printed = stranger.types(f"TRUEMFU_PEAK_TFLOPS={tflops} truemfu run train.py 2>&1")
        figures = {
            "commands": len(stranger.seconds),
            "minutes": round(sum(stranger.seconds) / 60, 2),
            "lines_changed_in_the_script": 0,
            "mfu": mfu_in(printed),
        }
        commands, minutes = figures["commands"], figures["minutes"]
        print(f"{commands} commands, {minutes} minutes, no line changed in the script: MFU {figures['mfu']}")
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
