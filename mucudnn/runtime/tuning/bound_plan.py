"""A convolution plan bound to a backend, with fallbacks for failures.

If the workspace cannot be allocated, the next smaller plan is used. If a kernel fails
after some micro-batches, the algorithm with the least workspace computes the remaining
samples; results so far are kept, so that nothing is accumulated twice. On request, the
result of a divided plan is compared with that of an undivided run.

Where a library can serialize its execution plans, their text is cached beside the
measurements under the same key, which saves the search for an engine.
"""

import logging
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from mucudnn.arguments import check_bool
from mucudnn.backends import Device
from mucudnn.backends.base import Backend, Runner
from mucudnn.backends.device import Array, Buffer
from mucudnn.errors import (
    BackendError,
    MucudnnError,
    OutOfMemoryError,
    StepFailedError,
    VerificationError,
)
from mucudnn.ir.conv import ConvPlan, ConvProblem, Direction
from mucudnn.ir.tensor import TensorSpec
from mucudnn.runtime.store.measurements import BenchmarkCache
from mucudnn.runtime.tuning.result_check import rounding_error, summed_terms

logger = logging.getLogger(__name__)

_Operands = tuple[Array, Array, Array]


def run_plan(
    backend: Backend,
    plan: ConvPlan,
    a: Array,
    b: Array,
    out: Array,
    workspace: Buffer,
    *,
    accumulate: bool = False,
) -> None:
    """Run the micro-batches of a plan once.

    Operands are those of `ConvLibrary.run` for the whole mini-batch; `workspace` holds
    at least `plan.workspace` bytes. For repeated runs use `backend.bind(plan)`, which
    does not check whether arrays overlap.

    Raises:
        StepFailedError: A kernel failed.
        ValueError: `out` shares memory with an operand or the workspace.
    """
    for name, array in (("a", a), ("b", b), ("workspace", workspace)):
        if array is not None and backend.device.overlap(array, out):
            raise ValueError(f"out shares memory with {name}; give another array")
    backend.bind(plan).run(a, b, out, workspace, accumulate)


class Arena:
    """One growing workspace per stream, shared by all convolutions on the stream."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffers: WeakKeyDictionary[Hashable, tuple[int, Buffer]]
        self._buffers = WeakKeyDictionary()

    def get(self, nbytes: int) -> Buffer:
        """Return at least `nbytes` uninitialized bytes."""
        queue = self._device.queue()
        held, buffer = self._buffers.get(queue, (-1, None))
        if nbytes > held:
            self._buffers.pop(queue, None)
            del buffer  # free the old one first: never two at once
            buffer = self._device.allocate(nbytes)
            self._buffers[queue] = nbytes, buffer
        return buffer

    def release(self) -> None:
        """Free all workspaces once they are unused; later ones are allocated anew."""
        self._buffers.clear()


class BoundPlan:
    """A plan ready for the user's arrays, with smaller plans to fall back to.

    Args:
        smaller: Makes other plans of the same problem, some with less workspace; called
            only when memory is short.
        arena: Allocator of the workspace.
        replay: Whether the backend launches the whole plan at once.
        verify: Every how many runs one is compared with an undivided run; 0 for never.
    """

    def __init__(
        self,
        backend: Backend,
        plan: ConvPlan,
        smaller: Callable[[ConvPlan], Sequence[ConvPlan]],
        arena: Arena,
        *,
        replay: bool = False,
        verify: int = 0,
    ) -> None:
        self._backend = backend
        self._device = backend.device
        self._smaller = smaller
        self._arena = arena
        self._replay = replay
        self._verify = verify
        self._out = plan.problem.operands()[2]
        self._nbytes = self._out.nbytes
        self.use(plan)

    @property
    def plan(self) -> ConvPlan:
        """The plan in use; smaller than the preferred one if memory was short."""
        return self._runner.plan

    def use(self, plan: ConvPlan) -> None:
        """Use another plan of the same problem from now on."""
        self._runner = self._backend.bind(plan, replay=self._replay)
        self._unverified = 0  # runs since the last verified one, modulo `verify`

    def __call__(
        self, a: Array, b: Array, out: Array = None, accumulate: bool = False
    ) -> Array:
        """Compute into `out`, or into a new array.

        Shapes and types of `a` and `b` must have been checked; `out` is checked here.
        With `accumulate` the result is added to `out`. Operands that `out` overlaps are
        copied.
        """
        device = self._device
        if out is None and accumulate is False:
            out = device.view(device.allocate(self._nbytes), 0, self._out)
            a, b = device.dense(a), device.dense(b)
        else:
            check_out(device, self._out, out, accumulate)
            a = device.dense(a, copy=device.overlap(a, out))
            b = device.dense(b, copy=device.overlap(b, out))
        # Without room for the workspace, use the next smaller plan.
        runner = self._runner
        try:
            workspace = self._arena.get(runner.plan.workspace)
        except OutOfMemoryError as e:
            runner, workspace = self._fall_back(runner, e)
        # Verify: run undivided first, while `out` has what is added to.
        verify = None
        if self._verify and runner.plan.divided:
            if self._unverified == 0:
                verify = self._verifier(runner.plan, a, b, out if accumulate else None)
            else:
                self._unverified = (self._unverified + 1) % self._verify
        # Samples before a failure are final: another algorithm does the rest.
        try:
            runner.run(a, b, out, workspace, accumulate)
        except StepFailedError as e:
            logger.warning("%s; finishing with another algorithm", e)
            self._finish(e, a, b, out, accumulate)
        if verify is not None:
            verify(out)
            self._unverified = 1 % self._verify
        return out

    def _fall_back(self, runner: Runner, error: OutOfMemoryError) -> tuple[Runner, Any]:
        """Switch to the largest smaller plan whose workspace can be allocated."""
        # Return the runner with its workspace: another thread may fall back further
        # meanwhile.
        while True:
            plan = runner.plan
            others = [p for p in self._smaller(plan) if p.workspace < plan.workspace]
            if not others:
                raise error
            smaller = max(others, key=lambda p: p.workspace)
            logger.warning(
                "%s; falling back from %d to %d bytes of workspace",
                error,
                plan.workspace,
                smaller.workspace,
            )
            runner = self._backend.bind(smaller, replay=self._replay)
            self._runner, self._unverified = runner, 0
            try:
                return runner, self._arena.get(smaller.workspace)
            except OutOfMemoryError as e:
                error = e.with_traceback(None)  # it would keep the caller's arrays

    def _finish(
        self, failure: StepFailedError, a: Array, b: Array, out: Array, accumulate: bool
    ) -> None:
        """Compute the remaining samples, undivided and with the least workspace."""
        whole, done = self.plan.problem, failure.done
        problem = whole.with_batch(whole.batch - done)
        window = slice(done, whole.batch)
        if whole.direction is Direction.BACKWARD_FILTER:
            operands = (a[window], b[window], out)
            accumulate = accumulate or done > 0
        else:
            operands = (a[window], b, out[window])
        algo = self._run_undivided(problem, operands, accumulate, failure.algo)
        if algo is None:
            raise failure
        logger.warning("%s finished the last %d samples", algo, problem.batch)

    def _run_undivided(
        self, problem: ConvProblem, operands: _Operands, adds: bool, without: str = ""
    ) -> str | None:
        """Run a problem in one call with little workspace.

        Returns the algorithm that ran, or None if all failed.
        """
        conv = self._backend.conv
        for algo, nbytes in sorted(conv.algorithms(problem), key=lambda pair: pair[1]):
            if algo == without:
                continue
            try:
                workspace = self._arena.get(nbytes)
                conv.run(problem, algo, *operands, workspace, accumulate=adds)
            except (MucudnnError, MemoryError) as e:
                logger.warning("%s failed too: %s", algo, e)
            else:
                return algo
        return None

    def _verifier(
        self, plan: ConvPlan, a: Array, b: Array, added_to: Array
    ) -> Callable[[Array], None]:
        """Run the problem undivided; return a function that checks a result against it.

        Errors are relative to the largest result, of each sample where samples are
        independent. Where terms cancel, the scale is that of the summed products.
        """
        device, problem = self._device, plan.problem
        summed = problem.direction is Direction.BACKWARD_FILTER

        import numpy as np  # the command line starts without it

        def largest(array: Array) -> Any:
            values = np.abs(device.download(array)).astype(np.float64)
            axes = None if summed else tuple(range(1, values.ndim))
            return values.max(axis=axes, keepdims=True)

        with np.errstate(all="ignore"):
            scale = largest(a) * largest(b).max() * math.sqrt(summed_terms(problem))
        expected = device.view(device.allocate(self._nbytes), 0, self._out)
        if added_to is not None:
            scale = np.maximum(scale, largest(added_to))
            expected = device.dense(added_to, copy=True)
        algo = self._run_undivided(problem, (a, b, expected), added_to is not None)
        if algo is None:
            raise BackendError(
                f"{problem} cannot be verified: no algorithm runs it undivided"
            )
        scale = np.maximum(scale, largest(expected))
        wanted = device.download(expected).astype(np.float64)
        # The relative error that rounding of operands and sums can explain.
        modes = {step.math_mode for step in plan.steps}
        modes.add(self._backend.conv.traits(problem, algo).math_mode)
        most = rounding_error(problem, modes, len(plan.steps))

        def check(out: Array) -> None:
            found = device.download(out).astype(np.float64)
            with np.errstate(all="ignore"):
                error = np.abs(found - wanted) / scale
            error[np.isnan(error)] = np.inf
            # Algorithms differ in which outputs a non-finite operand reaches.
            error[(found == wanted) | ~np.isfinite(scale)] = 0
            at = np.unravel_index(np.argmax(error), error.shape)
            if error[at] > most:
                raise VerificationError(
                    f"{problem}: {plan} differs from {algo} in one call by "
                    f"{error[at]:.2g} of the results' magnitude at "
                    f"{tuple(map(int, at))}: {found[at]:.9g}, not {wanted[at]:.9g}; "
                    f"rounding explains at most {most:.1g}. Do not use `out`; "
                    "Tuner(planner='undivided') never divides a convolution"
                )

        return check


def check_out(device: Device, spec: TensorSpec, out: Array, accumulate: bool) -> None:
    """Check that `out` can take the result."""
    check_bool("accumulate", accumulate)
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
    # Arrays of other libraries may lack the flag, and are writable then.
    if not getattr(getattr(out, "flags", None), "writeable", True):
        raise ValueError("out must be writable, got a read-only array")


def restore_plans(backend: Backend, cache: BenchmarkCache, plan: ConvPlan) -> None:
    """Load the cached texts of a plan's kernels; cache the texts of all others.

    A text that the library rejects is replaced.
    """
    texts, fingerprint = backend.plan_serializer, backend.device.fingerprint
    if texts is None:
        return
    # Parts of a filter gradient but the first add, which may be another kernel.
    adds_up = plan.problem.direction is Direction.BACKWARD_FILTER
    kernels = dict.fromkeys(
        (step.batch, step.algo, adds_up and window.start > 0)
        for window, step in plan.slices()
    )
    for batch, algo, add in kernels:
        problem = plan.problem.with_batch(batch)
        name = f"{algo}+=" if add else algo
        known = cache.get_plan_text(fingerprint, problem, name)
        if known is not None:
            try:
                texts.loads(problem, algo, known, accumulate=add)
                continue
            except MucudnnError as e:
                logger.info("rebuilding the plan of %s for %s: %s", name, problem, e)
        try:
            text = texts.dumps(problem, algo, accumulate=add)
        except MucudnnError as e:  # running it fails the same way and falls back
            logger.info("%s cannot be planned for %s: %s", name, problem, e)
            continue
        if text is not None:
            cache.put_plan_text(fingerprint, problem, name, text)
