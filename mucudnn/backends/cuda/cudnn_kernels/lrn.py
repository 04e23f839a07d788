"""Local response normalisation by cuDNN, for odd windows only.

An even window extends one channel further ahead in cuDNN, and one further back here.
"""

from collections.abc import Sequence
from typing import Any

from mucudnn.backends.cuda._enums import LRNMode
from mucudnn.backends.cuda.cudnn_kernels.case import (
    Arguments,
    Case,
    LibraryOperation,
    describable,
)
from mucudnn.backends.cuda.cudnn_kernels.channels import by_channel

__all__ = ["OPERATIONS"]

# Limits of the library's header, CUDNN_LRN_….
_MOST_SIZE = 16
_LEAST_K = 1e-5
_LEAST_BETA = 0.01


def _takes(case: Case) -> bool:
    size = case["size"]
    return (
        describable(*case.inputs, *case.outputs)
        and size % 2 == 1
        and size <= _MOST_SIZE
        and case["k"] >= _LEAST_K
        and case["beta"] >= _LEAST_BETA
    )


def _described(case: Case, owner: Arguments) -> tuple[int, int]:
    numbers = (float(case[name]) for name in ("alpha", "beta", "k"))
    rules = owner.descriptors.create("LRN", "LRN", case["size"], *numbers)
    shape, last = by_channel(case.inputs[0].shape)
    return rules, owner.tensor(shape, channels_last=last)


def _forward(
    case: Case, owner: Arguments, inputs: Sequence[int], outputs: Sequence[int]
) -> tuple[Any, ...]:
    rules, t = _described(case, owner)
    mode = LRNMode.CROSS_CHANNEL_DIM1
    return rules, mode, owner.one, t, inputs[0], owner.zero, t, outputs[0]


def _gradient(
    case: Case, owner: Arguments, inputs: Sequence[int], outputs: Sequence[int]
) -> tuple[Any, ...]:
    rules, t = _described(case, owner)
    (x, y, dy), (dx,) = inputs, outputs
    mode = LRNMode.CROSS_CHANNEL_DIM1
    return rules, mode, owner.one, t, y, t, dy, t, x, owner.zero, t, dx


OPERATIONS: dict[str, LibraryOperation] = {
    "lrn": LibraryOperation("cudnnLRNCrossChannelForward", _takes, _forward),
    "lrn_grad": LibraryOperation("cudnnLRNCrossChannelBackward", _takes, _gradient),
}
