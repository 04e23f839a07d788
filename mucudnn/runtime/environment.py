"""The environment variables of µ-cuDNN, read here and nowhere else."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from mucudnn.backends import Backend, device_count, get_backend
from mucudnn.ir.sizes import parse_bytes
from mucudnn.passes.microbatch import BatchPolicy, candidate_batches
from mucudnn.runtime.cache import BenchmarkCache, default_path

__all__ = ["cache_path", "tuner_options"]

_DEVICES = "MUCUDNN_BENCHMARK_DEVICES"


def tuner_options(
    environ: Mapping[str, str], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments of a `Tuner`: the overrides, and what the environment adds to them.

    An empty variable counts as none. Without a database the measurements go to the
    user's cache directory, unless they are replayed or made up: those go nowhere.

    Raises:
        ValueError: A variable is not valid; the message names it.
    """
    options = dict(overrides)
    for name, (option, parse) in _VARIABLES.items():
        if (text := environ.get(name)) and option not in options:
            options[option] = _named(name, text, parse)
    if "cache" not in options:
        options["cache"] = BenchmarkCache(_path_for(options.get("backend", "cpu")))
    text = environ.get(_DEVICES)
    if text and "benchmark_backends" not in options:
        backend = options.get("backend", "cpu")
        kind = backend if isinstance(backend, str) else backend.name
        options["benchmark_backends"] = _named(
            _DEVICES, text, lambda text: _backends(kind, _devices(text))
        )
    return options


def cache_path(environ: Mapping[str, str]) -> Path:
    """Where measurements are remembered: `MUCUDNN_DATABASE`, or the user's cache."""
    return Path(environ.get("MUCUDNN_DATABASE") or default_path())


def _path_for(backend: Backend | str) -> Path | None:
    kind = backend if isinstance(backend, str) else backend.name
    virtual = kind.partition(":")[0] in ("null", "recorded")
    return None if virtual else default_path()


def _named(name: str, text: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(text)
    except ValueError as e:
        raise ValueError(f"{name}={text!r}: {e}") from None


def _policy(text: str) -> BatchPolicy:
    """A policy by our name or by µ-cuDNN's."""
    policy = cast(BatchPolicy, "powers_of_two" if text == "powerOfTwo" else text)
    candidate_batches(1, policy)
    return policy


def _devices(text: str) -> Sequence[int] | Literal["all"]:
    if text == "all":
        return "all"
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError("expected `all` or device numbers such as 0,1") from None


def _backends(kind: str, devices: Sequence[int] | Literal["all"]) -> list[Backend]:
    chosen = range(device_count(kind)) if devices == "all" else devices
    return [get_backend(kind, i) for i in chosen]


_VARIABLES: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "MUCUDNN_BATCH_SIZE_POLICY": ("batch_policy", _policy),
    "MUCUDNN_WORKSPACE_LIMIT": ("workspace_limit", parse_bytes),
    "MUCUDNN_TOTAL_WORKSPACE_SIZE": (
        "total_workspace",
        lambda text: parse_bytes(text) or None,
    ),
    "MUCUDNN_DATABASE": ("cache", BenchmarkCache),
}
