"""Batch normalisation by the library: statistics of a batch, running ones, gradients.

Its conventions are ours: the mean and 1 / sqrt(variance + epsilon) of the batch are
saved, and running statistics take in `momentum` of the new ones, of the variance its
unbiased estimate. The mode that may be faster and overflow is not asked for.

So its functions for a normalisation with a ReLU, or with a sum and a ReLU, are not here
(`…ForwardTrainingEx`, `…BackwardEx`): they are documented for that mode, in half
precision with channels last, and the header says that it limits the range of values. A
training that ours carries on could end in NaN there. They keep a mask besides, one more
tensor from the forward pass to the backward: an eighth of a byte an element, 308 MB in
ResNet-50 at 256 images. Our gradient behind a ReLU alone reads x and dy and no more.
"""

import math
from collections.abc import Sequence
from typing import Any

from mucudnn.backends.cuda._enums import BatchNormMode
from mucudnn.backends.cuda.cudnn_kernels.case import (
    Arguments,
    Case,
    LibraryOperation,
    Shaped,
    describable,
)
from mucudnn.backends.cuda.cudnn_kernels.channels import by_channel

__all__ = ["OPERATIONS"]

_MODE = BatchNormMode.SPATIAL
_EPSILON = 1e-5
"""Of a gradient, which the library computes from what was saved."""


def _takes(case: Case) -> bool:
    """Images of one type, and numbers a channel of the type that the library wants."""
    tensors, x = (*case.inputs, *case.outputs), case.inputs[0]
    images = [t for t in tensors if t.shape == x.shape]
    wide = "float64" if x.dtype == "float64" else "float32"
    numbers = {t for t in tensors if t.shape != x.shape}
    return (
        describable(*images)
        and math.prod(x.shape) > x.shape[1]  # one has no unbiased variance
        and numbers == {Shaped(x.shape[1:2], wide)}
    )


def _described(case: Case, kept: Arguments) -> tuple[int, int]:
    """The descriptors of images, and of numbers a channel."""
    shape, last = by_channel(case.inputs[0].shape)
    x = kept.tensor(shape, channels_last=last)
    numbers = kept.descriptors.empty("Tensor")
    kept.calls.call("cudnnDeriveBNTensorDescriptor", numbers, x, _MODE)
    return x, numbers


def _training(
    case: Case, kept: Arguments, inputs: Sequence[int], outputs: Sequence[int]
) -> tuple[Any, ...]:
    t, numbers = _described(case, kept)
    (x, gamma, beta, *running), (y, mean, inv_std) = inputs, outputs
    moved = running if case["update"] else [None, None]
    factor, epsilon = float(case["momentum"]), float(case["eps"])
    images = _MODE, kept.one, kept.zero, t, x, t, y
    return *images, numbers, gamma, beta, factor, *moved, epsilon, mean, inv_std


def _inference(
    case: Case, kept: Arguments, inputs: Sequence[int], outputs: Sequence[int]
) -> tuple[Any, ...]:
    t, numbers = _described(case, kept)
    x, *of_channels = inputs
    images = _MODE, kept.one, kept.zero, t, x, t, outputs[0]
    return *images, numbers, *of_channels, float(case["eps"])


def _back(
    case: Case, kept: Arguments, inputs: Sequence[int], outputs: Sequence[int]
) -> tuple[Any, ...]:
    t, numbers = _described(case, kept)
    (x, dy, gamma, *saved), (dx, *of_parameters) = inputs, outputs
    factors = kept.one, kept.zero, kept.one, kept.zero
    images = _MODE, *factors, t, x, t, dy, t, dx
    return *images, numbers, gamma, *of_parameters, _EPSILON, *saved


OPERATIONS: dict[str, LibraryOperation] = {
    "batch_norm": LibraryOperation(
        "cudnnBatchNormalizationForwardTraining", _takes, _training
    ),
    "batch_norm_eval": LibraryOperation(
        "cudnnBatchNormalizationForwardInference", _takes, _inference
    ),
    "batch_norm_grad": LibraryOperation(
        "cudnnBatchNormalizationBackward", _takes, _back
    ),
}
