"""Capture of PyTorch's optimizers, and updates in place.

An optimizer is captured by running its own `step` on the tensors that replace its
parameters, gradients and state. An optimizer that decides by values, or counts in
Python, cannot be captured: its updates run eagerly behind the planned passes.
"""

import copy
import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mucudnn.errors import UnsupportedError
from mucudnn.ir.graph import Graph, Node, Phase
from mucudnn.ir.tensor import TensorSpec
from mucudnn.processes import uninterrupted
from mucudnn.torch.capture.many_tensor_updates import Merger
from mucudnn.torch.capture.python_state import is_alike
from mucudnn.torch.distributed.sharding import as_sharded, local_of
from mucudnn.torch.execution.cuda_memory import reserve_block
from mucudnn.torch.lowering.lowered import Call, Lowered, Operand
from mucudnn.torch.source_lines import storage_of

StateKey = tuple[int, int, str]
"""Index of a group, index of a parameter in it, and a key of the parameter's state."""


_MOMENTUM = "momentum_buffer"


_RATE = "lr"

_SMALL_BLOCK = 1 << 20
"""Bytes of a tensor up to which CUDA's allocator takes it from segments of 2 MiB."""


_OWN = frozenset({"param_groups", "state", "_opt_called"})
"""Attributes of every optimizer that a step may change."""


_DOUBLE = (float, int, np.float64)
"""Types of numbers with which Python computes in double precision, as a graph does."""


class UpdateNotRecordedError(UnsupportedError):
    """An optimizer's update depends on run-time values or on Python state."""


def has_plain_rate(group: Mapping[str, Any]) -> bool:
    """Return whether a graph computes with a group's learning rate as Python does."""
    rate = group.get(_RATE, 0.0)
    return type(rate) in _DOUBLE or isinstance(rate, torch.Tensor)


@contextmanager
def swapped(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    parameters: Mapping[str, torch.Tensor],
    gradients: Mapping[str, torch.Tensor | None],
    state: Mapping[StateKey, torch.Tensor],
    rates: Sequence[Any],
) -> Iterator[dict[StateKey, torch.Tensor]]:
    """Replace an optimizer's tensors by others.

    Yields:
        A mapping of the tensors that the optimizer has added to its state; it is filled
        when the context is left.

    Raises:
        UpdateNotRecordedError: The optimizer has changed something that is no tensor.
    """
    made: dict[StateKey, torch.Tensor] = {}
    groups, old_state = optimizer.param_groups, optimizer.state
    others: list[dict[str, Any]] = []
    of_parameter: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
    for i, group in enumerate(groups):
        _check_group(group, i)
        mine = []
        for j, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                # The model has replaced it. Without a gradient it is left alone.
                if parameter.grad is not None:
                    raise UnsupportedError(
                        f"parameter {j} of the optimizer's group {i} has a gradient "
                        "but does not belong to the model; create the optimizer from "
                        "the model's parameters only, or set the gradient to None"
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
    if not type(optimizer).__module__.startswith(torch.optim.__name__):
        _check_keys(old_state)
    before = {tensor: dict(found) for tensor, found in of_parameter.items()}
    own = _attributes(optimizer)
    try:
        optimizer.param_groups, optimizer.state = others, of_parameter
        yield made
        _check_keys(of_parameter)
        _check_unchanged(optimizer, own, groups, others, rates)
        own_storages = set(map(storage_of, parameters.values()))
        held = {id(value) for found in before.values() for value in found.values()}
        replaced = []
        for i, (group, other) in enumerate(zip(groups, others, strict=True)):
            pairs = zip(group["params"], other["params"], strict=False)
            for j, (parameter, tensor) in enumerate(pairs):
                old, now = before.get(tensor, {}), of_parameter.get(tensor, {})
                for key in old.keys() - now.keys():
                    raise UpdateNotRecordedError(
                        f"the optimizer removes {key!r} from its state in a step"
                    )
                outside = old_state.get(parameter, {})
                for key, value in now.items():
                    was = old.get(key)
                    if not isinstance(value, torch.Tensor):
                        if not is_alike(outside.get(key), value):
                            raise _changed(key)
                    elif value is not was:
                        if storage_of(value) in own_storages:
                            raise UpdateNotRecordedError(
                                f"the optimizer stores {key!r} in its state, which "
                                "shares memory with a parameter; store a clone"
                            )
                        # Another tensor of the state may be overwritten before this is
                        # read, as where two have changed places.
                        if id(value) in held or value._is_view():
                            value = value.clone()
                        replaced.append(((i, j, key), was, value))
        for place, was, value in replaced:
            if was is None:
                made[place] = value
                continue
            tensor = isinstance(was, torch.Tensor)
            if not tensor or (value.shape, value.dtype) != (was.shape, was.dtype):
                raise _changed(place[2])
            was.copy_(value)
    finally:
        # The recorder of the capture puts back what else has changed.
        optimizer.param_groups, optimizer.state = groups, old_state
        for tensor in parameters.values():
            tensor.grad = None


def _changed(key: str) -> UpdateNotRecordedError:
    return UpdateNotRecordedError(
        f"the optimizer changes {key!r} of its state in a step, which is not a "
        "tensor or changes its shape; a counter stored as torch.tensor(0.0) "
        "could be recorded"
    )


def _check_group(group: Mapping[str, Any], place: int) -> None:
    """Refuse settings whose update a graph would compute in another way."""
    if not has_plain_rate(group):
        raise UpdateNotRecordedError(
            f"the learning rate of the optimizer's group {place} is a "
            f"{type(group[_RATE]).__name__}, whose arithmetic differs from a float's; "
            "use float(lr)"
        )
    if group.get("differentiable"):
        raise UpdateNotRecordedError(
            "the optimizer has differentiable=True, so that autograd records its "
            "updates; create it without"
        )


def _one_by_one(group: Mapping[str, Any]) -> dict[str, Any]:
    """Turn off kernels over many tensors: each is updated once its gradient exists.

    Fused kernels stay: `record_fused` records them tensor by tensor.
    """
    return {"foreach": False} if "foreach" in group else {}


def _lent(key: str, value: Any) -> Any:
    """Return a copy of a container that a step may change; other values as they are."""
    if not isinstance(value, list | dict | set):
        return value
    if any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value)):
        raise UpdateNotRecordedError(
            f"the optimizer stores tensors in lists, in {key!r}"
        )
    return copy.deepcopy(value)


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the attributes of an optimizer's own, with containers copied."""
    return {
        key: value.copy() if type(value) in (dict, list, set) else value
        for key, value in vars(optimizer).items()
        if key not in _OWN
    }


def _check_keys(state: Mapping[Any, Any]) -> None:
    """Refuse state that belongs to no parameter."""
    for key, value in state.items():
        if not isinstance(key, torch.Tensor) and value != {}:
            raise UpdateNotRecordedError(
                f"the optimizer's state has {key!r}, which belongs to no parameter"
            )


def _check_unchanged(
    optimizer: torch.optim.Optimizer,
    own: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    others: Sequence[Mapping[str, Any]],
    rates: Sequence[Any],
) -> None:
    """Refuse updates that change Python state."""
    now = _attributes(optimizer)
    for key in now.keys() | own.keys():
        if key not in own or key not in now or not is_alike(own[key], now[key]):
            raise UpdateNotRecordedError(
                f"the optimizer changes its attribute {key!r} in a step"
            )
    for group, other, rate in zip(groups, others, rates, strict=True):
        fixed = {"params", *_one_by_one(group)}
        lent = {**group, _RATE: rate} if _RATE in group else group
        for key in other.keys() - fixed:
            if key not in lent or not is_alike(lent[key], other[key]):
                raise UpdateNotRecordedError(
                    f"the optimizer changes {key!r} of a group of parameters in a step"
                )


@uninterrupted()
def make_state(
    optimizer: torch.optim.Optimizer, own: Collection[int] | None = None
) -> None:
    """Create the state that PyTorch's optimizers create in their first step.

    A momentum that starts as the first gradient equals one that starts as zero, except
    with dampening. State that is not created here is created by the first step, which
    then has a plan of its own.

    `own` has the `id` of each parameter to create state for; None is all of them.
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
        return  # another class's `_init_group` may do something else
    # The largest parameter's state tells the size of all others, which are cut from one
    # block of CUDA's allocator: segments of 20 MiB would leave a tenth of them unused.
    largest = max(missing, key=lambda one: one[1].nbytes)
    _create_state(optimizer, init, [largest])
    parameter = local_of(largest[1])
    if parameter.is_cuda and parameter.nbytes:
        made = map(local_of, optimizer.state.get(largest[1], {}).values())
        each = sum(v.nbytes for v in made if isinstance(v, torch.Tensor) and v.is_cuda)
        sizes = (local_of(p).nbytes for _, p in missing)
        rest = sum(n for n in sizes if n > _SMALL_BLOCK) - parameter.nbytes
        if rest > 0:
            reserve_block(parameter.device, rest * each // parameter.nbytes)
    _create_state(optimizer, init, missing)


def _create_state(
    optimizer: torch.optim.Optimizer,
    init: Callable[..., Any],
    missing: Sequence[tuple[dict[str, Any], torch.Tensor]],
) -> None:
    """Create the state of parameters, each with its group, that have none."""
    count = len(inspect.signature(init).parameters) - 1
    with _any_gradients([p for _, p in missing]), torch.no_grad():
        for group, parameter in missing:
            init({**group, "params": [parameter]}, *([] for _ in range(count)))
    for group, parameter in missing:
        if not isinstance(optimizer, torch.optim.SGD) or group["dampening"]:
            continue
        if group["momentum"] and optimizer.state[parameter].get(_MOMENTUM) is None:
            value = parameter.detach()
            if not is_traceable_wrapper_subclass(value):
                value = value.as_subclass(torch.Tensor)  # as gradients are
            optimizer.state[parameter][_MOMENTUM] = torch.zeros_like(value)


@contextmanager
def with_state(
    optimizer: torch.optim.Optimizer, made: Mapping[StateKey, torch.Tensor]
) -> Iterator[None]:
    """Give an optimizer zeros for state that its next step will make."""
    before = optimizer.state
    optimizer.state = defaultdict(dict, {p: dict(s) for p, s in before.items()})
    try:
        for (i, j, key), like in made.items():
            zeros = torch.empty_strided(
                like.shape, like.stride(), dtype=like.dtype, device=like.device
            ).zero_()
            optimizer.state[optimizer.param_groups[i]["params"][j]][key] = zeros
        yield
    finally:
        optimizer.state = before


@contextmanager
def _any_gradients(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Give parameters without a gradient one that takes no memory."""
    bare = [p for p in parameters if p.grad is None]
    try:
        for parameter in bare:
            zero = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
            own = zero.expand_as(local_of(parameter))
            parameter.grad = as_sharded(own, parameter)
        yield
    finally:
        for parameter in bare:
            parameter.grad = None


# Updates in place.
#
# A functional graph returns new parameters, buffers and state beside the old ones. Here
# a new value is computed in the memory of the old one where possible, and copied there
# otherwise. Updates run as soon as their operands exist, so that gradients are freed
# early. Buffers change after the backward pass: recomputation until then needs the old
# values.


def with_updates(
    lowered: Lowered, late: frozenset[str], together: float | None = None
) -> Lowered:
    """Return the step with its new values stored in its inputs.

    Args:
        lowered: The step; its results are those to return, and then for each input the
            input itself or its new value.
        late: Inputs that are written after the backward pass.
        together: Bytes of gradients up to which parameters are updated by one call;
            None for an operation of its own for each tensor.
    """
    count = len(lowered.results) - len(lowered.inputs)
    stores = {
        target: value
        for target, value in zip(lowered.inputs, lowered.results[count:], strict=True)
        if target is not None and isinstance(value, str) and value != target
    }
    returned = lowered.results[:count]
    writer = _Writer(lowered, stores)
    nodes, tensors = writer.written()
    made = {name for node in nodes for name in node.outputs}
    asked = tuple(dict.fromkeys(r for r in returned if r in made))
    merger = None
    if together is not None:
        readers = Counter(name for node in nodes for name in node.inputs)
        results = frozenset((*returned, *stores.values()))
        merger = Merger(writer.calls, tensors, lowered.layouts, readers, results)
    ordered = _ordered(lowered.graph, nodes, stores, late, merger, together or 0.0)
    graph = Graph(tensors, ordered, asked)
    return replace(lowered, graph=graph, calls=writer.calls, results=returned)


class _Writer:
    """Writes the nodes that store new values, in place where possible."""

    def __init__(self, lowered: Lowered, stores: Mapping[str, str]) -> None:
        self.calls: dict[str, Call] = dict(lowered.calls)
        self._lowered = lowered
        self._graph = lowered.graph
        self._stores = stores
        self._in_place: dict[str, str] = {}  # value -> the input it overwrites
        self._read: dict[str, list[int]] = {}  # storage -> positions that read it
        for position, node in enumerate(self._graph.nodes):
            for name in node.inputs:
                storage = self._graph.storages[name]
                self._read.setdefault(storage, []).append(position)
        self._times = Counter(stores.values())

    def written(self) -> tuple[list[Node], dict[str, TensorSpec]]:
        """Return all nodes, in a valid order, and all tensors."""
        self._update_fused()
        copied = [pair for pair in self._stores.items() if not self._overwrites(*pair)]
        tensors = dict(self._graph.tensors)
        for value, target in self._in_place.items():
            tensors[value] = replace(tensors[value], alias=target)
        nodes = [self._node(node) for node in self._graph.nodes]
        return nodes + [self._copy(*pair) for pair in copied], tensors

    def _node(self, node: Node) -> Node:
        targets = [self._in_place[n] for n in node.outputs if n in self._in_place]
        if not targets:
            return node
        inputs = dict.fromkeys((*node.inputs, *targets))
        return replace(node, op="store", inputs=tuple(inputs), mutates=tuple(targets))

    def _update_fused(self) -> None:
        """Have fused updates write their operands, unless these are read later."""
        graph, layouts = self._graph, self._lowered.layouts
        for position, node in enumerate(graph.nodes):
            call = self.calls[node.name]
            targets = [node.inputs[place] for place in call.stores]
            pairs = list(zip(node.outputs, targets, strict=False))
            if targets and all(
                self._stores.get(target) == value
                and self._times[value] == 1
                and layouts[value] == layouts[target]
                and max(self._read[graph.storages[target]]) <= position
                for value, target in pairs
            ):
                self._in_place.update(pairs)
                function = call.into or call.function
                self.calls[node.name] = replace(call, function=function, into=None)

    def _copy(self, target: str, value: str) -> Node:
        name = f"store.{target}"
        self.calls[name] = Call(
            torch.ops.aten.copy_.default, (Operand(0), Operand(1)), {}, ()
        )
        return Node(
            name, "store", (target, value), (), phase=Phase.UPDATE, mutates=(target,)
        )

    def _overwrites(self, target: str, value: str) -> bool:
        """Compute a value, and its sole operands, in place; return False if unsafe."""
        if self._in_place.get(value) == target:
            return True
        if self._times[value] > 1 or not self._may(target, value):
            return False
        found: str | None = value
        while found is not None:
            self._in_place[found] = target
            found = self._only_operand(target, found)
        return True

    def _may(self, target: str, value: str) -> bool:
        """Return whether a value may overwrite an input, which is not read later."""
        graph, layouts = self._graph, self._lowered.layouts
        node = graph.producers.get(value)
        if node is None or node.phase is not Phase.UPDATE or value in self._in_place:
            return False
        call = self.calls[node.name]
        storage = graph.storages[target]
        same = [name for name in node.inputs if graph.storages[name] == storage]
        first = call.args[0] == Operand(0) and node.inputs[0] == target
        return (
            call.into is not None
            and not call.stores
            and (first or not call.first)
            and graph.tensors[value].alias is None
            and layouts[value] == layouts[target]
            and graph.tensors[value].nbytes == graph.tensors[target].nbytes
            and all(name == target for name in same)
            and max(self._read.get(storage, [-1])) <= graph.positions[node.name]
        )

    def _only_operand(self, target: str, value: str) -> str | None:
        """Return an operand without other readers that may be computed in place too."""
        graph = self._graph
        node = graph.producers[value]
        if any(graph.storages[t] == graph.storages[target] for t in node.inputs):
            return None  # the old value is still read
        for name in node.inputs:
            alone = len(graph.readers[name]) == 1 and name not in self._times
            if alone and self._may(target, name):
                return name
        return None


def _ordered(
    graph: Graph,
    nodes: Sequence[Node],
    stores: Mapping[str, str],
    late: frozenset[str],
    merger: Merger | None,
    together: float,
) -> tuple[Node, ...]:
    """Move updates right behind the last node that they depend on.

    With a merger, updates wait for those of other parameters, for so many bytes of
    gradients, and are merged.
    """
    main = [node for node in nodes if node.phase is not Phase.UPDATE]
    rest = [node for node in nodes if node.phase is Phase.UPDATE]
    at = {node.name: i for i, node in enumerate(main)}
    storages = graph.storages
    producer = {name: node for node in nodes for name in node.outputs}
    before = _before(rest, storages, producer)
    draws = [node for node in rest if node.traits.random]
    for first, node in pairwise(draws):  # numbers are drawn in the optimizer's order
        before[node.name].append(first)
    last_draw = max((at[n.name] for n in main if n.traits.random), default=-1)
    # A gradient may be made by one node and added to by later ones, as the compiled
    # gradient of an embedding is: its last writer counts, not its producer.
    readers: dict[str, int] = {}
    writers: dict[str, int] = {}
    for node in main:
        for name in node.inputs:
            readers[storages[name]] = at[node.name]
        for name in node.mutates:
            writers[storages[name]] = at[node.name]
    anchors: dict[str, int] = {}
    for node in rest:  # its dependencies come first in `rest`
        waits = [anchors.get(n.name, at.get(n.name, -1)) for n in before[node.name]]
        waits += [readers.get(storages[t], -1) for t in node.mutates]
        waits += [writers.get(storages[t], -1) for t in node.inputs]
        if any(t in late for t in node.mutates):
            waits.append(len(main) - 1)
        if node.traits.random:
            waits.append(last_draw)
        anchors[node.name] = max(waits, default=-1)
    read = {name for node in rest for name in node.inputs}
    sinks = [n for n in rest if n.mutates and read.isdisjoint(n.outputs)]
    behind: dict[int, list[Node]] = {}
    seen = set(at)
    for sink in sorted(sinks, key=lambda node: anchors[node.name]):
        behind.setdefault(anchors[sink.name], []).extend(
            with_dependencies(sink, before, seen)
        )
    last = [x for n in rest for x in with_dependencies(n, before, seen)]
    if merger is not None:
        nbytes = {n: graph.tensors[n].nbytes for node in main for n in node.outputs}
        behind = {
            anchor: merger.merged(updates, before)
            for anchor, updates in _collected(behind, nbytes, together).items()
        }
    found = list(behind.get(-1, ()))
    for i, node in enumerate(main):
        found += (node, *behind.get(i, ()))
    return (*found, *last)


def _collected(
    behind: Mapping[int, Sequence[Node]], nbytes: Mapping[str, int], together: float
) -> dict[int, list[Node]]:
    """Return updates by the node that they follow, with some moved behind a later node.

    At one position are updates of at most `together` bytes of gradients.
    """
    found: dict[int, list[Node]] = {}
    waiting: list[Node] = []
    last, waiting_bytes = -1, 0
    for anchor in sorted(behind):
        read = {n for node in behind[anchor] for n in node.inputs if n in nbytes}
        new_bytes = sum(nbytes[name] for name in read)
        if waiting and waiting_bytes + new_bytes > together:
            found[last], waiting, waiting_bytes = waiting, [], 0
        waiting += behind[anchor]
        waiting_bytes += new_bytes
        last = anchor
    return {**found, last: waiting} if waiting else found


def _before(
    rest: Sequence[Node], storages: Mapping[str, str], producer: Mapping[str, Node]
) -> dict[str, list[Node]]:
    """Return the nodes that each update depends on, by what it reads and writes."""
    found = {}
    readers: dict[str, list[Node]] = {}
    for node in rest:
        found[node.name] = [producer[t] for t in node.inputs if t in producer]
        for target in node.mutates:
            found[node.name] += readers.get(storages[target], ())
        for name in node.inputs:
            readers.setdefault(storages[name], []).append(node)
    return found


def with_dependencies(
    node: Node, before: Mapping[str, list[Node]], seen: set[str]
) -> list[Node]:
    """Return a node behind its dependencies that have not been seen yet."""
    found: list[Node] = []
    pending = [node]
    while pending:
        top = pending[-1]
        # Of a node that has been seen, all dependencies have.
        if missing := [n for n in before[top.name] if n.name not in seen]:
            pending += missing
            continue
        pending.pop()
        if top.name not in seen:
            seen.add(top.name)
            found.append(top)
    return found
