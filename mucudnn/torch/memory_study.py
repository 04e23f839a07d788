"""What a PyTorch step would need on a device, found without running anything.

    study = mt.memory(model, loss_fn, (x, y), optimizer, device="h200")
    study.least_budget, study.max_batch("8GiB")
    mt.memory(model, loss_fn, {"input_ids": ids, "labels": ids}, optimizer)

The step is captured as `train_step` captures it, on copies of model and optimizer that
have no data; a model built under `torch.device("meta")` will do. Every node is given
the time of its roofline on the device. Bytes are exact but for the scratch memory of
kernels, which only a measurement knows: `device="cpu"` runs every node here, alone.

An optimizer whose update cannot be recorded is the one thing that does run: what it
needs is measured on copies of its parameters, as `train_step` measures it, on the
device that they are on; parameters without data have made-up ones, on the CPU.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch

from mucudnn.arguments import a_flag
from mucudnn.errors import PlanningError
from mucudnn.ir.devices import get_device
from mucudnn.ir.profile import Profile
from mucudnn.ir.sizes import exact_bytes, format_bytes
from mucudnn.notebook import html_of
from mucudnn.passes.planning.cutting import WHOLE, Split, check_split
from mucudnn.passes.planning.plan_step import DescribedStep, largest_batch_within
from mucudnn.runtime.executor.tiers import TierChoice, parse_tiers
from mucudnn.torch.capture.exclusive import exclusive_capture
from mucudnn.torch.capture.fake_tensors import DatalessStep, KernelResults
from mucudnn.torch.capture.optimizers import UpdateNotRecordedError
from mucudnn.torch.capture.step import CapturedStep, capture_step
from mucudnn.torch.capture.step_tensors import PLAIN, StepParts, StepSettings
from mucudnn.torch.costs.measure import estimated, measured
from mucudnn.torch.lowering.lowered import Lowered
from mucudnn.torch.optimizer_update import OwnUpdate, check_room
from mucudnn.torch.plan import TorchPlan
from mucudnn.torch.plan_program import (
    HOST,
    Away,
    Hint,
    StudiedStep,
    lowered_step,
    planner_of,
)
from mucudnn.torch.planning import Planner, as_budget
from mucudnn.torch.splitting.plan import PartedStep

_CPU = "cpu"
_SHARES = (1.0, 0.5, 0.3, 0.1, 0.0)


def memory(
    model: torch.nn.Module,
    loss_fn: Callable[..., Any],
    example: Sequence[Any] | Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    *,
    device: str = "h200",
    accumulate: int = 1,
    offload_state: bool = False,
    split: Split = WHOLE,
    tiers: str | TierChoice | Sequence[str | TierChoice] = (),
) -> "MemoryStudy":
    """Study a training step on a device that need not be there.

    Model and optimizer stay as they are; nothing is run and nothing of their size is
    allocated, but for an optimizer whose update cannot be recorded: a copy of it makes
    a few. Operations are those that PyTorch would run on the CPU: where a device has a
    kernel of its own, such as another attention, its bytes may be others.

    Args:
        model: Called with the first of a batch; with or without data.
        loss_fn: Called with the model's result and the rest of the batch.
        example: What a step is called with, `step(*example)`, or of a dict
            `step(**example)`; only shapes and types of tensors are looked at.
        optimizer: Of the model's parameters. What one that makes its update itself
            needs is measured when it is first asked for, with copies of parameters,
            gradients and state; on other devices than `cpu` with `foreach=True` where
            it leaves that open, as PyTorch does on them.
        device: Whose published figures times are estimated with: a name in
            `mucudnn.ir.devices.DEVICES`. `cpu` measures every operation, here.
        accumulate: Parts that every batch is cut into, as `train_step` does.
        offload_state: Whether parameters and state may leave, as `train_step` has it.
        split: Whether the step may run in parts, as `train_step` has it. Then every
            budget takes as long as several do.
        tiers: Where to what leaves goes, as `train_step` takes it, each with `@RATE`
            behind it in bytes a second where its link is not to be measured or taken
            from published figures.

    Raises:
        ValueError: The device is not known, `accumulate` less than one, or a split or a
            tier none.
        TypeError: Something is of another type.
        UnsupportedError: The step cannot be captured; says why. Or there is no room
            here to measure the optimizer's update.
    """
    if device != _CPU:
        get_device(device)  # says which there are
    settings = StepSettings(accumulate)
    check_split(split)
    away = Away(parse_tiers(tiers), a_flag("offload_state", offload_state))
    step = DatalessStep.of(model, loss_fn, example, optimizer)
    return MemoryStudy(step, type(model).__name__, device, settings, away, split)


class MemoryStudy:
    """A step on a device, under any budget and of any batch size.

    Bytes are what `train_step` counts: everything but the batch.

    Args:
        step: Without data.
        title: What the model is called.
        device: Where it would run.
        settings: What is done with gradients.
        away: What may leave, and where to.
        split: Whether it may run in parts.
    """

    def __init__(
        self,
        step: DatalessStep,
        title: str,
        device: str,
        settings: StepSettings = PLAIN,
        away: Away = HOST,
        split: Split = WHOLE,
    ) -> None:
        self._step = step
        self._title = title
        self._device = device
        self._settings = settings
        self._away = away
        self._split = split
        self._results = KernelResults()
        self._steps: dict[int | None, StudiedStep] = {}
        self._update: OwnUpdate | None = None
        self._reason = ""

    @cached_property
    def least_budget(self) -> int:
        """The least bytes that the example's step is planned in."""
        return self._at(None).least_budget()

    @cached_property
    def unlimited_bytes(self) -> int:
        """What the step has in use at most if nothing leaves."""
        return self.plan().peak_bytes

    def plan(self, budget: float | str | None = None) -> TorchPlan:
        """The example's step within a budget.

        Raises:
            PlanningError: It does not fit; says the least budget that works.
        """
        return self._at(None).plan(as_budget(budget))

    @cached_property
    def curve(self) -> Mapping[int, float]:
        """Budget -> predicted time over that without a limit, from much to little."""
        least, most = self.least_budget, self.unlimited_bytes
        budgets = [round(least + share * (most - least)) for share in _SHARES]
        found = {budget: self.plan(budget).slowdown for budget in budgets}
        return MappingProxyType(found)

    def max_batch(self, budget: float | str) -> int:
        """The largest batch whose step is planned within a budget, up to 2**20.

        The first axis of every tensor of the example is the batch.

        Raises:
            PlanningError: Not even a batch of one fits.
            ValueError: There is no axis that all tensors of the example share.
        """
        limit, start = as_budget(budget), self._step.batch
        most = largest_batch_within(self._least, int(limit), start=start)
        if most == 0:
            least = self._least(1)
            raise PlanningError(
                f"a batch of one needs {exact_bytes(least)}; the budget is "
                f"{exact_bytes(int(limit))}",
                short_by=least - int(limit),
                least_bytes=least,
            )
        return most

    def described(self, batch: int | None = None) -> DescribedStep:
        """The whole step as `mucudnn.study_memory` compares techniques on it.

        Args:
            batch: Another size than the example's.
        """
        figures = (
            {"times": "measured on this machine's CPU, every operation alone"}
            if self._device == _CPU
            else get_device(self._device).sources()
        )
        return DescribedStep(
            title=self._title,
            batch=batch or self._step.size,
            image=tuple(self._step.example.tensors[0].shape[1:]),
            parameters=self._step.parameters,
            optimizer=type(self._step.optimizer).__name__,
            device=self._device,
            figures=figures,
            request=lambda size: self._at(size).request(),
        )

    def hinted(
        self, budget: float | str | None, costs: Callable[[Profile], Profile]
    ) -> Hint:
        """A plan of the example's step at other costs, to make hints of.

        Raises:
            PlanningError: It does not fit; says the least budget that works.
        """
        step = self._at(None).at_costs(costs)
        captured, plan = self._capture(None), step.plan(as_budget(budget))
        return Hint(step.planner, plan, captured.module, captured.forward)

    def report(self, budget: float | str | None = None) -> str:
        """One HTML file: memory over the whole step, techniques, a curve of budgets.

        Args:
            budget: Bytes, or a size; by default half way from the least that works to
                all that the whole step could use.
        """
        return html_of((self.described(), self._usual(budget)), whole=True)

    def __str__(self) -> str:
        lines = [
            f"{self._title} on {self._where}: "
            f"{format_bytes(self.unlimited_bytes, self.least_budget)} "
            f"without a limit, at least "
            f"{format_bytes(self.least_budget, self.unlimited_bytes)}"
        ]
        lines += [
            f"  {format_bytes(budget):>10}  {slowdown:.3f} of the time"
            for budget, slowdown in self.curve.items()
        ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """For notebooks."""
        return html_of((self.described(), self._usual(None)))

    @property
    def _where(self) -> str:
        if self._device == _CPU:
            return "this machine's CPU"
        return get_device(self._device).title

    def _usual(self, budget: float | str | None) -> int:
        """A budget in bytes; half way between all and the least if none is given."""
        if budget is None:
            whole = self._at(None).whole
            return (whole.least_budget() + whole.plan().peak_bytes) // 2
        return int(as_budget(budget))

    def _least(self, size: int) -> int:
        return self._at(size).least_budget()

    @exclusive_capture()
    def _at(self, size: int | None) -> StudiedStep:
        """The step at a size; an update that cannot be recorded is measured once."""
        if size == self._step.size_or_none:
            size = None
        while size not in self._steps:
            try:
                self._steps[size] = self._results.settled(
                    lambda: self._captured(size), self._studied
                )
            except UpdateNotRecordedError as e:
                self._settings = replace(self._settings, recorded=False)
                self._reason = str(e)
                self._steps.clear()
        return self._steps[size]

    def _studied(self, captured: CapturedStep) -> StudiedStep:
        step, here = self._step, self._device == _CPU
        parts = StepParts.of(step.model, step.optimizer, step.loss_fn, self._settings)

        def costed(lowered: Lowered) -> Planner:
            planner = planner_of(captured, parts, self._profile, lowered)
            return self._away.planner(planner, measured=here)

        lowered = lowered_step(captured)
        planner, parted = costed(lowered), None
        if self._split != WHOLE:
            parted = PartedStep(lowered, captured.names, costed, self._split)
        if captured.gradients is not None and self._update is None:
            check_room(step.whole)
            of_name = step.wholes(parts.parameters)
            foreach = None if here else True
            with torch.random.fork_rng(devices=_gpus(of_name)):
                self._update = OwnUpdate.of(
                    step.whole, captured, of_name, self._reason, foreach=foreach
                )
        return StudiedStep(planner, captured, parts, self._update, parted)

    def _captured(self, size: int | None) -> CapturedStep:
        """The step; another device's without kernels that the CPU alone has."""
        if self._device == _CPU:
            return self._capture(size)
        enabled = torch._C._get_mkldnn_enabled()
        torch._C._set_mkldnn_enabled(False)
        try:
            return self._capture(size)
        finally:
            torch._C._set_mkldnn_enabled(enabled)

    def _capture(self, size: int | None) -> CapturedStep:
        step = self._step
        return capture_step(
            step.model,
            step.loss_fn,
            step.optimizer,
            step.example,
            size=size,
            settings=self._settings,
            results=self._results,
        )

    def _profile(self, lowered: Lowered) -> Profile:
        if self._device == _CPU:
            return measured(lowered)
        return estimated(lowered, get_device(self._device))


def _gpus(parameters: Mapping[str, torch.Tensor]) -> list[int]:
    """Those that parameters are on."""
    return sorted({p.device.index for p in parameters.values() if p.is_cuda})
