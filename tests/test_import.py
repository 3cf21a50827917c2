"""`import truemfu` is light, and the public names are these."""

from __future__ import annotations

import subprocess
import sys

import pytest

import truemfu

PUBLIC = {
    "BatchError",
    "Convention",
    "FlopCount",
    "FlopModel",
    "ModelError",
    "TrainingMonitor",
    "TruemfuError",
    "TruemfuWarning",
    "UsageError",
    "Utilization",
    "__version__",
    "calculate_mfu",
    "calculate_mfu_with_profiler",
    "calculate_precise_mfu",
    "count_flops",
    "count_step",
    "get_gpu_peak_flops",
    "profile_model_flops",
    "register_formula",
    "register_module",
}


def modules_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_public_names_are_these() -> None:
    assert set(truemfu.__all__) == PUBLIC
    assert len(truemfu.__all__) == len(PUBLIC)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(truemfu, name) is not None
    assert name in dir(truemfu)


def test_importing_the_package_loads_neither_torch_nor_its_own_parts() -> None:
    loaded = modules_after("import truemfu")
    assert "torch" not in loaded
    assert {name for name in loaded if name.startswith("truemfu.")} == {"truemfu.lazy"}


def test_help_needs_no_torch() -> None:
    """That of all commands, which imports each of them."""
    help_text = "import click; from truemfu.cli import cli; cli.get_help(click.Context(cli))"
    loaded = modules_after(help_text)
    assert "truemfu.cli.explain" in loaded
    assert "torch" not in loaded


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'count_flop'"):
        truemfu.count_flop  # noqa: B018
