"""The operation graph of a convolution, a bias and a ReLU: y = max(x * w + b, 0).

The results of the convolution and of the sum are virtual tensors: only y is written.
Sums are in the compute type, whatever the types of x and w.
"""

from mucudnn.backends.cuda._cudnn import Calls
from mucudnn.backends.cuda._enums import (
    Attribute,
    DescriptorType,
    NanPropagation,
    PointwiseMode,
)
from mucudnn.backends.cuda.conv.geometry import DATA_TYPES, Geometry
from mucudnn.backends.cuda.conv.operation import UIDS, convolution, graph_of, tensor_of
from mucudnn.backends.cuda.descriptors import Descriptor
from mucudnn.ir.conv import ConvProblem

__all__ = ["BIAS_UID", "bias_relu_graph"]

BIAS_UID = 4
"""Id of the bias in a variant pack, beside those of the other tensors."""

_PRODUCT, _SUM = 5, 6  # ids of the virtual tensors, which are in no variant pack


def bias_relu_graph(
    calls: Calls,
    problem: ConvProblem,
    bias: str,
    *,
    alignment: int,
    handle: int | None = None,
) -> Descriptor:
    """Return a finalized graph of a forward convolution with bias and ReLU.

    Args:
        calls: The library.
        problem: Convolution of x and w to y.
        bias: Data type of b, one number per channel of y.
        alignment: Alignment of all operands' addresses in bytes.
        handle: Library handle; None without a device.
    """
    geometry = Geometry.of(problem)
    wide, y = geometry.compute_type, geometry.y

    def between(uid: int) -> Descriptor:
        return tensor_of(calls, geometry, uid, y, alignment, wide, virtual=True)

    def stored(name: str, shape: tuple[int, ...]) -> Descriptor:
        return tensor_of(calls, geometry, UIDS[name], shape, alignment)

    product, total = between(_PRODUCT), between(_SUM)
    of_channels = 1, y[1], *(1 for _ in y[2:])
    kind = DATA_TYPES[bias]
    b = tensor_of(calls, geometry, BIAS_UID, of_channels, alignment, kind)
    prefix = "OPERATION_CONVOLUTION_FORWARD"
    conv = Descriptor(calls, DescriptorType.OPERATION_CONVOLUTION_FORWARD)
    conv.set(Attribute[f"{prefix}_ALPHA"], 1.0)
    conv.set(Attribute[f"{prefix}_BETA"], 0.0)
    conv.set(Attribute[f"{prefix}_CONV_DESC"], convolution(calls, geometry))
    conv.set(Attribute[f"{prefix}_X"], stored("x", geometry.x))
    conv.set(Attribute[f"{prefix}_W"], stored("w", geometry.w))
    conv.set(Attribute[f"{prefix}_Y"], product)
    mode = PointwiseMode
    plus = _pointwise(calls, geometry, mode.ADD, (product, b), total)
    relu = _pointwise(calls, geometry, mode.RELU_FWD, (total,), stored("y", y))
    return graph_of(calls, [conv.finalize(), plus, relu], handle)


def _pointwise(
    calls: Calls,
    geometry: Geometry,
    mode: PointwiseMode,
    read: tuple[Descriptor, ...],
    made: Descriptor,
) -> Descriptor:
    what = Descriptor(calls, DescriptorType.POINTWISE)
    what.set(Attribute.POINTWISE_MODE, mode)
    what.set(Attribute.POINTWISE_MATH_PREC, geometry.compute_type)
    if mode is PointwiseMode.RELU_FWD:
        propagate = NanPropagation.PROPAGATE_NAN
        what.set(Attribute.POINTWISE_NAN_PROPAGATION, propagate)
    node = Descriptor(calls, DescriptorType.OPERATION_POINTWISE)
    node.set(Attribute.OPERATION_POINTWISE_PW_DESCRIPTOR, what.finalize())
    names = (Attribute.OPERATION_POINTWISE_XDESC, Attribute.OPERATION_POINTWISE_BDESC)
    for name, tensor in zip(names, read, strict=False):
        node.set(name, tensor)
    node.set(Attribute.OPERATION_POINTWISE_YDESC, made)
    return node.finalize()
