"""PyTorch models trained within a budget of bytes, and their convolutions planned.

    import mucudnn.torch as mt

    step = mt.train_step(model, loss_fn, optimizer, budget="8GiB")
    loss = step(x, y)
    print(step.plan)

    model = torch.compile(model, backend=mt.backend(budget="8GiB"))

    with mt.convolutions(workspace_limit="64MiB"):  # ours, in an unmodified model
        loss = loss_fn(model(x), y)

PyTorch's graphs come in, our schedules go out; the planner decides as it always does.
A name is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mucudnn.torch.versions import check_version, installed_version

if TYPE_CHECKING:
    from mucudnn.torch.compile_backend import (
        CompileBackend as CompileBackend,
        backend as backend,
    )
    from mucudnn.torch.conv.backend import cpu_backend as cpu_backend
    from mucudnn.torch.conv.context import convolutions as convolutions
    from mucudnn.torch.distributed.distribute import (
        Distribution as Distribution,
        ShareSampler as ShareSampler,
        distribute as distribute,
    )
    from mucudnn.torch.distributed.layers import compile_layers as compile_layers
    from mucudnn.torch.memory_study import MemoryStudy as MemoryStudy, memory as memory
    from mucudnn.torch.plan import TorchPlan as TorchPlan
    from mucudnn.torch.step import TrainStep as TrainStep, train_step as train_step

_HOMES = {
    "compile_backend": ("CompileBackend", "backend"),
    "conv.backend": ("cpu_backend",),
    "conv.context": ("convolutions",),
    "distributed.distribute": ("Distribution", "ShareSampler", "distribute"),
    "distributed.layers": ("compile_layers",),
    "memory_study": ("MemoryStudy", "memory"),
    "plan": ("TorchPlan",),
    "step": ("TrainStep", "train_step"),
}
"""Module -> the names that it gives."""

_HOME = {name: home for home, names in _HOMES.items() for name in names}

_REPLACED = {
    "partitioner": "backend(budget=..., inductor=True)",
    "HintedPartitioner": "backend(budget=..., inductor=True)",
    "checkpoint_contexts": "train_step(..., budget=...)",
}
"""Name of an earlier version -> what does the same within a guaranteed peak."""

__all__ = sorted(_HOME)


_VERSION = installed_version()
if _VERSION is not None:  # without PyTorch there is nothing to refuse until it is used
    check_version(_VERSION)


def __getattr__(name: str) -> Any:
    if name in _REPLACED:
        raise AttributeError(
            f"mucudnn.torch.{name} was removed, since it guaranteed no peak; "
            f"use mucudnn.torch.{_REPLACED[name]}"
        )
    if name not in _HOME:
        raise AttributeError(f"module 'mucudnn.torch' has no attribute {name!r}")
    if _VERSION is None:
        check_version(installed_version())
    value = getattr(import_module(f"mucudnn.torch.{_HOME[name]}"), name)
    globals()[name] = value  # a module of that name, once imported, is not in the way
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
