"""Allocate a trainer's memory: the persistent state, and an arena for all else."""

from collections.abc import Sequence
from dataclasses import dataclass

from mucudnn.backends.base import Backend
from mucudnn.passes.planning.place_step import PlacedStep
from mucudnn.runtime.executor.arenas import shared_bytes
from mucudnn.runtime.executor.tasks import HookFactory
from mucudnn.runtime.executor.tier_choice import OpenTiers
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.training.parameters import StateStore
from mucudnn.runtime.training.step.beside_budget import transit_of
from mucudnn.runtime.training.step.stepping import SharedArena
from mucudnn.runtime.training.training_graphs import TrainingGraphs, input_bytes

__all__ = ["StepMemory", "allocate_step_memory"]


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Allocated memory of a trainer.

    Attributes:
        nbytes: Bytes of both and of input buffers.
    """

    state: StateStore
    arena: SharedArena
    nbytes: int


def allocate_step_memory(
    backend: Backend,
    graphs: TrainingGraphs,
    placed: Sequence[PlacedStep],
    budget: MemoryBudget | None,
    seed: int,
    replay: bool,
    around: HookFactory | None,
) -> StepMemory:
    """Allocate the memory that placed steps need.

    The last training step decides about offloading. `seed` is that of the weights.
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
