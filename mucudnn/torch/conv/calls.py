"""Calls of PyTorch's convolutions, made ready once and then only run.

A call is known by the shapes, strides and types of its operands and by its options.
What is ready for it either runs our plan or says that PyTorch's own kernel is to run:
because the plan takes it, because it was faster when both were run whole, or because
the call is none of ours.
"""

from collections.abc import Sequence
from typing import Any

from mucudnn.errors import MucudnnError
from mucudnn.runtime.tuning.bound_plan import Arena
from mucudnn.runtime.tuning.timing import measure_together
from mucudnn.runtime.tuning.tuner import Tuner
from mucudnn.torch.conv.algorithm import TORCH
from mucudnn.torch.conv.geometry import Geometry, Role
from mucudnn.torch.conv.kernels import Backward, Forward, Kernel, Run

__all__ = ["Ready", "ReadyMaker"]


class Ready:
    """What is ready for one kind of call, and how often it came.

    Args:
        run: Our way to compute it, of the call's tensors; None leaves it to PyTorch.
        why: Why it is left to PyTorch though no plan says so.
    """

    __slots__ = ("calls", "failed", "run", "why")

    def __init__(self, run: Run | None, why: str | None = None) -> None:
        self.run = run
        self.why = why
        self.calls = 0
        self.failed = 0

    def computed(self, native: Run, *args: Any) -> Any:
        """One call more, of these arguments; if our kernels fail it is PyTorch's."""
        self.calls += 1
        run = self.run  # which another thread may give up meanwhile
        if run is None:
            return native()
        try:
            return run(*args)
        except (MucudnnError, MemoryError) as e:
            self._give_up(e)
        return native()

    def _give_up(self, error: Exception) -> None:
        """From now on such calls are PyTorch's."""
        if self.run is not None:
            self.failed = self.calls - 1
        self.run, self.why = None, f"{type(error).__name__}: {error}"


class ReadyMaker:
    """Plans calls, and runs a plan of ours against PyTorch before it is believed.

    Args:
        tuner: Its backend is one of `cpu_backend`.
    """

    def __init__(self, tuner: Tuner) -> None:
        self._tuner = tuner
        self.arena = Arena(tuner.backend.device)

    def forward(self, native: Run, x: Any, w: Any, b: Any, options: Any) -> Ready:
        """For a call of `aten::convolution`; `native` runs PyTorch's, given nothing."""
        sizes = None if b is None else list(b.shape)
        try:
            geometry = Geometry.of(x, w, sizes, options)
            shape = geometry.result_shape(x, w)
            if b is not None:
                _check("bias", b, shape[1:2], x.dtype)
            kernel = self._kernel(geometry, Role.OUTPUT, x, w)
        except (MucudnnError, ValueError, RuntimeError) as e:
            return Ready(None, _reason(e))
        if kernel is None:
            return Ready(None)
        ours = Forward(kernel, b is not None, x.dim())
        return self._faster(ours, [kernel], native, (x, w, b))

    def backward(
        self, native: Run, gy: Any, x: Any, w: Any, sizes: Any, options: Any, mask: Any
    ) -> Ready:
        """For a call of `aten::convolution_backward`; `native` takes the mask."""
        roles = (Role.INPUT_GRADIENT, Role.FILTER_GRADIENT)
        try:
            geometry = Geometry.of(x, w, sizes, options)
            _check("gradient", gy, geometry.result_shape(x, w), x.dtype)
            kernels = [
                self._kernel(geometry, role, x, w) if wanted else None
                for role, wanted in zip(roles, mask, strict=False)
            ]
        except (MucudnnError, ValueError, RuntimeError) as e:
            return Ready(None, _reason(e))
        mine = [kernel for kernel in kernels if kernel is not None]
        if not mine:
            return Ready(None)
        ours = Backward(kernels, geometry.transposed, mask)
        return self._faster(ours, mine, lambda: native(mask), (native, gy, x, w))

    def _kernel(self, geometry: Geometry, role: Role, x: Any, w: Any) -> Kernel | None:
        """A planned kernel of ours; None where the plan is PyTorch's own."""
        (plan,) = self._tuner.plan([geometry.problem(role, x, w)])
        if not plan.divided and plan.steps[0].algo == TORCH:
            return None
        runner = self._tuner.backend.bind(plan)
        return Kernel(role, runner, plan.workspace, self.arena.get)

    def _faster(
        self,
        ours: Run,
        kernels: Sequence[Kernel],
        native: Run,
        args: tuple[Any, ...],
    ) -> Ready:
        """Ours, unless PyTorch's competes and was not clearly slower, all included."""
        offered = self._tuner.backend.conv.algorithms(kernels[0].problem)
        if TORCH not in dict(offered):
            return Ready(ours)
        try:
            first, second = measure_together(
                [lambda: ours(*args), native],
                self._tuner.backend.device,
                self._tuner.rule,
            )
        except MucudnnError as e:
            return Ready(None, _reason(e))
        noise_ms = max(first.noise_ms, second.noise_ms)
        won = first.time_ms < second.time_ms - noise_ms
        return Ready(ours if won else None)


def _check(name: str, tensor: Any, shape: tuple[int, ...], dtype: Any) -> None:
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ValueError(f"{name} of another shape or data type")


def _reason(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
