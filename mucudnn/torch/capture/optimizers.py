"""PyTorch's optimizers on other tensors than their own, and their state before a step.

What an optimizer does is recorded by having it do it: for that it is lent the tensors
that stand for its parameters, gradients and state.
"""

import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mucudnn.errors import UnsupportedError

__all__ = ["make_state", "swapped"]


@contextmanager
def swapped(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    parameters: Mapping[str, torch.Tensor],
    gradients: Mapping[str, torch.Tensor | None],
    state: Mapping[tuple[int, int, str], torch.Tensor],
    rates: Sequence[Any],
) -> Iterator[None]:
    """Have an optimizer work on other tensors than its own."""
    groups, old_state = optimizer.param_groups, optimizer.state
    others: list[dict[str, Any]] = []
    of_parameter: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
    for i, group in enumerate(groups):
        mine = []
        for j, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise ValueError(
                    f"parameter {j} of the optimizer's group {i} is not the model's"
                )
            tensor = parameters[names[id(parameter)]]
            tensor.grad = gradients.get(names[id(parameter)])
            for key, value in old_state.get(parameter, {}).items():
                of_parameter[tensor][key] = state.get((i, j, key), value)
            mine.append(tensor)
        others.append({**group, "params": mine, "lr": rates[i]} | _one_by_one(group))
    before = {tensor: dict(found) for tensor, found in of_parameter.items()}
    optimizer.param_groups, optimizer.state = others, of_parameter
    try:
        yield
        _check_state(before, of_parameter)
    finally:
        optimizer.param_groups, optimizer.state = groups, old_state
        for tensor in parameters.values():
            tensor.grad = None


def _one_by_one(group: Mapping[str, Any]) -> dict[str, Any]:
    """No kernels over many tensors: each is updated as its gradient is there."""
    return {key: False for key in ("foreach", "fused") if key in group}


def _check_state(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> None:
    for tensor, found in after.items():
        old = before.get(tensor, {})
        for key, value in found.items():
            if value is not old.get(key) and value is not None:
                raise UnsupportedError(
                    f"the optimizer replaces {key!r} of its state in a step; only "
                    "tensors that it changes in place can be kept: take the first "
                    "step in eager mode if it makes its state there"
                )


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """What PyTorch's optimizers make in their first step, made now.

    A momentum that starts as the first gradient is one that started as zero.

    Raises:
        UnsupportedError: With dampening the first gradient is treated otherwise.
    """
    missing = [
        (group, p)
        for group in optimizer.param_groups
        for p in group["params"]
        if p.requires_grad and not optimizer.state.get(p)
    ]
    if not missing:
        return
    init = getattr(optimizer, "_init_group", None)
    if init is None:
        return
    count = len(inspect.signature(init).parameters) - 1
    with _any_gradients([p for _, p in missing]), torch.no_grad():
        for group in optimizer.param_groups:
            init(group, *([] for _ in range(count)))
    for group, parameter in missing:
        if group.get("momentum") and isinstance(optimizer, torch.optim.SGD):
            if group["dampening"]:
                raise UnsupportedError(
                    "SGD with dampening begins with another step than those that "
                    "follow; take the first step in eager mode"
                )
            if optimizer.state[parameter].get("momentum_buffer") is None:
                buffer = torch.zeros_like(parameter.detach())
                optimizer.state[parameter]["momentum_buffer"] = buffer


@contextmanager
def _any_gradients(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Parameters that have a gradient, which takes no memory, where they have none."""
    bare = [p for p in parameters if p.grad is None]
    for parameter in bare:
        zero = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        parameter.grad = zero.expand_as(parameter)
    try:
        yield
    finally:
        for parameter in bare:
            parameter.grad = None
