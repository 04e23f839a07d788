"""The memory of a trainer: what is kept between steps, and an arena for all else."""

from collections.abc import Sequence
from dataclasses import dataclass

from mucudnn.backends.base import Backend
from mucudnn.passes.planning.place_step import PlacedStep
from mucudnn.runtime.executor.arenas import shared_bytes
from mucudnn.runtime.executor.tasks import Surrounding
from mucudnn.runtime.executor.tier_choice import OpenTiers
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.training.parameters import StateStore
from mucudnn.runtime.training.step.beside_budget import transit_of
from mucudnn.runtime.training.step.stepping import SharedArena
from mucudnn.runtime.training.training_graphs import TrainingGraphs, input_bytes

__all__ = ["StepMemory", "taken"]


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Memory that is taken.

    Attributes:
        state: Parameters, running statistics, the optimizer's state.
        arena: All that does not outlive a step.
        nbytes: Of both, and of inputs on their way.
    """

    state: StateStore
    arena: SharedArena
    nbytes: int


def taken(
    backend: Backend,
    graphs: TrainingGraphs,
    placed: Sequence[PlacedStep],
    budget: MemoryBudget | None,
    seed: int,
    replay: bool,
    around: Surrounding | None,
) -> StepMemory:
    """Take the memory that placed steps need.

    Args:
        backend: Whose memory.
        graphs: Of the trainer; the last of its steps has decided what leaves.
        placed: The same, placed.
        budget: What they are within.
        seed: Of the weights.
        replay: Whether launches are replayed as graphs.
        around: What else is called around the nodes of steps.

    Raises:
        OutOfMemoryError: There is no room.
    """
    decided = placed[len(graphs.steps) - 1]
    tiers = OpenTiers(backend.device, budget.tiers if budget else (), placed)
    hosted, there = decided.schedule.hosted, tiers.of(decided)
    state = StateStore(
        backend.device, *graphs.steps, seed=seed, hosted=hosted, tiers=there
    )
    held = shared_bytes([p.layout for p in placed]) + state.nbytes
    transit, staged = transit_of(backend, budget, held, input_bytes(graphs))
    arena = SharedArena(backend, placed, state, tiers, replay, around, transit)
    return StepMemory(state, arena, held + staged)
