"""What the nodes of a lowered graph would cost, by published figures of a device."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from mucudnn.ir.devices import ASSUMED, DeviceFigures
from mucudnn.ir.graph import Node
from mucudnn.ir.profile import Profile
from mucudnn.torch.lowering.lowered import Layout, Lowered, Number, Operand
from mucudnn.torch.measurement.node_costs import is_view, workspaces_of

__all__ = ["estimated"]


def estimated(lowered: Lowered, device: DeviceFigures) -> Profile:
    """Every node at its roofline, of published figures; nothing is run.

    Scratch memory is not known: the profile has none but for random states.
    """
    graph = lowered.graph

    def node_ms(node: Node) -> float:
        if is_view(lowered, node):
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
        workspaces=workspaces_of(lowered, {}),
        fronts={},
        out_bytes_per_ms=device.out.value / 1e3,
        in_bytes_per_ms=device.back.value / 1e3,
    )


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
    args, kwargs = pytree.tree_map(
        partial(_known, meta), (call.args, dict(call.kwargs))
    )
    out = call.function(*args, **kwargs)
    return float(count(*args, **kwargs, out_val=out))


def _known(operands: Sequence[torch.Tensor], leaf: Any) -> Any:
    """Return an argument of a call, with 1 for a number that follows from data."""
    match leaf:
        case Operand(index):
            return operands[index]
        case Number():
            return 1
        case _:
            return leaf
