"""The hooks on all models that a monitor watches: added by `attach`, removed by `detach`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
from torch import nn

from ...errors import one_line
from ..notices import Notices
from .attachment import Attachment
from .batch_notes import Batch
from .called_models import CalledModels
from .intake import is_tensor
from .watched import Watched, WatchedModels


class ModelHooks:
    """`seen` gets each training batch of a watched module, `evaluated` is called without gradients.

    `ended` is called after a forward pass for which they returned True.
    """

    def __init__(
        self,
        seen: Callable[[Watched, Batch | None], bool],
        evaluated: Callable[[], bool],
        ended: Callable[[], None],
        notices: Notices,
    ) -> None:
        self._seen, self._evaluated, self._ended, self._notices = seen, evaluated, ended, notices
        self._models: WatchedModels | None = None
        self._attachments: list[Attachment] = []
        self.are_disabled = False
        """Whether the caller passes each micro-batch to `observe`."""
        self.are_unsettled = False
        """Whether it is not yet known which modules a step calls: `settle` is due after each."""

    def attach(self, models: WatchedModels) -> None:
        """Watch these models instead of others."""
        self.detach()
        self._models = models
        if isinstance(models, CalledModels):
            models.watch_calls(self._seen, self._evaluated, self._ended)
            self.are_unsettled = True
            return
        for watched in models.modules:
            if (module := watched.module) is not None:
                self._attach(watched, module)

    def _attach(self, watched: Watched, module: nn.Module) -> None:
        try:
            attachment = Attachment(
                module, functools.partial(self._seen, watched), self._evaluated, self._ended
            )
        except Exception as error:  # a scripted model takes no such hooks
            self._notices(
                f"the model accepts no hooks, call monitor.observe(batch) for each micro-batch: "
                f"{type(module).__name__}: {one_line(error)}"
            )
        else:
            self._attachments.append(attachment)

    def detach(self) -> None:
        """Leave the models as they were."""
        for attachment in self._attachments:
            attachment.remove()
        self._attachments = []
        if isinstance(self._models, CalledModels):
            self._models.leave_calls()

    @contextlib.contextmanager
    def removed(self) -> Iterator[None]:
        """The models without any hook, for what runs inside."""
        attachments = self._all()
        for attachment in attachments:
            attachment.remove()
        try:
            yield
        finally:
            for attachment in attachments:
                attachment.add()

    def settle(self) -> None:
        """A step has ended: modules that were called inside others are not watched any more."""
        if isinstance(self._models, CalledModels):
            self.are_unsettled = self._models.settle()

    @property
    def see_whole_batches(self) -> bool:
        """Whether one module gets every complete batch, or none is watched."""
        return self._models is None or self._models.is_one

    def disable(self) -> None:
        """From now on the caller passes each micro-batch to `observe`."""
        self.are_disabled = True

    @property
    def are_there(self) -> bool:
        """Whether any model has a hook."""
        return bool(self._attachments) or isinstance(self._models, CalledModels)

    @property
    def models(self) -> WatchedModels | None:
        """The watched models, also after they were detached."""
        return self._models

    @property
    def first(self) -> nn.Module | None:
        """The first model that was given."""
        return None if self._models is None else self._models.first

    @property
    def roots(self) -> list[nn.Module]:
        """The models that were given."""
        return [] if self._models is None else self._models.roots

    def device_with(self, tensors: Batch) -> torch.device:
        """The training's device: CUDA if any watched parameter or tensor of a batch is there."""
        modules = [] if self._models is None else [watched.module for watched in self._models.modules]
        parameters = [p for module in modules if module is not None for p in module.parameters()]
        devices = [t.device for t in (*parameters, *tensors.values()) if is_tensor(t)]
        on_cuda = [device for device in devices if device.type == "cuda"]
        return next(iter((*on_cuda, *devices)), torch.device("cpu"))

    def watch_calls(self) -> None:
        """No forward pass of the watched models was seen: watch the calls of all modules in them."""
        if self._models is not None and not isinstance(self._models, CalledModels):
            self.attach(CalledModels(*self.roots))

    def module_of(self, slot: int) -> nn.Module | None:
        """The module whose forward passes have this slot."""
        return None if self._models is None else self._models.module_of(slot)

    def slot(self, watched: Watched) -> int:
        """The slot of a forward pass of this module at this moment."""
        assert self._models is not None
        return self._models.slot(watched)

    def were_compiled(self) -> bool:
        """Whether a watched model was compiled after it was attached; its compiled call is then watched.

        The step in which that is found has no MFU; it includes the compilation.
        """
        followed = [attachment.follow() for attachment in self._all()]
        return any(followed)

    def _all(self) -> list[Attachment]:
        return self._models.attachments if isinstance(self._models, CalledModels) else self._attachments
