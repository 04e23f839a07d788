"""Plans that survive: less memory than planned, or a kernel that fails half-way.

A workspace that cannot be had is answered by the next smaller plan. A kernel that fails
after some micro-batches is answered by finishing the samples that are left with the
algorithm that asks for least; what was written stays, so that nothing is added twice.
"""

import logging
from collections.abc import Callable, Hashable, Sequence
from weakref import WeakKeyDictionary

from mucudnn.backends.base import Array, Backend, Buffer, Device, PlanRunner
from mucudnn.errors import MucudnnError, OutOfMemoryError, StepFailedError
from mucudnn.ir.conv import ConvPlan, Direction
from mucudnn.runtime.tuning.bound_plan import compile_plan

__all__ = ["Arena", "ResilientPlan"]

logger = logging.getLogger(__name__)


class Arena:
    """One growing workspace a queue, shared by all convolutions that go to it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffers: WeakKeyDictionary[Hashable, tuple[int, Buffer]]
        self._buffers = WeakKeyDictionary()

    def get(self, nbytes: int) -> Buffer:
        """At least `nbytes` bytes; their contents are undefined.

        Raises:
            OutOfMemoryError: The device has no room.
        """
        queue = self._device.queue()
        held, buffer = self._buffers.get(queue, (-1, None))
        if nbytes > held:
            self._buffers.pop(queue, None)
            del buffer  # never two at once
            buffer = self._device.allocate(nbytes)
            self._buffers[queue] = nbytes, buffer
        return buffer


class ResilientPlan:
    """A compiled plan with others to fall back to.

    Args:
        backend: Runs the kernels.
        plan: The first choice.
        smaller: Makes plans for the same problem, among them some with less workspace;
            asked only once memory is short.
        arena: Where workspace comes from.
        replay: Whether the backend should launch the whole plan at once.
    """

    def __init__(
        self,
        backend: Backend,
        plan: ConvPlan,
        smaller: Callable[[], Sequence[ConvPlan]],
        arena: Arena,
        *,
        replay: bool = False,
    ) -> None:
        self._backend = backend
        self._replay = replay
        self._compiled = compile_plan(backend, plan, replay=replay)
        self._smaller = smaller
        self._arena = arena

    @property
    def plan(self) -> ConvPlan:
        """The plan in use; a smaller one than planned once memory was short."""
        return self._compiled.plan

    def __call__(self, a: Array, b: Array, out: Array, accumulate: bool) -> None:
        """Run the convolution.

        Raises:
            OutOfMemoryError: There is no room even for the smallest plan.
            StepFailedError: A kernel failed and so did every other algorithm.
        """
        compiled, workspace = self._fitting()
        try:
            compiled.run(a, b, out, workspace, accumulate)
        except StepFailedError as e:
            logger.warning("%s; finishing with another algorithm", e)
            self._finish(e, a, b, out, accumulate)

    def _fitting(self) -> tuple[PlanRunner, Buffer]:
        """The largest plan that memory has room for, and its workspace.

        They belong together: another thread may fall back further meanwhile.
        """
        compiled = self._compiled
        while True:
            try:
                return compiled, self._arena.get(compiled.plan.workspace)
            except OutOfMemoryError as e:
                nbytes = compiled.plan.workspace
                fits = [plan for plan in self._smaller() if plan.workspace < nbytes]
                if not fits:
                    raise
                plan = max(fits, key=lambda plan: plan.workspace)
                logger.warning(
                    "%s; falling back from %d to %d bytes of workspace",
                    e,
                    nbytes,
                    plan.workspace,
                )
                compiled = compile_plan(self._backend, plan, replay=self._replay)
                self._compiled = compiled

    def _finish(
        self, failure: StepFailedError, a: Array, b: Array, out: Array, accumulate: bool
    ) -> None:
        """Run the samples that are left, undivided, with the least workspace."""
        whole = self._compiled.plan.problem
        done = failure.done
        problem = whole.with_batch(whole.batch - done)
        window = slice(done, whole.batch)
        if whole.direction is Direction.BACKWARD_FILTER:
            operands = (a[window], b[window], out)
            accumulate = accumulate or done > 0
        else:
            operands = (a[window], b, out[window])
        conv = self._backend.conv
        for algo, nbytes in sorted(conv.algorithms(problem), key=lambda pair: pair[1]):
            if algo == failure.algo:
                continue
            try:
                workspace = self._arena.get(nbytes)
                conv.run(problem, algo, *operands, workspace, accumulate=accumulate)
            except (MucudnnError, MemoryError) as e:
                logger.warning("%s failed too: %s", algo, e)
            else:
                logger.warning("%s finished the last %d samples", algo, problem.batch)
                return
        raise failure
