"""Batch normalisation by cuDNN: training, inference, gradients.

Its conventions are ours: the mean and 1 / sqrt(variance + epsilon) of the batch are
saved, and running statistics take a share `momentum` of the new ones, with the unbiased
variance. The mode that may be faster but may overflow is not used.

Its functions for a normalisation fused with a ReLU, or with a sum and a ReLU
(`…ForwardTrainingEx`, `…BackwardEx`), are therefore missing here: they are documented
for that mode, in half precision with channels last, and the header says that it limits
the range of values. A training run that is stable with ours could end in NaN. They also
save a mask, one more tensor from the forward pass to the backward: an eighth of a byte
an element, 308 MB in ResNet-50 at 256 images. Our gradient of a fused ReLU reads x and
dy only.
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
_EPSILON = 1e-5  # required by the gradient's signature; it uses the saved statistics


def _takes(case: Case) -> bool:
    """Return whether images have one type, and per-channel numbers the required one."""
    tensors, x = (*case.inputs, *case.outputs), case.inputs[0]
    images = [t for t in tensors if t.shape == x.shape]
    wide = "float64" if x.dtype == "float64" else "float32"
    numbers = {t for t in tensors if t.shape != x.shape}
    return (
        describable(*images)
        and math.prod(x.shape) > x.shape[1]  # one sample has no unbiased variance
        and numbers == {Shaped(x.shape[1:2], wide)}
    )


def _described(case: Case, owner: Arguments) -> tuple[int, int]:
    shape, last = by_channel(case.inputs[0].shape)
    x = owner.tensor(shape, channels_last=last)
    numbers = owner.descriptors.empty("Tensor")
    owner.calls.call("cudnnDeriveBNTensorDescriptor", numbers, x, _MODE)
    return x, numbers


def _training(
    case: Case, owner: Arguments, inputs: Sequence[int], outputs: Sequence[int]
) -> tuple[Any, ...]:
    t, numbers = _described(case, owner)
    (x, gamma, beta, *running), (y, mean, inv_std) = inputs, outputs
    moved = running if case["update"] else [None, None]
    factor, epsilon = float(case["momentum"]), float(case["eps"])
    images = _MODE, owner.one, owner.zero, t, x, t, y
    return *images, numbers, gamma, beta, factor, *moved, epsilon, mean, inv_std


def _inference(
    case: Case, owner: Arguments, inputs: Sequence[int], outputs: Sequence[int]
) -> tuple[Any, ...]:
    t, numbers = _described(case, owner)
    x, *of_channels = inputs
    images = _MODE, owner.one, owner.zero, t, x, t, outputs[0]
    return *images, numbers, *of_channels, float(case["eps"])


def _gradient(
    case: Case, owner: Arguments, inputs: Sequence[int], outputs: Sequence[int]
) -> tuple[Any, ...]:
    t, numbers = _described(case, owner)
    (x, dy, gamma, *saved), (dx, *of_parameters) = inputs, outputs
    factors = owner.one, owner.zero, owner.one, owner.zero
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
        "cudnnBatchNormalizationBackward", _takes, _gradient
    ),
}
