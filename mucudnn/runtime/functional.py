"""Convolutions that plan themselves: the functions to put in place of a framework's.

The first call of a problem measures and plans it (or finds it in the tuner's cache);
every later one is a dictionary lookup and the kernels.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from mucudnn.arguments import an_integer, integers, one_of
from mucudnn.backends import Device
from mucudnn.ir.conv import LAYOUTS, ConvPlan, ConvProblem, Direction
from mucudnn.ir.tensor import TensorSpec
from mucudnn.runtime.tuning.tuner import Tuner

__all__ = [
    "ReadyConv",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_backward_data",
    "conv_backward_filter",
    "explain",
]

Ints = int | Sequence[int]

Padding = Ints | str
"""Numbers, "same" or "valid"."""


def conv1d(
    x: Any,
    w: Any,
    *,
    stride: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
    layout: str = "NCHW",
    tuner: Tuner | None = None,
    out: Any = None,
    accumulate: bool = False,
) -> Any:
    """Correlate x (N, C, W) with w (K, C // groups, S); `conv2d` tells the rest."""
    options = (stride, padding, dilation, groups, layout)
    signature = (Direction.FORWARD, 1, None, options)
    return _call(signature, x, w, tuner, out, accumulate)


def conv2d(
    x: Any,
    w: Any,
    *,
    stride: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
    layout: str = "NCHW",
    tuner: Tuner | None = None,
    out: Any = None,
    accumulate: bool = False,
) -> Any:
    """Correlate x (N, C, H, W) with w (K, C // groups, R, S).

    Args:
        x: Input; with layout `NHWC` it is (N, H, W, C) and w is (K, R, S, C // groups).
        w: Filter, of the same data type.
        stride: Step of the filter; an int or one an axis, like the next two.
        padding: Zeros at both ends of each spatial axis; "valid" is none, "same" what
            gives the output the size of the input, with stride 1.
        dilation: Distance between the filter's taps.
        groups: Independent convolutions over slices of the channels.
        layout: `NCHW` (channels first) or `NHWC` (channels last).
        tuner: Measures, plans and holds the workspace; if None, one configured by the
            environment and shared by all calls.
        out: Where the result goes; made if not given.
        accumulate: Add to `out` instead of overwriting it.

    Returns:
        y (N, K, P, Q), or (N, P, Q, K); `out` if that was given.

    Raises:
        ValueError: Shapes, types or options contradict each other.
        PlanningError: No algorithm fits the tuner's workspace limit.
    """
    options = (stride, padding, dilation, groups, layout)
    signature = (Direction.FORWARD, 2, None, options)
    return _call(signature, x, w, tuner, out, accumulate)


def conv3d(
    x: Any,
    w: Any,
    *,
    stride: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
    layout: str = "NCHW",
    tuner: Tuner | None = None,
    out: Any = None,
    accumulate: bool = False,
) -> Any:
    """Correlate x (N, C, D, H, W) with w (K, C // groups, T, R, S); see `conv2d`."""
    options = (stride, padding, dilation, groups, layout)
    signature = (Direction.FORWARD, 3, None, options)
    return _call(signature, x, w, tuner, out, accumulate)


def conv_backward_data(
    dy: Any,
    w: Any,
    x_shape: Sequence[int],
    *,
    stride: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
    layout: str = "NCHW",
    tuner: Tuner | None = None,
    out: Any = None,
    accumulate: bool = False,
) -> Any:
    """Gradient of a convolution with respect to its input, in 1, 2 or 3 dimensions.

    Args:
        dy: Gradient of the output, stored as the output is.
        w: Filter.
        x_shape: Shape of the input, as it is stored (`NHWC`: channels last).
        stride: Options of the forward call; see `conv2d` for all of them.
        padding: As above.
        dilation: As above.
        groups: As above.
        layout: As above.
        tuner: As above.
        out: As above.
        accumulate: As above.

    Returns:
        dx, of shape `x_shape`.

    Raises:
        ValueError: dy's shape is not what x_shape and w give.
    """
    options = (stride, padding, dilation, groups, layout)
    signature = (Direction.BACKWARD_DATA, None, _shape("x_shape", x_shape), options)
    return _call(signature, dy, w, tuner, out, accumulate)


def conv_backward_filter(
    x: Any,
    dy: Any,
    w_shape: Sequence[int],
    *,
    stride: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
    layout: str = "NCHW",
    tuner: Tuner | None = None,
    out: Any = None,
    accumulate: bool = False,
) -> Any:
    """Gradient of a convolution with respect to its filter, in 1, 2 or 3 dimensions.

    Args:
        x: Input.
        dy: Gradient of the output.
        w_shape: Shape of the filter, as it is stored.
        stride: Options of the forward call; see `conv2d` for all of them.
        padding: As above.
        dilation: As above.
        groups: As above.
        layout: As above.
        tuner: As above.
        out: As above; with `accumulate` the gradient is added to it, once, however
            many micro-batches there are.
        accumulate: As above.

    Returns:
        dw, of shape `w_shape`.

    Raises:
        ValueError: dy's shape is not what x and w_shape give.
    """
    options = (stride, padding, dilation, groups, layout)
    signature = (Direction.BACKWARD_FILTER, None, _shape("w_shape", w_shape), options)
    return _call(signature, x, dy, tuner, out, accumulate)


def explain(plan: ConvPlan, tuner: Tuner | None = None) -> str:
    """Say in words why a plan is what it is.

    What undivided chose, what the plan does instead, which algorithm was excluded by
    how many bytes, what each limit would buy.
    """
    return (tuner or _default_tuner()).explain(plan)


def _shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(shape)
    except TypeError:
        raise TypeError(f"{name} must be a sequence, got {shape!r}") from None


_Options = tuple[Any, Any, Any, int, str]
_Signature = tuple[Direction, int | None, tuple[int, ...] | None, _Options]


def _call(
    signature: _Signature,
    a: Any,
    b: Any,
    tuner: Tuner | None,
    out: Any,
    accumulate: bool,
) -> Any:
    """Run what is ready for this signature and these operands, or make it ready."""
    if tuner is None:
        tuner = _default_tuner()
    elif not isinstance(tuner, Tuner):
        raise TypeError(
            f"tuner must be a mucudnn.Tuner, got {tuner!r}; leave it out for one that "
            "is configured by the environment"
        )
    known = tuner.ready
    try:
        key = (signature, a.shape, b.shape, a.dtype, b.dtype)
        ready = known.get(key)
    except AttributeError:
        kinds = f"{type(a).__name__} and {type(b).__name__}"
        raise TypeError(f"operands must be arrays, got {kinds}") from None
    except TypeError:  # a list among the options does not hash
        direction, rank, shape, options = signature
        signature = (direction, rank, shape, _hashable(options))
        key = (signature, a.shape, b.shape, a.dtype, b.dtype)
        ready = known.get(key)
    if ready is None:
        problem = _problem(signature, a, b)
        _check_out(tuner.backend.device, problem.operands()[2], out, accumulate)
        ready = known[key] = ReadyConv(tuner, problem)
    return ready(a, b, out, accumulate)


def _hashable(options: _Options) -> _Options:
    stride, padding, dilation, groups, layout = options
    return (
        _frozen("stride", stride),
        _frozen("padding", padding),
        _frozen("dilation", dilation),
        an_integer("groups", groups, least=1),
        one_of("layout", layout, LAYOUTS),
    )


def _frozen(name: str, value: Padding) -> int | str | tuple[int, ...]:
    if isinstance(value, int | str) or not isinstance(value, Iterable):
        return value
    return integers(name, value)


class ReadyConv:
    """A planned convolution that takes the user's arrays."""

    def __init__(self, tuner: Tuner, problem: ConvProblem) -> None:
        self._run = tuner.compiled(problem)
        self._device = tuner.backend.device
        self._out = problem.operands()[2]
        self._nbytes = self._out.nbytes

    def __call__(self, a: Any, b: Any, out: Any, accumulate: bool) -> Any:
        """Compute into `out`, or into a new array; the operands' shapes are known."""
        device, spec = self._device, self._out
        if out is None and not accumulate:
            out = device.view(device.allocate(self._nbytes), 0, spec)
        else:
            _check_out(device, spec, out, accumulate)
        self._run(device.dense(a), device.dense(b), out, accumulate)
        return out


def _check_out(device: Device, spec: TensorSpec, out: Any, accumulate: bool) -> None:
    """Refuse an `out` that cannot take the result, before anything is measured."""
    if out is None:
        if accumulate:
            raise ValueError("accumulate=True adds to `out`, which was not given")
        return
    try:
        shape, dtype = out.shape, out.dtype
    except AttributeError:
        raise TypeError(f"out must be an array, got {type(out).__name__}") from None
    if shape != spec.shape or dtype != spec.dtype:
        raise ValueError(f"out must be {spec.dtype} {spec.shape}, got {dtype} {shape}")
    if device.dense(out) is not out:
        raise ValueError("out must be densely packed, in the order of the layout")


def _problem(signature: _Signature, a: Any, b: Any) -> ConvProblem:
    direction, rank, shape, options = signature
    stride, padding, dilation, groups, layout = options
    if str(a.dtype) != str(b.dtype):
        raise ValueError(f"operands are of two data types, {a.dtype} and {b.dtype}")
    if rank is not None and len(a.shape) != rank + 2:
        raise ValueError(
            f"conv{rank}d takes an input of {rank + 2} axes, got shape {a.shape}"
        )
    x_shape, w_shape = {
        Direction.FORWARD: (a.shape, b.shape),
        Direction.BACKWARD_DATA: (shape, b.shape),
        Direction.BACKWARD_FILTER: (a.shape, shape),
    }[direction]
    problem = ConvProblem(
        direction=direction,
        x_shape=_logical(x_shape, layout),
        w_shape=_logical(w_shape, layout),
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        dtype=str(a.dtype),
        layout=layout,
    )
    for array, spec in zip((a, b), problem.operands(), strict=False):
        if array.shape != spec.shape:
            raise ValueError(
                f"gradient of the output has shape {array.shape}, but x {x_shape} and "
                f"w {w_shape} give {spec.shape}"
            )
    return problem


def _logical(shape: Sequence[int], layout: str) -> tuple[int, ...]:
    """A stored shape with its channels second."""
    if layout == "NHWC" and len(shape) > 1:
        return (shape[0], shape[-1], *shape[1:-1])
    return tuple(shape)


@functools.cache
def _default_tuner() -> Tuner:
    return Tuner.from_env()
