"""What a model runs itself by, taken off while its step is captured.

The planner decides what is computed again; a checkpoint of the model's own would have
it recorded as computed twice, with other random numbers. Without it the step computes
the same. So does a module without what `Module.compile` compiled of it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import checkpoint

from mucudnn.torch.capture.reads import ReadRecorder

__all__ = ["plain_checkpoints", "uncompiled"]


@contextmanager
def uncompiled(root: torch.nn.Module, recorder: ReadRecorder) -> Iterator[None]:
    """Have modules that were compiled in place, by `Module.compile`, run as written.

    Args:
        root: With all modules.
        recorder: Is told, so that it notes what was compiled.
    """
    held = [(m, m._compiled_call_impl) for m in root.modules() if m._compiled_call_impl]
    for module, _ in held:
        recorder.lend(vars(module), "_compiled_call_impl", "what a module compiled")
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, compiled in held:
            module._compiled_call_impl = compiled


class _Plain:
    """Stands for the autograd function of a reentrant checkpoint."""

    @staticmethod
    def apply(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
        """Call what would be checkpointed."""
        return function(*args)


def _plain(*_args: Any, **_kwargs: Any) -> Iterator[None]:
    """Stands for the generator around a checkpoint that is not reentrant."""
    yield


@contextmanager
def plain_checkpoints() -> Iterator[None]:
    """Have `torch.utils.checkpoint` call what it is given, and no more."""
    plain = {
        "CheckpointFunction": _Plain,
        "_checkpoint_without_reentrant_generator": _plain,
        "_checkpoint_without_reentrant_generator_impl": _plain,  # from 2.14 on
    }
    before = {
        name: vars(checkpoint)[name] for name in plain if name in vars(checkpoint)
    }
    for name in before:
        setattr(checkpoint, name, plain[name])
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(checkpoint, name, value)
