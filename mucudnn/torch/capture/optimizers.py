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

StateKey = tuple[int, int, str]
"""A group, a parameter of it, and a name in its state."""

_MOMENTUM = "momentum_buffer"

_REFUSED: Mapping[type, str] = {
    torch.optim.LBFGS: "its step runs the model as often as values say; keep your loop "
    "with its closure and compile the model, torch.compile(model, backend="
    "mt.backend(budget=...)), which keeps a budget of forward and backward; any other "
    "of torch.optim but SparseAdam and Adafactor can be",
    torch.optim.SparseAdam: "it takes sparse gradients; use Adam, and embeddings "
    "without sparse=True",
    torch.optim.Adafactor: "it decides by values of parameters (max of a norm that "
    "item() gives); use Adam or AdamW",
}
"""Optimizers of PyTorch's whose steps cannot be recorded, and why."""


@contextmanager
def swapped(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    parameters: Mapping[str, torch.Tensor],
    gradients: Mapping[str, torch.Tensor | None],
    state: Mapping[StateKey, torch.Tensor],
    rates: Sequence[Any],
) -> Iterator[dict[StateKey, torch.Tensor]]:
    """Have an optimizer work on other tensors than its own.

    Yields:
        A mapping that has, when the context is left, the tensors that the optimizer
        has added to its state.
    """
    made: dict[StateKey, torch.Tensor] = {}
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
        yield made
        for i, group in enumerate(others):
            for j, tensor in enumerate(group["params"]):
                for key, value in of_parameter.get(tensor, {}).items():
                    old = before.get(tensor, {}).get(key)
                    if new := _new(key, old, value):
                        made[i, j, key] = new[0]
    finally:
        optimizer.param_groups, optimizer.state = groups, old_state
        for tensor in parameters.values():
            tensor.grad = None


def _one_by_one(group: Mapping[str, Any]) -> dict[str, Any]:
    """No kernels over many tensors: each is updated as its gradient is there."""
    return {key: False for key in ("foreach", "fused") if key in group}


def _new(key: str, old: Any, value: Any) -> tuple[torch.Tensor] | None:
    """A tensor of an optimizer's state that was not there; others are put in place.

    Raises:
        UnsupportedError: What has changed is no tensor, or has another shape.
    """
    if value is old or (not isinstance(value, torch.Tensor) and value == old):
        return None
    if isinstance(value, torch.Tensor) and old is None:
        return (value,)
    alike = isinstance(value, torch.Tensor) and isinstance(old, torch.Tensor)
    if not alike or (value.shape, value.dtype) != (old.shape, old.dtype):
        raise UnsupportedError(
            f"the optimizer changes {key!r} of its state in a step, which is no tensor "
            "or not of one shape; only tensors are changed in the steps that follow: "
            "keep a count as torch.tensor(0.0)"
        )
    old.copy_(value)
    return None


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """What PyTorch's optimizers make in their first step, made now.

    A momentum that starts as the first gradient is one that started as zero, but with
    dampening. What is not made here is made by the first step, which then has a plan of
    its own.

    Raises:
        UnsupportedError: The optimizer's step cannot be recorded.
    """
    for kind, reason in _REFUSED.items():
        if isinstance(optimizer, kind):
            raise UnsupportedError(f"{kind.__name__} cannot be planned: {reason}")
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
        if not isinstance(optimizer, torch.optim.SGD) or group["dampening"]:
            continue
        if group["momentum"] and optimizer.state[parameter].get(_MOMENTUM) is None:
            optimizer.state[parameter][_MOMENTUM] = torch.zeros_like(parameter.detach())


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
