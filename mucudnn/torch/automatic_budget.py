"""Budgets that are not a number of bytes: a share, free memory, or a slowdown.

`train_step(budget="50%")` holds half of the memory that the step needs without a
budget, `budget="device"` the memory that is free on its device, and `budget="auto"` the
least memory in which the step is predicted to take at most 5 % longer. The options that
such a budget needs are chosen here: first none, then offloaded parameters and state,
then, if results may differ by rounding, micro-batches and spatial tiles, and at last
compilation.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from mucudnn.backends.cpu.device import CpuDevice
from mucudnn.errors import PlanningError, UnsupportedError
from mucudnn.ir.sizes import exact_bytes, format_bytes
from mucudnn.passes.planning.cutting import AUTO, HEIGHT, WHOLE
from mucudnn.torch.execution.devices import device_of
from mucudnn.torch.plan_program import (
    LoweredStep,
    PlannedProgram,
    PlanOptions,
    least_budget,
    plan_program,
)
from mucudnn.torch.planning import too_small

_AUTO = "auto"
_DEVICE = "device"

_USUAL_SLOWDOWN = 1.05
"""Predicted time, relative to that without a budget, that `auto` allows."""

_TRIES = 5
"""Budgets that `auto` plans for; each halves the interval that holds the least."""

_SHARE_OF_FREE = 0.9
"""Share of free memory that is used: other programs and the batch need some, too."""

_WORTH_COMPILING = 0.5
"""Share of the least budget of all other options from which on the step is compiled.

Compilation takes as long as many steps, and seldom halves the memory.
"""


@dataclass(frozen=True)
class _Way:
    """Options that an automatic budget may choose.

    Attributes:
        names: Those that differ from the given ones, as text.
        rounds: Whether results may differ by rounding from those of the given options.
    """

    options: PlanOptions
    names: str
    rounds: bool


@dataclass(frozen=True)
class AutomaticBudget:
    """A budget that depends on the step or on the device.

    Attributes:
        share: Share of the memory without a budget; None for `auto` and `device`.
        exact: Whether results must equal those of eager mode, bit for bit; None
            allows rounding only where nothing else fits.
    """

    text: str
    share: float | None
    exact: bool | None = None

    @classmethod
    def parse(
        cls, budget: object, *, exact: bool | None = None
    ) -> "AutomaticBudget | None":
        """Return the budget that a text describes; None for bytes.

        Raises:
            ValueError: The share is not above 0 % and at most 100 %.
        """
        if not isinstance(budget, str):
            return None
        text = budget.strip()
        if text in (_AUTO, _DEVICE):
            return cls(text, None, exact)
        if not text.endswith("%"):
            return None
        try:
            percent = float(text[:-1])
        except ValueError:
            percent = math.nan
        if not 0 < percent <= 100:
            raise ValueError(
                f"budget must be above 0% and at most 100%, got {budget!r}; 100% is "
                "what the step needs without a budget"
            )
        return cls(text, percent / 100, exact)

    def plan(self, step: LoweredStep, options: PlanOptions) -> PlannedProgram:
        """Choose bytes and options, and plan the step.

        Raises:
            PlanningError: No allowed options fit; reports the minimum feasible budget.
        """
        unlimited = plan_program(step, replace(options, split=WHOLE))
        most = unlimited.plan.peak_bytes
        # `auto` finds its own limit; other words give one, within which time counts.
        if self.text == _AUTO:
            found, way = self._least_memory(step, options, most)
        else:
            if self.share is None:
                resident = step.planner(options).resident_bytes
                limit = resident + int(_SHARE_OF_FREE * free_bytes(step))
            else:
                limit = int(self.share * most)
            found, way = self._fastest(step, options, limit, most)
        step_ms = found.plan.plan.prediction.step_ms
        usual_ms = unlimited.plan.plan.prediction.step_ms
        cost = found.plan.slowdown
        if way.options.inductor != options.inductor and usual_ms:
            cost = step_ms / usual_ms  # compiled kernels take another time
        lines = (
            f"budget {self.text}: {format_bytes(int(found.plan.budget), most)} of the "
            f"{format_bytes(most, int(found.plan.budget))} that the step needs without "
            "a budget",
            f"chosen: {way.names or 'no further options'}"
            + ("; results may differ by rounding" if way.rounds else ""),
            f"cost: {cost:.3f} of the time without a budget (predicted)",
        )
        return replace(found, plan=replace(found.plan, chosen=lines))

    def _fastest(
        self, step: LoweredStep, options: PlanOptions, limit: int, most: int
    ) -> tuple[PlannedProgram, _Way]:
        """Return the first plan at nearly full speed, or else the fastest."""
        found: list[tuple[PlannedProgram, _Way]] = []
        least: list[tuple[int, str, str]] = []
        for way in self._ways(options):
            # Unless exact=False, rounding is allowed where nothing else fits.
            if found and self.exact is None and way.rounds:
                break
            # Compilation takes long: only if nothing fits, and little is missing.
            compiles = way.options.inductor and not options.inductor
            near = any(_WORTH_COMPILING * needed < limit for needed, *_ in least)
            if compiles and (found or not near):
                continue
            try:
                program = plan_program(step, way.options, limit, advise=False)
            except PlanningError as e:
                if e.least_bytes is not None:
                    least.append((e.least_bytes, way.names, e.node or ""))
                continue
            except UnsupportedError:  # not on this device, or nothing can be cut
                continue
            found.append((program, way))
            if program.plan.slowdown <= _USUAL_SLOWDOWN:
                break
        if found:
            return min(found, key=lambda one: one[0].plan.slowdown)
        if not least:
            raise PlanningError(f"no plan fits the budget {self.text!r}")
        needed, names, node = min(least)
        more = f"; the operation that needs most is {node}" if node else ""
        if self.exact:
            more += "; without exact=True it may run in micro-batches or compiled"
        percent = math.ceil(100 * needed / most)
        raise too_small(
            f"the step does not fit the budget {self.text!r}, {exact_bytes(limit)}; "
            f"the least budget that works is {exact_bytes(needed)}"
            f"{names and f' with {names}'}, or budget='{percent}%'{more}",
            *(limit, needed, node or None),
        )

    def _ways(self, options: PlanOptions) -> Iterator[_Way]:
        """Yield the allowed options, the least intrusive first."""
        changes: list[dict[str, Any]] = [{}]
        if not options.alone:
            yield _Way(options, "", False)
            return
        if options.split == WHOLE and not self.exact:
            # Parts are not compiled; compilation itself is the last resort.
            plain = {"inductor": False} if options.inductor else {}
            changes += [{**plain, "split": AUTO}, {**plain, "split": HEIGHT}]
            if not options.inductor:
                changes.append({"inductor": True})
        for change in changes:
            for offload in [{}, {"offload_state": True}]:
                if offload and options.offload_state:
                    continue
                changed = {**offload, **change}
                names = ", ".join(f"{name}={v!r}" for name, v in changed.items())
                yield _Way(replace(options, **changed), names, bool(change))

    def _least_memory(
        self, step: LoweredStep, options: PlanOptions, most: int
    ) -> tuple[PlannedProgram, _Way]:
        """Return the plan with the least memory at nearly full speed."""
        allowed = [
            way
            for way in self._ways(options)
            if not way.rounds or self.exact is False
            if way.options.inductor == options.inductor
        ]
        # The most intrusive options come last, and need the least memory.
        for way in reversed(allowed):
            tried = way.options
            try:
                low, high = least_budget(step, tried), most
                best = plan_program(step, tried, high)
            except UnsupportedError:  # not on this device, or nothing can be cut
                continue
            # Bisect for the least budget at nearly full speed.
            for _ in range(_TRIES):
                middle = (low + high) // 2
                program = plan_program(step, tried, middle)
                if program.plan.slowdown <= _USUAL_SLOWDOWN:
                    best, high = program, middle
                else:
                    low = middle
            return best, way
        raise UnsupportedError("the step cannot be planned with any options")


def free_bytes(step: LoweredStep) -> int:
    """Return the memory that is free on a step's device, in bytes."""
    device = device_of(step.lowered.layouts)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(
            device
        )
        return int(free + unused)
    return CpuDevice().available_bytes()
