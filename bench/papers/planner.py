"""What our planner makes of the papers' networks: every byte counted, times estimated.

Bytes are what a step takes on the device: parameters, momentum, gradients, the batch,
activations and workspaces, each rounded up to 512. Times are estimates from the
device's published figures, so only ratios stand here: a step's time over that of the
same step with all the memory it could use, the papers' "oracle".
"""

from dataclasses import dataclass, replace
from typing import Any

from bench.papers.cases import Case, cases
from bench.papers.superneurons import MIB
from mucudnn.errors import PlanningError
from mucudnn.ir.graph import Graph
from mucudnn.ir.profile import Profile
from mucudnn.passes.estimate import estimate
from mucudnn.passes.graph.training_step import build_step
from mucudnn.passes.planning.plan_step import minimum_budget, plan_step, unbounded
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.residency import PLANNED
from mucudnn.passes.scheduling.step_plan import StepPlan
from mucudnn.studies.memory_results import StepSpec


@dataclass(frozen=True, slots=True)
class Estimated:
    """A training step with momentum on a described device.

    Attributes:
        graph: The step.
        profile: Its estimated costs.
        unbounded: The step with all the memory it could use.
    """

    graph: Graph
    profile: Profile
    unbounded: StepPlan

    @property
    def sizes(self) -> dict[str, float]:
        """What it needs at the least and at the most, in MiB."""
        least = minimum_budget(StepRequest(self.graph, self.profile))
        return {
            "least_mib": least / MIB,
            "unbounded_mib": self.unbounded.peak_bytes / MIB,
        }

    def within(
        self, budget: int, policy: str = PLANNED, scheduler: str | None = None
    ) -> dict[str, Any]:
        """What a policy makes of it within a budget. Ready for JSON.

        Args:
            budget: Bytes.
            policy: A name in `policy_names()`.
            scheduler: A name in `SCHEDULERS`; if not given, the policy's own choice.
        """
        row: dict[str, Any] = {"policy": policy, "asked": scheduler or "any"}
        try:
            plan = plan_step(
                StepRequest(
                    self.graph,
                    self.profile,
                    budget=budget,
                    policy=policy,
                    scheduler=scheduler,
                )
            )
        except PlanningError:
            needs = minimum_budget(StepRequest(self.graph, self.profile, policy=policy))
            return row | {
                "scheduler": scheduler,
                "fits": False,
                "peak_mib": needs / MIB,
                "step_ms": None,
                "slowdown": None,
                "moved_out_mib": None,
                "recomputed_nodes": None,
            }
        ms = plan.prediction.step_ms
        return row | {
            "scheduler": plan.scheduler,
            "fits": True,
            "peak_mib": plan.peak_bytes / MIB,
            "step_ms": ms,
            "slowdown": ms / self.unbounded.prediction.step_ms,
            "moved_out_mib": plan.prediction.out_bytes / MIB,
            "recomputed_nodes": plan.recomputed,
        }


def estimated(model: str, batch: int, image: int, device: str) -> Estimated:
    """A step on a device.

    Args:
        model: As `get_model` knows it.
        batch: Images in a step.
        image: Their height and width.
        device: A name in `DEVICES`.
    """
    graph = unfused_step(model, batch, image)
    profile = estimate(graph, device)
    return Estimated(graph, profile, unbounded(graph, profile))


def unfused_step(model: str, batch: int, image: int) -> Graph:
    """A training step with momentum, a node per layer as in the papers."""
    spec = StepSpec(model=model, batch=batch, image=image)
    recipe = replace(spec.recipe, fuse=False)
    return build_step(spec.network(), recipe, spec.choices).steps[-1]


def plan_all() -> list[dict[str, Any]]:
    """Every case by our planner and by the paper's policy. Ready for JSON."""
    return [plan(case) for case in cases()]


def plan(case: Case) -> dict[str, Any]:
    """One of them."""
    image = case.network.data[1]
    step = estimated(case.model, case.batch, image, case.device)
    return {
        "name": case.name,
        "paper": case.paper,
        "network": case.network.name,
        "model": case.model,
        "batch": case.batch,
        "image": image,
        "device": case.device,
        "at": case.at,
        "budget_mib": case.budget / MIB,
        **step.sizes,
        "planned": step.within(case.budget),
        "theirs": step.within(case.budget, case.policy),
    }
