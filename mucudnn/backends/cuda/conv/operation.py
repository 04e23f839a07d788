"""The operation graph of one convolution: three tensors and one node."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from mucudnn.backends.cuda._cudnn import Calls
from mucudnn.backends.cuda._enums import (
    Attribute,
    AttributeType,
    ConvolutionMode,
    DataType,
    DescriptorType,
)
from mucudnn.backends.cuda.conv.geometry import Geometry
from mucudnn.backends.cuda.descriptors import Descriptor
from mucudnn.ir.conv import ConvProblem, Direction

__all__ = [
    "ALIGNMENT",
    "UIDS",
    "convolution",
    "graph_of",
    "operation_graph",
    "tensor_of",
]

ALIGNMENT = 16
"""Bytes to which tensor-core engines need operands aligned."""

UIDS: Mapping[str, int] = MappingProxyType({"x": 1, "w": 2, "y": 3})
"""Ids of the tensors in a variant pack."""


@dataclass(frozen=True, slots=True)
class _Node:
    """Descriptor type and attributes of the node of one direction."""

    kind: DescriptorType
    alpha: Attribute
    beta: Attribute
    convolution: Attribute
    tensors: Mapping[str, Attribute]


def _node(
    kind: DescriptorType, prefix: str, x: str = "X", w: str = "W", y: str = "Y"
) -> _Node:
    def attribute(name: str) -> Attribute:
        return Attribute[f"OPERATION_CONVOLUTION_{prefix}_{name}"]

    return _Node(
        kind,
        attribute("ALPHA"),
        attribute("BETA"),
        attribute("CONV_DESC"),
        {"x": attribute(x), "w": attribute(w), "y": attribute(y)},
    )


_NODES: Mapping[Direction, _Node] = MappingProxyType(
    {
        Direction.FORWARD: _node(
            DescriptorType.OPERATION_CONVOLUTION_FORWARD, "FORWARD"
        ),
        Direction.BACKWARD_DATA: _node(
            DescriptorType.OPERATION_CONVOLUTION_BACKWARD_DATA, "BWD_DATA", "DX", y="DY"
        ),
        Direction.BACKWARD_FILTER: _node(
            DescriptorType.OPERATION_CONVOLUTION_BACKWARD_FILTER,
            "BWD_FILTER",
            w="DW",
            y="DY",
        ),
    }
)


def operation_graph(
    calls: Calls,
    problem: ConvProblem,
    *,
    accumulate: bool,
    alignment: int = ALIGNMENT,
    handle: int | None = None,
) -> Descriptor:
    """Return a finalized graph: out = convolution + (out if `accumulate`).

    Groups need no attribute: the filter has C // groups channels. All operands'
    addresses are multiples of `alignment`; `handle` is None without a device.
    """
    geometry, node = Geometry.of(problem), _NODES[problem.direction]
    operation = Descriptor(calls, node.kind)
    operation.set(node.alpha, 1.0)
    operation.set(node.beta, 1.0 if accumulate else 0.0)
    operation.set(node.convolution, convolution(calls, geometry))
    shapes = {"x": geometry.x, "w": geometry.w, "y": geometry.y}
    for name, shape in shapes.items():
        tensor = tensor_of(calls, geometry, UIDS[name], shape, alignment)
        operation.set(node.tensors[name], tensor)
    return graph_of(calls, [operation.finalize()], handle)


def graph_of(
    calls: Calls, operations: Sequence[Descriptor], handle: int | None
) -> Descriptor:
    """Return a finalized graph of finalized operations, in order."""
    graph = Descriptor(calls, DescriptorType.OPERATIONGRAPH)
    graph.set(Attribute.OPERATIONGRAPH_OPS, *operations)
    if handle is not None:
        kind = AttributeType.HANDLE
        graph.set(Attribute.OPERATIONGRAPH_HANDLE, handle, kind=kind)
    return graph.finalize()


def convolution(calls: Calls, geometry: Geometry) -> Descriptor:
    """Return the finalized descriptor of strides, padding and dilation."""
    found = Descriptor(calls, DescriptorType.CONVOLUTION)
    found.set(Attribute.CONVOLUTION_COMP_TYPE, geometry.compute_type)
    mode = ConvolutionMode.CROSS_CORRELATION
    found.set(Attribute.CONVOLUTION_CONV_MODE, mode)
    found.set(Attribute.CONVOLUTION_SPATIAL_DIMS, len(geometry.stride))
    found.set(Attribute.CONVOLUTION_DILATIONS, *geometry.dilation)
    found.set(Attribute.CONVOLUTION_FILTER_STRIDES, *geometry.stride)
    found.set(Attribute.CONVOLUTION_PRE_PADDINGS, *geometry.padding)
    found.set(Attribute.CONVOLUTION_POST_PADDINGS, *geometry.padding)
    return found.finalize()


def tensor_of(
    calls: Calls,
    geometry: Geometry,
    uid: int,
    shape: tuple[int, ...],
    alignment: int,
    data_type: DataType | None = None,
    *,
    virtual: bool = False,
) -> Descriptor:
    """Return the finalized descriptor of a dense tensor.

    Args:
        calls: The library.
        geometry: Source of the layout, and of the type unless given.
        uid: Id in a variant pack.
        shape: Shape as (N, C, *spatial).
        alignment: Alignment of the address in bytes.
        data_type: Type of the elements.
        virtual: Whether the tensor is an intermediate that is never in memory.
    """
    tensor = Descriptor(calls, DescriptorType.TENSOR)
    kind = geometry.data_type if data_type is None else data_type
    tensor.set(Attribute.TENSOR_DATA_TYPE, kind)
    if virtual:
        tensor.set(Attribute.TENSOR_IS_VIRTUAL, virtual)
    tensor.set(Attribute.TENSOR_UNIQUE_ID, uid)
    tensor.set(Attribute.TENSOR_BYTE_ALIGNMENT, alignment)
    tensor.set(Attribute.TENSOR_DIMENSIONS, *shape)
    tensor.set(Attribute.TENSOR_STRIDES, *geometry.strides(shape))
    return tensor.finalize()
