"""An optimizer's own step behind a planned forward and backward pass.

It finds gradients where it looks for them, in memory of their own, and they are gone
when it is done: what a parameter's `grad` was before is there again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mucudnn.torch.storages import storage_of

__all__ = ["copies_needed", "own_update"]


def own_update(
    optimizer: torch.optim.Optimizer,
    passes: Callable[[], list[Any]],
    parameters: Sequence[torch.Tensor],
    *,
    begin: Callable[[], None],
    closure: bool,
    scaled: bool,
) -> list[Any]:
    """One step; what its first forward pass returned but for gradients.

    Args:
        optimizer: Makes the update.
        passes: Runs forward and backward: what is returned, behind it a gradient for
            each parameter and, with a scaler, whether some is not finite.
        parameters: Those that have a gradient.
        begin: Called before the first parameter is written, and more often.
        closure: Whether the optimizer runs the passes.
        scaled: Whether there is a scaler, so that steps may be skipped.
    """
    with _own_gradients(optimizer):
        if not closure:
            results = passes()
            skipped = scaled and bool(results.pop())
            _give(parameters, _taken(results, len(parameters)))
            if not skipped:
                begin()
                optimizer.step()
            return results
        first: list[list[Any]] = []
        versions = [parameter._version for parameter in parameters]

        def again() -> Any:
            if versions != [parameter._version for parameter in parameters]:
                begin()
            _forget(optimizer)
            results = passes()
            _give(parameters, _taken(results, len(parameters)))
            if not first:
                first.append(results)
            begin()  # from here on the optimizer may write
            return results[0]

        optimizer.step(again)
        return first[0]


def copies_needed(
    gradients: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]
) -> list[bool]:
    """Which gradients have no memory of their own that is as their parameter's."""
    seen = {storage_of(parameter) for parameter in parameters}
    found = []
    for gradient, parameter in zip(gradients, parameters, strict=True):
        whole = gradient.untyped_storage().nbytes()
        dense = whole == gradient.numel() * gradient.element_size()
        as_it_is = gradient.stride() == parameter.stride() and dense
        found.append(not as_it_is or storage_of(gradient) in seen)
        seen.add(storage_of(gradient))
    return found


def _taken(results: list[Any], count: int) -> list[Any]:
    """The last of a list, which it is left without."""
    start = len(results) - count
    last = results[start:]
    del results[start:]
    return last


def _give(parameters: Sequence[torch.Tensor], gradients: Sequence[Any]) -> None:
    """Store gradients as autograd does."""
    copied = copies_needed(gradients, parameters)
    rows = zip(parameters, gradients, copied, strict=True)
    for parameter, gradient, apart in rows:
        parameter.grad = (
            torch.empty_like(parameter.detach()).copy_(gradient) if apart else gradient
        )


def _forget(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


@contextmanager
def _own_gradients(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """No parameter has a gradient but that of this step."""
    before: Mapping[torch.Tensor, torch.Tensor | None] = {
        p: p.grad for group in optimizer.param_groups for p in group["params"]
    }
    try:
        _forget(optimizer)
        yield
    finally:
        for parameter, gradient in before.items():
            parameter.grad = gradient
