"""A training step as one functional graph: forward, backward and update, as they are.

The step is run once on tensors without data. What the model, the loss and the optimizer
do is recorded operation by operation, below autograd, and what they do in place becomes
new values that replace those of parameters, buffers and state when the step is over. So
an optimizer needs no functional form: its own `step` is what is recorded, one tensor at
a time, and its learning rates stay inputs. Whatever Python decides meanwhile is decided
for every step that runs later; what it decides by numbers that are there before a step,
such as an optimizer's count of steps, is noted.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._functorch._aot_autograd.functional_utils import from_fun, to_fun
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree

from mucudnn.errors import UnsupportedError
from mucudnn.torch.capture.batches import Batch, called
from mucudnn.torch.capture.checkpoints import plain_checkpoints
from mucudnn.torch.capture.counted_averages import CountedAverages
from mucudnn.torch.capture.decisions import DecidingShapes, Decision
from mucudnn.torch.capture.exclusive import exclusive_capture
from mucudnn.torch.capture.fakes import StepFakes
from mucudnn.torch.capture.gradients import (
    Gradients,
    added,
    leaf_of,
    loss_of,
)
from mucudnn.torch.capture.kernel_results import KernelResults
from mucudnn.torch.capture.optimizers import StateKey
from mucudnn.torch.capture.parts import StepParts, places_of, root_of
from mucudnn.torch.capture.refusals import (
    RefusedOperations,
    StepFunctions,
    saying_where,
)
from mucudnn.torch.capture.settings import PLAIN, StepSettings
from mucudnn.torch.capture.step_update import StepUpdate, Tensors
from mucudnn.torch.capture.watch import AttributesChangedError, watched

__all__ = ["CapturedStep", "capture_step"]


@dataclass(frozen=True)
class CapturedStep:
    """A step as a graph of tensors in, tensors out.

    Attributes:
        module: Its placeholders are those of `StepParts.tensors` and then the batch; it
            returns the loss, what else the loss function gives, and what each
            placeholder's tensor has become.
        names: Of the placeholders.
        forward: Nodes of the forward pass.
        backward: Nodes of the backward pass; the others are of the update.
        extras: How what comes back with the loss is nested; None if nothing does.
        decisions: What holds only as long as some inputs are as they were.
        made: What the optimizer adds to its state: group, parameter and name of each
            of the last results before the placeholders'.
        gradients: Where the update is no part of the graph, the parameters whose
            gradients are the last results before the placeholders', and an empty name
            for whether some entry is not finite, with a scaler. None where it is.
    """

    module: torch.fx.GraphModule
    names: Sequence[str]
    forward: frozenset[str]
    backward: frozenset[str]
    extras: Any = None
    decisions: Sequence[Decision] = ()
    made: Sequence[StateKey] = ()
    gradients: Sequence[str] | None = None


@exclusive_capture()
def capture_step(
    model: torch.nn.Module,
    loss_fn: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    batch: Sequence[Any] | Batch,
    *,
    size: int | None = None,
    settings: StepSettings = PLAIN,
    results: KernelResults | None = None,
) -> CapturedStep:
    """Record one step without running it.

    Args:
        model: Called with the first of the batch and what it has by name.
        loss_fn: Called with the model's result and the rest of the batch.
        optimizer: Of parameters of the model.
        batch: As a step is called with.
        size: Of the first axis of every tensor of the batch, if it is to be another.
        settings: What is done with gradients.
        results: What kernels were seen to return.

    Raises:
        UnsupportedError: Something depends on values that only a run has, or would be
            otherwise in the next step.
    """
    given = batch if isinstance(batch, Batch) else Batch.of(batch, {})
    parts = StepParts.of(model, optimizer, loss_fn, settings)
    tracer = _Tracer(
        root_of(model, loss_fn), loss_fn, optimizer, parts, given, settings
    )
    written: AttributesChangedError | None = None
    known = KernelResults() if results is None else results
    while True:
        try:
            return _recorded(tracer, size, written, known)
        except AttributesChangedError as e:
            if not e.places or e is written:
                raise
            before = () if written is None else written.places
            written = AttributesChangedError(str(e), (*before, *e.places))


def _recorded(
    tracer: "_Tracer",
    size: int | None,
    written: AttributesChangedError | None,
    results: KernelResults,
) -> CapturedStep:
    """Run the step once without data.

    Args:
        tracer: The step.
        size: Of the batch, if it is to be another.
        written: Attributes that may change.
        results: What kernels were seen to return.
    """
    parts, batch = tracer.parts, tracer.batch.tensors
    names = [*parts.names(), *(f"batch.{i}" for i in range(len(batch)))]
    tensors = [*parts.tensors(), *batch]
    shapes = DecidingShapes(names, tensors, frozenset(parts.parameters))
    mode = StepFakes(shapes, results)
    fakes = [mode.from_tensor(t, static_shapes=True) for t in tensors]
    if size is not None and batch:
        with mode:
            fakes[-len(batch) :] = [
                t.new_empty((size, *t.shape[1:])) for t in fakes[-len(batch) :]
            ]
    tracer.begin()
    with (
        tracer.averages.marked(),
        watched(tracer.root, written),
        plain_checkpoints(),
        mode,
        torch.enable_grad(),
        saying_where(),
    ):
        module = make_fx(tracer, _allow_non_fake_inputs=True)(*fakes)
        torch.clear_autocast_cache()
    tracer.averages.written(module.graph)
    return CapturedStep(
        module,
        names,
        frozenset(tracer.forward),
        frozenset(tracer.backward),
        tracer.extras,
        tuple(shapes.decisions),
        tuple(tracer.made),
        None if tracer.recorded else tuple(tracer.left),
    )


class _Tracer:
    """The step as a function of its tensors; remembers where its phases end."""

    def __init__(
        self,
        root: torch.nn.Module,
        loss_fn: Callable[..., Any],
        optimizer: torch.optim.Optimizer,
        parts: StepParts,
        batch: Batch,
        settings: StepSettings,
    ) -> None:
        self.root = root
        self.parts = parts
        self.batch = batch
        self._loss_fn = loss_fn
        self._update = StepUpdate(optimizer, parts, settings)
        self._settings = settings
        self.averages = CountedAverages(root)
        self.recorded = settings.recorded
        self._casts_once = torch.is_autocast_cache_enabled()
        self.begin()

    def begin(self) -> None:
        """Forget what was recorded."""
        self.forward: set[str] = set()
        self.backward: set[str] = set()
        self.extras: Any = None
        self.made: Mapping[StateKey, torch.Tensor] = {}
        self.left: Mapping[str, torch.Tensor] = {}
        self._found: Any = None

    def __call__(self, *flat: torch.Tensor) -> list[Any]:
        # Tracing has a parameter cast once for every use: gradients would be summed
        # behind the casts back, not before. It sets this back when it is over.
        torch.set_autocast_cache_enabled(self._casts_once)
        with FunctionalTensorMode(), RefusedOperations(), StepFunctions(self.averages):
            mine = [to_fun(tensor) for tensor in flat]
            results = self._step(mine)
            for tensor in mine:
                torch._sync(tensor)
            return [from_fun(value) for value in (*results, *mine)]

    def _step(self, flat: Sequence[torch.Tensor]) -> list[Any]:
        given = iter(flat)
        parts = self.parts
        parameters = {name: next(given) for name in parts.parameters}
        buffers = {name: next(given) for name in parts.buffers}
        state = {key: next(given) for key in parts.state}
        scale = [next(given) for _ in parts.scale]
        rates = [
            tensor if isinstance(rate, torch.Tensor) else tensor.item()
            for rate, tensor in zip(parts.rates, given, strict=False)
        ]
        leaves = {
            name: leaf_of(tensor, parts.parameters[name])
            for name, tensor in parameters.items()
        }
        with _reparametrize_module(self.root, places_of(self.root, leaves | buffers)):
            loss, gradients = self._passes(leaves, list(given), scale)
            self._keep(buffers)
        tensors = Tensors(parameters, state, rates, scale)
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            if self._settings.recorded:
                self.made = self._update.recorded(tensors, gradients)
            else:
                self.left = self._update.left(tensors, gradients)
        last = [tensor.detach() for tensor in (self.made or self.left).values()]
        if self._found is None:
            return [loss, *last]
        flat, self.extras = pytree.tree_flatten(self._found)
        return [loss, *flat, *last]

    def _passes(
        self,
        leaves: Mapping[str, torch.Tensor],
        batch: Sequence[torch.Tensor],
        scale: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, Gradients]:
        """Forward and backward, part by part of the batch."""
        trained = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        gradients: Gradients = dict.fromkeys(trained)
        total: torch.Tensor | None = None
        extras = []
        before = _names_now()
        for tensors, divisor in self.batch.parts(batch, self._settings.accumulate):
            loss, found = self._loss(tensors)
            extras.append(found)
            loss = loss / divisor if divisor != 1 else loss
            goal = loss * scale[0] if scale else loss
            between = _names_now()
            with torch.autocast("cpu", enabled=False):
                mine = torch.autograd.grad(
                    goal, list(trained.values()), allow_unused=True
                )
            gradients = added(gradients, dict(zip(trained, mine, strict=True)))
            total = loss.detach() if total is None else total + loss.detach()
            self.forward |= between - before
            self.backward |= _names_now() - between
            before = _names_now()
        if any(found is not None for found in extras):
            several = self._settings.accumulate > 1
            self._found = tuple(extras) if several else extras[0]
        return total, gradients

    def _loss(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Any]:
        torch.clear_autocast_cache()
        args, kwargs = self.batch.arguments(tensors)
        result = self._loss_fn(called(self.root.model, args, kwargs), *args[1:])
        loss, extras = loss_of(result)
        return loss, pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, extras)

    def _keep(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Have tensors that the model puts in a buffer's place as its new values."""
        for name, buffer in buffers.items():
            module, _, own = name.rpartition(".")
            now = self.root.get_submodule(module)._buffers[own]
            if now is buffer:
                continue
            if now is None or (now.shape, now.dtype) != (buffer.shape, buffer.dtype):
                found = None if now is None else (tuple(now.shape), now.dtype)
                raise UnsupportedError(
                    f"the step makes buffer {name.partition('.')[2]!r} {found}; it was "
                    f"{(tuple(buffer.shape), buffer.dtype)}, and shapes must stay"
                )
            buffer.copy_(now.detach())


def _names_now() -> frozenset[str]:
    """Names of the nodes that there are so far."""
    return frozenset(node.name for node in get_proxy_mode().tracer.graph.nodes)
