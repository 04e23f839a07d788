"""Copies: whole tensors, parts of them, and constants; by CuPy's assignments.

They go to the current stream and need no memory beside what they write.
"""

from mucudnn.backends.cuda.kernels.program import KernelCall, Operation

__all__ = ["OPERATIONS"]


def copy(call: KernelCall) -> None:
    """A copy, in the output's type."""
    call.gpu.copy(call.inputs[0], call.outputs[0])


def fill(call: KernelCall) -> None:
    """One value everywhere."""
    call.gpu.copy(call.attrs["value"], call.outputs[0])


def concat(call: KernelCall) -> None:
    """Tensors, or some rows of each, one after the other along an axis.

    What is `before` the first and behind the last are zeros.
    """
    axis, (y,) = call.attrs.get("axis", 1), call.outputs
    parts = call.attrs.get("parts") or [(0, x.shape[axis]) for x in call.inputs]
    first = start = call.attrs.get("before", 0)
    for x, part in zip(call.inputs, parts, strict=True):
        stop = start + part[1] - part[0]
        call.gpu.copy(x[_along(axis, *part)], y[_along(axis, start, stop)])
        start = stop
    for around in ((0, first), (start, y.shape[axis])):
        if around[0] < around[1]:
            call.gpu.copy(0, y[_along(axis, *around)])


def slice_(call: KernelCall) -> None:
    """The part between two corners."""
    pairs = zip(call.attrs["starts"], call.attrs["stops"], strict=True)
    call.gpu.copy(
        call.inputs[0][tuple(slice(*pair) for pair in pairs)], call.outputs[0]
    )


def pad(call: KernelCall) -> None:
    """Zeros around a tensor."""
    (x,), (y,) = call.inputs, call.outputs
    interior = []
    for axis, before in enumerate(call.attrs["before"]):
        stop = before + x.shape[axis]
        interior.append(slice(before, stop))
        call.gpu.copy(0, y[_along(axis, 0, before)])
        call.gpu.copy(0, y[_along(axis, stop, y.shape[axis])])
    call.gpu.copy(x, y[tuple(interior)])


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
