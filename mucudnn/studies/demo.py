"""Three acts that show what this is about, chosen so that any machine shows it.

1. A layer that a limit makes slow, and micro-batches make fast again.
2. A training step in a third of its memory, with the same bits.
3. The same for a PyTorch model, in `mucudnn.torch.demo`, where PyTorch is installed.

An act measures here and now; its sentence says what came of it, also if that is little.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mucudnn.errors import PlanningError
from mucudnn.ir.conv import ConvPlan, ConvProblem, Direction, PerfTable
from mucudnn.ir.sizes import format_bytes
from mucudnn.models import get_model
from mucudnn.optim import Momentum
from mucudnn.passes.microbatch import pareto_plans
from mucudnn.passes.scheduling.step_plan import StepPlan
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.training.trainer import Trainer
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
_MODEL, _BATCH, _STEPS = "resnet20", 32, 4
_UNLIMITED = 1 << 40


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
    """A training step, without a budget and within one.

    Attributes:
        name: Of the network.
        whole: The step without a limit, planned.
        plan: The step within its budget.
        budget: Bytes.
        whole_bytes: What the first had in use at most.
        peak_bytes: What the second had.
        whole_ms: A step's measured time.
        step_ms: The other's.
        same: Whether all losses were equal to the last bit.
    """

    name: str
    whole: StepPlan
    plan: StepPlan
    budget: int
    whole_bytes: int
    peak_bytes: int
    whole_ms: float
    step_ms: float
    same: bool

    @property
    def predicted(self) -> float:
        """The planned step's time over the other's, before either was run."""
        return self.plan.prediction.step_ms / self.whole.prediction.step_ms

    @property
    def sentence(self) -> str:
        """What came of it."""
        bits = "the same losses to the last bit" if self.same else "OTHER losses"
        return (
            f"A training step of {self.name} took {format_bytes(self.whole_bytes)}; "
            f"within {format_bytes(self.budget)} it took "
            f"{format_bytes(self.peak_bytes)} and {self.step_ms / self.whole_ms:.2f} "
            f"times as long (predicted: {self.predicted:.2f}), with {bits}."
        )


def small_step(tuner: Tuner, say: Say) -> StepAct:
    """Train a few steps without a limit, then the same in a third of the memory."""
    say(f"planning {_MODEL} without a limit")
    no_limit = MemoryBudget(nbytes=_UNLIMITED, convolutions="fixed")
    plans: dict[ConvProblem, ConvPlan] = {}
    unlimited, whole_bytes, whole_ms, losses = _trained(tuner, no_limit, plans, say)
    budget = whole_bytes // 3
    say(f"planning it again within {format_bytes(budget)}")
    third = MemoryBudget(
        nbytes=budget, convolutions="fixed", measured=unlimited.prediction.profile
    )
    plan, peak_bytes, step_ms, again = _trained(tuner, third, plans, say)
    return StepAct(
        name=f"{_MODEL}, {_BATCH} images of 32×32",
        whole=unlimited,
        plan=plan,
        budget=budget,
        whole_bytes=whole_bytes,
        peak_bytes=peak_bytes,
        whole_ms=whole_ms,
        step_ms=step_ms,
        same=losses == again,
    )


def _trained(
    tuner: Tuner,
    budget: MemoryBudget,
    plans: dict[ConvProblem, ConvPlan],
    say: Say,
) -> tuple[StepPlan, int, float, list[float]]:
    """A plan, the peak and the time of its steps, and their losses.

    Convolutions run by `plans`, which get what is missing: another plan is other bits.
    """
    rng = np.random.default_rng(0)
    images = rng.standard_normal((_BATCH, 3, 32, 32), dtype=np.float32)
    labels = rng.integers(0, 10, _BATCH)
    network = get_model(_MODEL)(_BATCH)
    rate = Momentum(0.05)
    with Trainer(
        network, tuner=tuner, optimizer=rate, budget=budget, plans=plans
    ) as it:
        plans.update(it.plans)
        say(f"training {_STEPS} steps of it")
        losses = [float(it.step(images, labels).loss) for _ in range(_STEPS)]
        if it.placed is None:
            raise PlanningError("a trainer with a budget has no plan")
        return it.placed.plan, it.peak_bytes, it.step_ms, losses
