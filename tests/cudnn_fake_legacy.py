"""The first API of the fake library: descriptors, algorithms, convolutions."""

import ctypes

from mucudnn.backends.cuda.libcudnn import AlgoPerf, Status
from mucudnn.ir.conv import Direction
from tests.cudnn_kernel import Convolution, Tensor, strides_of

ARCH_MISMATCH = 3007


class StatusError(Exception):
    """What a function returns instead of success."""

    def __init__(self, status):
        super().__init__(status)
        self.status = int(status)


class FirstApi:
    """Algorithm n asks for 256 n bytes a sample; number 4 runs on no such device.

    Args:
        library: The fake that has the objects and runs the kernels.
    """

    def __init__(self, library):
        self._library = library

    def set_tensor_nd_descriptor(self, pointer, data_type, count, dims, strides):
        self._library.object(pointer, "Tensor").values = Tensor(
            tuple(dims[:count]), tuple(strides[:count]), data_type, 1
        )

    def set_filter_nd_descriptor(self, pointer, data_type, layout, count, dims):
        dims = tuple(dims[:count])
        self._library.object(pointer, "Filter").values = Tensor(
            dims, strides_of(dims, last=bool(layout)), data_type, 1
        )

    def set_convolution_nd_descriptor(
        self, pointer, count, padding, stride, dilation, mode, compute_type
    ):
        self._library.object(pointer, "Convolution").values = {
            "padding": tuple(padding[:count]),
            "stride": tuple(stride[:count]),
            "dilation": tuple(dilation[:count]),
        }

    def set_convolution_group_count(self, pointer, groups):
        self._library.object(pointer, "Convolution").values["groups"] = groups

    def set_convolution_math_type(self, pointer, math):
        self._library.object(pointer, "Convolution").values["math"] = int(math)

    def _decoded(self, direction, a, b, convolution, out):
        fields = self._library.object(convolution, "Convolution").values
        order = {
            Direction.FORWARD: "xwy",
            Direction.BACKWARD_DATA: "wyx",
            Direction.BACKWARD_FILTER: "xyw",
        }[direction]
        kinds = {"x": "Tensor", "w": "Filter", "y": "Tensor"}
        tensors = {
            name: self._library.object(pointer, kinds[name]).values
            for name, pointer in zip(order, (a, b, out), strict=True)
        }
        axes = (fields["stride"], fields["padding"], fields["dilation"])
        return order, Convolution(
            direction, tensors["x"], tensors["w"], tensors["y"], *axes, 0.0
        )

    def _bytes(self, kernel, algo):
        if algo == 4:
            raise StatusError(ARCH_MISMATCH)
        return 256 * algo * kernel.batch

    def size(self, name, direction, handle, a, b, convolution, out, algo, size):
        self._library.object(handle, "handle")
        _, kernel = self._decoded(direction, a, b, convolution, out)
        size._obj.value = self._bytes(kernel, algo)

    def best(self, name, direction, handle, a, b, conv, out, most, count, rows):
        for i, row in enumerate((AlgoPerf(algo=0, determinism=0), AlgoPerf(1, 0, 0))):
            rows[i] = row
            rows[i].determinism = i
        count._obj.value = 2

    def run(self, name, direction, handle, alpha, *rest):
        a, a_data, b, b_data, convolution, algo, workspace, nbytes, *rest = rest
        beta, out, out_data = rest
        order, kernel = self._decoded(direction, a, b, convolution, out)
        needed = self._bytes(kernel, algo)
        scalar = ctypes.c_double if kernel.x.dtype == "float64" else ctypes.c_float
        if needed > nbytes or scalar.from_address(alpha).value != 1.0:
            raise StatusError(Status.BAD_PARAM)
        data = dict(zip(order, (a_data, b_data, out_data), strict=True))
        self._library.run(
            kernel,
            (name, handle, algo),
            tuple(data[name] for name in "xwy"),
            (workspace, needed),
            scalar.from_address(beta).value,
            0.7 + algo / 100,
        )
