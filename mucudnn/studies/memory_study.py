"""Plan a network's training step under a budget by every requested policy.

Costs are measured on the CPU. For other devices they are estimated from published
figures, except for convolutions covered by recordings. Ctrl-C ends a study with the
results so far.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from mucudnn.ir.devices import name_computing
from mucudnn.ir.graph import Graph, Role
from mucudnn.ir.profile import Profile
from mucudnn.ir.sizes import parse_bytes
from mucudnn.ir.tiers import MemoryTier
from mucudnn.models import IMAGE
from mucudnn.passes.planning.described_step import DescribedStep
from mucudnn.passes.planning.splitting.cutting import WHOLE, Split, check_split
from mucudnn.passes.residency import (
    PLANNED,
    ResidencyPolicy,
    check_policy,
    policy_names,
)
from mucudnn.passes.scheduling import SCHEDULERS, Scheduler
from mucudnn.runtime.executor.tier_choice import TierChoice, parse_tiers
from mucudnn.runtime.profiling.tier_rates import forecast_tiers
from mucudnn.studies.costed_step import costed_step, with_layouts
from mucudnn.studies.memory_findings import MemoryStudy, StepSpec
from mucudnn.studies.memory_tiers import over_links
from mucudnn.studies.memory_trials import MemoryTrials
from mucudnn.studies.step_costs import CPU

__all__ = ["CPU", "MemoryStudy", "StepSpec", "study_memory"]


def study_memory(
    step: Graph | StepSpec | DescribedStep,
    *,
    policies: Sequence[str | ResidencyPolicy] | None = None,
    schedulers: Sequence[str | Scheduler] = (),
    budget: int | str | None = None,
    device: str | None = None,
    curve: bool = False,
    max_batch: bool = False,
    min_budget: bool = False,
    profile: Profile | None = None,
    recordings: Sequence[str] = (),
    progress: Callable[[str, int, int], None] | None = None,
    split: Split = WHOLE,
    tiers: str | TierChoice | Sequence[str | TierChoice] = (),
) -> MemoryStudy:
    """Plan a training step by every policy and scheduler.

    What does a step of ResNet-18 take on an H100, and what does half of that cost?::

        network = mucudnn.models.get_model("resnet18")(batch=32)
        study = mucudnn.study_memory(network, budget="500MiB", device="h100")
        study.unbounded.peak_bytes, study.minimum
        study.best.policy, study.slowdown(study.best)

    Args:
        step: A network with its loss, a `StepSpec`, or a step of another framework with
            its own costs.
        policies: Names in `policy_names()`, or functions; by default all of them.
        schedulers: Names in `SCHEDULERS`, or functions; by default each policy's own.
        budget: Bytes, or "1.5GiB"; by default the memory of the device.
        device: `cpu`, or a name in `DEVICES`; by default the step's own. A step in half
            precision uses the device's figures for it.
        curve: Whether to plan for several budgets, too.
        max_batch: Whether to search the largest mini-batch of every policy.
        min_budget: Whether to search the minimum feasible budget of every policy.
        profile: Measured profile of the step; required for the CPU.
        recordings: Files with measurements of the device, used instead of estimates for
            the convolutions they cover.
        progress: Called with the current activity, the work done, and its total.
        split: Whether the step may run in slices of its batch, as one more technique:
            "none", "auto", the number of parts of its largest layers, "height" for
            spatial strips, or "height:4" for so many; not on the CPU, where it would
            have to be measured.
        tiers: Offload targets: `host`, `disk:FOLDER`, `peer:DEVICE`, each optionally
            with `=SIZE` and `@RATE` in bytes per second; by default all free memory and
            the measured or published rate. The best step's tensors fill the fastest
            first. Without tiers, host memory is unlimited.

    Raises:
        TypeError: The step is neither a graph nor a `StepSpec`.
        ValueError: A name is unknown, a size out of range, the profile missing, the
            graph cannot be trained, or recordings do not cover the step.
        BackendUnavailableError: A recording is missing or invalid.
    """
    described = isinstance(step, DescribedStep)
    if described and (device, profile, recordings) != (None, None, ()):
        raise ValueError("a described step has its costs: give no others")
    spec = step if isinstance(step, DescribedStep) else _as_spec(step, device)
    if max_batch and isinstance(spec, StepSpec) and isinstance(spec.model, Graph):
        raise ValueError(
            f"max_batch needs other batches than {spec.batch}, and a graph has one; "
            "pass StepSpec(model=…, batch=…) with a name or a function of the batch"
        )
    if policies is None:
        policies = sorted(policy_names(), key=PLANNED.__eq__)  # the slowest last
    for policy in policies:
        check_policy(policy)
    for scheduler in schedulers:
        SCHEDULERS.resolve(scheduler)
    check_split(split)
    if split != WHOLE and described:
        raise ValueError("a described step is not split: it runs as it is captured")
    if split != WHOLE and spec.device == CPU:
        raise ValueError(
            "a step in parts has to be measured on the CPU: Trainer(…, split='auto')"
        )
    choices = parse_tiers(tiers)
    nbytes = None if budget is None else parse_bytes(budget)
    say = progress or (lambda what, done, total: None)
    say("building the step", 0, 1)
    if isinstance(spec, StepSpec):
        spec = with_layouts(_use_precision_figures(spec), recordings)
    costed = costed_step(spec, profile, recordings, say)
    found: tuple[MemoryTier, ...] = ()
    if choices:
        profile = costed.step.profile
        found = forecast_tiers(choices, profile, measured=spec.device == CPU)
        costed = over_links(costed, found)
    asked = policies, schedulers, nbytes, say, split, found
    return MemoryTrials(spec, costed, *asked).run(
        curve=curve, max_batch=max_batch, min_budget=min_budget
    )


def _as_spec(step: object, device: str | None) -> StepSpec:
    if isinstance(step, StepSpec):
        return step if device is None else replace(step, device=device)
    if not isinstance(step, Graph):
        raise TypeError(
            f"a step is a Graph or a StepSpec, got {step!r}; networks are made with "
            "mucudnn.models.get_model(NAME)(batch)"
        )
    found = [spec.name for spec in step.with_role(Role.INPUT)]
    if IMAGE not in found:
        raise ValueError(
            f"the graph has the inputs {', '.join(found) or 'none'}; {IMAGE!r} is "
            "wanted, whose first axis is the batch"
        )
    if step.gradients:
        raise ValueError(
            "the graph computes gradients already; pass the network with its loss"
        )
    spec = StepSpec(model=step, batch=step.tensors[IMAGE].shape[0])
    return spec if device is None else replace(spec, device=device)


def _use_precision_figures(spec: StepSpec) -> StepSpec:
    """Select the device's figures for the step's precision."""
    if spec.precision is None or spec.device == CPU:
        return spec
    return replace(spec, device=name_computing(spec.device, spec.precision))
