"""What the nodes of a lowered graph cost: measured alone, or estimated.

Every distinct node is run once or a few times on operands of its own; never the whole
step. So what a step would need need not be there to plan it.
"""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.flop_counter import flop_registry

from mucudnn.errors import UnsupportedError
from mucudnn.ir.devices import ASSUMED, DeviceFigures
from mucudnn.ir.graph import Node
from mucudnn.ir.profile import Profile
from mucudnn.passes.liveness import rounded
from mucudnn.torch.lowering.lowered import (
    NOTHING,
    Call,
    Layout,
    Lowered,
    Number,
    Operand,
)

__all__ = ["allocations", "call_key", "estimated", "evaluate", "measured"]

_VIEW_MS = 0.001
_REPEATS = 3
_ENOUGH_S = 0.5
_STATE_BYTES = 2 * rounded(5056)
"""Of the CPU generator's state, twice: it is read, and what was there is put back."""

_MARK = "mucudnn:"
_COPIED = 16 << 20


def measured(lowered: Lowered) -> Profile:
    """Run every distinct node alone, and copies to and from the host.

    Raises:
        UnsupportedError: A result does not lie where or as its graph says.
    """
    graph = lowered.graph
    keys = {
        n.name: call_key(lowered, n) for n in graph.nodes if not _is_view(lowered, n)
    }
    ones = {key: graph.by_name[name] for name, key in reversed(keys.items())}
    with torch.no_grad():
        times = {key: _time_ms(lowered, node) for key, node in ones.items()}
        scratch = _scratch(lowered, ones)
    rate = _copy_rate()
    return Profile(
        node_ms={
            node.name: times[keys[node.name]] if node.name in keys else _VIEW_MS
            for node in graph.nodes
        },
        workspaces=_workspaces(lowered, {n: scratch[k] for n, k in keys.items()}),
        fronts={},
        out_bytes_per_ms=rate,
        in_bytes_per_ms=rate,
    )


def estimated(lowered: Lowered, device: DeviceFigures) -> Profile:
    """Every node at its roofline, of published figures; nothing is run.

    Scratch memory is not known: the profile has none but for random states.
    """
    graph = lowered.graph

    def node_ms(node: Node) -> float:
        if _is_view(lowered, node):
            return 0.0
        names = dict.fromkeys((*node.tensors, *node.mutates))
        traffic = sum(_nbytes(lowered.layouts[name]) for name in names)
        seconds = max(
            _flops(lowered, node) / (device.flops.value * ASSUMED.matmul),
            traffic / (device.bandwidth.value * ASSUMED.memory),
        )
        return 1e3 * seconds + ASSUMED.launch_ms

    return Profile(
        node_ms={node.name: node_ms(node) for node in graph.nodes},
        workspaces=_workspaces(lowered, {}),
        fronts={},
        out_bytes_per_ms=device.out.value / 1e3,
        in_bytes_per_ms=device.back.value / 1e3,
    )


def evaluate(call: Call, operands: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Run one node; its outputs."""

    def value(leaf: Any) -> Any:
        match leaf:
            case Operand(index):
                return operands[index]
            case Number(function, args):
                return function(*map(value, args))
            case list() | tuple():
                return type(leaf)(map(value, leaf))
            case _:
                return leaf

    kwargs = {key: value(leaf) for key, leaf in call.kwargs.items()}
    found = call.function(*map(value, call.args), **kwargs)
    return tuple(found if path is None else found[path] for path in call.results)


def allocations(prof: profile) -> list[tuple[int, int, int]]:
    """What the allocator handed out and took back: time in ns, bytes, address."""
    found = []
    pending = list(prof.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending += event.children
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            found.append((event.start_time_ns, fields.alloc_size, fields.ptr))
    return sorted(found, key=lambda row: row[0])


def _is_view(lowered: Lowered, node: Node) -> bool:
    """Whether a node only gives other names to bytes that are there."""
    if lowered.calls[node.name] is NOTHING:
        return True
    aliases = [lowered.graph.tensors[name].alias for name in node.outputs]
    return bool(aliases) and not node.mutates and None not in aliases


def call_key(lowered: Lowered, node: Node) -> Any:
    """Equal for nodes that cost the same."""
    call = lowered.calls[node.name]
    layouts = tuple(lowered.layouts[name] for name in node.inputs)
    return call.function, layouts, repr((call.args, dict(call.kwargs))), call.results


def _operands(lowered: Lowered, node: Node) -> list[torch.Tensor]:
    """Tensors like a node's inputs: shared where theirs are, small integers zero."""
    graph = lowered.graph
    made: dict[str, torch.Tensor] = {}
    found = []
    for name in node.inputs:
        layout, storage = lowered.layouts[name], graph.storages[name]
        if storage not in made:
            made[storage] = torch.zeros(
                graph.tensors[storage].nbytes, dtype=torch.uint8, device=layout.device
            )
        size = layout.dtype.itemsize
        flat = made[storage][: made[storage].numel() // size * size].view(layout.dtype)
        if layout.dtype.is_floating_point:
            flat.fill_(1.0) if flat.numel() == 1 else flat.normal_()
        found.append(flat.as_strided(layout.shape, layout.stride, layout.offset))
    return found


def _time_ms(lowered: Lowered, node: Node) -> float:
    call, operands = lowered.calls[node.name], _operands(lowered, node)
    _check(lowered, node, operands, evaluate(call, operands))
    times: list[float] = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        evaluate(call, operands)
        times.append(time.perf_counter() - start)
        if sum(times) > _ENOUGH_S:
            break
    return 1e3 * statistics.median(times)


def _check(
    lowered: Lowered,
    node: Node,
    operands: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
) -> None:
    """Refuse results that share bytes, or lie, otherwise than the graph says.

    Raises:
        UnsupportedError: Names the node.
    """
    given = {tensor.untyped_storage().data_ptr() for tensor in operands}
    for name, tensor in zip(node.outputs, outputs, strict=True):
        expected = lowered.layouts[name]
        shares = tensor.untyped_storage().data_ptr() in given
        if not tensor.numel() or node.mutates:
            continue
        if shares != (lowered.graph.tensors[name].alias is not None):
            raise UnsupportedError(
                f"{node.name} ({lowered.calls[node.name].function}) returns "
                f"{'a view' if shares else 'a copy'} where its graph has the other"
            )
        if not _lies_as(tensor, expected):
            raise UnsupportedError(
                f"{node.name} ({lowered.calls[node.name].function}) returns shape "
                f"{tuple(tensor.shape)} with strides {tensor.stride()}; its graph has "
                f"{expected.shape} with {expected.stride}"
            )


def _lies_as(tensor: torch.Tensor, expected: Layout) -> bool:
    """Whether elements are where they should be: along an axis of one are no others."""
    return tuple(tensor.shape) == expected.shape and all(
        found == wanted
        for size, found, wanted in zip(
            tensor.shape, tensor.stride(), expected.stride, strict=True
        )
        if size != 1
    )


def _scratch(lowered: Lowered, ones: Mapping[Any, Node]) -> dict[Any, int]:
    """Bytes that each node has in use beyond its results, at most."""
    marks: dict[str, Any] = {}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        for number, (key, node) in enumerate(ones.items()):
            operands = _operands(lowered, node)
            marks[f"{_MARK}{number}"] = key
            with record_function(f"{_MARK}{number}"):
                outputs = evaluate(lowered.calls[node.name], operands)
            del operands, outputs
    events = allocations(prof)
    found = {}
    for name, start, stop in _spans(prof):
        node = ones[marks[name]]
        now = most = 0
        mine = set()
        for at, nbytes, address in events:
            if not start <= at <= stop:
                continue
            if nbytes > 0:
                mine.add(address)
            elif address not in mine:
                continue
            now += nbytes
            most = max(most, now)
        tensors = lowered.graph.tensors
        new = (t for t in node.outputs if node.mutates or tensors[t].alias is None)
        results = sum(tensors[name].nbytes for name in new)
        found[marks[name]] = max(0, most - results)
    return found


def _spans(prof: profile) -> list[tuple[str, int, int]]:
    """Name, begin and end of what was marked."""
    found = []
    pending = list(prof.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending += event.children
        if event.name.startswith(_MARK):
            found.append((event.name, event.start_time_ns, event.end_time_ns))
    return found


def _workspaces(lowered: Lowered, scratch: Mapping[str, int]) -> dict[str, int]:
    found = {name: nbytes for name, nbytes in scratch.items() if nbytes}
    for node in lowered.graph.nodes:
        if lowered.calls[node.name].random:
            found[node.name] = found.get(node.name, 0) + _STATE_BYTES
    return found


def _copy_rate() -> float:
    """Bytes a ms that one thread copies."""
    source = torch.ones(_COPIED, dtype=torch.uint8)
    target = torch.zeros_like(source)
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return _COPIED / (1e3 * statistics.median(times))


def _nbytes(layout: Layout) -> int:
    sizes = zip(layout.shape, layout.stride, strict=True)
    count = math.prod(size for size, stride in sizes if stride)
    return count * int(layout.dtype.itemsize)


def _flops(lowered: Lowered, node: Node) -> float:
    call = lowered.calls[node.name]
    count = flop_registry.get(getattr(call.function, "overloadpacket", None))
    if count is None:
        return 0.0
    meta = [
        torch.empty_strided(
            lowered.layouts[n].shape,
            lowered.layouts[n].stride,
            dtype=lowered.layouts[n].dtype,
            device="meta",
        )
        for n in node.inputs
    ]
    args = [meta[a.index] if isinstance(a, Operand) else a for a in call.args]
    out = call.function(*args, **call.kwargs)
    return float(count(*args, **call.kwargs, out_val=out))
