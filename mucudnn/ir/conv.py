"""Convolutions as data: problems, measured algorithms, plans and output shapes.

Shapes are always written (N, C, *spatial) and (K, C // groups, *kernel); `layout`
says how such a tensor is stored. Convolution means cross-correlation, as in cuDNN's
`CUDNN_CROSS_CORRELATION` and in every deep-learning framework.
"""

import enum
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from mucudnn.arguments import check_choice, check_integer, check_integers
from mucudnn.ir.numerics import NATIVE, RowStatus
from mucudnn.ir.sizes import format_bytes
from mucudnn.ir.tensor import ITEMSIZE, TensorSpec
from mucudnn.notebook import html_of

LAYOUTS = ("NCHW", "NHWC")
"""Storage orders, named by their 2-D case: channels first and channels last."""

_MOST = 2**31 - 1
"""Largest padding for which every element of a padded image is addressable."""


class Direction(enum.Enum):
    """The three convolution kernels of a training step."""

    FORWARD = "forward"
    BACKWARD_DATA = "backward_data"
    BACKWARD_FILTER = "backward_filter"


@dataclass(frozen=True, slots=True, init=False)
class ConvProblem:
    """A convolution kernel call without its data. Hashable: it is the cache key.

    Attributes:
        x_shape: Input as (N, C, *spatial) with 1, 2 or 3 spatial sizes.
        w_shape: Filter as (K, C // groups, *kernel).
        stride: Step of the filter along each spatial axis; an int applies to all axes.
            2**31 and more is reduced to the smallest stride with the same single
            output.
        padding: Zeros at both ends of each spatial axis.
        dilation: Distance between the filter's taps.
        groups: Independent convolutions over slices of the channels.
        dtype: Data type of all three tensors.
        layout: How tensors are stored: `NCHW` (channels first, for any rank) or
            `NHWC` (channels last: x as (N, *spatial, C), w as (K, *kernel, C)).
    """

    direction: Direction
    x_shape: tuple[int, ...]
    w_shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    dtype: str
    layout: str

    def __init__(
        self,
        *,
        direction: Direction | str,
        x_shape: Sequence[int],
        w_shape: Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] | str = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        dtype: str = "float32",
        layout: str = "NCHW",
    ) -> None:
        """Validate and normalize all fields.

        A direction may be given by its value ("forward"). The padding "valid" means
        none; "same" keeps the spatial size of the input, as in PyTorch: for stride 1
        only, with equally many zeros at both ends.

        Raises:
            ValueError: A field is out of range or two fields contradict each other;
                the message shows both.
            TypeError: A size is not an integer.
        """
        # Check and normalize each field by itself.
        ways = [way.value for way in Direction]
        named = isinstance(direction, str) and direction in ways
        if not (named or isinstance(direction, Direction)):
            valid = ", ".join(f"Direction.{d.name} ({d.value!r})" for d in Direction)
            kind = ValueError if isinstance(direction, str) else TypeError
            raise kind(f"direction is {direction!r}; choose one of: {valid}")
        check_choice("dtype", dtype, ITEMSIZE)
        check_choice("layout", layout, LAYOUTS)
        x = check_integers("x_shape", x_shape, least=1)
        w = check_integers("w_shape", w_shape, least=1)
        if not 3 <= len(x) <= 5:
            raise ValueError(
                f"x_shape {x} has {len(x)} axes; N, C and 1, 2 or 3 spatial ones "
                "are supported"
            )
        if len(w) != len(x):
            raise ValueError(f"w_shape {w} has {len(w)} axes, x_shape {x} has {len(x)}")
        strides = per_axis("stride", stride, len(x) - 2, 1)
        dilations = per_axis("dilation", dilation, len(x) - 2, 1)
        if isinstance(padding, str):
            padding = named_padding(padding, w[2:], strides, dilations)
        pads = per_axis("padding", padding, len(x) - 2, 0)
        if max(pads) > _MOST:
            raise ValueError(f"padding must be at most {_MOST}, got {max(pads)}")
        # Where neither has any effect, large numbers would overflow NumPy's strides.
        dilations = tuple(
            min(gap, _MOST) if k == 1 else gap
            for gap, k in zip(dilations, w[2:], strict=True)
        )
        strides = tuple(
            step if step <= _MOST else min(step, size + 2 * pad)
            for step, size, pad in zip(strides, x[2:], pads, strict=True)
        )
        values: dict[str, object] = {
            "direction": Direction(direction),
            "x_shape": x,
            "w_shape": w,
            "stride": strides,
            "padding": pads,
            "dilation": dilations,
            "groups": check_integer("groups", groups, least=1),
            "dtype": dtype,
            "layout": layout,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        # The fields must agree with each other: channels, groups, a result that exists.
        expected = w[1] * self.groups
        if x[1] != expected:
            raise ValueError(
                f"x_shape {x} has {x[1]} channels, but w_shape {w} "
                f"expects {w[1]} x {self.groups} groups = {expected}"
            )
        if w[0] % self.groups:
            raise ValueError(
                f"{w[0]} output channels (w_shape {w}) cannot be divided into "
                f"{self.groups} groups"
            )
        for i, out in enumerate(self.y_shape[2:]):
            if out < 1:
                reach = self.dilation[i] * (self.w_shape[2 + i] - 1) + 1
                have = self.x_shape[2 + i] + 2 * self.padding[i]
                raise ValueError(
                    f"empty output {self.y_shape}: on spatial axis {i} the filter "
                    f"spans {reach} elements, and the padded input has only {have}"
                )

    @property
    def batch(self) -> int:
        """Mini-batch size N."""
        return self.x_shape[0]

    @property
    def y_shape(self) -> tuple[int, ...]:
        """Shape of the output, (N, K, *spatial)."""
        spatial = (
            (size + 2 * pad - dil * (k - 1) - 1) // step + 1
            for size, k, pad, step, dil in zip(
                self.x_shape[2:],
                self.w_shape[2:],
                self.padding,
                self.stride,
                self.dilation,
                strict=True,
            )
        )
        return (self.x_shape[0], self.w_shape[0], *spatial)

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEMSIZE[self.dtype]

    @property
    def flops(self) -> int:
        """Floating-point operations of the direct method (a multiply-add is two).

        The count is equal in all three directions and includes taps on padding.
        """
        return 2 * math.prod(self.y_shape) * math.prod(self.w_shape[1:])

    def with_batch(self, batch: int) -> "ConvProblem":
        """Return the same convolution for another (micro-)batch size."""
        return replace(self, x_shape=(batch, *self.x_shape[1:]))

    def with_direction(self, direction: Direction) -> "ConvProblem":
        """Return the kernel of the same layer for another direction."""
        return replace(self, direction=direction)

    def stored(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Permute a logical (first, channels, *spatial) shape to `layout`."""
        if self.layout == "NHWC":
            return (shape[0], *shape[2:], shape[1])
        return tuple(shape)

    def operands(self) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
        """Return the two inputs and the output, shapes as stored.

        By direction: (x, w) -> y, (dy, w) -> dx or (x, dy) -> dw.
        """
        x, w, y = (
            TensorSpec(name, self.stored(shape), self.dtype)
            for name, shape in (
                ("x", self.x_shape),
                ("w", self.w_shape),
                ("y", self.y_shape),
            )
        )
        match self.direction:
            case Direction.FORWARD:
                return x, w, y
            case Direction.BACKWARD_DATA:
                return y, w, x
            case Direction.BACKWARD_FILTER:
                return x, y, w


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgoPerf:
    """An algorithm measured at one micro-batch size.

    Attributes:
        algo: Name of the algorithm in its backend.
        batch: Micro-batch size it was measured at.
        time_ms: Median of the timed runs; infinity if `error` is set.
        workspace: Workspace in bytes.
        deterministic: Whether two runs give the same bits.
        error: Why there is no measurement; planners ignore such a row.
        noise_ms: Uncertainty of the median; planners add it to the time.
        samples: Number of timed runs.
        math_mode: Arithmetic of the algorithm (`default`, `tf32` …).
        notes: Further properties reported by its library (`tensor_core`, `winograd` …).
    """

    algo: str
    batch: int
    time_ms: float
    workspace: int
    deterministic: bool = True
    error: str | None = None
    noise_ms: float = 0.0
    samples: int = 1
    math_mode: str = NATIVE
    notes: tuple[str, ...] = ()

    @property
    def status(self) -> RowStatus:
        """Outcome of the measurement; `error` has the details."""
        return RowStatus.of(self.error, self.samples)

    @property
    def cost_ms(self) -> float:
        """Cost minimized by planners: the time plus its uncertainty."""
        return self.time_ms + self.noise_ms


@dataclass(frozen=True, slots=True)
class PerfTable:
    """All measurements of one problem, independent of any limit or policy.

    Attributes:
        problem: The convolution over the whole mini-batch.
        perfs: Measurements, failed ones included.
        launch_overhead_ms: Cost of one additional micro-batch beyond `time_ms`.
    """

    problem: ConvProblem
    perfs: tuple[AlgoPerf, ...]
    launch_overhead_ms: float = 0.0

    @property
    def usable(self) -> tuple[AlgoPerf, ...]:
        """Successful measurements."""
        return tuple(p for p in self.perfs if p.error is None)

    def batches(self) -> tuple[int, ...]:
        """Return the measured micro-batch sizes, ascending."""
        return tuple(sorted({p.batch for p in self.usable}))

    def fastest(self, batch: int, workspace_limit: float = math.inf) -> AlgoPerf | None:
        """Return the cheapest algorithm at `batch` that fits the limit, if any."""
        fits = (
            p
            for p in self.usable
            if p.batch == batch and p.workspace <= workspace_limit
        )
        return min(fits, key=lambda p: (p.cost_ms, p.workspace), default=None)


@dataclass(frozen=True, slots=True, repr=False)
class ConvPlan:
    """A division of a problem into micro-batches that share one workspace.

    Plans with the same steps are equal, whatever limits they were planned under.
    """

    problem: ConvProblem
    steps: tuple[AlgoPerf, ...]
    time_ms: float = field(init=False, compare=False)
    """Predicted time: the sum over the micro-batches."""
    workspace: int = field(init=False, compare=False)
    """Workspace in bytes: the maximum over the micro-batches."""
    workspace_limit: int | None = field(default=None, kw_only=True, compare=False)
    """Workspace limit in bytes it was planned under; None if unknown."""

    def __post_init__(self) -> None:
        covered = sum(step.batch for step in self.steps)
        if covered != self.problem.batch:
            raise ValueError(f"plan covers {covered} of {self.problem.batch} samples")
        times, sizes = zip(*((s.time_ms, s.workspace) for s in self.steps), strict=True)
        object.__setattr__(self, "time_ms", sum(times))
        object.__setattr__(self, "workspace", max(sizes))

    def __repr__(self) -> str:
        """Return text such as `ConvPlan(8 × FFT(16) + GEMM(3), 3.2 ms, 12 MiB)`."""
        parts = []
        for (algo, batch), alike in groupby(self.steps, lambda s: (s.algo, s.batch)):
            times = sum(1 for _ in alike)
            parts.append(f"{times} × " * (times > 1) + f"{algo}({batch})")
        size = format_bytes(self.workspace)
        return f"ConvPlan({' + '.join(parts)}, {self.time_ms:.3g} ms, {size})"

    def under(self, workspace_limit: int) -> "ConvPlan":
        """Return the same plan, marked as planned under a limit."""
        return replace(self, workspace_limit=workspace_limit)

    @property
    def divided(self) -> bool:
        """True if the plan has more than one micro-batch."""
        return len(self.steps) > 1

    _repr_html_ = html_of

    def slices(self) -> Iterator[tuple[slice, AlgoPerf]]:
        """Yield each micro-batch's slice of the batch axis and its algorithm."""
        start = 0
        for step in self.steps:
            yield slice(start, start + step.batch), step
            start += step.batch


Ints = int | Sequence[int]


def problem_text(problem: ConvProblem) -> str:
    """Return a problem's direction, shapes and data type in words."""
    return (
        f"{problem.direction.value} of {problem.batch} samples, x {problem.x_shape}, "
        f"w {problem.w_shape}, {problem.dtype}"
    )


def channels(name: str, shape: Sequence[int]) -> int:
    """Return the number of channels of a tensor, its axis 1."""
    if len(shape) < 2:
        raise ValueError(f"{name!r} has shape {tuple(shape)}; it must be (N, C, …)")
    return shape[1]


def per_axis(name: str, value: Any, rank: int, least: int) -> tuple[int, ...]:
    """Return one integer per spatial axis, from one for all or one for each."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        return (check_integer(name, value, least),) * rank
    sizes = check_integers(name, value, least)
    if len(sizes) != rank:
        raise ValueError(
            f"{name} {sizes} has {len(sizes)} entries for {rank} axes; give one for "
            f"all, or one for each of the {rank} spatial axes"
        )
    return sizes


def named_padding(
    name: str, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[int, ...]:
    """Return the padding for "same" or "valid", as in PyTorch."""
    if name not in ("same", "valid"):
        raise ValueError(
            f"unknown padding {name!r}; choose numbers, or one of: same, valid"
        )
    if name == "valid":
        return (0,) * len(kernel)
    if any(step != 1 for step in stride):
        raise ValueError(
            f"padding 'same' is for stride 1, got stride {tuple(stride)}; give the "
            "padding in numbers"
        )
    spans = tuple(gap * (k - 1) for k, gap in zip(kernel, dilation, strict=True))
    if any(span % 2 for span in spans):
        raise ValueError(
            f"padding 'same' for a filter of {tuple(kernel)} with dilation "
            f"{tuple(dilation)} needs {spans} zeros along the axes, and an odd number "
            "cannot be the same at both ends; pad the input first, or use a filter "
            "of odd size"
        )
    return tuple(span // 2 for span in spans)


@dataclass(frozen=True, slots=True)
class Window:
    """A pooling window over spatial axes.

    `extra` is additional padding at the end of each axis, for a last, partial window.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    extra: tuple[int, ...]

    @classmethod
    def over(
        cls,
        spatial: Sequence[int],
        kernel: Ints,
        stride: Ints | None,
        padding: Ints,
        ceil_mode: bool,
    ) -> "Window":
        """Validate a window for an image; `ceil_mode` keeps partial windows.

        A partial window must begin inside the image or its leading padding, as in
        PyTorch.

        Raises:
            ValueError: A size is out of range, or no window fits.
        """
        rank = len(spatial)
        kernels = per_axis("kernel", kernel, rank, 1)
        strides = kernels if stride is None else per_axis("stride", stride, rank, 1)
        pads = per_axis("padding", padding, rank, 0)
        extra = []
        for size, k, step, pad in zip(spatial, kernels, strides, pads, strict=True):
            if 2 * pad > k:
                raise ValueError(f"padding {pad} is more than half the kernel {k}")
            span = size + 2 * pad - k
            if span < 0:
                raise ValueError(
                    f"a window of {k} does not fit an image of {size} padded by {pad}"
                )
            over = -span % step
            # A window that began in the trailing padding would see no pixel.
            starts_inside = (span + over) // step * step < size + pad
            extra.append(over if ceil_mode and starts_inside else 0)
        return cls(kernels, strides, pads, tuple(extra))

    def out(self, spatial: Sequence[int]) -> tuple[int, ...]:
        """Return the spatial sizes of the result."""
        return tuple(
            (size + 2 * pad + more - k) // step + 1
            for size, k, step, pad, more in zip(
                spatial, self.kernel, self.stride, self.padding, self.extra, strict=True
            )
        )
