"""Do: the only code that touches arrays, devices and clocks.

A backend is a module with `load(argument, device) -> Backend` and
`device_count(argument) -> int`; others join through the entry-point group
`mucudnn.backends`.
"""

import importlib
from importlib.metadata import entry_points
from types import ModuleType

from mucudnn.backends.base import Backend, ConvLibrary, Device
from mucudnn.errors import BackendUnavailableError

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
    """Names that `get_backend` knows, those of installed plug-ins included."""
    return tuple(sorted({*_MODULES, *entry_points(group=_GROUP).names}))


def get_backend(name: str, device: int = 0) -> Backend:
    """Load a backend by name; its libraries are imported only now.

    Args:
        name: `cpu`, `null`, or `recorded:FILE` for measurements of another machine.
        device: Which of the backend's devices.

    Raises:
        ValueError: No backend has that name, or it has no such device.
        BackendUnavailableError: Its library, device or file is missing.
    """
    module, argument = _module(name)
    count = module.device_count(argument)
    if not 0 <= device < count:
        raise ValueError(f"backend {name!r} has devices 0 to {count - 1}, not {device}")
    backend: Backend = module.load(argument, device)
    return backend


def device_count(name: str) -> int:
    """How many devices a backend has."""
    module, argument = _module(name)
    count: int = module.device_count(argument)
    return count


def _module(name: str) -> tuple[ModuleType, str]:
    kind, _, argument = name.partition(":")
    target = _MODULES.get(kind)
    if target is None:
        found = entry_points(group=_GROUP, name=kind)
        if not found:
            valid = ", ".join(backend_names())
            raise ValueError(f"unknown backend {name!r}; choose one of: {valid}")
        target = next(iter(found)).value
    try:
        return importlib.import_module(target), argument
    except ImportError as e:
        raise BackendUnavailableError(f"backend {name!r} is unavailable: {e}") from e
