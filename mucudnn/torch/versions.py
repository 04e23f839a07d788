"""Supported versions of PyTorch, and the limitations of each.

A version is called tested if the tests' quick part for PyTorch ran on it, whole or
the tests of each face (`train_step`, `backend`, `convolutions`, `memory`), on a CPU.
Versions older than `OLDEST` lack names that are needed and are refused; versions newer
than those tested are tried, with a warning.

This module does not import PyTorch: it reports when PyTorch is missing.
"""

import sys
import warnings
from collections.abc import Mapping
from importlib import metadata
from types import MappingProxyType

from mucudnn.errors import BackendUnavailableError

TESTED: Mapping[str, str] = MappingProxyType(
    {
        "2.11": "It has no `checkpoint_contexts`, what it compiles, with any backend, "
        "may round otherwise than eager code, and it raises RuntimeError where a step "
        "computes with tensors that are neither parameters, buffers nor of the batch.",
        "2.12": "It lacks nothing that the tests ask for.",
        "2.13": "It lacks nothing that the tests ask for.",
        "2.14": "It lacks nothing that the tests ask for.",
        "2.15": "It lacks nothing that the tests ask for.",
    }
)
"""Version -> its limitations, in a sentence."""

OLDEST = "2.11"
"""The oldest version that is not refused."""


def installed_version() -> str | None:
    """Return PyTorch's version, without importing it; None if it is not installed."""
    loaded = sys.modules.get("torch")
    if loaded is not None:
        return str(loaded.__version__)
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def check_version(version: str | None) -> None:
    """Refuse a version that cannot work, and warn about one that is not tested.

    Raises:
        BackendUnavailableError: PyTorch is not installed, or is too old.
    """
    tested = ", ".join(TESTED)
    advice = f"it is tested with {tested}: pip install '.[torch]'"
    if version is None:
        raise BackendUnavailableError(f"mucudnn.torch needs PyTorch; {advice}")
    if _order(version) < _order(OLDEST):
        raise BackendUnavailableError(
            f"mucudnn.torch needs PyTorch {OLDEST} or newer and found {version}; "
            f"{advice}"
        )
    if _order(version) not in map(_order, TESTED):
        warnings.warn(
            f"mucudnn.torch is tested with PyTorch {tested}, not with {version}",
            stacklevel=2,
        )


def _order(version: str) -> tuple[int, ...]:
    """Return a version's two leading numbers, as in (2, 13) of "2.13.0+cpu"."""
    return tuple(int(part) for part in version.split(".")[:2])
