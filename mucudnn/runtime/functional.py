"""Convolution functions that plan themselves, as replacements of a framework's.

The first call of a problem measures and plans it, or finds it in the tuner's cache.
Every later call is a dictionary lookup and the kernels.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from mucudnn.arguments import check_choice, check_integer, check_integers
from mucudnn.backends import Backend
from mucudnn.errors import UnsupportedError
from mucudnn.ir.conv import LAYOUTS, ConvPlan, ConvProblem, Direction
from mucudnn.runtime.tuning.bound_plan import check_out
from mucudnn.runtime.tuning.kernel_timer import check_room
from mucudnn.runtime.tuning.tuner import Tuner

Ints = int | Sequence[int]

Padding = Ints | str
"""Zeros at both ends (an int, or one per axis), "same" or "valid"."""


def conv1d(
    x: Any,
    w: Any,
    *,
    bias: Any = None,
    stride: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
    layout: str = "NCHW",
    tuner: Tuner | None = None,
    out: Any = None,
    accumulate: bool = False,
) -> Any:
    """Correlate x (N, C, W) with w (K, C // groups, S); see `conv2d`."""
    options = (stride, padding, dilation, groups, layout)
    return _call(("forward", 1, None, options), x, w, tuner, out, accumulate, bias)


def conv2d(
    x: Any,
    w: Any,
    *,
    bias: Any = None,
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
        bias: (K,) of the same data type, added to every pixel of the output.
        stride: Step of the filter; an int or one an axis, like the next two.
        padding: Zeros at both ends of each spatial axis; "valid" is none, "same" what
            gives the output the size of the input, with stride 1.
        dilation: Distance between the filter's taps.
        groups: Independent convolutions over slices of the channels.
        layout: `NCHW` (channels first) or `NHWC` (channels last).
        tuner: Measures, plans and holds the workspace; if None, one configured by the
            environment and shared by all calls.
        out: Densely packed array for the result; made if not given. It may share memory
            with `x`, `w` or `bias`: operands that it overwrites are copied first.
        accumulate: Add to `out` instead of overwriting it.

    Returns:
        y (N, K, P, Q), or (N, P, Q, K); `out` if that was given.

    Raises:
        ValueError: Shapes, types or options contradict each other.
        PlanningError: No algorithm fits the tuner's workspace limit.
        OutOfMemoryError: The result is larger than the memory that is free.
        VerificationError: The tuner verifies, and the results differ.
    """
    options = (stride, padding, dilation, groups, layout)
    return _call(("forward", 2, None, options), x, w, tuner, out, accumulate, bias)


def conv3d(
    x: Any,
    w: Any,
    *,
    bias: Any = None,
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
    return _call(("forward", 3, None, options), x, w, tuner, out, accumulate, bias)


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
    """Return the gradient of a 1D, 2D or 3D convolution with respect to its input.

    `dy` is the gradient of the output, stored like the output. `x_shape` is the shape
    of the input as stored (`NHWC`: channels last). For the options see `conv2d`.

    Returns:
        dx, of shape `x_shape`.

    Raises:
        ValueError: dy's shape is not what x_shape and w give.
    """
    options = (stride, padding, dilation, groups, layout)
    signature = ("backward_data", None, _shape("x_shape", x_shape), options)
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
    """Return the gradient of a 1D, 2D or 3D convolution with respect to its filter.

    `dy` is the gradient of the output and `w_shape` the shape of the filter as stored.
    With `accumulate`, the gradient is added to `out` once, however many micro-batches
    there are. For the options see `conv2d`.

    Returns:
        dw, of shape `w_shape`.

    Raises:
        ValueError: dy's shape is not what x and w_shape give.
    """
    options = (stride, padding, dilation, groups, layout)
    signature = ("backward_filter", None, _shape("w_shape", w_shape), options)
    return _call(signature, x, dy, tuner, out, accumulate)


def explain(plan: ConvPlan, tuner: Tuner | None = None) -> str:
    """Explain in words why a plan was chosen.

    The text names the choice without division, what the plan does instead, which
    algorithms were excluded by how many bytes, and what higher limits would gain.
    """
    return (tuner or _default_tuner()).explain(plan)


def _shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(shape)
    except TypeError:
        raise TypeError(f"{name} must be a sequence, got {shape!r}") from None


_Options = tuple[Any, Any, Any, int, str]
_Signature = tuple[str, int | None, tuple[int, ...] | None, _Options]
"""Direction, number of spatial axes, result shape, and (stride, …, layout)."""


def _call(
    signature: _Signature,
    a: Any,
    b: Any,
    tuner: Tuner | None,
    out: Any,
    accumulate: bool,
    bias: Any = None,
) -> Any:
    """Run the bound plan of this signature and these operands, binding it first."""
    if tuner is None:
        tuner = _default_tuner()
    elif not isinstance(tuner, Tuner):
        raise TypeError(
            f"tuner must be a mucudnn.Tuner, got {tuner!r}; leave it out for one that "
            "is configured by the environment"
        )
    try:
        key = (signature, a.shape, b.shape, a.dtype, b.dtype)
        ready = tuner.bound.get(key)
    except AttributeError:
        kinds = f"{type(a).__name__} and {type(b).__name__}"
        raise TypeError(f"operands must be arrays, got {kinds}") from None
    except TypeError:  # a list among the options does not hash
        signature = (*signature[:3], _hashable(signature[3]))
        key = (signature, a.shape, b.shape, a.dtype, b.dtype)
        ready = tuner.bound.get(key)
    if ready is None:
        if any(type(x).__module__.partition(".")[0] == "torch" for x in (a, b)):
            raise TypeError(
                "operands must be arrays, got PyTorch tensors; pass tensor.numpy(), or "
                "run the model within mucudnn.torch.convolutions()"
            )
        problem = _problem(signature, a, b)
        result = problem.operands()[2]
        check_out(tuner.backend.device, result, out, accumulate)
        if out is None:
            what = f"the result, {result.dtype} {result.shape},"
            check_room(tuner.backend.device, what, [result])
    if bias is not None:
        bias = _checked_bias(tuner.backend, bias, b, out)
    if ready is None:
        ready = tuner.bound[key] = tuner.compiled(problem)
    out = ready(a, b, out, accumulate)
    if bias is not None:
        y = out  # the kernel takes channels as the second axis
        if signature[3][4] == "NHWC":
            y = out.reshape((math.prod(out.shape[:-1]), out.shape[-1]))
        tuner.backend.kernels["bias"].run([y, bias], [y], {}, None)
    return out


def _checked_bias(backend: Backend, bias: Any, w: Any, out: Any) -> Any:
    """Return the bias, densely packed; a copy where `out` would overwrite it."""
    try:
        shape, dtype = bias.shape, bias.dtype
    except AttributeError:
        raise TypeError(f"bias must be an array, got {type(bias).__name__}") from None
    if shape != w.shape[:1] or dtype != w.dtype:
        raise ValueError(
            f"bias must be {w.dtype} {tuple(w.shape[:1])}, one number per output "
            f"channel of w {tuple(w.shape)}, got {dtype} {tuple(shape)}"
        )
    if backend.kernels.get("bias") is None:
        raise UnsupportedError(f"backend {backend.name!r} has no kernel for 'bias'")
    device = backend.device
    overwritten = hasattr(out, "shape") and device.overlap(bias, out)
    return device.dense(bias, copy=overwritten)


def _hashable(options: _Options) -> _Options:
    def frozen(name: str, value: Padding) -> Any:
        listed = isinstance(value, Iterable) and not isinstance(value, str)
        return check_integers(name, value) if listed else value

    stride, padding, dilation, groups, layout = options
    return (
        frozen("stride", stride),
        frozen("padding", padding),
        frozen("dilation", dilation),
        check_integer("groups", groups, least=1),
        check_choice("layout", layout, LAYOUTS),
    )


def _problem(signature: _Signature, a: Any, b: Any) -> ConvProblem:
    way, rank, shape, (stride, padding, dilation, groups, layout) = signature
    direction = Direction(way)
    if str(a.dtype) != str(b.dtype):
        raise ValueError(f"operands have different data types, {a.dtype} and {b.dtype}")
    if rank is not None and len(a.shape) != rank + 2:
        raise ValueError(
            f"conv{rank}d takes an input of {rank + 2} axes, got shape {a.shape}"
        )
    # The operand that is not given has the shape of the result.
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
    # Operands x and w have shaped the problem: only a gradient can disagree.
    for array, spec in zip((a, b), problem.operands(), strict=False):
        if array.shape != spec.shape:
            raise ValueError(
                f"gradient of the output has shape {array.shape}, but x {x_shape} and "
                f"w {w_shape} give {spec.shape}"
            )
    return problem


def _logical(shape: Sequence[int], layout: str) -> tuple[int, ...]:
    """Return a stored shape with its channels second."""
    if layout == "NHWC" and len(shape) > 1:
        return (shape[0], shape[-1], *shape[1:-1])
    return tuple(shape)


@functools.cache
def _default_tuner() -> Tuner:
    return Tuner.from_env()
