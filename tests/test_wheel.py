"""The wheel: every file of the package is in it, and it runs in an environment without this checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import truemfu

ROOT = Path(__file__).parents[1]
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TRUEMFU"))}
"""With PYTHONPATH, pip would take the sources for an installed package, and programs would run them."""

TRAINING = """
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(20):
    batch = torch.randn(32, 64)
    loss = (model(batch) - batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel in TRUEMFU_WHEEL, or one built from a copy of the sources."""
    if given := os.environ.get("TRUEMFU_WHEEL"):
        return Path(given)
    pytest.importorskip("setuptools", minversion="78.1.1")
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", built, source], env=CLEAN, check=True)
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel in it; torch and the others are those of this environment.

    They are added as a path, so that an editable install there is not seen.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run([*install, wheel], env=CLEAN, check=True)
    (site,) = (folder / "lib").glob("python*/site-packages")
    (site / "environment.pth").write_text(
        "\n".join(dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")))
    )
    return folder


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAINING)
    return tmp_path


def call(environment: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A program of the environment, with nothing that leads to this checkout."""
    clean = {**CLEAN, "TRUEMFU_PEAK_TFLOPS": "1", "PATH": f"{environment / 'bin'}:{os.environ['PATH']}"}
    program = environment / "bin" / arguments[0]
    done = subprocess.run(
        [program, *arguments[1:]], cwd=cwd, env=clean, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def test_every_file_of_the_package_is_in_the_wheel_and_nothing_else(wheel: Path) -> None:
    files = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "truemfu").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert packed == files
    assert any(name.endswith(".html.jinja") for name in packed)


def test_the_metadata_say_what_this_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(path).decode())
        names = archive.namelist()
    assert (metadata["Name"], metadata["Version"]) == ("truemfu", truemfu.__version__)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {"mfu", "flops", "pytorch"} <= set(metadata["Keywords"].split(","))
    classifiers = metadata.get_all("Classifier") or []
    assert "Typing :: Typed" in classifiers
    assert "Topic :: Scientific/Engineering :: Artificial Intelligence" in classifiers
    assert "count" in metadata.get_payload()


def test_the_installed_command_is_that_of_the_wheel(environment: Path, elsewhere: Path) -> None:
    where = call(environment, elsewhere, "python", "-c", "import truemfu; print(truemfu.__file__)").stdout
    assert Path(where.strip()).is_relative_to(environment)
    assert call(environment, elsewhere, "truemfu", "--version").stdout.split()[-1] == truemfu.__version__


def test_it_counts(environment: Path, elsewhere: Path) -> None:
    done = call(environment, elsewhere, "truemfu", "count", "tiny", "--batch", "2", "--seq", "16", "--json")
    assert json.loads(done.stdout)["parameters"] == 228_096


def test_it_watches_a_script_and_reports_on_it(environment: Path, elsewhere: Path) -> None:
    done = call(environment, elsewhere, "truemfu", "run", "-o", "run", "train.py")
    assert done.stdout == "trained\n"
    assert "MFU" in done.stderr
    state = json.loads(call(environment, elsewhere, "truemfu", "status", "run", "--json").stdout)
    assert state["has_ended"]
    assert state["last_step"] == 20
    assert state["median_mfu"] > 0
    call(environment, elsewhere, "truemfu", "report", "run", "-o", "report.html")
    assert "<svg" in (elsewhere / "report.html").read_text(encoding="utf-8")
