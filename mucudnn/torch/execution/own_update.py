"""An optimizer's own step behind a planned forward and backward pass.

It finds gradients where it looks for them, in memory of their own, and they are gone
when it is done: what a parameter's `grad` was before is there again.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mucudnn.errors import UnsupportedError
from mucudnn.torch.storages import storage_of

__all__ = ["copies_needed", "own_gradients", "own_update", "scaled_closure_error"]


def own_update(
    optimizer: torch.optim.Optimizer,
    passes: Callable[[], list[Any]],
    parameters: Sequence[torch.Tensor],
    *,
    closure: bool,
    scaled: bool,
) -> list[Any]:
    """One step; what its first forward pass returned but for gradients.

    Args:
        optimizer: Makes the update.
        passes: Runs forward and backward: what is returned, behind it a gradient for
            each parameter and, with a scaler, whether some is not finite.
        parameters: Those that have a gradient.
        closure: Whether the optimizer runs the passes.
        scaled: Whether there is a scaler, so that steps may be skipped.
    """
    held = [p for group in optimizer.param_groups for p in group["params"]]
    with own_gradients(held) as before:
        if not closure:
            results = passes()
            skipped = scaled and bool(results.pop())
            _give(parameters, _taken(results, len(parameters)))
            if not skipped:
                # Updates are not cast: users call them outside of autocast.
                with torch.autocast(held[0].device.type, enabled=False):
                    optimizer.step()
            return results
        first: list[list[Any]] = []

        def again() -> Any:
            for parameter in before:
                parameter.grad = None
            results = passes()
            _give(parameters, _taken(results, len(parameters)))
            if not first:
                first.append(results)
            return results[0]

        optimizer.step(again)
        return first[0]


def scaled_closure_error(optimizer: torch.optim.Optimizer) -> UnsupportedError:
    """Return the error of steps with a scaler whose optimizer needs a closure."""
    return UnsupportedError(
        f"{type(optimizer).__name__} takes a closure, and a step with a scaler gives "
        "it none; train without scaler=..., in bfloat16 for example"
    )


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


@contextmanager
def own_gradients(
    tensors: Iterable[torch.Tensor],
) -> Iterator[dict[torch.Tensor, torch.Tensor | None]]:
    """Have tensors start without a gradient; put back what they had.

    Yields:
        What is put back, by tensor; more may be added.
    """
    before = {tensor: tensor.grad for tensor in tensors}
    for tensor in before:
        tensor.grad = None
    try:
        yield before
    finally:
        for tensor, gradient in before.items():
            tensor.grad = gradient
