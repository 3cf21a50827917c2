"""torchtitan: a metrics processor for the `metrics` of its Trainer.Config.

    config.metrics = TrueMFUMetrics.Config(log_freq=10)

    should_log, at a step's begin   ──► at the first one, model and optimizers are attached
    the optimizers have stepped     ──► log_step, unless this step is logged by torchtitan
    log                             ──► log_step with torchtitan's loss and norm; perf/* in its loggers

Untested: written from the source of torchtitan 0.3, whose trainer runs on GPUs alone.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from torchtitan.components.metrics import MetricsProcessor

from ..environment import is_disabled
from ..monitor.monitor import TrainingMonitor
from ..monitor.watching.watched import CalledModels
from .guarded import guarded, newest_figures


class TrueMFUMetrics(MetricsProcessor):  # type: ignore[misc]
    """torchtitan's own metrics, and MFU and HFU from counted FLOPs beside them."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):  # type: ignore[misc]
        """That of torchtitan's processor, with two settings more."""

        truemfu_folder: str = "truemfu"
        """Folder of the run's files, in the dump folder"""

        truemfu_config: str | None = None
        """A YAML or JSON file with the monitor's configuration"""

    def __init__(self, config: Config, *, dump_folder: str = "./outputs", **kwargs: Any) -> None:
        super().__init__(config, dump_folder=dump_folder, **kwargs)
        folder = os.path.join(dump_folder, config.truemfu_folder)
        self._monitor = None if is_disabled() else TrainingMonitor(folder, config.truemfu_config)
        self._step, self._rate, self._hook = 0, None, None

    def should_log(self, step: int) -> bool:
        """As torchtitan's; it is called once when a step begins."""
        self._begin(step)
        return bool(super().should_log(step))

    @guarded
    def _begin(self, step: int) -> None:
        self._step = step
        if self._monitor is None or self._hook is not None or not self.model_parts:
            return
        if len(self.model_parts) == 1:  # the head is called by a chunked loss, outside of the model
            self._monitor.attach(CalledModels(self.model_parts[0]))
        else:
            self._monitor.attach(self.model_parts)
        self._hook = self.optimizers.register_step_post_hook(self._stepped)

    @guarded
    def _stepped(self, optimizers: Any, args: Any, kwargs: Any) -> None:
        self._rate = next(iter(optimizers)).param_groups[0]["lr"]  # the schedulers change it afterwards
        if self._monitor is not None and not super().should_log(self._step):
            self._monitor.log_step(self._step, None, None, None, self._rate)

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Log torchtitan's metrics, and those of the newest finished step."""
        own: dict[str, Any] = {}
        self._end(step, global_avg_loss, grad_norm, own)
        super().log(step, global_avg_loss, global_max_loss, grad_norm, {**(extra_metrics or {}), **own})

    @guarded
    def _end(self, step: int, loss: float, grad_norm: float, metrics: dict[str, Any]) -> None:
        if self._monitor is not None:
            self._monitor.log_step(step, None, loss, grad_norm, self._rate)
            metrics.update(newest_figures(self._monitor))

    def close(self) -> None:
        """Write the remaining rows and print the summary."""
        self.give_up()
        super().close()

    def give_up(self) -> None:
        """End the monitor; torchtitan's metrics go on."""
        monitor, self._monitor = self._monitor, None
        if self._hook is not None:
            self._hook.remove()
        if monitor is not None:
            monitor.close()
