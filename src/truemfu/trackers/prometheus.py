"""Prometheus: the last values, served for scraping.

    http://127.0.0.1:9464/metrics       truemfu_mfu{rank="0",run="llama"} 0.41

`perf/mfu` is `truemfu_mfu`, `training/loss` is `truemfu_training_loss`; the metrics of a dataset carry its
name as the label `dataset`, those of a rank under `perf/rank/` its number as the label `of_rank`. The
description of the run is in the labels of `truemfu_run_info`. It is served to this machine only;
`monitoring.prometheus_address: 0.0.0.0` or `PrometheusTracker(address="0.0.0.0")` serves it to anyone who can
reach the port.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from typing import Any

from .base import Names, known, writable
from .prometheus_server import LOOPBACK, MetricsServer

DEFAULT_PORT = 9464
_DATASET = re.compile(r"dataset/(?P<dataset>.*)/(?P<metric>[^/]+)", re.DOTALL)
_RANK = re.compile(r"perf/rank/(?P<rank>[^/]+)/(?P<metric>.+)")
_STRAGGLER = "perf/straggler_"
_NOT_IN_NAMES = re.compile(r"\W+", re.ASCII)


class PrometheusTracker:
    """Serves gauges on `port` (0: any free one, then stored in `port`) from `start` until `finish`."""

    def __init__(self, *, run: str = "", port: int = DEFAULT_PORT, address: str = LOOPBACK) -> None:
        self.port = port
        self._address = address
        self._labels = {"run": writable(run), "rank": os.environ.get("RANK", "0")}
        self._names = Names(_clean)
        self._gauges: dict[str, Any] = {}
        self._flags: set[str] = set()
        self._registry: Any = None
        self._server: MetricsServer | None = None

    def start(self, run: Mapping[str, Any]) -> None:
        """Start serving; an address or port that is not available is an OSError that names it."""
        from prometheus_client import CollectorRegistry

        self._registry = CollectorRegistry()
        try:
            self._server = MetricsServer(self._registry, self._address, self.port)
        except OSError as problem:
            advice = (
                f"cannot serve on {self._address} port {self.port}: {problem.strerror}; pass "
                "another port to PrometheusTracker(port=...), or set monitoring.prometheus_address"
            )
            raise OSError(problem.errno, advice) from None
        self.port = self._server.port
        labels = {
            _clean(key): writable(str(value))
            for key, value in run.items()
            if isinstance(value, (str, int, float))
        }
        self._set("run_info", 1.0, {**labels, **self._labels})

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Make these the last values; metrics that are not in this row keep theirs.

        A flag such as `perf/warmup` is in a row only if it is true: when newer values under `perf/` come
        without it, it is false. The figures of a straggler come together: one that is missing is unknown.
        """
        row = {"global_step": step, **known(metrics)}
        performance = {key: value for key, value in row.items() if key.startswith("perf/")}
        self._flags |= {key for key, value in performance.items() if isinstance(value, bool)}
        if performance:
            row = {**dict.fromkeys(self._flags, False), **row}
        if any(key.startswith(_STRAGGLER) for key in row):
            before = [key for key in self._gauges if key.startswith(_STRAGGLER)]
            row = {**dict.fromkeys(before, math.nan), **row}
        for key, value in row.items():
            if isinstance(value, str):
                continue  # a gauge is a number; texts are in truemfu_run_info
            dataset, of_rank = _DATASET.fullmatch(key), _RANK.fullmatch(key)
            if of_rank:
                labels = {**self._labels, "of_rank": of_rank["rank"]}
                self._set(f"perf/rank/{of_rank['metric']}", value, labels)
            elif dataset:
                labels = {**self._labels, "dataset": writable(dataset["dataset"])}
                self._set(f"dataset//{dataset['metric']}", value, labels)
            else:
                self._set(key, value, self._labels)

    def flush(self) -> None:
        """Nothing to do: a scrape reads the current values."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.close()

    def _set(self, metric: str, value: float, labels: Mapping[str, str]) -> None:
        """Set the gauge of this metric; the same metric always has the same labels."""
        from prometheus_client import Gauge

        if metric not in self._gauges:
            name = f"truemfu_{self._names(metric)}"
            self._gauges[metric] = Gauge(name, f"{name}, last value", sorted(labels), registry=self._registry)
        self._gauges[metric].labels(**labels).set(value)


def _clean(name: str) -> str:
    return _NOT_IN_NAMES.sub("_", name.removeprefix("perf/").replace("%", "percent")).strip("_")
