"""Finds model and step of an unmodified script by itself, for `truemfu run`.

    an optimizer is made ──► the models that hold its parameters ──► watched: the outermost calls in them
    torch.compile(model) ──► the compiled model is watched instead; of other wrappers (DDP) the model inside
    optimizers have updated all of their parameters ──► log_step: loss of the last backward, learning rate

A step ends when every optimizer of the script has stepped: a GAN's two, or five of the critic's steps and one
of the generator's. An optimizer that many steps of the others pass by is not waited for. An optimizer that
wraps another one steps with it. Nothing here raises into the script, reads a device value or replaces a
method of the user's model. What has no hook in torch is wrapped: `Optimizer.__init__`, `torch.compile`,
`Module.compile` and the functions of `seen_losses.py`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..errors import TruemfuError, one_line
from .find_models import models_with, parameters_of
from .run_settings import RunSettings, say
from .seen_losses import SeenLosses
from .trainer_pauses import TrainerPauses

_PASSED_BY = 20
"""Steps of other optimizers after which one that never stepped is not waited for."""
_ZERO_3 = "ds_id"
"""An attribute of parameters that DeepSpeed's ZeRO-3 has emptied."""


class AutoMonitor:
    """One for a process."""

    current: AutoMonitor | None = None

    def __init__(self, settings: RunSettings) -> None:
        self._settings = settings
        self._losses = SeenLosses()
        self._pauses = TrainerPauses(self._pause)
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._ever_stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._known: set[int] = set()
        """Parameters of the models that are watched."""
        self._models: list[weakref.ref[nn.Module]] = []
        self._monitor: Any = None
        self._is_off = False
        self._made_any = False
        self._since_step = 0
        self._seen_batches = False
        """Whether the last step had a batch."""
        self.steps = 0

    @classmethod
    def install(cls, settings: RunSettings) -> None:
        """Watch this process, in which torch has just been imported."""
        auto = cls.current = cls(settings)
        auto._losses.install()
        made = torch.optim.Optimizer.__init__

        @functools.wraps(made)
        def init(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            made(optimizer, *args, **kwargs)
            auto._guarded(auto._optimizer_made, optimizer)

        torch.optim.Optimizer.__init__ = init  # type: ignore[method-assign,assignment]
        compiled = torch.compile

        @functools.wraps(compiled)
        def compile_(*args: Any, **kwargs: Any) -> Any:
            result = compiled(*args, **kwargs)
            if isinstance(result, nn.Module):
                auto._guarded(auto._compiled, result)
            return result

        torch.compile = compile_
        compiled_in_place = nn.Module.compile

        @functools.wraps(compiled_in_place)
        def compile_in_place(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            compiled_in_place(module, *args, **kwargs)
            auto._guarded(auto._compiled, module)

        nn.Module.compile = compile_in_place  # type: ignore[method-assign,assignment]
        register_optimizer_step_post_hook(auto._on_step)

    @classmethod
    def why_nothing(cls) -> str:
        """Why this process has no figures."""
        auto = cls.current
        if auto is None or not auto._made_any:
            return "no optimizer of torch.optim was made"
        return "no optimizer made a step"

    def _guarded(self, work: Callable[..., None], *args: Any) -> None:
        """Run a part of this; its exception ends the watching, not the script."""
        if self._is_off:
            return
        try:
            work(*args)
        except Exception as error:
            self._is_off = True
            text = str(error) if isinstance(error, TruemfuError) else one_line(error)
            say(f"this process is not watched any more: {text}")
            if self._monitor is not None:
                with contextlib.suppress(Exception):
                    self._monitor.detach()

    def _optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        self._made_any = True
        self._optimizers.add(optimizer)
        if torch.compiler.is_compiling():
            return
        if not all(id(p) in self._known for p in parameters_of(optimizer)):
            self._find_models()

    def _find_models(self) -> None:
        """Watch the models of all optimizers, from their outermost module on."""
        parameters = [p for optimizer in self._optimizers for p in parameters_of(optimizer)]
        models = models_with(parameters)
        self._known = {id(p) for p in parameters} | {id(p) for model in models for p in model.parameters()}
        self._watch(models, parameters)

    def _watch(self, models: list[nn.Module], parameters: list[torch.Tensor]) -> None:
        from ..monitor.training_side.called_models import CalledModels

        if self._monitor is None:
            self._monitor = self._opened_monitor()
        if self._is_off:
            return
        self._pauses.follow()
        self._models = list(map(weakref.ref, models))
        if any(hasattr(p, _ZERO_3) and not p.numel() for p in parameters):
            self._monitor.notice(
                "DeepSpeed's ZeRO-3 keeps the parameters empty between uses: the model is not counted, "
                "and there is no MFU"
            )
        elif models:
            self._monitor.attach(CalledModels(*models))
        else:
            self._monitor.notice(
                "no model was found: the optimizer's parameters belong to no torch.nn.Module; there is no MFU"
            )

    def _opened_monitor(self) -> Any:
        from ..monitor.config import load_config
        from ..monitor.monitor import TrainingMonitor

        if TrainingMonitor.exists():  # the script has its own
            self._is_off = True
            return None
        settings = self._settings
        config = load_config(settings.config)
        if settings.mode is not None:
            config = replace(config, mode=settings.mode)
        return TrainingMonitor(_free_folder(Path(settings.output)), config, trackers=settings.trackers)

    def _pause(self, kind: str) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self._monitor is None else self._monitor.pause(kind)

    def _compiled(self, outer: nn.Module) -> None:
        """A module was compiled: nothing in it is watched; it is, if it holds a watched model."""
        inside = set(map(id, outer.modules()))
        models = [found for model in self._models if (found := model()) is not None]
        if any(id(model) in inside for model in models):
            self._watch([*[model for model in models if id(model) not in inside], outer], [])
        elif any(id(module) in inside for model in models for module in model.modules()):
            self._watch(models, [])  # a part of one: its compiled call is seen from outside

    def _on_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and not self._is_off:
            self._guarded(self._stepped_by, optimizer)

    def _stepped_by(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer not in self._optimizers:  # one that was unpickled or copied
            self._optimizer_made(optimizer)
        self._stepped.add(optimizer)
        self._ever_stepped.add(optimizer)
        self._since_step += 1
        if self._monitor is None or not self._all_stepped():
            return
        if self.steps and self._models and not self._monitor.has_batches and self._seen_batches:
            return  # an optimizer around another one: its step is that of the inner one
        self._seen_batches = self._monitor.has_batches
        self.steps += 1
        self._stepped.clear()
        self._since_step = 0
        rate = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
        self._monitor.log_step(self.steps, None, self._losses.take(), None, rate)

    def _all_stepped(self) -> bool:
        """Whether every optimizer has stepped since the last step ended, wrapped ones with their wrapper."""
        missing = [o for o in self._optimizers if o not in self._stepped]
        if not missing:
            return True
        if self._since_step >= _PASSED_BY:
            for optimizer in [o for o in missing if o not in self._ever_stepped]:
                self._optimizers.discard(optimizer)
            return not any(o in self._ever_stepped for o in missing)
        updated = {id(p) for optimizer in self._stepped for p in parameters_of(optimizer)}
        return all(id(p) in updated for optimizer in missing for p in parameters_of(optimizer))


def _free_folder(folder: Path) -> Path:
    """The run folder, or one inside it if another process of the command trains into it."""
    if int(os.environ.get("WORLD_SIZE", "1") or 1) > 1:
        return folder  # the ranks of one job share it; rank 0 writes
    owner = folder / "process"
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError, ValueError):
        number = int(owner.read_text(encoding="ascii"))
        if number != os.getpid() and Path(f"/proc/{number}").exists():
            return folder / f"process-{os.getpid()}"
    owner.write_text(str(os.getpid()), encoding="ascii")
    return folder
