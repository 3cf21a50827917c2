"""The hooks on all models that a monitor watches: added by `attach`, removed by `detach`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
from torch import nn

from ...errors import one_line
from ..notices import Notices
from ..values.intake import is_tensor
from .attachment import Attachment
from .batch_notes import Batch
from .watched import CalledModels, NoModels, Watched, WatchedModels


class ModelHooks:
    """`seen` gets each training batch of a watched module, `evaluated` those of passes without gradients.

    `ended` is called after a forward pass for which they returned True, `returned` after each that raised
    nothing. Of models that are found at their calls, every module is watched until the first step has ended;
    those that were called inside others are left alone from then on.
    """

    def __init__(
        self,
        seen: Callable[[Watched, Batch | None], bool],
        evaluated: Callable[[Watched, Batch | None], bool],
        ended: Callable[[], None],
        returned: Callable[[], None],
        notices: Notices,
    ) -> None:
        self._seen, self._evaluated, self._ended, self._notices = seen, evaluated, ended, notices
        self._returned = returned
        self.models: WatchedModels = NoModels()
        """The watched models, also after they were detached."""
        self._attachments: dict[Watched, Attachment] = {}
        self.are_disabled = False
        """Whether the caller passes each micro-batch to `observe`."""
        self.are_unsettled = False
        """Whether it is not yet known which modules a step calls: `settle` is due after each."""

    def attach(self, models: WatchedModels) -> None:
        """Watch these models instead of others."""
        self.detach()
        self.models = models
        self.are_unsettled = isinstance(models, CalledModels)
        attach = self._attach_calls if isinstance(models, CalledModels) else self._attach
        for watched in models.candidates():
            if (module := watched.module) is not None:
                attach(watched, module)

    def _attach(self, watched: Watched, module: nn.Module) -> None:
        try:
            self._attachments[watched] = Attachment(
                module,
                functools.partial(self._seen, watched),
                functools.partial(self._evaluated, watched),
                self._ended,
                self._returned,
            )
        except Exception as error:  # a scripted model takes no such hooks
            self._notices(
                f"the model accepts no hooks, call monitor.observe(batch) for each micro-batch: "
                f"{type(module).__name__}: {one_line(error)}"
            )

    def _attach_calls(self, watched: Watched, module: nn.Module) -> None:
        models = self.models
        assert isinstance(models, CalledModels)

        def seen(batch: Batch | None) -> bool:
            return models.begins(watched, is_training=True) and self._seen(watched, batch)

        def evaluated(batch: Batch | None) -> bool:
            return models.begins(watched, is_training=False) and self._evaluated(watched, batch)

        def ended() -> None:
            if models.ends(watched):
                self._ended()

        with contextlib.suppress(Exception):  # a scripted module takes no hooks; what calls it may
            self._attachments[watched] = Attachment(module, seen, evaluated, ended)

    def detach(self) -> None:
        """Leave the models as they were."""
        for attachment in self._attachments.values():
            attachment.remove()
        self._attachments.clear()

    @contextlib.contextmanager
    def removed(self) -> Iterator[None]:
        """The models without any hook, for what runs inside."""
        attachments = list(self._attachments.values())
        for attachment in attachments:
            attachment.remove()
        try:
            yield
        finally:
            for attachment in attachments:
                attachment.add()

    def settle(self) -> None:
        """A step has ended: modules that were called inside others are not watched any more."""
        if isinstance(self.models, CalledModels):
            for nested in self.models.take_nested() & self._attachments.keys():
                self._attachments.pop(nested).remove()
            self.are_unsettled = len(self._attachments) > len(self.models.modules)

    @property
    def are_there(self) -> bool:
        """Whether any model has a hook."""
        return bool(self._attachments) or isinstance(self.models, CalledModels)

    def device_with(self, tensors: Batch) -> torch.device:
        """The training's device: CUDA if any watched parameter or tensor of a batch is there."""
        modules = [watched.module for watched in self.models.modules]
        parameters = [p for module in modules if module is not None for p in module.parameters()]
        devices = [t.device for t in (*parameters, *tensors.values()) if is_tensor(t)]
        on_cuda = [device for device in devices if device.type == "cuda"]
        return next(iter((*on_cuda, *devices)), torch.device("cpu"))

    def watch_calls(self) -> None:
        """No forward pass of the watched models was seen: watch the calls of all modules in them."""
        if not isinstance(self.models, (CalledModels, NoModels)):
            self.attach(CalledModels(*self.models.roots))

    def were_compiled(self) -> bool:
        """Whether a watched model was compiled after it was attached; its compiled call is then watched.

        The step in which that is found has no MFU; it includes the compilation.
        """
        followed = [attachment.follow() for attachment in self._attachments.values()]
        return any(followed)
