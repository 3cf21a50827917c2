"""`truemfu run`: scripts as people write them end as they do alone, and each of their steps is measured."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.integrations.run_pairs import (
    SCRIPTS,
    Ended,
    alone_and_watched,
    amounts,
    different_files,
    ended,
    flops,
    load,
    started,
    watched,
)
from tests.waiting import rows_so_far, wait_until

from truemfu import count_flops
from truemfu.monitor.config import MODES

Flops = Callable[[ModuleType, Ended], list[int]]
Amount = int | Callable[[Ended], list[int]] | None
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ACCELERATE = ("-m", "accelerate.commands.launch", "--num_processes", "2", "--main_process_port", "0")


def model_flops(model: torch.nn.Module, batch: Any) -> int:
    return count_flops(model, batch).model_flops


def constant(steps: int, times: int = 1) -> Flops:
    """Every step is `times` forward and backward passes of the example batch."""

    def expected(script: ModuleType, run: Ended) -> list[int]:
        return [times * model_flops(script.build(), script.example_batch())] * steps

    return expected


def of_both_models(script: ModuleType, run: Ended) -> list[int]:
    first, second = script.build()
    batch = script.example_batch()
    return [model_flops(first, batch) + model_flops(second, batch)] * script.STEPS


def of_closures(script: ModuleType, run: Ended) -> list[int]:
    one = model_flops(script.build(), script.example_batch())
    return [one * calls for calls in closures(run)]


def closures(run: Ended) -> list[int]:
    return [int(calls) for calls in re.findall(r"closures (\d+)", run.stdout)]


def samples_of_closures(run: Ended) -> list[int]:
    return [3 * calls for calls in closures(run)]


def tokens_of_lengths(run: Ended) -> list[int]:
    return [4 * int(length) for length in re.findall(r"length (\d+)", run.stdout)]


def of_lengths(script: ModuleType, run: Ended) -> list[int]:
    model = script.build()
    return [model_flops(model, batch) for batch in script.example_batches()]


@dataclass(frozen=True)
class Case:
    """A script, what each of its rows must hold, and how often something is left out of its step times."""

    script: str
    flops: Flops
    samples: Amount = None
    tokens: Amount = None
    arguments: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()
    label: str = ""
    world_size: int = 1
    prints_losses: bool = False
    left_out: dict[str, tuple[int, int]] = field(default_factory=dict)
    """For each kind, the least and the most times; they differ if the last one comes after the last step."""

    @property
    def name(self) -> str:
        return self.label or "-".join((self.script, *self.arguments))

    def command(self) -> list[str]:
        return [sys.executable, *self.launcher, str(SCRIPTS / f"{self.script}.py"), *self.arguments]


QUICK = (
    Case("nanogpt", constant(20), samples=4, tokens=4 * 32, left_out={"evaluation": (3, 4)}),
    Case("accumulation", constant(8, times=4), samples=8, prints_losses=True),
)
CASES = (
    Case("image_classification", constant(24), samples=8, left_out={"evaluation": (2, 3)}),
    Case("sine_lbfgs", of_closures, samples=samples_of_closures),
    # these two print dynamo's counters as their last line: frames, graph breaks, graphs
    *[
        Case("compiled", constant(8), samples=4, tokens=4 * 16, arguments=(how,))
        for how in ("before", "in_place", "parts")
    ],
    Case(
        "hf_trainer",
        constant(8, times=2),
        samples=4,
        tokens=4 * 16,
        left_out={"evaluation": (2, 3), "checkpoint": (1, 2)},
    ),
    Case(
        "lightning_module",
        constant(12, times=2),
        samples=8,
        left_out={"evaluation": (1, 2), "checkpoint": (1, 2)},
    ),
    Case("accelerate_loop", constant(16, times=2), samples=8),
    Case("lora", constant(6), samples=2, tokens=2 * 16),
    Case("loader_workers", constant(12), samples=4, arguments=("fork",)),
    Case("loader_workers", constant(12), samples=4, arguments=("spawn",)),
    Case("rnn_lm", of_lengths, samples=4, tokens=tokens_of_lengths),
    Case("ddp", constant(10), samples=8, launcher=TORCHRUN, world_size=2),
    Case(
        "accelerate_loop",
        constant(8, times=2),
        samples=16,
        launcher=(*ACCELERATE, "--multi_gpu"),  # by name: it is how two processes start on a CPU as well
        label="accelerate_launch-two_processes",
        world_size=2,
    ),
)


def each(expected: Amount, run: Ended, rows: int) -> list[int] | None:
    """What each row must show of an amount."""
    if expected is None:
        return None
    return [expected] * rows if isinstance(expected, int) else expected(run)


def assert_same(alone: Ended, run: Ended) -> None:
    """The script ended the same way and left the same behind."""
    found = {"code": run.code, "stdout": run.stdout, "files": different_files(alone.folder, run.folder)}
    assert found == {"code": alone.code, "stdout": alone.stdout, "files": []}, run.stderr


def left_out(run: Ended) -> dict[str, int]:
    """How often each kind was left out; "other" is any long delay, which a busy machine causes by itself."""
    kinds = run.run_file()["summary"]["left_out"]
    return {kind: found["times"] for kind, found in kinds.items() if kind != "other"}


def check(case: Case, folder: Path) -> None:
    alone, run = alone_and_watched(case.command(), folder)
    assert alone.code == 0, alone.stderr
    assert_same(alone, run)
    rows = run.rows()
    expected = case.flops(load(case.script), alone)
    samples, tokens = (each(amount, alone, len(expected)) for amount in (case.samples, case.tokens))
    found = {
        "steps": [row["global_step"] for row in rows],
        "flops": flops(rows),
        "samples": amounts(rows, "perf/samples_per_second") if samples else None,
        "tokens": amounts(rows, "perf/tokens_per_second") if tokens else None,
        "world_size": run.run_file()["world_size"],
    }
    assert found == {
        "steps": list(range(1, len(expected) + 1)),
        "flops": expected,
        "samples": samples,
        "tokens": tokens,
        "world_size": case.world_size,
    }, run.stderr
    if case.prints_losses:
        printed = [float.fromhex(loss) for loss in re.findall(r"loss (\S+)", alone.stdout)]
        assert [row["training/loss"] for row in rows] == pytest.approx(printed, rel=1e-6)
    times = left_out(run)
    assert times.keys() == case.left_out.keys()
    assert all(least <= times[kind] <= most for kind, (least, most) in case.left_out.items()), times
    assert "MFU, median" in run.stderr


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_a_plain_loop(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_script(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path)


def test_sft_by_trl(tmp_path: Path) -> None:
    """Real tokens are those that TRL itself counted; FLOPs are those of the padded batch."""
    alone, run = alone_and_watched([sys.executable, str(SCRIPTS / "trl_sft.py")], tmp_path)
    assert alone.code == 0, alone.stderr
    assert_same(alone, run)
    script = load("trl_sft")
    counted = [0, *(int(tokens) for tokens in re.findall(r"tokens (\d+)", alone.stdout))]
    rows = run.rows()
    tokens = amounts(rows, "perf/tokens_per_second")
    real = amounts(rows, "perf/real_tokens_per_second")
    assert real == [after - before for before, after in itertools.pairwise(counted)]
    model = script.build()
    # TRL computes no logits at the last position: forward, input gradient, weight gradient
    unused = 3 * 2 * script.BATCH * model.lm_head.weight.numel()
    expected = []
    for padded in tokens:
        ids = torch.zeros(script.BATCH, (padded or 0) // script.BATCH, dtype=torch.long)
        expected.append(model_flops(model, {"input_ids": ids, "labels": ids}) - unused)
    assert flops(rows) == expected
    assert len(rows) == script.STEPS


def test_a_gan_with_two_optimizers_is_measured_model_by_model(tmp_path: Path) -> None:
    alone, run = alone_and_watched([sys.executable, str(SCRIPTS / "dcgan.py")], tmp_path)
    assert alone.code == 0, alone.stderr
    assert_same(alone, run)
    script = load("dcgan")
    generator, critic = script.build()
    noise, images = script.example_batch()
    passed_on = torch.zeros_like(images, requires_grad=True)
    own = model_flops(generator, (noise,))
    judged = 2 * model_flops(critic, (images,)) + model_flops(critic, (passed_on,))
    rows = run.rows()
    found = {
        "Generator": flops(rows, "perf/mfu/Generator"),
        "Discriminator": flops(rows, "perf/mfu/Discriminator"),
        "both": flops(rows),
    }
    assert found == {
        "Generator": [own] * script.ITERATIONS,
        "Discriminator": [judged] * script.ITERATIONS,
        "both": [own + judged] * script.ITERATIONS,
    }, run.stderr
    of_generator = [float.fromhex(loss) for loss in re.findall(r"Loss_G: (\S+)", alone.stdout)]
    assert [row["training/loss"] for row in rows] == of_generator  # the optimizer that stepped last


def test_actor_and_critic_are_measured_and_their_targets_are_not(tmp_path: Path) -> None:
    alone, run = alone_and_watched([sys.executable, str(SCRIPTS / "actor_critic.py")], tmp_path)
    assert alone.code == 0, alone.stderr
    assert_same(alone, run)
    script = load("actor_critic")
    actor, critic = script.build()
    states, actions = script.example_batch()
    passed_on = torch.zeros_like(actions, requires_grad=True)
    own = model_flops(actor, (states,))
    judged = model_flops(critic, (states, actions)) + model_flops(critic, (states, passed_on))
    assert flops(run.rows()) == [own + judged] * script.STEPS, run.stderr


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("own_optimizer", constant(8)),
        ("parts_of_two", of_both_models),
        ("equal_models", of_both_models),
    ],
)
def test_an_unusual_optimizer_is_measured_or_reported(name: str, expected: Flops, tmp_path: Path) -> None:
    """Either every row is right, or there is no figure and one sentence says why."""
    alone, run = alone_and_watched([sys.executable, str(SCRIPTS / f"{name}.py")], tmp_path)
    assert alone.code == 0, alone.stderr
    assert_same(alone, run)
    rows = run.rows()
    if any(found is not None for found in flops(rows)):
        assert flops(rows) == expected(load(name), alone), run.stderr
    else:
        sentences = [line for line in run.stderr.splitlines() if "optimizer" in line or "models" in line]
        assert len(sentences) == 1, run.stderr


def test_a_model_that_only_a_compiled_function_calls_is_reported(tmp_path: Path) -> None:
    """Its last line has dynamo's counters: frames, graph breaks, graphs."""
    alone, run = alone_and_watched([sys.executable, str(SCRIPTS / "compiled_function.py")], tmp_path)
    assert alone.code == 0, alone.stderr
    assert_same(alone, run)
    assert len(run.rows()) == 8
    assert set(flops(run.rows())) == {None}
    assert all(row["perf/mfu_unknown"].startswith("no forward pass") for row in run.rows())


def test_the_surroundings_are_those_of_the_script(tmp_path: Path) -> None:
    """Arguments, `__main__`, folders, stdin, the user's sitecustomize, signals, a fork that trains."""
    own = tmp_path / "own_site"
    own.mkdir()
    (own / "sitecustomize.py").write_text(
        "import os, sys\nMARK = 'the own one'\nLOADED = [name for name in sys.modules if name == 'torch']\n"
    )
    path = os.pathsep.join((str(own), os.environ.get("PYTHONPATH", "")))
    for name in ("alone", "watched", "watched in short"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("beside the run")
    command = [sys.executable, str(SCRIPTS / "surroundings.py"), "--rate", "0.1", "--", "-x"]
    alone = ended(command, tmp_path / "alone", tmp_path / "none", PYTHONPATH=path)
    assert alone.code == 5, alone.stderr
    assert "the own one" in alone.stdout
    surroundings = load("surroundings")
    each_step = model_flops(surroundings.build(), surroundings.example_batch())
    for name in ("watched", "watched in short"):
        output = tmp_path / f"output of {name}"
        line = watched(command, output) if name == "watched" else [*watched([], output)[:-1], *command[1:]]
        run = ended(line, tmp_path / name, output, PYTHONPATH=path)
        assert_same(alone, run)
        assert flops(run.rows()) == [each_step] * surroundings.STEPS, run.stderr


def test_an_exception_in_step_7(tmp_path: Path) -> None:
    alone, run = alone_and_watched(faulty("crash"), tmp_path)
    assert alone.code == 1
    assert_same(alone, run)
    assert "RuntimeError: the loss is bad" in alone.stderr
    assert alone.stderr in run.stderr
    script = load("faulty")
    assert flops(run.rows()) == [model_flops(script.build(), script.example_batch())] * 6


def test_ctrl_c(tmp_path: Path) -> None:
    output = tmp_path / "output"
    alone = interrupted(faulty("interrupt"), tmp_path / "alone", output)
    run = interrupted(watched(faulty("interrupt"), output), tmp_path / "watched", output)
    assert alone.code == 3, alone.stderr
    assert_same(alone, run)
    steps = [row["global_step"] for row in run.rows()]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 8
    assert run.run_file()["summary"]["steps"] == len(steps)


def test_a_kill_leaves_the_rows_up_to_the_last_flush(tmp_path: Path) -> None:
    output = tmp_path / "output"
    process = started(watched(faulty("kill"), output), tmp_path / "watched")
    try:
        until_ready(process)
        log = output / "training_log.json"
        wait_until(lambda: len(rows_so_far(log)) >= 8)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    steps = [row["global_step"] for row in json.loads(log.read_text())]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 8
    page = tmp_path / "report.html"
    report = ended(
        [sys.executable, "-m", "truemfu", "report", str(output), "-o", str(page)], tmp_path / "report", output
    )
    assert report.code == 0, report.stderr
    assert "MFU" in page.read_text()


def test_switched_off_by_the_environment(tmp_path: Path) -> None:
    alone, run = alone_and_watched(faulty("crash"), tmp_path, TRUEMFU_DISABLED="1")
    assert_same(alone, run)
    assert run.stderr == alone.stderr
    assert not run.output.exists()


def test_a_script_that_never_trains(tmp_path: Path) -> None:
    alone, run = alone_and_watched(faulty("idle"), tmp_path)
    assert (alone.code, alone.stderr) == (4, "")
    assert_same(alone, run)
    assert run.rows() == []
    assert len(run.stderr.splitlines()) == 1, run.stderr
    assert "truemfu" in run.stderr


def test_a_module_is_run_as_python_does(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("import sys; print(sys.argv[1:])\n")
    command = [
        sys.executable,
        "-m",
        "truemfu",
        "run",
        "-o",
        str(tmp_path / "output"),
        "-m",
        "package",
        "-o",
        "3",
    ]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "['-o', '3']\n")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("-m", "-m needs the name"),
        ("--outptu", "No such option '--outptu'"),
        ("--mode hybird train.py", "did you mean 'hybrid'?"),
    ],
)
def test_an_option_of_run_that_is_wrong(wrong: str, said: str) -> None:
    command = [sys.executable, "-m", "truemfu", "run", *wrong.split()]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert said in ran.stderr


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    run = ended(watched(["no-such-command", "train.py"], tmp_path / "output"), tmp_path, tmp_path / "output")
    assert (run.code, run.stdout) == (127, "")
    assert len(run.stderr.splitlines()) == 1, run.stderr
    assert "no-such-command" in run.stderr
    assert not run.output.exists()


def test_a_script_that_does_not_exist(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "truemfu", "run", "nosuch.py"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (127, "")
    assert ran.stderr == "error: nosuch.py: no such file\n"


def test_a_script_that_is_not_python(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("remember: lower the learning rate\n")
    run = ended(
        [sys.executable, "-m", "truemfu", "run", "--output", str(tmp_path / "output"), "notes.txt"],
        tmp_path,
        tmp_path / "output",
    )
    assert (run.code, run.stdout) == (2, "")
    assert len(run.stderr.splitlines()) == 1, run.stderr
    assert "notes.txt" in run.stderr
    assert not run.output.exists()


SAVING = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
    def forward(self, x):
        if not torch.jit.is_scripting():
            print("forward", tuple(x.shape))
        return self.linear(x)
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    torch.save(model, f"model{step}.pt")
with torch.serialization.safe_globals([Net, nn.Linear, set]):
    print(type(torch.load("model3.pt", weights_only=True)).__name__)
print(torch.jit.script(model)(torch.ones(2, 4)).tolist())
"""


def test_a_model_is_saved_scripted_and_printed_from_as_alone(tmp_path: Path) -> None:
    (tmp_path / "saving.py").write_text(SAVING)
    alone, run = alone_and_watched([sys.executable, str(tmp_path / "saving.py")], tmp_path)
    assert alone.code == 0, alone.stderr
    assert (run.code, run.stdout) == (alone.code, alone.stdout), run.stderr
    assert len(run.rows()) == 4
    for step in range(4):
        assert has_hooks(run.folder / f"model{step}.pt") == has_hooks(alone.folder / f"model{step}.pt")


def has_hooks(path: Path) -> bool:
    """Whether a saved model has hooks: their names are in its pickle."""
    with zipfile.ZipFile(path) as archive:
        return b"nullcontext" in archive.read(f"{path.stem}/data.pkl")


PER_SAMPLE = """
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs, targets = torch.randn(4, 8), torch.randn(4, 1)
def loss_of(parameters, x, y):
    return (functional_call(model, parameters, (x.unsqueeze(0),)) - y).square().mean()
parameters = {name: value.detach() for name, value in model.named_parameters()}
gradients = vmap(grad(loss_of), in_dims=(None, 0, 0))(parameters, inputs, targets)
print([tuple(gradient.shape) for gradient in gradients.values()])
for _ in range(4):
    optimizer.zero_grad()
    loss = (model(inputs) - targets).square().mean()
    loss.backward()
    optimizer.step()
    print(loss.item().hex())
"""


def test_gradients_of_each_sample_before_the_first_step_leave_the_steps_measured(tmp_path: Path) -> None:
    (tmp_path / "per_sample.py").write_text(PER_SAMPLE)
    alone, run = alone_and_watched([sys.executable, str(tmp_path / "per_sample.py")], tmp_path)
    assert alone.code == 0, alone.stderr
    assert (run.code, run.stdout) == (alone.code, alone.stdout), run.stderr
    assert "failed" not in run.stderr
    # 4 samples: 2 × (8 × 16 + 16) forward, as much for the weights, 2 × 16 for the hidden layer's gradient
    assert flops(run.rows())[1:] == [4 * (2 * 288 + 32)] * 3


CHILDREN = """
import multiprocessing, sys, torch
from torch import nn
def train(number):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        model(torch.ones(number, 4)).sum().backward()
        optimizer.step()
if __name__ == "__main__":
    for number in (2, 3):
        child = multiprocessing.get_context("fork").Process(target=train, args=(number,))
        child.start()
        child.join()
"""


def test_forked_children_that_train_have_a_folder_each(tmp_path: Path) -> None:
    (tmp_path / "children.py").write_text(CHILDREN)
    output = tmp_path / "output"
    run = ended(watched([sys.executable, str(tmp_path / "children.py")], output), tmp_path, output)
    assert run.code == 0, run.stderr
    logs = sorted(output.rglob("training_log.json"))
    assert [log.parent.name.partition("-")[0] for log in logs] == ["process", "output"]
    rows = [json.loads(log.read_text()) for log in logs]
    assert [[samples_of(row) for row in found] for found in rows] in ([[3] * 5, [2] * 5], [[2] * 5, [3] * 5])


def samples_of(row: dict[str, Any]) -> int:
    return round(row["perf/samples_per_second"] * row["perf/step_time"])


@pytest.mark.parametrize(
    ("options", "command", "code", "named"),
    [
        (["--tracker", "fluffy"], ["true"], 2, "fluffy"),
        (["--output", "file/below"], ["true"], 2, "not a folder"),
        ([], ["./no-program"], 126, "no-program"),
    ],
)
def test_what_cannot_work_is_refused_before_the_command_runs(
    options: list[str], command: list[str], code: int, named: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "no-program").write_text("no first line with a program\n")
    (tmp_path / "no-program").chmod(0o755)
    call = [sys.executable, "-m", "truemfu", "run", *options, "--", *command]
    run = ended(call, tmp_path, tmp_path / "output")
    assert (run.code, run.stdout) == (code, "")
    assert len(run.stderr.splitlines()) == 1, run.stderr
    assert named in run.stderr


def test_the_help_names_every_mode() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "truemfu", "run", "--help"], capture_output=True, text=True, check=True
    )
    assert all(re.search(rf"\b{mode}\b", shown.stdout) for mode in MODES)


def test_a_folder_that_holds_a_run_is_named_before_another_one_is_added_to_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert ended(watched([sys.executable, "-c", ""], folder), tmp_path, folder).stderr.count("already") == 0
    folder.mkdir(exist_ok=True)
    (folder / "training_run.json").write_text("{}")
    again = ended(watched([sys.executable, "-c", ""], folder), tmp_path, folder)
    assert again.code == 0
    assert f"{folder} contains a run already" in again.stderr


def faulty(how: str) -> list[str]:
    return [sys.executable, str(SCRIPTS / "faulty.py"), how]


def until_ready(process: subprocess.Popen[str]) -> str:
    """What a process printed until it was ready."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line == "ready\n":
            return "".join(lines)
    raise RuntimeError(process.communicate()[1])


def interrupted(command: list[str], folder: Path, output: Path) -> Ended:
    """A command that was interrupted as Ctrl-C does it: the signal goes to its whole process group."""
    process = started(command, folder)
    try:
        first = until_ready(process)
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGINT)
        rest, stderr = process.communicate(timeout=600)
    finally:
        process.kill()
    return Ended(process.returncode, first + rest, stderr, folder, output)
