"""For all tests."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    and threading.current_thread() is threading.main_thread()
):
    # A shell starts what it runs in the background with Ctrl-C ignored, and every process started from here
    # would inherit that: the tests that interrupt one would wait for ever.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# As many processes as cores run tests: more threads in each would wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests are compiled once for all processes that run them, whatever a container's environment says.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

_FOREVER_S = 240
LONG = (
    # the whole documentation site, built
    "tests/test_docs.py::test_the_site",
    "tests/test_docs.py::test_a_broken_link",
    # real workers, one process for each experiment
    "tests/sweep/test_worker.py",
    "tests/sweep/test_runner.py",
    "tests/sweep/test_own_files.py",
    "tests/sweep/test_parallel.py::test_ranks",
    "tests/sweep/test_parallel.py::test_book_keeping_runs",
    "tests/test_compat_sweep.py",
    # real Slurm and Ray
    "tests/sweep/test_slurm.py",
    "tests/sweep/test_ray.py",
    "tests/test_cli_sweep.py",
    "tests/sweep/test_supervise.py::test_a_hang_is_ended_at_its_time_limit_even_if_it_ignores_term",
    # real Opacus on every model
    "tests/sweep/test_gradient_check.py",
    # real ranks
    "tests/monitor/test_job.py",
    "tests/monitor/test_job_figures.py",
    "tests/monitor/test_elastic_job.py",
    "tests/monitor/test_ranks.py",
    "tests/monitor/test_mesh.py",
    "tests/monitor/test_outside_time.py::test_a_rank_that_sleeps",
    "tests/private/test_private_ranks.py",
    "tests/flops/test_wrappers.py::test_one_rank_counts_alone",
    "tests/flops/test_wrappers.py::test_other_wrappers",
    # real trackers, all at once or with many connections
    "tests/monitor/test_all_trackers.py",
    "tests/trackers/test_prometheus.py::test_idle_connections",
    "tests/trackers/test_mlflow.py",
    # many programs in monitored runs
    "tests/monitor/test_observed_flops.py::test_public_models",
    "tests/monitor/test_observed_flops.py::test_each_row",
    # a real browser
    "tests/report/test_pages_in_chromium.py",
    # a clock that must pass: counters in windows, folders that hang
    "tests/monitor/test_hybrid.py",
    "tests/monitor/test_hung_folder.py",
    # trainers of other libraries
    "tests/integrations/test_trl.py",
    "tests/integrations/test_transformers.py",
    "tests/integrations/test_lightning.py",
    "tests/integrations/test_accelerate.py",
    # commands as processes, on a terminal
    "tests/hardware/test_peak_command.py::test_progress_goes_to_a_terminal",
    "tests/test_provenance.py::test_no_file_of_a_run_holds_a_secret",
    "tests/monitor/test_audited_run.py",
    "tests/hardware/test_top_process.py",
    "tests/test_cli_count.py::test_the_cache_is_that_of_hf_home",
    "tests/test_cli_conventions.py::test_a_terminal",
    "tests/test_cli_conventions.py::test_colours",
    "tests/test_cli_conventions.py::test_a_real_bash",
    # the wheel, built and installed elsewhere
    "tests/test_wheel.py",
    "tests/test_terminal_injection.py",
    # trainings of the examples of a gate
    "tests/report/compare/test_ci_examples.py",
    # every public model at many drawn shapes; `make test` has some fixed ones (test_cases.py)
    "tests/flops/test_closed_form.py::test_closed_form_equals_the_truth",
    # a model whose operators run position by position: many operators to count
    "tests/flops/test_position_loops.py::test_short_sequences_give_the_direct_count_of_longer_ones[mamba",
    # compiled by inductor
    "tests/flops/test_observe_compiled.py::test_observed_steps_run_the_same_compiled_code[inductor]",
    "tests/flops/test_observe_compiled.py::test_compiled_code_counts_as_much",
    "tests/flops/test_wrappers.py::test_a_model_compiled_by_inductor",
    "tests/flops/test_profiler.py::test_case_executes_what_the_counter_says[llama-compiled]",
    "tests/flops/test_profiler.py::test_case_executes_what_the_counter_says[gpt2-compiled]",
    "tests/monitor/test_monitor.py::test_a_compiled_model_is_seen",
    # a sample of the attacks; `make faults` runs every one
    "tests/test_fault_suite.py::test_no_attack_of_the_short_form",
    # a process for each private name of torch
    "tests/test_torch_private.py::test_with_all_names",
    "tests/test_torch_private.py::test_without_a_name",
    # processes that are killed or asked to end, and what they have on disk some seconds later
    "tests/monitor/test_signals.py",
    "tests/monitor/test_faults.py::test_an_impatient_second_interrupt",
    "tests/monitor/test_faults.py::test_a_run_that_ends_while_it_counts",
    "tests/monitor/test_faults.py::test_a_process_killed_after_it_counted",
    "tests/monitor/test_faults.py::test_a_process_ends_as_it_would_have",
    "tests/monitor/test_faults.py::test_a_killed_process_leaves",
    "tests/monitor/test_faults.py::test_a_monitor_made_before_a_fork",
    # a file of hundreds of megabytes
    "tests/census/test_trace.py::test_memory_does_not_grow",
    # whole training scripts, each run alone and watched
    "tests/integrations/test_run.py",
    "tests/integrations/test_opacus_check.py::test_a_script",
    "tests/monitor/test_identity.py",
    # whole runs and trials, of several processes each
    "tests/monitor/test_logged_flops.py::test_what_changes_in_mid_run",
    "tests/monitor/test_logged_flops.py::test_the_original_import_path",
    "tests/monitor/test_generation_servers.py::test_the_first_rank_of_a_job_alone",
    "tests/test_cli_explain.py::test_a_command",
    "tests/trial/test_unchanged.py",
    "tests/trial/test_frameworks.py",
    "tests/trial/test_trial.py",
)
"""Tests for `make test-all` alone, by the beginning of their name; `make test` is to take six minutes."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file without a test to run is not imported: some import libraries that take seconds to load."""
    if not collection_path.name.startswith("test_"):
        return None
    file = collection_path.relative_to(config.rootpath).as_posix()
    if config.option.markexpr == "not long":
        return file in LONG or None
    if config.option.markexpr == "long":
        return not any(long.startswith(file) for long in LONG) or None
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(LONG):
            item.add_marker("long")


def pytest_collection_finish(session: pytest.Session) -> None:
    """A name in LONG that is no test's any more is an error, where all tests were collected."""
    gc.freeze()  # what was imported stays: a collection that walks through all of it takes a second
    if session.config.args == session.config.getini("testpaths") and not session.config.option.markexpr:
        names = [item.nodeid for item in session.items]
        files = {name.partition("::")[0] for name in names}
        unknown = [
            long
            for long in LONG
            if not any(name.startswith(long) for name in names)
            # a file may be skipped as a whole, for want of a library
            and ((file := long.partition("::")[0]) in files or not (session.config.rootpath / file).exists())
        ]
        if unknown:
            raise pytest.UsageError(f"tests/conftest.py: LONG names tests that do not exist: {unknown}")


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """Compiled code of one test is none of the next: an older torch observes no step beside compiled code."""
    yield
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is not None and utils.counters.get("stats", {}).get("unique_graphs"):
        sys.modules["torch._dynamo"].reset()
        utils.counters.clear()


@pytest.fixture
def never_waits() -> Iterator[None]:
    """For what must not block: a test that waits for ever fails."""

    def give_up(number: int, frame: FrameType | None) -> None:
        pytest.fail(f"waited for {_FOREVER_S} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(_FOREVER_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
