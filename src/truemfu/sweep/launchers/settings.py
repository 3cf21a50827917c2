"""What each experiment requests of a cluster: the `cluster` object of profiling_config.json, checked."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, field

from ...errors import UsageError, brief
from ...records import MAX_FLOAT, Positive

_MAX_INT = 2**31 - 1
_Count = Annotated[int, Meta(ge=1, le=_MAX_INT)]

TIME_MARGIN_S = 120.0
"""What the engine's time limit allows beyond `timeout_s`, so that ours ends an experiment first: the start
of Python on the node, and the orderly end of the worker."""

_OWN_OPTIONS = frozenset(
    "--array -a --time -t --partition -p --account -A --mem --cpus-per-task -c --job-name -J --output -o "
    "--error -e --chdir -D --requeue --wrap --ntasks -n --parsable --test-only".split()
)
"""Options of sbatch that the sweep sets itself."""


class ClusterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The request of one experiment, and where it goes. None: the engine's default."""

    gpus: Annotated[int, Meta(ge=0, le=_MAX_INT)] | None = None
    """None: as many as the experiment uses, one on cuda and none on cpu."""
    cpus: _Count | None = None
    memory_gib: Positive | None = None
    """Host memory; the engine may end an experiment that uses more."""
    max_jobs: _Count | None = None
    """At most this many experiments at a time."""
    partition: str | None = None
    account: str | None = None
    sbatch_options: list[str] = field(default_factory=list)
    """Further options of sbatch, one each: `--constraint=h200`."""
    ray_address: str | None = None
    """`host:port` of a Ray cluster, or `auto`; None: a local one is started for the sweep."""
    stale_view_s: Annotated[float, Meta(ge=0, le=MAX_FLOAT)] = 60.0
    """How long files of another node may stay invisible here: so long a result is awaited after its job."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What one experiment requests of the engine."""

    gpus: int = 1
    cpus: int | None = None
    memory_bytes: int | None = None
    time_s: float
    """The time limit that the engine enforces."""


def request_of(settings: ClusterSettings, device: str, timeout_s: float, gpus: int = 1) -> Request:
    """The request of an experiment on `gpus` GPUs; a UsageError if `settings` grant it fewer on cuda."""
    if device == "cuda" and settings.gpus is not None and settings.gpus < gpus:
        raise UsageError(
            f"cluster.gpus is {settings.gpus}, fewer than the {gpus} GPUs of an experiment: leave it out"
        )
    used = settings.gpus if settings.gpus is not None else gpus if device == "cuda" else 0
    return Request(
        gpus=used,
        cpus=settings.cpus,
        memory_bytes=None if settings.memory_gib is None else int(settings.memory_gib * 2**30),
        time_s=timeout_s + TIME_MARGIN_S,
    )


def check_settings(settings: ClusterSettings) -> None:
    """Checks beyond types; a UsageError in one line."""
    for name in ("partition", "account", "ray_address"):
        value = getattr(settings, name)
        if value is not None and (not value.strip() or not value.isprintable()):
            raise UsageError(f"cluster.{name} must be a name; got {brief(value)}")
    for option in settings.sbatch_options:
        if not option.startswith("-") or not option.isprintable():
            raise UsageError(f"sbatch_options must be options such as --constraint=h200; got {brief(option)}")
        name = option.partition("=")[0] if option.startswith("--") else option[:2]
        if name in _OWN_OPTIONS:
            raise UsageError(
                f"sbatch_options must not contain {name}, which the sweep sets itself: leave it out, or use "
                "the sweep's own key for it"
            )
