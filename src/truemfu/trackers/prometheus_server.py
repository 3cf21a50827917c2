"""The HTTP server that Prometheus scrapes, safe to run inside a training process.

    new connection ─► the oldest is closed if 16 are open ─► a thread answers one request ─► closed
    every half second ─► connections open for more than 5 s are closed

So a client that opens connections and sends nothing costs a bounded number of descriptors and threads, and a
scrape still succeeds. It listens on this machine only, unless an address is given.
"""

from __future__ import annotations

import contextlib
import re
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from typing import Any

from ..errors import UsageError
from ..plain_files import Descriptor

LOOPBACK = "127.0.0.1"
MOST_CONNECTIONS = 16
REQUEST_LIMIT_S = 5.0
_PAUSE_S = 0.1
_LAST_PORT = 65535
_ADDRESS = re.compile(r"(?:(?P<host>[^\s:/\[\]]+|\[[^\s/\[\]]+\]):)?(?P<port>-?[0-9]{1,9})")


def parse_address(text: str, what: str, *, port: int | None = None) -> tuple[str, int]:
    """Host and port from `9400`, `0.0.0.0:9400`, `[::1]:9400`, or a host alone if a `port` is given."""
    found = _ADDRESS.fullmatch(text)
    if found is None and port is not None:
        found = _ADDRESS.fullmatch(f"{text}:{port}")
    if found is None:
        raise UsageError(f"{what} takes PORT, HOST:PORT or [IPV6]:PORT; got {text!r}")
    if not 0 <= int(found["port"]) <= _LAST_PORT:
        raise UsageError(f"{what} takes a port from 0 (any free one) to {_LAST_PORT}, got {found['port']}")
    return (found["host"] or LOOPBACK).strip("[]"), int(found["port"])


class MetricsServer(socketserver.ThreadingTCPServer):
    """Serves the metrics of a registry of prometheus_client from a daemon thread, until `close`.

    Port 0 is any free one. An address or port that is not available is an OSError.
    """

    allow_reuse_address = daemon_threads = True
    block_on_close = False
    request_queue_size = MOST_CONNECTIONS

    def __init__(
        self, registry: Any, host: str, port: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        from prometheus_client import MetricsHandler

        self._clock = clock
        self._slots = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._lock = threading.Lock()
        self._open: dict[socket.socket, float] = {}
        """Each open connection and its deadline, the oldest first."""
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = found[0][0]
        super().__init__((host, port), MetricsHandler.factory(registry))
        self._listening = Descriptor(self.fileno())
        threading.Thread(target=self.serve_forever, name="truemfu-prometheus", daemon=True).start()

    @property
    def port(self) -> int:
        return int(self.socket.getsockname()[1])

    @property
    def url(self) -> str:
        """The URL with the address it is bound to."""
        host = str(self.socket.getsockname()[0])
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/metrics"

    def close(self) -> None:
        """Stop serving, and close open connections."""
        self.shutdown()
        if not self._listening.is_ours:
            self.socket.detach()  # the program has closed it: the number may be that of a file of its own
        self.server_close()
        self._end_overdue(due_before_s=float("inf"))

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            time.sleep(_PAUSE_S)  # out of descriptors: accept would fail in a busy loop
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            self._end_oldest()
            self._slots.acquire()
        with self._lock:
            self._open[request] = self._clock() + REQUEST_LIMIT_S
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Called when a connection was answered, or if no thread could be started for it."""
        with self._lock:
            del self._open[request]
        super().shutdown_request(request)
        self._slots.release()

    def service_actions(self) -> None:
        """Called twice a second, and after each connection."""
        self._end_overdue(due_before_s=self._clock())

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: a broken connection is not reported on the run's terminal."""

    def _end_oldest(self) -> None:
        with self._lock:
            for connection in list(self._open)[:1]:
                _end(connection)

    def _end_overdue(self, *, due_before_s: float) -> None:
        with self._lock:
            for connection, due_s in self._open.items():
                if due_s <= due_before_s:
                    _end(connection)


def _end(connection: socket.socket) -> None:
    """Wake the thread that uses this connection; it closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
