"""A training step as one functional graph: forward, backward and update, as they are.

The step is run once on tensors without data. What the model, the loss and the optimizer
do is recorded operation by operation, below autograd, and what they do in place becomes
new values that replace those of parameters, buffers and state when the step is over. So
an optimizer needs no functional form: its own `step` is what is recorded, one tensor at
a time, and its learning rates stay inputs. Whatever Python decides meanwhile is decided
for every step that runs later.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._functorch._aot_autograd.functional_utils import from_fun, to_fun
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    ShapeEnv,
)
from torch.nn.utils.stateless import _reparametrize_module

from mucudnn.errors import UnsupportedError
from mucudnn.torch.capture.optimizers import make_state, swapped

__all__ = ["CapturedStep", "StepParts", "as_tensor", "capture_step"]

LossFunction = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class StepParts:
    """The tensors of a step, in the order in which its graph takes them.

    Attributes:
        parameters: By name, shared ones once.
        buffers: By name, shared ones once.
        state: The optimizer's tensors, by group, parameter and key.
        rates: The learning rate of each group, a number or a tensor.
    """

    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    state: Mapping[tuple[int, int, str], torch.Tensor]
    rates: tuple[Any, ...]

    @classmethod
    def of(
        cls, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> "StepParts":
        """The parts as they are now; the optimizer's state is made if it is not there.

        Raises:
            UnsupportedError: The optimizer's state cannot be made before a step.
        """
        make_state(optimizer)
        state = {
            (i, j, key): value
            for i, group in enumerate(optimizer.param_groups)
            for j, parameter in enumerate(group["params"])
            for key, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor)
        }
        return cls(
            dict(model.named_parameters()),
            dict(model.named_buffers()),
            state,
            tuple(group["lr"] for group in optimizer.param_groups),
        )

    def tensors(self) -> list[torch.Tensor]:
        """All of them, detached; a rate that is a number as a tensor of one."""
        rates = map(as_tensor, self.rates)
        groups = (self.parameters.values(), self.buffers.values(), self.state.values())
        return [*(t.detach() for group in groups for t in group), *rates]

    def names(self) -> list[str]:
        """What each of the tensors is called."""
        return [
            *self.parameters,
            *self.buffers,
            *(f"state.{i}.{j}.{key}" for i, j, key in self.state),
            *(f"rate.{i}" for i in range(len(self.rates))),
        ]


def as_tensor(rate: Any) -> torch.Tensor:
    """A learning rate as a step is given it."""
    if isinstance(rate, torch.Tensor):
        return rate
    return torch.tensor(rate, dtype=torch.float64)


@dataclass(frozen=True)
class CapturedStep:
    """A step as a graph of tensors in, tensors out.

    Attributes:
        module: Its placeholders are those of `StepParts.tensors` and then the batch; it
            returns the loss and what each placeholder's tensor has become.
        names: Of the placeholders.
        forward: Nodes of the forward pass.
        backward: Nodes of the backward pass; the others are of the update.
    """

    module: torch.fx.GraphModule
    names: Sequence[str]
    forward: frozenset[str]
    backward: frozenset[str]


def capture_step(
    model: torch.nn.Module,
    loss_fn: LossFunction,
    optimizer: torch.optim.Optimizer,
    batch: Sequence[torch.Tensor],
    *,
    size: int | None = None,
) -> CapturedStep:
    """Record one step without running it.

    Args:
        model: Called with the first tensor of the batch.
        loss_fn: Called with the model's result and the rest of the batch.
        optimizer: Of parameters of the model.
        batch: As a step is called with.
        size: Of the first axis of every tensor of the batch, if it is to be another.

    Raises:
        UnsupportedError: Something depends on values that only a run has, or the
            optimizer keeps what is no tensor.
    """
    parts = StepParts.of(model, optimizer)
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    mode.allow_scalar_outputs = True
    tracer = _Tracer(model, loss_fn, optimizer, parts)
    fakes = [
        mode.from_tensor(t, static_shapes=True) for t in (*parts.tensors(), *batch)
    ]
    if size is not None:
        with mode:
            resized = [t.new_empty((size, *t.shape[1:])) for t in fakes[-len(batch) :]]
        fakes[-len(batch) :] = resized
    try:
        with mode, torch.enable_grad():
            module = make_fx(tracer, _allow_non_fake_inputs=True)(*fakes)
    except GuardOnDataDependentSymNode as e:
        raise UnsupportedError(
            f"the step decides something by a value that only a run has: {e}; keep "
            "such decisions in tensors (torch.where), or outside of the step"
        ) from e
    names = [*parts.names(), *(f"batch.{i}" for i in range(len(batch)))]
    return CapturedStep(module, names, tracer.forward, tracer.backward)


class _Tracer:
    """The step as a function of its tensors; remembers where its phases end."""

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: LossFunction,
        optimizer: torch.optim.Optimizer,
        parts: StepParts,
    ) -> None:
        self._model = model
        self._loss_fn = loss_fn
        self._optimizer = optimizer
        self._parts = parts
        self.forward: frozenset[str] = frozenset()
        self.backward: frozenset[str] = frozenset()

    def __call__(self, *flat: torch.Tensor) -> list[torch.Tensor]:
        with FunctionalTensorMode():
            mine = [to_fun(tensor) for tensor in flat]
            loss = self._step(mine)
            for tensor in mine:
                torch._sync(tensor)
            return [from_fun(loss), *map(from_fun, mine)]

    def _step(self, flat: Sequence[torch.Tensor]) -> torch.Tensor:
        given = iter(flat)
        parts = self._parts
        parameters = {name: next(given) for name in parts.parameters}
        buffers = {name: next(given) for name in parts.buffers}
        state = {key: next(given) for key in parts.state}
        rates = [
            tensor if isinstance(rate, torch.Tensor) else tensor.item()
            for rate, tensor in zip(parts.rates, given, strict=False)
        ]
        leaves = {
            name: tensor.detach().requires_grad_(parts.parameters[name].requires_grad)
            for name, tensor in parameters.items()
        }
        inputs, *targets = given
        with _reparametrize_module(self._model, leaves | buffers, tie_weights=True):
            loss = self._loss_fn(self._model(inputs), *targets)
        _check_loss(loss)
        self.forward = _recorded()
        trained = [name for name, leaf in leaves.items() if leaf.requires_grad]
        found = torch.autograd.grad(
            loss, [leaves[name] for name in trained], allow_unused=True
        )
        gradients = dict(zip(trained, found, strict=True))
        self.backward = _recorded() - self.forward
        by_id = {id(tensor): name for name, tensor in parts.parameters.items()}
        with swapped(self._optimizer, by_id, parameters, gradients, state, rates):
            self._optimizer.step()
        return loss.detach()


def _recorded() -> frozenset[str]:
    """Names of the nodes that there are so far."""
    return frozenset(node.name for node in get_proxy_mode().tracer.graph.nodes)


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = (
            f"a tensor of shape {tuple(loss.shape)}"
            if isinstance(loss, torch.Tensor)
            else f"{type(loss).__name__}"
        )
        raise ValueError(f"loss_fn returned {found}; a tensor of one element is wanted")
    if not loss.requires_grad:
        raise ValueError("the loss does not depend on any parameter that is trained")
