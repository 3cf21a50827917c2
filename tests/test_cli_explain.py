"""`truemfu explain`: of a folder, of a trace, of a command."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from truemfu.census.annotated import write_annotated
from truemfu.census.bounds import _REMEDIES
from truemfu.census.items import items_of
from truemfu.cli import cli, main
from truemfu.errors import RecordError, UsageError
from truemfu.remedies.table import BY_NAME

sys.path.insert(0, str(Path(__file__).parent / "census"))
from made_traces import MadeTrace, training_step


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    made = MadeTrace()
    for number in (1, 2):
        training_step(made, number)
    return made.write(tmp_path / "trace.json.gz")


def explain(*arguments: str) -> str:
    done = CliRunner().invoke(cli, ["explain", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_trace_in_text(trace: Path) -> None:
    text = explain(str(trace))
    assert re.search(r"device +NVIDIA H200", text)
    assert re.search(r"products +0\.90 ms +58", text)
    assert re.search(r"torch\.compile of the model +at most 0\.\d+ ms of 1\.\d+ ms", text)
    assert re.search(r"TF32 products +no product runs in fp32", text)


def test_json_has_the_documented_keys(trace: Path) -> None:
    found = json.loads(explain(str(trace), "--json"))
    page = (Path(__file__).parents[1] / "docs" / "explain.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `([\w\[\].]+)`", page.partition("## JSON")[2], re.MULTILINE))
    keys = set()
    for key, value in found.items():
        keys.add(key)
        if isinstance(value, dict):
            keys |= {f"{key}.{inner}" for inner in value}
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            keys |= {f"{key}[].{inner}" for inner in value[0]}
    assert keys == documented


def test_every_remedy_has_its_words() -> None:
    assert _REMEDIES.keys() == BY_NAME.keys() - {"foreach_optimizer"}


def test_a_page_and_the_trace_again(trace: Path, tmp_path: Path) -> None:
    page, again = tmp_path / "page.html", tmp_path / "again.json.gz"
    explain(str(trace), "-o", str(page), "--trace", str(again))
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") == 1
    assert "Where the time of a step goes" in text
    assert "http" not in text.replace("http-equiv", "")
    assert (
        json.loads(explain(str(again), "--json"))["step_s"]
        == json.loads(explain(str(trace), "--json"))["step_s"]
    )


def refused(*arguments: str) -> str:
    done = CliRunner().invoke(cli, ["explain", *arguments])
    assert isinstance(done.exception, UsageError), done.output
    return str(done.exception)


def test_what_is_read_is_never_overwritten(trace: Path, tmp_path: Path) -> None:
    before = trace.read_bytes()
    link = tmp_path / "link.gz"
    link.symlink_to(trace)
    assert "is an input file of this explanation: give --trace" in refused(str(trace), "--trace", str(trace))
    assert "is an input file" in refused(str(trace), "--trace", str(link))
    folder = tmp_path / "run"
    folder.mkdir()
    recorded = folder / "census_trace.json.gz"
    recorded.write_bytes(before)
    assert "is an input file" in refused(str(folder), "--trace", str(recorded))
    page = tmp_path / "trace.html"
    page.write_bytes(before)
    assert "is an input file of this explanation: give --output" in refused(str(page), "-o", str(page))
    assert trace.read_bytes() == recorded.read_bytes() == page.read_bytes() == before


def test_a_trace_that_cannot_be_written_whole_leaves_nothing(trace: Path, tmp_path: Path) -> None:
    found = items_of(trace)
    broken, target = tmp_path / "broken.json", tmp_path / "again.json.gz"
    broken.write_text(gzip.decompress(trace.read_bytes()).decode().replace('"aten::mul"', "oops", 1))
    with pytest.raises(RecordError, match="not valid JSON"):
        write_annotated(broken, target, found)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.json", "trace.json.gz"]


def test_the_trace_of_a_cpu_is_written_again_with_its_operators(tmp_path: Path) -> None:
    with torch.profiler.profile(record_shapes=True) as profile:
        torch.mm(torch.randn(8, 4), torch.randn(4, 2))
    plain, again = tmp_path / "plain.json", tmp_path / "new" / "again.json.gz"
    profile.export_chrome_trace(str(plain))
    explain(str(plain), "--trace", str(again))
    events = json.loads(gzip.decompress(again.read_bytes()))["traceEvents"]
    (product,) = (event["args"] for event in events if event["name"] == "aten::mm")
    assert (product["truemfu class"], product["truemfu FLOPs"]) == ("products", 2 * 8 * 4 * 2)
    assert "no kernels" in refused(str(plain), "--device", "h200")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing-like-it"], "neither a folder, nor a trace, nor a command"),
        (["."], "has no census of a step"),
        (["-o", "page.txt", "."], "--output must end in .html"),
        (["--trace", "again.json", "."], "--trace must end in .gz"),
        (["--device", "H2000", "."], "no device 'H2000' in the table"),
        (["a.json", "b.json.gz"], "give one folder or trace; got 2"),
    ],
)
def test_a_wrong_call_is_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["explain", *arguments])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


SCRIPT = """
import os, sys, torch
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.LayerNorm(16))
optimizer = torch.optim.AdamW(model.parameters())
open("pids", "a").write(f"{os.getpid()}\\n")
open("offline", "w").write(os.environ.get("HF_HUB_OFFLINE", "no"))
for step in range(int(sys.argv[1])):
    model(torch.randn(4, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained")
"""


def run_script(folder: Path, steps: int) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    return subprocess.run(
        [sys.executable, "-m", "truemfu", "explain", "--json", "--", "train.py", str(steps)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_a_command_runs_until_a_step_is_recorded_and_is_ended(tmp_path: Path) -> None:
    done = run_script(tmp_path, 10_000_000)
    assert done.returncode == 0, done.stderr
    census = json.loads(done.stdout)
    assert census["is_host"]
    assert census["ordinary_step_s"] > 0
    assert "plan: run the command until one step is recorded" in done.stderr
    assert "trained" not in done.stderr
    assert (tmp_path / "offline").read_text() == os.environ.get("HF_HUB_OFFLINE", "no")
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pids").read_text()), 0)


def test_a_command_that_ends_too_early_is_a_failure_with_its_reason(tmp_path: Path) -> None:
    done = run_script(tmp_path, 4)
    assert done.returncode == 1
    assert "the command ended with code 0 before a step was recorded" in done.stderr
    assert "trained" in done.stderr


def test_a_terminated_explain_ends_its_command(tmp_path: Path) -> None:
    script = "import os, time; open('pids', 'w').write(str(os.getpid())); time.sleep(600)"
    (tmp_path / "train.py").write_text(script)
    call = [sys.executable, "-m", "truemfu", "explain", "--", "train.py"]
    with subprocess.Popen(call, cwd=tmp_path, stderr=subprocess.DEVNULL) as process:
        while not (tmp_path / "pids").is_file() or not (tmp_path / "pids").read_text():
            time.sleep(0.1)
        process.terminate()
        assert process.wait(60) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pids").read_text()), 0)


def test_where_truemfu_is_switched_off_no_command_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUEMFU_DISABLED", "1")
    done = CliRunner().invoke(cli, ["explain", "--", sys.executable, "-c", "1"])
    assert "unset it" in str(done.exception)
