"""A loader that measures how long the training waits for each batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any

from .between_steps import BetweenSteps


class WatchedData:
    """Yields what the loader yields, and has the loader's length."""

    def __init__(self, loader: Iterable[Any], between: BetweenSteps) -> None:
        self._loader, self._between = loader, between

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        while True:
            self._between.wait_begins()
            has_batch = False
            try:
                batch = next(batches)
                has_batch = True
            except StopIteration:
                return
            finally:
                self._between.wait_ends(has_batch=has_batch, is_given=True)
            yield batch

    def __len__(self) -> int:
        if not isinstance(self._loader, Sized):
            raise TypeError(f"{type(self._loader).__name__} has no length")
        return len(self._loader)
