"""Kernels that ncu has profiled so far: a live line on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from truemfu.cli import audit_progress
from truemfu.cli.audit_progress import AuditProgress

KERNEL = '==PROF== Profiling "nvjet_sm90_tst_256x128_64x4..." - {}: 0%....50%....100% - 7 passes\n'


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def now_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(audit_progress.time, "monotonic", lambda: now[0])
    return now


def test_a_pipe_gets_a_line_every_so_often(tmp_path: Path, now_s: list[float]) -> None:
    log, stream = tmp_path / "ncu.log", io.StringIO()
    progress = AuditProgress(log, stream)
    for second in range(1, 46):
        now_s[0] = 100.0 + second
        if second == 16:
            log.write_text("==PROF== Connected to process 1\n" + KERNEL.format(0))
        elif second == 31:
            with log.open("a") as file:
                file.writelines(KERNEL.format(number) for number in range(1, 1300))
        progress.update()
    progress.say("the marked step is counted")
    assert stream.getvalue().splitlines() == [
        "audit: no kernel profiled yet, 15 s",
        "audit: 1 kernel profiled, 30 s",
        "audit: 1,300 kernels profiled, 45 s",
        "the marked step is counted",
    ]


def test_a_terminal_has_one_line_that_is_rewritten_and_taken_away(tmp_path: Path, now_s: list[float]) -> None:
    log, stream = tmp_path / "ncu.log", Terminal()
    progress = AuditProgress(log, stream)
    log.write_text(KERNEL.format(0))
    for now_s[0] in (100.2, 100.6, 100.8, 101.2):
        progress.update()
    progress.say("done")
    progress.clear()
    clear = "\r\x1b[K"
    assert stream.getvalue() == (
        f"{clear}audit: 1 kernel profiled, 1 s{clear}audit: 1 kernel profiled, 1 s{clear}done\n"
    )
