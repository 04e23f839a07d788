"""The plan of a PyTorch step, as users read it."""

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.schedule import SwapIn, SwapOut
from mucudnn.ir.sizes import exact_bytes, format_bytes, format_count
from mucudnn.notebook import html_of
from mucudnn.passes.planning.split_search import SplitDecision
from mucudnn.passes.scheduling.problem import origin
from mucudnn.passes.scheduling.step_plan import (
    CountedPlan,
    StepPlan,
    memory_intervals,
    memory_points,
)
from mucudnn.torch.execution.cuda_memory import reserved_line

_SHOWN = 8
"""Names of tensors or operations that are printed."""

_COLUMNS = 60
"""Width of the printed timeline."""

_LEVELS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class UpdateBytes:
    """Bytes that an optimizer has in use beside parameters and their gradients.

    Attributes:
        state: Between two steps.
        persistent: While the model runs: its state, and what a closure's caller holds.
        peak: At most during an update, its state included.
        closure: Whether it runs the model itself, as often as it likes.
    """

    state: int
    persistent: int
    peak: int
    closure: bool


@dataclass(frozen=True)
class TorchPlan:
    """The plan of a PyTorch step, in the bytes that a user counts.

    Attributes:
        plan: The planner's own plan, whose bytes include the caller's.
        given_bytes: Bytes that the caller holds and the budget does not count.
        budget: Bytes; infinity without a budget.
        resident_bytes: Bytes on the device before and after a step: parameters,
            buffers and optimizer state, as far as the budget counts them.
        source: Source code of the program that runs.
        name: Name of the graph, if a model has several; else empty.
        kernels: Number of kernels that Inductor compiled or calls, each counted once.
        splitting: The choice between a whole and a split step; None without `split`.
        own_update: Bytes of an optimizer that updates eagerly after the planned passes;
            None if the update is planned.
        update_peak_bytes: Peak memory during such an update.
        update_reason: Why the update is not planned.
        known_peak_bytes: Peak memory while values are computed before the planned
            operations, of what the budget of these counts; 0 if none are.
        library_bytes: Workspaces of cuBLAS, which stay allocated; 0 on the CPU.
        fragmentation_bytes: Bytes that CUDA's allocator reserves beyond the peak, for
            gaps that no tensor fits into; 0 on the CPU.
        unforeseen_bytes: Bytes that first runs have reserved beyond a rehearsal.
        reservable_budget: Bytes within which the allocator's stay, where it reserves
            more than the budget for every plan that was found; else 0.
        device: The CUDA device that the step runs on; None for the CPU.
        chosen: The bytes of a budget that is not given in bytes, and its cost.
        unplanned_bytes: Peak of the whole graph without a budget, in the planner's own
            bytes; 0 if it is unknown.
    """

    plan: StepPlan = field(repr=False)
    given_bytes: int
    budget: float
    resident_bytes: int
    source: str = field(repr=False, default="")
    name: str = ""
    kernels: int = 0
    splitting: SplitDecision | None = field(repr=False, default=None)
    own_update: UpdateBytes | None = None
    update_peak_bytes: int = 0
    update_reason: str = field(repr=False, default="")
    known_peak_bytes: int = 0
    library_bytes: int = 0
    fragmentation_bytes: int = 0
    unforeseen_bytes: int = 0
    reservable_budget: int = 0
    device: torch.device | None = None
    chosen: tuple[str, ...] = field(repr=False, default=())
    unplanned_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the step, of what the budget counts."""
        return self._counted(self.plan.peak_bytes)

    def _counted(self, peak: int) -> int:
        """Return a peak of the planner in bytes that the budget counts."""
        held = 0 if self.own_update is None else self.own_update.persistent
        passes = max(peak - self.given_bytes, self.known_peak_bytes) + held
        return max(passes, self.update_peak_bytes) + self.library_bytes

    @property
    def reserved_bytes(self) -> int:
        """Most memory that PyTorch's allocator holds for what the budget counts.

        Of an update that runs eagerly, the bytes that it requests.
        """
        gaps = self.fragmentation_bytes + self.unforeseen_bytes
        return self._counted(self.plan.peak_bytes + gaps)

    @property
    def reserved_warning(self) -> str:
        """Warning that the allocator reserves more than the budget; "" otherwise."""
        over, budget = self.reserved_bytes, int(min(self.budget, sys.maxsize))
        if over <= budget:
            return ""
        verb, why = "reserves", "no plan was found whose gaps between tensors fit, too"
        if more := self.unforeseen_bytes:
            verb, why = "has reserved", f"{format_bytes(more)} were not foreseen"
        return (
            f"PyTorch's allocator {verb} {format_bytes(over, budget)} for a step "
            f"within a budget of {format_bytes(budget, over)}, as {why}; tensors stay "
            "within the budget, and reserved memory within one of "
            f"{exact_bytes(max(over, self.reservable_budget))}"
        )

    @property
    def slowdown(self) -> float:
        """Predicted time over that of the fastest step without copies or recomputation.

        Of a step that was considered in parts: over that of the unbounded step.
        """
        prediction = self.plan.prediction
        if self.splitting is not None and self.splitting.unbounded_ms:
            return prediction.step_ms / self.splitting.unbounded_ms
        once = self.plan.unbounded_ms
        return prediction.step_ms / once if once else 1.0

    @property
    def leaving(self) -> Mapping[str, int]:
        """Bytes of the offloaded storages, by name."""
        tensors = self.plan.schedule.graph.tensors
        return {
            step.tensor: tensors[step.tensor].nbytes
            for step in self.plan.schedule.instructions
            if isinstance(step, SwapOut | SwapIn)
        }

    @property
    def recomputed(self) -> Mapping[str, int]:
        """Number of times that a node is recomputed, by name; views do not count."""
        names = (node.name for node in self.plan.schedule.graph.nodes)
        times = self.plan.profile.node_ms
        return Counter(origin(n) for n in names if "~" in n and times[n] > 0)

    @property
    def convolutions(self) -> Mapping[str, ConvPlan]:
        """Plans of convolutions by node; empty without a tuner."""
        return self.plan.plans

    def __str__(self) -> str:
        bound = () if self.budget == float("inf") else (int(self.budget),)
        budget = "no budget"
        if bound:
            budget = f"a budget of {format_bytes(*bound, self.peak_bytes)}"
        offloaded, recomputed = self.leaving, self.recomputed
        noun = "kernel" if self.kernels else "operation"
        times = sum(recomputed.values())
        prediction, gap = self.plan.prediction, self.plan.gap
        gap_words = "" if gap is None else f", at most {gap:.1%} above the best plan"
        before = ""
        if self.unplanned_bytes:
            most = self._counted(self.unplanned_bytes)
            before = f"; {format_bytes(most, self.peak_bytes)} with everything kept"
        lines = [
            *([self.name] if self.name else []),
            *self.chosen,
            f"peak memory: {format_bytes(self.peak_bytes, *bound)} within {budget}"
            f"{before}",
            f"time: {prediction.step_ms:.1f} ms predicted, {self.slowdown:.3f} of the "
            f"time without a limit{gap_words}",
            f"resident between steps: {format_bytes(self.resident_bytes)}; the caller "
            f"holds {format_bytes(self.given_bytes)} more",
            f"offloaded: {format_count(len(offloaded), 'tensor')}, "
            f"{format_bytes(prediction.out_bytes)} out and "
            f"{format_bytes(prediction.in_bytes)} back{_some(offloaded)}",
            f"recomputed: {format_count(len(recomputed), noun)}"
            f"{f', {times} times in all' if times > len(recomputed) else ''}"
            f"{_some(recomputed)}",
            *self._timeline(),
        ]
        if prediction.placement is not None:
            lines.append(str(prediction.placement))
        if self.kernels:
            kernels = format_count(self.kernels, "kernel")
            lines.append(f"both passes consist of {kernels} of Inductor")
        if plans := self.convolutions:
            kinds = sorted(Counter(map(_kind, plans.values())).items())
            found = ", ".join(f"{count} {kind}" for kind, count in kinds)
            lines.append(f"{format_count(len(plans), 'convolution')}: {found}")
        if self.own_update is not None:
            lines.append(
                f"update: eager, after the planned passes, within "
                f"{format_bytes(self.update_peak_bytes)}: {self.update_reason}"
            )
        if self.device is not None:
            lines.append(
                f"{format_bytes(self.library_bytes)} of the peak are cuBLAS's "
                f"workspaces; {format_bytes(self.reserved_bytes)} are reserved for it, "
                f"{format_bytes(self.fragmentation_bytes)} of them for gaps; "
                f"{reserved_line(self.device)}"
            )
        if self.splitting is not None:
            lines += self.splitting.lines
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: memory over the step, tensor by tensor."""
        most = self.unplanned_bytes
        counted = CountedPlan(
            self.plan,
            self.peak_bytes,
            self._counted(most) if most else 0,
            self.given_bytes,
            self.budget,
            self.slowdown,
            self.chosen,
        )
        return html_of(counted)

    def _timeline(self) -> list[str]:
        """Draw memory over the step, and when copies and recomputations run."""
        step_ms = self.plan.prediction.step_ms
        if not step_ms:
            return []
        runs: dict[str, set[int]] = {
            "offload": set(),
            "fetch": set(),
            "recompute": set(),
        }
        for lane in self.plan.prediction.lanes:
            again = "recompute" if "~" in lane.name else None
            row = {"out": "offload", "in": "fetch"}.get(lane.engine, again)
            start_ms = max(lane.start_ms, 0.0)
            if row is not None and lane.stop_ms > start_ms:
                first, last = _column(start_ms, step_ms), _column(lane.stop_ms, step_ms)
                runs[row].update(range(first, last + 1))
        # Each column shows the most within it; memory is constant between two points.
        most = [0] * _COLUMNS
        now = at = 0
        for ms, nbytes in memory_points(memory_intervals(self.plan)):
            column = _column(max(ms, 0.0), step_ms)
            most[at : column + 1] = [max(m, now) for m in most[at : column + 1]]
            at, now = column, nbytes
            most[at] = max(most[at], now)
        most[at:] = [max(m, now) for m in most[at:]]
        peak = max(self.plan.peak_bytes, *most)
        bars = (_LEVELS[-(-8 * m // peak) if peak else 0] for m in most)
        lines = [f"   memory |{''.join(bars)}|"]
        for row, busy in runs.items():
            if busy:
                line = "".join("▪" if c in busy else "·" for c in range(_COLUMNS))
                lines.append(f"{row:>9} |{line}|")
        return lines


def _column(ms: float, step_ms: float) -> int:
    return min(int(_COLUMNS * ms / step_ms), _COLUMNS - 1)


def _kind(plan: ConvPlan) -> str:
    """Return in words whose algorithms a plan uses, and whether it is divided."""
    names = "+".join(dict.fromkeys(step.algo for step in plan.steps))
    return f"in micro-batches by {names}" if plan.divided else f"by {names}"


def _some(names: Mapping[str, int]) -> str:
    """Return the names of the largest few, after a colon; none of nothing."""
    if not names:
        return ""
    most = sorted(names, key=lambda name: -names[name])
    more = f" and {len(most) - _SHOWN} more" if len(most) > _SHOWN else ""
    return f": {', '.join(most[:_SHOWN])}{more}"
