"""Traces are read as a stream: which step, which kernels, what a damaged file gives."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from made_traces import MadeTrace, kernels_of, training_step

from truemfu.census.json_stream import EventStream
from truemfu.census.trace import read_step
from truemfu.errors import RecordError


def three_steps() -> MadeTrace:
    trace = MadeTrace()
    for number in (1, 2, 3):
        training_step(trace, number)
    return trace


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_the_last_whole_step_is_taken(tmp_path: Path, name: str) -> None:
    trace = three_steps()
    with trace.step(4), trace.operator("aten::mul", [[4], [4]]):
        trace.launch("elementwise_kernel", lasts=3)  # the profiler was left in the middle of it
    step = read_step(trace.write(tmp_path / name))
    assert (step.name, step.steps) == ("ProfilerStep#3", 4)
    assert len(step.kernels) == 9
    assert step.properties["name"] == "NVIDIA H200"
    assert not step.notes


def test_a_step_lasts_from_the_end_of_the_last_kernel_before_it(tmp_path: Path) -> None:
    trace = three_steps()
    ends = sorted(kernel["ts"] + kernel["dur"] for kernel in kernels_of(trace))
    step = read_step(trace.write(tmp_path / "trace.json"))
    assert step.end == round(1000 * ends[-1])
    assert step.start == round(1000 * ends[-10])  # nine kernels are its own


def test_without_ranges_of_steps_the_whole_trace_is_one(tmp_path: Path) -> None:
    trace = MadeTrace()
    with trace.operator("aten::mm", [[8, 8], [8, 8]]):
        trace.launch("gemm", lasts=10)
    step = read_step(trace.write(tmp_path / "trace.json"))
    assert step.name is None
    assert step.steps == 0
    assert step.end - step.start == 10_000


def test_the_busiest_device_is_taken(tmp_path: Path) -> None:
    trace = MadeTrace()
    with trace.step(1), trace.operator("aten::mm", [[8, 8], [8, 8]]):
        trace.launch("gemm", lasts=10)
        trace.launch("gemm", lasts=30, device=1)
    step = read_step(trace.write(tmp_path / "trace.json"))
    assert (step.device, step.other_devices, len(step.kernels)) == (1, 1, 1)


def test_a_kernel_belongs_to_the_operator_that_launched_it(tmp_path: Path) -> None:
    trace = MadeTrace()
    with trace.step(1):
        outer, inner = ("aten::linear", [[8, 8], [8, 8]]), ("aten::addmm", [[8], [8, 8], [8, 8]])
        with trace.operator(*outer), trace.operator(*inner):
            trace.launch("gemm", lasts=10)
        with trace.operator("aten::add", [[8], [8]]):
            trace.launch("elementwise", lasts=10, linked=False)  # by its correlation and the time alone
    step = read_step(trace.write(tmp_path / "trace.json"))
    assert [kernel.within.name for kernel in step.kernels if kernel.within] == ["aten::addmm", "aten::add"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no operators and no kernels"),
        ("hello", "is not a trace: it should begin with"),
        ("{}", "it has no traceEvents"),
        ('{"traceEvents": 5}', "traceEvents is not a list"),
        (
            '{"traceEvents": [{"ph": "X" oops "cat": "kernel", "name": "a long enough rest of it"}]}',
            "not valid JSON",
        ),
        ('{"traceEvents": []}', "so there is nothing to explain"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(RecordError, match=message) as error:
        read_step(path)
    assert "\n" not in str(error.value)


def test_a_list_of_events_alone_is_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(three_steps().events))
    assert read_step(path).name == "ProfilerStep#3"


def what_is_said(path: Path) -> str:
    """The error, or the notes of a step with kernels."""
    try:
        step = read_step(path)
    except RecordError as error:
        return str(error)
    assert step.kernels
    return "; ".join(step.notes)


@pytest.mark.parametrize("packed", [False, True])
def test_a_trace_cut_anywhere_gives_a_line_or_what_was_whole(tmp_path: Path, packed: bool) -> None:
    data = three_steps().text().encode()
    if packed:
        data = gzip.compress(data)
    path = tmp_path / ("trace.json.gz" if packed else "trace.json")
    generator = random.Random(7)
    last = len(data) - 30  # the end of gzip, and the closing brackets
    for length in [1, 2, 3, last, *(generator.randrange(last) for _ in range(60))]:
        path.write_bytes(data[:length])
        said = what_is_said(path)
        assert "\n" not in said
        assert "is cut off after" in said or length < 200, length


def test_of_a_cut_trace_a_step_that_is_not_whole_is_not_explained(tmp_path: Path) -> None:
    """Its missing kernels would be gaps, of which remedies could gain something."""
    path = tmp_path / "trace.json"
    text = three_steps().text()
    path.write_text(text[: text.rindex('"kernel"')])
    assert read_step(path).name == "ProfilerStep#2"
    path.write_text(text[: text.index("ProfilerStep#2")])
    with pytest.raises(RecordError, match=r"has no whole step: trace\.json is cut off") as error:
        read_step(path)
    assert "\n" not in str(error.value)


def test_a_trace_that_lacks_only_its_last_bracket_is_whole(tmp_path: Path) -> None:
    trace = three_steps()
    trace.events.append({"ph": "i", "name": "Record Window End", "cat": None, "ts": trace.now})
    path = tmp_path / "trace.json"
    path.write_text(trace.text().partition("\n],")[0])
    assert read_step(path).name == "ProfilerStep#3"


def test_a_trace_of_a_gpu_without_its_kernels_is_not_taken_for_one_of_a_cpu(tmp_path: Path) -> None:
    trace = three_steps()
    trace.events = [event for event in trace.events if event["cat"] != "kernel"]
    with pytest.raises(RecordError, match=r"record with ProfilerActivity\.CUDA"):
        read_step(trace.write(tmp_path / "trace.json"))
    trace.events = [event for event in trace.events if event["cat"] != "cuda_runtime"]
    assert "names a GPU and has no kernels" in "; ".join(read_step(trace.write(tmp_path / "host.json")).notes)


def test_an_event_may_be_split_between_pieces_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = three_steps().write(tmp_path / "trace.json")
    whole = list(EventStream(path))
    for piece in (1, 7, 64):
        monkeypatch.setattr("truemfu.census.json_stream._PIECE", piece)
        assert list(EventStream(path)) == whole


BIG = """
import resource, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from truemfu.census.trace import read_step
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
step = read_step(Path({path!r}))
print(step.name, len(step.kernels), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_does_not_grow_with_the_length_of_a_trace(tmp_path: Path) -> None:
    """Of a file of 40 MB with 300 steps, in a process of its own: one step is held, and pieces of 1 MB."""
    path = tmp_path / "big.json"
    with path.open("w") as file:
        file.write('{"traceEvents": [\n')
        trace = MadeTrace()
        for number in range(1, 301):
            training_step(trace, number, layers=40)
            file.writelines(f"{json.dumps(event)},\n" for event in trace.events)
            trace.events.clear()
        file.write("{}]}\n")
    assert path.stat().st_size > 40e6
    code = BIG.format(tests=str(Path(__file__).parent), path=str(path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    name, kernels, grown_kb = done.stdout.split()
    assert (name, int(kernels)) == ("ProfilerStep#300", 161)
    assert int(grown_kb) < 30_000
