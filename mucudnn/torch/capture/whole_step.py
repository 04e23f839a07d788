"""A training step as one functional graph: forward, backward and update, as they are.

The step is run once on tensors without data. What the model, the loss and the optimizer
do is recorded operation by operation, below autograd, and what they do in place becomes
new values that replace those of parameters, buffers and state when the step is over. So
an optimizer needs no functional form: its own `step` is what is recorded, one tensor at
a time, and its learning rates stay inputs. Whatever Python decides meanwhile is decided
for every step that runs later; what it decides by numbers that are there before a step,
such as an optimizer's count of steps, is noted.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._functorch._aot_autograd.functional_utils import from_fun, to_fun
from torch._subclasses.functional_tensor import (
    FunctionalTensor,
    FunctionalTensorMode,
)
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree

from mucudnn.errors import MucudnnError, UnsupportedError
from mucudnn.torch.capture.batches import Batch, called
from mucudnn.torch.capture.checkpoints import plain_checkpoints, uncompiled
from mucudnn.torch.capture.counted_averages import CountedAverages
from mucudnn.torch.capture.decisions import DecidingShapes, Decision
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
from mucudnn.torch.capture.python_state import Read
from mucudnn.torch.capture.reads import (
    Effect,
    ReadRecorder,
    Reads,
)
from mucudnn.torch.capture.refusals import (
    RefusedOperations,
    StepFunctions,
    saying_where,
)
from mucudnn.torch.capture.settings import PLAIN, StepSettings
from mucudnn.torch.capture.step_update import StepUpdate, Tensors

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
        extras: How what the step returns beside the loss is nested: a pair of what the
            loss function returned with it, and the values of `reads.effects`.
        reads: The Python state that the step has read, and what it has changed.
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
    extras: Any
    reads: Reads
    decisions: Sequence[Decision] = ()
    made: Sequence[StateKey] = ()
    gradients: Sequence[str] | None = None


def capture_step(
    model: torch.nn.Module,
    loss_fn: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    batch: Sequence[Any] | Batch,
    *,
    size: int | None = None,
    settings: StepSettings = PLAIN,
    results: KernelResults | None = None,
    keeps_effects: bool = True,
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
        keeps_effects: Whether plain state stays as an error of the user's own leaves
            it, as in eager mode: a loss that fails at every fifth call goes on
            counting.

    Raises:
        UnsupportedError: Something depends on values that only a run has.
        UnsoundCaptureError: A later step may differ in a way that cannot be checked.
    """
    given = batch if isinstance(batch, Batch) else Batch.of(batch, {})
    parts = StepParts.of(model, optimizer, loss_fn, settings)
    tracer = _Tracer(
        root_of(model, loss_fn), loss_fn, optimizer, parts, given, settings
    )
    tensors = given.tensors
    names = [*parts.names(), *(f"batch.{i}" for i in range(len(tensors)))]
    inputs = [*parts.tensors(), *tensors]
    shapes = DecidingShapes(names, inputs, frozenset(parts.parameters))
    mode = StepFakes(shapes, KernelResults() if results is None else results)
    fakes = [mode.from_tensor(t, static_shapes=True) for t in inputs]
    if size is not None and tensors:
        with mode:
            fakes[-len(tensors) :] = [
                t.new_empty((size, *t.shape[1:])) for t in fakes[-len(tensors) :]
            ]
    recorder = tracer.recorder
    try:
        with (
            recorder,
            tracer.averages.marked(recorder),
            uncompiled(tracer.root, recorder),
            plain_checkpoints(),
            mode,
            torch.enable_grad(),
            saying_where(),
        ):
            module = make_fx(tracer, _allow_non_fake_inputs=True)(*fakes)
            torch.clear_autocast_cache()
    except BaseException as e:
        own = isinstance(e, Exception) and not isinstance(e, MucudnnError)
        recorder.put_back(with_plain=not (keeps_effects and own))
        raise
    reads = recorder.finish(tracer.effects)
    tracer.averages.written(module.graph)
    return CapturedStep(
        module,
        names,
        frozenset(tracer.forward),
        frozenset(tracer.backward),
        tracer.extras,
        reads,
        tuple(shapes.decisions),
        tuple(tracer.made),
        None if settings.recorded else tuple(tracer.left),
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
        self._casts_once = torch.is_autocast_cache_enabled()
        roots: dict[str, Any] = {"the loss function": loss_fn}
        if settings.recorded:
            roots["the optimizer"] = optimizer
        self.recorder = ReadRecorder(
            [module for module in root.modules() if module is not root],
            roots,
            parts.parameters,
            [*parts.parameters.values(), *parts.buffers.values(), *batch.tensors],
            settings.floats,
        )
        self.forward: set[str] = set()
        self.backward: set[str] = set()
        self.extras: Any = None
        self.effects: Sequence[Effect] = ()
        self.made: Mapping[StateKey, torch.Tensor] = {}
        self.left: Mapping[str, torch.Tensor] = {}
        self._found: Any = None

    def __call__(self, *flat: torch.Tensor) -> list[Any]:
        # Tracing has a parameter cast once for every use: gradients would be summed
        # behind the casts back, not before. It sets this back when it is over.
        torch.set_autocast_cache_enabled(self._casts_once)
        functions = StepFunctions(self.averages, self.recorder)
        with FunctionalTensorMode(), RefusedOperations(), functions:
            mine = [to_fun(tensor) for tensor in flat]
            results = self._step(mine, functions)
            for tensor in mine:
                torch._sync(tensor)
            return [from_fun(value) for value in (*results, *mine)]

    def _step(
        self, flat: Sequence[torch.Tensor], functions: StepFunctions
    ) -> list[Any]:
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
        floats = [next(given).item() for _ in parts.floats]
        leaves = {
            name: leaf_of(tensor, parts.parameters[name])
            for name, tensor in parameters.items()
        }
        # A loss may hold parameters themselves, to add their norms, and an optimizer's
        # hook their gradients.
        held = {**parts.parameters, **parts.buffers}
        named = {id(tensor): name for name, tensor in held.items()}
        functions.stand_ins = {k: (leaves | buffers)[n] for k, n in named.items()}
        modules = _reparametrize_module(
            self.root, places_of(self.root, leaves | buffers)
        )
        with _lent(self._settings.floats, floats):
            with modules:
                loss, gradients = self._passes(leaves, list(given), scale)
                self._keep(buffers)
            tensors = Tensors(parameters, state, rates, scale)
            lent = parameters | buffers
            functions.stand_ins = {key: lent[name] for key, name in named.items()}
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                if self._settings.recorded:
                    self.made = self._update.recorded(tensors, gradients)
                else:
                    self.left = self._update.left(tensors, gradients)
        last = [tensor.detach() for tensor in (self.made or self.left).values()]
        functions.stand_ins = {}
        self.effects = self.recorder.effects()
        self.recorder.check_effects(self.effects)
        beside = self._found, [effect.after for effect in self.effects]
        leaves, form = pytree.tree_flatten(beside)
        self.extras = Nesting.of(form, leaves)
        return [loss, *(v.detach() for v in leaves if is_result(v)), *last]

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


@contextmanager
def _lent(places: Sequence[Read], values: Sequence[Any]) -> Iterator[None]:
    """Have symbols stand in the places of Python numbers."""
    before = [place.now() for place in places]
    for place, value in zip(places, values, strict=True):
        place.put(value)
    try:
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.put(value)


def is_result(value: Any) -> bool:
    """Return whether a value is a tensor that the step has computed."""
    return isinstance(value, FunctionalTensor)


@dataclass(frozen=True)
class Nesting:
    """Values nested in one another, without those that each run computes.

    Attributes:
        form: How they are nested.
        leaves: The values, `COMPUTED` in the place of a computed one.
    """

    form: Any
    leaves: Sequence[Any]

    @classmethod
    def of(cls, form: Any, leaves: Sequence[Any]) -> "Nesting":
        """Return the nesting of a capture's values."""
        return cls(form, [COMPUTED if is_result(v) else v for v in leaves])

    def filled(self, computed: Sequence[Any]) -> Any:
        """Return all values, with those that a run has computed."""
        given = iter(computed)
        leaves = [next(given) if leaf is COMPUTED else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.form)


COMPUTED = object()


def _names_now() -> frozenset[str]:
    """Names of the nodes that there are so far."""
    return frozenset(node.name for node in get_proxy_mode().tracer.graph.nodes)
