"""Run the graphs of a trainer in one shared arena.

A training step and an evaluation never run at the same time, so their tensors share
memory. Before another graph gets the arena, the state in it is copied out. A step is a
batch, in one part or several.
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
from mucudnn.runtime.executor.tasks import HookFactory
from mucudnn.runtime.executor.tier_choice import OpenTiers
from mucudnn.runtime.training.evaluation import as_images, as_labels, cast, read
from mucudnn.runtime.training.parameters import StateStore
from mucudnn.runtime.training.step.result import StepResult
from mucudnn.runtime.training.training_graphs import TrainingGraphs

__all__ = ["SharedArena", "Stepper"]

_PART = 40
"""Bits of the step number; parts but the last count above, for different masks."""


class SharedArena:
    """Executors of placed graphs over one state and one arena.

    Args:
        tiers: Offload targets that the graphs use in turn; without planned tiers each
            has host memory of its own.
        replay: Whether launches are replayed as graphs.
        around: Additional calls around the nodes of training graphs.
        transit: Transfers inputs and results of steps; closed with the arena.
    """

    def __init__(
        self,
        backend: Backend,
        placed: Sequence[PlacedStep],
        state: StateStore,
        tiers: OpenTiers,
        replay: bool = False,
        around: HookFactory | None = None,
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
        """Return the executor of a graph, ready to run; `ValueError` if closed."""
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
        """Copy the state out of the arena, so that it can be read."""
        if self._current is not None:
            self._current.park()
        self._current = None

    def close(self) -> None:
        """Free the arena and its host memory, and stop copy engines."""
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
        """Take step `number`; return the ms of every node of its last part."""
        nodes: dict[str, float] = {}
        for index, feeds in self._feeds(images, labels, rate, number):
            _, nodes = self._arena.take(index).run_timed(feeds)
        return nodes

    def _feeds(
        self, images: Any, labels: Any, rate: float, number: int
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the graphs to run with their inputs."""
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
