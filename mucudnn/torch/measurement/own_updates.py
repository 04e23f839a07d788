"""What an optimizer has in use while it makes its update itself, measured on a copy.

The copy has parameters, gradients and state of its own, on the CPU in memory that is
not of PyTorch's allocator: what is counted is what an update adds. It makes a few
updates, as the first one mostly makes the state. That an update which decides by values
never needs more than those it made here is taken for granted. Gradients are made up,
the same ones every time; so are parameters without data.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from mucudnn.backends.cpu.device import CpuDevice
from mucudnn.errors import UnsupportedError
from mucudnn.ir.sizes import exact_bytes
from mucudnn.passes.liveness import rounded
from mucudnn.torch.capture.optimizers import make_state
from mucudnn.torch.execution.copies import host_bytes
from mucudnn.torch.measurement.meters import meter_of
from mucudnn.torch.storages import bytes_in_storages, storage_of

__all__ = ["UpdateBytes", "check_room", "measured_update", "state_bytes"]

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
    optimizer: torch.optim.Optimizer,
    trained: Collection[int],
    *,
    foreach: bool | None = None,
) -> UpdateBytes:
    """Have a copy of an optimizer make a few updates.

    Args:
        optimizer: Stays as it is.
        trained: The parameters that have gradients, by `id`.
        foreach: What the copy's `foreach` is where the optimizer leaves that open;
            PyTorch takes kernels over many tensors on a GPU, which need more.

    Raises:
        UnsupportedError: It cannot be copied, its update fails, or it needs more with
            every one.
    """
    try:
        return _Measured(optimizer, trained, foreach, closure=False).bytes()
    except UnsupportedError:
        raise
    except Exception as first:  # of what kind is the optimizer's own affair
        try:
            return _Measured(optimizer, trained, foreach, closure=True).bytes()
        except UnsupportedError:
            raise
        except Exception:
            kind = type(optimizer).__name__
            raise UnsupportedError(
                f"{kind}.step() fails on a copy of it, with "
                f"{type(first).__name__}: {first}"
            ) from first


def check_room(optimizer: torch.optim.Optimizer) -> None:
    """Refuse to measure an optimizer whose copy would not fit into this machine.

    The copy has parameters and gradients, and what it makes of them may be as large.

    Raises:
        UnsupportedError: Says how much there is.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    needed = 3 * sum(_nbytes(p) for p in parameters if p.is_cpu or p.is_meta)
    there = CpuDevice().available_bytes()
    if needed > there:
        raise UnsupportedError(
            f"{type(optimizer).__name__}'s update cannot be recorded, and what it "
            f"needs can only be measured by running it: about {exact_bytes(needed)} "
            f"for copies of its parameters and gradients, and this machine has "
            f"{exact_bytes(there)}; take a machine that has them, a smaller model, or "
            "an optimizer whose update can be recorded, such as AdamW"
        )


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors that an optimizer has beside its parameters."""
    groups = optimizer.param_groups
    own = {storage_of(p) for group in groups for p in group["params"]}
    return bytes_in_storages(t for t in _tensors(optimizer) if storage_of(t) not in own)


class _Measured:
    """A copy of an optimizer whose updates are measured.

    Args:
        optimizer: What it is a copy of.
        trained: The parameters that have gradients, by `id`.
        foreach: What the copy's is where it is left open.
        closure: Whether its steps are given one.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trained: Collection[int],
        foreach: bool | None,
        *,
        closure: bool,
    ) -> None:
        self._twin, copies = _copied(optimizer)
        for group in self._twin.param_groups:
            if "foreach" in group and group["foreach"] is None:
                group["foreach"] = foreach
        make_state(self._twin)
        self._trained = [copies[at] for at in trained if at in copies]
        self._closure = closure
        self._random = torch.Generator(self._trained[0].device).manual_seed(0)
        self._meter = meter_of(self._trained[0].device)
        self._before = state_bytes(self._twin)

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
            rounded(states[-1] + more),
            rounded(held + more),
            rounded(max(most + more - gradients, held + more)),
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
                parameter.grad = self._drawn(_apart(parameter.detach()))
            return lambda: self._twin.step()

        def closure() -> torch.Tensor:
            """A loss, and gradients, that a search finds no minimum of."""
            for parameter in self._trained:
                parameter.grad = None
            taken = torch.empty(block, dtype=torch.uint8)
            del taken
            for parameter in self._trained:
                parameter.grad = self._drawn(torch.empty_like(parameter.detach()))
            return torch.rand((), generator=self._random, device=self._random.device)

        for parameter in self._trained:
            parameter.grad = None
        return lambda: self._twin.step(closure)

    def _drawn(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.normal_(0, _SMALL, generator=self._random)


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
    if value.is_cpu or value.is_meta:
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
    if not value.is_meta:
        made.copy_(value)
    elif made.is_floating_point():
        made.normal_(0, _SMALL, generator=torch.Generator().manual_seed(0))
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


def _nbytes(tensor: torch.Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())
