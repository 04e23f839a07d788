"""Execution backends: the only code that touches arrays, devices and clocks.

A backend is a module with `load(argument, device) -> Backend` and
`device_count(argument) -> int`. Distributions add backends through the entry-point
group `mucudnn.backends`.
"""

import importlib
from types import ModuleType

from mucudnn.arguments import check_integer, check_text
from mucudnn.backends.base import Backend, ConvLibrary
from mucudnn.backends.device import Device
from mucudnn.errors import BackendUnavailableError
from mucudnn.plugins import find_plugin, plugin_names

__all__ = [
    "Backend",
    "ConvLibrary",
    "Device",
    "backend_names",
    "device_count",
    "get_backend",
]

_MODULES = {
    "cpu": "mucudnn.backends.cpu",
    "cuda": "mucudnn.backends.cuda",
    "null": "mucudnn.backends.null",
    "recorded": "mucudnn.backends.recorded",
}
_GROUP = "mucudnn.backends"


def backend_names() -> tuple[str, ...]:
    """Return the names that `get_backend` accepts, installed plug-ins included."""
    return tuple(sorted({*_MODULES, *plugin_names(_GROUP)}))


def get_backend(name: str, device: int = 0) -> Backend:
    """Load a backend by name and import its libraries.

    Args:
        name: `cpu`, `cuda`, `cuda:DESCRIPTION`, `null`, `recorded:FILE` (measurements
            of another machine) or the name of an installed plug-in.
        device: Index of the backend's device.

    Raises:
        ValueError: No backend has this name, or it has no such device.
        BackendUnavailableError: The library, device or file is missing.
    """
    module, argument = _module(name)
    count = module.device_count(argument)
    check_integer("device", device)
    if not 0 <= device < count:
        raise ValueError(f"backend {name!r} has devices 0 to {count - 1}, not {device}")
    backend: Backend = module.load(argument, device)
    return backend


def device_count(name: str) -> int:
    """Return the number of devices of a backend."""
    module, argument = _module(name)
    count: int = module.device_count(argument)
    return count


def _module(name: str) -> tuple[ModuleType, str]:
    check_text("the name of a backend", name)
    kind, _, argument = name.partition(":")
    try:
        if kind in _MODULES:
            return importlib.import_module(_MODULES[kind]), argument
        return _installed(kind, name), argument
    except ImportError as e:
        raise BackendUnavailableError(f"backend {name!r} is unavailable: {e}") from e


def _installed(kind: str, name: str) -> ModuleType:
    """Import the backend module of an installed plug-in."""
    plugin = find_plugin(_GROUP, kind)
    if plugin is None:
        valid = ", ".join(backend_names())
        raise ValueError(f"unknown backend {name!r}; choose one of: {valid}")
    module: ModuleType = plugin.load()
    missing = [f for f in ("load", "device_count") if not hasattr(module, f)]
    if missing:
        raise ImportError(
            f"{kind!r} of the distribution {plugin.distribution} is no backend: it has "
            f"no {' and no '.join(missing)}"
        )
    return module
