"""What a PyTorch step would need on a device, found without running anything.

    study = mt.memory(model, loss_fn, (x, y), optimizer, device="h200")
    study.least_budget, study.max_batch("8GiB")

The step is captured as `train_step` captures it, and every node is given the time of
its roofline on the device. Bytes are exact but for the scratch memory of kernels, which
only a measurement knows.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch

from mucudnn.errors import PlanningError
from mucudnn.ir.devices import get_device
from mucudnn.ir.profile import Profile
from mucudnn.ir.sizes import format_bytes
from mucudnn.torch.capture.parts import StepParts
from mucudnn.torch.capture.whole_step import capture_step
from mucudnn.torch.lowering.lowered import Lowered
from mucudnn.torch.measure import estimated
from mucudnn.torch.planning import Planner, as_budget
from mucudnn.torch.step import planner_of
from mucudnn.torch.step_plan import TorchPlan

__all__ = ["MemoryStudy", "memory"]

_LARGEST_BATCH = 1 << 20
_SHARES = (1.0, 0.5, 0.3, 0.1, 0.0)


def memory(
    model: torch.nn.Module,
    loss_fn: Callable[..., torch.Tensor],
    example: Sequence[torch.Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    device: str = "h200",
) -> "MemoryStudy":
    """Study a training step on a device that need not be there.

    Args:
        model: Called with the first tensor of a batch; on the CPU or without data.
        loss_fn: Called with the model's result and the rest of the batch.
        example: A batch; only its shapes and types are looked at.
        optimizer: Of the model's parameters.
        device: Whose figures times are estimated with; see `mucudnn.ir.devices`.

    Raises:
        ValueError: The device is not known.
    """
    return MemoryStudy(model, loss_fn, tuple(example), optimizer, device)


class MemoryStudy:
    """A step on a device, under any budget and of any batch size.

    Args:
        model: Whose step it is.
        loss_fn: Of its result and the rest of a batch.
        example: A batch.
        optimizer: Of its parameters.
        device: Where it would run.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Callable[..., torch.Tensor],
        example: Sequence[torch.Tensor],
        optimizer: torch.optim.Optimizer,
        device: str,
    ) -> None:
        self._model = model
        self._loss_fn = loss_fn
        self._example = example
        self._optimizer = optimizer
        self._figures = get_device(device)
        self._planners: dict[int | None, Planner] = {}

    @cached_property
    def least_budget(self) -> int:
        """The least bytes that the example's step is planned in."""
        return self._planner(None).least_budget()

    @cached_property
    def unlimited_bytes(self) -> int:
        """What the step has in use at most if nothing leaves."""
        return self.plan().peak_bytes

    def plan(self, budget: float | str | None = None) -> TorchPlan:
        """The example's step within a budget.

        Raises:
            PlanningError: It does not fit; says the least budget that works.
        """
        return self._planner(None).plan(as_budget(budget))

    def curve(self) -> Mapping[int, float]:
        """Budget -> predicted time over that without a limit, from much to little."""
        least, most = self.least_budget, self.unlimited_bytes
        budgets = [round(least + share * (most - least)) for share in _SHARES]
        return {budget: self.plan(budget).slowdown for budget in budgets}

    def max_batch(self, budget: float | str) -> int:
        """The largest batch whose step is planned within a budget.

        The first axis of every tensor of the example is the batch. What a step needs
        at least hardly differs from a straight line, which says where to look next.

        Raises:
            PlanningError: Not even a batch of one fits.
        """
        limit = as_budget(budget)
        needs = {1: self._least(1)}
        if needs[1] > limit:
            raise PlanningError(
                f"a batch of one needs {format_bytes(needs[1])}; the budget is "
                f"{format_bytes(int(limit))}",
                short_by=needs[1] - int(limit),
                least_bytes=needs[1],
            )
        fits, beyond, size = 1, _LARGEST_BATCH + 1, max(2, len(self._example[0]))
        while beyond - fits > 1:
            needs[size] = self._least(size)
            if needs[size] <= limit:
                fits = size
            else:
                beyond = size
            one = (needs[size] - needs[1]) / (size - 1)
            guess = 1 + (limit - needs[1]) / one if one > 0 else 2.0 * size
            size = min(max(int(min(guess, 4 * fits)), fits + 1), beyond - 1)
        return fits

    def __str__(self) -> str:
        lines = [
            f"on {self._figures.title}: {format_bytes(self.unlimited_bytes)} without a "
            f"limit, at least {format_bytes(self.least_budget)}"
        ]
        lines += [
            f"  {format_bytes(budget):>10}  {slowdown:.3f} of the time"
            for budget, slowdown in self.curve().items()
        ]
        return "\n".join(lines)

    def _least(self, size: int) -> int:
        return self._planner(size).least_budget()

    def _planner(self, size: int | None) -> Planner:
        if size not in self._planners:
            captured = capture_step(
                self._model, self._loss_fn, self._optimizer, self._example, size=size
            )
            parts = StepParts.of(self._model, self._optimizer)
            self._planners[size] = planner_of(captured, parts, self._estimated)
        return self._planners[size]

    def _estimated(self, lowered: Lowered) -> Profile:
        return estimated(lowered, self._figures)
