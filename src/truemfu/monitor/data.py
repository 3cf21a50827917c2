"""A loader whose waiting is noted: how long the training stood still for each batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any


class WatchedData:
    """Yields what the loader yields; as long as the loader is."""

    def __init__(self, loader: Iterable[Any], waited: Callable[[float], None]) -> None:
        self._loader, self._waited = loader, waited

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        while True:
            began_s = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._waited(time.perf_counter() - began_s)
            yield batch

    def __len__(self) -> int:
        if not isinstance(self._loader, Sized):
            raise TypeError(f"{type(self._loader).__name__} has no length")
        return len(self._loader)
