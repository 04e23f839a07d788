"""PyTorch's optimizers on other tensors than their own, and their state before a step.

What an optimizer does is recorded by having it do it: for that it is lent the tensors
that stand for its parameters, gradients and state. One that decides by values, or that
counts in Python, cannot be recorded: its steps run as they are, behind planned passes.
"""

import copy
import inspect
import weakref
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from mucudnn.errors import UnsupportedError

__all__ = ["UpdateNotRecordedError", "make_state", "swapped"]

StateKey = tuple[int, int, str]
"""A group, a parameter of it, and a name in its state."""

_MOMENTUM = "momentum_buffer"

_RATE = "lr"

_OWN = frozenset({"param_groups", "state", "_opt_called"})
"""Attributes that every optimizer has and that a step may change."""


class UpdateNotRecordedError(UnsupportedError):
    """What an optimizer does depends on what only a run knows, or on Python."""


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

    Raises:
        UpdateNotRecordedError: It has changed something that is no tensor.
    """
    made: dict[StateKey, torch.Tensor] = {}
    groups, old_state = optimizer.param_groups, optimizer.state
    others: list[dict[str, Any]] = []
    of_parameter: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
    for i, group in enumerate(groups):
        mine = []
        for j, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                # The model has another by now. Without a gradient this one stays.
                if parameter.grad is not None:
                    raise UnsupportedError(
                        f"parameter {j} of the optimizer's group {i} is not the "
                        "model's, and has a gradient; make an optimizer of the model's "
                        "parameters alone, or set the gradient to None"
                    )
                mine.append(parameter)
                of_parameter[parameter].update(old_state.get(parameter, {}))
                continue
            tensor = parameters[names[id(parameter)]]
            tensor.grad = gradients.get(names[id(parameter)])
            for key, value in old_state.get(parameter, {}).items():
                of_parameter[tensor][key] = state.get((i, j, key), _lent(key, value))
            mine.append(tensor)
        plain = {k: v for k, v in group.items() if k != "params"} | _one_by_one(group)
        lent = {key: _lent(key, value) for key, value in plain.items()}
        rate = {_RATE: rates[i]} if _RATE in group else {}
        others.append({**lent, **rate, "params": mine})
    before = {tensor: dict(found) for tensor, found in of_parameter.items()}
    own = _attributes(optimizer)
    optimizer.param_groups, optimizer.state = others, of_parameter
    try:
        yield made
        _check_unchanged(optimizer, own, groups, others)
        for i, group in enumerate(others):
            for j, tensor in enumerate(group["params"]):
                old_values = old_state.get(groups[i]["params"][j], {})
                for key, value in of_parameter.get(tensor, {}).items():
                    old = before.get(tensor, {}).get(key)
                    if new := _new(key, old, value, old_values.get(key)):
                        made[i, j, key] = new[0]
    finally:
        optimizer.param_groups, optimizer.state = groups, old_state
        kept = {key: vars(optimizer)[key] for key in _OWN & vars(optimizer).keys()}
        _put_back(optimizer, {**own, **kept})
        for tensor in parameters.values():
            tensor.grad = None


def _one_by_one(group: Mapping[str, Any]) -> dict[str, Any]:
    """No kernels over many tensors: each is updated as its gradient is there."""
    return {key: False for key in ("foreach", "fused") if key in group}


def _lent(key: str, value: Any) -> Any:
    """A value that a step may change without another seeing it.

    Raises:
        UpdateNotRecordedError: It has tensors.
    """
    if not isinstance(value, list | dict | set):
        return value
    if any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value)):
        raise UpdateNotRecordedError(
            f"the optimizer keeps tensors in lists, in {key!r}"
        )
    return copy.deepcopy(value)


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Its own attributes, containers copied."""
    return {
        key: value.copy() if type(value) in (dict, list, set) else value
        for key, value in vars(optimizer).items()
        if key not in _OWN
    }


def _check_unchanged(
    optimizer: torch.optim.Optimizer,
    own: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    others: Sequence[Mapping[str, Any]],
) -> None:
    """Refuse steps that count, or decide for the next one, outside of tensors.

    Raises:
        UpdateNotRecordedError: Says what has changed.
    """
    now = _attributes(optimizer)
    for key in now.keys() | own.keys():
        if key not in own or key not in now or not _same(own[key], now[key]):
            raise UpdateNotRecordedError(
                f"the optimizer changes its attribute {key!r} in a step"
            )
    for group, other in zip(groups, others, strict=True):
        fixed = {"params", _RATE, *_one_by_one(group)}
        for key in other.keys() - fixed:
            if key not in group or not _same(group[key], other[key]):
                raise UpdateNotRecordedError(
                    f"the optimizer changes {key!r} of a group of parameters in a step"
                )


def _new(key: str, old: Any, value: Any, outside: Any) -> tuple[torch.Tensor] | None:
    """A tensor of an optimizer's state that was not there; others are put in place.

    Raises:
        UpdateNotRecordedError: What has changed is no tensor, or has another shape.
    """
    if not isinstance(value, torch.Tensor) and _same(outside, value):
        return None
    if value is old and isinstance(value, torch.Tensor):
        return None
    if isinstance(value, torch.Tensor) and old is None:
        return (value,)
    alike = isinstance(value, torch.Tensor) and isinstance(old, torch.Tensor)
    if not alike or (value.shape, value.dtype) != (old.shape, old.dtype):
        raise UpdateNotRecordedError(
            f"the optimizer changes {key!r} of its state in a step, which is no tensor "
            "or not of one shape; a count as torch.tensor(0.0) could be recorded"
        )
    old.copy_(value)
    return None


def _put_back(holder: object, attributes: Mapping[str, Any]) -> None:
    """Give an object the attributes that it had; refill containers in place."""
    now: dict[str, Any] = vars(holder)
    for key in [key for key in now if key not in attributes]:
        del now[key]
    for key, value in attributes.items():
        held: Any = now.get(key)
        if type(held) in (dict, set) and type(held) is type(value):
            if not _same(held, value):
                held.clear()
                held.update(value)
        elif type(held) is list and type(value) is list:
            held[:] = value
        else:
            now[key] = value


def _same(one: Any, other: Any) -> bool:
    """Return whether values are one object, or equal plain values nested alike."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            _same(v, other[k]) for k, v in one.items()
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, weakref.ref):
        return one() is other()
    if isinstance(one, int | float | complex | str | bytes | set | frozenset):
        return bool(one == other)
    return isinstance(one, torch.Size) and one == other


def make_state(
    optimizer: torch.optim.Optimizer, own: Collection[int] | None = None
) -> None:
    """What PyTorch's optimizers make in their first step, made now.

    A momentum that starts as the first gradient is one that started as zero, but with
    dampening. What is not made here is made by the first step, which then has a plan of
    its own.

    Args:
        optimizer: Whose state it is.
        own: Parameters that it is made for, by `id`; None stands for all.
    """
    missing = [
        (group, p)
        for group in optimizer.param_groups
        for p in group["params"]
        if p.requires_grad
        and (own is None or id(p) in own)
        and not optimizer.state.get(p)
    ]
    if not missing:
        return
    init = getattr(optimizer, "_init_group", None)
    if init is None or not init.__module__.startswith(torch.optim.__name__):
        return  # another's may be about something else
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
