"""Private names of torch: all in one table, and none of them needed for a right answer or a training."""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from private_names import SHAPE, STEPS, VARIANTS
from truemfu import ModelError, count_flops
from truemfu.flops.count import phases, self_check, tally
from truemfu.flops.observe.observation import OBSERVED
from truemfu.torch_private import table, trees, watching
from truemfu.torch_private.find import ABSENT, find
from versions import TORCH

PACKAGE = Path(__file__).parent.parent / "src" / "truemfu"
ALL = [(path, how) for path in table.NAMES for how in ("missing", "without effect")]
NOT_NEEDED = {
    table.FLEX_FORWARD, table.FLEX_BACKWARD, table.FLEX_CHECK, table.CURRENT_STREAM, table.DEFAULT_STORE,
    table.SCALED_MM, table.INT_MM, table.COMPILED_CALL, table.PIPELINE_STAGE,
    table.NCCL_RECORDS,
}  # fmt: skip
"""By a training on a CPU, in one process, without flex attention and without `Module.compile`."""
WRITTEN = {table.FLEX_CHECK, table.DEFAULT_GENERATOR, table.COMPILED_CALL, table.RUN_BACKWARD}
"""Names that are written to: nothing that a lookup finds could stand for one without effect."""
ROWS = SHAPE[0] * SHAPE[1]
LINEAR = 2 * ROWS * SHAPE[2] * SHAPE[2]
PAIRS = 2 * ROWS * SHAPE[1] * SHAPE[2]
MODEL_FLOPS = LINEAR * (3 + 1 + 2 * 2) + PAIRS * (2 + 4)
"""Three layers and attention; the first has no input to differentiate."""
HARDWARE_FLOPS = MODEL_FLOPS + LINEAR + PAIRS
"""With the stretch that is run again, and the scores that fused attention works out again."""


class Host:
    """The process that has torch and forks a child for each case."""

    def __init__(self) -> None:
        program = Path(__file__).parent / "private_names.py"
        self._process = subprocess.Popen(
            [sys.executable, str(program)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    def ask(self, path: str, how: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"path": path, "how": how}), file=self._process.stdin, flush=True)
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
    for variant in VARIANTS:
        run = result[variant]
        assert run["is_identical"], f"{variant}: the monitor changed the training"
        assert [row["training/loss"] for row in run["rows"]] == run["losses"]
        for row in run["rows"]:
            if "perf/tflops_per_gpu" in row and row["perf/method"] != "estimate":
                assert flops_of(row) == MODEL_FLOPS, (variant, row)
                if "perf/hfu" in row:
                    assert row["perf/hfu"] / row["perf/mfu"] == pytest.approx(HARDWARE_FLOPS / MODEL_FLOPS)


def is_complete(result: dict[str, Any]) -> bool:
    """Whether each run has what it has with all names."""
    for variant in VARIANTS:
        rows = result[variant]["rows"]
        if len(rows) != STEPS or any(row.get("perf/method") != OBSERVED for row in rows):
            return False
    return any(row.get("perf/hfu_method") == "profiler" for row in result["profiler"]["rows"])


def test_with_all_names_everything_is_counted_and_nothing_is_said(host: Host) -> None:
    result = host.ask("nothing", "missing")
    assert_nothing_is_wrong(result)
    assert is_complete(result)
    assert result["missed"] == []
    assert [text for variant in VARIANTS for text in result[variant]["said"] if "torch" in text] == []


@pytest.mark.parametrize(("path", "how"), ALL, ids=lambda value: str(value).replace(":", "."))
def test_without_a_name_nothing_is_wrong_and_what_is_lost_is_named(host: Host, path: str, how: str) -> None:
    if how == "without effect" and path in WRITTEN:
        pytest.skip("it is written to, not read")
    if find(path) is ABSENT:
        pytest.skip("this torch does not have it")
    result = host.ask(path, how)
    assert_nothing_is_wrong(result)
    said = [text for variant in VARIANTS for text in result[variant]["said"]]
    name = table.NAMES[path].name
    is_named = any(name in text or "counts a known model wrongly" in text for text in said)
    if how == "missing" and path not in NOT_NEEDED and table.NAMES[path].since <= TORCH:
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


def private_uses(path: Path) -> set[str]:
    """The private names of torch that a module uses: imports, and attributes that are not its own."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = set()
    for node in ast.walk(tree):
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
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.attr for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_") and not node.attr.startswith(("__", "_truemfu"))
    }  # fmt: skip


@functools.cache
def own_names() -> set[str]:
    found: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
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
} | {"_should_accumulate"}
"""Of the standard library, of transformers and of Lightning."""
ATEN = {"_safe_softmax", "_softmax", "_unsafe_view", "_to_copy", "_unique2", "_local_scalar_dense"}
"""Operators: public names of torch.ops, whatever they begin with."""


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent.name != "torch_private"],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_no_other_module_uses_a_private_name_of_torch(path: Path) -> None:
    assert private_uses(path) == set()
    listed = {name for names in table.ATTRIBUTES for name in names.split()}
    assert attributes(path) - own_names() <= listed | OTHERS | ATEN


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


def test_plain_trees_are_those_of_torch_for_dicts_lists_and_tuples() -> None:
    tree = {"a": [1, (2.0, "x")], "b": (torch.Size([3]), None), "c": {}}
    leaves, spec = trees._flatten(tree)
    assert leaves == trees.tree_leaves(tree) or leaves == [1, 2.0, "x", torch.Size([3]), None]
    assert trees._unflatten(leaves, spec) == tree
    assert trees._map_only(float, lambda x: x + 1, tree)["a"][1][0] == 3.0


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "_verdict", None)


def test_the_known_model_is_counted_as_worked_out_by_hand() -> None:
    assert self_check._first_difference() == ""


def test_the_known_model_is_counted_right_where_saved_tensor_hooks_are_not_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(phases, "top_saved_tensors_hooks", lambda on: None)
    assert self_check._first_difference() == ""


@pytest.mark.parametrize(
    ("name", "shim", "said"),
    [
        ("current_autograd_node", lambda: None, "FLOPs in"),
        ("current_graph_task_id", lambda: -1, "FLOPs forward"),
        ("next_sequence_nr", lambda: 0, "FLOPs in"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_a_name_without_effect_refuses_the_count(
    monkeypatch: pytest.MonkeyPatch, name: str, shim: Any, said: str
) -> None:
    for module in (tally, phases):
        monkeypatch.setattr(module, name, shim, raising=False)
    wrongly = rf"this version of torch \({torch.__version__.replace('+', '.')}\) counts a known model wrongly"
    for _ in range(2):
        with pytest.raises(ModelError, match=rf"{wrongly}: .*{said}"):
            count_flops(nn.Linear(4, 4), (torch.zeros(2, 4),))


@pytest.mark.usefixtures("unchecked")
def test_the_check_leaves_everything_as_it_was() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        count_flops(nn.Linear(4, 4, device="meta"), (torch.zeros(2, 4),))
        assert torch.is_autocast_enabled("cpu")
        assert not torch.is_grad_enabled()
    assert self_check._verdict == ""
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.autograd.is_multithreading_enabled()


@pytest.mark.usefixtures("unchecked")
def test_an_error_in_the_check_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(self_check, "_in_a_real_run", lambda: 1 / 0)
        with pytest.raises(ModelError, match="wrongly: ZeroDivisionError"):
            count_flops(nn.Linear(4, 4), (torch.zeros(2, 4),))
    assert count_flops(nn.Linear(4, 4), (torch.zeros(2, 4),)).forward == 64


@pytest.mark.parametrize("tells", [watching.detects_backward, watching.detects_functorch])
def test_what_torch_tells_is_tried_out(tells: Any) -> None:
    assert tells.__wrapped__()
    with torch.no_grad(), torch.autograd.graph.save_on_cpu():
        assert tells.__wrapped__()
    found: list[bool] = []
    leaf = torch.ones((), requires_grad=True)
    leaf.register_hook(lambda gradient: found.append(tells.__wrapped__()))
    (2 * leaf).backward()
    thread = threading.Thread(target=lambda: found.append(tells.__wrapped__()))
    thread.start()
    thread.join()
    torch.func.vmap(torch.func.grad(lambda x: found.append(tells.__wrapped__()) or x.sum()))(torch.ones(2, 3))
    assert found == [True, True, True]
    assert table.missing == {}


def test_names_are_tried_out_wherever_the_package_is_first_imported() -> None:
    code = (
        "import torch\n"
        "with torch.inference_mode(), torch.device('meta'), torch.autocast('cpu'):\n"
        "    import truemfu.monitor.monitor\n"
        "    from truemfu.torch_private import watching as w\n"
        "assert w.detects_overwrites and w._sees\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
