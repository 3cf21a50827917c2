"""MLflow: logs to the active run, or to a new one; rows are sent in batches.

If the program has set no tracking URI, the new run goes to a SQLite file in the output folder
(`mlflow ui --backend-store-uri sqlite:///<output_dir>/mlflow.db`). A single metric costs MLflow milliseconds,
so rows are collected and sent together.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .base import Names, checksum, known

_MOST_IN_BATCH = 1000  # MLflow's limit
_LONGEST_TAG = 5000
_LONGEST_NAME = 230  # MLflow accepts 250; two checksums may follow
_NOT_IN_NAMES = re.compile(r"[^\w\-. :/]+")


class MlflowTracker:
    """Logs metrics at their true steps through its own `MlflowClient`."""

    def __init__(self, output_dir: Path) -> None:
        self._dir = output_dir
        self._client: Any = None
        self._run_id = ""
        self._is_ours = False
        self._waiting: list[Any] = []
        self._tags: dict[str, str] = {}
        self._names = Names(_clean)

    def start(self, run: Mapping[str, Any]) -> None:
        """Find the active run or create one; the description of the run becomes tags."""
        import mlflow
        from mlflow.tracking import fluent

        # `mlflow.active_run` only sees the calling thread, and the program's run was started on another one.
        active = getattr(fluent, "_get_latest_active_run", mlflow.active_run)()
        if active is not None:
            self._client = mlflow.MlflowClient()
            self._run_id = active.info.run_id
        else:
            store = None
            if not mlflow.is_tracking_uri_set():
                self._dir.mkdir(parents=True, exist_ok=True)
                store = f"sqlite:///{(self._dir / 'mlflow.db').resolve()}"
            self._client = mlflow.MlflowClient(store)
            self._run_id = self._create()
            self._is_ours = True
        self._tag({f"truemfu.{key}": value for key, value in run.items()})

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add the row to the next batch; strings become tags when they change."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        row = known(metrics)
        numbers = {key: value for key, value in row.items() if not isinstance(value, str)}
        if len(self._waiting) + len(numbers) > _MOST_IN_BATCH:
            self.flush()
        self._waiting += [
            Metric(self._names(key), float(value), now_ms, step) for key, value in numbers.items()
        ]
        self._tag({key: row[key] for key in row.keys() - numbers.keys()})

    def flush(self) -> None:
        """Send the batch."""
        while self._waiting:
            self._client.log_batch(self._run_id, metrics=self._waiting[:_MOST_IN_BATCH])
            del self._waiting[:_MOST_IN_BATCH]

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Send the remaining rows; a run created here is closed, the program's is left open."""
        self.flush()
        self._tag({f"truemfu.summary.{key}": value for key, value in summary.items()})
        if self._is_ours:
            self._client.set_terminated(self._run_id)

    def _create(self) -> str:
        experiment = self._client.get_experiment_by_name("truemfu")
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment("truemfu")
        return str(self._client.create_run(experiment_id, run_name=self._dir.resolve().name).info.run_id)

    def _tag(self, values: Mapping[str, Any]) -> None:
        from mlflow.entities import RunTag

        texts = {self._names(key): str(value)[:_LONGEST_TAG] for key, value in values.items()}
        new = {key: text for key, text in texts.items() if self._tags.get(key) != text}
        if new:
            self._tags.update(new)
            self._client.log_batch(self._run_id, tags=[RunTag(key, text) for key, text in new.items()])


def _clean(name: str) -> str:
    """A name MLflow accepts: letters, digits and a few symbols, a plain path, not too long."""
    plain = _NOT_IN_NAMES.sub("_", name.replace("%", "percent")).strip("_")
    parts = ["_" * max(len(part), 1) if not part.strip(".") else part for part in plain.split("/")]
    cleaned = "/".join(parts)
    return cleaned if len(cleaned) <= _LONGEST_NAME else f"{cleaned[:_LONGEST_NAME]}_{checksum(name)}"
