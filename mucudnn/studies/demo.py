"""Demonstrate mucudnn on any machine in three acts.

1. A layer that a workspace limit makes slow, and micro-batches make fast again.
2. A training step in a third of its memory, with bit-identical results.
3. The same for a PyTorch model, in `mucudnn.torch.demo`, if PyTorch is installed.

Every act measures on the spot; its sentence reports the result, also if it is small.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from mucudnn.errors import PlanningError
from mucudnn.ir.conv import ConvPlan, ConvProblem, Direction, PerfTable
from mucudnn.ir.sizes import format_bytes
from mucudnn.models import get_model
from mucudnn.optim import Momentum
from mucudnn.passes.microbatch import pareto_plans
from mucudnn.passes.scheduling.step_plan import StepPlan
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.training.planned_steps import Plans
from mucudnn.runtime.training.trainer import Trainer
from mucudnn.runtime.tuning.timing import StoppingRule, Timing, measure_together
from mucudnn.runtime.tuning.tuner import Tuner
from mucudnn.studies.convolutions import Comparison, compare
from mucudnn.suites import Layer

Say = Callable[[str], None]
"""Called with a description of each stage."""

LAYER = ConvProblem(
    direction=Direction.FORWARD,
    x_shape=(16, 64, 27, 27),
    w_shape=(192, 64, 5, 5),
    padding=2,
)
"""AlexNet's conv2: with 5×5 filters, transforms pay off and need workspace."""
_LAYER_S = 20.0
_MODEL, _BATCH = "resnet20", 32
_UNLIMITED = 1 << 40
_TURNS = StoppingRule(min_samples=8, max_samples=30, budget_ms=2500.0)
_NEAR = 0.1
"""Relative error of a prediction below which it is not explained."""


@dataclass(frozen=True, slots=True)
class LayerAct:
    """A convolution under a workspace limit: undivided and planned, run alternately."""

    limit: int
    comparison: Comparison

    @property
    def speedup(self) -> float:
        """Undivided over planned time; 1 without a plan."""
        return self.comparison.layers[0].outcomes[0].speedup or 1.0

    @property
    def sentence(self) -> str:
        """Result in words."""
        outcome = self.comparison.layers[0].outcomes[0]
        choice, limit = outcome.choice, format_bytes(self.limit)
        if choice is None or choice.undivided_ms is None:
            return f"Within {limit} nothing was planned: {outcome.reason}."
        undivided = (
            f"Within {limit} of workspace this convolution takes "
            f"{choice.undivided_ms:.0f} ms in one call"
        )
        if not choice.plan.divided:
            why = outcome.reason or "micro-batches were not faster when both were run"
            return f"{undivided}; it is not divided: {why}."
        first = choice.plan.steps[0]
        return (
            f"{undivided}, and {choice.planned_ms:.0f} ms in {len(choice.plan.steps)} "
            f"micro-batches by {first.algo}: {self.speedup:.1f} times as fast, "
            "with the same result."
        )


def slow_layer(tuner: Tuner, say: Say) -> LayerAct:
    """Measure the layer, then run it under the limit where parts gain most."""
    say("measuring every algorithm of a convolution at every micro-batch size")
    table = tuner.measure(LAYER, time_limit_s=_LAYER_S)
    limit = telling_limit(tuner, table)
    say(f"running it within {format_bytes(limit)}, in one call and in parts")
    layer = Layer("AlexNet conv2", table.problem)
    return LayerAct(limit, compare(tuner, [layer], [limit], time_limit_s=_LAYER_S))


def telling_limit(tuner: Tuner, table: PerfTable) -> int:
    """Return the limit at which a division should gain most over one call.

    Calls without any workspace are the slowest, so limits that allow no other call are
    used only as a last resort.
    """

    def gain(plan: ConvPlan) -> tuple[bool, float]:
        whole = tuner.undivided(table, plan.workspace)
        if whole is None or not plan.divided:
            return False, 0.0
        return whole.workspace > 0, whole.time_ms / plan.time_ms

    most = max((perf.workspace for perf in table.usable), default=0)
    plans = pareto_plans(table, most)
    return max(plans, key=gain).workspace if plans else most


@dataclass(frozen=True, slots=True)
class StepAct:
    """A training step without and within a budget, run alternately.

    Attributes:
        name: Name of the network.
        whole: Plan of the step without a limit.
        plan: Plan of the step within the budget.
        budget: Budget in bytes.
        whole_bytes: Peak memory of the step without a limit.
        peak_bytes: Peak memory of the step within the budget.
        without: Time of a step without a limit.
        within: Time of a step within the budget.
        same: Whether all losses are bit-identical.
        eager: Time of a step in the network's own framework, if it has one.
    """

    name: str
    whole: StepPlan
    plan: StepPlan
    budget: int
    whole_bytes: int
    peak_bytes: int
    without: Timing
    within: Timing
    same: bool
    eager: Timing | None = None

    @property
    def predicted(self) -> float:
        """Predicted slowdown of the step within the budget."""
        return self.plan.prediction.step_ms / self.whole.prediction.step_ms

    @property
    def measured(self) -> float:
        """Measured slowdown of the step within the budget."""
        return self.within.time_ms / self.without.time_ms

    @property
    def noise(self) -> float:
        """Twice the standard error of `measured`."""
        shares = (t.noise_ms / t.time_ms for t in (self.within, self.without))
        return 2 * self.measured * math.hypot(*shares)

    @property
    def sentence(self) -> str:
        """Result in words."""
        bits = "bit-identical" if self.same else "DIFFERENT"
        eager = ""
        if self.eager is not None:
            times = self.without.time_ms / self.eager.time_ms
            eager = f" Without a limit, it takes {times:.2f} of eager mode's time."
        return (
            f"A training step ({self.name}) took {format_bytes(self.whole_bytes)}; "
            f"within {format_bytes(self.budget, self.peak_bytes)} it took "
            f"{format_bytes(self.peak_bytes, self.budget)}, and {self.measured:.2f} ± "
            f"{self.noise:.2f} of the time without a limit (predicted: "
            f"{self.predicted:.2f}). Losses are {bits}.{eager}{self._difference()}"
        )

    def _difference(self) -> str:
        """Explain a difference between prediction and measurement."""
        error = self.measured / self.predicted - 1
        if abs(error) <= _NEAR:
            return ""
        if abs(self.measured - self.predicted) <= self.noise:
            return " Prediction and time differ by no more than single steps vary."
        sides = "; ".join(
            f"{name} {timing.time_ms:.0f} ms, predicted "
            f"{plan.prediction.step_ms:.0f} ms"
            for name, timing, plan in (
                ("within the budget", self.within, self.plan),
                ("without", self.without, self.whole),
            )
        )
        copied = self.plan.prediction.out_bytes + self.plan.prediction.in_bytes
        also = (
            f" The cores that compute also copied {format_bytes(copied)} in each step."
            if copied and error > 0
            else ""
        )
        return f" Prediction and time differ by {abs(error):.0%}: {sides}.{also}"


def small_step(tuner: Tuner, say: Say) -> StepAct:
    """Train alternately without a limit and in a third of the memory."""
    say(f"planning {_MODEL} without a limit")
    fixed = MemoryBudget(nbytes=_UNLIMITED, convolutions="fixed")
    with _make_trainer(tuner, fixed, {}) as free:
        budget, unlimited = free.peak_bytes // 3, _plan_of(free)
        say(f"planning it again within {format_bytes(budget)}")
        third = replace(fixed, nbytes=budget, measured=unlimited.prediction.profile)
        # Reuse the convolution plans: other plans would give other bits.
        with _make_trainer(tuner, third, free.plans) as bounded:
            say("training both in turn")
            rng = np.random.default_rng(0)
            images = rng.standard_normal((_BATCH, 3, 32, 32), dtype=np.float32)
            labels = rng.integers(0, 10, _BATCH)
            losses: tuple[list[float], list[float]] = [], []

            def run(trainer: Trainer, found: list[float]) -> None:
                found.append(float(trainer.step(images, labels).loss))

            runs = [
                partial(run, trainer, found)
                for trainer, found in zip((free, bounded), losses, strict=True)
            ]
            without, within = measure_together(runs, tuner.backend.device, _TURNS)
            return StepAct(
                name=f"{_MODEL}, {_BATCH} images of 32×32",
                whole=unlimited,
                plan=_plan_of(bounded),
                budget=budget,
                whole_bytes=free.peak_bytes,
                peak_bytes=bounded.peak_bytes,
                without=without,
                within=within,
                same=losses[0] == losses[1],
            )


def _make_trainer(tuner: Tuner, budget: MemoryBudget, plans: Plans) -> Trainer:
    network, rate = get_model(_MODEL)(_BATCH), Momentum(0.05)
    return Trainer(network, tuner=tuner, optimizer=rate, budget=budget, plans=plans)


def _plan_of(trainer: Trainer) -> StepPlan:
    if trainer.placed is None:
        raise PlanningError("a trainer with a budget has no plan")
    return trainer.placed.plan
