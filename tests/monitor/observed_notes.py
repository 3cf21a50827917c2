"""Steps as the training thread hands them over, and a row side that learns from the observed ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from truemfu import Convention, TrainingMonitor
from truemfu.flops import StepObserver
from truemfu.monitor.config import load_config
from truemfu.monitor.notices import Notices
from truemfu.monitor.ranks.this_rank import ThisRank
from truemfu.monitor.step_flops.known import KnownSteps
from truemfu.monitor.step_flops.plan import ObservationPlan
from truemfu.monitor.step_flops.source import FlopsSource
from truemfu.monitor.step_note import NO_EXTRAS, ObservedStep, StepExtras, StepNote
from truemfu.monitor.values.host_values import HostValues
from truemfu.monitor.watching.batch_notes import BatchNotes

CPU = torch.device("cpu")


def wait_until_learned(monitor: TrainingMonitor) -> None:
    """Wait until the row side has taken all observed steps, and asked for others."""
    live = monitor._live
    while live is not None and live._rows.reader._unlearned:
        live._row_thread._wake.set()
        time.sleep(0.001)


class Thread:
    """The training thread: notes steps of its batches, some of them observed."""

    def __init__(self) -> None:
        self._batches = BatchNotes(HostValues(Notices()))
        self._number = 0

    def note(
        self,
        *batches: dict[str, Any],
        nodes: int | None = 7,
        state: int = 0,
        observed: ObservedStep | None = None,
        end_s: float = 0.0,
        **values: Any,
    ) -> StepNote:
        """The next step: of these micro-batches, over at `end_s`."""
        for batch in batches:
            self._batches.note(batch)
        self._number += 1
        fields: dict[str, Any] = dict.fromkeys(StepNote._fields)
        fields |= {
            "step": self._number,
            "steps": 1,
            "number": self._number,
            "batches": self._batches.take(),
            "nodes": nodes,
            "state": state,
            "measured": True,
            "span": SimpleNamespace(end=SimpleNamespace(host_s=end_s)),
            "extras": NO_EXTRAS if observed is None else StepExtras(observed=observed),
        }
        return StepNote(**{**fields, **values})

    def observe(
        self,
        run: Callable[..., Tensor],
        *batches: dict[str, Any],
        is_whole: bool = True,
        before: Callable[[], Any] = lambda: None,
        **values: Any,
    ) -> StepNote:
        """The next step, which really runs and is observed; `before` runs ahead of its first batch."""
        observer = StepObserver(Convention())
        observer.enter()
        before()
        for batch in batches:
            observer.batch_begins()
            run(**batch).sum().backward()
        observed = ObservedStep(observer.leave(), is_whole=is_whole)
        return self.note(*batches, observed=observed, **values)


class RowSide:
    """What is known of steps, with what it warns of and asks for."""

    def __init__(self, model: nn.Module | None = None, **monitoring: Any) -> None:
        self.said: list[str] = []
        self.now_s, self.whole_steps_wanted, self.repeats_agreed = 0.0, 0, 0
        self.plan = ObservationPlan(0, 0.0)
        watch: Any = SimpleNamespace(
            plan=self.plan,
            convention=Convention(),
            hindrance=None,
            observe_whole_steps=self._wants_whole_steps,
            repeats_agree=self._repeats_agree,
            observe_again=lambda: None,
        )
        self.known = KnownSteps(
            watch, notice=lambda text, about=None: self.said.append(text), clock=lambda: self.now_s
        )
        models = SimpleNamespace(roots=[] if model is None else [model], module_of=lambda slot: model)
        hooks: Any = SimpleNamespace(models=models)
        self.rank = ThisRank(0, 1, self.said.append)
        self.flops = FlopsSource(
            load_config({"monitoring": {"peak_tflops": 1, **monitoring}}),
            self.known,
            hooks=hooks,
            notice=self.said.append,
            device=CPU,
            rank=self.rank,
        )

    def _wants_whole_steps(self) -> None:
        self.whole_steps_wanted += 1

    def _repeats_agree(self) -> None:
        self.repeats_agreed += 1
