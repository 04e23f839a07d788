"""Costs of the nodes of a lowered graph, measured one by one or estimated.

Every distinct node is run once or a few times on operands of its own; never the whole
step. So a step can be planned on a machine that could not run it without a plan.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from mucudnn.errors import UnsupportedError
from mucudnn.ir.devices import ASSUMED, DeviceFigures
from mucudnn.ir.graph import Node
from mucudnn.ir.profile import Profile
from mucudnn.passes.liveness import rounded
from mucudnn.torch import internals
from mucudnn.torch.capture.undeclared_writes import SPOILS_AN_OPERAND
from mucudnn.torch.costs.meters import CpuMeter, CudaMeter, Links, meter_of
from mucudnn.torch.distributed.sharding import is_collective
from mucudnn.torch.execution.copies import bytes_of
from mucudnn.torch.execution.devices import autocast_off, device_of
from mucudnn.torch.execution.program import generator_of
from mucudnn.torch.lowering.lowered import (
    NOTHING,
    Call,
    Layout,
    Lowered,
    Number,
    Operand,
)
from mucudnn.torch.source_lines import storage_of

_VIEW_MS = 0.001

_FROM_ONE = frozenset(
    {
        torch.ops.aten._assert_async.default,
        torch.ops.aten._assert_async.msg,
        torch.ops.aten.linalg_ldl_solve.default,
        torch.ops.aten.linalg_lu_solve.default,
        torch.ops.aten.lu_unpack.default,
    }
)
"""Operations that count rows from one, as LAPACK does, or need true operands."""


_ONES = (0.5, 2.0, 7.0)
"""Values to try for tensors of one element, such as a share or a count of steps."""


_HEAVIEST = 4
"""Distinct nodes that run for a step while copies beside it are measured."""


@dataclass(frozen=True)
class KnownCosts:
    """Costs that were measured for one form of a graph, and serve another.

    Attributes:
        times: Times in ms by `call_key`.
        scratch: Bytes of scratch memory by `call_key`.
        network: Times in ms beside computation, of collectives, by `call_key`.
        links: Rates of copies; at most one entry.
    """

    times: dict[Any, float] = field(default_factory=dict)
    scratch: dict[Any, int] = field(default_factory=dict)
    network: dict[Any, float] = field(default_factory=dict)
    links: list[Links] = field(default_factory=list)


def measured(lowered: Lowered, known: KnownCosts | None = None) -> Profile:
    """Measure every distinct node alone, and copies to and from the host.

    What is known is not measured again, and is added to.

    Raises:
        UnsupportedError: A result has another layout or storage than in the graph,
            tensors are on several devices, or a node is a collective.
    """
    graph = lowered.graph
    meter = meter_of(device_of(lowered.layouts))
    keys = {
        n.name: call_key(lowered, n) for n in graph.nodes if not is_view(lowered, n)
    }
    ones: dict[Any, Node] = {}
    for name, key in keys.items():
        ones.setdefault(key, graph.by_name[name])
    known = known or KnownCosts()
    with torch.no_grad(), autocast_off():
        new = {key: node for key, node in ones.items() if key not in known.times}
        for node in new.values():
            # Collectives are known if all ranks have measured them together.
            if is_collective(node.op):
                raise UnsupportedError(
                    f"{node.name} ({node.op}) exchanges data with other ranks, which "
                    "do not measure it now; train_step of a model under fully_shard or "
                    "DistributedDataParallel plans collectives"
                )
        times, scratch = costs_of(lowered, new)
        known.times.update(times)
        known.scratch.update(scratch)
        if not known.links:
            heaviest = partial(_heaviest, lowered, ones, keys, known.times)
            known.links.append(meter.links(heaviest))
    times, scratch, (links,) = known.times, known.scratch, known.links
    return Profile(
        node_ms={
            node.name: times[keys[node.name]] if node.name in keys else _VIEW_MS
            for node in graph.nodes
        },
        workspaces=workspaces_of(lowered, {n: scratch[k] for n, k in keys.items()}),
        fronts={},
        **asdict(links),
        network_ms={n: known.network[k] for n, k in keys.items() if k in known.network},
    )


def costs_of(
    lowered: Lowered, nodes: Mapping[Any, Node]
) -> tuple[dict[Any, float], dict[Any, int]]:
    """Measure times in ms and bytes of scratch memory of some nodes, by key.

    Raises:
        UnsupportedError: A result has another layout or storage than in the graph, or
            tensors are on several devices.
    """
    meter = meter_of(device_of(lowered.layouts))
    times: dict[Any, float] = {}
    wrong: dict[Any, WrongResultsError] = {}
    failed: tuple[Node, RuntimeError] | None = None
    for key, node in nodes.items():
        if wrong:
            # A kernel that is given too few bytes may read beyond them.
            producers = lowered.graph.producers
            made = (producers[name] for name in node.inputs if name in producers)
            if not wrong.keys().isdisjoint(call_key(lowered, n) for n in made):
                continue
        try:
            operands = operands_of(lowered, node)
            _check(lowered, node, operands, _check_pure(lowered, node, operands))
            if not wrong:
                run = partial(evaluate, _call_in_place(lowered, node), operands)
                times[key] = meter.time_ms(run)
        except WrongResultsError as e:
            wrong[key] = e
        except RuntimeError as e:  # perhaps of operands that are wrong themselves
            failed = failed or (node, e)
    if wrong:
        first, *_ = errors = [*wrong.values()]
        found = {name: mine for e in errors for name, mine in e.found.items()}
        raise WrongResultsError(str(first), found)
    if failed is not None:
        node, error = failed
        if not isinstance(error, torch.OutOfMemoryError):
            error.args = (
                f"{node.name} ({lowered.calls[node.name].function}): {error}",
            )
        raise error
    return times, _scratch(meter, lowered, nodes)


def evaluate(call: Call, operands: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Run the call of a node; return its outputs."""
    args, kwargs = evaluated([call.args, dict(call.kwargs)], operands)
    found = call.function(*args, **kwargs)
    return tuple(found if path is None else found[path] for path in call.results)


def evaluated(leaf: Any, operands: Sequence[torch.Tensor]) -> Any:
    """Return an argument with the values of operands in their place."""
    # No closure, which would keep operands until they are collected.
    match leaf:
        case Operand(index):
            return operands[index]
        case Number(function, args):
            return function(*(evaluated(a, operands) for a in args))
        case list() | tuple():
            return type(leaf)([evaluated(a, operands) for a in leaf])
        case dict():
            return {key: evaluated(a, operands) for key, a in leaf.items()}
        case _:
            return leaf


def call_key(lowered: Lowered, node: Node) -> Any:
    """Return a key that is equal for nodes of the same cost."""
    call = lowered.calls[node.name]
    layouts = tuple(lowered.layouts[name] for name in node.inputs)
    arguments = repr((call.args, dict(call.kwargs)))
    return call.function, layouts, arguments, call.results, bool(node.mutates)


def _heaviest(
    lowered: Lowered,
    ones: Mapping[Any, Node],
    keys: Mapping[str, Any],
    times: Mapping[Any, float],
) -> Callable[[], object]:
    """Return a call that runs the few nodes a step spends most of its time in."""
    count = Counter(keys.values())
    order = sorted(ones, key=lambda key: count[key] * times[key], reverse=True)
    alone = [key for key in order if not is_collective(ones[key].op)]
    nodes = [ones[key] for key in alone[:_HEAVIEST]]
    calls = [
        partial(evaluate, lowered.calls[node.name], operands_of(lowered, node))
        for node in nodes
    ]
    return lambda: [call() for call in calls]


def operands_of(lowered: Lowered, node: Node) -> list[torch.Tensor]:
    """Return tensors like a node's inputs: with shared storages, integers zero.

    A single value is one from which the numbers of the call can be computed.
    """
    call = lowered.calls[node.name]
    found = _filled(lowered, node, _ONES[0])
    for one in _ONES[1:]:
        if _has_numbers(call, found):
            break
        found = _filled(lowered, node, one)
    return found


def _has_numbers(call: Call, operands: Sequence[torch.Tensor]) -> bool:
    """Return whether all numbers of a call are real, such as no root of -1."""
    leaves = pytree.tree_leaves((call.args, dict(call.kwargs)))
    try:
        values = [evaluated(v, operands) for v in leaves if isinstance(v, Number)]
    except (ArithmeticError, ValueError):
        return False
    return not any(
        isinstance(v, complex) or (isinstance(v, float) and math.isnan(v))
        for v in values
    )


def _filled(lowered: Lowered, node: Node, one: float) -> list[torch.Tensor]:
    """Return tensors like a node's inputs; a single element has the value `one`."""
    graph = lowered.graph
    call = lowered.calls[node.name]
    generator = torch.Generator().manual_seed(0)
    made: dict[str, torch.Tensor] = {}
    found = []
    for i, name in enumerate(node.inputs):
        layout, storage = lowered.layouts[name], graph.storages[name]
        # Operands that share a storage in the graph share it here.
        if storage not in made:
            made[storage] = torch.zeros(
                graph.tensors[storage].nbytes, dtype=torch.uint8, device=layout.device
            )
        size = layout.dtype.itemsize
        flat = made[storage][: made[storage].numel() // size * size].view(layout.dtype)
        if layout.dtype.is_floating_point:
            if flat.numel() == 1:
                flat.fill_(one)
            elif size > 1:
                flat.uniform_(0.1, 0.9)
            else:  # PyTorch draws no numbers of eight bits
                flat.copy_(torch.empty_like(flat, dtype=torch.half).uniform_(0.1, 0.9))
        elif call.function in _FROM_ONE:
            flat.fill_(1)
        view = flat.as_strided(layout.shape, layout.stride, layout.offset)
        if i in call.samples:
            view.copy_(call.samples[i].tensor(generator))
        found.append(layout.read(view))
    return found


def _call_in_place(lowered: Lowered, node: Node) -> Call:
    """Return the call that a program makes, which writes into a mutated input."""
    call = lowered.calls[node.name]
    if call.into is None or not node.mutates or len(node.outputs) != 1:
        return call
    alias = lowered.graph.tensors[node.outputs[0]].alias
    if alias not in node.inputs:
        return call
    place = node.inputs.index(alias)
    out = {} if call.first else {"out": Operand(place)}
    return replace(call, function=call.into, kwargs={**call.kwargs, **out})


_COMPARED = 1 << 18
"""Bytes up to which operands are compared: those of running statistics, of counts."""


def _check_pure(
    lowered: Lowered, node: Node, operands: Sequence[torch.Tensor]
) -> tuple[Any, ...]:
    """Run a node's call once; return its outputs.

    A write that the operation's schema does not declare would happen again wherever it
    is recomputed. It is found by the operands' version counters, which kernels of
    extensions and of cuDNN do not count, and by the bytes of small operands.
    """
    call, storages = lowered.calls[node.name], lowered.graph.storages
    written = {storages[name] for name in node.mutates}
    # One operand of each storage: views share bytes and version counters.
    pure = {
        storages[name]: operand
        for name, operand in zip(node.inputs, operands, strict=True)
        if storages[name] not in written
    }
    small = [t for t in pure.values() if t.untyped_storage().nbytes() <= _COMPARED]
    versions = [operand._version for operand in pure.values()]
    before = [bytes_of(operand).to("cpu", copy=True) for operand in small]
    outputs = evaluate(call, operands)
    if node.op in SPOILS_AN_OPERAND:
        return outputs
    if versions != [operand._version for operand in pure.values()] or not all(
        torch.equal(bytes_of(operand).cpu(), old)
        for operand, old in zip(small, before, strict=True)
    ):
        raise UnsupportedError(
            f"{node.name} ({call.function}) modifies an operand that its schema does "
            "not declare as mutated; declare it with mutates_args, or return a new "
            "tensor"
        )
    return outputs


def _check(
    lowered: Lowered,
    node: Node,
    operands: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
) -> None:
    """Refuse results with other storages or layouts than the graph has."""
    given = set(map(storage_of, operands))
    call = lowered.calls[node.name]
    wrong: dict[int | None, Layout] = {}
    messages = []
    for name, path, tensor in zip(node.outputs, call.results, outputs, strict=True):
        place = storage_of(tensor)
        shares = place in given
        given.add(place)  # two results may be one
        if not tensor.numel() or node.mutates:
            continue
        spec = lowered.graph.tensors[name]
        if shares != (spec.alias is not None):
            raise UnsupportedError(
                f"{node.name} ({call.function}) returned "
                f"{('a view' if shares else 'a copy')}, unlike when it was captured"
            )
        difference = _difference(tensor, lowered.layouts[name])
        nbytes = tensor.untyped_storage().nbytes()
        # Plans count whole units of alignment, within which storages may differ.
        if not difference and not shares and rounded(nbytes) > rounded(spec.nbytes):
            difference = f"a storage of {nbytes} bytes; its graph has {spec.nbytes}"
        if difference:
            wrong[path] = replace(Layout.of(tensor), nbytes=0 if shares else nbytes)
            messages.append(f"{node.name} ({call.function}) returns {difference}")
    if wrong:
        raise WrongResultsError(messages[0], {node.name.partition(".")[0]: wrong})


def _difference(tensor: torch.Tensor, expected: Layout) -> str:
    """Return how a result is other than expected; empty if it is not."""
    if tensor.dtype != expected.dtype:
        return f"{tensor.dtype}; its graph has {expected.dtype}"
    # Strides of axes of one have no meaning.
    steps = zip(tensor.shape, tensor.stride(), expected.stride, strict=False)
    if tensor.shape == expected.shape and all(a == b or n == 1 for n, a, b in steps):
        return ""
    return (
        f"shape {tuple(tensor.shape)} with strides {tensor.stride()}; its graph has "
        f"{expected.shape} with {expected.stride}"
    )


def _scratch(
    meter: CpuMeter | CudaMeter, lowered: Lowered, ones: Mapping[Any, Node]
) -> dict[Any, int]:
    """Return the most bytes that each node has in use beyond its new tensors."""

    def prepared(node: Node) -> Callable[[], object]:
        return partial(
            evaluate, _call_in_place(lowered, node), operands_of(lowered, node)
        )

    most = meter.most_bytes([partial(prepared, node) for node in ones.values()])
    tensors = lowered.graph.tensors
    found = {}
    for (key, node), nbytes in zip(ones.items(), most, strict=True):
        new = (t for t in node.outputs if tensors[t].alias is None)
        found[key] = max(0, nbytes - sum(tensors[name].nbytes for name in new))
    return found


def allocations_of_nodes(
    lowered: Lowered,
    workspaces: Mapping[str, int],
    known: dict[Any, Sequence[tuple[int, int]]],
) -> dict[str, Sequence[tuple[int, int]]]:
    """Return in which order nodes on CUDA allocate results and scratch memory.

    `known` has what was found before by `call_key`, and gets the rest.

    Returns:
        Node with several large pieces -> the number of an output, or a negative number
        of a piece of scratch memory, and its bytes, 0 where it is freed.
    """
    tensors, found = lowered.graph.tensors, {}
    for node in lowered.graph.nodes:
        scratch = workspaces.get(node.name, 0)
        new = [tensors[t].nbytes for t in node.outputs if tensors[t].alias is None]
        several = sum(nbytes >= _LARGE_PIECE for nbytes in new) > 1
        if not (several or scratch >= _LARGE_PIECE) or is_collective(node.op):
            continue
        key = call_key(lowered, node)
        if key not in known:
            known[key] = _pieces(lowered, node)
        found[node.name] = known[key]
    return found


def _pieces(lowered: Lowered, node: Node) -> list[tuple[int, int]]:
    """Run a node on CUDA, and return in which order it allocates."""
    outputs: list[torch.Tensor] = []
    call, operands = _call_in_place(lowered, node), operands_of(lowered, node)
    events: list[tuple[int, int]] = []
    alive: dict[int, int] = {}
    for place, nbytes in internals.allocations_of(
        lambda: outputs.extend(evaluate(call, operands)), device_of(lowered.layouts)
    ):
        if nbytes:
            alive[place] = len(events)
            events.append((-1 - len(events), nbytes))
        elif place in alive:
            events.append((events[alive.pop(place)][0], 0))
    # What is alive at the end is an output, or stays with a library: leave that out.
    for number, output in enumerate(outputs):
        at = alive.pop(output.untyped_storage().data_ptr(), None)
        if at is not None:
            events[at] = number, events[at][1]
    kept = {events[at][0] for at in alive.values()}
    return [event for event in events if event[0] not in kept]


_LARGE_PIECE = 1 << 20
"""Bytes from which the order of allocations matters: smaller pieces fill no gaps."""

_STATE_BYTES = 2 * rounded(5056)
"""Bytes of the CPU generator's state, twice: it is saved, set, and restored."""


def is_view(lowered: Lowered, node: Node) -> bool:
    """Return whether a node only makes views."""
    if lowered.calls[node.name] is NOTHING:
        return True
    aliases = [lowered.graph.tensors[name].alias for name in node.outputs]
    return bool(aliases) and not node.mutates and None not in aliases


def workspaces_of(lowered: Lowered, scratch: Mapping[str, int]) -> dict[str, int]:
    """Return scratch memory by node, generator states added."""
    found = {name: nbytes for name, nbytes in scratch.items() if nbytes}
    for node in lowered.graph.nodes:
        if lowered.calls[node.name].random and generator_of(lowered, node.name) is None:
            found[node.name] = found.get(node.name, 0) + _STATE_BYTES
    return found


class WrongResultsError(UnsupportedError):
    """Kernels that return other types or layouts than their graph has.

    Attributes:
        found: Node of PyTorch's graph -> place among its results, None for all of it ->
            its real layout.
    """

    def __init__(
        self, message: str, found: Mapping[str, Mapping[int | None, Layout]]
    ) -> None:
        super().__init__(message)
        self.found = found


def estimated(lowered: Lowered, device: DeviceFigures) -> Profile:
    """Estimate every node by its roofline from published figures; run nothing.

    Products take the peak of their operands' type, with TF32 where PyTorch's switches
    allow it: by default in convolutions only. Scratch memory is not known: the profile
    only has that of generator states.
    """
    graph = lowered.graph

    def node_ms(node: Node) -> float:
        if is_view(lowered, node):
            return 0.0
        names = dict.fromkeys((*node.tensors, *node.mutates))
        traffic = sum(touched_bytes(lowered.layouts[name]) for name in names)
        seconds = max(
            _flops(lowered, node) / (_peak(lowered, node, device) * ASSUMED.matmul),
            traffic / (device.bandwidth.value * ASSUMED.memory),
        )
        return 1e3 * seconds + ASSUMED.launch_ms

    return Profile(
        node_ms={node.name: node_ms(node) for node in graph.nodes},
        workspaces=workspaces_of(lowered, {}),
        fronts={},
        out_bytes_per_ms=device.d2h.value / 1e3,
        in_bytes_per_ms=device.h2d.value / 1e3,
    )


def touched_bytes(layout: Layout) -> int:
    """Return the bytes that a kernel reads of a tensor, broadcast axes once."""
    sizes = zip(layout.shape, layout.stride, strict=True)
    count = math.prod(size for size, stride in sizes if stride)
    return count * int(layout.dtype.itemsize)


def _peak(lowered: Lowered, node: Node, device: DeviceFigures) -> float:
    """Return the device's highest rate for a node's operands."""
    if not node.inputs:
        return device.flops.value
    dtype = str(lowered.layouts[node.inputs[0]].dtype).removeprefix("torch.")
    convolves = "conv" in str(lowered.calls[node.name].function)
    tf32 = internals.allows_tf32("conv" if convolves else "matmul")
    return device.peak(dtype, tf32=tf32)


def _flops(lowered: Lowered, node: Node) -> float:
    call = lowered.calls[node.name]
    count = flop_registry.get(getattr(call.function, "overloadpacket", None))
    if count is None:
        return 0.0
    here = torch.device("meta")
    meta = [replace(lowered.layouts[n], device=here).empty() for n in node.inputs]

    def value_of(number: Number) -> Any:
        try:
            return evaluated(number, meta)
        except RuntimeError:  # it follows from data, and changes no count
            return 1

    given = pytree.tree_map_only(Number, value_of, [call.args, dict(call.kwargs)])
    args, kwargs = evaluated(given, meta)
    out = call.function(*args, **kwargs)
    return float(count(*args, **kwargs, out_val=out))
