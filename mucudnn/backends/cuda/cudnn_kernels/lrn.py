"""Local response normalisation by the library, which sums over odd windows as we do.

An even window reaches one channel further ahead there, and one further back here.
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

_MOST_SIZE = 16
_LEAST_K = 1e-5
_LEAST_BETA = 0.01
"""Limits of the library's header, CUDNN_LRN_…."""


def _takes(case: Case) -> bool:
    size = case["size"]
    return (
        describable(*case.inputs, *case.outputs)
        and size % 2 == 1
        and size <= _MOST_SIZE
        and case["k"] >= _LEAST_K
        and case["beta"] >= _LEAST_BETA
    )


def _described(case: Case, kept: Arguments) -> tuple[int, int]:
    """The descriptors of the normalisation and of all its tensors."""
    numbers = (float(case[name]) for name in ("alpha", "beta", "k"))
    rules = kept.descriptors.create("LRN", "LRN", case["size"], *numbers)
    shape, last = by_channel(case.inputs[0].shape)
    return rules, kept.tensor(shape, channels_last=last)


def _forward(
    case: Case, kept: Arguments, inputs: Sequence[int], outputs: Sequence[int]
) -> tuple[Any, ...]:
    rules, t = _described(case, kept)
    mode = LRNMode.CROSS_CHANNEL_DIM1
    return rules, mode, kept.one, t, inputs[0], kept.zero, t, outputs[0]


def _back(
    case: Case, kept: Arguments, inputs: Sequence[int], outputs: Sequence[int]
) -> tuple[Any, ...]:
    rules, t = _described(case, kept)
    (x, y, dy), (dx,) = inputs, outputs
    mode = LRNMode.CROSS_CHANNEL_DIM1
    return rules, mode, kept.one, t, y, t, dy, t, x, kept.zero, t, dx


OPERATIONS: dict[str, LibraryOperation] = {
    "lrn": LibraryOperation("cudnnLRNCrossChannelForward", _takes, _forward),
    "lrn_grad": LibraryOperation("cudnnLRNCrossChannelBackward", _takes, _back),
}
