"""`mpiexec -n N mucudnn train …`: which part of each batch this process takes."""

import contextlib
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from mucudnn.cli.app import BadInputError
from mucudnn.cli.train_options import AUTO, EQUAL
from mucudnn.ir.fleet import Fleet, Rank, StepPoint
from mucudnn.ir.graph import Graph
from mucudnn.models import IMAGE, LABEL
from mucudnn.passes.fleet import (
    equal_shares,
    replanned,
    share_times,
    split_batch,
)
from mucudnn.passes.fleet.sizes import measured_table

if TYPE_CHECKING:
    from mucudnn.cli.train_data import Work
    from mucudnn.runtime.distributed.collectives import Collectives
    from mucudnn.runtime.tuning.tuner import Tuner

__all__ = ["Group", "group_of", "step_ms"]

_STEPS = 3


class Group:
    """This process and the others.

    Args:
        together: What they do together.

    Attributes:
        together: What they do together.
        leads: Whether this one prints and writes for all.
        history: Shares that were trained with, the last the present ones.
    """

    def __init__(self, together: "Collectives") -> None:
        self.together = together
        self.leads = together.rank == 0
        self.history: list[tuple[int, ...]] = []
        self._fleet: Fleet | None = None

    @contextlib.contextmanager
    def ends_together(self) -> Iterator[None]:
        """Around everything: an error of one process ends all, with one line."""
        try:
            yield
        except (Exception, KeyboardInterrupt) as e:
            if isinstance(e, click.exceptions.Exit):
                raise
            words = e.format_message() if isinstance(e, click.ClickException) else e
            line = " ".join(str(words).split()) or type(e).__name__
            click.echo(f"mucudnn: error: rank {self.together.rank}: {line}", err=True)
            self.together.abort(line)

    def part(self, work: "Work", made: Callable[[int], "Work"], shares: Any) -> "Work":
        """The work of this process.

        Args:
            work: Of all, in one process.
            made: Samples -> the work with graphs of so many.
            shares: As `parse_shares` has them; numbers for "auto" are measured before.

        Raises:
            BadInputError: The shares are not one a process, or not the batch together.
        """
        from mucudnn.data import Loader
        from mucudnn.data.part import PartOfBatches

        loader, size, rank = work.batches, self.together.size, self.together.rank
        assert isinstance(loader, Loader), "the work is still of one process"
        batch = loader.batch
        if len(shares) != size or sum(shares) != batch:
            raise BadInputError(
                f"--shares {','.join(map(str, shares))} are {len(shares)} of "
                f"{sum(shares)} images together; {size} processes share {batch}"
            )
        self.history.append(tuple(shares))
        start = sum(shares[:rank])
        own = made(shares[rank])
        batches = PartOfBatches(loader, start, start + shares[rank])
        return replace(own, batches=batches)

    def shares(
        self, asked: Any, batch: int, measure: Callable[[int], float]
    ) -> tuple[int, ...]:
        """Samples of each process, as asked for or as all can end together.

        Args:
            asked: As `parse_shares` has it.
            batch: Samples of all.
            measure: Samples -> ms that a step takes in this process.

        Raises:
            BadInputError: There are fewer samples than processes.
        """
        size = self.together.size
        if batch < size:
            raise BadInputError(f"--batch {batch} is less than {size} processes")
        if asked not in (AUTO, EQUAL):
            return tuple(asked)
        most = batch - size + 1
        if asked == EQUAL or size == 1:
            measure = float
        table = measured_table("cpu", 1, most, lambda n: StepPoint(n, measure(n)))
        found = self.together.all_gather(table)
        fleet = Fleet(tuple(Rank(f"rank {i}", t) for i, t in enumerate(found)))
        if asked == EQUAL:
            return equal_shares(fleet, batch).samples
        self._fleet = fleet
        return split_batch(fleet, batch, at_least=1).samples

    def shares_now(self, own_ms: float) -> tuple[int, ...] | None:
        """Other shares, where processes have left their tables and it pays; else None.

        Args:
            own_ms: What a step of this one's share takes now; 0 if that is not known.
        """
        if self._fleet is None:
            return None
        shares = self.history[-1]
        rank = self.together.rank
        times = share_times(self._fleet.ranks[rank], shares[rank])
        factor = own_ms / times.time_ms(shares[rank]) if own_ms else 1.0
        factors = self.together.all_gather(factor)
        found = replanned(self._fleet, shares, factors, at_least=1)
        return None if found is None else found.samples


def step_ms(graph: Graph, tuner: "Tuner", settings: Mapping[str, Any]) -> float:
    """What a step of a network takes in this process, others running beside it."""
    import numpy as np

    from mucudnn.runtime.training.trainer import Trainer

    images = np.zeros(graph.tensors[IMAGE].shape, graph.tensors[IMAGE].dtype)
    labels = np.zeros(graph.tensors[LABEL].shape, "int64")
    with Trainer(
        graph,
        tuner=tuner,
        optimizer=settings["optimizer"],
        learning_rate=0.0,
        update_when="late",
        fuse=not settings["no_fuse"],
        layout=settings["layout"],
    ) as trainer:
        times = [trainer.profile(images, labels)[1] for _ in range(_STEPS)]
    return statistics.median(times)


def group_of(settings: Mapping[str, Any]) -> Group | None:
    """The processes that `mpiexec` started; None if this one is alone.

    Raises:
        BadInputError: The options are for one process.
        BackendUnavailableError: mpi4py or an MPI library is missing.
    """
    from mucudnn.runtime.environment import launched_processes

    if launched_processes() < 2:
        return None
    from mucudnn.runtime.distributed.mpi import MpiCollectives

    for name in ("budget", "accumulate", "split"):
        if settings[name] not in (None, 1, "none"):
            raise BadInputError(f"--{name} is for one process, and there are several")
    return Group(MpiCollectives())
