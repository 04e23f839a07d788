"""From a lowered PyTorch step to a planned program: one road for every face.

    train_step, memory          capture -> LoweredStep.of_captured --.
                                                                      >-- plan_program
    backend                     AOTAutograd -> LoweredStep.of_joint --'

`plan_program` measures the step (or its parts), plans it within a budget, and binds its
convolutions and copies. What becomes of the program is the face's own: `train_step`
binds one step, `backend` two halves, `memory` only reads the plan.
"""

import gc
import math
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Literal

import torch

from mucudnn.arguments import check_bool
from mucudnn.errors import MucudnnError, PlanningError, UnsupportedError
from mucudnn.ir.devices import get_device
from mucudnn.ir.graph import Phase
from mucudnn.ir.profile import MemoryTier, Profile
from mucudnn.ir.sizes import exact_bytes
from mucudnn.passes.liveness import rounded
from mucudnn.passes.planning.cutting import AUTO, WHOLE, Split, check_split
from mucudnn.runtime.executor.tiers import TierChoice, parse_tiers
from mucudnn.runtime.tuning.tuner import Tuner
from mucudnn.torch.capture.joint import Joint
from mucudnn.torch.capture.optimizers import with_updates
from mucudnn.torch.capture.step import CapturedStep
from mucudnn.torch.capture.step_tensors import StepParts
from mucudnn.torch.conv.fronts import ConvolutionChoice
from mucudnn.torch.costs.measure import (
    KnownCosts,
    allocations_of_nodes,
    estimated,
    measured,
)
from mucudnn.torch.execution.cuda_memory import library_bytes, reserve
from mucudnn.torch.execution.devices import autocast_off, device_of
from mucudnn.torch.execution.tiers import StepTiers, TierCopies
from mucudnn.torch.inductor.sizes import CompiledSizes
from mucudnn.torch.lowering.lower import lower
from mucudnn.torch.lowering.lowered import Lowered, NotCompiledError
from mucudnn.torch.optimizer_update import EagerUpdate
from mucudnn.torch.plan import TorchPlan
from mucudnn.torch.plan_store import PlanCacheChoice, PlanStore, open_plans
from mucudnn.torch.planning import Planner, too_small
from mucudnn.torch.splitting.plan import SplitCandidates, split_candidates

Face = Literal["train_step", "backend", "memory"]
"""A public function that takes options of planning."""


@dataclass(frozen=True)
class Refusal:
    """A combination of options that a face refuses.

    Attributes:
        unless: An option with which they can be combined; empty if there is none.
    """

    faces: tuple[Face, ...]
    options: tuple[str, ...]
    reason: str
    instead: str
    unless: str = ""


REFUSALS = (
    Refusal(
        faces=("train_step", "backend"),
        options=("tiers",),
        unless="budget",
        reason=(
            "tiers are targets of offloading, and nothing is offloaded without a budget"
        ),
        instead="pass budget=SIZE",
    ),
    Refusal(
        faces=("train_step",),
        options=("split", "inductor"),
        reason=(
            "Inductor compiles whole steps, and a divided step runs operation by "
            "operation"
        ),
        instead="use only one of them",
    ),
    Refusal(
        faces=("backend",),
        options=("split",),
        reason=(
            "each micro-batch runs forward and backward before the next one "
            "begins, and autograd runs the whole forward pass before the backward "
            "pass"
        ),
        instead="mucudnn.torch.train_step(…, split=…) plans both as one step",
    ),
    Refusal(
        faces=("backend",),
        options=("offload_state",),
        reason="parameters would be on the host while the optimizer, which is not part "
        "of a compiled graph, updates them",
        instead="mucudnn.torch.train_step(…, offload_state=True) plans the update, too",
    ),
)
"""Every combination of options that is refused when a face is constructed.

What only a graph or its device can tell is refused when it is captured or planned.
"""


@dataclass(frozen=True)
class PlanOptions:
    """Options of measuring and planning a PyTorch step.

    Attributes:
        costs: Measures or estimates times and scratch memory of a graph's nodes.
        plans: Remembered measurements and plans.
        choice: Whether convolutions may run in other ways than PyTorch's.
        offload_state: Whether parameters and optimizer state may be host-resident.
        split: Whether the step runs in slices of its batch, or strips of its images.
        inductor: Whether the passes are compiled by Inductor, and planned by kernels.
        tiers: Offload targets: their memory, or for a study their forecast of a
            profile; None for the host's memory.
        together: Bytes of gradients up to which CUDA updates parameters by one call.
        alone: Whether one rank makes the step; several rule further options out.
        compiled: What Inductor compiled, for all sizes.
    """

    costs: Callable[[Lowered], Profile] = measured
    plans: PlanStore = field(default_factory=PlanStore)
    choice: ConvolutionChoice = field(default_factory=ConvolutionChoice)
    offload_state: bool = False
    split: Split = WHOLE
    inductor: bool = False
    tiers: StepTiers | Callable[[Profile], tuple[MemoryTier, ...]] | None = None
    together: float = 0.0
    alone: bool = True
    compiled: CompiledSizes = field(
        default_factory=CompiledSizes, compare=False, repr=False
    )

    @classmethod
    def of(
        cls,
        face: Face,
        budget: float = math.inf,
        *,
        tuner: Tuner | None = None,
        cache: PlanCacheChoice = None,
        offload_state: bool = False,
        split: Split = WHOLE,
        inductor: bool = False,
        tiers: str | TierChoice | Sequence[str | TierChoice] = (),
    ) -> "PlanOptions":
        """Check the arguments of a face, alone and together, and make options of them.

        Raises:
            ValueError: One is invalid, or the face cannot combine them.
            TypeError: One is of another type.
        """
        choices, plans = parse_tiers(tiers), open_plans(cache)
        check_split(split)
        options = {
            "budget": None if math.isinf(budget) else budget,
            "tuner": tuner,
            "offload_state": check_bool("offload_state", offload_state) or None,
            "split": None if split == WHOLE else split,
            "inductor": check_bool("inductor", inductor) or None,
            "tiers": tiers if choices else None,
        }
        given = {n: v for n, v in options.items() if v is not None}
        for refusal in REFUSALS:
            if (
                face in refusal.faces
                and given.keys() >= set(refusal.options)
                and refusal.unless not in given
            ):
                words = " and ".join(f"{n}={given[n]!r}" for n in refusal.options)
                raise ValueError(f"{words}: {refusal.reason}; {refusal.instead}")
        # Steps of `train_step` run one at a time, so their plans share memory in tiers.
        shared = face == "train_step"
        return cls(
            plans=plans,
            choice=ConvolutionChoice(tuner),
            offload_state=offload_state,
            split=split,
            inductor=inductor,
            tiers=StepTiers(choices, shared=shared) if choices else None,
        )


@dataclass(frozen=True)
class LoweredStep:
    """A lowered step, and what planning has to know beside its graph.

    Attributes:
        lowered: The graph, without updates in place.
        caller_inputs: Its inputs that the caller holds: no budget counts them.
        names: Names of all its inputs, in order; those of the batch begin with
            `batch.`. Empty if it cannot be split.
        finish: Returns the graph, whole or split, with its updates in place.
        update: The update that the optimizer makes itself, behind the graph.
        known_bytes: Bytes that computing inputs of the graph takes beside all inputs.
        compiled: Compiles the passes by Inductor, and returns the graph with their
            kernels as nodes, given what was compiled before, and whether a tuner may
            plan convolutions.
        planners: What plans it, by options: it is measured once, for all budgets.
        threads: How many threads compute it: autograd's has workspaces of its own.
        together: Bytes of gradients that may be updated together; 0 to update one
            tensor at a time.
        known: Costs of nodes that were measured, for other forms of the graph.
        pieces: In which order they allocate on CUDA, by `call_key`.
    """

    lowered: Lowered
    caller_inputs: Collection[str]
    names: Sequence[str] = ()
    finish: Callable[..., Lowered] = lambda lowered: lowered
    update: EagerUpdate | None = None
    known_bytes: int = 0
    compiled: Callable[..., Lowered] | None = None
    planners: dict[PlanOptions, Planner] = field(default_factory=dict, repr=False)
    threads: int = 1
    together: int = 0
    known: KnownCosts = field(default_factory=KnownCosts, repr=False)
    pieces: dict[Any, Sequence[tuple[int, int]]] = field(
        default_factory=dict, repr=False
    )

    @classmethod
    def of_joint(cls, joint: Joint, own: Sequence[int]) -> "LoweredStep":
        """Lower AOTAutograd's joint graph.

        `own` are its inputs that are parameters or buffers; the caller has all others.
        """
        lowered = joint.lowered(own)
        counted = {lowered.inputs[i] for i in own}
        given = {t for t in lowered.inputs if t is not None} - counted
        return cls(lowered, given, compiled=partial(joint.compiled, own), threads=2)

    @classmethod
    def of_captured(
        cls,
        captured: CapturedStep,
        parts: StepParts,
        update: EagerUpdate | None = None,
    ) -> "LoweredStep":
        """Lower a captured step; `update` is the optimizer's own, if not captured."""

        def phase_of(node: str) -> Phase:
            if node in captured.forward:
                return Phase.FORWARD
            return Phase.BACKWARD if node in captured.backward else Phase.UPDATE

        lowered = lower(captured.module, phase_of)
        inputs = {
            name: tensor
            for name, tensor in zip(captured.names, lowered.inputs, strict=True)
            if tensor is not None
        }
        # Buffers change behind the backward pass, which may read their old values.
        late = frozenset(inputs[name] for name in parts.buffers if name in inputs)
        batch = [tensor for name, tensor in inputs.items() if name.startswith("batch.")]
        finish = partial(with_updates, late=late)
        computed = [inputs[name] for name in inputs if name.startswith("known.")]
        known = sum(rounded(lowered.graph.tensors[name].nbytes) for name in computed)

        @cache  # on several ranks the step asks for its own form, and so does planning
        def compiled(sizes: CompiledSizes, *, tuned: bool) -> Lowered:
            # Inductor is imported where it is used: that takes seconds.
            from mucudnn.torch.inductor.kernel_graph import lower_step

            own = len(parts.parameters) + len(parts.buffers)
            with autocast_off():  # casts are in the graph
                return lower_step(captured, own, sizes, tuned=tuned)

        together = 0
        if captured.updates_many and device_of(lowered.layouts).type == "cuda":
            together = sum(p.nbytes for p in parts.parameters.values())
            finish = partial(with_updates, late=late, together=0.0)
        return cls(
            *(lowered, batch, captured.names, finish, update),
            known_bytes=max(0, captured.known_bytes - known),
            compiled=compiled,
            together=together,
        )

    def planner(self, options: PlanOptions) -> Planner:
        """Return what plans the whole step.

        Raises:
            UnsupportedError: The options do not work on its device.
        """
        self._check_device(options)
        key = replace(options, split=WHOLE)
        if key not in self.planners:
            # The same costs serve a step whose state may leave and one whose may not.
            other = self.planners.get(replace(key, offload_state=not key.offload_state))
            if other is not None:
                self.planners[key] = replace(other, offload_state=key.offload_state)
            elif options.inductor and self.compiled is not None:
                tuned = options.choice.tuner is not None
                lowered = self.compiled(options.compiled, tuned=tuned)
                self.planners[key] = self._measure(options, lowered)
            else:
                self.planners[key] = self._measure(options, self.lowered)
        return self.planners[key]

    def plan(
        self, options: PlanOptions, budget: float, *, advise: bool = False
    ) -> tuple[Planner, TorchPlan]:
        """Plan the graph, whole or split or compiled, and return what planned it.

        On CUDA the budget includes cuBLAS's workspaces, and if a plan allows it what
        the allocator reserves beyond the peak. With `advise`, a refusal on CUDA names
        the bytes that are reserved for the least budget.

        Raises:
            PlanningError: The step does not fit; the message names the minimum budget.
        """
        device = device_of(self.lowered.layouts)
        held = self.held_bytes(options)
        try:
            options, planner, plan = self._plan(options, max(0.0, budget - held))
        except PlanningError as e:
            if not held or e.least_bytes is None:
                raise
            least = e.least_bytes + held
            more = self._advise_reserved(options, least, held) if advise else ""
            raise too_small(
                f"the step does not fit into {exact_bytes(int(budget))}, of which "
                f"{exact_bytes(held)} are cuBLAS's workspaces: the least budget that "
                f"works is {exact_bytes(least)}{more}",
                *(budget, least, e.node),
            ) from None
        if device.type != "cuda":
            return planner, plan
        on_cuda = partial(replace, budget=budget, library_bytes=held, device=device)
        if options.costs is not measured:
            return planner, on_cuda(plan)  # nothing runs
        return self._plan_reserved(options, (planner, on_cuda(plan)))

    def _advise_reserved(self, options: PlanOptions, least: int, held: int) -> str:
        """Name the bytes that are reserved within the least budget; empty if no more.

        Empty, too, if the device does not have them.
        """
        options = replace(options, together=0.0)
        with suppress(PlanningError, torch.OutOfMemoryError):
            planner, plan = self._plan_grouped(options, least - held)
            device = device_of(self.lowered.layouts)
            plan = replace(plan, budget=least, library_bytes=held, device=device)
            _, plan = self._plan_reserved(options, (planner, plan), least - held)
            if plan.reserved_bytes > least:
                return (
                    "; PyTorch's allocator reserves more for it, and stays within "
                    f"{exact_bytes(plan.reservable_budget)}"
                )
        return ""

    def _plan_reserved(
        self,
        options: PlanOptions,
        first: tuple[Planner, TorchPlan],
        least: float = 0,
    ) -> tuple[Planner, TorchPlan]:
        """Plan again until the bytes that CUDA's allocator reserves fit the budget.

        A GPU runs out of reserved memory. Gaps differ from plan to plan, so the next
        plan's peak is what the last one's gaps leave of the budget, and at last the
        least peak. Where a plan that fits is slower than one that does not, plans
        between the two are tried.

        The first plan, made by the options, is within the budget in requested bytes; no
        plan is known to have less than the `least` peak.

        Returns:
            The fastest plan that fits; if none does, the one that reserves least.
        """
        of_budget = first[1]
        budget, held = of_budget.budget, of_budget.library_bytes
        tried: list[tuple[Planner, TorchPlan]] = []

        def reserved(planner: Planner, plan: TorchPlan) -> int:
            return _reserve(planner, plan, budget - plan.peak_bytes, self.pieces)

        def rehearse(planner: Planner, plan: TorchPlan) -> TorchPlan:
            plan = replace(
                plan, budget=budget, library_bytes=held, device=of_budget.device
            )
            if all(planner is not one for one, _ in tried):
                gc.collect()  # what is freed later leaves holes that are not rehearsed
            gaps = reserved(planner, plan)
            tried.append((planner, replace(plan, fragmentation_bytes=gaps)))
            return tried[-1][1]

        last = rehearse(*first)
        while last.reserved_bytes > budget and last.peak_bytes - held > least:
            rest = budget - held - last.fragmentation_bytes
            rest = max(least, rest) if len(tried) < _REPLANS else least
            try:
                last = rehearse(*self._plan_grouped(options, rest))
            except PlanningError as e:
                if options.together:  # gradients that are updated together wait
                    options = replace(options, together=0.0)
                elif e.least_bytes is not None:
                    least = e.least_bytes
                else:
                    break
        enough = last.reserved_bytes + _SEGMENT

        def fastest() -> tuple[Planner, TorchPlan] | None:
            fit = [one for one in tried if one[1].reserved_bytes <= budget]
            return min(fit, key=lambda one: _step_ms(one[1]), default=None)

        found = fastest()
        for _ in range(_BETWEEN if found and len(tried) > 1 else 0):
            assert found is not None
            over = [plan for _, plan in tried if plan.reserved_bytes > budget]
            high = min(over, key=lambda plan: plan.peak_bytes)
            if _step_ms(found[1]) <= _NEAR * _step_ms(high):
                break
            middle = (found[1].peak_bytes + high.peak_bytes) / 2 - held
            rehearse(*self._plan_grouped(options, middle))
            found = fastest()
        if found is None:
            planner, plan = min(tried, key=lambda one: one[1].reserved_bytes)
            found = planner, replace(plan, reservable_budget=enough)
        planner, plan = found
        if plan.plan is not tried[-1][1].plan:
            plan = replace(plan, fragmentation_bytes=reserved(planner, plan))
            if plan.reserved_bytes > budget:  # holes have other addresses now
                enough = max(enough, plan.reserved_bytes + _SEGMENT)
                plan = replace(plan, reservable_budget=enough)
        return planner, plan

    def held_bytes(self, options: PlanOptions) -> int:
        """Return the bytes of cuBLAS's workspaces; 0 for a step that is not run."""
        if options.costs is not measured:
            return 0
        device = device_of(self.lowered.layouts)
        return library_bytes(self.lowered, device, self.threads)

    def _plan(
        self, options: PlanOptions, budget: float
    ) -> tuple[PlanOptions, Planner, TorchPlan]:
        """Plan the graph within what the libraries leave of a budget.

        Parameters are updated together as far as that is the fastest. Less together
        needs less memory, for gradients that wait.
        """
        found: tuple[PlanOptions, Planner, TorchPlan] | None = None
        short_by, failed = 0, 1.0
        for share in _SHARES if self.together else (0.0,):
            if share and short_by > (failed - share) * self.together:
                continue  # fewer gradients that wait do not save as much
            grouped = replace(options, together=share * self.together)
            try:
                planner, plan = self._plan_grouped(grouped, budget)
            except PlanningError as e:
                if not share and found is None:
                    raise
                short_by, failed = e.short_by or 0, share
                continue
            if found is None or _step_ms(plan) < _step_ms(found[2]):
                found = grouped, planner, plan
            if plan.slowdown <= _NEAR:
                break  # smaller groups, each planned anew, have little to gain
        assert found is not None
        return found

    def _plan_grouped(
        self, options: PlanOptions, budget: float
    ) -> tuple[Planner, TorchPlan]:
        """Plan the graph with its updates grouped as the options say.

        What is resident leaves room for the values that are computed before a step.
        """
        known = self.known_bytes
        # The fastest plan, unless it leaves too little room.
        try:
            planner, plan = self._plan_operations(options, budget)
            before = plan.resident_bytes + known if known else 0
            if before <= budget:
                return planner, replace(plan, budget=budget, known_peak_bytes=before)
            self._plan_operations(options, 0.0)  # a refusal has the least bytes
        except PlanningError as e:
            if not known or e.least_bytes is None:
                raise
            # The tightest plan has the least state resident.
            least = e.least_bytes
            whole = self.planner(options) if options.split == WHOLE else None
            if whole is not None and whole.resident_bytes + known <= least:
                raise  # known values fit, even beside all state
            planner, plan = self._plan_operations(options, least)
            before = plan.resident_bytes + known
            if max(least, before) <= budget:
                return planner, replace(plan, budget=budget, known_peak_bytes=before)
            if before <= least:
                raise
        raise too_small(
            f"the step does not fit into {exact_bytes(int(budget))}: values that are "
            f"computed before it take {exact_bytes(known)} beside what is resident; "
            f"the least budget that works is {exact_bytes(before)}",
            *(budget, before),
        )

    def _plan_operations(
        self, options: PlanOptions, budget: float
    ) -> tuple[Planner, TorchPlan]:
        """Plan the graph itself, whole or split or compiled."""
        if (candidates := self.candidates(options)) is not None:
            return candidates.plan(budget, options.split)
        planner = self.planner(options)
        plan = planner.plan(budget, options.plans)
        if options.inductor:
            nodes = planner.lowered.graph.nodes
            kernels = sum(
                node.phase is not Phase.UPDATE and not node.traits.view
                for node in nodes
            )
            plan = replace(plan, kernels=kernels)
        return planner, plan

    def candidates(self, options: PlanOptions) -> SplitCandidates | None:
        """Return the step whole and in parts; None if it only runs whole.

        Raises:
            UnsupportedError: A number of parts was given and nothing can be cut.
        """
        if options.split == WHOLE:
            return None
        self._check_device(options)
        measure = partial(self._measure, options)
        return split_candidates(self.lowered, self.names, measure, options.split)

    def _check_device(self, options: PlanOptions) -> None:
        device = device_of(self.lowered.layouts)
        if options.offload_state and device.type != "cpu":
            raise UnsupportedError(
                "offload_state=True works on the CPU only, and the model is on "
                f"{device}; without it, the budget counts parameters and optimizer "
                "state"
            )

    def _measure(self, options: PlanOptions, lowered: Lowered) -> Planner:
        """Return a planner of the graph, or of a split one, at measured costs."""
        device = device_of(lowered.layouts)
        costs = options.costs
        if costs is measured:
            known = self.known
            if options.inductor:
                known = replace(known, links=options.compiled.links)
            costs = partial(measured, known=known)
        if self.together:
            lowered = self.finish(lowered, together=options.together)
        else:
            lowered = self.finish(lowered)
        try:
            profile = options.choice.profile(lowered, costs, options.plans)
        except RuntimeError as e:
            if isinstance(e, torch.OutOfMemoryError):
                raise
            if options.inductor:
                raise NotCompiledError(
                    f"a kernel fails for the values that it is measured with: {e}"
                ) from e
            raise UnsupportedError(
                f"an operation fails for the values that it is measured with: {e}"
            ) from e
        tiers: tuple[MemoryTier, ...] = ()
        if isinstance(options.tiers, StepTiers):
            tiers = options.tiers.measured(device)
        elif options.tiers is not None:
            tiers = options.tiers(profile)
        return Planner(
            lowered, profile, self.caller_inputs, options.offload_state, tiers
        )


_SHARES = (1.0, 0.25, 0.0)
"""Parts of all gradients that are tried as one update."""


_NEAR = 1.02
"""Slowdown of a plan from which on no smaller groups are tried."""


_REPLANS = 5
"""Plans that are made to have fewer bytes reserved, before the least is."""


_SEGMENT = 20 << 20
"""Bytes of a segment of tensors below 10 MiB: one more may be in use when a
step is planned again."""


_BETWEEN = 2
"""Plans that are made between one that fits in reserved bytes and one that does not."""


def _step_ms(plan: TorchPlan) -> float:
    return plan.plan.prediction.step_ms


def _reserve(
    planner: Planner,
    plan: TorchPlan,
    allowed: float,
    known: dict[Any, Sequence[tuple[int, int]]],
) -> int:
    """Reserve the memory of a planned step; return the bytes beyond its peak."""
    nbytes = max(0, plan.plan.peak_bytes - plan.given_bytes - plan.resident_bytes)
    lowered, workspaces = planner.lowered, planner.profile.workspaces
    pieces = allocations_of_nodes(lowered, workspaces, known)
    return reserve(lowered, plan.plan.schedule, nbytes, allowed, pieces)


@dataclass(frozen=True)
class PlannedProgram:
    """A planned step that is ready to be bound to a device.

    Attributes:
        lowered: The graph that was planned, with its convolutions as planned.
        copies: Copies to the tiers that it was planned for; None without tiers.
    """

    lowered: Lowered
    plan: TorchPlan
    copies: TierCopies | None


def plan_program(
    step: LoweredStep,
    options: PlanOptions,
    budget: float = math.inf,
    *,
    advise: bool = True,
) -> PlannedProgram:
    """Plan a step within a budget of bytes.

    With `advise`, a refusal names an option under which the step fits.

    Raises:
        PlanningError: The step does not fit; the message names the minimum budget.
        UnsupportedError: It cannot be measured; says why.
        OutOfMemoryError: There is no room in a tier.
    """
    try:
        if step.update is None:
            planner, plan = step.plan(options, budget, advise=advise)
        else:
            planner, plan = step.update.plan(budget, partial(step.plan, options))
    except PlanningError as e:
        if advise and (advice := _advise_options(step, options, budget)):
            e.args = (f"{e}; {advice}", *e.args[1:])
        raise
    lowered = options.choice.bound(planner.lowered, plan.plan)
    tiers = options.tiers
    copies = tiers.copies(plan.plan) if isinstance(tiers, StepTiers) else None
    return PlannedProgram(lowered, plan, copies)


def _advise_options(step: LoweredStep, options: PlanOptions, budget: float) -> str:
    """Name an option of `train_step` under which a refused step fits; empty if none.

    Micro-batches are not measured for this, so their scratch memory is not counted.
    """
    cpu = device_of(step.lowered.layouts).type == "cpu"
    if not step.names or not budget or options.inductor or not cpu:
        return ""  # a compiled graph, a question for the least, or neither can be had
    if options.split != WHOLE or not options.alone:
        return ""

    def fits(least: int) -> bool:
        needed = least if step.update is None else step.update.with_passes(least)
        return needed <= budget

    planner = step.planner(options)
    if not options.offload_state:
        if least_budget(step, replace(options, offload_state=True)) <= budget:
            return "it fits with offload_state=True"
        if not fits(planner.resident_bytes + step.known_bytes):
            return ""
    costs = partial(estimated, device=get_device("null"))
    auto = PlanOptions(costs, offload_state=options.offload_state, split=AUTO)
    try:
        least = least_budget(replace(step, update=None), auto)
    except MucudnnError:
        return ""
    return "it may fit with split='auto'" if fits(least) else ""


def least_budget(step: LoweredStep, options: PlanOptions) -> int:
    """Return the least budget in bytes that a step is planned in, in any allowed way.

    Raises:
        PlanningError: No budget is enough.
    """
    if options.split == WHOLE and not step.known_bytes:
        least = step.planner(options).least_budget() + step.held_bytes(options)
    else:
        try:
            least = step.plan(options, 0)[1].peak_bytes
        except PlanningError as e:
            if e.least_bytes is None:
                raise
            least = e.least_bytes
    return least if step.update is None else step.update.with_passes(least)
