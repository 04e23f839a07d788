"""Three acts that show what this is about, chosen so that any machine shows it.

1. A layer that a limit makes slow, and micro-batches make fast again.
2. A training step in a third of its memory, with the same bits.
3. The same for a PyTorch model, in `mucudnn.torch.demo`, where PyTorch is installed.

An act measures here and now; its sentence says what came of it, also if that is little.
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
from mucudnn.runtime.training.step.convolution_plans import Plans
from mucudnn.runtime.training.trainer import Trainer
from mucudnn.runtime.tuning.timing import StoppingRule, Timing, measure_together
from mucudnn.runtime.tuning.tuner import Tuner
from mucudnn.studies.conv_comparison import compare
from mucudnn.studies.outcome import Comparison
from mucudnn.suites import Layer

__all__ = ["LayerAct", "Say", "StepAct", "slow_layer", "small_step"]

Say = Callable[[str], None]
"""Is told what begins."""

LAYER = ConvProblem(
    direction=Direction.FORWARD,
    x_shape=(16, 64, 27, 27),
    w_shape=(192, 64, 5, 5),
    padding=2,
)
"""AlexNet's second: filters of 5×5, so that transforms pay and want workspace."""
_LAYER_S = 20.0
_MODEL, _BATCH = "resnet20", 32
_UNLIMITED = 1 << 40
_TURNS = StoppingRule(min_samples=8, max_samples=30, budget_ms=2500.0)
_NEAR = 0.1
"""A prediction this near needs no word about why it is not nearer."""


@dataclass(frozen=True, slots=True)
class LayerAct:
    """A convolution under a limit.

    Attributes:
        limit: Bytes of workspace.
        comparison: Undivided and planned, run in turns.
    """

    limit: int
    comparison: Comparison

    @property
    def speedup(self) -> float:
        """Undivided over planned; 1 where there is no plan."""
        return self.comparison.layers[0].outcomes[0].speedup or 1.0

    @property
    def sentence(self) -> str:
        """What came of it."""
        outcome = self.comparison.layers[0].outcomes[0]
        choice, limit = outcome.choice, format_bytes(self.limit)
        if choice is None or choice.undivided_ms is None:
            return f"Within {limit} nothing was planned: {outcome.reason}."
        undivided = (
            f"Within {limit} of workspace this convolution takes "
            f"{choice.undivided_ms:.0f} ms in one call"
        )
        if not choice.plan.divided:
            why = outcome.reason or "parts were not faster when both were run"
            return f"{undivided}, and is best left whole here: {why}."
        first = choice.plan.steps[0]
        return (
            f"{undivided}, and {choice.planned_ms:.0f} ms in {len(choice.plan.steps)} "
            f"micro-batches by {first.algo}: {self.speedup:.1f} times as fast, "
            "with the same result."
        )


def slow_layer(tuner: Tuner, say: Say) -> LayerAct:
    """Measure the layer, then run it under the limit where parts should gain most."""
    say("measuring every algorithm of a convolution at every micro-batch size")
    table = tuner.measure(LAYER, time_limit_s=_LAYER_S)
    limit = telling_limit(tuner, table)
    say(f"running it within {format_bytes(limit)}, in one call and in parts")
    layer = Layer("AlexNet conv2", table.problem)
    return LayerAct(limit, compare(tuner, [layer], [limit], time_limit_s=_LAYER_S))


def telling_limit(tuner: Tuner, table: PerfTable) -> int:
    """The workspace of the division that should gain most over one call within it.

    Calls without any workspace are the slowest there are, so limits that leave nothing
    else are taken only where there is no other.
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
    """A training step, without a budget and within one, run in turn.

    Attributes:
        name: Of the network.
        whole: The step without a limit, planned.
        plan: The step within its budget.
        budget: Bytes.
        whole_bytes: What the first had in use at most.
        peak_bytes: What the second had.
        without: Time of a step without a limit.
        within: Time of a step within the budget.
        same: Whether all losses were equal to the last bit.
        eager: Time of a step by the network's own framework, where it has one.
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
        """The planned step's time over the other's, before either was run."""
        return self.plan.prediction.step_ms / self.whole.prediction.step_ms

    @property
    def measured(self) -> float:
        """The same, as both were run."""
        return self.within.time_ms / self.without.time_ms

    @property
    def noise(self) -> float:
        """Twice the standard error of `measured`."""
        shares = (t.noise_ms / t.time_ms for t in (self.within, self.without))
        return 2 * self.measured * math.hypot(*shares)

    @property
    def sentence(self) -> str:
        """What came of it."""
        bits = "the same losses to the last bit" if self.same else "OTHER losses"
        eager = ""
        if self.eager is not None:
            times = self.without.time_ms / self.eager.time_ms
            eager = f" (without a limit: {times:.2f} of the time of PyTorch's own loop)"
        return (
            f"A training step ({self.name}) took {format_bytes(self.whole_bytes)}; "
            f"within {format_bytes(self.budget, self.peak_bytes)} it took "
            f"{format_bytes(self.peak_bytes, self.budget)} and, measured in turn, "
            f"{self.measured:.2f} ± {self.noise:.2f} times as long as without a limit, "
            f"where {self.predicted:.2f} were predicted; with {bits}{eager}."
            f"{self._difference()}"
        )

    def _difference(self) -> str:
        """Why prediction and measurement are apart, where they are."""
        apart = self.measured / self.predicted - 1
        if abs(apart) <= _NEAR:
            return ""
        if abs(self.measured - self.predicted) <= self.noise:
            return " The two differ by no more than single steps do here, just now."
        sides = "; ".join(
            f"{name} {timing.time_ms:.0f} ms where "
            f"{plan.prediction.step_ms:.0f} were predicted"
            for name, timing, plan in (
                ("within the budget", self.within, self.plan),
                ("without", self.without, self.whole),
            )
        )
        copied = self.plan.prediction.out_bytes + self.plan.prediction.in_bytes
        also = (
            f" {format_bytes(copied)} a step were copied, by the cores that compute."
            if copied and apart > 0
            else ""
        )
        return f" The two differ by {abs(apart):.0%}: {sides}.{also}"


def small_step(tuner: Tuner, say: Say) -> StepAct:
    """Train a few steps without a limit, in turn with some in a third of the memory."""
    say(f"planning {_MODEL} without a limit")
    fixed = MemoryBudget(nbytes=_UNLIMITED, convolutions="fixed")
    with _trainer(tuner, fixed, {}) as free:
        budget, unlimited = free.peak_bytes // 3, _plan_of(free)
        say(f"planning it again within {format_bytes(budget)}")
        third = replace(fixed, nbytes=budget, measured=unlimited.prediction.profile)
        # Another plan of a convolution gives other bits.
        with _trainer(tuner, third, free.plans) as bounded:
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


def _trainer(tuner: Tuner, budget: MemoryBudget, plans: Plans) -> Trainer:
    network, rate = get_model(_MODEL)(_BATCH), Momentum(0.05)
    return Trainer(network, tuner=tuner, optimizer=rate, budget=budget, plans=plans)


def _plan_of(trainer: Trainer) -> StepPlan:
    if trainer.placed is None:
        raise PlanningError("a trainer with a budget has no plan")
    return trainer.placed.plan
