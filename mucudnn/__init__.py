"""Micro-batched convolutions, and training steps within a memory budget.

    y = mucudnn.conv2d(x, w, padding=1, tuner=mucudnn.Tuner(workspace_limit="64MiB"))

    network = mucudnn.models.get_model("resnet18")(batch=32)
    optimizer = mucudnn.optim.Momentum(0.1)
    with mucudnn.Trainer(network, optimizer=optimizer, budget="1GiB") as trainer:
        mucudnn.fit(trainer, batches, epochs=10)

Names are imported on first use, so that `import mucudnn` and the command start fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mucudnn import (
        backends as backends,
        data as data,
        errors as errors,
        ir as ir,
        models as models,
        optim as optim,
        passes as passes,
        runtime as runtime,
        strategies as strategies,
        suites as suites,
    )
    from mucudnn.backends import get_backend as get_backend
    from mucudnn.errors import MucudnnError as MucudnnError
    from mucudnn.ir.builder import GraphBuilder as GraphBuilder
    from mucudnn.ir.conv import (
        AlgoPerf as AlgoPerf,
        ConvPlan as ConvPlan,
        ConvProblem as ConvProblem,
        Direction as Direction,
        PerfTable as PerfTable,
    )
    from mucudnn.ir.graph import Graph as Graph
    from mucudnn.ir.numerics import Numerics as Numerics
    from mucudnn.passes.microbatch import pareto_plans as pareto_plans
    from mucudnn.passes.planning.plan_step import plan_step as plan_step
    from mucudnn.passes.planning.request import StepRequest as StepRequest
    from mucudnn.runtime.functional import (
        conv1d as conv1d,
        conv2d as conv2d,
        conv3d as conv3d,
        conv_backward_data as conv_backward_data,
        conv_backward_filter as conv_backward_filter,
        explain as explain,
    )
    from mucudnn.runtime.store.measurements import BenchmarkCache as BenchmarkCache
    from mucudnn.runtime.training.budget import MemoryBudget as MemoryBudget
    from mucudnn.runtime.training.checkpoints import Checkpoints as Checkpoints
    from mucudnn.runtime.training.history import (
        plans_of as plans_of,
        recall_races as recall_races,
    )
    from mucudnn.runtime.training.loop import fit as fit
    from mucudnn.runtime.training.trainer import Trainer as Trainer
    from mucudnn.runtime.tuning.bound_plan import run_plan as run_plan
    from mucudnn.runtime.tuning.tuner import Tuner as Tuner
    from mucudnn.studies.memory import study_memory as study_memory

    __version__: str

_EXPORTS = {
    "backends": ("get_backend",),
    "errors": ("MucudnnError",),
    "ir.builder": ("GraphBuilder",),
    "ir.conv": ("AlgoPerf", "ConvPlan", "ConvProblem", "Direction", "PerfTable"),
    "ir.graph": ("Graph",),
    "ir.numerics": ("Numerics",),
    "passes.microbatch": ("pareto_plans",),
    "passes.planning.plan_step": ("plan_step",),
    "passes.planning.request": ("StepRequest",),
    "runtime.store.measurements": ("BenchmarkCache",),
    "runtime.functional": (
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_backward_data",
        "conv_backward_filter",
        "explain",
    ),
    "runtime.training.budget": ("MemoryBudget",),
    "runtime.training.checkpoints": ("Checkpoints",),
    "runtime.training.loop": ("fit",),
    "runtime.training.history": ("plans_of", "recall_races"),
    "runtime.training.trainer": ("Trainer",),
    "runtime.tuning.bound_plan": ("run_plan",),
    "runtime.tuning.tuner": ("Tuner",),
    "studies.memory": ("study_memory",),
}
"""Module -> the names that it exports."""

_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}

_SUBMODULES = (
    "backends",
    "data",
    "errors",
    "ir",
    "models",
    "optim",
    "passes",
    "runtime",
    "strategies",
    "suites",
)
"""Modules that `import mucudnn` makes available as attributes."""

__all__ = [
    *_MODULE_OF,
    *("__version__", "data", "errors", "models", "optim", "strategies"),
]


def __getattr__(name: str) -> Any:
    value: Any
    if name in _SUBMODULES:
        return import_module(f"mucudnn.{name}")
    if name == "__version__":
        value = import_module("mucudnn.plugins").installed_version()
    elif name in _MODULE_OF:
        value = getattr(import_module(f"mucudnn.{_MODULE_OF[name]}"), name)
    else:
        raise AttributeError(f"module 'mucudnn' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
