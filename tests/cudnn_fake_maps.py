"""The fake library's functions that are no convolutions: windows and normalisations.

Each is computed in float64 from descriptors and bare addresses, by what its
documentation says, and blended: result = alpha * it + beta * what was there.
"""

import ctypes
import itertools
import math

import numpy as np

from mucudnn.backends.cuda._enums import PoolingMode, Status
from tests.cudnn_fake_legacy import StatusError
from tests.cudnn_kernel import Tensor

__all__ = ["Maps"]


class Maps:
    """Refuses what the library refuses: shapes that do not belong together.

    Args:
        library: The fake that has the objects and runs the kernels.
    """

    def __init__(self, library):
        self._library = library

    # --- descriptors -----------------------------------------------------------------

    def create_pooling_descriptor(self, out):
        self._library.new("Pooling", out)

    def destroy_pooling_descriptor(self, pointer):
        del self._library.objects[pointer]

    def set_pooling_nd_descriptor(
        self, pointer, mode, nan, count, window, padding, stride
    ):
        if count not in (2, 3):
            raise StatusError(Status.NOT_SUPPORTED)
        axes = (tuple(values[:count]) for values in (window, padding, stride))
        made = (PoolingMode(mode), int(nan), *axes)
        self._library.object(pointer, "Pooling").values = made

    # --- pooling ---------------------------------------------------------------------

    def pooling_forward(self, handle, pooling, alpha, x, x_data, beta, y, y_data):
        rules, x, y = self._windows(pooling, x, y)

        def work():
            image, made = x.at(x_data).astype("f8"), np.empty(y.dims)
            for at, inside, count in _windows(rules, x.dims, y.dims):
                values = image[(..., *inside)].reshape(*x.dims[:2], -1)
                if rules[0] is PoolingMode.MAX:
                    found = values.max(-1)  # NaN is above all
                    made[(..., *at)] = found if rules[1] else np.nanmax(values, -1)
                else:
                    made[(..., *at)] = values.sum(-1) / count
            _blend(y, y_data, made, alpha, beta)

        self._run("cudnnPoolingForward", handle, work)

    def pooling_backward(
        self,
        handle,
        pooling,
        alpha,
        y,
        y_data,
        dy,
        dy_data,
        x,
        x_data,
        beta,
        dx,
        dx_data,
    ):
        self._same(x, dx)
        self._same(y, dy)
        rules, x, y = self._windows(pooling, x, y)
        if rules[0] is PoolingMode.MAX or not (y_data and x_data):
            raise StatusError(Status.NOT_SUPPORTED)

        def work():
            gradient, made = y.at(dy_data).astype("f8"), np.zeros(x.dims)
            for at, inside, count in _windows(rules, x.dims, y.dims):
                share = gradient[(..., *at)] / count
                made[(..., *inside)] += share[(..., *(None for _ in at))]
            _blend(x, dx_data, made, alpha, beta)

        self._run("cudnnPoolingBackward", handle, work)

    def _windows(self, pooling, x, y):
        """Windows and both tensors; their shapes are as the library computes them."""
        rules = self._library.object(pooling, "Pooling").values
        x, y = (self._library.object(t, "Tensor").values for t in (x, y))
        axes = zip(x.dims[2:], *rules[2:], strict=True)
        made = tuple((n + 2 * pad - k) // step + 1 for n, k, pad, step in axes)
        if y.dims != (*x.dims[:2], *made) or x.data_type != y.data_type:
            raise StatusError(Status.BAD_PARAM)
        return rules, x, y

    # --- what all have in common -----------------------------------------------------

    def _same(self, one, other):
        one, other = (self._library.object(t, "Tensor").values for t in (one, other))
        if (one.dims, one.data_type) != (other.dims, other.data_type):
            raise StatusError(Status.BAD_PARAM)

    def _run(self, name, handle, work):
        library = self._library
        library.object(handle, "handle")

        def run():
            library.ran.append(name)
            library.clock_ms += library.map_ms
            work()

        library.put(run)


def _windows(rules, image, made):
    """Each window: its place, its elements inside of the image, what to divide by."""
    mode, _, kernel, padding, stride = rules
    for at in itertools.product(*(range(n) for n in made[2:])):
        starts = [o * s - p for o, s, p in zip(at, stride, padding, strict=True)]
        inside = tuple(
            slice(max(start, 0), min(start + k, n))
            for start, k, n in zip(starts, kernel, image[2:], strict=True)
        )
        count = math.prod(kernel)
        if mode is PoolingMode.AVERAGE_COUNT_EXCLUDE_PADDING:
            count = math.prod(s.stop - s.start for s in inside)
        yield at, inside, count


def _blend(tensor: Tensor, data, made, alpha, beta):
    scalar = ctypes.c_double if tensor.dtype == "float64" else ctypes.c_float
    alpha, beta = (scalar.from_address(a).value for a in (alpha, beta))
    target = tensor.at(data)
    before = beta * target.astype("f8") if beta else 0
    target[...] = alpha * made + before
