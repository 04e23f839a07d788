"""Softmax with cross entropy by cuDNN, which computes the logarithms of probabilities.

cuDNN computes them for all classes, and our own kernel the mean of those at the labels.
cuDNN needs one type for both: logits narrower than the loss stay with our kernel.
"""

from collections.abc import Sequence
from typing import Any

from mucudnn.backends.cuda._enums import SoftmaxAlgorithm, SoftmaxMode
from mucudnn.backends.cuda.cudnn_kernels.case import (
    Arguments,
    Case,
    LibraryOperation,
    describable,
)
from mucudnn.backends.cuda.kernels.losses import GIVEN
from mucudnn.backends.cuda.kernels.program import as_ncs

__all__ = ["OPERATIONS"]


def _takes(case: Case) -> bool:
    return describable(case.inputs[0], case.outputs[1])


def _logarithms(
    case: Case, owner: Arguments, inputs: Sequence[int], outputs: Sequence[int]
) -> tuple[Any, ...]:
    shape = *as_ncs(case.inputs[0].shape), 1
    t = owner.tensor(shape, channels_last=False)
    how = SoftmaxAlgorithm.LOG, SoftmaxMode.CHANNEL
    return *how, owner.one, t, inputs[0], owner.zero, t, outputs[1]


OPERATIONS: dict[str, LibraryOperation] = {
    "softmax_cross_entropy": LibraryOperation(
        "cudnnSoftmaxForward", _takes, _logarithms, left={GIVEN: True}
    )
}
