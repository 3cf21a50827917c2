"""Finds model and step of an unmodified script by itself, for `truemfu run`.

    an optimizer is made ──► the models that hold its parameters ──► watched: the outermost calls in them
    torch.compile(model) ──► the compiled model is watched instead; of other wrappers (DDP) the model inside
    optimizers have updated all of their parameters ──► log_step: loss of their backwards, learning rate

A step ends when every optimizer of the script has stepped (`seen_optimizers.py`). A script with a monitor of
its own is left alone. Nothing here raises into the script, reads a device value or replaces a method of the
user's model. What has no hook in torch is wrapped: `Optimizer.__init__` and `add_param_group`,
`torch.compile`, `Module.compile`, `torch.save`, and the functions of `seen_losses.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace as with_values
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..errors import TruemfuError, one_line
from ..monitor import created
from ..monitor.ranks.this_rank import launched
from ..remedies.facts import ORDER
from ..torch_private.replacing import replace
from .find_models import models_with, names_in_script, parameters_of
from .guarded import TrainerPauses, noting
from .opacus_check import OpacusCheck
from .run_settings import RunSettings, say
from .seen_losses import SeenLosses
from .seen_optimizers import SeenOptimizers

_ZERO_3 = "ds_id"
"""An attribute of parameters that DeepSpeed's ZeRO-3 has emptied."""


class AutoMonitor:
    """One for a process."""

    current: AutoMonitor | None = None

    def __init__(self, settings: RunSettings) -> None:
        self._settings = settings
        self._losses = SeenLosses()
        self._pauses = TrainerPauses(self._pause)
        self._optimizers = SeenOptimizers()
        self._privacy = OpacusCheck() if settings.check_privacy else None
        self._trial = _trial()
        self._models: list[weakref.ref[nn.Module]] = []
        self._monitor: Any = None
        self._is_off = self._is_opening = False
        self._why_nothing = "no torch.optim optimizer was created"
        self._seen_batches = False
        """Whether the last step had a batch."""
        self.steps = 0

    @classmethod
    def install(cls, settings: RunSettings) -> None:
        """Watch this process, in which torch has just been imported."""
        auto = cls.current = cls(settings)
        created.listeners.append(auto._monitor_made)
        auto._losses.install()
        replace(torch, "save", auto._save)
        replace(torch.optim.Optimizer, "__init__", auto._then(auto._optimizer_made))
        replace(torch.optim.Optimizer, "add_param_group", auto._then(auto._group_added))
        replace(nn.Module, "compile", auto._then(auto._compiled))
        replace(torch, "compile", noting(auto._torch_compiled))
        register_optimizer_step_pre_hook(auto._on_step_begin)
        register_optimizer_step_post_hook(auto._on_step)

    @classmethod
    def why_nothing(cls) -> str:
        """Why this process has no figures."""
        return "this process could not be watched" if cls.current is None else cls.current._why_nothing

    def _then(self, work: Callable[[Any], None]) -> Callable[..., Any]:
        """Runs a method, and then `work` with its object."""

        def instead(original: Callable[..., Any], owner: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(owner, *args, **kwargs)
            self._guarded(work, owner)
            return result

        return instead

    def _guarded(self, work: Callable[..., None], *args: Any) -> None:
        """Run a part of this; its exception ends the watching, not the script."""
        if self._is_off:
            return
        try:
            work(*args)
        except Exception as error:
            text = str(error) if isinstance(error, TruemfuError) else one_line(error)
            say(f"stopped watching this process: {text}")
            self._turn_off(f"the monitor failed: {text}")

    def _turn_off(self, why: str) -> None:
        self._is_off = True
        if not self.steps:
            self._why_nothing = why
        if self._monitor is not None:
            with contextlib.suppress(Exception):
                self._monitor.detach()
        if self._trial is not None:
            self._trial.fail(why)

    def _monitor_made(self, monitor: Any) -> None:
        """A `TrainingMonitor` was made: if the script made it, that one is enough."""
        if not self._is_opening:
            self._turn_off("the script has a monitor of its own")

    def _save(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A model is saved without our hooks."""
        is_watched = self._monitor is not None and not self._is_off
        if not is_watched or not any(map(_holds_a_module, (*args, *kwargs.values()))):
            return original(*args, **kwargs)
        with self._monitor.without_hooks():
            return original(*args, **kwargs)

    def _optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        self._why_nothing = "no optimizer stepped"
        self._optimizers.add(optimizer)
        if not torch.compiler.is_compiling():
            self._find_models_of(optimizer)

    def _group_added(self, optimizer: torch.optim.Optimizer) -> None:
        """Parameters were added to an optimizer; the first ones are, while it is being made."""
        if optimizer in self._optimizers:
            self._find_models_of(optimizer)

    def _find_models_of(self, optimizer: torch.optim.Optimizer) -> None:
        models = [found for model in self._models if (found := model()) is not None]
        known = {id(p) for model in models for p in model.parameters()}
        if not all(id(p) in known for p in parameters_of(optimizer)):
            self._find_models()

    def _find_models(self) -> None:
        """Watch the models of all optimizers, from their outermost module on."""
        parameters = self._optimizers.parameters()
        self._watch(models_with(parameters), parameters)

    def _watch(self, models: list[nn.Module], parameters: list[torch.Tensor]) -> None:
        from ..monitor.watching.watched import CalledModels

        if self._monitor is None:
            self._monitor = self._opened_monitor()
        self._pauses.follow()
        self._models = list(map(weakref.ref, models))
        if any(hasattr(p, _ZERO_3) and not p.numel() for p in parameters):
            self._monitor.notice(
                "DeepSpeed's ZeRO-3 keeps the parameters empty between uses: the model is not counted, "
                "and there is no MFU"
            )
        elif models:
            self._monitor.attach(CalledModels(*models, names=names_in_script(models)))
        else:
            self._monitor.notice(
                "no MFU: no model was found (the optimizer's parameters belong to no torch.nn.Module, or to "
                "one that gc.freeze() hides)"
            )

    def _opened_monitor(self) -> Any:
        from ..monitor.config import AUTO, load_config
        from ..monitor.monitor import TrainingMonitor

        settings = self._settings
        config = load_config(settings.config, default_mode=AUTO)
        if settings.mode is not None:
            config = with_values(config, mode=settings.mode)
        if settings.census:
            config = with_values(config, census=True)
        self._is_opening = True
        try:
            monitor = TrainingMonitor(_free_folder(settings), config, trackers=settings.trackers)
        finally:
            self._is_opening = False
        atexit.register(self._at_exit)  # runs before the monitor's own
        return monitor

    def _at_exit(self) -> None:
        if self._privacy is not None:
            say(self._privacy.result())
        if self._monitor.has_batches and not self.steps:
            self._monitor.notice(
                "forward passes were seen, but no optimizer step, so nothing was logged (a step inside a "
                "compiled function is not seen)"
            )

    def _pause(self, kind: str) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self._monitor is None else self._monitor.pause(kind)

    def _torch_compiled(self, result: Any) -> None:
        if isinstance(result, nn.Module):
            self._guarded(self._compiled, result)

    def _compiled(self, outer: nn.Module) -> None:
        """A module was compiled: nothing in it is watched; it is, if it holds a watched model."""
        inside = set(map(id, outer.modules()))
        models = [found for model in self._models if (found := model()) is not None]
        if any(id(model) in inside for model in models):
            self._watch([*[model for model in models if id(model) not in inside], outer], [])
        elif any(id(module) in inside for model in models for module in model.modules()):
            self._watch(models, [])  # a part of one: its compiled call is seen from outside

    def _on_step_begin(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._losses.step_begins()
            if self._privacy is not None and self._monitor is not None:
                self._guarded(self._privacy.update_begins, optimizer, self._monitor)

    def _on_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and not self._is_off:
            self._losses.step_ended()
            self._guarded(self._stepped_by, optimizer)

    def _stepped_by(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer not in self._optimizers:  # one that was unpickled or copied, or had been passed by
            self._optimizers.follow(optimizer)
            self._find_models_of(optimizer)
        if not self._optimizers.have_stepped(optimizer) or self._monitor is None:
            return
        has_batches = self._monitor.has_batches
        if self.steps and self._models and not has_batches and self._seen_batches:
            return  # an optimizer around another one: its step is that of the inner one
        self._seen_batches = has_batches
        self.steps += 1
        self._why_nothing = "the monitor failed before its first row"
        self._optimizers.begin_step()
        rate = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
        loss = self._losses.take() if self._trial is None else self._trial.kept(self._losses.take())
        self._monitor.log_step(self.steps, None, loss, None, rate)
        if self._trial is not None:
            self._trial.step_ended(self._monitor.called_modules, self._monitor.close)


def _trial() -> Any:
    """What ends this process after its steps, if `truemfu try` has started it."""
    if ORDER not in os.environ:
        return None
    from ..remedies.in_process import TrialProcess

    return TrialProcess.in_environment()


def _free_folder(settings: RunSettings) -> Path:
    """The run folder, or one inside it if another process of the command has trained or trains into it."""
    folder = Path(settings.output)
    if _world_size() > 1:
        return folder  # the ranks of one job share it; rank 0 writes
    owner, own = folder / "process", os.getpid()
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError, ValueError):
        command, process = owner.read_text(encoding="ascii").split()
        if int(process) != own and (command == str(settings.began_s) or _is_running(int(process))):
            return folder / f"process-{own}"
    owner.write_text(f"{settings.began_s} {own}", encoding="ascii")
    return folder


def _world_size() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return launched(lambda _: None)[1]


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it runs, as another user
    return True


def _holds_a_module(value: Any, *, deeper: bool = True) -> bool:
    """Whether this is a module, or a container with one."""
    if isinstance(value, nn.Module):
        return True
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return deeper and any(_holds_a_module(found, deeper=False) for found in inside)
