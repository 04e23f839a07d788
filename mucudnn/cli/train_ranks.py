"""`mpiexec -n N mucudnn train …`: divide each batch among processes."""

import contextlib
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from mucudnn.cli.app import BadInputError
from mucudnn.cli.train_options import AUTO, EQUAL, step_arguments
from mucudnn.errors import OutOfMemoryError, PlanningError
from mucudnn.ir.fleet import Fleet, Rank, StepPoint
from mucudnn.ir.graph import Graph
from mucudnn.models import IMAGE, LABEL
from mucudnn.passes.load_balancing import (
    AskedTable,
    RankReport,
    replanned,
    share_times,
    split_batch,
)
from mucudnn.plugins import installed_version
from mucudnn.runtime.distributed.collectives import (
    Collectives,
    MpiCollectives,
    RanksDifferError,
    check_alike,
    digest_of,
)
from mucudnn.runtime.environment import launched_processes
from mucudnn.runtime.tuning.tuner import Tuner

if TYPE_CHECKING:
    from mucudnn.cli.train_data import Work

_STEPS = 3

_COMPARED = 64
"""Number of images hashed to compare the data of ranks."""

_OF_A_PROCESS = (
    *("budget", "cache_path", "disk", "tiers", "log", "tensorboard"),
    *("MUCUDNN_DATABASE", "MUCUDNN_BENCHMARK_DEVICES"),
)
"""Options and variables that may differ between processes."""


class Group:
    """The processes of a training, as seen from one of them.

    Attributes:
        together: Collective operations of the processes.
        leads: Whether this process prints and writes for all.
        history: Shares of the training so far, the current ones last.
    """

    def __init__(self, together: Collectives) -> None:
        self.together = together
        self.leads = together.rank == 0
        self.history: list[tuple[int, ...]] = []
        self._fleet: Fleet | None = None

    @contextlib.contextmanager
    def ends_together(self) -> Iterator[None]:
        """End all processes when one of them fails, with one line."""
        try:
            yield
        except (Exception, KeyboardInterrupt) as e:
            if isinstance(e, click.exceptions.Exit):
                raise
            words = e.format_message() if isinstance(e, click.ClickException) else e
            line = " ".join(str(words).split()) or type(e).__name__
            who = f"rank {self.together.rank}: "
            if isinstance(e, RanksDifferError) or isinstance(
                e.__cause__, RanksDifferError
            ):
                who = ""
                if not self.leads:  # all have this error; only the leader prints it
                    self.together.barrier()
            click.echo(f"mucudnn: error: {who}{line}", err=True)
            self.together.abort(line)

    def check_alike(self, model: str | None, settings: Mapping[str, Any]) -> None:
        """Compare the arguments and environments of all processes.

        Output locations and budgets may differ.
        """
        import numpy as np

        written = {
            f"--{name.replace('_', '-')}": value
            for name, value in settings.items()
            if name not in _OF_A_PROCESS
        }
        environment = {
            name: value
            for name, value in os.environ.items()
            if name.startswith("MUCUDNN_") and name not in _OF_A_PROCESS
        }
        versions = {
            "the version of mucudnn": installed_version(),
            "the version of NumPy": np.__version__,
        }
        check_alike(
            self.together, {"MODEL": model, **written, **environment, **versions}
        )

    def part(self, make: Callable[..., "Work"], shares: tuple[int, ...]) -> "Work":
        """Return the work of this process, its graphs made for its own share.

        `make` returns the work of a single process, or with graphs for a number of
        images. The shares must be one per process, and add up to a part of the batch.
        """
        from mucudnn.data import Loader
        from mucudnn.data.loader import PartOfBatches

        work, size, rank = make(), self.together.size, self.together.rank
        loader = work.batches
        assert isinstance(loader, Loader), "the work is still of one process"
        parts = work.words["accumulate"]
        batch = loader.batch // parts
        if len(shares) != size or sum(shares) != batch:
            each = f" in each of {parts} parts" if parts > 1 else ""
            raise BadInputError(
                f"--shares {','.join(map(str, shares))} has {len(shares)} shares of "
                f"{sum(shares)} images in total; {size} processes share {batch}{each}"
            )
        # Compare the data of all ranks by a hash of a sample.
        spread = range(0, len(loader.dataset), -(-len(loader.dataset) // _COMPARED))
        digest = digest_of(loader.dataset.read(spread))
        check_alike(self.together, {**work.words, "data": digest})
        self.history.append(shares)
        start = sum(shares[:rank])
        own = make(shares[rank])
        batches = PartOfBatches(loader, start, start + shares[rank], parts)
        return replace(own, batches=batches)

    def shares(
        self, asked: Any, batch: int, measure: Callable[[int], StepPoint]
    ) -> tuple[int, ...]:
        """Return the samples of each process, as requested or so that all end together.

        `measure` returns a step of this process, or raises `PlanningError` or
        `OutOfMemoryError` if it does not fit. If a single sample does not fit, that
        error is passed on.
        """
        size = self.together.size
        if batch < size:
            raise BadInputError(
                f"{size} processes cannot share {batch} images; name a larger --batch"
            )
        if asked == EQUAL:
            return tuple(batch // size + (i < batch % size) for i in range(size))
        if asked != AUTO:
            return tuple(asked)
        most = batch - size + 1
        unfitting = PlanningError, OutOfMemoryError
        table = AskedTable("cpu", 1, most, measure, unfitting=unfitting)
        table.ask(batch // size)
        while True:
            found = self.together.all_gather(table.report())
            shares = self._split_by_tables(found, batch)
            if all(t.knows(n) for t, n in zip(found, shares, strict=True)):
                return shares
            if not found[self.together.rank].knows(own := shares[self.together.rank]):
                table.ask(own)

    def _split_by_tables(
        self, found: Sequence[RankReport], batch: int
    ) -> tuple[int, ...]:
        """Return shares by the step tables of all processes."""
        ranks = (
            Rank(f"rank {i}", t.table, accumulates=False) for i, t in enumerate(found)
        )
        self._fleet = Fleet(tuple(ranks))
        try:
            return split_batch(self._fleet, batch, at_least=1).samples
        except PlanningError as e:
            together = sum(rank.table.most for rank in self._fleet.ranks)
            raise BadInputError(
                f"within their budgets the processes can take {together} images a "
                f"step, not {batch}; try --split auto, --accumulate or larger budgets"
            ) from e

    def shares_now(self, compute_ms: float) -> tuple[int, ...] | None:
        """Return new shares if steps drift from their tables and it pays, else None.

        `compute_ms` is the current step time of this process's share; 0 if unknown.
        """
        if self._fleet is None:
            return None
        shares = self.history[-1]
        rank = self.together.rank
        times = share_times(self._fleet.ranks[rank], shares[rank])
        factor = compute_ms / times.time_ms(shares[rank]) if compute_ms else 1.0
        factors = self.together.all_gather(factor)
        found = replanned(self._fleet, shares, factors, at_least=1)
        return None if found is None else found.samples


def step_point(graph: Graph, tuner: Tuner, settings: Mapping[str, Any]) -> StepPoint:
    """Measure a step of a network in this process, with others running beside it.

    Raises `PlanningError` or `OutOfMemoryError` if it does not fit.
    """
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
        **step_arguments(settings, tuner.backend.device),
    ) as trainer:
        times = [trainer.profile(images, labels)[1] for _ in range(_STEPS)]
        return StepPoint(len(images), statistics.median(times), trainer.peak_bytes)


def own_settings(settings: Mapping[str, Any], group: Group | None) -> Mapping[str, Any]:
    """Return the options of this process: of several budgets, its own."""
    if group is None:
        for name in ("budget", "shares"):
            if isinstance(settings[name], tuple):
                raise BadInputError(
                    f"--{name} with several values needs several processes, and this "
                    "is the only one; start them with mpiexec -n N mucudnn train …"
                )
        return settings
    budgets, size = settings["budget"], group.together.size
    if not isinstance(budgets, tuple):
        return settings
    if len(budgets) != size:
        raise BadInputError(
            f"--budget has {len(budgets)} sizes for {size} processes; give one for "
            "all, or one for each"
        )
    return {**settings, "budget": budgets[group.together.rank]}


def group_of() -> Group | None:
    """Return the processes started by `mpiexec`; None for a single process."""
    return Group(MpiCollectives()) if launched_processes() > 1 else None
