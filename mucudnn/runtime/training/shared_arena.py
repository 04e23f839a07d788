"""One arena that several executors use in turn.

A training step and an evaluation never run at once, so all that does not outlive
either lies in the same memory. Whoever had the arena before swaps the state out
before another gets it.
"""

from collections.abc import Sequence

from mucudnn.backends.base import Backend
from mucudnn.passes.planning.place_step import PlacedStep
from mucudnn.runtime.executor import Executor
from mucudnn.runtime.training.budget import MemoryBudget, tiers_for
from mucudnn.runtime.training.parameters import StateStore

__all__ = ["SharedArena"]


class SharedArena:
    """Executors of placed graphs, over one state and one arena.

    Args:
        backend: Computes.
        placed: The graphs.
        state: Whose parameters and state they are.
        budget: Says where what leaves the device goes; None if nothing does.

    Attributes:
        nbytes: Size of the arena.

    Raises:
        OutOfMemoryError: There is no room.
    """

    def __init__(
        self,
        backend: Backend,
        placed: Sequence[PlacedStep],
        state: StateStore,
        budget: MemoryBudget | None,
    ) -> None:
        hosts = [
            None if budget is None else tiers_for(backend.device, p, budget)
            for p in placed
        ]
        self.nbytes = max(p.layout.nbytes for p in placed)
        arena = backend.device.allocate(self.nbytes)
        self._tiers = [tiers for tiers in hosts if tiers is not None]
        self._executors = [
            Executor(
                backend,
                p.schedule,
                p.layout,
                p.plans,
                state,
                arena,
                host=host,
                host_buffers=state.host_buffers,
            )
            for p, host in zip(placed, hosts, strict=True)
        ]
        self._current: Executor | None = None

    def take(self, index: int) -> Executor:
        """The executor of one of the graphs, which may run now.

        Raises:
            ValueError: The arena is closed.
        """
        if not self._executors:
            raise ValueError(
                "this trainer is closed: its arena is freed; make another one, and "
                "hand over the weights by save_weights and load_weights"
            )
        executor = self._executors[index]
        if self._current is not executor:
            self.park()
        self._current = executor
        return executor

    def park(self) -> None:
        """Let the state be read: swap out what an executor has in the arena."""
        if self._current is not None:
            self._current.park()
        self._current = None

    def close(self) -> None:
        """Free the arena and what the host holds of it, and end what copies."""
        self.park()
        for executor in self._executors:
            executor.close()
        for tiers in self._tiers:
            tiers.close()
        self._executors, self._tiers = [], []
