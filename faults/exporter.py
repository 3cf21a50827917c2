"""The Prometheus exporter: which addresses it listens on, and peers that misbehave."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from truemfu.errors import UsageError
from truemfu.trackers import prometheus_server
from truemfu.trackers.prometheus import PrometheusTracker
from truemfu.trackers.prometheus_server import MOST_CONNECTIONS, parse_address
from truemfu.trackers.table import make_tracker

from .attack import Attack
from .names import check_one_line

_LOOPBACK = "0100007F"
_LISTENS = "0A"
_LIMIT_S = 1.0
"""The time limit of a connection, shortened here."""
_FURTHER_DESCRIPTORS = 4


def _addresses(port: int) -> set[str]:
    """The local addresses on which a port listens, as the kernel lists them."""
    tables = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()]
    return {
        row[1].split(":")[0]
        for row in rows
        if row[3] == _LISTENS and int(row[1].rpartition(":")[2], 16) == port
    }


@contextlib.contextmanager
def _served() -> Iterator[PrometheusTracker]:
    prometheus_server.REQUEST_LIMIT_S = _LIMIT_S
    tracker = PrometheusTracker(run="r", port=0)
    tracker.start({})
    tracker.log(1, {"perf/mfu": 0.5})
    try:
        yield tracker
    finally:
        began = time.monotonic()
        tracker.finish({})
        assert time.monotonic() - began < 20, "the exporter did not stop in time"


def _scrape(tracker: PrometheusTracker) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{tracker.port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    assert 'truemfu_mfu{rank="0",run="r"} 0.5' in text, text


def _default_address(folder: Path, *, settings: dict[str, str]) -> None:
    os.environ.pop("RANK", None)
    tracker = make_tracker("prometheus", folder, **settings)
    assert isinstance(tracker, PrometheusTracker)
    tracker.start({})
    found = _addresses(tracker.port)
    tracker.finish({})
    assert found == {_LOOPBACK}, f"it listens on {found}"


def _bad_address(folder: Path, *, address: str) -> None:
    try:
        host, port = parse_address(address, "it", port=9400)
    except UsageError as error:
        check_one_line(error)
        return
    raise AssertionError(f"{address!r} was taken for {host!r}, {port}")


def _connections(folder: Path, *, number: int, sends: bytes, then_resets: bool) -> None:
    """Connections that send something and wait cost few descriptors and threads; a scrape gets through."""
    os.environ.pop("RANK", None)
    with _served() as tracker:
        before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
        peers = []
        for _ in range(number):
            peer = socket.create_connection(("127.0.0.1", tracker.port), timeout=30)
            with contextlib.suppress(OSError):  # closed by now: others have come
                peer.sendall(sends)
            peers.append(peer)
        _scrape(tracker)
        own = len(os.listdir("/proc/self/fd")) - before - number
        assert own <= MOST_CONNECTIONS + _FURTHER_DESCRIPTORS, f"{own} descriptors for {number} connections"
        assert threading.active_count() - threads <= MOST_CONNECTIONS + _FURTHER_DESCRIPTORS
        for peer in peers:
            if then_resets:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            peer.close()
        _scrape(tracker)


def _slow(folder: Path, *, sends: bytes) -> None:
    """A peer that sends a byte now and then is closed after the time limit."""
    with _served() as tracker, socket.create_connection(("127.0.0.1", tracker.port), timeout=30) as peer:
        began = time.monotonic()
        while time.monotonic() - began < 30:
            try:
                peer.send(sends)
                time.sleep(0.05)
            except OSError:
                return
        raise AssertionError("a slow connection was never closed")


def _never_reads(folder: Path) -> None:
    """A peer that asks and never reads the answer."""
    os.environ.pop("RANK", None)
    with _served() as tracker:
        for number in range(3000):
            tracker.log(2, {f"perf/some_metric_{number}": 1.0})
        tracker.log(3, {"perf/mfu": 0.5})
        peer = socket.socket()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        peer.connect(("127.0.0.1", tracker.port))
        peer.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        _scrape(tracker)
        peer.close()


def _port_in_use(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        try:
            PrometheusTracker(port=taken.getsockname()[1]).start({})
        except OSError as error:
            message = str(error)
        else:
            message = "it took a port that was taken"
    assert "Address already in use" in message, message


def _requests(chance: random.Random) -> dict[str, bytes]:
    return {
        "nothing": b"",
        "half a request": b"GET /metrics HTTP/1.1\r\nHost:",
        "garbage": bytes(chance.randrange(256) for _ in range(2000)),
        "an endless line": b"GET /" + b"x" * 100_000,
        "many headers": b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 5000,
        "a body that never comes": b"POST /metrics HTTP/1.1\r\nContent-Length: 999999999\r\n\r\n",
        "an escape sequence": b"\x1b]0;t\x07 / HTTP/1.0\r\n\r\n",
        "another path": b"GET /../../etc/passwd HTTP/1.0\r\n\r\n",
        "a whole request": b"GET /metrics HTTP/1.0\r\n\r\n",
    }


def attacks(chance: random.Random) -> list[Attack]:
    """Addresses, connections and requests."""
    settings: list[dict[str, str]] = [
        {"address": "0"},
        {"address": "127.0.0.1:0"},
        {"address": "localhost:0"},
    ]
    found = [Attack(f"listens with {given}", partial(_default_address, settings=given)) for given in settings]
    for address in (
        "",
        ":1",
        "a b:1",
        "host:",
        "host:x",
        "http://host:1",
        "1:2:3",
        "[::1",
        "h:99999",
        "h:-1",
    ):
        found.append(Attack(f"address {address!r}", partial(_bad_address, address=address)))
    for what, sends in _requests(chance).items():
        for number in (1, 200):
            for resets in (False, True):
                run = partial(_connections, number=number, sends=sends, then_resets=resets)
                found.append(Attack(f"{number} connections, {what}, {'reset' if resets else 'closed'}", run))
    for sends in (b"G", b"GET / HTTP/1.0\r\nA: b\r\n"):
        found.append(Attack(f"slowly, {sends!r}", partial(_slow, sends=sends)))
    found.append(Attack("never reads", _never_reads))
    found.append(Attack("port in use", _port_in_use))
    return found
