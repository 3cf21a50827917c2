"""Private names of torch: all in one table, and none of them needed for a right answer or a training."""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from private_names import SHAPE, STEPS, VARIANTS
from truemfu.flops.observe.observation import OBSERVED
from truemfu.torch_private import table
from truemfu.torch_private.find import ABSENT, find
from versions import TORCH

PACKAGE = Path(__file__).parent.parent / "src" / "truemfu"
NOT_NEEDED = {
    table.FLEX_FORWARD, table.FLEX_BACKWARD, table.FLEX_CHECK, table.CURRENT_STREAM, table.DEFAULT_STORE,
    table.SCALED_MM, table.INT_MM, table.COMPILED_CALL, table.PIPELINE_STAGE,
    table.NCCL_RECORDS, table.COMPILED_REGION, table.TRACING, table.TENSOR_GUARDS,
    table.DISPATCH_ON_ENTRY, table.IS_EXCLUDED, table.EXCLUDE, table.DISPATCH_KEY,
    table.CALL_STACK, table.SYMBOLS,
}  # fmt: skip
"""By a training on a CPU, in one process, without flex attention and without torch.compile."""
ROWS = SHAPE[0] * SHAPE[1]
LINEAR = 2 * ROWS * SHAPE[2] * SHAPE[2]
PAIRS = 2 * ROWS * SHAPE[1] * SHAPE[2]
MODEL_FLOPS = LINEAR * (3 + 1 + 2 * 2) + PAIRS * (2 + 4)
"""Three layers and attention; the first has no input to differentiate."""
HARDWARE_FLOPS = MODEL_FLOPS + LINEAR + PAIRS
"""With the stretch that is run again, and the scores that fused attention works out again."""
RUN_AGAIN = {"plain": 0, "whole": 3 * LINEAR + 2 * PAIRS, "profiler": 0}
"""What a checkpoint around the whole model adds to that."""


class Host:
    """The process that has torch and forks a child for each case."""

    def __init__(self) -> None:
        program = Path(__file__).parent / "private_names.py"
        self._process = subprocess.Popen(
            [sys.executable, str(program)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    def ask(self, path: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"path": path}), file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        assert "error" not in answer, answer["error"]
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    started = Host()
    yield started
    started.close()


def flops_of(row: dict[str, Any]) -> int:
    return round(row["perf/tflops_per_gpu"] * 1e12 * row["perf/step_time"])


def assert_nothing_is_wrong(result: dict[str, Any]) -> None:
    assert result["imports"] == []
    assert result["count"].get("flops", [MODEL_FLOPS, HARDWARE_FLOPS]) == [MODEL_FLOPS, HARDWARE_FLOPS]
    for variant in VARIANTS:
        run = result[variant]
        assert run["is_identical"], f"{variant}: the monitor changed the training"
        assert [row["training/loss"] for row in run["rows"]] == run["losses"]
        for row in run["rows"]:
            if "perf/tflops_per_gpu" in row and row["perf/method"] != "estimate":
                assert flops_of(row) == MODEL_FLOPS, (variant, row)
                if "perf/hfu" in row:
                    hardware_flops = HARDWARE_FLOPS + RUN_AGAIN[variant]
                    assert row["perf/hfu"] / row["perf/mfu"] == pytest.approx(hardware_flops / MODEL_FLOPS)


def is_complete(result: dict[str, Any]) -> bool:
    """Whether each run and the count have what they have with all names."""
    if "flops" not in result["count"]:
        return False
    for variant in VARIANTS:
        rows = result[variant]["rows"]
        if len(rows) != STEPS or any(row.get("perf/method") != OBSERVED for row in rows):
            return False
    return any(row.get("perf/hfu_method") == "profiler" for row in result["profiler"]["rows"])


def test_with_all_names_everything_is_counted_and_nothing_is_said(host: Host) -> None:
    result = host.ask("nothing")
    assert_nothing_is_wrong(result)
    assert is_complete(result)
    assert result["missed"] == []
    assert [
        text
        for variant in VARIANTS
        for text in result[variant]["said"]
        if "torch" in text and "DataLoader" not in text
    ] == []


@pytest.mark.parametrize("path", table.NAMES, ids=lambda path: path.replace(":", "."))
def test_without_a_name_nothing_is_wrong_and_what_is_lost_is_named(host: Host, path: str) -> None:
    if find(path) is ABSENT:
        pytest.skip("this torch does not have it")
    result = host.ask(path)
    assert_nothing_is_wrong(result)
    said = [text for variant in VARIANTS for text in result[variant]["said"]]
    said += [result["count"].get("error", ""), *result["missed"]]
    is_named = any(table.NAMES[path].name in text or path in text for text in said)
    if path not in NOT_NEEDED and table.NAMES[path].since <= TORCH:
        assert is_named, said
    assert is_complete(result) or is_named, said


def test_without_the_place_of_a_compiled_call_a_step_that_is_not_seen_names_it() -> None:
    code = (
        "import sys, tempfile, warnings\n"
        "from torch import nn\n"
        "del nn.Module._compiled_call_impl\n"
        "from truemfu import TrainingMonitor\n"
        "warnings.simplefilter('ignore')\n"
        "monitor = TrainingMonitor(tempfile.mkdtemp(), model=nn.Linear(2, 2))\n"
        "monitor.log_step(1, 0, 1.0, 1.0, 0.1)\n"
        "monitor.close()\n"
        "assert any('_compiled_call_impl' in text for text in monitor.summary()['warnings'])\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_name_of_the_table_is_there() -> None:
    absent = {path for path in table.NAMES if find(path) is ABSENT}
    too_new = {path for path, private in table.NAMES.items() if private.since > TORCH}
    assert absent <= too_new | {table.CURRENT_STREAM, table.NCCL_RECORDS}  # torch without CUDA has neither


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def private_uses(path: Path) -> set[str]:
    """The private names of torch that a module uses: imports, and attributes that are not its own."""
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, (ast.Attribute, ast.Name)):
            found.add(ast.unparse(node))
    return {
        name for name in found
        if name.split(".")[0] in ("torch", "nn", "torch_profiler", "flex")
        and any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
    }  # fmt: skip


def attributes(path: Path) -> set[str]:
    """Attributes with a leading underscore of anything but this package's own objects."""
    return {
        node.attr for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_") and not node.attr.startswith(("__", "_truemfu"))
    }  # fmt: skip


@functools.cache
def own_names() -> set[str]:
    found: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(parsed(path)):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
    return found


OTHERS = {
    "_asdict",
    "_replace",
    "_current_frames",
    "_is_owned",
    "_getframe",
    "_exit",
    "_model_mapping",
    "_from_config",
    "_prepare_inputs",
} | {"_should_accumulate"}
"""Of the standard library, of transformers and of Lightning."""
ATEN = {"_safe_softmax", "_softmax", "_unsafe_view", "_to_copy", "_unique2", "_local_scalar_dense"}
"""Operators: public names of torch.ops, whatever they begin with."""


def test_no_other_module_uses_a_private_name_of_torch() -> None:
    listed = {name for names in table.ATTRIBUTES for name in names.split()}
    others = [path for path in PACKAGE.rglob("*.py") if path.parent.name != "torch_private"]
    used = {
        str(path.relative_to(PACKAGE)): private_uses(path)
        | (attributes(path) - own_names() - listed - OTHERS - ATEN)
        for path in others
    }
    assert {path: names for path, names in used.items() if names} == {}


def test_the_test_sees_private_names(tmp_path: Path) -> None:
    module = tmp_path / "x.py"
    module.write_text(
        "import torch._dynamo\nfrom torch.utils._pytree import tree_map\nfrom torch.nn.m import _x\n"
        "def f(t):\n    return torch._C._y(t), t._version\n"
    )
    assert private_uses(module) == {
        "torch._dynamo", "torch.utils._pytree.tree_map", "torch.nn.m._x", "torch._C", "torch._C._y",
    }  # fmt: skip
    assert "_version" in attributes(module) - own_names()
