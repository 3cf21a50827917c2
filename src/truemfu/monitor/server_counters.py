"""The counters of a vLLM or SGLang server: read from its metrics, and what it did between two readings.

    http://host:8000/metrics, or the registry of this process ─► Reading ─┐
                                                        the next Reading ─┴► ServerWork

With `--enable-mfu-metrics` both servers count FLOPs and bytes of one GPU by estimates of their own. Several
series of a counter are several engines or ranks, and their mean is one GPU's.
"""

from __future__ import annotations

import http.client
import os
import re
import sys
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ..errors import UsageError, brief

THIS_PROCESS = "this process"
VLLM, SGLANG = "vLLM", "SGLang"
_TIMEOUT_S = 5.0
_MOST_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 16
_TOO_LARGE = 1e30
_CUT = "its answer ended early"
_SOURCES = {b"vllm": VLLM, b"sglang": SGLANG}
_TOKENS = ("prompt_tokens", "generation_tokens")
_FLOPS, _READ_BYTES = "estimated_flops_per_gpu", "estimated_read_bytes_per_gpu"
_COUNTERS = (*_TOKENS, _FLOPS, _READ_BYTES)
_SAMPLE = re.compile(rb"^(?:vllm|sglang):(%b)_total(\{.*\})? (\S+)" % "|".join(_COUNTERS).encode(), re.M)
_SOURCE = re.compile(rb"^(?:# \w+ )?(vllm|sglang):", re.M)
_STARTED = re.compile(rb"^process_start_time_seconds (\S+)", re.M)
_NO_ENGINE = (
    "no engine in this process exports counters: vllm.LLM needs disable_log_stats=False, sglang.Engine "
    "enable_metrics=True"
)


@dataclass(frozen=True)
class ServerSetting:
    """A server as configured; without a device it has this process's, if it is on this host."""

    url: str
    device: str | None = None
    dtype: str | None = None


class CannotRead(Exception):
    """A server has no counters to read; the message says why."""


class Reading(NamedTuple):
    """The counters of a server at one time, by name and labels."""

    at_s: float
    source: str
    started: bytes | None
    """When its process began, if it says so."""
    values: Mapping[tuple[str, bytes], float]

    @property
    def has_worked(self) -> bool:
        return any(value for (name, _), value in self.values.items() if name in _TOKENS)

    @property
    def has_estimate(self) -> bool:
        """Whether it counts FLOPs: vLLM exports zeros without the option, SGLang nothing."""
        return any(value for (name, _), value in self.values.items() if name == _FLOPS)


class ServerWork(NamedTuple):
    """What a server did in some time; its FLOPs and bytes are those of one GPU in `estimated_s` of it."""

    seconds: float = 0.0
    prompt_tokens: float = 0.0
    generated_tokens: float = 0.0
    estimated_s: float = 0.0
    flops: float = 0.0
    read_bytes: float = 0.0

    def plus(self, other: ServerWork) -> ServerWork:
        return ServerWork(*(mine + its for mine, its in zip(self, other, strict=True)))

    def without(self, other: ServerWork) -> ServerWork:
        return ServerWork(*(mine - its for mine, its in zip(self, other, strict=True)))


def checked_url(url: str) -> str:
    """The address of a server's metrics; a UsageError if it is none."""
    if url == THIS_PROCESS:
        return url
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if "@" in url or "?" in url or "#" in url:
        raise UsageError("the address of a server must not have a password, a query or a fragment")
    if not is_valid or not url.isascii() or not url.isprintable() or " " in url:
        raise UsageError(f"the address of a server is http://HOST:PORT or {THIS_PROCESS!r}; got {brief(url)}")
    return parts._replace(path=parts.path if parts.path.strip("/") else "/metrics").geturl()


def read_server(url: str) -> tuple[Reading, bool]:
    """The counters of a server now, and whether it is on this host."""
    if url == THIS_PROCESS:
        return parsed(_own_metrics(), time.perf_counter()), True
    text, at_s, is_here = _fetched(url)
    reading = parsed(text, at_s)
    if not text.endswith(b"\n"):
        raise CannotRead(_CUT)
    return reading, is_here


def parsed(text: bytes, at_s: float) -> Reading:
    """Counters in Prometheus' text format."""
    source = _SOURCE.search(text)
    if source is None:
        raise CannotRead("its answer has no metrics of vLLM or SGLang")
    try:
        values = {(name.decode(), labels): float(value) for name, labels, value in _SAMPLE.findall(text)}
    except ValueError:
        raise CannotRead("a counter in its answer is not a number") from None
    if not all(0 <= value < _TOO_LARGE for value in values.values()):
        raise CannotRead("a counter in its answer is negative, too large or NaN")
    started = _STARTED.search(text)
    return Reading(at_s, _SOURCES[source[1]], started and started[1], values)


def work_between(before: Reading, after: Reading) -> ServerWork | None:
    """What a server did between two readings; None if it was restarted."""
    if before.source != after.source or before.started != after.started:
        return None
    changes: dict[str, list[float]] = {counter: [] for counter in _COUNTERS}
    for key in {**before.values, **after.values}:  # a series that was not there was 0
        changes[key[0]].append(after.values.get(key, 0.0) - before.values.get(key, 0.0))
    prompt, generated, flops, read = changes.values()
    if min((*prompt, *generated, *flops, *read), default=0.0) < 0:
        return None
    seconds = after.at_s - before.at_s
    work = ServerWork(seconds, sum(prompt), sum(generated))
    if not after.has_estimate:
        return work
    return work._replace(
        estimated_s=seconds, flops=sum(flops) / len(flops), read_bytes=sum(read) / max(len(read), 1)
    )


def _fetched(url: str) -> tuple[bytes, float, bool]:
    """The answer of a server, when it came, and whether the server is on this host; no proxy is asked."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)
    ends_s = time.monotonic() + _TIMEOUT_S
    try:
        connection.connect()
        own, peer = connection.sock.getsockname()[0], connection.sock.getpeername()[0]
        connection.request("GET", parts.path, headers={"Accept-Encoding": "identity"})
        response = connection.getresponse()
        at_s = time.perf_counter()
        if response.status != http.HTTPStatus.OK:
            raise CannotRead(f"it answers with HTTP status {response.status}")
        body = bytearray()
        while chunk := response.read1(_CHUNK_BYTES):
            body += chunk
            if time.monotonic() > ends_s or len(body) > _MOST_BYTES:
                raise CannotRead(f"its answer is larger than 64 MiB or takes longer than {_TIMEOUT_S:.0f} s")
        text, is_whole = bytes(body), not response.length
        if text.startswith(b"\x1f\x8b"):  # compressed by something between, unasked
            unpacker = zlib.decompressobj(31)
            text = unpacker.decompress(text, _MOST_BYTES)
            is_whole = is_whole and unpacker.eof
        if not is_whole:
            raise CannotRead(_CUT)
    finally:
        connection.close()
    return text, at_s, own == peer or peer.startswith("127.") or peer == "::1"


def _own_metrics() -> bytes:
    """The counters that an engine of this process exports through prometheus_client."""
    client: Any = sys.modules.get("prometheus_client")
    if client is None:
        raise CannotRead(_NO_ENGINE)
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:  # of several processes, in files
        from prometheus_client.multiprocess import MultiProcessCollector

        registry = client.CollectorRegistry()
        MultiProcessCollector(registry)
    else:
        names = [f"{source.decode()}:{name}_total" for source in _SOURCES for name in _COUNTERS]
        registry = client.REGISTRY.restricted_registry(names)
    text: bytes = client.generate_latest(registry)
    if not _SOURCE.search(text):
        raise CannotRead(_NO_ENGINE)
    return text
