"""`Trainer`: a network in training, with its parameters and its optimizer.

The graphs of the step and of the evaluation share parameters, the budget if there is
one, and one arena for all tensors that do not outlive a step.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Self

from mucudnn.arguments import (
    check_bool,
    check_choice,
    check_function,
    check_integer,
    check_type,
)
from mucudnn.ir.graph import Graph
from mucudnn.ir.optimizers import (
    DynamicLossScale,
    Optimizer,
    RateChoice,
    loss_scale_of,
    optimizer_of,
    rate_of,
)
from mucudnn.ir.schedule import PLACEMENTS, STATIC
from mucudnn.ir.sizes import format_bytes, format_count
from mucudnn.passes.graph.autodiff import LOSS_SCALE
from mucudnn.passes.graph.precision import LOSS_SCALES
from mucudnn.passes.graph.training_step import (
    StepChoices,
    StepGraphs,
    StepRecipe,
    build_step,
    can_fuse,
    check_network,
)
from mucudnn.passes.graph.updates import When
from mucudnn.passes.ordering import ORDERS, Order
from mucudnn.passes.placement.layout import PlacedStep
from mucudnn.passes.planning.cutting import WHOLE, Split
from mucudnn.runtime.distributed.collectives import Collectives
from mucudnn.runtime.profiling.profiler import OnNode
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.training.measured_choices import (
    FusionRace,
    KernelRaces,
    Layouts,
    SplitChooser,
    copies_fit,
)
from mucudnn.runtime.training.parameters import StateStore, load_weights, save_weights
from mucudnn.runtime.training.planned_steps import Plans, fixed_plans, place_steps
from mucudnn.runtime.training.ranks import PER_RANK, Ranks, check_together
from mucudnn.runtime.training.stepping import (
    Epochs,
    Evaluation,
    Evaluator,
    Stepper,
    StepResult,
    StepTimes,
    allocate_step_memory,
)
from mucudnn.runtime.tuning.tuner import Tuner

_PER_RANK_ARGUMENTS = (
    *("self", "training", "evaluation", "together", "tuner", "plans", "budget"),
    *("progress", "order", "split", "placement", "replay"),
)
"""Arguments that may differ between ranks, or that are compared in another way."""


@dataclass(frozen=True, slots=True)
class _PlannedForm:
    """One form of a step, with or without fusion, planned and placed.

    Attributes:
        graphs: Graphs of the step.
        placed: Placed graphs, the one for evaluation last.
        budget: The budget, with the profile and plan by which a split was chosen.
        plans: Convolution plans that were fixed before placement.
        races: Race -> ms of both candidates.
        chooser: The split and its alternatives.
    """

    graphs: StepGraphs
    placed: Sequence[PlacedStep]
    budget: MemoryBudget | None
    plans: Plans
    races: dict[str, tuple[float, float]]
    chooser: SplitChooser

    @property
    def step(self) -> PlacedStep:
        """The (last part of the) placed step."""
        return self.placed[len(self.graphs.steps) - 1]


class Trainer:
    """A network, its weights and its optimizer.

        with Trainer(digits(64), digits(64, training=False), tuner=Tuner(),
                     optimizer="adam", budget="64MiB") as trainer:
            fit(trainer, batches, test, epochs=5)
            trainer.save_weights("digits.safetensors")
            answers = trainer.predict(images).argmax(1)

    Args:
        training: Forward graph of `image` and `label`: the loss, and the number of
            correct answers.
        evaluation: The same network for evaluation, with the same names, or None.
        tuner: Plans the convolutions; its backend computes. `Tuner()` if not given.
        optimizer: Optimizer, its class or its name.
        learning_rate: A number, or step -> number; the optimizer's own if not given.
        order: Order of nodes: a name in `ORDERS`, or a function.
        update_when: Update a parameter as soon as its gradient is known ("early", which
            frees the gradient) or at the end ("late").
        gradient_accumulation: Number of batches of the graph in one step.
        seed: Seed of the initial weights.
        plans: Existing convolution plans; missing ones are made.
        precision: Narrow type (`float16`, `bfloat16`) of convolutions and matrix
            products, where the backend has it; the network's own if None.
        loss_scale: Factor of the loss before its gradients are computed; the usual one
            of the narrow type if None. "dynamic" or a `DynamicLossScale` adapts it: a
            step that overflows halves it and changes no weight.
        budget: Device memory for training and evaluation: a `MemoryBudget`, a size such
            as "1.5GiB", or "device" for all free memory. Without one nothing is
            offloaded.
        progress: Called for every measured node: (name, number done, total).
        split: "none", the number of batch slices of the largest layers, "height:4" for
            so many spatial tiles, or "auto" or "height" for the predicted fastest
            within the budget. Sums are then added in another order; masks, losses and
            statistics are those of the whole batch.
        fuse: Compute a ReLU, and a sum before it, within the kernel of their input, and
            likewise their gradients; equal up to rounding. Given up where the step
            fits the budget only without, or is predicted to be faster without.
        placement: "static", each tensor at one offset of the arena, or "virtual", also
            in chunks mapped to contiguous addresses, where that needs less or is
            faster.
        replay: Replay launches as CUDA graphs, where the backend can.
        together: Collective operations with other processes that train the same
            network, each on its part of a mini-batch; updates are then late, by the
            summed gradients.
        batch_norm: With other processes: "per_rank", statistics of each rank's part, or
            "synchronised", those of the whole mini-batch.
        layout: Layout of images within a step: "NCHW"; "NHWC", channels last; or
            "auto", the measured fastest for each. Weights are unaffected.

    Attributes:
        backend: Backend that computes.
        batch: Number of images in a step.
        graph: Graph of the (last part of the) step, with updates.
        plans: Plans of all convolutions.
        steps: Number of steps taken.
        peak_bytes: Peak device memory: arena, state and input buffers.
        placed: The planned and placed step; None without a budget.
        budget: The resolved budget; None without one.
        splitting: Decision about the split and its alternatives, for "auto".
        segments: Nodes of the step that run in parts.
        races: Race -> ms of both candidates, by which kernels and fusion were chosen.

    Raises:
        ValueError: The graphs do not belong together, or a name is unknown.
        PlanningError: A convolution has no plan within the limit.
        OutOfMemoryError: There is no room.
    """

    def __init__(
        self,
        training: Graph,
        evaluation: Graph | None = None,
        *,
        tuner: Tuner | None = None,
        optimizer: Optimizer | str | Callable[[], Optimizer],
        learning_rate: RateChoice | None = None,
        order: str | Order = "builder",
        update_when: When = "early",
        gradient_accumulation: int = 1,
        seed: int = 0,
        plans: Plans | None = None,
        precision: str | None = None,
        loss_scale: DynamicLossScale | float | str | None = None,
        budget: MemoryBudget | int | str | None = None,
        progress: OnNode | None = None,
        split: Split = WHOLE,
        fuse: bool = True,
        placement: str = STATIC,
        replay: bool = False,
        together: Collectives | None = None,
        batch_norm: str = PER_RANK,
        layout: str = "NCHW",
    ) -> None:
        settings = {
            name: v for name, v in locals().items() if name not in _PER_RANK_ARGUMENTS
        }
        # A tuner that is made here is closed when planning is done; a given one is not.
        own: AbstractContextManager[Any] = nullcontext()
        if tuner is None:
            own = tuner = Tuner()
        check_type("tuner", tuner, Tuner, "a mucudnn.Tuner, such as Tuner()")
        ORDERS.resolve(order)
        check_integer("seed", seed, least=0)
        check_bool("fuse", fuse)
        check_bool("replay", replay)
        if precision is not None:
            check_choice("precision", precision, LOSS_SCALES)
        check_choice("placement", placement, PLACEMENTS)
        if plans is not None:
            check_type("plans", plans, Mapping, "a mapping from problems to plans")
        if progress is not None:
            check_function("progress", progress, "a function of (name, done, total)")
        for graph in (training,) if evaluation is None else (training, evaluation):
            check_network(graph)
        if together is not None:
            # An update that ran early would use gradients that are not summed yet.
            check_together(tuner)
            update_when = "late"
        optimizer = optimizer_of(optimizer)
        self._rate = rate_of(learning_rate, optimizer.learning_rate)
        self._scale = loss_scale_of(loss_scale, LOSS_SCALES.get(precision or "", 1.0))
        if budget is not None:
            budget = MemoryBudget.of(budget, tuner.backend.device)
        self.budget = budget
        settings |= {"optimizer": optimizer, "loss_scale": self._scale}
        settings["learning_rate"] = "of each step"  # compared with every step
        self._ranks = Ranks(together, training, batch_norm, settings)
        order = self._ranks.order(order)

        recipe = StepRecipe(
            optimizer=optimizer,
            update_when=update_when,
            micro_batches=gradient_accumulation,
            precision=precision,
            loss_scale=self._scale,
            fuse=fuse,
            shared_gradients=together is not None,
        )

        def planned(recipe: StepRecipe) -> _PlannedForm:
            races = KernelRaces(tuner, budget, plans)
            chooser = SplitChooser(split, tuner, budget, order=order, progress=progress)
            choices = StepChoices(
                layout=Layouts(layout, tuner, budget, progress),
                epilogue=races.offers_epilogue,
                library=races.with_library,
                split=self._ranks.part(chooser),
                keep_copies=partial(copies_fit, tuner, budget, order),
            )
            graphs = build_step(training, recipe, choices, evaluation)
            # A split was chosen by a profile and a plan: neither is made again.
            within = budget
            if budget is not None and chooser.profile is not None:
                within = replace(budget, measured=chooser.profile, plan=chooser.plan)
            known = fixed_plans(tuner, graphs.all, within, plans)
            placed = place_steps(
                tuner,
                graphs.all,
                within,
                first=len(graphs.steps) - 1,
                order=order,
                plans=known,
                progress=progress,
                placement=placement,
            )
            return _PlannedForm(graphs, placed, within, known, races.used, chooser)

        # Ranks have budgets of their own, but agree about fusion.
        forms = [partial(planned, recipe)]
        limited = budget is not None or together is not None
        if limited and can_fuse(training, recipe):
            forms.append(partial(planned, replace(recipe, fuse=False)))
        # Without a budget no times are predicted. A study places a step in tiers only
        # once its form is chosen, so there the first form that fits is taken.
        compare = budget is not None and not budget.tiers

        factors: list[object] = [recipe, layout, order, split, placement]
        if budget is not None:
            factors += [budget.nbytes, budget.policy, budget.scheduler]
            factors.append(budget.convolutions)
        race = FusionRace(tuner, training, factors)

        def chosen() -> _PlannedForm:
            return self._ranks.fastest_form(
                forms, lambda form: form.step.plan, race, compare=compare
            )

        with own:
            form = self._ranks.plan_until_cached(tuner, chosen)
        graphs, placed = form.graphs, form.placed
        self.budget, self.plans = form.budget, form.plans
        self.races = form.races | race.known()
        self.splitting, self.segments = form.chooser.decision, form.chooser.segments
        self.backend = tuner.backend
        self.graph = graphs.steps[-1]
        self.placed = None if budget is None else form.step
        how = seed, replay, self._ranks.around
        self._state, self._arena, self.peak_bytes = allocate_step_memory(
            self.backend, graphs, placed, budget, *how
        )
        self._weights = graphs.weights
        self._stepper = Stepper(graphs, self._arena)
        tested, take = graphs.evaluation, partial(self._arena.take, -1)
        self._evaluator = None if tested is None else Evaluator(tested, take)
        self.batch = self._stepper.batch
        self.steps = 0
        self._times = StepTimes(self.backend.device)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Trainer cannot be copied or pickled, as it holds device memory; "
            "create another with the same arguments and transfer the weights with "
            "`other.state.load(trainer.state.save())`, or with a checkpoint of `fit`"
        )

    def __repr__(self) -> str:
        limit = "no budget"
        if self.budget is not None:
            limit = f"within {format_bytes(self.budget.nbytes)}"
        return (
            f"<Trainer of {self.graph.parameter_count:,} parameters, "
            f"batch {self.batch}, on {self.backend.name}, {limit}, "
            f"{format_count(self.steps, 'step')} done>"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free all memory but the state; may be called again."""
        self._arena.close()

    @property
    def state(self) -> StateStore:
        """Parameters, running statistics and optimizer state, copied out first."""
        self._arena.park()
        return self._state

    @property
    def loss_scale(self) -> float:
        """Factor of the loss in the next step."""
        if not isinstance(self._scale, DynamicLossScale):
            return self._scale
        return float(self.state.save([LOSS_SCALE])[LOSS_SCALE])

    @property
    def step_ms(self) -> float:
        """Median time of recent steps, feeding and fetching included; 0 before any.

        The first step warms up and counts only while it is the only one.
        """
        return self._times.median_ms

    @property
    def compute_ms(self) -> float:
        """Median time of recent steps without waiting for other ranks."""
        return self._ranks.compute_ms or self.step_ms

    def step(self, images: Any, labels: Any) -> StepResult:
        """Train on one batch; reading the loss waits for the device.

        Args:
            images: `batch` images, (N, C, *spatial): an array, or nested lists of
                numbers.
            labels: Classes of the images, whole numbers from 0.

        Raises:
            ValueError: A shape is wrong, or a label is out of range.
            TypeError: Images or labels are not numbers.
            BackendError: A kernel failed; the weights may be half updated.
        """
        rate, number = float(self._rate(self.steps)), self.steps
        self._ranks.begin(lambda: self.state, number, rate)
        take = partial(self._stepper.step, images, labels, rate, number)
        found = self._times.recorded(take)
        self.steps += 1
        return self._ranks.result(found, self._times)

    def check_alike(self, settings: Mapping[str, object]) -> None:
        """Raise `ValueError` where settings differ between ranks."""
        self._ranks.check_alike(settings)

    def any_rank(self, happened: bool) -> bool:
        """Return whether a condition holds on any rank; all ranks must call this."""
        return self._ranks.any_rank(happened)

    def profile(self, images: Any, labels: Any) -> tuple[dict[str, float], float]:
        """Train on one batch and time every node.

        Returns:
            Node -> ms (of the last part if there are several), and the ms of the step.
        """
        rate, number = float(self._rate(self.steps)), self.steps
        take = partial(self._stepper.profile, images, labels, rate, number)
        found = self._times.timed(take)
        self.steps += 1
        return found

    def evaluate(self, batches: Epochs) -> Evaluation:
        """Return loss and accuracy on the images of one epoch.

        Raises:
            ValueError: There is no graph for evaluation, or a shape is wrong.
        """
        return self._require_evaluator().evaluate(batches)

    def predict(self, images: Any) -> Any:
        """Return the network's answers, computed as in evaluation within the budget.

        Args:
            images: Any number of images, (n, C, *spatial): an array, or nested lists of
                numbers.

        Returns:
            A NumPy array, (n, …): the tensor that the loss compares with the labels,
            such as the logits of a classifier.

        Raises:
            ValueError: There is no graph for evaluation, or a shape is wrong.
            TypeError: Images are not numbers.
        """
        return self._require_evaluator().predict(images)

    def save_weights(self, path: Path | str) -> None:
        """Write parameters and running statistics to a safetensors file.

        The file appears completely or not at all. Any reader of the format can read it:
        `safetensors.numpy.load_file(path)` returns name -> array.

        Raises:
            CheckpointError: The file cannot be written.
        """
        save_weights(path, self.state.save(self._weights))

    def load_weights(self, path: Path | str) -> None:
        """Read weights written by `save_weights`, or by others under the same names.

        The optimizer's state is unchanged.

        Raises:
            CheckpointError: The file cannot be read or is damaged, or a tensor is
                missing, unknown, or of another shape or type; nothing is changed.
        """
        load_weights(path, self.state, self._weights)

    def _require_evaluator(self) -> Evaluator:
        if self._evaluator is None:
            raise ValueError("this trainer has no evaluation graph")
        return self._evaluator
