"""Copies: whole tensors, parts of them, and constants; by CuPy's assignments.

They go to the current stream and need no memory beside what they write.
"""

from typing import Any

from mucudnn.backends.cuda.kernels.program import (
    Attrs,
    Inputs,
    Launcher,
    Operation,
    Outputs,
)

__all__ = ["OPERATIONS", "concat", "copy", "fill", "pad", "slice_"]


def copy(
    gpu: Launcher, inputs: Inputs, outputs: Outputs, attrs: Attrs, workspace: Any
) -> None:
    """A copy, in the output's type."""
    gpu.copy(inputs[0], outputs[0])


def fill(
    gpu: Launcher, inputs: Inputs, outputs: Outputs, attrs: Attrs, workspace: Any
) -> None:
    """One value everywhere."""
    gpu.copy(attrs["value"], outputs[0])


def concat(
    gpu: Launcher, inputs: Inputs, outputs: Outputs, attrs: Attrs, workspace: Any
) -> None:
    """Tensors one after the other along an axis."""
    axis = attrs.get("axis", 1)
    start = 0
    for x in inputs:
        stop = start + x.shape[axis]
        gpu.copy(x, outputs[0][_along(axis, start, stop)])
        start = stop


def slice_(
    gpu: Launcher, inputs: Inputs, outputs: Outputs, attrs: Attrs, workspace: Any
) -> None:
    """The part between two corners."""
    pairs = zip(attrs["starts"], attrs["stops"], strict=True)
    gpu.copy(inputs[0][tuple(slice(*pair) for pair in pairs)], outputs[0])


def pad(
    gpu: Launcher, inputs: Inputs, outputs: Outputs, attrs: Attrs, workspace: Any
) -> None:
    """Zeros around a tensor."""
    (x,), (y,) = inputs, outputs
    interior = []
    for axis, before in enumerate(attrs["before"]):
        stop = before + x.shape[axis]
        interior.append(slice(before, stop))
        gpu.copy(0, y[_along(axis, 0, before)])
        gpu.copy(0, y[_along(axis, stop, y.shape[axis])])
    gpu.copy(x, y[tuple(interior)])


def _along(axis: int, start: int, stop: int) -> tuple[slice, ...]:
    return (*[slice(None)] * axis, slice(start, stop))


OPERATIONS: dict[str, Operation] = {
    "cast": Operation(copy),
    "concat": Operation(concat),
    "fill": Operation(fill),
    "identity": Operation(copy),
    "pad": Operation(pad),
    "slice": Operation(slice_),
}
