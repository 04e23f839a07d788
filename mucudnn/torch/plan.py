"""The plan of a PyTorch step, as users read it."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.schedule import SwapIn, SwapOut
from mucudnn.ir.sizes import format_bytes
from mucudnn.passes.planning.split_search import SplitDecision
from mucudnn.passes.scheduling.problem import fastest_of, origin
from mucudnn.passes.scheduling.step_plan import StepPlan
from mucudnn.torch.execution.cuda_memory import reserved_line

_SHOWN = 8
"""Names of tensors or operations that are printed."""


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
        given_bytes: Bytes that the caller holds and no budget counts.
        budget: Bytes; infinity without a budget.
        resident_bytes: Bytes on the device before and after a step: parameters,
            buffers and optimizer state, as far as the budget counts them.
        source: Source code of the program that runs.
        name: Which graph this is, where a model has several; else empty.
        kernels: Number of kernels that Inductor compiled or calls, each counted once.
        splitting: The choice between a whole and a split step; None without `split`.
        own_update: Bytes of an optimizer that makes its update itself, behind what is
            planned; None where the update is planned.
        update_peak_bytes: The most that is in use during such an update.
        update_reason: Why it is not planned.
        library_bytes: Workspaces of cuBLAS, which stay allocated; 0 on the CPU.
        device: The CUDA device that the step runs on; None for the CPU.
        chosen: What a budget that is not in bytes came to, and what it costs.
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
    library_bytes: int = 0
    device: torch.device | None = None
    chosen: tuple[str, ...] = field(repr=False, default=())

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the step, of what the budget counts."""
        held = 0 if self.own_update is None else self.own_update.persistent
        passes = self.plan.peak_bytes - self.given_bytes + held
        return max(passes, self.update_peak_bytes) + self.library_bytes

    @property
    def slowdown(self) -> float:
        """Predicted time over that of every node once, its fastest way, no copies."""
        prediction = self.plan.prediction
        fronts = prediction.profile.fronts.items()
        fastest = {name: fastest_of(front).time_ms for name, front in fronts}
        times = {**prediction.profile.node_ms, **fastest}
        nodes = self.plan.schedule.graph.nodes
        once = sum(times[node.name] for node in nodes if "~" not in node.name)
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
        leaving, again = self.leaving, self.recomputed
        prediction, gap = self.plan.prediction, self.plan.gap
        gap_words = "" if gap is None else f", at most {gap:.1%} above the best plan"
        lines = [
            *([self.name] if self.name else []),
            *self.chosen,
            f"peak {format_bytes(self.peak_bytes, *bound)} within {budget}, "
            f"{format_bytes(self.resident_bytes)} of it resident; "
            f"{format_bytes(self.given_bytes)} are the caller's",
            f"predicted {prediction.step_ms:.1f} ms, {self.slowdown:.3f} of the time "
            f"without a limit{gap_words}",
            f"{len(leaving)} tensors leave, {format_bytes(prediction.out_bytes)} out "
            f"and {format_bytes(prediction.in_bytes)} back: {_some(leaving)}",
        ]
        if prediction.placement is not None:
            lines.append(str(prediction.placement))
        operations = f"{len(again)} operations run again"
        if self.kernels:
            operations = (
                f"{self.kernels} kernels of Inductor's make up both passes, and "
                f"{len(again)} run again, {sum(again.values())} times in all"
            )
        lines.append(f"{operations}: {_some(again)}")
        if plans := self.convolutions:
            kinds = sorted(Counter(map(_kind, plans.values())).items())
            found = ", ".join(f"{count} {kind}" for kind, count in kinds)
            lines.append(f"{len(plans)} convolutions: {found}")
        if self.own_update is not None:
            lines.append(
                f"the optimizer makes its update itself, with at most "
                f"{format_bytes(self.update_peak_bytes)} in use: {self.update_reason}"
            )
        if self.device is not None:
            lines.append(
                f"{format_bytes(self.library_bytes)} of the peak are cuBLAS's "
                f"workspaces; {reserved_line(self.device)}"
            )
        if self.splitting is not None:
            lines += self.splitting.lines
        return "\n".join(lines)


def _kind(plan: ConvPlan) -> str:
    """Return in words whose algorithms a plan uses, and whether it is divided."""
    names = "+".join(dict.fromkeys(step.algo for step in plan.steps))
    return f"in micro-batches by {names}" if plan.divided else f"by {names}"


def _some(names: Mapping[str, int]) -> str:
    """Return the names of the largest few."""
    if not names:
        return "none"
    most = sorted(names, key=lambda name: -names[name])
    more = f" and {len(most) - _SHOWN} more" if len(most) > _SHOWN else ""
    return ", ".join(most[:_SHOWN]) + more
