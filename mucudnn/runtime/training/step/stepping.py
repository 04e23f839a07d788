"""Running the graphs of a trainer: one arena, used in turn, and the steps in it.

A training step and an evaluation never run at once, so all that does not outlive
either lies in the same memory. Whoever had the arena before swaps the state out before
another gets it. A step is a batch, in one part or several.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mucudnn.backends.base import Backend
from mucudnn.backends.transit import Transit
from mucudnn.models import IMAGE, LABEL, class_count
from mucudnn.passes.graph.optimizer_updates import LEARNING_RATE, STEP
from mucudnn.passes.planning.place_step import PlacedStep
from mucudnn.passes.planning.splitting.cutting import trains
from mucudnn.runtime.executor import Executor
from mucudnn.runtime.executor.arenas import arenas, shared_bytes
from mucudnn.runtime.executor.tasks import Surrounding
from mucudnn.runtime.executor.tier_choice import OpenTiers
from mucudnn.runtime.training.evaluation import as_images, as_labels, cast, read
from mucudnn.runtime.training.parameters import StateStore
from mucudnn.runtime.training.step.result import StepResult
from mucudnn.runtime.training.training_graphs import TrainingGraphs

__all__ = ["SharedArena", "Stepper"]

_PART = 40
"""Bits of the step's number: parts before the last count above, for other masks."""


class SharedArena:
    """Executors of placed graphs, over one state and one arena.

    Args:
        backend: Computes.
        placed: The graphs.
        state: Whose parameters and state they are.
        tiers: What the graphs use in turn of memory off the device; they have host
            memory of their own where nothing is planned.
        replay: Whether they replay their launches as graphs.
        around: What else is called around the nodes of graphs that train.
        transit: Takes inputs and results of steps; closed with the arena.

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
        tiers: OpenTiers,
        replay: bool = False,
        around: Surrounding | None = None,
        transit: Transit | None = None,
    ) -> None:
        self._tiers, self._transit = tiers, transit
        layouts = [p.layout for p in placed]
        self.nbytes = shared_bytes(layouts)
        self._executors = [
            Executor(
                backend,
                p.schedule,
                p.layout,
                p.plans,
                state,
                arena,
                host=tiers.of(p),
                host_buffers=state.host_buffers,
                replay=replay,
                transit=transit,
                around=around if trains(p.schedule.graph) else None,
            )
            for p, arena in zip(placed, arenas(backend, layouts), strict=True)
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
        self._executors = []
        self._tiers.close()
        if self._transit is not None:
            self._transit.close()


class Stepper:
    """Takes the steps of a trainer."""

    def __init__(self, graphs: TrainingGraphs, arena: SharedArena) -> None:
        self._graph = graphs.steps[-1]
        self._arena = arena
        self._last = len(graphs.steps) - 1
        self._parts = graphs.parts
        n, *image = self._graph.tensors[IMAGE].shape
        _, *rest = self._graph.tensors[LABEL].shape
        self.batch: int = n * graphs.parts
        self._image_shape = (self.batch, *image)
        self._label_shape = (self.batch, *rest)
        self._classes = class_count(self._graph)

    def step(self, images: Any, labels: Any, rate: float, number: int) -> StepResult:
        """Take step `number`; see `Trainer.step`."""
        launched = [
            self._arena.take(index).launch(feeds)
            for index, feeds in self._feeds(images, labels, rate, number)
        ]

        def found() -> tuple[float, int]:
            loss, correct = 0.0, 0
            for results in launched:
                part = read(self._graph, results.read())
                loss += part[0] / self._parts
                correct += part[1]
            return loss, correct

        return StepResult(
            found,
            lambda: all(results.ready for results in launched),
            labels=math.prod(self._label_shape),
            images=self.batch,
            learning_rate=rate,
        )

    def profile(
        self, images: Any, labels: Any, rate: float, number: int
    ) -> dict[str, float]:
        """Take step `number`; returns the ms of every node of its last part."""
        nodes: dict[str, float] = {}
        for index, feeds in self._feeds(images, labels, rate, number):
            _, nodes = self._arena.take(index).run_timed(feeds)
        return nodes

    def _feeds(
        self, images: Any, labels: Any, rate: float, number: int
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Which graph to run next, and on what."""
        images, labels = as_images(images), as_labels(labels, self._classes)
        if images.shape != self._image_shape or labels.shape != self._label_shape:
            raise ValueError(
                f"a step takes images of shape {self._image_shape} and labels of shape "
                f"{self._label_shape}, got {images.shape} and {labels.shape}"
            )
        dtype = self._graph.tensors[LEARNING_RATE].dtype
        size = self.batch // self._parts
        for part in range(self._parts):
            last = part == self._parts - 1
            rows = slice(part * size, (part + 1) * size)
            feeds = {
                IMAGE: cast(self._graph, IMAGE, images[rows]),
                LABEL: cast(self._graph, LABEL, labels[rows]),
                LEARNING_RATE: np.array(rate, dtype),
                STEP: np.array(number + (0 if last else part + 1 << _PART)),
            }
            yield (self._last if last else 0), feeds
