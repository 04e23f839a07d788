"""The operation graph of one convolution: three tensors and one node."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mucudnn.backends.cuda._cudnn import Calls
from mucudnn.backends.cuda._enums import (
    Attribute,
    AttributeType,
    ConvolutionMode,
    DescriptorType,
)
from mucudnn.backends.cuda.conv.geometry import Geometry
from mucudnn.backends.cuda.descriptors import Descriptor
from mucudnn.ir.conv import ConvProblem, Direction

__all__ = ["ALIGNMENT", "UIDS", "operation_graph"]

ALIGNMENT = 16
"""Bytes that tensor-core engines want operands aligned to."""

UIDS: Mapping[str, int] = MappingProxyType({"x": 1, "w": 2, "y": 3})
"""Names of the tensors in a variant pack."""


@dataclass(frozen=True, slots=True)
class _Node:
    """Attributes of the node of one direction."""

    kind: DescriptorType
    alpha: Attribute
    beta: Attribute
    convolution: Attribute
    tensors: Mapping[str, Attribute]


_NODES: Mapping[Direction, _Node] = MappingProxyType(
    {
        Direction.FORWARD: _Node(
            DescriptorType.OPERATION_CONVOLUTION_FORWARD,
            Attribute.OPERATION_CONVOLUTION_FORWARD_ALPHA,
            Attribute.OPERATION_CONVOLUTION_FORWARD_BETA,
            Attribute.OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
            {
                "x": Attribute.OPERATION_CONVOLUTION_FORWARD_X,
                "w": Attribute.OPERATION_CONVOLUTION_FORWARD_W,
                "y": Attribute.OPERATION_CONVOLUTION_FORWARD_Y,
            },
        ),
        Direction.BACKWARD_DATA: _Node(
            DescriptorType.OPERATION_CONVOLUTION_BACKWARD_DATA,
            Attribute.OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
            Attribute.OPERATION_CONVOLUTION_BWD_DATA_BETA,
            Attribute.OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
            {
                "x": Attribute.OPERATION_CONVOLUTION_BWD_DATA_DX,
                "w": Attribute.OPERATION_CONVOLUTION_BWD_DATA_W,
                "y": Attribute.OPERATION_CONVOLUTION_BWD_DATA_DY,
            },
        ),
        Direction.BACKWARD_FILTER: _Node(
            DescriptorType.OPERATION_CONVOLUTION_BACKWARD_FILTER,
            Attribute.OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
            Attribute.OPERATION_CONVOLUTION_BWD_FILTER_BETA,
            Attribute.OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
            {
                "x": Attribute.OPERATION_CONVOLUTION_BWD_FILTER_X,
                "w": Attribute.OPERATION_CONVOLUTION_BWD_FILTER_DW,
                "y": Attribute.OPERATION_CONVOLUTION_BWD_FILTER_DY,
            },
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
    """A finalized graph: out = convolution + (out if `accumulate`).

    Groups need no attribute: the filter has C // groups channels.

    Args:
        calls: The library.
        problem: What to compute.
        accumulate: Whether beta is 1 instead of 0.
        alignment: Bytes that all operands' addresses are multiples of.
        handle: cuDNN handle; None where there is no device.

    Raises:
        UnsupportedError: cuDNN does not have such a convolution.
    """
    geometry, node = Geometry.of(problem), _NODES[problem.direction]
    operation = Descriptor(calls, node.kind)
    operation.set(node.alpha, AttributeType.FLOAT, 1.0)
    operation.set(node.beta, AttributeType.FLOAT, 1.0 if accumulate else 0.0)
    operation.set(
        node.convolution,
        AttributeType.BACKEND_DESCRIPTOR,
        _convolution(calls, geometry),
    )
    shapes = {"x": geometry.x, "w": geometry.w, "y": geometry.y}
    for name, shape in shapes.items():
        tensor = _tensor(calls, geometry, UIDS[name], shape, alignment)
        operation.set(node.tensors[name], AttributeType.BACKEND_DESCRIPTOR, tensor)
    graph = Descriptor(calls, DescriptorType.OPERATIONGRAPH)
    graph.set(
        Attribute.OPERATIONGRAPH_OPS,
        AttributeType.BACKEND_DESCRIPTOR,
        operation.finalize(),
    )
    if handle is not None:
        graph.set(Attribute.OPERATIONGRAPH_HANDLE, AttributeType.HANDLE, handle)
    return graph.finalize()


def _convolution(calls: Calls, geometry: Geometry) -> Descriptor:
    convolution = Descriptor(calls, DescriptorType.CONVOLUTION)
    convolution.set(
        Attribute.CONVOLUTION_COMP_TYPE,
        AttributeType.DATA_TYPE,
        geometry.compute_type,
    )
    convolution.set(
        Attribute.CONVOLUTION_CONV_MODE,
        AttributeType.CONVOLUTION_MODE,
        ConvolutionMode.CROSS_CORRELATION,
    )
    spatial = len(geometry.stride)
    for attribute, values in (
        (Attribute.CONVOLUTION_SPATIAL_DIMS, (spatial,)),
        (Attribute.CONVOLUTION_DILATIONS, geometry.dilation),
        (Attribute.CONVOLUTION_FILTER_STRIDES, geometry.stride),
        (Attribute.CONVOLUTION_PRE_PADDINGS, geometry.padding),
        (Attribute.CONVOLUTION_POST_PADDINGS, geometry.padding),
    ):
        convolution.set(attribute, AttributeType.INT64, *values)
    return convolution.finalize()


def _tensor(
    calls: Calls,
    geometry: Geometry,
    uid: int,
    shape: tuple[int, ...],
    alignment: int,
) -> Descriptor:
    tensor = Descriptor(calls, DescriptorType.TENSOR)
    tensor.set(Attribute.TENSOR_DATA_TYPE, AttributeType.DATA_TYPE, geometry.data_type)
    for attribute, values in (
        (Attribute.TENSOR_UNIQUE_ID, (uid,)),
        (Attribute.TENSOR_BYTE_ALIGNMENT, (alignment,)),
        (Attribute.TENSOR_DIMENSIONS, shape),
        (Attribute.TENSOR_STRIDES, geometry.strides(shape)),
    ):
        tensor.set(attribute, AttributeType.INT64, *values)
    return tensor.finalize()
