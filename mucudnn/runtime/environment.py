"""Environment variables of µ-cuDNN and defaults; no other module reads them.

Measurements are stored in the user's cache directory by default.
"""

import enum
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from mucudnn.backends import Backend, device_count, get_backend
from mucudnn.backends.virtual import VirtualDevice
from mucudnn.ir.sizes import parse_bytes, parse_integer
from mucudnn.passes.microbatch import BatchPolicy, candidate_batches
from mucudnn.runtime.store.measurements import BenchmarkCache, default_path


class Users(enum.Enum):
    """Sentinel for the user's cache directory, distinct from every path."""

    CACHE = "the user's cache directory"


USERS = Users.CACHE
"""Default of a tuner's `cache`."""

CacheChoice = BenchmarkCache | str | os.PathLike[str] | Users | None

_DEVICES = "MUCUDNN_BENCHMARK_DEVICES"


def tuner_options(
    environ: Mapping[str, str], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Return arguments of a `Tuner`: the overrides, completed by the environment.

    An empty variable counts as unset.
    """
    options = dict(overrides)
    for name, (option, parse) in _VARIABLES.items():
        if (text := environ.get(name)) and option not in options:
            options[option] = _named(name, text, parse)
    text = environ.get(_DEVICES)
    others = (options.get("benchmark_backends"), options.get("executor"))
    if text and all(other is None for other in others):
        backend = options.get("backend", "cpu")
        kind = backend if isinstance(backend, str) else backend.name

        def backends(text: str) -> list[Backend]:
            numbers = _devices(text)
            chosen = range(device_count(kind)) if numbers == "all" else numbers
            return [get_backend(kind, i) for i in chosen]

        options["benchmark_backends"] = _named(_DEVICES, text, backends)
    return options


def launched_processes(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of processes that an MPI launcher started; 1 without one."""
    for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MPI_WORLD_SIZE"):
        if (text := environ.get(name, "")).isdecimal():
            return int(text)
    return 1


def cache_path(environ: Mapping[str, str]) -> Path:
    """Return the cache file: `MUCUDNN_DATABASE`, or that of the user's directory."""
    return Path(environ.get("MUCUDNN_DATABASE") or default_path())


def open_cache(choice: CacheChoice, backend: Backend) -> BenchmarkCache:
    """Open the cache that a tuner's `cache` argument selects."""
    if isinstance(choice, BenchmarkCache):
        return choice
    if choice is None:
        return BenchmarkCache()
    if choice is USERS:
        # Invented or recorded times in the user's cache would be mistaken for measured
        # ones.
        virtual = backend.name.partition(":")[0] in ("null", "recorded")
        virtual = virtual or isinstance(backend.device, VirtualDevice)
        return BenchmarkCache(None if virtual else default_path())
    if isinstance(choice, str | os.PathLike):
        path = os.fspath(choice)
        if isinstance(path, str):
            if not path:
                raise ValueError(
                    "cache is an empty path; pass None to store nothing on disk"
                )
            return BenchmarkCache(path)
    raise TypeError(
        f"cache is {choice!r}; give a path, a BenchmarkCache, or None to store "
        "measurements in memory only"
    )


def _named(name: str, text: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(text)
    except ValueError as e:
        raise ValueError(f"{name}={text!r}: {e}") from None


def _policy(text: str) -> BatchPolicy:
    """Return a batch-size policy by our name or by µ-cuDNN's."""
    policy = cast(BatchPolicy, "powers_of_two" if text == "powerOfTwo" else text)
    candidate_batches(1, policy)
    return policy


def _devices(text: str) -> Sequence[int] | Literal["all"]:
    if text == "all":
        return "all"
    try:
        return [parse_integer(part) for part in text.split(",")]
    except ValueError:
        raise ValueError("expected `all` or device numbers such as 0,1") from None


_VARIABLES: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "MUCUDNN_BATCH_SIZE_POLICY": ("batch_policy", _policy),
    "MUCUDNN_WORKSPACE_LIMIT": ("workspace_limit", parse_bytes),
    "MUCUDNN_TOTAL_WORKSPACE_SIZE": (
        "total_workspace",
        lambda text: parse_bytes(text) or None,
    ),
    "MUCUDNN_DATABASE": ("cache", Path),
}
