"""The fake library's functions beside convolutions: pooling, norms and softmax.

Each is computed in float64 from descriptors and bare addresses, by what its
documentation says, and blended: result = alpha * it + beta * what was there.
"""

import ctypes
import itertools
import math

import numpy as np

from mucudnn.backends.cuda.libcudnn import (
    BatchNormMode,
    DataType,
    PoolingMode,
    SoftmaxAlgorithm,
    SoftmaxMode,
    Status,
)
from tests.cudnn_fake_legacy import StatusError
from tests.cudnn_kernel import Tensor
from tests.cupy_fake import put

_EACH = (0, 2, 3)
"""The axes that statistics of a channel are taken over."""

_SUMMED = {SoftmaxMode.INSTANCE: (1, 2, 3), SoftmaxMode.CHANNEL: (1,)}
"""The axes that the probabilities of a softmax add up to 1 over."""


class Maps:
    """Refuses what the library refuses: shapes that do not belong together.

    Args:
        library: The fake that has the objects and runs the kernels.
    """

    def __init__(self, library):
        self._library = library

    # --- pooling ---------------------------------------------------------------------

    def set_pooling_nd_descriptor(
        self, pointer, mode, nan, count, window, padding, stride
    ):
        if count not in (2, 3):
            raise StatusError(Status.NOT_SUPPORTED)
        axes = (tuple(values[:count]) for values in (window, padding, stride))
        made = (PoolingMode(mode), int(nan), *axes)
        self._library.object(pointer, "Pooling").values = made

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

    def pooling_backward(self, handle, pooling, alpha, *rest):
        y, y_data, dy, dy_data, x, x_data, beta, dx, dx_data = rest
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

    # --- normalisation of neighbouring channels ------------------------------------

    def set_lrn_descriptor(self, pointer, size, alpha, beta, k):
        if not (1 <= size <= 16 and beta >= 0.01 and k >= 1e-5):
            raise StatusError(Status.BAD_PARAM)
        self._library.object(pointer, "LRN").values = (size, alpha, beta, k)

    def lrn_cross_channel_forward(
        self, handle, rules, mode, alpha, x, x_data, beta, y, y_data
    ):
        self._same(x, y)
        rules, x = (self._library.object(o).values for o in (rules, x))

        def work():
            image = x.at(x_data).astype("f8")
            scale, _ = _neighbours(rules, image)
            _blend(x, y_data, image * scale ** -rules[2], alpha, beta)

        self._run("cudnnLRNCrossChannelForward", handle, work)

    def lrn_cross_channel_backward(self, handle, rules, mode, alpha, *rest):
        y, y_data, dy, dy_data, x, x_data, beta, dx, dx_data = rest
        for other in (y, dy, dx):
            self._same(x, other)
        rules, x = (self._library.object(o).values for o in (rules, x))

        def work():
            image, result, back = (
                x.at(data).astype("f8") for data in (x_data, y_data, dy_data)
            )
            size, factor, power, _ = rules
            scale, near = _neighbours(rules, image)
            shared = np.einsum("ij,niab->njab", near, back * result / scale)
            made = back * scale**-power - 2 * factor * power / size * image * shared
            _blend(x, dx_data, made, alpha, beta)

        self._run("cudnnLRNCrossChannelBackward", handle, work)

    # --- batch normalisation -------------------------------------------------------

    def derive_b_n_tensor_descriptor(self, derived, x, mode):
        assert mode == BatchNormMode.SPATIAL
        x = self._library.object(x, "Tensor").values
        kind = DataType.DOUBLE if x.data_type == DataType.DOUBLE else DataType.FLOAT
        channels = x.dims[1]
        made = Tensor((1, channels, 1, 1), (channels, 1, 1, 1), kind, 1)
        self._library.object(derived, "Tensor").values = made

    def batch_normalization_forward_training(self, handle, mode, alpha, beta, *rest):
        x, x_data, y, y_data, numbers, gamma, bias, factor, *rest = rest
        running_mean, running_var, epsilon, saved_mean, saved_inv_std = rest
        x, numbers = self._normed(mode, x, y, numbers, epsilon)
        if (running_mean is None) != (running_var is None):
            raise StatusError(Status.BAD_PARAM)

        def work():
            image = x.at(x_data).astype("f8")
            mean, var = (f(image, axis=_EACH, keepdims=True) for f in (np.mean, np.var))
            inv_std = 1 / np.sqrt(var + epsilon)
            scale, shift = numbers.at(gamma), numbers.at(bias)
            _blend(x, y_data, (image - mean) * inv_std * scale + shift, alpha, beta)
            for data, value in ((saved_mean, mean), (saved_inv_std, inv_std)):
                numbers.at(data)[...] = value
            if running_mean is not None:
                count = image.size // image.shape[1]
                unbiased = var * count / (count - 1)
                for data, value in ((running_mean, mean), (running_var, unbiased)):
                    kept = numbers.at(data)
                    kept[...] = value * factor + kept.astype("f8") * (1 - factor)

        self._run("cudnnBatchNormalizationForwardTraining", handle, work)

    def batch_normalization_forward_inference(self, handle, mode, alpha, beta, *rest):
        x, x_data, y, y_data, numbers, gamma, bias, mean, var, epsilon = rest
        x, numbers = self._normed(mode, x, y, numbers, epsilon)

        def work():
            wide = (numbers.at(a).astype("f8") for a in (gamma, bias, mean, var))
            scale, shift, centre, spread = wide
            apart = x.at(x_data).astype("f8") - centre
            made = scale * apart / np.sqrt(epsilon + spread) + shift
            _blend(x, y_data, made, alpha, beta)

        self._run("cudnnBatchNormalizationForwardInference", handle, work)

    def batch_normalization_backward(self, handle, mode, alpha, beta, *rest):
        alpha_of_parameters, beta_of_parameters, x, x_data, dy, dy_data, *rest = rest
        dx, dx_data, numbers, gamma, dgamma, dbias, epsilon, *saved = rest
        self._same(x, dx)
        x, numbers = self._normed(mode, x, dy, numbers, epsilon)

        def work():
            image, back = (x.at(data).astype("f8") for data in (x_data, dy_data))
            mean, inv_std = (numbers.at(a).astype("f8") for a in saved)
            normal = (image - mean) * inv_std
            shift = back.sum(_EACH, keepdims=True)
            scale = (back * normal).sum(_EACH, keepdims=True)
            count = image.size // image.shape[1]
            rest = back - shift / count - normal * scale / count
            made = numbers.at(gamma) * inv_std * rest
            _blend(x, dx_data, made, alpha, beta)
            for data, value in ((dgamma, scale), (dbias, shift)):
                factors = alpha_of_parameters, beta_of_parameters
                _blend(numbers, data, value, *factors)

        self._run("cudnnBatchNormalizationBackward", handle, work)

    def _normed(self, mode, x, y, numbers, epsilon):
        self._same(x, y)
        x, numbers = (self._library.object(t, "Tensor").values for t in (x, numbers))
        if mode != BatchNormMode.SPATIAL or not epsilon >= 0:
            raise StatusError(Status.BAD_PARAM)
        if numbers.dims != (1, x.dims[1], 1, 1):
            raise StatusError(Status.BAD_PARAM)
        return x, numbers

    # --- softmax ---------------------------------------------------------------------

    def softmax_forward(
        self, handle, algorithm, mode, alpha, x, x_data, beta, y, y_data
    ):
        """The fast way overflows, as documented."""
        self._same(x, y)
        x, axes = self._library.object(x).values, _SUMMED[SoftmaxMode(mode)]
        algorithm = SoftmaxAlgorithm(algorithm)

        def work():
            logits = x.at(x_data).astype("f8")
            if algorithm is not SoftmaxAlgorithm.FAST:
                logits = logits - logits.max(axes, keepdims=True)
            total = np.exp(logits).sum(axes, keepdims=True)
            made = np.exp(logits) / total
            if algorithm is SoftmaxAlgorithm.LOG:
                made = logits - np.log(total)
            _blend(self._library.object(y).values, y_data, made, alpha, beta)

        self._run("cudnnSoftmaxForward", handle, work)

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

        put(run)


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


def _neighbours(rules, image):
    """k + alpha / n * the sum of squares nearby, and who is near whom."""
    size, alpha, _, k = rules
    before, channels = (size - 1) // 2, range(image.shape[1])
    near = np.array(
        [[i - before <= j < i - before + size for j in channels] for i in channels]
    )
    return k + alpha / size * np.einsum("ij,njab->niab", near, image**2), near


def _blend(tensor: Tensor, data, made, alpha, beta):
    """Write alpha * what was made + beta * what was there."""
    scalar = ctypes.c_double if tensor.dtype == "float64" else ctypes.c_float
    alpha, beta = (scalar.from_address(a).value for a in (alpha, beta))
    target = tensor.at(data)
    before = beta * target.astype("f8") if beta else 0
    with np.errstate(over="ignore"):
        target[...] = alpha * made + before
