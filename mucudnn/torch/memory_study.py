"""`memory`: the bytes that a PyTorch step needs on a device, without running it.

    study = mt.memory(model, loss_fn, (x, y), optimizer, device="h200")
    study.least_budget, study.max_batch("8GiB")
    mt.memory(model, loss_fn, {"input_ids": ids, "labels": ids}, optimizer)

The step is captured as `train_step` captures it, on copies of model and optimizer that
have no data; a model built under `torch.device("meta")` will do. Every node takes the
time of its roofline on the device. Bytes are exact but for the scratch memory of
kernels, which has to be measured: `device="cpu"` runs every node here, alone.

Only an optimizer whose update cannot be recorded is run: its needs are measured on
copies of its parameters, as `train_step` measures them, on their device; parameters
without data have made-up ones, on the CPU.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import torch

from mucudnn.errors import PlanningError
from mucudnn.ir.devices import device_name, get_device
from mucudnn.ir.fleet import ScalingRow
from mucudnn.ir.graph import Graph
from mucudnn.ir.sizes import exact_bytes, format_bytes
from mucudnn.notebook import html_of
from mucudnn.passes.planning.cutting import WHOLE, Split, SplitStep
from mucudnn.passes.planning.plan_step import (
    DescribedStep,
    batches_to_compare,
    budget_for_slowdown,
    largest_batch_within,
)
from mucudnn.passes.planning.request import StepRequest
from mucudnn.runtime.executor.tiers import TierChoice, parse_tiers
from mucudnn.runtime.profiling.links import forecast_tiers
from mucudnn.torch.capture.exclusive import exclusive_capture
from mucudnn.torch.capture.fake_tensors import DatalessStep, KernelResults
from mucudnn.torch.capture.optimizers import UpdateNotRecordedError
from mucudnn.torch.capture.step import CapturedStep, capture_step
from mucudnn.torch.capture.step_tensors import StepParts, StepSettings, scheduled_floats
from mucudnn.torch.costs.measure import estimated, measured
from mucudnn.torch.distributed.ranks import (
    COUNTS,
    ONE,
    Ranks,
    Shard,
    check_mesh,
    on_ranks,
)
from mucudnn.torch.execution.devices import forked_generators
from mucudnn.torch.optimizer_update import EagerUpdate, check_room
from mucudnn.torch.plan import TorchPlan, UpdateBytes
from mucudnn.torch.plan_program import (
    LoweredStep,
    PlanOptions,
    least_budget,
    plan_program,
)
from mucudnn.torch.planning import Planner, parse_budget, too_small

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
    mesh: Sequence[int] = (),
    shard: Shard = "fsdp2",
) -> "MemoryStudy":
    """Study the memory of a training step on a device, which need not be present.

    Model and optimizer do not change. Nothing runs and no memory of their size is
    allocated, except for an optimizer whose update cannot be recorded: a copy of it
    runs a few updates. Operations are those that PyTorch runs on the CPU; a device with
    other kernels, such as another attention, may need other amounts of memory.

    Args:
        model: Called with the first element of a batch; with or without data.
        loss_fn: Called with the model's result and the rest of the batch.
        example: Arguments of a step, `step(*example)`, or for a dict
            `step(**example)`; only shapes and types of tensors are read.
        optimizer: Of the model's parameters. The memory of one that updates eagerly
            is measured when it is first needed, with copies of parameters, gradients
            and state; on devices other than `cpu`, its default is `foreach=True`, as in
            PyTorch.
        device: A name in `mucudnn.ir.devices.DEVICES`, whose published figures are used
            to estimate times. `cpu` measures every operation on this machine.
        accumulate: Parts of a batch, as in `train_step`.
        offload_state: Whether parameters and state may be offloaded, as in
            `train_step`.
        split: Whether the step may run in parts, as in `train_step`. Planning then
            takes several times as long.
        tiers: Offload targets, as in `train_step`. Append `@RATE` in bytes per second
            instead of measuring the link or using its published rate.
        mesh: Number of devices that train together, such as (8,), eight in a node; by
            default one. All figures are then those of one device, the example is its
            share of the batch, and collectives take time by published link rates.
        shard: "fsdp2" shards parameters, gradients and state over the mesh, with one
            unit for each numbered submodule such as `layers.3`; "ddp" replicates them.

    Raises:
        ValueError: The device, the split or a tier is unknown, `accumulate` is less
            than one, or the mesh is not supported.
        TypeError: An argument has the wrong type.
        UnsupportedError: The step cannot be captured, for the given reason, or there
            is not enough memory to measure the optimizer's update.
    """
    if device != _CPU:
        device = device_name(device)
    ranks = check_mesh(mesh, shard, device, split)
    settings = StepSettings(accumulate)
    options = PlanOptions.of("memory", offload_state=offload_state, split=split)
    if choices := parse_tiers(tiers):
        forecast = partial(forecast_tiers, choices, measured=device == _CPU)
        options = replace(options, tiers=forecast)
    step = DatalessStep.of(model, loss_fn, example, optimizer)
    settings = replace(settings, floats=scheduled_floats(step.optimizer))
    title = type(model).__name__
    return MemoryStudy(step, title, device, settings, options, Ranks(ranks, shard))


class MemoryStudy:
    """A training step on a device, under any budget and of any batch size.

    Bytes are what `train_step` counts: everything but the batch. `memory` makes it.
    """

    def __init__(
        self,
        step: DatalessStep,
        title: str,
        device: str,
        settings: StepSettings,
        options: PlanOptions,
        ranks: Ranks,
    ) -> None:
        self._step = step
        self._ranks = ranks
        self._title = title
        self._device = device
        self._settings = settings
        figures = None if device == _CPU else get_device(device)
        self._options = replace(
            options,
            costs=measured if figures is None else partial(estimated, device=figures),
        )
        self._results = KernelResults()
        self._steps: dict[int | None, LoweredStep] = {}
        self._usage: UpdateBytes | None = None
        self._update_reason = ""

    @cached_property
    def least_budget(self) -> int:
        """Minimum feasible budget of the example's step in bytes."""
        return least_budget(self._at(None), self._options)

    @cached_property
    def unlimited_bytes(self) -> int:
        """Peak memory of the step without a budget."""
        return self.plan().peak_bytes

    def plan(self, budget: float | str | None = None) -> TorchPlan:
        """Plan the example's step within a budget, as `train_step` plans it.

        Raises:
            PlanningError: The step does not fit; the message names the minimum budget.
        """
        return plan_program(self._at(None), self._options, parse_budget(budget)).plan

    def on(self, mesh: Sequence[int], shard: Shard = "fsdp2") -> "MemoryStudy":
        """Return the study of the same step on another number of devices.

        Raises:
            ValueError: The mesh is not supported.
        """
        ranks = check_mesh(mesh, shard, self._device, self._options.split)
        found = copy(self)
        for name in ("least_budget", "unlimited_bytes", "curve"):
            found.__dict__.pop(name, None)
        found._ranks = Ranks(ranks, shard)
        return found

    @cached_property
    def curve(self) -> Mapping[int, float]:
        """Predicted slowdown over the step without a limit, by budget."""
        least, most = self.least_budget, self.unlimited_bytes
        budgets = [round(least + share * (most - least)) for share in _SHARES]
        found = {budget: self.plan(budget).slowdown for budget in budgets}
        return MappingProxyType(found)

    def budget_for(self, slowdown: float = 1.05) -> int:
        """Return approximately the smallest budget with at most the given slowdown.

        Args:
            slowdown: Predicted time over that of the step without a limit.

        Raises:
            ValueError: The slowdown is less than 1, or not a number.
        """
        return budget_for_slowdown(
            slowdown,
            self.least_budget,
            self.unlimited_bytes,
            lambda budget: self.plan(budget).slowdown,
        )

    def throughput(self, budget: float | str) -> Mapping[int, float]:
        """Return the predicted samples per second within a budget, by batch size.

        The largest batch is the last one, and often not the fastest.

        Raises:
            PlanningError: Not even a batch of one fits.
            ValueError: The example's tensors have no common first axis.
        """
        limit, found = parse_budget(budget), {}
        for size in batches_to_compare(self.max_batch(budget)):
            plan = plan_program(self._at(size), self._options, limit).plan
            found[size] = 1e3 * size / plan.plan.prediction.step_ms
        return MappingProxyType(found)

    def max_batch(self, budget: float | str) -> int:
        """Return the largest batch whose step is planned within a budget, up to 2**20.

        The first axis of every tensor of the example is the batch.

        Raises:
            PlanningError: Not even a batch of one fits.
            ValueError: The example's tensors have no common first axis.
        """
        limit, start = parse_budget(budget), self._step.batch

        def least_of(size: int) -> int:
            return least_budget(self._at(size), self._options)

        most = largest_batch_within(least_of, int(limit), start=start)
        if most == 0:
            least = least_of(1)
            raise too_small(
                f"a batch of one needs {exact_bytes(least)}; the budget is "
                f"{exact_bytes(int(limit))}",
                *(limit, least),
            )
        return most

    def described(self, batch: int | None = None) -> DescribedStep:
        """Return the whole step as `mucudnn.study_memory` compares techniques on it.

        Args:
            batch: Another size than the example's.
        """
        figures = (
            {"times": "measured on this machine's CPU, every operation alone"}
            if self._device == _CPU
            else dict(get_device(self._device).sources())
        )
        title, size = self._title, self._step.size
        if several := self._ranks != ONE:
            title = f"{title} on one of {self._ranks.count} by {self._ranks.shard}"
            figures |= get_device(self._device).exchange_sources()
        return DescribedStep(
            title=title,
            batch=batch or self._step.size,
            image=tuple(self._step.example.tensors[0].shape[1:]),
            parameters=self._step.parameters,
            optimizer=type(self._step.optimizer).__name__,
            device=self._device,
            figures=figures,
            request=lambda size: self._request(self._at(size)),
            in_parts=partial(self._in_parts, batch),
            scaling=self.scaling if several and batch in (None, size) else None,
        )

    def scaling(
        self, budget: float | str | None = None, counts: Sequence[int] = COUNTS
    ) -> list[ScalingRow]:
        """Return the fastest way to train on several numbers of devices.

        Ways are DistributedDataParallel, FSDP2 and, where neither fits, FSDP2 with
        offload and recomputation within the budget. Every device has a batch of the
        example's size.

        Args:
            budget: Bytes of a device; by default all of its memory.
            counts: Numbers of devices; by default 1 to 1,024.
        """
        if budget is None:
            budget = get_device(self._device).memory.value
        limit, found = parse_budget(budget), []
        for count in counts:
            rows = list(self._ways(count, limit))
            fitting = [row for row in rows if row.peak_bytes <= limit]
            found.append(max(fitting or rows[-1:], key=lambda r: r.samples_per_s))
        return found

    def _ways(self, count: int, limit: float) -> Iterator[ScalingRow]:
        """Yield the ways to train on a number of devices; the planned one if needed."""

        def row(way: str, plan: TorchPlan) -> ScalingRow:
            prediction = plan.plan.prediction
            return ScalingRow(
                gpus=count,
                way=way if count > 1 else way.replace("fsdp2", "one"),
                peak_bytes=plan.peak_bytes,
                step_ms=prediction.step_ms,
                samples_per_s=1e3 * count * self._step.size / prediction.step_ms,
                waits_ms=prediction.stalls_ms.get("network", 0.0),
            )

        whole = self.on((count,))
        rows = [row("fsdp2", whole.plan())]
        if count > 1:
            rows.append(row("ddp", self.on((count,), "ddp").plan()))
        yield from rows
        if any(row.peak_bytes <= limit for row in rows):
            return
        try:
            yield row("fsdp2 + plan", whole.plan(limit))
        except PlanningError as e:
            yield ScalingRow(gpus=count, way="none fits", peak_bytes=e.least_bytes or 0)

    def report(self, budget: float | str | None = None) -> str:
        """Return an HTML page: memory over the step, techniques, a curve of budgets.

        Args:
            budget: Bytes, or a size; by default half way from the least that works to
                all that the whole step could use.
        """
        return html_of((self.described(), self._usual(budget)), whole=True)

    def __repr__(self) -> str:
        """Return a summary without planning; `print` shows peaks and slowdowns."""
        return (
            f"<MemoryStudy of {self._title}, {type(self._step.optimizer).__name__}, "
            f"batch {self._step.size}, on {self._device}>"
        )

    def __str__(self) -> str:
        here = self._device == _CPU
        where = "this machine's CPU" if here else get_device(self._device).title
        lines = [
            f"{self._title} on {where}: "
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
        """Return HTML for notebooks."""
        return html_of((self.described(), self._usual(None)))

    def _usual(self, budget: float | str | None) -> int:
        """Return a budget in bytes; by default half way from the least to all."""
        if budget is not None:
            return int(parse_budget(budget))
        step, whole = self._at(None), replace(self._options, split=WHOLE)
        most = plan_program(step, whole).plan.peak_bytes
        return (least_budget(step, whole) + most) // 2

    def _at(self, size: int | None) -> LoweredStep:
        """Return the step of one of the devices at a batch size."""
        step = self._captured(size)
        if self._ranks.count == 1:
            return step
        model, figures = self._step.model, get_device(self._device)
        names = StepParts.of(
            model, self._step.optimizer, self._step.loss_fn, self._settings
        ).parameters
        return on_ranks(step, self._options, self._ranks, tuple(names), figures)

    @exclusive_capture()
    def _captured(self, size: int | None) -> LoweredStep:
        """Return the step at a batch size; it is captured and measured once."""
        if size == self._step.size_or_none:
            size = None
        capture = partial(self._capture, size, cpu_kernels=self._device == _CPU)
        while size not in self._steps:
            try:
                self._steps[size] = self._results.settled(capture, self._lowered)
            except UpdateNotRecordedError as e:
                if self._settings.floats:
                    self._settings = replace(self._settings, floats=())
                    continue
                self._settings = replace(self._settings, recorded=False)
                self._update_reason = str(e)
                self._steps.clear()
        return self._steps[size]

    def _lowered(self, captured: CapturedStep) -> LoweredStep:
        """Lower and measure the step, and measure an update that is not captured."""
        step = self._step
        parts = StepParts.of(step.model, step.optimizer, step.loss_fn, self._settings)
        lowered = LoweredStep.of_captured(captured, parts)
        lowered.planner(self._options)  # raises where kernels return other layouts
        if captured.gradients is None:
            return lowered
        if self._usage is None:
            check_room(step.whole)
        of_name = step.wholes(parts.parameters)
        with forked_generators(of_name.values()):
            update = EagerUpdate.of(
                step.whole,
                captured,
                parts,
                self._update_reason,
                parameters=of_name,
                foreach=None if self._device == _CPU else True,
                usage=self._usage,
            )
        self._usage = None if update is None else update.usage
        return replace(lowered, update=update)

    def _capture(self, size: int | None, *, cpu_kernels: bool = True) -> CapturedStep:
        """Capture the step, with or without kernels that only the CPU has."""
        step = self._step
        enabled = torch._C._get_mkldnn_enabled()
        torch._C._set_mkldnn_enabled(enabled and cpu_kernels)
        try:
            return capture_step(
                step.model,
                step.loss_fn,
                step.optimizer,
                step.example,
                values=step.values,
                size=size,
                settings=self._settings,
                results=self._results,
            )
        finally:
            torch._C._set_mkldnn_enabled(enabled)

    def _request(
        self, step: LoweredStep, planner: Planner | None = None
    ) -> StepRequest:
        """Return the request to plan the whole step, or one in parts.

        The caller's tensors have no bytes.
        """
        planner = step.planner(self._options) if planner is None else planner
        graph, profile = planner.lowered.graph, planner.profile
        given = {graph.storages[name] for name in planner.caller_inputs}
        tensors = {
            name: replace(spec, shape=(0,)) if graph.storages[name] in given else spec
            for name, spec in graph.tensors.items()
        }
        bare = Graph(tensors, graph.nodes, graph.outputs)
        if step.update is not None:
            bare, profile = step.update.append_to(bare, profile)
        return replace(planner.request(), graph=bare, profile=profile, budget=math.inf)

    def _in_parts(self, size: int | None, split: Split) -> SplitStep | None:
        """Return the step whole and in parts; None if nothing in it can be cut."""
        step = self._at(size)
        candidates = step.candidates(replace(self._options, split=split))
        if candidates is None:
            return None
        return candidates.step(partial(self._request, step))
