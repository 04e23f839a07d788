"""Planned kernels on PyTorch's tensors, with the signatures of PyTorch's operators."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mucudnn.backends.base import Runner
from mucudnn.backends.device import Buffer
from mucudnn.errors import MucudnnError
from mucudnn.ir.conv import ConvPlan, ConvProblem, Direction
from mucudnn.runtime.tuning.bound_plan import Arena
from mucudnn.runtime.tuning.timing import measure_together
from mucudnn.runtime.tuning.tuner import Tuner
from mucudnn.torch.conv.backend import TORCH

Run = Callable[..., Any]


# Calls of PyTorch's convolutions, prepared once.
#
# A call is identified by the shapes, strides and types of its operands and by its
# options. It runs our plan, or PyTorch's own kernel: because the plan uses that,
# because PyTorch was faster when whole calls were compared, or because our kernels do
# not support the call.


class PreparedCall:
    """The implementation of one kind of call, and its counts.

    Args:
        run: Our implementation, given the call's tensors; None for PyTorch's.
        why: Reason for PyTorch's kernel, if no plan uses it.

    Attributes:
        calls: All calls.
        succeeded: Calls that `run` computed before it failed.
    """

    __slots__ = ("calls", "run", "succeeded", "why")

    def __init__(self, run: Run | None, why: str | None = None) -> None:
        self.run = run
        self.why = why
        self.calls = 0
        self.succeeded = 0

    def compute(self, native: Run, *args: Any) -> Any:
        """Count and run a call; if our kernels fail, later calls are PyTorch's too."""
        self.calls += 1
        run = self.run  # another thread may reset it meanwhile
        if run is None:
            return native()
        try:
            return run(*args)
        except (MucudnnError, MemoryError) as e:
            if self.run is not None:
                self.succeeded = self.calls - 1
            self.run, self.why = None, f"{type(e).__name__}: {e}"
        return native()


class CallPreparer:
    """Plans calls, and accepts a plan of ours only if it is faster than PyTorch.

    Its errors are reasons to leave a call to PyTorch.
    """

    def __init__(self, tuner: Tuner) -> None:
        self._tuner = tuner
        self.arena = Arena(tuner.backend.device)

    def forward(
        self, native: Run, x: Any, w: Any, b: Any, options: Any
    ) -> PreparedCall:
        """Prepare a call of `aten::convolution`; `native` runs PyTorch's kernel."""
        sizes = None if b is None else list(b.shape)
        geometry = Geometry.of(x, w, sizes, options)
        shape = geometry.result_shape(x, w)
        if b is not None:
            _check("bias", b, shape[1:2], x.dtype)
        kernel = self._kernel(geometry, Direction.FORWARD, x, w)
        if kernel is None:
            return PreparedCall(None)
        ours = planned_forward(kernel, b is not None, x.dim())
        return self._faster(ours, [kernel], native, (x, w, b))

    def backward(
        self, native: Run, gy: Any, x: Any, w: Any, sizes: Any, options: Any, mask: Any
    ) -> PreparedCall:
        """Prepare a call of `aten::convolution_backward`; `native` takes the mask."""
        roles = (Direction.BACKWARD_DATA, Direction.BACKWARD_FILTER)
        geometry = Geometry.of(x, w, sizes, options)
        _check("gradient", gy, geometry.result_shape(x, w), x.dtype)
        kernels = [
            self._kernel(geometry, role, x, w) if wanted else None
            for role, wanted in zip(roles, mask, strict=False)
        ]
        mine = [kernel for kernel in kernels if kernel is not None]
        if not mine:
            return PreparedCall(None)
        ours = planned_backward(kernels, geometry.transposed, mask)
        return self._faster(ours, mine, lambda: native(mask), (native, gy, x, w))

    def _kernel(
        self, geometry: "Geometry", role: Direction, x: Any, w: Any
    ) -> "Kernel | None":
        """Return a planned kernel of ours; None if the plan is PyTorch's own."""
        (plan,) = self._tuner.plan([geometry.problem(role, x, w)])
        if is_native(plan):
            return None
        runner = self._tuner.backend.bind(plan)
        return Kernel(runner, plan.workspace, self.arena.get)

    def _faster(
        self, ours: Run, kernels: "Sequence[Kernel]", native: Run, args: tuple[Any, ...]
    ) -> PreparedCall:
        """Choose ours unless PyTorch's is offered and not clearly slower as a whole."""
        offered = self._tuner.backend.conv.algorithms(kernels[0].problem)
        if TORCH not in dict(offered):
            return PreparedCall(ours)
        device = self._tuner.backend.device
        first, second = measure_together(
            [lambda: ours(*args), native], device, self._tuner.rule
        )
        noise_ms = max(first.noise_ms, second.noise_ms)
        won = first.time_ms < second.time_ms - noise_ms
        return PreparedCall(ours if won else None)


def _check(name: str, tensor: Any, shape: tuple[int, ...], dtype: Any) -> None:
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ValueError(f"{name} of another shape or data type")


def is_native(plan: ConvPlan) -> bool:
    """Return whether a plan is PyTorch's kernel for the whole batch."""
    return not plan.divided and plan.steps[0].algo == TORCH


def result_form(problem: ConvProblem) -> tuple[tuple[int, ...], torch.memory_format]:
    """Return the shape of a problem's result in PyTorch's order, and its format."""
    *_, out = problem.operands()
    if problem.layout == "NCHW":
        return out.shape, torch.contiguous_format
    last = (None, None, torch.channels_last, torch.channels_last_3d)
    first, *spatial, channels = out.shape
    return (first, channels, *spatial), last[len(spatial)]


class Kernel:
    """One planned kernel on tensors, in `nbytes` that `workspace` allocates."""

    def __init__(
        self, runner: Runner, nbytes: int, workspace: Callable[[int], Buffer]
    ) -> None:
        self.problem = problem = runner.plan.problem
        self._run = runner.run
        self._nbytes = nbytes
        self._workspace = workspace
        self._shape, self._format = result_form(problem)

    def __call__(self, a: Any, b: Any) -> Any:
        """Return the result of two inputs, in the order of the problem's operands."""
        form = self._format
        a = a.detach().contiguous(memory_format=form)
        b = b.detach().contiguous(memory_format=form)
        out = torch.empty(  # on the CPU, whatever `torch.set_default_device` says
            self._shape, dtype=a.dtype, device=a.device, memory_format=form
        )
        workspace = self._workspace(self._nbytes)
        self._run(a.numpy(), b.numpy(), out.numpy(), workspace, False)
        return out


def planned_forward(kernel: Kernel, biased: bool, axes: int) -> Run:
    """Return a planned `aten::convolution`, whose output has `axes` axes."""
    shape = -1, *[1] * (axes - 2)

    def forward(x: Any, w: Any, b: Any) -> Any:
        y = kernel(x, w)
        return y.add_(b.detach().view(shape)) if biased else y

    return forward


def planned_backward(
    kernels: Sequence[Kernel | None], transposed: bool, mask: Sequence[bool]
) -> Run:
    """Return a planned `aten::convolution_backward`, which takes PyTorch's first.

    Kernels are those of the input's and the filters' gradient, None for PyTorch's; the
    mask chooses gradients of input, filters and bias.
    """
    dx, dw, db = mask
    theirs = [dx and kernels[0] is None, dw and kernels[1] is None, False]
    if any(theirs):  # PyTorch's call computes the bias's gradient as well
        theirs[2], db = db, False

    def backward(native: Any, gy: Any, x: Any, w: Any) -> Any:
        found = [*native(theirs)] if any(theirs) else [None, None, None]
        operands = (gy, w), ((gy, x) if transposed else (x, gy))
        for i, kernel in enumerate(kernels):
            if kernel is not None:
                found[i] = kernel(*operands[i])
        if db:
            found[2] = gy.detach().sum([0, *range(2, gy.dim())])
        return tuple(found)

    return backward


# PyTorch's convolutions as our problems.
#
# A transposed convolution is the gradient of another convolution with respect to its
# input: its output is the other's input, and the kernels exchange their roles.


_TRANSPOSED = {
    Direction.FORWARD: Direction.BACKWARD_DATA,
    Direction.BACKWARD_DATA: Direction.FORWARD,
}
"""What PyTorch computes of a transposed convolution -> what the other computes."""

_DTYPES = {torch.float32: "float32", torch.float64: "float64"}


@dataclass(frozen=True, slots=True)
class Geometry:
    """The options of `aten::convolution`, and the layout of its operands.

    Attributes:
        stride: One number for each spatial axis, as the next two.
        output_padding: Added to one end of a transposed convolution's output. Without
            meaning for others, but double backward passes it on.
        layout: Layout of our kernels' operands; see `ConvProblem`.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int
    layout: str

    @classmethod
    def of(
        cls, x: Any, w: Any, bias_sizes: Any, options: tuple[Any, ...]
    ) -> "Geometry":
        """Return the geometry of a call, in the layout of PyTorch's result.

        Raises:
            ValueError: Our kernels do not support the call.
            RuntimeError: PyTorch refuses the call.
        """
        if x.dtype not in _DTYPES or w.dtype != x.dtype:
            raise ValueError(f"data type {str(x.dtype).removeprefix('torch.')}")
        if not 3 <= x.dim() <= 5 or w.dim() != x.dim():
            raise ValueError(f"{x.dim()} axes")
        if not x.numel() or not w.numel():
            raise ValueError("no elements")
        stride, padding, dilation, transposed, output_padding, groups = options
        axes = x.dim() - 2
        lists = (stride, padding, dilation, output_padding)
        full = [(*v,) * axes if len(v) == 1 else (*v,) for v in lists]
        if any(len(v) != axes for v in full):
            raise ValueError("options of another number of axes")
        # Results have the memory format that PyTorch's kernel would give them.
        chosen = torch._C._select_conv_backend(x, w, None, *options, bias_sizes)
        form = torch._C._conv_determine_backend_memory_format(x, w, chosen)
        plain = form == torch.contiguous_format or axes == 1
        return cls(
            stride=full[0],
            padding=full[1],
            dilation=full[2],
            transposed=transposed,
            output_padding=full[3],
            groups=groups,
            layout="NCHW" if plain else "NHWC",
        )

    def problem(self, role: Direction, x: Any, w: Any) -> ConvProblem:
        """Return the problem that computes a result for operands of these shapes.

        `role` is the result, as of a convolution that is not transposed.

        Raises:
            ValueError: The shapes contradict each other, or no problem is equivalent.
        """
        image, direction = x.shape, role
        if self.transposed:
            direction = _TRANSPOSED.get(role, role)
            sizes = zip(
                *(x.shape[2:], w.shape[2:], self.stride, self.padding),
                *(self.dilation, self.output_padding),
                strict=True,
            )
            image = (
                *(x.shape[0], w.shape[1] * self.groups),
                *(
                    (n - 1) * s - 2 * p + d * (k - 1) + 1 + o
                    for n, k, s, p, d, o in sizes
                ),
            )
        problem = ConvProblem(
            direction=direction,
            x_shape=image,
            w_shape=w.shape,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.groups,
            dtype=_DTYPES[x.dtype],
            layout=self.layout,
        )
        if self.transposed and problem.y_shape != x.shape:
            raise ValueError("output_padding beyond the stride")
        return problem

    def result_shape(self, x: Any, w: Any) -> tuple[int, ...]:
        """Return the shape of the output."""
        problem = self.problem(Direction.FORWARD, x, w)
        return problem.x_shape if self.transposed else problem.y_shape
