"""Micro-batched convolutions and memory-planned training graphs.

A name is imported when it is first used: `import mucudnn` costs nothing, and neither
does the start of the command.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mucudnn.backends import get_backend as get_backend
    from mucudnn.errors import MucudnnError as MucudnnError
    from mucudnn.ir.conv import (
        AlgoPerf as AlgoPerf,
        ConvPlan as ConvPlan,
        ConvProblem as ConvProblem,
        Direction as Direction,
        PerfTable as PerfTable,
    )
    from mucudnn.runtime.database.cache import BenchmarkCache as BenchmarkCache
    from mucudnn.runtime.functional import (
        conv1d as conv1d,
        conv2d as conv2d,
        conv3d as conv3d,
        conv_backward_data as conv_backward_data,
        conv_backward_filter as conv_backward_filter,
        explain as explain,
    )
    from mucudnn.runtime.tuning.bound_plan import run_plan as run_plan
    from mucudnn.runtime.tuning.tuner import Tuner as Tuner

_HOMES = {
    "get_backend": "backends",
    "MucudnnError": "errors",
    **dict.fromkeys(
        ("AlgoPerf", "ConvPlan", "ConvProblem", "Direction", "PerfTable"), "ir.conv"
    ),
    "BenchmarkCache": "runtime.database.cache",
    **dict.fromkeys(
        (
            *("conv1d", "conv2d", "conv3d"),
            *("conv_backward_data", "conv_backward_filter", "explain"),
        ),
        "runtime.functional",
    ),
    "run_plan": "runtime.tuning.bound_plan",
    "Tuner": "runtime.tuning.tuner",
}
"""Where each of them lives."""

_ROOMS = frozenset({"backends", "errors", "ir", "passes", "runtime", "suites"})
"""Modules that `import mucudnn` makes available as attributes."""


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(f"mucudnn.{_HOMES[name]}"), name)
    elif name in _ROOMS:
        return import_module(f"mucudnn.{name}")
    else:
        raise AttributeError(f"module 'mucudnn' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_ROOMS})
