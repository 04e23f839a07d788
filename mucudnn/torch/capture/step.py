"""Capture a training step as one graph: forward, backward and update.

The step is run once on fake tensors. The operations of the model, the loss and the
optimizer are recorded one by one, below autograd. Writes in place become new values,
which replace those of parameters, buffers and state at the end of the step. An
optimizer therefore needs no functional form: its own `step` is recorded, one tensor at
a time, and its learning rates remain inputs. Python control flow is frozen by the
capture; decisions that depend on numbers known before a step, such as an optimizer's
step count, are recorded as guards.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import torch.export._trace  # PyTorch imports it in a capture, and would keep patches
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch._aot_autograd.functional_utils import from_fun, to_fun
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx import _symbolic_trace
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.nn.utils import parametrize
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree

from mucudnn.errors import MucudnnError, UnsupportedError
from mucudnn.processes import uninterrupted
from mucudnn.torch.capture.exclusive import exclusive_capture
from mucudnn.torch.capture.fake_tensors import KernelResults, StepFakes
from mucudnn.torch.capture.guards import HOOKS
from mucudnn.torch.capture.known_values import Known, KnownShapes
from mucudnn.torch.capture.many_tensor_updates import updates_many
from mucudnn.torch.capture.op_overrides import (
    CountedAverages,
    asked_as_eagerly,
    linearizing_refused,
    output_noted,
    plain_checkpoints,
    seeding_refused,
    uncompiled,
)
from mucudnn.torch.capture.optimizers import StateKey, UpdateNotRecordedError, swapped
from mucudnn.torch.capture.python_state import Read, containers_in, contents_of, is_same
from mucudnn.torch.capture.reads import Effect, ReadRecorder, Reads, UnsoundCaptureError
from mucudnn.torch.capture.refusals import (
    RefusedOperations,
    StepFunctions,
    saying_where,
)
from mucudnn.torch.capture.repeated_calls import RepeatedCalls
from mucudnn.torch.capture.repeated_updates import updates_repeated
from mucudnn.torch.capture.step_tensors import (
    PLAIN,
    Batch,
    StepParts,
    StepSettings,
    attributes_of,
    called,
    places_of,
    root_of,
)
from mucudnn.torch.distributed.sharding import (
    Sharding,
    check_optimizer,
    reordered,
    sharding_of,
    without_collectives,
)
from mucudnn.torch.execution.devices import autocast_off
from mucudnn.torch.internals import replaced, without_wrapped_functions
from mucudnn.torch.source_lines import line_now, storage_of

Gradients = dict[str, torch.Tensor | None]


@dataclass(frozen=True)
class CapturedStep:
    """A step as a graph from tensors to tensors.

    Attributes:
        module: Its placeholders are those of `StepParts.tensors` and then the batch; it
            returns the loss, auxiliary results of the loss function, and the new value
            of each placeholder.
        names: Names of the placeholders.
        forward: Nodes of the forward pass.
        backward: Nodes of the backward pass; the remaining nodes are the update.
        extras: Nesting of the results beside the loss: a pair of the loss function's
            auxiliary results, and the values of `reads.effects`.
        stored: Places of inputs of the step that are among `extras` themselves.
        reads: The Python state that the step has read and changed.
        known: Values computed before the step: conditions under which the graph is
            valid, and further inputs of the graph, named `known.i`.
        known_bytes: Peak of what their computation allocates, these inputs included.
        made: New entries of the optimizer's state, which are the last results before
            the placeholders' new values: group, parameter and name.
        gradients: If the update is not part of the graph, the parameters whose
            gradients are the last results before the placeholders' new values, and with
            a scaler an empty name, for whether some entry is not finite. Else None.
        updates_many: Whether eager mode updates many tensors by one call.
        sharding: The ranks that make the step together, if there are several.
        as_compiled: Whether operations are those that `torch.compile` traces.
        exchanges: Nodes that gather what the passes read, or sum their gradients.
    """

    module: torch.fx.GraphModule
    names: Sequence[str]
    forward: frozenset[str]
    backward: frozenset[str]
    extras: Any
    stored: Sequence[int]
    reads: Reads
    known: Sequence[Known] = ()
    known_bytes: int = 0
    made: Sequence[StateKey] = ()
    gradients: Sequence[str] | None = None
    updates_many: bool = False
    sharding: Sharding | None = None
    as_compiled: bool = False
    exchanges: frozenset[str] = frozenset()


_BACKWARD = torch.autograd.backward

NO_VALUES: Mapping[int, torch.Tensor] = MappingProxyType({})


@exclusive_capture()
def capture_step(
    model: torch.nn.Module,
    loss_fn: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    batch: Sequence[Any] | Batch,
    *,
    values: Mapping[int, torch.Tensor] = NO_VALUES,
    size: int | None = None,
    settings: StepSettings = PLAIN,
    results: KernelResults | None = None,
    keeps_effects: bool = True,
    as_compiled: bool = False,
    sharding: Sharding | None = None,
) -> CapturedStep:
    """Record one step without running it.

    Args:
        model: Called with the first argument of the batch and its keyword arguments.
        loss_fn: Called with the model's result and the rest of the batch.
        optimizer: Optimizer of the model's parameters.
        batch: The arguments of a step.
        values: What has data for tensors of the batch and buffers that have none, by
            the identity of these.
        size: Size of axis 0 of every tensor of the batch, if it differs from `batch`.
        settings: How gradients are treated.
        results: Layouts that kernels were seen to return.
        keeps_effects: Whether changes of Python state stay after an error of the user's
            own code, as in eager mode: a loss that fails at every fifth call goes on
            counting.
        as_compiled: Whether operations are those that `torch.compile` traces, some of
            which PyTorch decomposes in Python: dropout draws other numbers then.
        sharding: The ranks that make the step together, unless FSDP2 says so itself.

    Raises:
        UnsupportedError: The step depends on values that are known only at run time.
        UnsoundCaptureError: A later step may differ in a way that cannot be checked.
    """
    given = batch if isinstance(batch, Batch) else Batch.of(batch, {})
    parts = StepParts.of(model, optimizer, loss_fn, settings)
    root = root_of(model, loss_fn)
    sharding = sharding or sharding_of(root)
    if sharding is not None and sharding.kind == "fsdp":
        check_optimizer(optimizer)
    watches_calls = False
    while True:
        mine = loss_fn, optimizer, parts, given, settings, sharding, as_compiled
        tracer = _Tracer(root, *mine, watches_calls)
        try:
            captured = _trace(tracer, values, size, results, keeps_effects)
        except UnsoundCaptureError:
            if watches_calls or not tracer.recorder.may_be_unread:
                raise
        else:
            unread = captured.reads.transient and tracer.recorder.may_be_unread
            if watches_calls or not unread:
                return captured
        watches_calls = True


def _trace(
    tracer: "_Tracer",
    values: Mapping[int, torch.Tensor],
    size: int | None,
    results: KernelResults | None,
    keeps_effects: bool,
) -> CapturedStep:
    """Record one step; `capture_step` says what the arguments are."""
    parts, optimizer = tracer.parts, tracer.optimizer
    root, settings, sharding = tracer.root, tracer.settings, tracer.sharding
    tensors = tracer.batch.tensors
    names = [*parts.names(), *(f"batch.{i}" for i in range(len(tensors)))]
    inputs = [*parts.tensors(), *tensors]
    known = list(inputs)
    others = () if size else tensors
    for i, tensor in (
        *enumerate(parts.buffers.values(), len(parts.parameters)),
        *enumerate(others, len(inputs) - len(tensors)),
    ):
        known[i] = values.get(id(tensor), known[i])
    tracer.shapes = shapes = KnownShapes(
        names, known, frozenset(parts.parameters), frozenset(parts.buffers)
    )
    tracer.calls = RepeatedCalls(shapes)
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
            # PyTorch's modes do not survive a Ctrl-C that comes as they begin or end.
            uninterrupted(),
            recorder,
            tracer.averages.marked(recorder),
            uncompiled(tracer.root, recorder),
            output_noted(recorder),
            asked_as_eagerly(
                recorder, tracer.identities, frozenset(map(id, tracer.batch.tensors))
            ),
            plain_checkpoints(tracer.noting_changes),
            _pytorch_patched(tracer),
            seeding_refused(),
            linearizing_refused(),
            without_collectives(root),
            mode,
            torch.enable_grad(),
            # The recorder watches calls of this thread only.
            torch.autograd.set_multithreading_enabled(False),
            enable_python_dispatcher() if tracer.as_compiled else nullcontext(),
            saying_where(),
            without_wrapped_functions(),
        ):
            module = make_fx(tracer, _allow_non_fake_inputs=True)(*fakes)
            shapes.with_inputs(module, len(inputs))
            torch.clear_autocast_cache()
        known_bytes = shapes.known_bytes(len(inputs))
    except BaseException as e:
        own = isinstance(e, Exception) and not isinstance(e, MucudnnError)
        recorder.put_back(with_plain=not (keeps_effects and own))
        raise
    finally:
        shapes.release_inputs()
    reads = recorder.finish(tracer.effects)
    recorder.release()
    tracer.effects = ()
    _check_trained(module, optimizer, parts)
    tracer.averages.written(module.graph)
    if sharding is not None:
        reordered(module.graph, frozenset(tracer.gathers), frozenset(tracer.sums))
    return CapturedStep(
        module,
        names,
        frozenset(tracer.forward),
        frozenset(tracer.backward),
        tracer.extras,
        tracer.stored,
        reads,
        tuple(shapes.known),
        known_bytes,
        tuple(tracer.made),
        None if settings.recorded else tuple(tracer.left),
        settings.recorded and updates_many(optimizer),
        sharding,
        tracer.as_compiled,
        tracer.exchanges,
    )


@contextmanager
def _pytorch_patched(tracer: "_Tracer") -> Iterator[None]:
    """Replace functions of PyTorch for the time of a trace."""
    with (
        replaced(torch.autograd, backward=tracer.run_backward),
        # Calls and updates that are like earlier ones are recorded without a trace.
        replaced(proxy_tensor, proxy_call=tracer.calls),
        updates_repeated(tracer.calls),
        # The code of the graph is not run, so it is not written.
        _use_lazy_graph_module(True),
        # PyTorch's tracer would call modules as when it was imported.
        replaced(_symbolic_trace, _orig_module_call=torch.nn.Module.__call__),
        replaced(parametrize, _cache={}),  # of tensors with data
    ):
        yield


def _check_trained(
    module: torch.fx.GraphModule, optimizer: torch.optim.Optimizer, parts: StepParts
) -> None:
    """Refuse a step that uses a tensor which only the optimizer has."""
    known = set(map(id, parts.parameters.values()))
    others = {
        storage_of(parameter): f"parameter {j} of the optimizer's group {i}"
        for i, group in enumerate(optimizer.param_groups)
        for j, parameter in enumerate(group["params"])
        if id(parameter) not in known and parameter.requires_grad
    }
    constants = (
        getattr(module, n.target) for n in module.graph.find_nodes(op="get_attr")
    )
    for value in (*constants, *parts.buffers.values()) if others else ():
        found = isinstance(value, torch.Tensor) and others.get(storage_of(value))
        if found:
            raise UnsoundCaptureError(
                f"the step uses {found}, which does not belong to the model; register "
                "every trained tensor with the model (torch.nn.Parameter), or with a "
                "loss that is a module"
            )


@dataclass(eq=False)
class _Tracer:
    """The step as a function of its tensors; records the nodes of its phases."""

    root: torch.nn.Module
    loss_fn: Callable[..., Any]
    optimizer: torch.optim.Optimizer
    parts: StepParts
    batch: Batch
    settings: StepSettings
    sharding: Sharding | None
    as_compiled: bool
    watches_calls: bool
    shapes: KnownShapes = field(init=False)  # of the trace
    calls: RepeatedCalls = field(init=False)
    sent: frozenset[str] = frozenset()
    gathers: frozenset[str] = frozenset()
    sums: set[str] = field(default_factory=set)
    order: list[str] = field(default_factory=list)  # of gradients, as they come
    forward: set[str] = field(default_factory=set)
    backward: set[str] = field(default_factory=set)
    leaves: frozenset[int] = frozenset()  # by identity
    identities: dict[int, int] = field(default_factory=dict)  # of stand-ins
    extras: Any = None
    stored: Sequence[int] = ()
    effects: Sequence[Effect] = ()
    made: Mapping[StateKey, torch.Tensor] = field(default_factory=dict)
    # Gradients by parameter if the update is not recorded; with a scaler the last one,
    # of empty name, is whether some entry is not finite.
    left: dict[str, torch.Tensor] = field(default_factory=dict)
    found: Any = None

    def __post_init__(self) -> None:
        self.averages = CountedAverages(self.root)
        self._casts_once = torch.is_autocast_cache_enabled()
        roots: dict[str, Any] = {"the loss function": self.loss_fn}
        if self.settings.recorded:
            roots["the optimizer"] = self.optimizer
        parts = self.parts
        self.recorder = ReadRecorder(
            [module for module in self.root.modules() if module is not self.root],
            roots,
            parts.parameters,
            (*parts.parameters.values(), *parts.buffers.values(), *self.batch.tensors),
            self.settings.floats,
            watches_calls=self.watches_calls,
        )

    @property
    def exchanges(self) -> frozenset[str]:
        """Nodes that gather what the passes read, or sum their gradients."""
        sharded = self.sharding is not None and self.sharding.kind == "fsdp"
        return self.sent | self.sums | (self.gathers if sharded else frozenset())

    def __call__(self, *flat: torch.Tensor) -> list[Any]:
        # Tracing disables autocast's cache, so a parameter would be cast at every use,
        # and gradients summed behind the casts back. Tracing restores the flag itself.
        torch.set_autocast_cache_enabled(self._casts_once)
        self.calls.tracer = get_proxy_mode().tracer
        noted = self.recorder, self.shapes
        functions = StepFunctions(self.averages, *noted)
        refused = RefusedOperations(*noted, self.calls, as_compiled=self.as_compiled)
        with FunctionalTensorMode():
            with refused, functions:
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
        whole = parameters
        if self.sharding is not None:
            before = _names_now()
            with torch.no_grad():
                self.sharding.sent(buffers)
                self.sent = _names_now() - before
                whole = self.sharding.gathered(parameters)
        leaves = {
            name: leaf_of(tensor, parts.parameters[name])
            for name, tensor in whole.items()
        }
        self.leaves = frozenset(map(id, leaves.values()))
        if self.sharding is not None:
            # Leaves are operations of the graph, too, which read what is gathered.
            self.gathers = _names_now() - before - self.sent
            self.forward |= _names_now() - before
            for name, leaf in leaves.items():
                if leaf.requires_grad:
                    leaf.register_hook(lambda _, name=name: self.order.append(name))
        # A loss may hold parameters themselves, for instance to add their norms, and an
        # optimizer's hook their gradients.
        held = {**parts.parameters, **parts.buffers}
        named = {id(tensor): name for name, tensor in held.items()}
        functions.stand_ins = {k: (leaves | buffers)[n] for k, n in named.items()}
        lent = parameters | buffers
        for identity, name in named.items():
            for stand_in in (lent[name], functions.stand_ins[identity]):
                self.identities[id(stand_in)] = identity
        places = places_of(self.root, leaves | buffers)
        with _lent(self.settings.floats, floats):
            batch = list(given)
            functions.batch = frozenset(map(id, batch))
            for tensor, real in zip(batch, self.batch.tensors, strict=True):
                self.identities[id(tensor)] = id(real)
                if own := attributes_of(real):
                    vars(tensor).update(own)
                    self.recorder.lasts_one_run("it is given tensors with attributes")
            held = {**leaves, **buffers}
            held |= {f"tensor {i} of the batch": t for i, t in enumerate(batch)}
            with (
                _attributes_kept(held, leaves),
                _recurrent_lists_kept(self.root),
                _reparametrize_module(self.root, places),
            ):
                loss, gradients = self._passes(leaves, batch, scale)
                self._keep(places, batch)
            self.recorder.in_update = True  # before groups are read
            groups = self.optimizer.param_groups
            if not is_same(parts.rates, tuple(g.get("lr", 0.0) for g in groups)):
                raise UnsoundCaptureError(
                    "the step changes the learning rate, which its update reads; do so "
                    "outside the step, as with scheduler.step()"
                )
            functions.stand_ins = {key: lent[name] for key, name in named.items()}
            with torch.no_grad(), autocast_off():
                self._update(parameters, state, rates, scale, gradients)
        last = [tensor.detach() for tensor in (self.made or self.left).values()]
        functions.stand_ins = {}
        self.identities.clear()
        self.effects = self.recorder.effects()
        self.recorder.check_effects(self.effects)
        beside = self.found, [effect.after for effect in self.effects]
        # The ranks of a sharded step have parts of these only.
        own_tensors = (
            (*leaves.values(), *buffers.values()) if self.sharding is None else ()
        )
        inputs = {id(tensor): i for i, tensor in enumerate(own_tensors)}
        inputs |= {id(t): len(flat) - len(batch) + i for i, t in enumerate(batch)}
        self.extras, computed, self.stored = nesting_of(
            beside, inputs, self.recorder.is_kept
        )
        return [loss, *(tensor.detach() for tensor in computed), *last]

    @contextmanager
    def noting_changes(self, preserves: bool) -> Iterator[None]:
        """Note the first piece of state that is changed within this context.

        Random numbers are no change if it `preserves` them.
        """

        def values() -> dict[Any, tuple[str, Any]]:
            found: dict[Any, tuple[str, Any]] = {
                name: (f"buffer {name.partition('.')[2]!r}", from_fun(buffer))
                for name, buffer in self.root.named_buffers()
            }
            if not preserves:
                found[_draws] = "the state of PyTorch's generator", _draws()
            return {**self.recorder.changes(), **found}

        before = values()
        yield
        for place, (label, value) in values().items():
            if place not in before or not is_same(value, before[place][1]):
                self.recorder.repeats = self.recorder.repeats or label

    def _passes(
        self,
        leaves: Mapping[str, torch.Tensor],
        batch: Sequence[torch.Tensor],
        scale: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, Gradients]:
        """Run forward and backward, micro-batch by micro-batch."""
        trained = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        gradients: Gradients = dict.fromkeys(trained)
        total: torch.Tensor | None = None
        extras = []
        before = _names_now()
        # Code of the step may read or zero what micro-batches have accumulated.
        lends = self.settings.accumulate > 1 and self.sharding is None
        for tensors, divisor in self.batch.parts(batch, self.settings.accumulate):
            loss, found = self._loss(tensors)
            if lends:
                gradients = {name: leaf.grad for name, leaf in trained.items()}
            extras.append(found)
            loss = loss / divisor if divisor != 1 else loss
            goal = loss * scale[0] if scale else loss
            between = _names_now()
            with autocast_off():
                mine = torch.autograd.grad(
                    goal, list(trained.values()), allow_unused=True
                )
            found_now: Gradients = dict(zip(trained, mine, strict=True))
            if self.sharding is not None:
                behind = _names_now()
                with torch.no_grad(), autocast_off():
                    found_now = self.sharding.reduced(found_now, self.order, leaves)
                self.order.clear()
                self.sums |= _names_now() - behind
            gradients = added(gradients, found_now)
            for name, leaf in trained.items() if lends else ():
                leaf.grad = gradients[name]
            total = loss.detach() if total is None else total + loss.detach()
            self.forward |= between - before
            self.backward |= _names_now() - between
            before = _names_now()
        for leaf in trained.values() if lends else ():
            leaf.grad = None
        if any(found is not None for found in extras):
            several = self.settings.accumulate > 1
            self.found = tuple(extras) if several else extras[0]
        return total, gradients

    def run_backward(self, tensors: Any, *args: Any, **kwargs: Any) -> None:
        """Replace `torch.autograd.backward`, which may not change `grad` of parameters.

        An update in eager mode would read what is added there.
        """
        inputs = kwargs.get("inputs")
        leaves = pytree.tree_leaves(tensors if inputs is None else inputs)
        is_own_thread = get_proxy_mode() is not None
        for leaf in leaves_of(*leaves) if inputs is None else leaves:
            is_made = isinstance(leaf, FunctionalTensor) and id(leaf) not in self.leaves
            if is_own_thread and not is_made:
                raise UnsoundCaptureError(
                    f"the step calls backward(){line_now()}, which adds to gradients "
                    "of parameters; call torch.autograd.grad, or backward(inputs=...) "
                    "with tensors that the step has made"
                )
        _BACKWARD(tensors, *args, **kwargs)

    def _loss(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Any]:
        torch.clear_autocast_cache()
        args, kwargs = self.batch.arguments(tensors)
        containers = list(containers_in(args))
        result = self.loss_fn(called(self.root.model, args, kwargs), *args[1:])
        for container, before in containers:
            if not is_same(contents_of(container), before):
                raise UnsoundCaptureError(
                    f"the step changes a {type(container).__name__} of the batch, of "
                    "which a planned step has a copy only; return what it computes, "
                    f"or change a copy, such as {type(container).__name__}(…)"
                )
        loss, extras = loss_of(result)
        return loss, pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, extras)

    def _update(
        self,
        parameters: Mapping[str, torch.Tensor],
        state: Mapping[StateKey, torch.Tensor],
        rates: Sequence[Any],
        scale: Sequence[torch.Tensor],
        gradients: Gradients,
    ) -> None:
        """Record what is behind the gradients: a scaler, clipping, and the update.

        An optimizer that decides by values or counts in Python updates by itself,
        behind the step, which ends with the gradients then.
        """
        settings, found = self.settings, None
        if scale:
            gradients, found = unscaled(gradients, scale[0], self.sharding)
        if not settings.recorded:
            if found is not None:
                rescaled(scale[0], scale[1], found, settings)
            given = clipped(gradients, settings, self.sharding)
            self.left = {name: g for name, g in given.items() if g is not None}
            if found is not None:
                self.left[""] = found
            return
        # Where gradients are not finite, the old values are put back.
        changed = [*parameters.values(), *state.values()] if scale else []
        before = [from_fun(tensor) for tensor in changed]
        names = {id(tensor): name for name, tensor in self.parts.parameters.items()}
        given = clipped(gradients, settings, self.sharding)
        lent = parameters, given, state, rates
        with swapped(self.optimizer, names, *lent) as self.made:
            try:
                with saying_where():
                    self.optimizer.step()
                self.recorder.check_rates(self.optimizer)
            except UnsupportedError as e:
                raise UpdateNotRecordedError(str(e)) from e
            except Exception as e:  # the optimizer's code may raise anything
                raise UpdateNotRecordedError(f"{type(e).__name__}: {e}") from e
        for tensor, old in zip(changed, before, strict=True):
            if from_fun(tensor) is not old:
                tensor.copy_(torch.where(found, to_fun(old), tensor))
        if found is not None:
            rescaled(scale[0], scale[1], found, settings)

    def _keep(
        self, places: Mapping[str, torch.Tensor], batch: Sequence[torch.Tensor]
    ) -> None:
        """Copy tensors that the model has put in a buffer's place to the buffer."""
        modules = dict(self.root.named_modules())
        found: dict[str, Any] = {}
        for name in places:
            path, _, own = name.rpartition(".")
            if path in modules:  # the recorder refuses that one is gone
                held = modules[path]._parameters | modules[path]._buffers
                found[name] = held.get(own)
        names = Counter(map(id, places.values()))
        memory = Counter(
            storage_of(t) for t in (*found.values(), *batch) if t is not None
        )
        changed = []  # to copy from buffers that are copied to, too
        for name, now in found.items():
            buffer, label = places[name], repr(name.partition(".")[2])
            if now is buffer:
                continue
            if id(buffer) in self.leaves or names[id(buffer)] > 1:
                raise UnsoundCaptureError(
                    f"the step replaces {label}, a parameter or a buffer of several "
                    "names; do so before the first step, or modify it in place"
                )
            if now is None or (now.shape, now.dtype) != (buffer.shape, buffer.dtype):
                new = None if now is None else (tuple(now.shape), now.dtype)
                raise UnsupportedError(
                    f"the step changes buffer {label} to {new}; it was "
                    f"{(tuple(buffer.shape), buffer.dtype)}, and shape and type must "
                    "stay the same"
                )
            if memory[storage_of(now)] > 1 or not isinstance(now, FunctionalTensor):
                raise UnsoundCaptureError(
                    f"the step sets buffer {label} to memory of a parameter, the "
                    "batch, a constant or another buffer, but planned steps give each "
                    "buffer its own; set it to a clone"
                )
            changed.append((buffer, from_fun(now.detach())))
        for buffer, value in changed:
            buffer.copy_(to_fun(value))


@contextmanager
def _attributes_kept(
    tensors: Mapping[str, torch.Tensor], leaves: Collection[str]
) -> Iterator[None]:
    """Refuse a step that sets attributes of what stands for its tensors.

    Of the batch, `requires_grad` may be set.
    """

    def attributes(name: str) -> dict[str, Any]:
        tensor = tensors[name]
        if name not in leaves:
            return dict(vars(tensor))
        hooks = {k: len(getattr(tensor, k) or ()) for k in HOOKS}
        found = {"requires_grad": tensor.requires_grad, "grad": tensor.grad}
        return {**vars(tensor), **hooks, **found}

    held = {name: attributes(name) for name in tensors}
    try:
        yield
    finally:
        for name, before in held.items():
            for key, value in attributes(name).items():
                if key not in before or value is not before[key]:
                    raise UnsoundCaptureError(
                        f"the step sets attribute {key!r} of {name}, which a planned "
                        "step would not set; set it outside, or of a module"
                    )


@contextmanager
def _recurrent_lists_kept(root: torch.nn.Module) -> Iterator[None]:
    """Give recurrent modules the lists of their parameters back.

    `nn.RNNBase` makes them anew when it is called with other parameters, and does not
    notice when it gets its own back.
    """
    names = "_flat_weights", "_flat_weight_refs"
    kept = [
        (vars(module), {name: list(vars(module)[name]) for name in names})
        for module in root.modules()
        if isinstance(module, torch.nn.RNNBase)
        and all(n in vars(module) for n in names)
    ]
    try:
        yield
    finally:
        for held, lists in kept:
            held.update(lists)


@contextmanager
def _lent(places: Sequence[Read], values: Sequence[Any]) -> Iterator[None]:
    """Replace Python numbers by symbols."""
    before = [place.now() for place in places]
    given = iter(values)
    for place, old in zip(places, before, strict=True):
        several = type(old) is tuple
        place.put(tuple(next(given) for _ in old) if several else next(given))
    try:
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.put(value)


@dataclass(frozen=True, eq=False)
class Nesting:
    """A container and what is in it, without the tensors that each run computes.

    What appears twice, be it a tensor or a container, is one object in every run, too.

    Attributes:
        form: How the parts are put together, as a pytree specification.
        parts: Inner containers, places of tensors, and other values.
    """

    form: Any
    parts: "Sequence[Nesting | TensorPlace | Any]"

    def filled(
        self, computed: Sequence[torch.Tensor], stored: Sequence[torch.Tensor]
    ) -> Any:
        """Return new containers with the tensors of a run."""
        made: dict[Any, Any] = {}

        def fill(part: Any) -> Any:
            if isinstance(part, Nesting):
                if part not in made:
                    made[part] = pytree.tree_unflatten(map(fill, part.parts), part.form)
                return made[part]
            if not isinstance(part, TensorPlace):
                return part
            if part.is_input:
                return stored[part.place]
            if part not in made:  # one that equals a parameter is returned as that
                made[part] = computed[part.place].detach()
            return made[part]

        return fill(self)


@dataclass(frozen=True)
class TensorPlace:
    """The place of a tensor among those a run computes, or among its stored inputs."""

    place: int
    is_input: bool = False


def nesting_of(
    value: Any, inputs: Mapping[int, int], is_kept: Callable[[Any], bool]
) -> tuple[Nesting, list[torch.Tensor], list[int]]:
    """Return the nesting of a container, computed tensors in it, and places of inputs.

    `inputs` has their places by the identity of what stands for them; a container that
    `is_kept` was there before the step, and stays itself.
    """
    known: dict[int, Any] = {}
    alive: list[Any] = []  # identities are compared
    tensors: list[torch.Tensor] = []
    stored: list[int] = []

    def nest(part: Any) -> Any:
        if id(part) in known:
            return known[id(part)]
        if id(part) in inputs:
            nested: Any = TensorPlace(len(stored), is_input=True)
            stored.append(inputs[id(part)])
        elif isinstance(part, FunctionalTensor):  # that the step has computed
            nested = TensorPlace(len(tensors))
            tensors.append(part)
        else:
            inner, form = pytree.tree_flatten(part, is_leaf=lambda v: v is not part)
            if form.is_leaf() or is_kept(part):
                return part
            nested = Nesting(form, list(map(nest, inner)))
        alive.append(part)
        known[id(part)] = nested
        return nested

    return nest(value), tensors, stored


def _draws() -> int:
    """Return how many of the nodes recorded so far draw random numbers."""
    seeded = torch.Tag.nondeterministic_seeded
    nodes = get_proxy_mode().tracer.graph.nodes
    return sum(seeded in getattr(node.target, "tags", ()) for node in nodes)


def _names_now() -> frozenset[str]:
    """Return the names of the nodes recorded so far."""
    return frozenset(node.name for node in get_proxy_mode().tracer.graph.nodes)


# Scaling, unscaling and clipping.
#
# Decisions of PyTorch's scaler are made by tensor operations here: a step whose
# gradients are not finite restores the old values, bit for bit.


def loss_of(result: Any) -> tuple[torch.Tensor, Any]:
    """Return the scalar to minimise, and the auxiliary results of the loss function.

    Raises:
        ValueError: The loss is no tensor of one element that depends on parameters.
        TypeError: The auxiliary results have numbers.
    """
    loss, extras = result, None
    if isinstance(result, tuple) and len(result) == 2:
        loss, extras = result
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = (
            f"a tensor of shape {tuple(loss.shape)}"
            if isinstance(loss, torch.Tensor)
            else f"{type(loss).__name__}"
        )
        raise ValueError(
            f"loss_fn returned {found}; it must return a tensor with one element, or "
            "a pair of the loss and further results"
        )
    if not loss.requires_grad:
        raise ValueError("the loss does not depend on any parameter that is trained")
    for leaf in pytree.tree_leaves(extras):
        if not isinstance(leaf, (torch.Tensor, str, type(None))):
            name = type(leaf).__name__.removeprefix("Sym")
            raise TypeError(
                f"the further results of loss_fn contain a {name}, which would be the "
                "same in every step; return tensors only, without item()"
            )
    return loss, extras


def leaves_of(*results: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the leaves that a backward pass gives gradients to.

    A loss may close over modules, such as a discriminator, whose gradients are none of
    the step's. `backward(inputs=...)` would spare them, and refuses checkpoints.
    """
    yield from (result for result in results if result.grad_fn is None)
    pending = [result.grad_fn for result in results if result.grad_fn is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        following = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= following
        pending += following


def leaf_of(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a tensor that replaces a parameter, with its hooks.

    Raises:
        UnsoundCaptureError: The parameter has hooks that run when its gradient is
            stored.
    """
    if getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise UnsoundCaptureError(
            "a parameter has a hook that runs when its gradient is accumulated "
            "(register_post_accumulate_grad_hook), which never happens in a planned "
            "step; use register_hook, or a hook of the optimizer"
        )
    leaf = tensor.detach().requires_grad_(parameter.requires_grad)
    vars(leaf).update(vars(parameter))  # attributes that a user has given it
    leaf._is_param = True  # to isinstance and to modules  # type: ignore[attr-defined]
    hooks = parameter._backward_hooks if parameter.requires_grad else None
    for hook in (hooks or {}).values():
        leaf.register_hook(hook)
    return leaf


def unscaled(
    gradients: Gradients, scale: torch.Tensor, sharding: Sharding | None = None
) -> tuple[Gradients, torch.Tensor]:
    """Return gradients of the unscaled loss, and whether some entry is not finite."""
    inverse = scale.double().reciprocal().float()
    found = torch.zeros((), dtype=torch.bool, device=scale.device)
    true: Gradients = {}
    for name, gradient in gradients.items():
        true[name] = None
        if gradient is not None:
            found = found | ~torch.isfinite(gradient).all()
            true[name] = gradient * inverse
    return true, found if sharding is None else sharding.any_rank(found)


def rescaled(
    scale: torch.Tensor,
    count: torch.Tensor,
    found: torch.Tensor,
    settings: StepSettings,
) -> None:
    """Update a scaler's factor, and its step count, as its `update` does."""
    growth, backoff, interval = settings.key
    more = count + 1
    grown = (scale.double() * growth).float()
    due = more == interval
    higher = torch.where(due & torch.isfinite(grown), grown, scale)
    lower = (scale.double() * backoff).float()
    none = torch.zeros_like(count)
    scale.copy_(torch.where(found, lower, higher))
    count.copy_(torch.where(found | due, none, more))


def clipped(
    gradients: Gradients, settings: StepSettings, sharding: Sharding | None = None
) -> Gradients:
    """Return clipped gradients, as by PyTorch's `clip_grad_*`."""
    present = {name: g for name, g in gradients.items() if g is not None}
    if (limit := settings.clip_value) is not None:
        present = {n: g.clamp(min=-limit, max=limit) for n, g in present.items()}
    if settings.clip_norm is not None and present:
        if sharding is None:
            norms = torch.stack([torch.linalg.vector_norm(g) for g in present.values()])
        else:
            norms = sharding.norms(present)
        total = torch.linalg.vector_norm(norms)
        factor = torch.clamp(settings.clip_norm / (total + 1e-6), max=1.0)
        present = {name: g * factor for name, g in present.items()}
    return {**gradients, **present}


def added(totals: Gradients, found: Mapping[str, torch.Tensor | None]) -> Gradients:
    """Return the sums of two passes' gradients."""
    sums: Gradients = dict(totals)
    for name, gradient in found.items():
        before = sums.get(name)
        if before is None or gradient is None:
            sums[name] = gradient if before is None else before
        else:
            sums[name] = before + gradient
    return sums
