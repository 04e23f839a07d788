"""What an optimizer has in use while it makes its update itself, measured on a copy.

The copy has parameters, gradients and state of its own, on the CPU in memory that is
not of PyTorch's allocator: what is counted is what an update adds. It makes a few
updates, as the first one mostly makes the state. That an update which decides by values
never needs more than those it made here is taken for granted.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from mucudnn.errors import UnsupportedError
from mucudnn.ir.sizes import exact_bytes
from mucudnn.passes.liveness import rounded
from mucudnn.torch.execution.copies import host_bytes
from mucudnn.torch.measurement.meters import meter_of

__all__ = ["UpdateBytes", "measured_update", "state_bytes"]

_UPDATES = 3
_SMALL = 1e-2
"""Of gradients that are made up."""

_MOST_OF_A_SEARCH = 4
"""Gradients that a line search holds beside those it returns."""

_HOOKS = "hooks"


@dataclass(frozen=True)
class UpdateBytes:
    """What an optimizer has in use beside parameters and their gradients.

    Attributes:
        state: Between two steps.
        held: While the model runs: its state, and with a closure what it holds then.
        most: At most during an update, its state included.
        closure: Whether it runs the model itself, as often as it likes.
    """

    state: int
    held: int
    most: int
    closure: bool


def measured_update(
    optimizer: torch.optim.Optimizer, trained: Collection[int]
) -> UpdateBytes:
    """Have a copy of an optimizer make a few updates.

    Args:
        optimizer: Stays as it is.
        trained: The parameters that have gradients, by `id`.

    Raises:
        UnsupportedError: It cannot be copied, its update fails, or it needs more with
            every one.
    """
    try:
        return _Measured(optimizer, trained, closure=False).bytes()
    except UnsupportedError:
        raise
    except Exception as first:  # of what kind is the optimizer's own affair
        try:
            return _Measured(optimizer, trained, closure=True).bytes()
        except UnsupportedError:
            raise
        except Exception:
            kind = type(optimizer).__name__
            raise UnsupportedError(
                f"{kind}.step() fails on a copy of it, with "
                f"{type(first).__name__}: {first}"
            ) from first


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors that an optimizer has beside its parameters."""
    found: dict[int, int] = {}
    for tensor in _tensors(optimizer):
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = rounded(storage.nbytes())
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            found.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(found.values())


class _Measured:
    """A copy of an optimizer whose updates are measured.

    Args:
        optimizer: What it is a copy of.
        trained: The parameters that have gradients, by `id`.
        closure: Whether its steps are given one.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trained: Collection[int],
        *,
        closure: bool,
    ) -> None:
        self._twin, copies = _copied(optimizer)
        self._trained = [copies[at] for at in trained if at in copies]
        self._closure = closure
        self._meter = meter_of(self._trained[0].device)
        self._before = state_bytes(optimizer)

    def bytes(self) -> UpdateBytes:
        """What was seen over a few updates."""
        state, most, held = self._before, 0, 0
        states = [state]
        for _ in range(_UPDATES):
            peak = self._most(0)
            most = max(most, states[-1] + peak)
            states.append(state_bytes(self._twin))
        held = states[-1]
        if self._closure:
            block = most + (1 << 20)
            held = max(held, states[-1] + self._most(block) - block)
        more = _still_to_come(self._twin)
        if states[-1] > states[-2] and not more:
            raise UnsupportedError(
                f"{type(self._twin).__name__} has {exact_bytes(states[-1])} of state "
                f"after {_UPDATES} steps and had {exact_bytes(states[-2])} one before: "
                "no budget can be promised while it grows with every step"
            )
        gradients = sum(map(_nbytes, self._trained)) if self._closure else 0
        return UpdateBytes(
            states[-1] + more,
            held + more,
            max(most + more - gradients, held + more),
            self._closure,
        )

    def _most(self, block: int) -> int:
        """The most that one update has in use of what it allocates.

        Args:
            block: Bytes that its closure takes while there are no gradients.
        """
        return self._meter.most_bytes([lambda: self._prepared(block)])[0]

    def _prepared(self, block: int) -> Callable[[], object]:
        if not self._closure:
            for parameter in self._trained:
                parameter.grad = _apart(parameter.detach()).normal_(0, _SMALL)
            return lambda: self._twin.step()

        def closure() -> torch.Tensor:
            """A loss, and gradients, that a search finds no minimum of."""
            for parameter in self._trained:
                parameter.grad = None
            taken = torch.empty(block, dtype=torch.uint8)
            del taken
            for parameter in self._trained:
                made = torch.empty_like(parameter.detach())
                parameter.grad = made.normal_(0, _SMALL)
            return torch.rand(())

        for parameter in self._trained:
            parameter.grad = None
        return lambda: self._twin.step(closure)


def _still_to_come(optimizer: torch.optim.Optimizer) -> int:
    """What the history of L-BFGS grows by, and what a line search may hold."""
    if not isinstance(optimizer, torch.optim.LBFGS):
        return 0
    group = optimizer.param_groups[0]
    state = optimizer.state[group["params"][0]]
    size = int(group["history_size"])
    missing = 2 * (size - len(state.get("old_dirs") or ()))
    missing += _MOST_OF_A_SEARCH if group["line_search_fn"] else 0
    flat = rounded(sum(map(_nbytes, group["params"])))
    return missing * flat + 2 * size * rounded(1)


def _copied(
    optimizer: torch.optim.Optimizer,
) -> tuple[torch.optim.Optimizer, dict[int, torch.Tensor]]:
    """A copy without hooks, and its parameters by the `id` of the others.

    PyTorch's own way to copy one would leave a subclass's attributes behind.

    Raises:
        UnsupportedError: It cannot be copied.
    """
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    tensors = [*parameters, *_tensors(optimizer)]
    copies = {id(tensor): _apart(tensor) for tensor in tensors}
    memo: dict[int, Any] = {id(optimizer): twin, **copies}
    rest = {
        key: OrderedDict() if key.endswith(_HOOKS) else value
        for key, value in vars(optimizer).items()
        if key != "step"  # a schedule's, which is bound to the other
    }
    try:
        vars(twin).update(copy.deepcopy(rest, memo))
    except (TypeError, RuntimeError) as e:
        raise UnsupportedError(
            f"{type(optimizer).__name__} cannot be copied, so that nobody knows what "
            f"its update needs: {e}"
        ) from e
    return twin, {id(p): copies[id(p)] for p in parameters}


def _tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """All tensors in its state and its attributes."""
    held = {k: v for k, v in vars(optimizer).items() if k != "state"}
    for leaf in pytree.tree_leaves([held, list(optimizer.state.values())]):
        if isinstance(leaf, torch.Tensor):
            yield leaf


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose memory is, on the CPU, not of PyTorch's allocator."""
    value = tensor.detach()
    if value.is_cpu:
        count = 1 + sum(
            (size - 1) * step
            for size, step in zip(value.shape, value.stride(), strict=True)
        )
        nbytes = count * value.element_size() if value.numel() else 0
        storage = host_bytes(nbytes).untyped_storage()
        made = torch.empty(0, dtype=value.dtype).set_(
            storage, 0, value.shape, value.stride()
        )
    else:
        made = torch.empty_like(value)
    made.copy_(value)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


def _nbytes(tensor: torch.Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())
